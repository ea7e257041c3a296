"""What chapters draw of a trained model: images for a caption, captions for an image, two axes against a setting."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from toy_dataset import write_toy_dataset

from itm_lab.photos.gallery import Gallery
from itm_lab.photos.panels import FOUND, MISSED, OTHER, draw_captions_found, draw_images_found, rank_of
from itm_lab.teaching.figures import INK, draw_two_axes, method_colour, rsum_and_r1
from itm_utils.data.precomp import open_split
from itm_utils.matcher import Scores


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A gallery of six images, scores whose best caption of image i is that of image i + 1, and the drawn axes."""
    split = open_split(write_toy_dataset(tmp_path, {"train": 2, "test": 6}), "test")
    table = torch.zeros(6, 30)
    for image in range(6):
        table[image, 5 * ((image + 1) % 6)] = 2.0
        table[image, 5 * image] = 1.0
    table = table - 1e-4 * torch.arange(30)  # no ties
    axes: list[list[Axes]] = []
    monkeypatch.setattr(plt, "show", lambda: axes.append(plt.gcf().axes))
    yield split, Scores.same(table), Gallery(split), axes
    plt.close("all")


def test_images_found_stand_in_order_with_the_match_in_green(drawn) -> None:
    """Caption 10, of image 2: image 1 is first, its own second; more places than images stay empty."""
    split, scores, gallery, axes = drawn
    draw_images_found(scores, split, [10], gallery, top=4)
    draw_images_found(scores, split, [10, 0], gallery, top=8)
    colours = [to_hex(ax.spines["left"].get_edgecolor()) for ax in axes[0]]
    assert colours == [OTHER, FOUND, OTHER, OTHER]
    assert [ax.spines["left"].get_linestyle() for ax in axes[0]] == ["--", "-", "--", "--"]  # not colour alone
    assert axes[0][0].get_title("left") == f"{split.captions[10]}   (true image: place 2)"
    assert [ax.axison for ax in axes[1]] == ([True] * 6 + [False] * 2) * 2


def test_captions_found_are_the_first_five_then_the_images_own(drawn) -> None:
    split, scores, gallery, axes = drawn
    draw_captions_found(scores, split, [2], gallery)
    draw_captions_found(scores, split, [2, 3], gallery, later=False)
    texts = [(text.get_text(), to_hex(text.get_color())) for text in axes[0][1].texts]
    places, captions = texts[::2], texts[1::2]
    assert [place for place, _ in places[:2]] == ["1  ○", "2  ●"]
    assert captions[0] == (split.captions[15], OTHER) and captions[1] == (split.captions[10], FOUND)
    assert [place.split() for place, _ in places[5:]] == [
        [str(rank_of(scores.i2t[2], caption)), "●"] for caption in range(11, 15)
    ]
    assert {colour for _, colour in texts[10:]} == {MISSED}
    assert [len(ax.texts) for ax in axes[1]] == [0, 10, 0, 10]


def test_a_rank_counts_what_scores_higher() -> None:
    assert [rank_of(torch.tensor([0.2, 0.9, 0.5]), item) for item in range(3)] == [3, 1, 2]


def test_two_axes_have_the_two_numbers() -> None:
    recalls = {"rsum": 200.0, "i2t_r1": 10.0, "t2i_r1": 7.0}
    assert rsum_and_r1(recalls) == (200.0, 17.0)
    left = draw_two_axes({0.1: (200.0, 17.0), 0.4: (180.0, 20.0)}, "weight", 0.2, "MMCA")
    right = left.figure.axes[1]
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[0.1, 200.0], [0.4, 180.0]])
    np.testing.assert_array_equal(right.lines[0].get_xydata(), [[0.1, 17.0], [0.4, 20.0]])
    assert left.lines[0].get_color() == method_colour("MMCA") and right.lines[0].get_color() == INK
    assert left.lines[1].get_xdata()[0] == 0.2 and left.get_xlabel() == "weight"
    plt.close("all")
