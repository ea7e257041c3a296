"""Answers to the exercises of chapter 01."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

from itm_utils.matcher import Scores
from itm_utils.models.vsepp import hinge_loss

COLLAPSE, REPEATS, TOP = "ex-vsepp-collapse", "ex-vsepp-repeats", "ex-vsepp-top-k"


@right(COLLAPSE)
def by_sum(vectors):
    n = len(vectors)
    return (vectors.sum(dim=0).square().sum() - n) / (n * (n - 1))


@right(COLLAPSE)
def by_table(vectors):
    table = (vectors @ vectors.T).numpy()
    return table[~np.eye(len(table), dtype=bool)].mean()


@right(COLLAPSE)
def by_triangle(vectors):
    rows, columns = torch.triu_indices(len(vectors), len(vectors), offset=1)
    return [float((vectors[rows] * vectors[columns]).sum(-1).mean())]


wrong(COLLAPSE, "with itself")(lambda v: (v @ v.T).mean())
wrong(COLLAPSE, r"n \(n - 1\)")(lambda v: ((v @ v.T).sum() - len(v)) / len(v) ** 2)
wrong(COLLAPSE, "absolute")(lambda v: ((v @ v.T).abs().sum() - len(v)) / (len(v) * (len(v) - 1)))
wrong(COLLAPSE, "shape")(lambda v: v @ v.T)
wrong(COLLAPSE, "nothing returned")(lambda v: print(end=""))
wrong(COLLAPSE, "times as large|you say")(lambda v: 2 * by_sum(v))
wrong(COLLAPSE, "shape")(lambda v: v @ v)
wrong(COLLAPSE, "you say")(lambda v: (v.mean(0) ** 2).sum())
wrong(COLLAPSE, "right angles.*you say 1|you say")(lambda v: 1 - by_sum(v))
wrong(COLLAPSE, "you say")(lambda v: (v @ v.T).max())


@right(REPEATS)
def masked(scores, margin, image_ids):
    same = image_ids[:, None] == image_ids[None, :]
    rows = (margin + scores.i2t - scores.i2t.diagonal()[:, None]).clamp(min=0).masked_fill(same, 0)
    columns = (margin + scores.t2i - scores.t2i.diagonal()[None, :]).clamp(min=0).masked_fill(same, 0)
    return rows.amax(dim=1).sum() + columns.amax(dim=0).sum()


@right(REPEATS)
def masked_in_place(scores, margin, image_ids):
    same = image_ids[:, None] == image_ids[None, :]
    rows, columns = scores.i2t, scores.t2i.clone()
    first, second = rows.diagonal().clone(), columns.diagonal().clone()
    rows[same] = -float("inf")
    columns[same] = -float("inf")
    return (margin + rows.amax(1) - first).relu().sum() + (margin + columns.amax(0) - second).relu().sum()


@right(REPEATS)
def by_loops(scores, margin, image_ids):
    total, n = 0.0, len(image_ids)
    for b in range(n):
        others = [k for k in range(n) if image_ids[k] != image_ids[b]]
        total += max([0.0] + [float(margin + scores.i2t[b, k] - scores.i2t[b, b]) for k in others])
        total += max([0.0] + [float(margin + scores.t2i[k, b] - scores.t2i[b, b]) for k in others])
    return total


@right(REPEATS)
def with_the_book(scores, margin, image_ids):
    return hinge_loss(scores, margin, hardest=True, positive=image_ids[:, None] == image_ids).numpy()


wrong(REPEATS, "repeats still count|no negatives")(lambda s, m, ids: hinge_loss(s, m, True))
wrong(REPEATS, "matrices are exchanged")(lambda s, m, ids: masked(Scores(i2t=s.t2i, t2i=s.i2t), m, ids))
wrong(REPEATS, "t2i is not used")(lambda s, m, ids: masked(Scores.same(s.i2t), m, ids))
wrong(REPEATS, "i2t is not used")(lambda s, m, ids: masked(Scores.same(s.t2i), m, ids))
wrong(REPEATS, "hardest of each query|sum over all")(
    lambda s, m, ids: hinge_loss(s, m, False, positive=ids[:, None] == ids)
)
wrong(REPEATS, "margin")(lambda s, m, ids: masked(s, 0.2, ids))
wrong(REPEATS, "stand side by side|without negatives")(
    lambda s, m, ids: hinge_loss(
        s,
        m,
        True,
        positive=((ids[:, None] == ids) & ((torch.arange(len(ids))[:, None] - torch.arange(len(ids))).abs() < 2)),
    )
)
wrong(REPEATS, "times as large|you say")(lambda s, m, ids: masked(s, m, ids) / len(ids))
wrong(REPEATS, "nothing returned")(lambda s, m, ids: None)
wrong(REPEATS, "stops with AttributeError")(lambda s, m, ids: s.scores)
wrong(REPEATS, "no violation|you say|below 0")(
    lambda s, m, ids: (
        (m + s.i2t - s.i2t.diagonal()[:, None]).masked_fill(ids[:, None] == ids, -9).amax(1).sum()
        + (m + s.t2i - s.t2i.diagonal()[None]).masked_fill(ids[:, None] == ids, -9).amax(0).sum()
    )
)


@right(TOP)
def by_topk(scores, margin, k):
    positive = torch.eye(len(scores.i2t), dtype=torch.bool)
    rows = (margin + scores.i2t - scores.i2t.diagonal()[:, None]).clamp(min=0).masked_fill(positive, 0)
    columns = (margin + scores.t2i - scores.t2i.diagonal()[None, :]).clamp(min=0).masked_fill(positive, 0)
    return rows.topk(k, dim=1).values.sum() + columns.topk(k, dim=0).values.sum()


@right(TOP)
def by_sort(scores, margin, k):
    total = np.float64(0)
    for table, axis in ((scores.i2t.numpy(), 1), (scores.t2i.numpy(), 0)):
        costs = np.maximum(margin + table - np.expand_dims(np.diag(table), axis), 0)
        np.fill_diagonal(costs, 0)
        total += np.take(np.sort(costs, axis=axis), range(len(table) - k, len(table)), axis=axis).sum()
    return total


@right(TOP)
def by_loop(scores, margin, k):
    total = 0
    n = len(scores.i2t)
    for b in range(n):
        total += sum(sorted([max(0, margin + scores.i2t[b, c] - scores.i2t[b, b]) for c in range(n) if c != b])[-k:])
        total += sum(sorted([max(0, margin + scores.t2i[c, b] - scores.t2i[b, b]) for c in range(n) if c != b])[-k:])
    return total


wrong(TOP, "k is not used|k = 6")(lambda s, m, k: hinge_loss(s, m, True))
wrong(TOP, "all negatives, whatever k")(lambda s, m, k: hinge_loss(s, m, False))
wrong(TOP, "matrices are exchanged")(lambda s, m, k: by_topk(Scores(i2t=s.t2i, t2i=s.i2t), m, k))
wrong(TOP, "mean of the k")(lambda s, m, k: by_topk(s, m, k) / k)
wrong(TOP, "one direction")(
    lambda s, m, k: (m + s.i2t - s.i2t.diagonal()[:, None]).clamp(min=0).fill_diagonal_(0).topk(k, dim=1).values.sum()
)
wrong(TOP, "positive")(
    lambda s, m, k: (
        (m + s.i2t - s.i2t.diagonal()[:, None]).clamp(min=0).topk(k, dim=1).values.sum()
        + (m + s.t2i - s.t2i.diagonal()[None]).clamp(min=0).topk(k, dim=0).values.sum()
    )
)
wrong(TOP, "margin")(lambda s, m, k: by_topk(s, 0.2, k))
wrong(TOP, "nothing returned")(lambda s, m, k: None)
wrong(TOP, "shape")(lambda s, m, k: (m + s.i2t - s.i2t.diagonal()[:, None]).topk(k, dim=1).values.sum(1))
wrong(TOP, "you say")(lambda s, m, k: by_topk(s, m, len(s.i2t) - k))
wrong(TOP, "you say")(
    lambda s, m, k: (
        (m + s.i2t - s.i2t.diagonal()[:, None])
        .relu()
        .fill_diagonal_(0)
        .flatten()
        .topk(2 * k * len(s.i2t) // 2)
        .values.sum()
        * 2
    )
)
