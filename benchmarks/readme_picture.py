"""The image at the top of README: what words of one caption attend to in a drawn scene.

python -m benchmarks.readme_picture RUN      RUN: the folder of a finished run of scan/scenes/t2i_avg, or its weights
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from itm_lab.photos.gallery import Gallery
from itm_lab.photos.search import Opened, open_run
from itm_lab.photos.sheet import show, show_attention
from itm_lab.photos.word_attention import WordAttention, word_attention
from itm_lab.scenes import load_scenes
from itm_lab.scenes.captions import Caption
from itm_lab.scenes.show import captions_of
from itm_lab.teaching.figures import INK, use_style
from itm_utils.boxes import iou

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "book/img/readme_attention.png"
SHOWN = 5  # words beside the image
SIDE, GAP, HEAD = 1.72, 0.09, 0.62  # inches


def main(run: Path) -> None:
    """Take the image whose nouns attend best to their toys, and draw it."""
    opened, data = open_run(run, "scenes", "test"), load_scenes("test")
    found = []
    for image in range(len(data.scenes)):
        for caption in captions_of(data, image)[:1]:
            seen = attention_of(opened, image, caption)
            share = hits(opened, data, image, caption, seen)
            if share is not None:
                found.append((share, -len(seen.words), image, caption, seen))
    _, _, image, caption, seen = max(found, key=lambda one: one[:3])
    use_style()
    figure = draw_attention(Gallery(opened.split), image, caption, seen)
    figure.savefig(OUT, dpi=150, pil_kwargs={"optimize": True})
    print(f"{OUT.relative_to(ROOT)}: test image {image}, “{caption.text}”, {OUT.stat().st_size // 1000} KB")


def attention_of(opened: Opened, image: int, caption: Caption) -> WordAttention:
    """What the words of a caption attend to."""
    seen = word_attention(opened, image, opened.texts([caption.text]), 0, caption.text)
    assert seen is not None  # the model has attention
    return seen


def hits(opened: Opened, data, image: int, caption: Caption, seen: WordAttention) -> float | None:
    """The mean weight that nouns give to regions that show them; None for captions with fewer than two phrases."""
    nouns = [(phrase, last_word(phrase.text)) for phrase in caption.phrases]
    if len(nouns) < 2 or any(seen.words.count(noun) != 1 for _, noun in nouns):
        return None
    regions = opened.split.boxes[image]
    shares = []
    for phrase, noun in nouns:
        boxes = data.boxes[image][list(phrase.toys)]
        relevant = (iou(regions, boxes) > 0.5).any(axis=1)
        shares.append(float(seen.weights[seen.words.index(noun)][relevant].sum()))
    return min(shares)


def last_word(text: str) -> str:
    return text.split()[-1]


def draw_attention(gallery: Gallery, image: int, caption: Caption, seen: WordAttention) -> Figure:
    """The image, then one panel per noun and adjective with the regions it attends to."""
    told = [n for n, word in enumerate(seen.words) if any(word in phrase.text.split()[1:] for phrase in caption.phrases)]
    told = told[:SHOWN]
    width, height = (SIDE + GAP) * (len(told) + 1) + GAP, SIDE + HEAD
    figure = plt.figure(figsize=(width, height))

    def panel(place: int):
        axes = figure.add_axes(((GAP + place * (SIDE + GAP)) / width, 0.03, SIDE / width, SIDE / height))
        axes.set_axis_off()
        return axes

    show(first := panel(0), gallery, image)
    first.set_title("the image", fontsize=11, color=INK)
    for place, n in enumerate(told, 1):
        axes = panel(place)
        show_attention(axes, gallery, image, seen.weights[n])
        axes.set_title(f"“{seen.words[n]}”", fontsize=12, color=INK)
    figure.text(GAP / width, 1 - 0.13 / height, f"“{caption.text}”", fontsize=12.5, color=INK, va="top", style="italic")
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
