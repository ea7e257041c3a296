"""How sure is a difference? Intervals over test queries, over training seeds, and from a printed number alone.

Two questions, two intervals. *Would another training run say the same?* Train with several seeds and look at how far
the runs lie apart (:func:`seed_interval`, :func:`paired_seeds`). *Would another test set say the same?* Resample the test
images from those there are (:func:`paired_bootstrap`). A paper's table gives neither; then only
bounds are left (:func:`binomial_halfwidth`, :func:`largest_disagreement`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from itm_utils.errors import input_error
from itm_utils.metrics.retrieval import Ranks, resampled_recalls, summarise


class Interval(NamedTuple):
    """A value or a difference, and where it may lie."""

    value: float
    low: float
    high: float

    @property
    def halfwidth(self) -> float:
        return (self.high - self.low) / 2


def paired_bootstrap(
    ranks_a: Ranks, ranks_b: Ranks, owner: np.ndarray, metric: str = "rsum", level: float = 0.95, samples: int = 2000,
    seed: int = 0,
) -> Interval:  # fmt: skip
    """How much better run a is than run b on the same queries: difference, low, high.

    owner: (c,) image of each caption, the same for both. Every sample draws images with their captions, once for
    both runs: what is hard for both cancels, so the interval is narrower than that of two separate tests.
    """
    _check_level(level)
    owner = np.asarray(owner)
    images, captions = len(np.unique(owner)), len(owner)
    for name, ranks in (("ranks_a", ranks_a), ("ranks_b", ranks_b)):
        if (len(ranks.i2t), len(ranks.t2i)) != (images, captions):
            found = f"ranks of {len(ranks.i2t)} images and {len(ranks.t2i)} captions"
            raise input_error(name, found, f"{images} and {captions} as in owner")
    point = summarise(ranks_a, "").as_dict()
    if metric not in point:
        raise input_error("metric", metric, f"one of {', '.join(point)}")
    difference = point[metric] - summarise(ranks_b, "").as_dict()[metric]
    drawn_a, drawn_b = (resampled_recalls(ranks, owner, samples, seed)[metric] for ranks in (ranks_a, ranks_b))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(drawn_a - drawn_b, (tail, 100 - tail))
    return Interval(difference, float(low), float(high))


def seed_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """Mean over training seeds with Student's t interval: mean, low, high."""
    _check_level(level)
    runs = np.asarray(values, dtype=float)
    if runs.ndim != 1 or len(runs) < 2:
        raise input_error("values", f"{runs.size} seed(s)", "at least two: one run has no spread")
    if not np.isfinite(runs).all():
        raise input_error("values", f"{runs.tolist()}", "finite numbers")
    mean = float(runs.mean())
    half = float(stats.t.interval(level, len(runs) - 1, scale=stats.sem(runs))[1]) if runs.std() else 0.0
    return Interval(mean, mean - half, mean + half)


def paired_seeds(values_a: Sequence[float], values_b: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of a - b over seeds with Student's t interval; values_a[s] and values_b[s] come from the same seed."""
    if len(values_a) != len(values_b):
        raise input_error("paired seeds", f"{len(values_a)} and {len(values_b)} runs", "the same seeds for both")
    return seed_interval(np.asarray(values_a, dtype=float) - np.asarray(values_b, dtype=float), level)


def binomial_halfwidth(recall: float, queries: int, level: float = 0.95) -> float:
    """Half the width of Wilson's interval of a recall (percent) measured on independent queries.

    The five captions of an image are correlated. Counting images instead of captions bounds the interval of t2i recalls
    from above; counting captions bounds it from below. (Written out: scipy's takes whole counts of hits, and a printed
    recall, a mean over folds at that, gives none.)
    """
    share, z = _share(recall), _normal(level)
    return 100 * z / (1 + z**2 / queries) * math.sqrt(share * (1 - share) / queries + z**2 / (4 * queries**2))


def largest_disagreement(gap: float, queries: int, level: float = 0.95) -> float:
    """On how many of the queries (percent) two models may disagree before the interval of their gap reaches zero.

    gap: difference of their recalls in points. To disagree is that exactly one of the two is right. The variance of
    the gap is that share less the gap squared, over the number of queries.
    """
    return 100 * _share(abs(gap)) ** 2 * (1 + queries / _normal(level) ** 2)


def _normal(level: float) -> float:
    _check_level(level)
    return float(stats.norm.interval(level)[1])


def _share(recall: float) -> float:
    if not 0 <= recall <= 100:
        raise input_error("recall", f"{recall}", "percent, 0 to 100")
    return recall / 100


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise input_error("level", f"{level}", "a probability such as 0.95")
