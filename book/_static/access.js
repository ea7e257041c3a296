// What the theme's HTML leaves out for screen readers and the keyboard.
document.addEventListener("DOMContentLoaded", () => {
  // Arrows that unfold the pages below a page have no name.
  for (const summary of document.querySelectorAll("summary:has(> .toctree-toggle)")) {
    const page = summary.closest("li")?.querySelector("a");
    if (page) summary.setAttribute("aria-label", `Pages below ${page.textContent.trim()}`);
  }
  // The bibliography calls itself a list, and its entries are none.
  for (const list of document.querySelectorAll(".citation-list[role=list]")) list.removeAttribute("role");
  // What scrolls in a box of its own can be reached and moved with the keyboard.
  for (const box of document.querySelectorAll("pre, .pst-scrollable-table-container, .cell_output .output, .drawn, mjx-container[display=true]")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  // So can tables that a script draws later.
  const reach = () => { for (const box of document.querySelectorAll(".dt-scroll-body:not([tabindex])")) box.tabIndex = 0; };
  new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
  reach();
});
