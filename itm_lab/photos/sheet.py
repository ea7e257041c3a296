"""A contact sheet: the best matches, and what each word attends to in the first of them."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from itm_lab.photos.gallery import Gallery
from itm_lab.photos.search import Found
from itm_lab.photos.word_attention import WORDS_ATTEND, WordAttention, heat, words_on_boxes
from itm_lab.scenes.show import GREY, add_box, new_figure
from itm_lab.teaching import figures
from itm_lab.teaching.figures import INK, PAPER
from itm_utils.errors import input_error
from itm_utils.files import atomic

MARK = "itm search"  # what a sheet says of itself, so that a later one may take its place
WIDTH, MARGIN, GAP = 8.1, 0.15, 0.12  # inches
HOT = "#d55e00"
MOST_WORDS, LONGEST_NAME = 18, 26
WORDS_HEIGHT = 3.6  # inches
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8c6d00", "#5b3a8c")  # white letters can be read on each
DPI = 120


class Page:
    """A figure that is filled from the top. Rows are laid out first; the page is as high as they need."""

    def __init__(self, heights: Iterable[float]) -> None:
        self.height = sum(heights) + 2 * MARGIN
        self.figure = new_figure(WIDTH, self.height)
        self.top = MARGIN  # inches from the upper edge that are used

    def write(self, text: str, height: float, x: float = MARGIN, **style) -> None:
        """One line of text in a row of the given height."""
        y = 1 - (self.top + height / 2) / self.height
        style = {"color": INK, "va": "center", "parse_math": False} | style  # a $ in a name is a $
        self.figure.text(x / WIDTH, y, text, **style)
        self.top += height

    def axes(self, left: float, down: float, width: float, height: float) -> Axes:
        """Axes in inches: ``left`` from the left edge, ``down`` from what is used so far."""
        bottom = 1 - (self.top + down + height) / self.height
        return self.figure.add_axes((left / WIDTH, bottom, width / WIDTH, height / self.height))

    def columns(self, count: int) -> tuple[list[float], float]:
        """Left edges and the width of so many columns."""
        width = (WIDTH - 2 * MARGIN - (count - 1) * GAP) / count
        return [MARGIN + k * (width + GAP) for k in range(count)], width


def images_sheet(gallery: Gallery, query: str, found: Found, attention: WordAttention | None) -> Figure:
    """The best images for a sentence, four in a row, then its words over the first of them."""
    title, columns, tile = _lines(query, 85, 3), 4, 1.95
    rows = -(-len(found.numbers) // columns)
    best = int(found.numbers[0])
    page = Page([0.27 * len(title), rows * tile, _attention_height(attention), _words_height(gallery, best, attention)])
    for line in title:
        page.write(line, 0.27, fontsize=12, weight="bold")
    lefts, width = page.columns(columns)
    for place, (image, score) in enumerate(zip(found.numbers, found.scores, strict=True)):
        axes = page.axes(lefts[place % columns], 0.22, width, tile - 0.5)
        show(axes, gallery, int(image))
        axes.set_title(f"{place + 1}   {score:.3f}", loc="left", fontsize=9, color=INK, pad=3)
        name = gallery.name(int(image))
        name = name if len(name) <= LONGEST_NAME else f"…{name[-LONGEST_NAME:]}"  # the end tells images apart
        axes.set_xlabel(name, loc="left", fontsize=7.5, color=GREY, labelpad=3, parse_math=False)
        if place % columns == columns - 1:
            page.top += tile
    page.top += tile if len(found.numbers) % columns else 0
    _draw_attention(page, gallery, best, attention, "in the first image")
    _draw_words(page, gallery, best, attention)
    return page.figure


def captions_sheet(
    gallery: Gallery,
    image: int,
    captions: Sequence[str],
    own: np.ndarray,
    found: Found,
    attention: WordAttention | None,
) -> Figure:
    """An image beside the captions that fit it best (● its own), then the words of the first over the image.

    captions: all of the split. own: (c,) True for those of the image.
    """
    wrapped = [_lines(captions[int(number)], 68, 2) for number in found.numbers]
    listed = sum(0.12 + 0.19 * len(lines) for lines in wrapped)
    page = Page([0.3, max(listed, 2.75), _attention_height(attention), _words_height(gallery, image, attention)])
    page.write(gallery.name(image), 0.3, fontsize=12, weight="bold")
    show(page.axes(MARGIN, 0.05, 2.6, 2.6), gallery, image)
    start = page.top
    for number, score, lines in zip(found.numbers, found.scores, wrapped, strict=True):
        left = 2.95
        for k, line in enumerate(lines):
            if k == 0:
                mark, colour = ("●", "#009e73") if own[number] else ("○", GREY)
                page.write(mark, 0, x=left, fontsize=9, color=colour, va="top")
                page.write(f"{score:.3f}", 0, x=left + 0.2, fontsize=9, color=GREY, va="top")
            page.write(line, 0, x=left + 0.75, fontsize=9, va="top")
            page.top += 0.19
        page.top += 0.12
    page.top = start + max(listed, 2.75)
    _draw_attention(page, gallery, image, attention, "for the first caption")
    _draw_words(page, gallery, image, attention)
    return page.figure


def show(axes: Axes, gallery: Gallery, image: int, boxes: bool = False) -> None:
    """An image, or a frame with its boxes where there is none to show."""
    (width, height), pixels = gallery.size(image), gallery.pixels_of(image)
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], aspect="equal", anchor="NW")
    for spine in axes.spines.values():
        spine.set_visible(pixels is None)
    if pixels is not None:
        axes.imshow(pixels, extent=(0, width, height, 0), interpolation="antialiased")
    elif (outlines := gallery.boxes(image)) is not None:
        for x1, y1, x2, y2 in outlines:
            axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=GREY, linewidth=0.5))


def show_attention(axes: Axes, gallery: Gallery, image: int, weights: np.ndarray) -> None:
    """An image that fades where the attention of a word is low, with the region of its largest weight. weights: (r,)."""
    (width, height), boxes = gallery.size(image), gallery.boxes(image)
    assert boxes is not None  # attention is drawn over regions
    warm = heat(boxes, weights, (width, height))
    show(axes, gallery, image)
    over = {"extent": (0, width, height, 0), "interpolation": "nearest"}
    if gallery.pixels_of(image) is None:
        axes.imshow(warm, cmap=figures.WEIGHTS, vmin=0, vmax=1, alpha=0.8, zorder=0.5, **over)
    else:
        veil = np.empty((*warm.shape, 4))
        veil[..., :3], veil[..., 3] = to_rgb(PAPER), 0.82 * (1 - warm)
        axes.imshow(veil, **over)
    add_box(axes, boxes[int(weights.argmax())], HOT, 1.0)


def _in_a_row(attention: WordAttention) -> int:
    """Panels in a row: up to eight words stand in one."""
    return max(6, len(attention.words)) if len(attention.words) <= 8 else 6


def _attention_height(attention: WordAttention | None) -> float:
    return 0.0 if attention is None else 0.38 + 1.4 * -(-min(len(attention.words), MOST_WORDS) // _in_a_row(attention))


def _draw_attention(page: Page, gallery: Gallery, image: int, attention: WordAttention | None, where: str) -> None:
    """One small panel per word."""
    if attention is None:
        return
    said = "What each word attends to" if attention.way == WORDS_ATTEND else "Which regions attend to each word"
    shown = "" if len(attention.words) <= MOST_WORDS else f" (the first {MOST_WORDS} words)"
    page.write(f"{said} {where}{shown}; the share of its strongest region", 0.38, fontsize=9.5, color=GREY)
    lefts, width = page.columns(_in_a_row(attention))
    for place, (word, weights) in enumerate(list(zip(attention.words, attention.weights, strict=True))[:MOST_WORDS]):
        row, column = divmod(place, len(lefts))
        axes = page.axes(lefts[column], 1.4 * row + 0.22, width, 1.12)
        show_attention(axes, gallery, image, weights)
        title = f"{textwrap.shorten(word, 14, placeholder='…') or word[:13] + '…'}  {weights.max():.0%}"
        axes.set_title(title, loc="left", fontsize=8.5, color=INK, pad=3, parse_math=False)
    page.top += 1.4 * -(-min(len(attention.words), MOST_WORDS) // _in_a_row(attention))


def _words_height(gallery: Gallery, image: int, attention: WordAttention | None) -> float:
    return 0.0 if attention is None or gallery.kinds(image) is None else WORDS_HEIGHT


def _draw_words(page: Page, gallery: Gallery, image: int, attention: WordAttention | None) -> None:
    """The image once more, with each word on the box that it attends to most."""
    kinds, boxes = gallery.kinds(image), gallery.boxes(image)
    if attention is None or kinds is None or boxes is None:
        return
    found = words_on_boxes(attention, kinds)
    said = "Words on the boxes that they attend to most; the other words attend most to a cell or to the whole image"
    page.write(
        said if found else "No word attends most to a box: all attend to cells or to the whole image",
        0.3,
        fontsize=9.5,
        color=GREY,
    )
    (width, height), side = gallery.size(image), WORDS_HEIGHT - 0.4
    axes = page.axes(MARGIN, 0, min(WIDTH - 2 * MARGIN, side * width / height), side)
    show(axes, gallery, image)
    for place, (region, words) in enumerate(found.items()):
        colour = COLOURS[place % len(COLOURS)]
        add_box(axes, boxes[region], colour, 1.6)
        x1, y1 = boxes[region][:2]
        label = textwrap.shorten(" ".join(words), 30, placeholder=" …")
        style = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
        # inside the upper edge of its box, one below the other where boxes begin at one height
        axes.text(
            x1,
            y1 + height * 0.055 * (place % 3),
            label,
            fontsize=8,
            color="white",
            va="top",
            bbox=style,
            parse_math=False,
        )


def _lines(text: str, width: int, most: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=most, placeholder=" …") or [text[:width]]


def check_place(out: Path) -> None:
    """A sheet may take the place of an older sheet, and of nothing else."""
    if out.suffix.lower() != ".png":
        raise input_error("--out", str(out), "a name that ends with .png")
    if not out.exists():
        return
    try:
        with Image.open(out, formats=("PNG",)) as known:
            mine = known.info.get("Software") == MARK
    except OSError:
        mine = False
    if not mine:
        raise input_error(out, "a file that is no contact sheet", "a free name", "Give another --out.")


def save_sheet(figure: Figure, out: Path, dpi: int = DPI) -> None:
    """Write the sheet, whole or not at all."""
    check_place(out)
    with atomic(out) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a letter the font lacks becomes a small box
        figure.savefig(temporary, format="png", dpi=dpi, metadata={"Software": MARK})
