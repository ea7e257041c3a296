"""Answers to the exercises of chapter 14."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

LIST, IVF, QUANTISED = "ex-scale-list", "ex-scale-ivf", "ex-scale-quantised"


@right(LIST)
def gathered(cheap, full):
    best = full.argmax(0, keepdim=True)
    return (cheap >= cheap.gather(0, best)).sum(0)


@right(LIST)
def caption_by_caption(cheap, full):
    lengths = []
    for c in range(cheap.shape[1]):
        wanted = full[:, c].argmax()
        lengths.append(sum(1 for score in cheap[:, c].tolist() if score >= cheap[wanted, c].item()))
    return lengths


@right(LIST)
def with_numpy(cheap, full):
    cheap, best = cheap.numpy(), full.numpy().argmax(axis=0)
    return np.sum(cheap >= cheap[best, np.arange(len(best))], axis=0)


def shortest(cheap, full, count=torch.ge):
    return count(cheap, cheap.gather(0, full.argmax(0, keepdim=True))).sum(0)


wrong(LIST, "one too few")(lambda cheap, full: shortest(cheap, full) - 1)
wrong(LIST, "same cheap score")(lambda cheap, full: shortest(cheap, full, torch.gt) + 1)
wrong(LIST, "exchanged")(lambda cheap, full: shortest(full, cheap))
wrong(LIST, "from captions to images|other direction")(lambda cheap, full: shortest(cheap.T, full.T))
wrong(LIST, "which image|number of the image")(lambda cheap, full: full.argmax(0))
wrong(LIST, "worst|smallest")(lambda cheap, full: shortest(-cheap, full))
wrong(LIST, "ranks last")(lambda cheap, full: shortest(cheap, -full))
wrong(LIST, "longest|one number per caption|shape")(lambda cheap, full: shortest(cheap, full).max())
wrong(LIST, "share|times as large")(lambda cheap, full: shortest(cheap, full) / len(cheap))
wrong(LIST, "you say|caption's own|over all captions")(
    lambda cheap, full: (cheap[..., None] >= cheap.gather(0, full.argmax(0, keepdim=True))[:, None]).sum((0, 1))
)
wrong(LIST, "nothing returned")(lambda cheap, full: None)


@right(IVF)
def masked(vectors, centres, query, probes):
    cell = (vectors @ centres.T).argmax(1)
    scores = vectors @ query
    scores[~torch.isin(cell, (centres @ query).topk(probes).indices)] = -torch.inf
    return int(scores.argmax()) if scores.max() > -torch.inf else -1


@right(IVF)
def list_by_list(vectors, centres, query, probes):
    lists = [[] for _ in centres]
    for number, vector in enumerate(vectors):
        lists[int((centres @ vector).argmax())].append(number)
    read = (centres @ query).argsort(descending=True)[:probes].tolist()
    there = [number for cell in read for number in lists[cell]]
    return max(there, key=lambda number: float(vectors[number] @ query)) if there else -1


@right(IVF)
def numpy_lists(vectors, centres, query, probes):
    vectors, centres, query = vectors.numpy(), centres.numpy(), query.numpy()
    read = np.argsort(-(centres @ query))[:probes]
    numbers = np.flatnonzero(np.isin((vectors @ centres.T).argmax(axis=1), read))
    return numbers[(vectors[numbers] @ query).argmax()] if len(numbers) else -1


def search(vectors, query, cell, read, empty=-1):
    there = torch.isin(cell, torch.as_tensor(read)).nonzero()[:, 0]
    return int(there[(vectors[there] @ query).argmax()]) if len(there) else empty


def cells(vectors, centres):
    return (vectors @ centres.T).argmax(1)


wrong(IVF, "exact search")(lambda v, c, q, n: int((v @ q).argmax()))
wrong(IVF, "-1")(lambda v, c, q, n: search(v, q, cells(v, c), (c @ q).topk(n).indices, 0))
wrong(IVF, "one list")(lambda v, c, q, n: search(v, q, cells(v, c), [int((c @ q).argmax())]))
wrong(IVF, "farthest")(lambda v, c, q, n: search(v, q, cells(v, c), (-(c @ q)).topk(n).indices))
wrong(IVF, "smallest inner product")(lambda v, c, q, n: search(v, -q, cells(v, c), (c @ q).topk(n).indices))
wrong(IVF, "within the lists|number of the vector")(
    lambda v, c, q, n: (
        int((v[torch.isin(cells(v, c), (c @ q).topk(n).indices)] @ q).argmax())
        if torch.isin(cells(v, c), (c @ q).topk(n).indices).any()
        else -1
    )
)
wrong(IVF, "first lists|first `probes`")(lambda v, c, q, n: search(v, q, cells(v, c), range(n)))
wrong(IVF, "distance")(lambda v, c, q, n: search(v, q, torch.cdist(v, c).argmin(1), (c @ q).topk(n).indices))
wrong(IVF, "number of the list|centre")(lambda v, c, q, n: int((c @ q).argmax()))
wrong(IVF, "inner product itself|not its score")(
    lambda v, c, q, n: (
        float((v[torch.isin(cells(v, c), (c @ q).topk(n).indices)] @ q).max())
        if torch.isin(cells(v, c), (c @ q).topk(n).indices).any()
        else -1
    )
)
wrong(IVF, "stops with")(lambda v, c, q, n: search(v, q, (v @ c).argmax(1), (c @ q).topk(n).indices))
wrong(IVF, "nothing returned")(lambda v, c, q, n: None)


@right(QUANTISED)
def with_tables(vectors, codebooks, query):
    parts, _, width = codebooks.shape
    pieces = vectors.view(len(vectors), parts, width).transpose(0, 1)
    codes = torch.cdist(pieces, codebooks).argmin(-1)
    tables = (codebooks @ query.view(parts, width, 1))[..., 0]
    return tables.gather(1, codes).sum(0)


@right(QUANTISED)
def part_by_part(vectors, codebooks, query):
    scores = 0
    for words, piece, asked in zip(
        codebooks, vectors.chunk(len(codebooks), 1), query.chunk(len(codebooks)), strict=True
    ):
        code = ((piece[:, None] - words) ** 2).sum(-1).argmin(1)
        scores = scores + (words @ asked)[code]
    return scores


@right(QUANTISED)
def rebuilt(vectors, codebooks, query):
    vectors, codebooks, query = vectors.numpy(), codebooks.numpy(), query.numpy()
    parts, _, width = codebooks.shape
    found = []
    for vector in vectors:
        pieces = vector.reshape(parts, width)
        words = [c[((c - p) ** 2).sum(1).argmin()] for c, p in zip(codebooks, pieces, strict=True)]
        found.append(float(np.concatenate(words) @ query))
    return found


def pieces_of(vectors, codebooks, interleaved=False):
    parts, _, width = codebooks.shape
    if interleaved:
        return vectors.view(len(vectors), width, parts).permute(2, 0, 1)
    return vectors.view(len(vectors), parts, width).transpose(0, 1)


def nearest(pieces, codebooks):
    return torch.cdist(pieces, codebooks).argmin(-1)


def looked_up(codes, codebooks, asked):
    return (codebooks @ asked[..., None])[..., 0].gather(1, codes).sum(0)


def asked_of(query, codebooks):
    return query.view(len(codebooks), -1)


def coded(vectors, codebooks):
    return nearest(pieces_of(vectors, codebooks), codebooks)


wrong(QUANTISED, "vectors themselves|not compressed")(lambda v, c, q: v @ q)
wrong(QUANTISED, "nearest by distance|largest inner product")(
    lambda v, c, q: looked_up((pieces_of(v, c) @ c.mT).argmax(-1), c, asked_of(q, c))
)
wrong(QUANTISED, "query stays|query is compressed")(
    lambda v, c, q: looked_up(
        coded(v, c), c, torch.stack([words[code] for words, code in zip(c, coded(q[None], c)[:, 0], strict=True)])
    )
)
wrong(QUANTISED, "lie together|interleaved")(
    lambda v, c, q: looked_up(nearest(pieces_of(v, c, True), c), c, pieces_of(q[None], c, True)[:, 0].contiguous())
)
wrong(QUANTISED, "first part alone")(lambda v, c, q: looked_up(coded(v, c)[:1], c[:1], asked_of(q, c)[:1]))
wrong(QUANTISED, "mean over the parts")(lambda v, c, q: looked_up(coded(v, c), c, asked_of(q, c)) / len(c))
wrong(QUANTISED, "farthest")(lambda v, c, q: looked_up(torch.cdist(pieces_of(v, c), c).argmax(-1), c, asked_of(q, c)))
wrong(QUANTISED, "codebook of its own|first codebook")(
    lambda v, c, q: looked_up(nearest(pieces_of(v, c), c[:1].expand_as(c)), c[:1].expand_as(c), asked_of(q, c))
)
wrong(QUANTISED, "codes|shape")(lambda v, c, q: coded(v, c).T)
wrong(QUANTISED, "shape")(lambda v, c, q: (c @ asked_of(q, c)[..., None])[..., 0].gather(1, coded(v, c)))
wrong(QUANTISED, "distance to the query|inner product, not")(
    lambda v, c, q: (c - asked_of(q, c)[:, None]).square().sum(-1).gather(1, coded(v, c)).sum(0)
)
wrong(QUANTISED, "nothing returned")(lambda v, c, q: None)
