"""An answer in lines for the screen, and as a contact sheet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from itm_lab.photos.gallery import Gallery
from itm_lab.photos.retrieve import Request, nearest_captions, nearest_images
from itm_lab.photos.search import Opened, find_captions, find_images, image_number, passing_cache
from itm_lab.photos.sheet import captions_sheet, images_sheet, save_sheet
from itm_lab.photos.word_attention import WordAttention, word_attention
from itm_lab.teaching.figures import use_style
from itm_utils.models.dcpa import InterPAM


def answer_query(
    opened: Opened, query: str, photos: Path | None, top: int, out: Path, request: Request | None = None
) -> Iterator[str]:
    """The best images for a sentence: a line each with score, name and first caption, and the sheet.

    request: the index that retrieves candidates; without one every image is scored.
    """
    gallery, split = Gallery(opened.split, photos), opened.split
    query = " ".join("".join(c if c.isprintable() else " " for c in query).split())
    with passing_cache():
        found = nearest_images(opened, request, query, top) if request else find_images(opened, query, top)
        attention = word_attention(opened, int(found.numbers[0]), found.texts, 0, query)
    yield from (f"note: {note}" for note in found.notes)
    names = [gallery.name(int(image)) for image in found.numbers]
    width = max(len(name) for name in names)
    for place, (image, score, name) in enumerate(zip(found.numbers, found.scores, names, strict=True), start=1):
        caption = split.captions[int((split.owner == image).argmax())]
        yield f"{place:3}  {score:7.3f}  {name:{width}}  {caption}"
    yield from _why_no_attention(opened, gallery, int(found.numbers[0]), attention)
    use_style()
    save_sheet(images_sheet(gallery, query, found, _drawable(gallery, int(found.numbers[0]), attention)), out)
    yield from (f"note: {note}" for note in gallery.notes)


def answer_image(
    opened: Opened, name: str, photos: Path | None, top: int, out: Path, request: Request | None = None
) -> Iterator[str]:
    """The best captions for an image: a line each with score and whether it is the image's own, and the sheet.

    request: the index that retrieves candidates; without one every caption is scored.
    """
    gallery, split = Gallery(opened.split, photos), opened.split
    image = image_number(split, name)
    found = nearest_captions(opened, request, image, top) if request else find_captions(opened, image, top)
    best = int(found.numbers[0])
    attention = word_attention(opened, image, found.texts, found.place(0), split.captions[best])
    yield from (f"note: {note}" for note in found.notes)
    own = split.owner == image
    for place, (caption, score) in enumerate(zip(found.numbers, found.scores, strict=True), start=1):
        yield f"{place:3}  {'●' if own[caption] else '○'}  {score:7.3f}  {split.captions[caption]}"
    yield f"● a caption of {gallery.name(image)}, which has {int(own.sum())}"
    yield from _why_no_attention(opened, gallery, image, attention)
    use_style()
    figure = captions_sheet(gallery, image, split.captions, own, found, _drawable(gallery, image, attention))
    save_sheet(figure, out)
    yield from (f"note: {note}" for note in gallery.notes)


def _drawable(gallery: Gallery, image: int, attention: WordAttention | None) -> WordAttention | None:
    return attention if gallery.boxes(image) is not None else None


def _why_no_attention(opened: Opened, gallery: Gallery, image: int, attention: WordAttention | None) -> Iterator[str]:
    if attention is None:
        yield f"note: {type(opened.model).__name__} has no attention of words to regions; the sheet shows the matches only"
        if isinstance(opened.model, InterPAM):
            yield f"note: this is stage two of DCPA alone; give {opened.path.parents[1]} for the sum of both, which has attention"
    elif gallery.boxes(image) is None:
        yield f"note: {opened.split.root} has no boxes, so the sheet cannot show what words attend to"
