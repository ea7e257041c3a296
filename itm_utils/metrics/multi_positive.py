"""Beyond one right answer: metrics that know all captions which fit an image, and all images that fit a caption.

Recall@K calls every caption of another image wrong. For COCO's 5K test, people have looked again: the judgements of
ECCV Caption and of Crisscrossed Captions (CxC) come with the package ``eccv_caption``; for the embedded scenes the
oracle knows. With R right candidates for a query,

* R-Precision is the share of positives among the first R,
* mAP@R is the mean over the first R places of the precision up to that place, counted where a positive stands,
* R@K is 1 if any positive is among the first K.

**Ties and NaN can only hurt**, as in :mod:`itm_utils.metrics.retrieval`: negatives with the score of a positive stand
before it. Without ties the numbers are those of ``eccv_caption``, whose version 0.1.0 wants all candidates ranked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from itm_utils.errors import input_error
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import CUTOFFS, score_matrix

ROWS_AT_ONCE = 128
NEVER = 2**40  # place of a right candidate that cannot be found


@dataclass(frozen=True)
class Judged:
    """What is right for the judged queries of one direction: p pairs, grouped by query.

    queries: (q,) growing positions in the split. relevant: (q,) how many candidates are right for each: its R.
    pair_query: (p,) index into ``queries``. pair_candidate: (p,) position of a right candidate. A query has fewer
    than R pairs where right candidates are not in the split: they count, and cannot be found.
    """

    queries: np.ndarray
    relevant: np.ndarray
    pair_query: np.ndarray
    pair_candidate: np.ndarray

    @classmethod
    def of(cls, right: Mapping[int, Collection[int]], position: Mapping[int, int] | None = None) -> Judged:
        """From query position → right candidates: positions, or ids that ``position`` translates.

        A query for which nothing is right has no place in a mean and is left out.
        """
        sets = {query: set(right[query]) for query in sorted(right) if len(right[query])}
        known = position if position is not None else {i: i for found in sets.values() for i in found}
        there = [[known[i] for i in found if i in known] for found in sets.values()]
        return cls(
            queries=np.array(list(sets), dtype=np.int64),
            relevant=np.array([len(found) for found in sets.values()], dtype=np.int64),
            pair_query=np.repeat(np.arange(len(there)), [len(found) for found in there]),
            pair_candidate=np.array([candidate for found in there for candidate in found], dtype=np.int64),
        )


@dataclass(frozen=True)
class Judgements:
    """Positive captions of images (i2t), positive images of captions (t2i)."""

    i2t: Judged
    t2i: Judged

    @classmethod
    def from_truth(cls, truth: np.ndarray) -> Judgements:
        """From a matrix (i, c), True where the caption fits the image; for scenes, ``oracle_matrix(split)``."""
        truth = np.asarray(truth, dtype=bool)
        return cls(*(Judged.of({q: np.flatnonzero(row) for q, row in enumerate(side)}) for side in (truth, truth.T)))


def extended_metrics(scores: Scores, judgements: Judgements) -> dict[str, float]:
    """mAP@R, R-Precision and R@1, 5, 10 of both directions in percent, named ``i2t_map_at_r`` and so on.

    scores: i2t and t2i of shape (i, c). Each number is a mean over the judged queries of its direction.
    """
    i2t, t2i = score_matrix(scores.i2t, "i2t"), score_matrix(scores.t2i, "t2i")
    named = {}
    for side, matrix, judged in (("i2t", i2t, judgements.i2t), ("t2i", t2i.T, judgements.t2i)):
        _check_positions(matrix, judged, side)
        query = judged.pair_query
        places, relevant = right_places(matrix, judged), judged.relevant[query]
        found = np.arange(len(places)) - np.searchsorted(query, query) + 1  # positives up to this place
        best = np.full(len(judged.queries), NEVER)
        np.minimum.at(best, query, places)
        shares = {
            "map_at_r": np.sum((places < relevant) * found / ((places + 1) * relevant)) / len(best),
            "r_precision": np.sum((places < relevant) / relevant) / len(best),
        } | {f"r{k}": np.mean(best < k) for k in CUTOFFS}
        named |= {f"{side}_{name}": 100 * float(share) for name, share in shares.items()}
    return named


def right_places(matrix: np.ndarray, judged: Judged) -> np.ndarray:
    """(p,) places (from 0) of the right candidates among all candidates of their query, growing within each query.

    matrix: (queries, candidates) scores. A positive has before it the better positives and every negative that is
    not below it: higher, tied, or NaN.
    """
    rows, query = judged.queries[judged.pair_query], judged.pair_query
    score = matrix[rows, judged.pair_candidate]
    score = score[np.lexsort((-score, query))]  # best first within each query, NaN last
    nan, first = np.isnan(score), np.searchsorted(query, query)  # first pair of the same query
    run = np.cumsum(np.append(True, (score[1:] != score[:-1]) | (query[1:] != query[:-1])))  # of equal scores
    right_not_below = np.searchsorted(run, run, side="right") - first + np.bincount(query, nan)[query]
    wrong_before = _not_below(matrix, rows, score) - right_not_below.astype(np.int64)
    return np.where(nan, NEVER, np.arange(len(score)) - first + wrong_before)


def _not_below(matrix: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(p,) how many entries of row ``rows[p]`` are higher than ``values[p]``, tied with it, or NaN.

    rows: growing. A few are copied at a time: they may be columns of a transposed view, best read together.
    """
    below = np.empty(len(rows), dtype=np.int64)
    wanted = np.unique(rows)
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        block = wanted[start : start + ROWS_AT_ONCE]
        copied = np.ascontiguousarray(matrix[block])
        pairs = slice(*np.searchsorted(rows, (block[0], block[-1] + 1)))
        places = np.searchsorted(block, rows[pairs])
        # one count per pair: several times faster than counting along an axis
        below[pairs] = [np.count_nonzero(copied[p] < value) for p, value in zip(places, values[pairs], strict=True)]
    return matrix.shape[1] - below


def _check_positions(matrix: np.ndarray, judged: Judged, side: str) -> None:
    if not len(judged.pair_query):
        raise input_error(f"{side} judgements", "no right candidate for any query", "at least one")
    needed = int(judged.queries.max()) + 1, int(judged.pair_candidate.max()) + 1
    if matrix.shape[0] < needed[0] or matrix.shape[1] < needed[1]:
        found = f"{matrix.shape[0]} queries and {matrix.shape[1]} candidates"
        raise input_error(f"{side} scores", found, f"at least {needed[0]} and {needed[1]}, as the judgements name them")
