// A click on a figure opens it in full size: on a phone its labels are too small otherwise.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("main .cell_output img, main figure img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "Open the figure in full size";
    image.replaceWith(link);
    link.append(image);
  }
});
