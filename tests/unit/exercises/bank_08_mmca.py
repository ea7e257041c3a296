"""Answers to the exercises of chapter 08."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

SECONDS, THREE, SELECT = "ex-mmca-cost", "ex-mmca-three", "ex-mmca-selection"


@right(SECONDS)
def plain(images, shortlist, per_second, first, pair):
    return (images * first + shortlist * pair[1]) / per_second


@right(SECONDS)
def unpacked(images, shortlist, per_second, first, pair):
    _, prepared = pair
    return np.float64(images * first) / per_second + np.float64(shortlist) * prepared / per_second


@right(SECONDS)
def tensor(images, shortlist, per_second, first, pair):
    return torch.tensor([images * first + shortlist * pair[-1]], dtype=torch.float64) / per_second


wrong(SECONDS, "second number")(lambda i, s, p, f, pair: (i * f + s * pair[0]) / p)
wrong(SECONDS, "not free")(lambda i, s, p, f, pair: s * pair[1] / p)
wrong(SECONDS, "shortlist alone|you say")(lambda i, s, p, f, pair: (i * f + i * pair[1]) / p)
wrong(SECONDS, "have a first score")(lambda i, s, p, f, pair: ((i - s) * f + s * pair[1]) / p)
wrong(SECONDS, "times as large|in a second")(lambda i, s, p, f, pair: i * f + s * pair[1])
wrong(SECONDS, "you say")(lambda i, s, p, f, pair: (i * 256 + s * pair[1]) / p)
wrong(SECONDS, "nothing returned")(lambda i, s, p, f, pair: None)
wrong(SECONDS, "stops with TypeError")(lambda i, s, p, f, pair: (i * f + s * pair / 2) / p)
wrong(SECONDS, "times as large|you say")(lambda i, s, p, f, pair: plain(i, s, p, f, pair) * 1000)
wrong(SECONDS, "both numbers|you say")(lambda i, s, p, f, pair: (i * f + s * sum(pair)) / p)
wrong(SECONDS, "missing|you say")(lambda i, s, p, f, pair: i * f / p)


@right(THREE)
def softmaxed(logsumexp, attended):
    return (logsumexp.softmax(dim=0)[..., None] * attended).sum(dim=0)


@right(THREE)
def shifted(logsumexp, attended):
    size = (logsumexp - logsumexp.amax(0)).exp_()
    attended *= (size / size.sum(0)).unsqueeze(-1)
    return attended.sum(0)


@right(THREE)
def numpy_three(logsumexp, attended):
    z = logsumexp.numpy().astype(np.float64)
    w = np.exp(z - z.max(0))
    return np.einsum("sq,sqd->qd", w / w.sum(0), attended.numpy())


wrong(THREE, "plain mean|keys")(lambda z, a: a.mean(0))
wrong(THREE, "take exp|softmax")(lambda z, a: ((z / z.sum(0))[..., None] * a).sum(0))
wrong(THREE, "run over the sides|axis 0")(lambda z, a: (z.softmax(1)[..., None] * a).sum(0))
wrong(THREE, "do not sum to one|times as large")(lambda z, a: (z.exp()[..., None] * a).sum(0))
wrong(THREE, "NaN|overflow")(lambda z, a: ((z.exp() / z.exp().sum(0))[..., None] * a).sum(0))
wrong(THREE, "strongest side|plain mean|you say")(lambda z, a: a[z.argmax(0), torch.arange(z.shape[1])])
wrong(THREE, "sigmoid|you say")(lambda z, a: (z.sigmoid()[..., None] * a).sum(0))
wrong(THREE, "shape")(lambda z, a: z.softmax(0)[..., None] * a)
wrong(THREE, "nothing returned")(lambda z, a: None)
wrong(THREE, "smaller log-sum-exp|you say")(lambda z, a: ((-z).softmax(0)[..., None] * a).sum(0))
wrong(THREE, "stops with RuntimeError|shape|you say")(lambda z, a: z.softmax(0).T @ a)


def table_of(score, x, y):
    n = len(x)
    return score(x.repeat_interleave(n, 0), y.repeat(n, 1)).view(n, n)


def selected(score, x, y):
    with torch.no_grad():
        table = table_of(score, x, y).fill_diagonal_(-torch.inf)
    return table.argmax(1), table.argmax(0)


@right(SELECT)
def three_calls(score, x, y, margin):
    captions, images = selected(score, x, y)
    own = score(x, y)
    return (margin + score(x, y[captions]) - own).relu().sum() + (margin + score(x[images], y) - own).relu().sum()


@right(SELECT)
def one_call(score, x, y, margin):
    captions, images = selected(score, x, y)
    found = score(torch.cat([x, x, x[images]]), torch.cat([y, y[captions], y])).view(3, -1)
    return (margin + found[1:] - found[0]).clamp(min=0).sum()


@right(SELECT)
def row_by_row(score, x, y, margin):
    n, total = len(x), 0.0
    with torch.no_grad():
        table = torch.stack([score(x[b : b + 1].expand(n, -1), y) for b in range(n)])
        table[torch.eye(n, dtype=torch.bool)] = -torch.inf
    own = score(x, y)
    for b in range(n):
        c, i = int(table[b].argmax()), int(table[:, b].argmax())
        total = total + torch.clamp(margin + score(x[[b]], y[[c]])[0] - own[b], min=0)
        total = total + torch.clamp(margin + score(x[[i]], y[[b]])[0] - own[b], min=0)
    return total


@wrong(SELECT, "pairs scored with gradients|no_grad")
def everything_with_gradients(score, x, y, margin):
    table = table_of(score, x, y)
    own, other = table.diagonal(), 1 - torch.eye(len(x))
    rows = ((margin + table - own[:, None]).relu() * other).amax(1)
    return rows.sum() + ((margin + table - own[None]).relu() * other).amax(0).sum()


@wrong(SELECT, "does not require grad|stops with")
def nothing_with_gradients(score, x, y, margin):
    with torch.no_grad():
        return three_calls(score, x, y, margin)


@wrong(SELECT, "captions look for images")
def images_only(score, x, y, margin):
    captions, _ = selected(score, x, y)
    return (margin + score(x, y[captions]) - score(x, y)).relu().sum()


@wrong(SELECT, "positive scores have no gradient|gradient")
def positives_without(score, x, y, margin):
    captions, images = selected(score, x, y)
    with torch.no_grad():
        own = score(x, y)
    return (margin + score(x, y[captions]) - own).relu().sum() + (margin + score(x[images], y) - own).relu().sum()


@wrong(SELECT, "the loss")
def positives_as_negatives(score, x, y, margin):
    with torch.no_grad():
        table = table_of(score, x, y)
    own = score(x, y)
    return (margin + score(x, y[table.argmax(1)]) - own).relu().sum() + (
        margin + score(x[table.argmax(0)], y) - own
    ).relu().sum()


wrong(SELECT, "the loss.*times as large|the loss")(lambda score, x, y, m: three_calls(score, x, y, m) / len(x))
wrong(SELECT, "the loss|the gradient")(lambda score, x, y, m: three_calls(score, x, y, 0.0))
wrong(SELECT, "nothing returned")(lambda score, x, y, m: None)
wrong(SELECT, "the loss")(lambda score, x, y, m: three_calls(lambda a, b: -score(a, b), x, y, m))
wrong(SELECT, "stops with")(lambda score, x, y, m: score(x, y.repeat(2, 1)))
wrong(SELECT, "does not require grad|stops with")(lambda score, x, y, m: three_calls(score, x, y, m).item())


@wrong(SELECT, "the loss")
def random_negatives(score, x, y, margin):
    own = score(x, y)
    return (margin + score(x, y.roll(1, 0)) - own).relu().sum() + (
        margin + score(x.roll(1, 0), y) - own + 1e-2
    ).relu().sum()
