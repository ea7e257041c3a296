"""How sure is a difference? Intervals over test queries, over training seeds, and from a printed number alone.

Two questions, two intervals. *Would another training run say the same?* Train with several seeds and look at how far
the runs lie apart (:func:`seed_interval`, :func:`paired_seeds`). *Would another test set say the same?* Resample the test
images from those there are (:func:`paired_bootstrap`). A paper's table gives neither; then only
bounds are left (:func:`binomial_halfwidth`, :func:`largest_disagreement`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # its parts come when they are used: they take most of a second

from itm_lab.records.bootstrap import resampled_recalls
from itm_utils.errors import input_error
from itm_utils.metrics.retrieval import CUTOFFS, Ranks, summarise


class Interval(NamedTuple):
    """A value or a difference, and where it may lie."""

    value: float
    low: float
    high: float

    @property
    def halfwidth(self) -> float:
        return (self.high - self.low) / 2


class Estimate(NamedTuple):
    """An interval with what its quantile was taken from: Student's distribution with so many degrees of freedom.

    inf: a normal distribution. level: that of the interval.
    """

    interval: Interval
    freedom: float
    level: float = 0.95

    @property
    def error(self) -> float:
        """Standard error of the value."""
        return self.interval.halfwidth / float(scipy.stats.t.ppf((1 + self.level) / 2, self.freedom))

    def p(self, bound: float) -> float:
        """Two-sided p of "the value is ``bound``"."""
        if self.interval.halfwidth == 0:
            return 0.0 if self.interval.value != bound else 1.0
        return float(2 * scipy.stats.t.sf(abs(self.interval.value - bound) / self.error, self.freedom))


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
    half = float(scipy.stats.t.interval(level, len(runs) - 1, scale=scipy.stats.sem(runs))[1]) if runs.std() else 0.0
    return Interval(mean, mean - half, mean + half)


def seed_estimate(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Estimate:
    """Mean over training seeds with Student's interval and its degrees of freedom."""
    return Estimate(seed_interval(values, level), len(values) - 1, level)


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
    return float(scipy.stats.norm.interval(level)[1])


def _share(recall: float) -> float:
    if not 0 <= recall <= 100:
        raise input_error("recall", f"{recall}", "percent, 0 to 100")
    return recall / 100


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise input_error("level", f"{level}", "a probability such as 0.95")


# -------------------------------------------------------------------------- seeds and test images together


def image_contributions(ranks: Ranks, owner: np.ndarray, metric: str = "rsum") -> np.ndarray:
    """(i,) what each test image gives to a recall, or to rsum, in points: their mean is the metric.

    Captions are counted with the image they were written for, so the five captions of an image stay together.
    """
    owner = np.asarray(owner)
    images, captions = len(ranks.i2t), len(owner)
    parts = {f"i2t_r{k}": 100.0 * (ranks.i2t < k) for k in CUTOFFS}
    for k in CUTOFFS:
        hits = np.bincount(owner, weights=ranks.t2i < k, minlength=images)
        parts[f"t2i_r{k}"] = 100.0 * hits * images / captions
    parts["rsum"] = np.sum(list(parts.values()), axis=0)
    if metric not in parts:
        raise input_error("metric", metric, f"one of {', '.join(parts)}")
    return parts[metric]


def two_way_bootstrap(differences: np.ndarray, level: float = 0.95, samples: int = 2000, seed: int = 0) -> Interval:
    """Mean difference with an interval over training seeds *and* test images (:func:`two_way_estimate`)."""
    return two_way_estimate(differences, level, samples, seed).interval


def two_way_estimate(differences: np.ndarray, level: float = 0.95, samples: int = 2000, seed: int = 0) -> Estimate:
    """Mean difference with an interval over training seeds *and* test images: would other seeds, tested on other
    images, say the same?

    differences: (s, i) for each seed and test image, what one variant gives more than the other. Every sample draws
    seeds and images, each with replacement (Owen's pigeonhole bootstrap, which errs on the wide side). Five seeds
    drawn from five are too alike: deviations between seeds are stretched by √(n / (n - 1)), and the quantile is
    Student's, with the degrees of freedom that Satterthwaite's formula gives the two sources together.
    """
    _check_level(level)
    table = np.asarray(differences, dtype=float)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 2:
        raise input_error("differences", f"shape {table.shape}", "(seeds, images), at least two of each")
    seeds, images = table.shape
    of_images, of_seeds = _drawn(images, seeds, samples, seed)
    by_seed = of_images @ table.T  # (samples, s): each seed's mean on the images that were drawn
    common = by_seed.mean(axis=1)
    stretched = (of_seeds * (by_seed - common[:, None])).sum(axis=1) * math.sqrt(seeds / (seeds - 1))
    error = float((common + stretched).std(ddof=1))
    of_seed, of_image = table.mean(axis=1).var(ddof=1) / seeds, table.mean(axis=0).var(ddof=1) / images
    mean = float(table.mean())
    if of_seed + of_image < 1e-12:
        return Estimate(Interval(mean, mean, mean), math.inf, level)
    freedom = (of_seed + of_image) ** 2 / (of_seed**2 / (seeds - 1) + of_image**2 / (images - 1))
    half = float(scipy.stats.t.ppf((1 + level) / 2, freedom)) * error
    return Estimate(Interval(mean, mean - half, mean + half), float(freedom), level)


@lru_cache(maxsize=4)
def _drawn(images: int, seeds: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the images (samples, i) and of the seeds (samples, s) in every sample: drawn once for all comparisons."""
    random = np.random.default_rng(seed)
    of_images = random.multinomial(images, np.full(images, 1 / images), size=samples) / images
    of_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=samples) / seeds
    return of_images, of_seeds


def p_value(interval: Interval, bound: float = 0.0, level: float = 0.95) -> float:
    """Two-sided p of "the difference is ``bound``", from an interval of this level (normal approximation)."""
    _check_level(level)
    return Estimate(interval, math.inf, level).p(bound)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p values that may be compared with one level for the whole family.

    scipy corrects for the false discovery rate only; this is three lines.
    """
    values = np.asarray(p_values, dtype=float)
    if values.size and not ((values >= 0) & (values <= 1)).all():
        raise input_error("p_values", f"{values.tolist()}", "probabilities")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1)
    corrected = np.empty_like(values)
    corrected[order] = stepped
    return corrected.tolist()


def smallest_effect(spread: float, seeds: int, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest true difference that ``seeds`` paired runs find with this power.

    spread: standard deviation of the difference between seeds. Found by solving the power of the two-sided paired t
    test (scipy's non-central t) for the difference.
    """
    _check_level(level)
    if seeds < 2 or not spread >= 0 or not math.isfinite(spread):
        raise input_error("smallest_effect", f"spread {spread}, {seeds} seeds", "a standard deviation of two or more")
    quantile = scipy.stats.t.ppf((1 + level) / 2, seeds - 1)

    def missing_power(shift: float) -> float:
        # the other tail, a significant result of the wrong sign, is negligible at any useful power
        return float(scipy.stats.nct.sf(quantile, seeds - 1, shift)) - power

    return spread / math.sqrt(seeds) * scipy.optimize.root_scalar(missing_power, bracket=(0.0, 4 * quantile)).root
