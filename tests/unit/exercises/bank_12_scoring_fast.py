"""Answers to the exercises of chapter 12."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

from itm_utils import fast_attention as fast

PADDING, DISTANCE, BLOCKS = "ex-fast-padding", "ex-fast-distance", "ex-fast-blocks"


@right(PADDING)
def by_split(lengths, size):
    slots = sum(len(block) * int(block.max()) for block in lengths.split(size))
    return 1 - float(lengths.sum()) / slots


@right(PADDING)
def by_slices(lengths, size):
    numbers, padding, slots = lengths.tolist(), 0, 0
    for start in range(0, len(numbers), size):
        block = numbers[start : start + size]
        slots += len(block) * max(block)
        padding += sum(max(block) - n for n in block)
    return padding / slots


@right(PADDING)
def by_numpy(lengths, size):
    array = lengths.numpy()
    blocks = np.split(array, range(size, len(array), size))
    longest = np.concatenate([np.full(len(block), block.max()) for block in blocks])
    return (longest - array).sum() / longest.sum()


def share(blocks):
    slots = sum(len(block) * int(block.max()) for block in blocks)
    return 1 - sum(int(block.sum()) for block in blocks) / slots


wrong(PADDING, "one block")(lambda n, size: share([n]))
wrong(PADDING, "sorted")(lambda n, size: share(n.sort().values.split(size)))
wrong(PADDING, "holds words")(lambda n, size: 1 - by_split(n, size))
wrong(PADDING, "padding by the words")(lambda n, size: by_split(n, size) / (1 - by_split(n, size)))
wrong(PADDING, "last block")(
    lambda n, size: 1 - float(n.sum()) / sum(size * int(block.max()) for block in n.split(size))
)
wrong(PADDING, "mean of the blocks")(lambda n, size: sum(share([b]) for b in n.split(size)) / len(n.split(size)))
wrong(PADDING, "number of padded slots")(lambda n, size: sum(int((b.max() - b).sum()) for b in n.split(size)))
wrong(PADDING, "in per cent|100 times")(lambda n, size: 100 * by_split(n, size))
wrong(PADDING, "number of blocks|you say")(lambda n, size: share(n.chunk(size)))
wrong(PADDING, "left out|you say")(lambda n, size: share(n[: len(n) // size * size].split(size)))
wrong(PADDING, "nothing returned")(lambda n, size: None)


@right(DISTANCE)
def expanded(affinity, weights, gram, query_norm):
    square = torch.einsum("mkx,mkl,mlx->mx", weights, gram, weights)
    return query_norm**2 - 2 * (weights * affinity).sum(1) + square


@right(DISTANCE)
def with_numpy(affinity, weights, gram, query_norm):
    a, w, g, q = (tensor.double().numpy() for tensor in (affinity, weights, gram, query_norm))
    return (w * (g @ w - 2 * a)).sum(axis=1) + q**2


@right(DISTANCE)
def one_at_a_time(affinity, weights, gram, query_norm):
    rows = []
    for a, w, g in zip(affinity, weights, gram, strict=True):
        rows.append([q * q - 2 * u @ v + v @ g @ v for q, u, v in zip(query_norm, a.T, w.T, strict=True)])
    return torch.tensor(rows)


def terms(affinity, weights, gram, query_norm):
    return query_norm.square(), (weights * affinity).sum(1), (weights * (gram @ weights)).sum(1)


def of_terms(make):
    return lambda a, w, g, q: make(*terms(a, w, g, q))


wrong(DISTANCE, "leave it squared")(of_terms(lambda q, d, s: (q - 2 * d + s).sqrt()))
wrong(DISTANCE, "norm of the query")(of_terms(lambda q, d, s: s - 2 * d))
wrong(DISTANCE, "norm of the attended")(of_terms(lambda q, d, s: q - 2 * d))
wrong(DISTANCE, "inner product is missing")(of_terms(lambda q, d, s: q + s))
wrong(DISTANCE, "inner product counts twice")(of_terms(lambda q, d, s: q - d + s))
wrong(DISTANCE, "subtracted")(of_terms(lambda q, d, s: q + 2 * d + s))
wrong(DISTANCE, "norm of the query is to be squared")(lambda a, w, g, q: q - 2 * (w * a).sum(1) + (w * (g @ w)).sum(1))
wrong(DISTANCE, "cosine")(of_terms(lambda q, d, s: d / (q * s).sqrt()))
wrong(DISTANCE, "diagonal")(
    lambda a, w, g, q: q.square() - 2 * (w * a).sum(1) + (w.square() * g.diagonal(dim1=1, dim2=2)[..., None]).sum(1)
)
wrong(DISTANCE, "shape")(lambda a, w, g, q: q.square() - 2 * w * a + w * (g @ w))
wrong(DISTANCE, "nothing returned")(lambda a, w, g, q: None)


def attended(queries, keys, values, scale=None):
    return (queries @ keys.T / (scale or queries.shape[1] ** 0.5)).softmax(1) @ values


@right(BLOCKS)
def merged(queries, keys, values, size):
    total, ell = torch.zeros(len(queries), values.shape[1]), torch.full((len(queries),), -torch.inf)
    for start in range(0, len(keys), size):
        z = queries @ keys[start : start + size].T / queries.shape[1] ** 0.5
        own = z.logsumexp(1)
        total = fast.merge_softmaxes(total, ell, z.softmax(1) @ values[start : start + size], own)
        ell = torch.logaddexp(ell, own)
    return total


@right(BLOCKS)
def running_maximum(queries, keys, values, size):
    top = torch.full((len(queries), 1), -torch.inf)
    above, below = torch.zeros(len(queries), values.shape[1]), torch.zeros(len(queries), 1)
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        z = queries @ k.T / queries.shape[1] ** 0.5
        new = torch.maximum(top, z.amax(1, keepdim=True))
        above, below = above * (top - new).exp(), below * (top - new).exp()
        e = (z - new).exp()
        above, below, top = above + e @ v, below + e.sum(1, keepdim=True), new
    return above / below


@right(BLOCKS)
def weighed_at_the_end(queries, keys, values, size):
    parts, ells = [], []
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        z = queries @ k.T / queries.shape[1] ** 0.5
        parts.append(z.softmax(1) @ v)
        ells.append(z.logsumexp(1))
    return (torch.stack(ells).softmax(0)[..., None] * torch.stack(parts)).sum(0)


def blocks(queries, keys, values, size):
    pairs = zip(keys.split(size), values.split(size), strict=True)
    return torch.stack([attended(queries, k, v) for k, v in pairs])


def logsumexp_of_last(queries, keys, values, size):
    total = ell = None
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        z = queries @ k.T / queries.shape[1] ** 0.5
        own = z.logsumexp(1)
        total = z.softmax(1) @ v if total is None else fast.merge_softmaxes(total, ell, z.softmax(1) @ v, own)
        ell = own
    return total


def logsumexps_added(queries, keys, values, size):
    total = ell = None
    for k, v in zip(keys.split(size), values.split(size), strict=True):
        z = queries @ k.T / queries.shape[1] ** 0.5
        own = z.logsumexp(1)
        total = z.softmax(1) @ v if total is None else fast.merge_softmaxes(total, ell, z.softmax(1) @ v, own)
        ell = own if ell is None else ell + own
    return total


wrong(BLOCKS, "not scaled")(lambda q, k, v, size: merged(q * q.shape[1] ** 0.5, k, v, size))
wrong(BLOCKS, "square root")(lambda q, k, v, size: merged(q / q.shape[1] ** 0.5, k, v, size))
wrong(BLOCKS, "you say")(lambda q, k, v, size: attended(q, k, v, 1.0))
wrong(BLOCKS, "plain mean of the blocks")(lambda q, k, v, size: blocks(q, k, v, size).mean(0))
wrong(BLOCKS, "columns of logits at once|whole row|more than")(lambda q, k, v, size: attended(q, k, v))
wrong(BLOCKS, "sum of the blocks")(lambda q, k, v, size: blocks(q, k, v, size).sum(0))
wrong(BLOCKS, "last block alone")(lambda q, k, v, size: blocks(q, k, v, size)[-1])
wrong(BLOCKS, "first block alone")(lambda q, k, v, size: blocks(q, k, v, size)[0])
wrong(BLOCKS, "of all keys so far")(logsumexp_of_last)
wrong(BLOCKS, "logaddexp")(logsumexps_added)
wrong(BLOCKS, "shape|values")(lambda q, k, v, size: blocks(q, k, v, size))
wrong(BLOCKS, "overflow|NaN")(
    lambda q, k, v, size: (
        sum((q @ a.T / q.shape[1] ** 0.5).exp() @ b for a, b in zip(k.split(size), v.split(size), strict=True))
        / sum((q @ a.T / q.shape[1] ** 0.5).exp().sum(1, keepdim=True) for a in k.split(size))
    )
)
wrong(BLOCKS, "nothing returned")(lambda q, k, v, size: None)
