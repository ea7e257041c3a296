"""The figures of "The little world", from the dataset and from the numbers beside this script.

python -m benchmarks.scenes_figures          writes book/img/scenes_*.png
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from itm_lab.scenes import SceneSplit, load_scenes, scenes_folder
from itm_lab.scenes.draw import draw
from itm_lab.scenes.show import GREY, captions_of, family_figure, family_of, grounding_figure, new_figure, show_image
from itm_lab.scenes.world import CANVAS, COLOURS, PATTERNS, PLACES, SHAPES, UNIT, Scene, Toy
from itm_lab.teaching.figures import INK, method_colour, use_style

HERE = Path(__file__).parent
IMAGES = HERE.parent / "book" / "img"
PROBE_COLOURS = {"mean pool": method_colour("mean-pool"), "attention": method_colour("SCAN")}

FAMILY = 485  # pictures of the test split that the page shows
GROUNDED, GROUNDED_CAPTION = 22, 0
GALLERY = (54, 21, 36, 19, 35, 43, 1, 38)
GALLERY_CAPTIONS = (0, 1, 2, 3, 4, 2, 3, 4)


def read(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text(encoding="utf-8"))


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    data = load_scenes("test")
    boxes = np.load(scenes_folder() / "test_boxes.npy")
    save(toys_figure(), "toys")
    save(gallery_figure(data), "gallery")
    save(family_figure(data, in_order(data, family_of(data, FAMILY))), "family")
    save(grounding_figure(data, GROUNDED, boxes[GROUNDED], GROUNDED_CAPTION), "grounding")
    use_style()
    save(statistics_figure(read("scenes_dataset.json")), "statistics")
    save(probe_figure(read("scenes_probe.json")), "probe")
    save(knobs_figure(read("scenes_knobs.json")["changes"]), "knobs")


def save(figure, name: str) -> None:
    figure.savefig(IMAGES / f"scenes_{name}.png", pil_kwargs={"optimize": True})
    plt.close("all")


def in_order(data: SceneSplit, members: list[int]) -> list[int]:
    """Base, edits, retakes."""
    return sorted(members, key=lambda k: {"base": 0, "retake": 2}.get(data.scenes[k].role, 1))


def toys_figure():
    """Twelve shapes by four patterns; colours and places go round."""
    side, left, top = 0.62, 0.62, 0.24
    figure = new_figure(left + side * len(SHAPES) + 0.05, top + side * len(PATTERNS) + 0.05)
    width, height = figure.get_size_inches()
    for column, shape in enumerate(SHAPES):
        for row, pattern in enumerate(PATTERNS):
            bottom = height - top - (row + 1) * side
            axes = figure.add_axes(
                [(left + column * side) / width, bottom / height, 0.96 * side / width, 0.96 * side / height]
            )
            colour = COLOURS[(column + 3 * row) % len(COLOURS)]
            place = PLACES[(column + 2 * row) % len(PLACES)]
            toy = Toy(shape, colour, pattern, "big", x=48 * UNIT, y=47 * UNIT, radius=41 * UNIT)
            axes.imshow(draw(Scene((toy,), place, look=10 * row + column), 2), extent=(0, CANVAS, CANVAS, 0))
            axes.set_axis_off()
            if row == 0:
                axes.set_title(shape, fontsize=7.6, color=INK, pad=3)
            if column == 0:
                y = (bottom + side / 2) / height
                figure.text((left - 0.08) / width, y, pattern, fontsize=8.2, color=INK, ha="right", va="center")
    return figure


def gallery_figure(data: SceneSplit):
    """Eight pictures, each with one of its captions."""
    columns, side, below = 4, 1.9, 0.62  # inches
    rows = len(GALLERY) // columns
    figure = new_figure(columns * (side + 0.1), rows * (side + below))
    width, height = figure.get_size_inches()
    for n, k in enumerate(GALLERY):
        row, column = divmod(n, columns)
        left, bottom = column * (side + 0.1) + 0.05, height - row * (side + below) - side - 0.03
        axes = figure.add_axes([left / width, bottom / height, side / width, side / height])
        show_image(axes, data, k)
        lines = textwrap.fill(captions_of(data, k)[GALLERY_CAPTIONS[n]].text, 31)
        axes.text(0, CANVAS + 4, lines, fontsize=8.2, color=INK, va="top", linespacing=1.2)
    return figure


def statistics_figure(numbers: dict):
    """Toys a picture, words a caption, pictures a caption fits."""
    figure, axes = plt.subplots(1, 3, figsize=(8.2, 2.5), dpi=180, gridspec_kw={"width_ratios": [1, 1.5, 1.4]})
    statistics, oracle = numbers["statistics"], numbers["oracle"]
    toys = statistics["toys_a_picture"]
    axes[0].bar(list(toys), list(toys.values()), color="#44aa99", width=0.75)
    axes[0].set(xlabel="toys in a picture", ylabel="pictures")
    words = statistics["words_a_caption"]["counts"]
    shown = [n for n, count in enumerate(words) if count]
    axes[1].bar(shown, [words[n] for n in shown], color="#0072b2", width=0.75)
    axes[1].set(xlabel="words in a caption", ylabel="captions", xticks=shown[::2])
    fits = np.array(oracle["fits"]) / sum(oracle["fits"]) * 100
    axes[2].bar(range(1, len(fits)), fits[1:], color="#d55e00", width=0.75)
    axes[2].set(xlabel="test pictures a caption is true of", ylabel="% of captions")
    axes[2].set_xticks(range(1, len(fits)), [*map(str, range(1, len(fits) - 1)), f"{len(fits) - 1}+"])
    axes[2].annotate(
        f"mean {oracle['ambiguity']:.2f}", (0.97, 0.93), xycoords="axes fraction", ha="right", va="top", color=INK
    )
    for panel in axes:
        panel.grid(axis="x", visible=False)
    return figure


def probe_figure(numbers: dict):
    """Six recalls of both probes, one dot a seed, and the oracle's ceiling as a bar."""
    figure, axes = plt.subplots(figsize=(7.8, 3.0), dpi=180)
    recalls = ["i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10"]
    for x, recall in enumerate(recalls):
        top = numbers["ceiling"][recall]
        axes.plot([x - 0.36, x + 0.36], [top, top], color=INK, linewidth=2.2, label="oracle" if x == 0 else None)
        for shift, (probe, colour) in zip((-0.14, 0.14), PROBE_COLOURS.items(), strict=True):
            values = numbers[probe][recall]
            spread = x + shift + np.linspace(-0.06, 0.06, len(values))
            axes.plot(spread, values, "o", color=colour, markersize=6, alpha=0.9, label=probe if x == 0 else None)
    labels = [f"{'image to text' if r[0] == 'i' else 'text to image'}\nR@{r.split('r')[-1]}" for r in recalls]
    axes.set_xticks(range(6), labels)
    axes.set(ylabel="%", ylim=(0, 104))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower right", ncols=3)
    return figure


def knobs_figure(numbers: dict):
    """One row a knob: both probes and the ceiling."""
    figure, axes = plt.subplots(figsize=(7.8, 0.9 + 0.38 * len(numbers)), dpi=180)
    for row, result in enumerate(numbers.values()):
        top = result["ceiling"]["rsum"]
        values = {probe: float(np.mean(result[probe]["rsum"])) for probe in PROBE_COLOURS}
        axes.plot([min(values.values()), top], [row, row], color="#d9d5cb", linewidth=2, zorder=1)
        for probe, colour in PROBE_COLOURS.items():
            axes.plot(values[probe], row, "o", color=colour, markersize=8, label=probe if row == 0 else None)
        axes.plot(top, row, "|", color=INK, markersize=15, markeredgewidth=2.4, label="oracle" if row == 0 else None)
        axes.text(645, row, f"{result['ambiguity']:.1f}", va="center", ha="right", fontsize=9, color=GREY)
    axes.text(645, -0.75, "pictures\na caption fits", va="bottom", ha="right", fontsize=8.5, color=GREY)
    axes.set(yticks=range(len(numbers)), yticklabels=list(numbers), ylim=(len(numbers) - 0.5, -0.6))
    axes.set(xlabel="rsum (sum of six recalls, at most 600)", xlim=(0, 650), xticks=range(0, 601, 100))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", ncols=3, bbox_to_anchor=(0, 1.0))
    return figure


if __name__ == "__main__":
    main()
