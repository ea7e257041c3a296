"""Answers to the exercises of chapter 09."""

from __future__ import annotations

import math

import numpy as np
import torch
from bank import right, wrong
from torch import nn

from itm_utils.matcher import Scores
from itm_utils.models.vsepp import hinge_loss

SHARE, LINES, CONTROL, DECODE = "ex-dcpa-few", "ex-dcpa-lines", "ex-dcpa-control", "ex-dcpa-decoder"


@right(SHARE)
def by_rank(values, mask, share):
    counts = (share * mask.sum(dim=1)).ceil().clamp(min=1)
    ordered = values.masked_fill(~mask, -math.inf).sort(dim=1, descending=True).values
    chosen = torch.arange(values.shape[1]) < counts[:, None]
    return ordered.masked_fill(~chosen, 0).sum(dim=1) / counts


@right(SHARE)
def python_floats(values, mask, share):
    result = []
    for row, real in zip(values, mask, strict=True):
        kept = sorted(row[real].tolist(), reverse=True)
        count = max(1, math.ceil(share * len(kept)))
        result.append(sum(kept[:count]) / count)
    return result


@right(SHARE)
def numpy_rows(values, mask, share):
    values[~mask] = -1e9
    ordered = -np.sort(-values.numpy().astype(np.float64), axis=1)
    counts = np.maximum(np.ceil(share * mask.numpy().sum(1)), 1).astype(int)
    return np.array([row[:n].mean() for row, n in zip(ordered, counts, strict=True)])


wrong(SHARE, "padding was counted")(lambda v, m, s: by_rank(v, torch.ones_like(m), s))
wrong(SHARE, "padding")(lambda v, m, s: by_rank(v * m, torch.ones_like(m), s))
wrong(SHARE, "entries of each row")(
    lambda v, m, s: torch.stack(
        [
            row[r].topk(min(int(r.sum()), max(1, math.ceil(s * len(row))))).values.mean()
            for row, r in zip(v, m, strict=True)
        ]
    )
)
wrong(SHARE, "rounded down|rounded up")(
    lambda v, m, s: torch.stack(
        [row[r].topk(max(1, math.floor(s * int(r.sum())))).values.mean() for row, r in zip(v, m, strict=True)]
    )
)
wrong(SHARE, "smallest")(lambda v, m, s: -by_rank(-v, m, s))
wrong(SHARE, "share is not used")(lambda v, m, s: by_rank(v, m, 0.5))
wrong(SHARE, "share is not used")(lambda v, m, s: (v * m).sum(1) / m.sum(1))
wrong(SHARE, "one entry too many|half of four|you say")(
    lambda v, m, s: torch.stack(
        [row[r].topk(min(int(r.sum()), int(s * int(r.sum())) + 1)).values.mean() for row, r in zip(v, m, strict=True)]
    )
)
wrong(SHARE, "round it up")(
    lambda v, m, s: torch.stack(
        [row[r].topk(int(s * int(r.sum()) + 0.5)).values.mean() for row, r in zip(v, m, strict=True)]
    )
)
wrong(SHARE, "shape")(lambda v, m, s: by_rank(v, m, s)[:, None].expand(-1, 3))
wrong(SHARE, "nothing returned")(lambda v, m, s: None)
wrong(SHARE, "times as large|you say")(lambda v, m, s: by_rank(v, m, s) * (s * m.sum(1)).ceil().clamp(min=1))
wrong(SHARE, "you say")(lambda v, m, s: v.masked_fill(~m, -9).amax(1))


@right(LINES)
def masked_lines(i2t, t2i, margin):
    positive = torch.eye(len(i2t), dtype=torch.bool)
    caption = i2t.masked_fill(positive, -math.inf).max(dim=1).values
    image = t2i.masked_fill(positive, -math.inf).max(dim=0).values
    return ((margin + caption - i2t.diagonal()).clamp(min=0) + (margin + image - t2i.diagonal()).clamp(min=0)).sum()


@right(LINES)
def lines_in_place(i2t, t2i, margin):
    own, other = i2t.diagonal().clone(), t2i.diagonal().clone()
    first = float((margin + i2t.fill_diagonal_(-9).amax(1) - own).relu().sum())
    return first + float((margin + t2i.fill_diagonal_(-9).amax(0) - other).relu().sum())


@right(LINES)
def numpy_lines(i2t, t2i, margin):
    a, b = i2t.numpy(), t2i.numpy()
    off = np.where(np.eye(len(a)), -np.inf, 0)
    return (
        np.maximum(margin + (a + off).max(1) - np.diag(a), 0).sum()
        + np.maximum(margin + (b + off).max(0) - np.diag(b), 0).sum()
    )


wrong(LINES, "both lines read i2t")(lambda i, t, m: masked_lines(i.clone(), i, m))
wrong(LINES, "both lines read t2i")(lambda i, t, m: masked_lines(t.clone(), t, m))
wrong(LINES, "matrices are exchanged")(lambda i, t, m: masked_lines(t, i, m))
wrong(LINES, "matrices are exchanged")(lambda i, t, m: masked_lines(i.T, t.T, m))
wrong(LINES, "along rows|down a column")(lambda i, t, m: masked_lines(i, t.T, m))
wrong(LINES, "positive pair")(
    lambda i, t, m: (m + i.amax(1) - i.diagonal()).sum() + (m + t.amax(0) - t.diagonal()).sum()
)
wrong(LINES, "sum over all negatives")(lambda i, t, m: hinge_loss(Scores(i, t), m, False))
wrong(LINES, "mean|times as large")(lambda i, t, m: masked_lines(i, t, m) / len(i))
wrong(LINES, "margin")(lambda i, t, m: masked_lines(i, t, 0.2))
wrong(LINES, "nothing returned")(lambda i, t, m: None)
wrong(LINES, "below 0|you say")(
    lambda i, t, m: (
        (m + i.clone().fill_diagonal_(-9).amax(1) - i.diagonal()).sum()
        + (m + t.clone().fill_diagonal_(-9).amax(0) - t.diagonal()).sum()
    )
)
wrong(LINES, "you say")(lambda i, t, m: (m + i.clone().fill_diagonal_(-9).amax(1) - i.diagonal()).relu().sum())


def recall(scores):
    return 100 * (scores.argmax(dim=0) == torch.arange(len(scores))).float().mean()


@right(CONTROL)
def averaged(full, first, second):
    return recall(full) - recall((first + second) / 2)


@right(CONTROL)
def summed_in_place(full, first, second):
    first += second
    return float(recall(full) - recall(first))


@right(CONTROL)
def numpy_control(full, first, second):
    here = np.arange(len(full))
    found = [np.mean(x.argmax(0) == here) for x in (full.numpy(), np.mean([first.numpy(), second.numpy()], axis=0))]
    return 100.0 * (found[0] - found[1])


wrong(CONTROL, "one stage one")(lambda f, a, b: recall(f) - recall(a))
wrong(CONTROL, "averages two recalls")(lambda f, a, b: recall(f) - (recall(a) + recall(b)) / 2)
wrong(CONTROL, "better of the two")(lambda f, a, b: recall(f) - max(recall(a), recall(b)))
wrong(CONTROL, "ranks captions|rank images|down a column")(lambda f, a, b: recall(f.T) - recall((a + b).T))
wrong(CONTROL, "sign")(lambda f, a, b: recall(a + b) - recall(f))
wrong(CONTROL, "percentage points|times as large")(lambda f, a, b: averaged(f, a, b) / 100)
wrong(CONTROL, "full model alone|nothing is gained")(lambda f, a, b: recall(f))
wrong(CONTROL, "nothing returned")(lambda f, a, b: None)
wrong(CONTROL, "values returned|shape|expected")(lambda f, a, b: (recall(f), recall(a + b)))
wrong(CONTROL, "you say")(lambda f, a, b: recall(f) - recall(torch.maximum(a, b)))
wrong(CONTROL, "you say")(lambda f, a, b: recall(f) - recall(a * b))


@right(DECODE)
def post_norm(queries, context, mask):
    logits = (queries @ context.mT / queries.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)
    return nn.functional.layer_norm(queries + logits.softmax(-1) @ context, queries.shape[-1:])


@right(DECODE)
def library(queries, context, mask):
    found = nn.functional.scaled_dot_product_attention(
        queries, context, context, attn_mask=mask[:, None].expand(-1, queries.shape[1], -1)
    )
    queries += found
    return nn.LayerNorm(queries.shape[-1], elementwise_affine=False)(queries)


@right(DECODE)
def numpy_decode(queries, context, mask):
    q, c = queries.numpy().astype(np.float64), context.numpy().astype(np.float64)
    z = np.where(mask.numpy()[:, None], q @ c.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -np.inf)
    w = np.exp(z - z.max(-1, keepdims=True))
    x = q + w / w.sum(-1, keepdims=True) @ c
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attend(q, c, m, scale=True):
    z = q @ c.mT / (q.shape[-1] ** 0.5 if scale else 1)
    return (z if m is None else z.masked_fill(~m[:, None], -torch.inf)).softmax(-1) @ c


def normed(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


wrong(DECODE, "padding takes part")(lambda q, c, m: normed(q + attend(q, c, None)))
wrong(DECODE, "not divided|root of the width")(lambda q, c, m: normed(q + attend(q, c, m, scale=False)))
wrong(DECODE, "residual")(lambda q, c, m: normed(attend(q, c, m)))
wrong(DECODE, "layer norm is missing")(lambda q, c, m: q + attend(q, c, m))
wrong(DECODE, "after the norm|add them before")(lambda q, c, m: q + normed(attend(q, c, m)))
wrong(DECODE, "self-attention")(lambda q, c, m: normed(q + attend(q, q, None)))
wrong(DECODE, "not a layer norm")(lambda q, c, m: nn.functional.normalize(q + attend(q, c, m), dim=-1))
wrong(DECODE, "shape")(lambda q, c, m: normed(attend(c, q, None)) if q.shape[1] != c.shape[1] else normed(q)[:, :0])
wrong(DECODE, "nothing returned")(lambda q, c, m: None)
wrong(DECODE, "shape")(lambda q, c, m: normed(q + attend(q, c, m[:, :1, None])))
wrong(DECODE, "padding|you say")(lambda q, c, m: normed(q + attend(q, c * m[..., None], None)))
