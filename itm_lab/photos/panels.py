"""What a trained model finds, as chapters draw it: images for a caption, captions for an image."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from itm_lab.photos.gallery import Gallery
from itm_lab.photos.sheet import show
from itm_utils.data.precomp import PrecompSplit
from itm_utils.matcher import Scores

FOUND, MISSED, OTHER = "#2e8b57", "#b8860b", "#b22222"  # match, later match, mismatch


def rank_of(scores: Tensor, item: int) -> int:
    """Place of an item, counted from 1, when scores (n,) are sorted."""
    return 1 + int((scores > scores[item]).sum())


def draw_images_found(
    scores: Scores, split: PrecompSplit, captions: Sequence[int], gallery: Gallery, top: int = 5
) -> None:
    """Draw the ``top`` images found first for each caption, matches in green frames, others in red."""
    room = {"hspace": 0.35, "wspace": 0.06}
    size = (2.2 * top, 2.45 * len(captions))
    _, axes = plt.subplots(len(captions), top, figsize=size, layout="none", gridspec_kw=room, squeeze=False)
    for row, caption in zip(axes, captions, strict=True):
        found, owner = scores.t2i[:, caption], int(split.owner[caption])
        for ax in row[len(found) :]:
            ax.set_axis_off()
        for ax, image in zip(row, found.argsort(descending=True)[:top].tolist(), strict=False):
            show(ax, gallery, image)
            colour = FOUND if owner == image else OTHER
            dashed = "-" if owner == image else "--"  # not colour alone
            for side in ax.spines.values():
                side.set(visible=True, linewidth=3, color=colour, linestyle=dashed)
        text = f"{split.captions[caption]}   (true image: place {rank_of(found, owner)})"
        row[0].set_title(text, loc="left", fontsize=10)
    plt.show()


def draw_captions_found(
    scores: Scores, split: PrecompSplit, images: Sequence[int], gallery: Gallery, later: bool = True
) -> None:
    """Draw the five captions found first for each image. later: also its own that come after them."""
    lines = 10 if later else 5
    room = {"width_ratios": (1, 3.4), "hspace": 0.15, "wspace": 0.03}
    size = (11, 0.26 * lines * len(images)) if later else (11, 2.0 * len(images))
    _, axes = plt.subplots(len(images), 2, figsize=size, layout="none", gridspec_kw=room, squeeze=False)
    for (left, right), image in zip(axes, images, strict=True):
        show(left, gallery, image)
        right.set_axis_off()
        found, own = scores.i2t[image], np.flatnonzero(split.owner == image)
        first = found.argsort(descending=True)[:5].tolist()
        missed = sorted(set(own.tolist()) - set(first), key=lambda c: rank_of(found, c)) if later else []
        for line, caption in enumerate([*first, *missed]):
            true = split.owner[caption] == image
            colour = MISSED if line >= 5 else FOUND if true else OTHER
            mark = "●" if true else "○"  # shape, not only colour, tells them apart
            style = {"color": colour, "fontsize": 9.5, "va": "top"}
            height = 0.97 - line / lines
            right.text(0.07, height, f"{rank_of(found, caption)}  {mark}", ha="right", **style)
            right.text(0.08, height, split.captions[caption], **style)
    plt.show()
