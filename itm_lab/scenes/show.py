"""Images of Scenes for people: families, groundings and proposals."""

from __future__ import annotations

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from itm_lab.scenes.captions import Caption
from itm_lab.scenes.draw import draw
from itm_lab.scenes.load import SceneSplit
from itm_lab.scenes.logic import is_true
from itm_lab.scenes.world import CANVAS
from itm_lab.teaching.figures import INK, PAPER

SCALE = 5  # drawn with more pixels for the eye; boxes keep the coordinates of the 96 x 96 image
GREY = "#8a8a92"
DPI = 180
PHRASE_COLOURS = ("#d55e00", "#0072b2", "#009e73")  # safe for colour-blind readers, legible on the paper
ROLE_NAMES = {
    "alone": "alone",
    "base": "base",
    "retake": "retake",
    "binding": "edit: binding",
    "count": "edit: count",
    "swap": "edit: places swapped",
    "colour": "edit: colour",
    "pattern": "edit: pattern",
    "size": "edit: size",
    "shape": "edit: shape",
}


def family_of(data: SceneSplit, number: int) -> list[int]:
    """The image first, then the rest of its family."""
    family = data.scenes[number].family
    return [number, *(k for k, s in enumerate(data.scenes) if s.family == family and k != number)]


def family_text(data: SceneSplit, members: list[int]) -> str:
    """Every caption of a family with a mark for each image it is true of."""
    lines = [f"{number}. {data.name} {k}: {ROLE_NAMES[data.scenes[k].role]}" for number, k in enumerate(members, 1)]
    lines.append("")
    for number, k in enumerate(members, 1):
        for caption in captions_of(data, k):
            true = [str(n) for n, other in enumerate(members, 1) if is_true(caption.claim, data.scenes[other])]
            lines.append(f"{number}  {caption.text}  (true of {', '.join(true)})")
    return "\n".join(lines)


def captions_of(data: SceneSplit, number: int) -> list[Caption]:
    """The five captions of an image."""
    return [data.captions[c] for c in np.flatnonzero(data.owner == number)]


def family_figure(data: SceneSplit, members: list[int], captions: int = 1) -> Figure:
    """The family side by side; below, captions of each with the images they fit."""
    columns, side, line = len(members), 1.62, 0.27  # inches
    width, height = max(8.1, side * columns), side + 0.72 + line * captions * columns  # room for a long caption
    figure = new_figure(width, height)
    for column, k in enumerate(members):
        left, bottom = (column * side + 0.05) / width, 1 - (side + 0.17) / height
        axes = figure.add_axes((left, bottom, (side - 0.1) / width, (side - 0.1) / height))
        show_image(axes, data, k)
        axes.set_title(f"{column + 1} {ROLE_NAMES[data.scenes[k].role]}", loc="left", fontsize=8.5, color=INK, pad=4)
    marks = [1 - (columns - other - 0.3) * 0.26 / width for other in range(columns)]
    top = 1 - (side + 0.36) / height
    figure.text(marks[0] - 0.2 / width, top, "true of", fontsize=8, color=GREY, ha="right", va="center")
    for other, x in enumerate(marks):
        figure.text(x, top, f"{other + 1}", fontsize=8, color=GREY, ha="center", va="center")
    rows = [(column, k, n) for column, k in enumerate(members) for n in range(captions)]
    for row, (column, k, n) in enumerate(rows):
        caption, y = captions_of(data, k)[n], top - (row + 0.85) * line / height
        figure.text(0.05 / width, y, f"{column + 1}", fontsize=9, color=GREY, va="center", weight="bold")
        write_caption(figure, 0.24 / width, y, caption, 9 if len(caption.text) < 85 else 7.5)
        for x, image in zip(marks, members, strict=True):
            mark_truth(figure, x, y, is_true(caption.claim, data.scenes[image]))
    return figure


def mark_truth(figure: Figure, x: float, y: float, true: bool) -> None:
    """A filled dot for true, an open one for false: shape, not only colour, tells them apart."""
    figure.text(
        x, y, "●" if true else "○", fontsize=10, ha="center", va="center", color="#009e73" if true else "#b9b7b0"
    )


def new_figure(width: float, height: float) -> Figure:
    """A figure on the book's paper, not tied to any window."""
    # matplotlib documents "none", and its annotation lacks it
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER, layout="none")  # pyright: ignore[reportArgumentType]
    FigureCanvasAgg(figure)  # texts are measured by the renderer that draws them
    return figure


def show_image(axes, data: SceneSplit, number: int, raw: bool = False) -> None:
    """One image: drawn large, or (``raw``) the very pixels of the dataset."""
    pixels = data.pixels[number] if raw else draw(data.scenes[number], SCALE)
    axes.imshow(pixels, extent=(0, CANVAS, CANVAS, 0), interpolation="nearest" if raw else "antialiased")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def add_box(axes, box, colour: str, width: float = 2.0, **more) -> None:
    """Outline a box in pixel coordinates, with a light halo so that it shows on every place."""
    x1, y1, x2, y2 = box
    halo = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor="white", linewidth=1.8 * width, alpha=0.6)
    axes.add_patch(halo)
    axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=width, **more))


def write_caption(figure: Figure, x: float, y: float, caption: Caption, size: float = 11) -> None:
    """A caption on one line, its noun phrases in the colours of their boxes."""
    at = 0
    pieces = []
    for phrase, colour in zip(caption.phrases, PHRASE_COLOURS, strict=False):
        pieces += [(caption.text[at : phrase.start], INK, "normal"), (phrase.text, colour, "bold")]
        at = phrase.end
    pieces.append((caption.text[at:], INK, "normal"))
    for text, colour, weight in pieces:
        figure.text(x, y, text, color=colour, weight=weight, fontsize=size, va="center")
        x += _text_width(figure, text, fontsize=size, weight=weight)


def _text_width(figure: Figure, text: str, **style) -> float:
    """Width of a text as a share of the figure; bars around it make its outer spaces count."""
    widths = []
    for sample in (f"|{text}|", "||"):
        drawn = figure.text(0, 0, sample, **style)
        widths.append(drawn.get_window_extent().width)
        drawn.remove()
    return (widths[0] - widths[1]) / (figure.get_figwidth() * figure.dpi)


def grounding_figure(data: SceneSplit, number: int, proposals: np.ndarray, caption: int = 0) -> Figure:
    """Three views of an image: one caption's phrases and boxes, the proposals, and the pixels as they are."""
    chosen = captions_of(data, number)[caption]
    figure = new_figure(8.1, 3.25)
    views = [figure.add_axes((0.012 + k * 0.332, 0.125, 0.312, 0.79)) for k in range(3)]
    titles = ("phrases and their boxes", f"{len(proposals)} proposals", "the pixels, 96 × 96")
    for axes, title in zip(views, titles, strict=True):
        show_image(axes, data, number, raw=axes is views[2])
        axes.set_title(title, loc="left", fontsize=9, color=INK, pad=4)
    for phrase, colour in zip(chosen.phrases, PHRASE_COLOURS, strict=False):
        for toy in phrase.toys:
            add_box(views[0], data.boxes[number][toy], colour, 1.9)
    for box in proposals:
        add_box(views[1], box, "#3b3b98", 0.9, alpha=0.9)
    write_caption(figure, 0.014, 0.055, chosen, 10)
    return figure
