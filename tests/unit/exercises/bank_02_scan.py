"""Answers to the exercises of chapter 02."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

HARD, POOL, DISTANCE = "ex-scan-hard", "ex-scan-pooling", "ex-scan-distance"


@right(HARD)
def by_einsum(regions, words):
    return torch.einsum("ird,cwd->icrw", regions, words).amax(dim=2).mean(dim=2)


@right(HARD)
def by_numpy(regions, words):
    return np.einsum("ird,cwd->icwr", regions.numpy(), words.numpy()).max(-1).mean(-1)


@right(HARD)
def by_matmul(regions, words):
    rows = [[(image @ caption.T).max(dim=0).values.mean().item() for caption in words] for image in regions]
    return rows


def table(regions, words):
    return torch.einsum("ird,cwd->icrw", regions, words)


wrong(HARD, "regions attending|best region of (each|the) word")(lambda v, e: table(v, e).amax(3).mean(2))
wrong(HARD, "rows (and|are)")(lambda v, e: by_einsum(v, e).T)
wrong(HARD, "divides by their number|times as large")(lambda v, e: table(v, e).amax(2).sum(2))
wrong(HARD, "best pair")(lambda v, e: table(v, e).amax((2, 3)))
wrong(HARD, "worst region")(lambda v, e: table(v, e).amin(2).mean(2))
wrong(HARD, "best region")(lambda v, e: table(v, e).mean((2, 3)))
wrong(HARD, "you say 0")(lambda v, e: table(v, e).amax(2).clamp(min=0).mean(2))
wrong(HARD, "shape")(lambda v, e: table(v, e).amax(2))
wrong(HARD, "nothing returned")(lambda v, e: None)
wrong(HARD, "stops with RuntimeError")(lambda v, e: v @ e)
wrong(HARD, "you say")(lambda v, e: table(v, e).argmax(2).float().mean(2))


@right(POOL)
def by_logsumexp(relevance, mask, sharpness):
    return (sharpness * relevance).masked_fill(~mask, -torch.inf).logsumexp(dim=1) / sharpness


@right(POOL)
def by_shift(relevance, mask, sharpness):
    relevance[~mask] = -1e4
    largest = relevance.amax(dim=1, keepdim=True)
    return (largest[:, 0] + (sharpness * (relevance - largest)).exp().sum(1).log() / sharpness).double()


@right(POOL)
def by_scipy(relevance, mask, sharpness):
    from scipy.special import logsumexp

    return logsumexp(np.where(mask, sharpness * relevance.numpy(), -np.inf), axis=1) / sharpness


wrong(POOL, "padding takes part|exp\\(0\\)")(lambda r, m, s: (s * r).logsumexp(1) / s)
wrong(POOL, "mean")(lambda r, m, s: (r * m).sum(1) / m.sum(1))
wrong(POOL, "maximum")(lambda r, m, s: r.masked_fill(~m, -9).amax(1))
wrong(POOL, "divide by the sharpness")(lambda r, m, s: (s * r).masked_fill(~m, -torch.inf).logsumexp(1))
wrong(POOL, "sharpness is not used|you say")(lambda r, m, s: r.masked_fill(~m, -torch.inf).logsumexp(1))
wrong(POOL, "overflow|large sharpness")(lambda r, m, s: ((s * r).exp() * m).sum(1).log() / s)
wrong(POOL, "log of a mean")(lambda r, m, s: (((s * r).exp() * m).sum(1) / m.sum(1)).log() / s)
wrong(POOL, "shape")(lambda r, m, s: (s * r).logsumexp(0) / s)
wrong(POOL, "nothing returned")(lambda r, m, s: None)
wrong(POOL, "exp\\(0\\)|padding")(lambda r, m, s: (s * r * m).logsumexp(1) / s)
wrong(POOL, "you say")(lambda r, m, s: (6.0 * r).masked_fill(~m, -torch.inf).logsumexp(1) / 6.0)


@right(DISTANCE)
def expanded(affinity, weights, gram, query_norm):
    dot = (weights * affinity).sum(dim=1)
    return query_norm.square() - 2 * dot + (weights * (gram @ weights)).sum(dim=1)


@right(DISTANCE)
def with_einsum(affinity, weights, gram, query_norm):
    square = torch.einsum("mkx,mkl,mlx->mx", weights, gram, weights)
    return square.add_(query_norm**2).sub_(2 * torch.einsum("mkx,mkx->mx", weights, affinity))


@right(DISTANCE)
def with_numpy(affinity, weights, gram, query_norm):
    a, w, g, n = (x.numpy() for x in (affinity, weights, gram, query_norm))
    return n**2 - 2 * (w * a).sum(1) + (w * (g @ w)).sum(1)


def terms(a, w, g, n):
    return n.square(), (w * a).sum(1), (w * (g @ w)).sum(1)


wrong(DISTANCE, "leave it squared")(lambda a, w, g, n: expanded(a, w, g, n).sqrt())
wrong(DISTANCE, "missing: the norm of the query")(lambda a, w, g, n: terms(a, w, g, n)[2] - 2 * terms(a, w, g, n)[1])
wrong(DISTANCE, "missing: the norm of the attended")(lambda a, w, g, n: terms(a, w, g, n)[0] - 2 * terms(a, w, g, n)[1])
wrong(DISTANCE, "missing: twice the inner")(lambda a, w, g, n: terms(a, w, g, n)[0] + terms(a, w, g, n)[2])
wrong(DISTANCE, "counts twice")(lambda a, w, g, n: terms(a, w, g, n)[0] - terms(a, w, g, n)[1] + terms(a, w, g, n)[2])
wrong(DISTANCE, "sign")(lambda a, w, g, n: terms(a, w, g, n)[0] + 2 * terms(a, w, g, n)[1] + terms(a, w, g, n)[2])
wrong(DISTANCE, "norm of the query|longer queries|you say")(
    lambda a, w, g, n: n - 2 * terms(a, w, g, n)[1] + terms(a, w, g, n)[2]
)
wrong(DISTANCE, "cosine")(lambda a, w, g, n: terms(a, w, g, n)[1] / (n * terms(a, w, g, n)[2].sqrt()))
wrong(DISTANCE, "shape")(lambda a, w, g, n: expanded(a, w, g, n).sum(0))
wrong(DISTANCE, "nothing returned")(lambda a, w, g, n: None)
wrong(DISTANCE, "you say")(
    lambda a, w, g, n: (
        terms(a, w, g, n)[0] - 2 * terms(a, w, g, n)[1] + (w * w * g.diagonal(dim1=1, dim2=2)[..., None]).sum(1)
    )
)
