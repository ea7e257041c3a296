"""Intervals: against slow loops, printed tables of Student's t, and their own promise to cover the truth."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from itm_lab.evidence.statistics import (
    binomial_halfwidth,
    largest_disagreement,
    paired_bootstrap,
    paired_seeds,
    seed_interval,
)
from itm_lab.publish.uncertainty_page import our_runs, published_gaps, uncertainty_fragment
from itm_lab.records.bootstrap import bootstrap_intervals
from itm_lab.records.receipts import Evidence, make_receipt, write_receipt
from itm_utils.errors import ItmError
from itm_utils.metrics.retrieval import Ranks, five_captions_each, summarise

IMAGES = 60
OWNER = five_captions_each(IMAGES)


def some_ranks(seed: int, easy: float = 1.0) -> Ranks:
    rng = np.random.default_rng(seed)
    return Ranks(i2t=rng.geometric(0.3 * easy, IMAGES) - 1, t2i=rng.geometric(0.2 * easy, 5 * IMAGES) - 1)


def recall(ranks: Ranks, metric: str, images: np.ndarray) -> float:
    """The obvious way: look at the drawn images one by one."""
    side, k = metric[:3], int(metric[5:])
    if side == "i2t":
        return 100 * np.mean([ranks.i2t[image] < k for image in images])
    return 100 * np.mean([ranks.t2i[c] < k for image in images for c in np.flatnonzero(image == OWNER)])


@pytest.mark.parametrize("metric", ["i2t_r1", "t2i_r5"])
def test_paired_bootstrap_is_a_loop_over_drawn_images(metric: str) -> None:
    a, b, samples = some_ranks(1, 1.3), some_ranks(2), 40
    draws = np.random.default_rng(7).multinomial(IMAGES, np.full(IMAGES, 1 / IMAGES), size=samples)
    drawn = [np.repeat(np.arange(IMAGES), counts) for counts in draws]
    differences = [recall(a, metric, images) - recall(b, metric, images) for images in drawn]
    found = paired_bootstrap(a, b, OWNER, metric, level=0.9, samples=samples, seed=7)
    everything = np.arange(IMAGES)
    assert found.value == pytest.approx(recall(a, metric, everything) - recall(b, metric, everything))
    assert found[1:] == pytest.approx(np.percentile(differences, (5, 95)))


def test_paired_bootstrap_of_a_run_with_itself_is_nothing_and_changes_sign() -> None:
    a, b = some_ranks(1), some_ranks(2)
    assert paired_bootstrap(a, a, OWNER) == (0, 0, 0)
    there, back = paired_bootstrap(a, b, OWNER), paired_bootstrap(b, a, OWNER)
    assert there == pytest.approx((-back.value, -back.high, -back.low))
    assert there.value == pytest.approx(summarise(a, "").rsum - summarise(b, "").rsum)


def test_pairing_cancels_what_is_hard_for_both() -> None:
    a = some_ranks(1)
    almost = Ranks(i2t=np.where(np.arange(IMAGES) < 3, 0, a.i2t), t2i=a.t2i)
    paired = paired_bootstrap(almost, a, OWNER, "i2t_r1")
    unrelated = paired_bootstrap(some_ranks(3), a, OWNER, "i2t_r1")
    assert paired.halfwidth < 0.6 * unrelated.halfwidth


def test_student_t_is_the_printed_table() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}
    ladders = {n: np.arange(n + 1.0) for n in table}  # the halfwidth is t times the standard error
    scales = {n: runs.std(ddof=1) / np.sqrt(n + 1) for n, runs in ladders.items()}
    assert {n: round(seed_interval(runs).halfwidth / scales[n], 3) for n, runs in ladders.items()} == table
    assert round(seed_interval(ladders[4], 0.99).halfwidth / scales[4], 3) == 4.604


def test_seed_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    for runs in (3, 5):
        hits = [low <= 0 <= high for _, low, high in (seed_interval(rng.normal(size=runs), 0.9) for _ in range(2000))]
        assert np.mean(hits) == pytest.approx(0.9, abs=0.025)


def test_paired_seeds_uses_the_pairs() -> None:
    spread = np.array([0.0, 40.0, -30.0])
    found = paired_seeds(spread + np.array([1.0, 1.1, 0.9]), spread)
    assert found == pytest.approx(seed_interval([1.0, 1.1, 0.9]))
    assert found.low > 0 > paired_seeds(spread + 1, [0.0, 0.0, 0.0]).low


def test_a_gap_stands_out_exactly_up_to_the_largest_disagreement() -> None:
    queries, gap = 1000, 20  # 20 more hits: 2 points
    limit = largest_disagreement(100 * gap / queries, queries)
    for only_one in range(gap, 400, 2):  # queries that exactly one model gets right
        difference = np.zeros(queries)
        difference[: (only_one + gap) // 2] = 1
        difference[(only_one + gap) // 2 : only_one] = -1
        half = 1.959964 * difference.std() / np.sqrt(queries)
        assert (difference.mean() > half) == (100 * only_one / queries < limit), only_one
    assert 100 * gap / queries < limit < 40  # both answers occurred


def test_the_interval_of_a_printed_recall() -> None:
    assert binomial_halfwidth(50, 1000) == pytest.approx(1.959964 * 50 / np.sqrt(1000), rel=0.01)
    assert binomial_halfwidth(100, 1000) > 0  # a perfect score on a sample is not certainty
    rng = np.random.default_rng(2)
    hits = 100 * rng.binomial(1000, 0.75, size=4000) / 1000
    assert np.mean(np.abs(hits - 75) <= binomial_halfwidth(75, 1000)) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_bootstrap(some_ranks(1), Ranks(np.zeros(3), np.zeros(15)), OWNER), "ranks_b.*3 images.*60"),
        (lambda: paired_bootstrap(some_ranks(1), some_ranks(2), OWNER[:-5]), "ranks_a.*60 images.*59 and 295"),
        (lambda: paired_bootstrap(some_ranks(1), some_ranks(2), OWNER, "r1"), "metric.*i2t_r1"),
        (lambda: paired_bootstrap(some_ranks(1), some_ranks(2), OWNER, level=95), "level.*0.95"),
        (lambda: paired_seeds([1, 2, 3], [1, 2]), "3 and 2 runs"),
        (lambda: paired_seeds([1], [2]), "at least two"),
        (lambda: seed_interval([]), "at least two"),
        (lambda: seed_interval([1.0, float("nan")]), "finite"),
        (lambda: binomial_halfwidth(101, 1000), "percent"),
    ],
)
def test_bad_input_gets_one_clear_line(call, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        call()


# ---- the page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = yaml.load((ROOT / "book/data/published_tables.yaml").read_bytes(), Loader=yaml.CSafeLoader)["papers"]


def test_the_page_compares_methods_with_their_closest_competitors() -> None:
    gaps = list(published_gaps(RESULTS))
    chosen = {(gap.paper, gap.data, gap.method): gap for gap in gaps}
    assert len(chosen) == len(gaps)
    best = chosen["DCPA", "F30K", "DCPA Full-Model BERT"]
    assert (best.rival, best.images) == ("WCGL", 1000)  # GSMN and SAN are better, but use external knowledge
    assert chosen["CCR/CCS", "F30K", "SGRAF CCR+CCS"].rival == "SGRAF"
    assert chosen["CCR/CCS", "COCO 1K", "PFAN CCR+CCS"].images == 1000  # marked as one split of 1,000
    assert chosen["AOQ", "COCO 5K", "VSRN + AdapOffQuin (Eq. 5)"].images == 5000
    assert {gap.paper for gap in gaps} == {"MMCA", "DCPA", "AOQ", "CCR/CCS"}


def test_the_page_is_computed_from_the_tables() -> None:
    text = uncertainty_fragment(SimpleNamespace(results=RESULTS, receipts={}))
    gaps = list(published_gaps(RESULTS))
    inside = sum(
        abs(g.ours["i2t_r1"] - g.theirs["i2t_r1"]) <= binomial_halfwidth(g.ours["i2t_r1"], g.images) for g in gaps
    )
    assert f"**image to text R@1**: {inside} of {len(gaps)} gaps" in text
    assert 0 < inside < len(gaps)
    assert text.count("<circle") == len(gaps)
    assert text.count('fill="none"') == inside
    assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{40,}"', text)
    assert "No variant has receipts" in text


def test_the_page_shows_both_intervals_of_our_runs(tmp_path: Path) -> None:
    receipts: dict = {}
    for variant, easy in (("good", 1.5), ("poor", 1.0)):
        for seed in (5, 6, 7):
            ranks = some_ranks(seed, easy)
            receipt = make_receipt(
                chapter="03_bfan", variant=variant, seed=seed, dataset={"name": "scenes", "split": "test", "fingerprint": "0" * 64},
                parameters={}, metrics=summarise(ranks, "").as_dict(), intervals=bootstrap_intervals(ranks, OWNER),
                protocol=f"all {IMAGES}", seconds=1.0, device="cpu", evidence=Evidence.of([ranks], OWNER),
            )  # fmt: skip
            path = write_receipt(receipt, tmp_path, Evidence.of([ranks], OWNER))
            receipts.setdefault(("03_bfan", variant, "scenes"), {})[seed] = (path, receipt)
    text = "\n".join(our_runs(SimpleNamespace(receipts=receipts)))
    good, poor = ([summarise(some_ranks(seed, easy), "").rsum for seed in (5, 6, 7)] for easy in (1.5, 1.0))
    assert f"| 03_bfan | good | scenes | 3 | {np.mean(good):.1f} | ± {seed_interval(good).halfwidth:.1f} |" in text
    drawn = paired_bootstrap(some_ranks(5, 1.5), some_ranks(5), OWNER)
    assert f"{drawn.value:+.1f} \\[{drawn.low:+.1f}, {drawn.high:+.1f}\\]" in text
    assert f"{paired_seeds(good, poor).value:+.1f}" in text
