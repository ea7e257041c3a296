"""Ranks, recalls, folds and their uncertainty, from score matrices.

Everything starts from a rank: how many negatives stand before the positive. 0 is the best rank.
For an image the positive is the best of its own captions, for a caption it is the image it was written for.

**Ties and NaN can only hurt.** A negative with exactly the score of the positive counts as standing
before it: a model that gives every pair the same score gets nothing right. (Counting only strictly higher
scores calls the same model perfect.) A NaN is never a hit: a right candidate that scores NaN comes after all
others, and a negative that scores NaN counts as standing before the positive, so that no model gains by
producing them. (Sorting, as the public code does, puts NaN first and calls it a hit.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from itm_utils.errors import ItmError, input_error
from itm_utils.matcher import Scores

CUTOFFS = (1, 5, 10)
BLOCK_BYTES = 2**20  # comparisons are made a few rows at a time, within the processor's caches


@dataclass(frozen=True)
class Direction:
    """Retrieval in one direction: recalls in percent, ranks counted from 1 as the papers print them."""

    r1: float
    r5: float
    r10: float
    median_rank: float
    mean_rank: float

    @property
    def recall_sum(self) -> float:
        return self.r1 + self.r5 + self.r10


@dataclass(frozen=True)
class Retrieval:
    """Both directions under one protocol.

    protocol: ``"all n"`` (every image against every caption), or ``"5 folds of n"``; on COCO's ``testall`` these are the
    papers' 5K and 1K.
    models: 1 for a single model, more for an ensemble, 0 for none; every printed result says which.
    """

    i2t: Direction
    t2i: Direction
    protocol: str
    models: int = 1

    @property
    def rsum(self) -> float:
        """Sum of the six recalls."""
        return self.i2t.recall_sum + self.t2i.recall_sum

    @property
    def r1_r5(self) -> float:
        """Sum of R@1 and R@5 of both directions, by which VSRN's public script chooses weights."""
        return self.i2t.r1 + self.i2t.r5 + self.t2i.r1 + self.t2i.r5

    @property
    def label(self) -> str:
        kind = {0: "no model", 1: "single model"}.get(self.models, f"ensemble of {self.models}")
        return f"{kind}, {self.protocol}"

    def as_dict(self) -> dict[str, float]:
        """Flat names for logs, receipts and tables."""
        named = {f"i2t_r{k}": getattr(self.i2t, f"r{k}") for k in CUTOFFS}
        named |= {f"t2i_r{k}": getattr(self.t2i, f"r{k}") for k in CUTOFFS}
        return named | {"rsum": self.rsum}

    def __str__(self) -> str:
        rows = [f"{self.label}: rsum {self.rsum:.1f}"]
        for name, side in (("image to text", self.i2t), ("text to image", self.t2i)):
            rows.append(
                f"  {name}: R@1 {side.r1:.1f}  R@5 {side.r5:.1f}  R@10 {side.r10:.1f}"
                f"  median rank {side.median_rank:g}  mean rank {side.mean_rank:.1f}"
            )
        return "\n".join(rows)


@dataclass(frozen=True)
class Ranks:
    """i2t: (i,) rank of the best own caption of each image. t2i: (c,) rank of the own image of each caption."""

    i2t: np.ndarray
    t2i: np.ndarray


def five_captions_each(images: int) -> np.ndarray:
    """(c,) owner of each caption where every image has five, as in the public files."""
    return np.repeat(np.arange(images), 5)


def retrieval_ranks(scores: Scores, owner: np.ndarray) -> Ranks:
    """Ranks in both directions, each from its own matrix.

    scores: i2t and t2i of shape (i, c). owner: (c,) image of each caption, in order.
    """
    i2t, t2i = score_matrix(scores.i2t, "i2t"), score_matrix(scores.t2i, "t2i")
    owner = np.asarray(owner)
    _check_owner(owner, i2t, t2i)
    captions = np.arange(len(owner))
    best = np.fmax.reduceat(i2t[owner, captions], _first_captions(owner))  # ignores NaN unless all are NaN
    own = t2i[owner, captions]
    in_rows, in_columns = _count_below(i2t, best, t2i, own)
    return Ranks(i2t=_image_ranks(i2t, owner, in_rows, best), t2i=_caption_ranks(t2i, in_columns, own))


def summarise(ranks: Ranks, protocol: str, models: int = 1) -> Retrieval:
    """Recalls and rank statistics of ranks."""
    return Retrieval(_direction(ranks.i2t), _direction(ranks.t2i), protocol, models)


def evaluate(scores: Scores, owner: np.ndarray) -> Retrieval:
    """Every image against every caption. On COCO's 5,000 test images this is the papers' 5K."""
    ranks = retrieval_ranks(scores, owner)
    return summarise(ranks, f"all {len(ranks.i2t)}", scores.models)


def evaluate_folds(scores: Scores, owner: np.ndarray, folds: int = 5) -> Retrieval:
    """The mean over consecutive blocks of images with their own captions only.

    On COCO's 5,000 test images this is the papers' 1K, and nothing else is: the first thousand alone is
    another number.
    """
    parts = fold_ranks(scores, owner, folds)
    joined = Ranks(*(np.concatenate([getattr(part, way) for part in parts]) for way in ("i2t", "t2i")))
    return summarise_folds(joined, owner, folds, scores.models)


def summarise_folds(ranks: Ranks, owner: np.ndarray, folds: int, models: int = 1) -> Retrieval:
    """Recalls of ranks that were found within each of ``folds`` equal blocks of images: the mean over the blocks."""
    size = len(ranks.i2t) // folds
    if folds == 1:
        return summarise(ranks, f"all {size}", models)
    cuts = np.searchsorted(owner, np.arange(0, size * folds + 1, size))
    parts = [
        summarise(Ranks(ranks.i2t[size * n : size * (n + 1)], ranks.t2i[cuts[n] : cuts[n + 1]]), "")
        for n in range(folds)
    ]
    return Retrieval(
        i2t=_mean_direction([part.i2t for part in parts]),
        t2i=_mean_direction([part.t2i for part in parts]),
        protocol=f"{folds} folds of {size}",
        models=models,
    )


def fold_ranks(scores: Scores, owner: np.ndarray, folds: int) -> list[Ranks]:
    """Ranks within each of ``folds`` consecutive blocks of images."""
    owner = np.asarray(owner)
    images = _check_owner(owner, score_matrix(scores.i2t, "i2t"), score_matrix(scores.t2i, "t2i"))
    if folds < 1 or images % folds:
        raise input_error("folds", f"{images} images to cut into {folds}", "equal blocks")
    size = images // folds
    ranks = []
    for first in range(0, images, size):
        start, stop = np.searchsorted(owner, (first, first + size))
        rows, columns = slice(first, first + size), slice(int(start), int(stop))
        block = Scores(i2t=scores.i2t[rows, columns], t2i=scores.t2i[rows, columns])
        ranks.append(retrieval_ranks(block, owner[columns] - first))
    return ranks


def ensemble(parts: list[Scores]) -> Scores:
    """The mean of several models' matrices, before ranking. What evaluates it says that it is an ensemble."""
    shapes = {(tuple(part.i2t.shape), tuple(part.t2i.shape)) for part in parts}
    if len(shapes) != 1:
        raise input_error("ensemble", f"matrices of shapes {sorted(shapes)}", "one shape")
    models = sum(part.models for part in parts)
    first, *others = parts
    i2t = sum((part.i2t for part in others), first.i2t) / len(parts)
    if not any(part.decoupled for part in parts):
        return Scores(i2t=i2t, t2i=i2t, models=models)
    return Scores(i2t=i2t, t2i=sum((part.t2i for part in others), first.t2i) / len(parts), models=models)


def chance(images: int, owner: np.ndarray) -> Retrieval:
    """What a random order gives on average: the number every other number should be read against."""
    captions = len(owner)
    per_image = np.bincount(np.asarray(owner), minlength=images)
    # An image misses its top k when all k places go to other images' captions.
    missed = {
        k: np.prod([(captions - per_image - j).clip(0) / max(captions - j, 1) for j in range(k)], axis=0)
        for k in CUTOFFS
    }
    i2t = {f"r{k}": float(100 * (1 - missed[k]).mean()) for k in CUTOFFS}
    t2i = {f"r{k}": 100.0 * min(k, images) / images for k in CUTOFFS}
    mean_i2t = float(((captions - per_image) / (per_image + 1)).mean()) + 1
    nan = float("nan")
    return Retrieval(
        i2t=Direction(**i2t, median_rank=nan, mean_rank=mean_i2t),
        t2i=Direction(**t2i, median_rank=nan, mean_rank=(images + 1) / 2),
        protocol="random order",
        models=0,
    )


def score_matrix(scores: Tensor | np.ndarray, name: str) -> np.ndarray:
    """Scores of one direction as a numpy matrix (i, c), copied only where they must be."""
    if isinstance(scores, Tensor):
        # numpy knows no bfloat16; float32 holds each of its numbers exactly
        scores = (scores.float() if scores.dtype == torch.bfloat16 else scores).detach().cpu().numpy()
    matrix = np.asarray(scores)
    if matrix.ndim != 2 or matrix.size == 0:
        raise input_error(f"{name} scores", f"shape {matrix.shape}", "(images, captions)")
    return matrix


def _check_owner(owner: np.ndarray, i2t: np.ndarray, t2i: np.ndarray) -> int:
    """The number of images, once matrices and owners are known to fit."""
    images, captions = i2t.shape
    if t2i.shape != i2t.shape:
        raise input_error("t2i scores", f"shape {t2i.shape}", f"{i2t.shape} as i2t; rows are images in both")
    if owner.shape != (captions,):
        raise input_error("owner", f"shape {owner.shape}", f"the image of each of {captions} captions")
    if (np.diff(owner) < 0).any() or not np.array_equal(np.unique(owner), np.arange(images)):
        raise ItmError(f"owner: every image from 0 to {images - 1} needs a caption, and captions follow their images")
    return images


def _image_ranks(scores: np.ndarray, owner: np.ndarray, below: np.ndarray, best: np.ndarray) -> np.ndarray:
    """(i,) ranks, from how many captions of each row score below its best own one."""
    captions, first = len(owner), _first_captions(owner)
    own = scores[owner, np.arange(captions)]
    before = captions - below - np.add.reduceat(~(own < best[owner]), first, dtype=np.int64)
    before[np.isnan(best)] = captions
    return before


def _caption_ranks(scores: np.ndarray, below: np.ndarray, own: np.ndarray) -> np.ndarray:
    """(c,) ranks, from how many images of each column score below the own one."""
    before = len(scores) - below - 1  # the own image is not below itself
    before[np.isnan(own)] = len(scores)
    return before


def _first_captions(owner: np.ndarray) -> np.ndarray:
    return np.searchsorted(owner, np.arange(owner[-1] + 1))


def _count_below(i2t: np.ndarray, best: np.ndarray, t2i: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many scores of each row of ``i2t`` are below ``best`` (i,), and of each column of ``t2i`` below ``own`` (c,).

    Ties and NaN are not below. Both directions read a block of rows while it is in the processor's cache.
    """
    in_rows, in_columns = np.empty(len(i2t), dtype=np.int64), np.zeros(i2t.shape[1], dtype=np.int64)
    for rows in _row_blocks(i2t):
        for row, comparison in enumerate(i2t[rows] < best[rows, None], start=rows.start):
            in_rows[row] = np.count_nonzero(comparison)
        # at most 255 rows: bytes can hold the count, and are added many at a time
        in_columns += (t2i[rows] < own).view(np.uint8).sum(axis=0, dtype=np.uint8)
    return in_rows, in_columns


def _row_blocks(scores: np.ndarray) -> list[slice]:
    rows = min(255, max(1, BLOCK_BYTES // (scores.shape[1] * scores.itemsize)))
    return [slice(start, start + rows) for start in range(0, len(scores), rows)]


def _direction(ranks: np.ndarray) -> Direction:
    recalls = {f"r{k}": float(100.0 * np.mean(ranks < k)) for k in CUTOFFS}
    return Direction(**recalls, median_rank=float(np.floor(np.median(ranks)) + 1), mean_rank=float(ranks.mean() + 1))


def _mean_direction(parts: list[Direction]) -> Direction:
    names = ("r1", "r5", "r10", "median_rank", "mean_rank")
    return Direction(**{name: float(np.mean([getattr(part, name) for part in parts])) for name in names})
