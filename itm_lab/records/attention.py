"""What a receipt keeps of a model's attention: metrics at several thresholds and overlaps, and the curves."""

from __future__ import annotations

import numpy as np

from itm_utils.metrics.attention import AttentionQuality, PhraseAttention, common_phrases

THRESHOLDS = np.arange(51) / 100
# A curve needs more of them just above 0, where sharp attention loses recall at once.
FINE = np.union1d(THRESHOLDS, np.geomspace(1e-4, 1e-2, 21))
PAPER = THRESHOLDS[THRESHOLDS <= 0.1]  # all that the paper of CCR and CCS tries
# Those of the curves in a receipt.
CURVE = np.round(np.concatenate([[0], np.geomspace(1e-4, 5e-3, 6), np.r_[1:11] / 100, np.r_[3:11] / 20]), 6)
OVERLAPS = (0.3, 0.4, 0.5, 0.6)  # from which a region is relevant
KINDS = ("precision", "recall", "f1")


def attention_metrics(
    seen: PhraseAttention, baseline: AttentionQuality | None, area: tuple[float, float]
) -> dict[str, float]:
    """Metrics in per cent by name: at the best threshold, at the paper's, at the baseline's, at other overlaps.

    baseline: of the run without constraints and with the same seed, if at hand. area: the recalls between which precision is
    averaged; where the curve does not reach them, there is no ``att_pr_area``.
    """
    best = seen.quality(THRESHOLDS)
    found = named(best.best) | {"att_best_threshold": best.best[0], "att_f1_chance": 100 * best.chance_f1}
    found |= named(seen.quality(PAPER).best, "_to_one_tenth")
    found["att_f1_mean_words"] = 100 * seen.quality(THRESHOLDS, within="mean").best[3]
    for iou in OVERLAPS:
        other = seen.quality(THRESHOLDS, iou)
        found[f"att_f1_iou_{10 * iou:02.0f}"] = 100 * other.best[3]
        found[f"att_f1_chance_iou_{10 * iou:02.0f}"] = 100 * other.chance_f1
    if baseline is not None:
        found |= named(best.at(baseline.best[0]), "_common") | gains(best, baseline)
    curve, (low, high) = seen.quality(FINE), area
    recalls = curve.curve()[0]
    if recalls[0] <= low and high <= recalls[-1]:
        found["att_pr_area"] = 100 * curve.area(low, high) / (high - low)
    return found


def named(at: tuple[float, float, float, float], end: str = "") -> dict[str, float]:
    """Threshold, precision, recall and F1 as entries of a receipt, in per cent; the threshold has its own."""
    return {f"att_{kind}{end}": 100 * share for kind, share in zip(KINDS, at[1:], strict=True)}


def gains(best: AttentionQuality, baseline: AttentionQuality) -> dict[str, float]:
    """Gains on the phrases below the baseline's median, in points, at the baseline's best threshold.

    Of recall, on phrases whose recall was low. Of precision, on those whose precision was low but above 0: they attend to
    something relevant and to too much.
    """
    found, at = {}, baseline.best[0]
    now, then = best.per_phrase(at), baseline.per_phrase(at)
    mine, theirs = common_phrases(best, baseline)
    for measure in ("recall", "precision"):
        old = then[measure][theirs]
        known = old > 0 if measure == "precision" else old >= 0
        low = known & (old < np.median(old[known])) if known.any() else known
        if low.any():
            found[f"{measure}_gain_low_{measure}"] = 100 * float((now[measure][mine] - old)[low].mean())
    return found


def attention_curves(seen: PhraseAttention) -> dict[str, dict[str, list[float]]]:
    """Precision and recall in per cent at the thresholds of ``CURVE``, for each overlap: ``curves`` of a receipt."""
    found: dict[str, list[float]] = {"threshold": CURVE.tolist()}
    for iou in OVERLAPS:
        one = seen.quality(CURVE, iou)
        for kind in ("precision", "recall"):
            found[f"{kind}_iou_{10 * iou:02.0f}"] = np.round(100 * getattr(one, kind), 2).tolist()
    return {"attention": found}
