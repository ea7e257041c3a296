"""Ranks and recalls: a slow and obvious reference, ties, NaN, folds. (The public numbers: test_parity.py.)"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from itm_lab.data.registry import coco_protocol
from itm_lab.parity.comparison import recipe_matrix
from itm_lab.records.bootstrap import bootstrap_intervals
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import (
    chance,
    ensemble,
    evaluate,
    evaluate_folds,
    five_captions_each,
    retrieval_ranks,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "eval"


@pytest.mark.slow
def test_the_recipe_cases_describe_the_matrices_that_were_measured() -> None:
    for case, key in (("given_recipe_fold5_1k", "in.seeds"), ("given_recipe_n1000", "in.seed")):
        about = json.loads((GOLDEN / f"{case}.json").read_text())
        hashes = about.get("sha256_of_each_fold") or [about["sha256_of_float32_C_order_bytes"]]
        arrays = np.load(GOLDEN / f"{case}.npz")
        for seed, expected in zip(np.atleast_1d(arrays[key]), hashes, strict=True):
            sims = recipe_matrix(arrays, int(seed))
            assert hashlib.sha256(sims.tobytes()).hexdigest() == expected


def slow_ranks(scores: np.ndarray, owner: np.ndarray) -> tuple[list[int], list[int]]:
    """One query at a time, one candidate at a time, the policy spelled out."""

    def stands_before(wrong: float, right: float) -> bool:
        return np.isnan(wrong) or wrong >= right

    i2t = []
    for image in range(len(scores)):
        own = [scores[image, c] for c in range(len(owner)) if owner[c] == image and not np.isnan(scores[image, c])]
        others = [scores[image, c] for c in range(len(owner)) if owner[c] != image]
        i2t.append(sum(stands_before(s, max(own)) for s in others) if own else len(owner))
    t2i = []
    for caption in range(len(owner)):
        right = scores[owner[caption], caption]
        others = [scores[image, caption] for image in range(len(scores)) if image != owner[caption]]
        t2i.append(len(scores) if np.isnan(right) else sum(stands_before(s, right) for s in others))
    return i2t, t2i


@st.composite
def problems(draw):
    """A small matrix with many ties and some NaN, and any number of captions an image."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    owner = np.repeat(np.arange(len(counts)), counts)
    value = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, float("nan"), float("inf"), float("-inf")])
    flat = draw(st.lists(value, min_size=len(counts) * len(owner), max_size=len(counts) * len(owner)))
    return np.array(flat, dtype=np.float32).reshape(len(counts), len(owner)), owner


@settings(max_examples=300, deadline=None)
@given(problems())
def test_ranks_equal_the_slow_reference(case) -> None:
    scores, owner = case
    ranks = retrieval_ranks(Scores.same(scores), owner)
    i2t, t2i = slow_ranks(scores, owner)
    assert ranks.i2t.tolist() == i2t
    assert ranks.t2i.tolist() == t2i


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_recall_grows_with_k_and_ignores_the_order_of_wrong_candidates(case, seed: int) -> None:
    scores, owner = case
    result = evaluate(Scores.same(scores), owner)
    for side in (result.i2t, result.t2i):
        assert 0 <= side.r1 <= side.r5 <= side.r10 <= 100
    order = np.random.default_rng(seed).permutation(len(scores))
    shuffled = scores[order]
    columns = np.concatenate([np.flatnonzero(owner == image) for image in order])
    again = evaluate(Scores.same(shuffled[:, columns]), np.repeat(np.arange(len(order)), np.bincount(owner)[order]))
    assert again.rsum == pytest.approx(result.rsum)


def test_a_constant_matrix_gets_nothing_right_and_nan_is_never_a_hit() -> None:
    owner = five_captions_each(20)
    for value in (0.5, float("nan")):
        assert evaluate(Scores.same(np.full((20, 100), value)), owner).rsum == 0
    perfect = np.zeros((20, 100))
    perfect[owner, np.arange(100)] = 1
    assert evaluate(Scores.same(perfect), owner).rsum == 600
    perfect[owner, np.arange(100)] = float("nan")
    assert evaluate(Scores.same(perfect), owner).rsum == 0


def test_directions_use_their_own_matrices() -> None:
    owner = five_captions_each(12)
    good = np.zeros((12, 60))
    good[owner, np.arange(60)] = 1
    bad = -good
    result = evaluate(Scores(i2t=torch.tensor(good), t2i=torch.tensor(bad)), owner)
    assert (result.i2t.r1, result.t2i.r1) == (100, 0)


def test_results_say_what_they_are() -> None:
    owner, size = five_captions_each(10), (10, 50)
    single = Scores.same(np.random.default_rng(0).random(size))
    both = ensemble([single, Scores.same(np.random.default_rng(1).random(size))])
    assert "single model, all 10" in str(evaluate(single, owner))
    assert "ensemble of 2, 5 folds of 2" in str(evaluate_folds(both, owner))
    assert evaluate(ensemble([both, single]), owner).models == 3


def test_only_testall_earns_the_names_of_the_papers() -> None:
    owner = np.arange(5000)
    scores = Scores.same(np.eye(5000, dtype=np.float32))
    folds, whole = evaluate_folds(scores, owner), evaluate(scores, owner)
    assert (folds.protocol, whole.protocol) == ("5 folds of 1000", "all 5000")
    assert coco_protocol(folds, "testall").protocol == "1K"
    assert coco_protocol(whole, "testall").protocol == "5K"
    first = evaluate(Scores.same(scores.i2t[:1000, :1000]), owner[:1000])
    for result, split in ((folds, "dev"), (whole, "test"), (first, "testall")):
        with pytest.raises(ItmError, match="testall"):
            coco_protocol(result, split)


def test_chance_agrees_with_random_orders() -> None:
    owner = np.repeat(np.arange(40), np.resize([5, 6, 7], 40))
    rng = np.random.default_rng(3)
    results = [evaluate(Scores.same(rng.random((40, len(owner)))), owner) for _ in range(400)]
    expected = chance(40, owner)
    for name, value in expected.as_dict().items():
        drawn = np.array([result.as_dict()[name] for result in results])
        assert abs(drawn.mean() - value) < 4 * drawn.std() / np.sqrt(len(drawn)), name
    drawn = np.array([result.i2t.mean_rank for result in results])
    assert abs(drawn.mean() - expected.i2t.mean_rank) < 4 * drawn.std() / np.sqrt(len(drawn))


def test_bootstrap_interval_holds_the_point_and_resamples_whole_images() -> None:
    rng = np.random.default_rng(5)
    owner = five_captions_each(200)
    sims = rng.random((200, 1000))
    # all five captions of half the images are found: the captions of an image stand or fall together
    sims[owner, np.arange(1000)] = np.where(owner % 2, 2.0, -1.0)
    scores = Scores.same(sims)
    ranks = retrieval_ranks(scores, owner)
    point = evaluate(scores, owner).as_dict()
    intervals = bootstrap_intervals(ranks, owner)
    for name, (low, high) in intervals.items():
        assert low <= point[name] <= high
    low, high = intervals["t2i_r1"]
    independent = 2 * 1.96 * 100 * np.sqrt(0.25 / 1000)
    assert high - low > 1.8 * independent
    assert bootstrap_intervals(ranks, owner) == intervals


@pytest.mark.parametrize(
    ("scores", "owner", "message"),
    [
        (np.zeros((2, 10)), np.repeat([0, 1], 4), "the image of each of 10 captions"),
        (np.zeros((3, 10)), np.repeat([0, 1], 5), "every image from 0 to 2 needs a caption"),
        (np.zeros((2, 4)), np.array([0, 1, 0, 1]), "captions follow their images"),
        (np.zeros(4), np.array([0]), r"\(images, captions\)"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(scores, owner, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        evaluate(Scores.same(scores), owner)


def test_folds_check_what_they_cut() -> None:
    with pytest.raises(ItmError, match="the image of each of 50 captions"):
        evaluate_folds(Scores.same(np.zeros((10, 50))), five_captions_each(10)[:48])
    with pytest.raises(ItmError, match="rows are images in both"):
        evaluate_folds(Scores(np.zeros((10, 50)), np.zeros((12, 70))), five_captions_each(10))


def test_half_precision_scores_are_ranked() -> None:
    assert evaluate(Scores.same(torch.eye(3, dtype=torch.bfloat16)), np.arange(3)).rsum == 600


def test_uneven_folds_are_refused() -> None:
    with pytest.raises(ItmError, match="equal blocks"):
        evaluate_folds(Scores.same(np.zeros((7, 35))), five_captions_each(7))


def test_counts_of_many_rows_do_not_overflow(monkeypatch) -> None:
    """Columns are counted in bytes, a block at a time: no block may have more rows than a byte can count."""
    images = 700
    owner, scores = five_captions_each(images), torch.zeros(images, 5 * images)
    scores[owner, torch.arange(5 * images)] = -1.0  # everything stands before the positive
    for block in (1, 2**20, 2**40):
        monkeypatch.setattr("itm_utils.metrics.retrieval.BLOCK_BYTES", block)
        worst = retrieval_ranks(Scores.same(scores), owner)
        assert set(worst.t2i) == {images - 1}
        best = retrieval_ranks(Scores.same(-scores), owner)
        assert set(best.t2i) == {0}
        # the own captions of an image tie with each other, which does not count
        assert (set(worst.i2t), set(best.i2t)) == ({5 * images - 5}, {0})
