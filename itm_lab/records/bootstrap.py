"""How far recalls would move with other test images: percentile intervals over resampled images."""

from __future__ import annotations

import numpy as np

from itm_utils.metrics.retrieval import CUTOFFS, Ranks


def bootstrap_intervals(
    ranks: Ranks, owner: np.ndarray, level: float = 0.95, samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of the six recalls and rsum over resampled *images*, each with its own captions.

    Captions of one image are not independent queries; drawing them one by one would make the t2i interval
    too narrow.
    """
    tail = 100 * (1 - level) / 2
    resampled = resampled_recalls(ranks, owner, samples, seed)
    ends = {name: np.percentile(values, (tail, 100 - tail)) for name, values in resampled.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def resampled_recalls(ranks: Ranks, owner: np.ndarray, samples: int, seed: int) -> dict[str, np.ndarray]:
    """(samples,) values of the six recalls and of rsum, one for each drawn set of images with their captions.

    The same seed draws the same images, whatever the ranks: that is what makes two runs comparable.
    """
    owner = np.asarray(owner)
    images = len(ranks.i2t)
    draws = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), size=samples)
    captions = np.bincount(owner, minlength=images)
    recalls = {}
    for k in CUTOFFS:
        recalls[f"i2t_r{k}"] = 100 * (draws @ (ranks.i2t < k)) / images
    for k in CUTOFFS:
        hits = np.bincount(owner, weights=ranks.t2i < k, minlength=images)
        recalls[f"t2i_r{k}"] = 100 * (draws @ hits) / (draws @ captions)
    recalls["rsum"] = sum(recalls.values())
    return recalls
