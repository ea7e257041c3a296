"""Attention metrics of several runs: means over seeds, curves, and how they go with rsum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from itm_lab.evidence.verdicts import pearson_interval, pearson_p

METRICS = ("att_precision", "att_recall", "att_f1")
Receipts = Sequence[Mapping[str, Any]]


def mean_attention(runs: Receipts, end: str = "") -> list[float]:
    """Precision, recall and F1, means over runs; empty where not all of them have these. end: of the names, ``"_common"``."""
    names = [f"{metric}{end}" for metric in METRICS]
    if not runs or any(name not in run["metrics"] for run in runs for name in names):
        return []
    return [float(np.mean([run["metrics"][name]["value"] for run in runs])) for name in names]


def mean_curve(runs: Receipts) -> tuple[np.ndarray, np.ndarray] | None:
    """Recall and precision (t,) at the paper's overlap, means over runs; None where not all of them have curves."""
    curves = [run.get("curves", {}).get("attention") for run in runs]
    if not curves or None in curves:
        return None
    recall, precision = (np.mean([one[f"{kind}_iou_04"] for one in curves], axis=0) for kind in ("recall", "precision"))
    return recall, precision


def attention_and_rsum(variants: Sequence[Receipts], seeds: int, metric: str = "att_f1") -> np.ndarray | None:
    """(2, variants, seeds): an attention metric, and rsum; None unless every variant has so many seeds, and several."""
    table = [[[run["metrics"][key]["value"] for run in runs] for key in (metric, "rsum")] for runs in variants]
    whole = all(len(side) == seeds > 1 for variant in table for side in variant)
    return np.array(table).transpose(1, 0, 2) if whole and table else None


def less_means(table: np.ndarray, *axes: int) -> np.ndarray:
    """Subtract the means along some axes: 1, over the variants; 2, over the seeds."""
    for axis in axes:
        table = table - table.mean(axis=axis, keepdims=True)
    return table


def correlation(table: np.ndarray, *axes: int) -> str:
    """Pearson's r of a table (2, variants, seeds) less the means along some axes, Fisher's interval, and p."""
    x, y = less_means(table, *axes).reshape(2, -1)
    taken = sum(x.size // table.shape[axis] - 1 for axis in axes)
    r, low, high = pearson_interval(list(x), list(y), taken=taken)
    p = pearson_p(r, 0.0, len(x), taken)
    return f"{r:+.2f} [{low:+.2f}, {high:+.2f}], {f'p {p:.3f}' if p >= 0.001 else 'p < .001'}"
