"""What receipts keep of attention, and what chapters make of several receipts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from itm_lab.evidence import tables
from itm_lab.evidence.attention import attention_and_rsum, correlation, less_means, mean_attention, mean_curve
from itm_lab.evidence.tables import planned_runs
from itm_lab.records.attention import CURVE, OVERLAPS, THRESHOLDS, attention_curves, attention_metrics, gains
from itm_lab.records.receipts import make_receipt, write_receipt
from itm_lab.records.step_time import step_seconds
from itm_utils.metrics.attention import PhraseAttention
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import HingeTriplet


def seen_by(seed: int, phrases: int = 40, regions: int = 6) -> PhraseAttention:
    """Attention of two words per phrase; the overlaps are the same for every seed."""
    overlap = np.random.default_rng(0).random((phrases, regions))
    overlap[:, 0] = 0.9  # one region is relevant at every overlap
    noise = torch.randn(2 * phrases, regions, generator=torch.Generator().manual_seed(seed))
    weights = (2 * noise + 3 * torch.from_numpy(overlap).repeat_interleave(2, dim=0)).softmax(dim=1)
    keys = np.stack([np.arange(phrases), np.zeros(phrases, dtype=np.int64)], axis=1)
    return PhraseAttention(weights.numpy(), np.repeat(np.arange(phrases), 2), overlap, keys)


def metrics_of_phrase(seen: PhraseAttention, phrase: int, threshold: float) -> list[float]:
    """Precision and recall of a phrase, the larger of its two words."""
    relevant, words = seen.overlap[phrase] > 0.4, seen.weights[2 * phrase : 2 * phrase + 2] > threshold
    hits = (words & relevant).sum(axis=1)
    precision = max(h / n if n else 0.0 for h, n in zip(hits, words.sum(axis=1), strict=True))
    return [precision, hits.max() / relevant.sum()]


def test_metrics_of_a_receipt_are_those_at_the_named_thresholds() -> None:
    seen, baseline = seen_by(1), seen_by(2).quality(THRESHOLDS)
    found, best = attention_metrics(seen, baseline, (0.7, 0.9)), seen.quality(THRESHOLDS)
    assert found["att_best_threshold"] == best.best[0] and found["att_f1"] == 100 * best.f1.max()
    for end, at in (("", best.best[0]), ("_common", baseline.best[0])):
        slow = np.mean([metrics_of_phrase(seen, phrase, at) for phrase in range(40)], axis=0)
        assert [found[f"att_precision{end}"], found[f"att_recall{end}"]] == pytest.approx(100 * slow)
    paper = [np.mean([metrics_of_phrase(seen, p, n / 100)[0] for p in range(40)]) for n in range(11)]
    assert min(abs(100 * np.array(paper) - found["att_precision_to_one_tenth"])) < 1e-9
    assert found["att_f1_iou_04"] == found["att_f1"] >= found["att_f1_to_one_tenth"]
    assert found["att_f1_mean_words"] < found["att_f1"]
    assert all(f"att_f1{kind}_iou_{10 * iou:02.0f}" in found for iou in OVERLAPS for kind in ("", "_chance"))


def test_precision_over_recalls_that_are_not_reached_is_no_number() -> None:
    seen = seen_by(1)
    assert 0 < attention_metrics(seen, None, (0.7, 0.9))["att_pr_area"] < 100
    assert "att_pr_area" not in attention_metrics(seen, None, (0.01, 0.9))
    assert "att_recall_common" not in attention_metrics(seen, None, (0.7, 0.9))  # no baseline


def test_gains_count_the_phrases_below_the_median_of_the_baseline() -> None:
    mine, theirs = seen_by(1), seen_by(2)
    found = gains(mine.quality(THRESHOLDS), baseline := theirs.quality(THRESHOLDS))
    at = baseline.best[0]
    now, then = (np.array([metrics_of_phrase(one, p, at) for p in range(40)]) for one in (mine, theirs))
    low = then[:, 1] < np.median(then[:, 1])
    assert found["recall_gain_low_recall"] == pytest.approx(100 * (now - then)[low, 1].mean())
    above = then[:, 0] > 0
    low = above & (then[:, 0] < np.median(then[above, 0]))
    assert found["precision_gain_low_precision"] == pytest.approx(100 * (now - then)[low, 0].mean())


def test_curves_of_a_receipt_have_a_value_per_threshold_and_overlap() -> None:
    curves = attention_curves(seen_by(1))["attention"]
    assert curves["threshold"] == CURVE.tolist() and len(curves) == 1 + 2 * len(OVERLAPS)
    assert {len(values) for values in curves.values()} == {len(CURVE)}
    assert curves["recall_iou_04"][0] == 100 and np.diff(curves["recall_iou_04"]).max() <= 0


def test_a_timed_step_leaves_the_model_as_it_was(toy_pairs) -> None:
    model = SCAN(100, toy_pairs.split.feature_dim, width=8, word_dim=8).eval()
    before = [p.detach().clone() for p in model.parameters()]
    assert 0 < step_seconds(HingeTriplet(), model, toy_pairs, 8, seed=0, batches=2, times=2) < 60
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---------------------------------------------------------------- several receipts


def receipt_of(variant: str, seed: int, f1: float, rsum: float) -> dict:
    metrics = {"rsum": rsum, "att_f1": f1, "att_precision": f1 + 1, "att_recall": f1 + 2}
    return make_receipt(
        chapter="11_ccr_ccs", variant=variant, seed=seed, parameters={}, metrics=metrics, seconds=1.0, device="cpu",
        dataset={"name": "toy", "split": "test", "fingerprint": 64 * "0"},
    )  # fmt: skip


def test_planned_runs_are_those_of_the_seeds_under_todays_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for seed in (3, 1, 2):
        write_receipt(receipt_of("SCAN CCR", seed, 40.0, 300.0), tmp_path / "receipts")
    assert [one["seed"] for one in planned_runs("11_ccr_ccs", "SCAN CCR", (1, 3, 7), "toy")] == [1, 3]
    monkeypatch.setattr(tables, "is_old_protocol", lambda receipt: receipt["seed"] == 3)
    assert [one["seed"] for one in planned_runs("11_ccr_ccs", "SCAN CCR", (1, 3, 7), "toy")] == [1]


def test_means_need_the_number_in_every_run() -> None:
    runs = [receipt_of("SCAN CCR", seed, 40.0 + seed, 300.0) for seed in (1, 3)]
    assert mean_attention(runs) == [43, 44, 42]
    assert mean_attention(runs, "_common") == mean_attention([]) == [] and mean_curve(runs) is mean_curve([]) is None


def test_a_correlation_is_that_of_the_centred_numbers() -> None:
    rng = np.random.default_rng(0)
    f1, rsum = rng.normal(40, 1, (4, 5)), rng.normal(300, 5, (4, 5))
    variants = [[receipt_of("x", s, f1[v, s], rsum[v, s]) for s in range(5)] for v in range(4)]
    table = attention_and_rsum(variants, seeds=5)
    np.testing.assert_allclose(table, [f1, rsum])
    assert attention_and_rsum(variants, seeds=6) is attention_and_rsum([[]], seeds=1) is None
    centred = [side - side.mean(axis=0) for side in (f1, rsum)]
    np.testing.assert_allclose(less_means(table, 1), centred)
    r = scipy.stats.pearsonr(*(side.ravel() for side in centred)).statistic
    assert correlation(table, 1).startswith(f"{r:+.2f} [")
    both = [side - side.mean(axis=1, keepdims=True) for side in centred]
    r = scipy.stats.pearsonr(*(side.ravel() for side in both)).statistic
    assert correlation(table, 1, 2).startswith(f"{r:+.2f} [")
