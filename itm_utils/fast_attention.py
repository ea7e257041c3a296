"""The fast kernels behind the models: the plain computation's numbers with less work. Chapter 12 derives each of them.

Letters beside those of the book: ``m`` items hold ``k`` keys each, ``n`` items hold ``q`` queries each, ``x`` queries of
several items stand side by side; heads have width ``e``. ``shapes`` lists (q, n) for each group of items with equally many
queries, in the order of the ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from itm_utils.errors import input_error
from itm_utils.matcher import Attention, Encoded, Images, Matcher, Scores, Texts, length_mask

EPS = 1e-8  # of the public code: added to a norm before dividing by it
TINY = 1e-30  # keeps the gradient of a square root finite at zero
TILE = {"cpu": 2**20}  # affinities in work at a time: they fit into the cache
DEVICE_TILE = 2**26  # the same on every other device
GRAPH_FACTOR = 4  # bytes of a pair's graph over those of scoring it: measured in a test

Shapes = list[tuple[int, int]]


def vector_norm(x: Tensor, dim: int = -1) -> Tensor:
    """L2 norm along ``dim``, which stays as an axis of size 1.

    torch.linalg.vector_norm rounds differently, and is slower along a middle axis.
    """
    return x.square().sum(dim=dim, keepdim=True).clamp_min(TINY).sqrt()


def full_precision(x: Tensor) -> AbstractContextManager:
    """Disable autocast around attention. (The meta device has no autocast.)"""
    kind = x.device.type
    return nullcontext() if x.is_meta else torch.autocast(kind, enabled=False)


def send(index: Tensor, device: torch.device) -> Tensor:
    """Copy indices to a device without waiting for it."""
    return index.to(device, non_blocking=True)


# ------------------------------------------------------------------------------------- items of equal length together


class Packed(NamedTuple):
    """The vectors of some items without padding, items of equal length side by side."""

    vectors: Tensor  # (x, d), group by group
    shapes: Shapes  # (n, k) per group: its items, the vectors of each
    order: Tensor  # all rows of the items, in the order of the groups; on the CPU
    by_position: bool  # within a group: all first vectors, all second ones, …

    def groups(self) -> list[Tensor]:
        """Vectors (n, k, d) of each group."""
        parts = self.vectors.split([n * k for n, k in self.shapes])
        both = zip(parts, self.shapes, strict=True)
        if self.by_position:
            return [p.unflatten(0, (k, n)).transpose(0, 1) for p, (n, k) in both]
        return [part.unflatten(0, shape) for part, shape in both]


def check_not_empty(lengths: Tensor) -> None:
    """Refuse items without regions or words; lengths are on the CPU."""
    if int(lengths.min()) == 0:
        raise input_error("mask", "an item without regions or words", "at least one in each")


def with_lengths(items: Encoded) -> Encoded:
    """The items with their lengths; if only the mask knows them, wait for its device."""
    if items.lengths is None:
        mask = items.mask.cpu()
        lengths, local = mask.sum(dim=1), items.local
        if not torch.equal(mask, length_mask(lengths, mask.shape[1])):  # it has holes
            front = mask.int().argsort(dim=1, descending=True, stable=True)
            front = front.to(local.device)[..., None].expand_as(local)
            local = local.gather(1, front)
        items = replace(items, local=local, lengths=lengths)
    check_not_empty(items.lengths)
    return items


def pack(items: Encoded, by_position: bool = False) -> Packed:
    """Copy the real vectors of items, grouped by their number."""
    items = with_lengths(items)
    local, (lengths, order) = items.local, items.lengths.sort(stable=True)
    sizes, counts = lengths.unique_consecutive(return_counts=True)
    sizes, counts = sizes.tolist(), counts.tolist()
    shapes = list(zip(counts, sizes, strict=True))
    vectors, width = local.flatten(0, 1), local.shape[1]
    if by_position or shapes != [(len(local), width)]:  # else there is nothing to copy
        places = []
        for rows, size in zip(order.split(counts), sizes, strict=True):
            place = rows[:, None] * width + torch.arange(size)  # (n, k)
            places.append((place.T if by_position else place).flatten())
        vectors = vectors.index_select(0, send(torch.cat(places), local.device))
    return Packed(vectors, shapes, order, by_position)


def split_groups(columns: Tensor, shapes: Shapes) -> list[Tensor]:
    """Split the last axis into groups of n items with q queries each: (..., q, n)."""
    parts = columns.split([q * n for q, n in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


# ------------------------------------------------------------------------------- attention without attended vectors


class PairMask(NamedTuple):
    """Which keys and queries of given pairs are real; the others are zero vectors."""

    keys: Tensor  # (m, k, 1)
    queries: Tensor  # (m, 1, q)


def attend_groups(
    affinity: Tensor,
    shapes: Shapes,
    normalize: Callable[..., Tensor],
    temperature: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Attention weights (m, k, x): a softmax over the keys k for each of the x queries.

    normalize: affinity (m, k, q, n), real -> the same, normalised over the queries of each item. temperature: an inverse
    one, the factor before the softmax. mask: None if all keys and queries are real.
    """
    real = None if mask is None else mask.queries[..., None]
    parts = [normalize(part, real=real).flatten(-2) for part in split_groups(affinity, shapes)]
    normalized = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    logits = temperature * normalized
    if mask is not None:
        logits = logits.masked_fill(~mask.keys, -torch.inf)
    return logits.softmax(dim=1)


def pool_groups(values: Tensor, shapes: Shapes, pool: Callable[..., Tensor], mask: PairMask | None = None) -> Tensor:
    """Pool values (m, x) of queries over each item, group by group: (m, n).

    pool: values (m, q, n), real (m, q, 1) or None -> (m, n).
    """
    real = None if mask is None else mask.queries.mT
    return torch.cat([pool(part, real=real) for part in split_groups(values, shapes)], dim=-1)


def cosine_from_gram(affinity: Tensor, weights: Tensor, gram: Tensor, query_norm: Tensor) -> Tensor:
    """Relevance (m, x): cosine of each query with its attended vector, never built.

    affinity, weights: (m, k, x). gram: (m, k, k). query_norm: (x,) or (m, x).
    """
    dot = (weights * affinity).sum(dim=1)
    square = (weights * (gram @ weights)).sum(dim=1)
    attended_norm = square.clamp_min(TINY).sqrt()
    return dot / (query_norm * attended_norm).clamp_min(EPS)


def row_strips(affinity: Tensor, keys: Packed) -> list[Tensor]:
    """Affinities (m, k, x) of each group of keys, from those of all keys, (y, x)."""
    parts = affinity.split([m * k for m, k in keys.shapes])
    return [p.unflatten(0, shape) for p, shape in zip(parts, keys.shapes, strict=True)]


def column_strips(affinity: Tensor, rows: Packed, columns: Packed) -> Iterator[Tensor]:
    """Affinities (n, q, y) of each group of columns, turned: its words become the keys.

    affinity: (y, x). rows: item by item. columns: by position.
    """
    groups = affinity.split([n * q for n, q in columns.shapes], dim=1)
    for group, (n, q) in zip(groups, columns.shapes, strict=True):
        parts = [part.unflatten(-1, (q, n)) for part in row_strips(group, rows)]
        turned = [p.permute(3, 2, 1, 0).flatten(2) for p in parts]  # (n, q, k * m)
        yield torch.cat(turned, dim=-1) if len(turned) > 1 else turned[0]


def score_strips(strips: Iterable[Tensor], keys: Packed, queries: Packed, pair_score: Callable[..., Tensor]) -> Tensor:
    """Scores (m, n) of all items, from the affinities (m, k, x) of each group of keys.

    pair_score: affinity (m, k, x), gram (m, k, k), query_norm (x,), shapes -> (m, n).
    """
    norms = [vector_norm(group)[..., 0].T.flatten() for group in queries.groups()]
    query_norm, shapes = torch.cat(norms), [(q, n) for n, q in queries.shapes]
    scores = []
    for strip, group in zip(strips, keys.groups(), strict=True):
        gram = group @ group.mT
        step = max(1, tile_size(strip.device) // strip[0].numel())
        for tile, part in zip(strip.split(step), gram.split(step), strict=True):
            scores.append(pair_score(tile, part, query_norm, shapes))
    rows, columns = (send(side.order.argsort(), strip.device) for side in (keys, queries))
    return torch.cat(scores).index_select(0, rows).index_select(1, columns)


def tile_size(device: torch.device) -> int:
    """How many affinities are in work at a time."""
    return TILE.get(device.type) or DEVICE_TILE


def score_all_pairs(keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]) -> Tensor:
    """Score every item that holds keys with every item that holds queries: (m, n).

    pair_score: see score_strips.
    """
    rows, columns = pack(keys), pack(queries, by_position=True)
    with full_precision(keys.local):
        affinity = rows.vectors @ columns.vectors.T  # the one product
        return score_strips(row_strips(affinity, rows), rows, columns, pair_score)


def score_both_ways(images: Images, texts: Texts, pair_score: Callable[..., Tensor]) -> Tensor:
    """Sum (i, c) of the scores of both directions, from one product."""
    rows, columns = pack(images), pack(texts, by_position=True)
    with full_precision(images.local):
        affinity = rows.vectors @ columns.vectors.T
        t2i = score_strips(row_strips(affinity, rows), rows, columns, pair_score)
        turned = column_strips(affinity, rows, columns)
        return t2i + score_strips(turned, columns, rows, pair_score).T


# ---------------------------------------------------------------------------------------------------- given pairs


def padded_pairs(keys: Encoded, queries: Encoded) -> tuple[Tensor, Tensor, PairMask]:
    """Keys (b, k, d), queries (b, q, d), both zero at padding, and which are real."""
    for side in (keys, queries):
        if side.lengths is not None:
            check_not_empty(side.lengths)
    k, q = (s.local.masked_fill(~s.mask[..., None], 0) for s in (keys, queries))
    return k, q, PairMask(keys.mask[:, :, None], queries.mask[:, None, :])


def score_padded(
    affinity: Tensor, keys: Tensor, queries: Tensor, mask: PairMask, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Scores (b,) of padded pairs from their affinities (b, k, q)."""
    norm, shapes = vector_norm(queries)[..., 0], [(queries.shape[1], 1)]
    return pair_score(affinity, keys @ keys.mT, norm, shapes, mask=mask)[:, 0]


def score_given_pairs(keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]) -> Tensor:
    """Score item b with item b only: (b,)."""
    k, q, mask = padded_pairs(keys, queries)
    with full_precision(k):
        return score_padded(k @ q.mT, k, q, mask, pair_score)


def score_given_pairs_both_ways(images: Images, texts: Texts, pair_score: Callable[..., Tensor]) -> Tensor:
    """Sum (b,) of the scores of both directions of image b with caption b, from one product."""
    regions, words, mask = padded_pairs(images, texts)
    turned = PairMask(mask.queries.mT, mask.keys.mT)
    with full_precision(regions):
        affinity = regions @ words.mT
        t2i = score_padded(affinity, regions, words, mask, pair_score)
        affinity = affinity.mT.contiguous()
        i2t = score_padded(affinity, words, regions, turned, pair_score)
    return t2i + i2t


def pair_attention(keys: Encoded, queries: Encoded, attend: Callable[..., Tensor]) -> Attention:
    """Attention weights of matched pairs, padded and inside the graph.

    attend: affinity (b, k, q), shapes, mask -> weights (b, k, q).
    """
    k, q, mask = padded_pairs(keys, queries)
    with full_precision(k):
        weights = attend(k @ q.mT, [(q.shape[1], 1)], mask=mask)
    weights = weights.masked_fill(~mask.queries, 0).mT
    return Attention(weights, queries.local, keys.local, queries.mask, keys.mask)


# ------------------------------------------------------------------------- one softmax from two, and heads of all pairs


def additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """0 where there is a key, minus infinity at padding: to be added to logits."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)


def attend_pairs(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries (b, q, h, e) over keys and values (b, k, h, e).

    Queries come scaled by 1 / sqrt(e). mask: (b, k), True where there is a key. Returns attended values (b, q, h, e) and
    the log-sum-exp of the logits (b, q, h), which PyTorch's scaled_dot_product_attention does not give.
    """
    logits = torch.einsum("bqhe,bkhe->bhqk", queries, keys)
    logits = logits + additive_mask(mask, logits)[:, None, None]
    logsumexp = logits.logsumexp(dim=-1, keepdim=True)
    attended = torch.einsum("bhqk,bkhe->bqhe", (logits - logsumexp).exp(), values)
    return attended, logsumexp[..., 0].mT


def all_pair_logits(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Logits (h, n, k, m, q) of queries (m, q, h, e) with keys (n, k, h, e)."""
    # keys before queries: a softmax along an axis that is not the last is faster
    logits = torch.einsum("nkhe,mqhe->hnkmq", keys, queries)
    return logits + additive_mask(mask, logits)[..., None, None]


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Attended values (m, n, q, h, e) of all pairs; weights (h, n, k, m, q)."""
    return torch.einsum("hnkmq,nkhe->mnqhe", weights, values)


def attend_all_pairs(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``attend_pairs`` for all pairs: queries of m items (m, q, h, e), keys of n (n, k, h, e).

    Returns attended values (m, n, q, h, e) and the log-sum-exp (m, n, q, h).
    """
    logits = all_pair_logits(queries, keys, mask)
    weights = logits.softmax(dim=2)
    attended = weighted_values(weights, values)
    # a weight is exp(logit - logsumexp): the largest one gives it, without more exp
    logsumexp = logits.amax(dim=2) - weights.amax(dim=2).log()
    return attended, logsumexp.permute(2, 1, 3, 0)


def merge_softmaxes(one: Tensor, one_logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> Tensor:
    """Attended values (…, e) of one softmax over two groups of keys, from those of each group alone.

    one, other: (…, e) with the log-sum-exp (…) of their logits.
    """
    gate = torch.sigmoid(other_logsumexp - one_logsumexp)  # the share of the other group
    return torch.lerp(one, other, gate[..., None])


def best_cosines(vectors: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Largest cosine (…, n, q) of each vector (…, n, q, d) with the L2-normalised keys (n, k, d) of its item.

    mask: (n, k), True where there is a key.
    """
    affinity = vectors @ keys.mT + additive_mask(mask, vectors)[:, None]
    # divide each row's maximum by its norm, rather than every entry of the row
    norm = torch.linalg.vector_norm(vectors, dim=-1).clamp(min=1e-12)
    return affinity.amax(dim=-1) / norm


def max_over_windows(tokens: Tensor, weights: list[Tensor], biases: list[Tensor], positions: list[Tensor]) -> Tensor:
    """Text CNN of many short rows, one product for all taps of all filters: (b, filters of all windows).

    tokens: (b, w, d), zero at padding. weights: (channels, d, window) with windows of 1, 2, … tokens, biases (channels,).
    positions: (b, 1) for each window, how many of its places count in each row.
    """
    taps_first = [weight.movedim(2, 0) for weight in weights]
    # the taps (channels, d) of all windows, one below the other
    products = tokens @ torch.cat(taps_first).flatten(0, 1).T  # (b, w, taps * channels)
    taps = iter(products.chunk(sum(map(len, taps_first)), dim=2))
    pooled = []
    for window, (bias, inside) in enumerate(zip(biases, positions, strict=True), start=1):
        places = tokens.shape[1] - window + 1
        outside = torch.arange(places, device=tokens.device) >= inside
        mask = torch.where(outside, -math.inf, 0.0)[..., None]
        shifted = (next(taps)[:, n : n + places] for n in range(window))
        responses = sum(shifted, start=mask)
        pooled.append((responses.amax(dim=1) + bias).relu())
    return torch.cat(pooled, dim=1)


# ----------------------------------------------------------------------------------- selection without gradients


def hardest_negatives(scores: Scores, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Hardest negative caption per image and image per caption, from scores (b, b) without gradients: (b, 1) each.

    positive: what is no negative, (b, b).
    """
    captions = scores.i2t.masked_fill(positive, -math.inf).argmax(dim=1)
    images = scores.t2i.masked_fill(positive, -math.inf).argmax(dim=0)
    return captions[:, None], images[:, None]


def score_selected(model: Matcher, images: Images, texts: Texts, rows: Tensor, columns: Tensor, budget: int) -> Scores:
    """Scores (p,) with gradients of images ``rows`` with texts ``columns``, within a budget of bytes."""
    chunk_size = max(1, budget // (GRAPH_FACTOR * model.bytes_per_pair(images, texts)))

    def score_chunk(chunk: Tensor) -> tuple[Tensor, Tensor]:
        scores = model.score_pairs(images[rows[chunk]], texts[columns[chunk]])
        return scores.i2t, scores.t2i

    chunks = torch.arange(len(rows), device=rows.device).split(chunk_size)
    if len(chunks) == 1:
        return Scores(*score_chunk(chunks[0]))
    parts = [checkpoint(score_chunk, chunk, use_reentrant=False) for chunk in chunks]
    i2t, t2i = (torch.cat(direction) for direction in zip(*parts, strict=True))
    return Scores(i2t, t2i)


# --------------------------------------------------------------------------- similarity vectors (SGRAF), in chunks


def items_per_chunk(elements: int, items: int, device: torch.device) -> int:
    """How many items of so many elements fit into the cache, at least one."""
    return max(1, min(items, tile_size(device) // elements))


def differences(regions: Tensor, words: Tensor, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of images, and their attended features minus the words, (m, x, d)."""
    words = words.expand(len(regions), -1, -1)
    size = items_per_chunk(words[0].numel(), len(words), words.device)
    for start in range(0, len(words), size):
        part = slice(start, start + size)
        yield part, torch.baddbmm(words[part], weights[part].mT, regions[part], beta=-1)


class LocalSimilarity(torch.autograd.Function):
    """Similarity vectors (m, x, s) of words with their attended features.

    regions: (m, r, d). words: (x, d) or (m, x, d). weights: (m, r, x). matrix: (s, d). The differences, by far the
    largest thing in a step, are not kept for the backward pass but computed again, a chunk at a time.
    """

    @staticmethod
    def forward(ctx: Any, regions: Tensor, words: Tensor, weights: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        """Return the similarity vectors (m, x, s), each of unit norm."""
        vectors = words.new_empty(*weights.mT.shape[:2], len(matrix))
        norms = words.new_empty(*weights.mT.shape[:2], 1)
        for part, difference in differences(regions, words, weights):
            squared = difference.square_().flatten(0, 1)
            vector = vectors[part]
            torch.addmm(bias, squared, matrix.T, out=vector.flatten(0, 1))
            norm = vector_norm(vector)
            norms[part] = norm
            vector *= (norm + EPS).reciprocal()
        ctx.save_for_backward(regions, words, weights, matrix, vectors, norms)
        return vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of each input."""
        regions, words, weights, matrix, vectors, norms = ctx.saved_tensors
        shared = words.dim() == 2
        to_regions, to_weights = torch.empty_like(regions), torch.empty_like(weights)
        to_words, to_matrix = torch.zeros_like(words), torch.zeros_like(matrix)
        to_bias = matrix.new_zeros(len(matrix))
        for part, difference in differences(regions, words, weights):
            vector, norm = vectors[part], norms[part]
            along = (vector * grad[part]).sum(dim=-1, keepdim=True)
            g = grad[part] - vector * (along * (norm + EPS) / norm)
            g = (g / (norm + EPS)).flatten(0, 1)
            to_bias += g.sum(dim=0)
            to_matrix.addmm_(g.T, difference.square().flatten(0, 1))
            g = difference.mul_(2).mul_((g @ matrix).view_as(difference))
            torch.bmm(weights[part], g, out=to_regions[part])
            torch.bmm(regions[part], g.mT, out=to_weights[part])
            if shared:
                to_words -= g.sum(dim=0)
            else:
                torch.neg(g, out=to_words[part])
        return to_regions, to_words, to_weights, to_matrix, to_bias


def local_similarity(regions: Tensor, words: Tensor, weights: Tensor, proj: nn.Linear) -> Tensor:
    """Similarity vectors (m, x, s) of words with their attended features."""
    return LocalSimilarity.apply(regions, words, weights, proj.weight, proj.bias)


def split_by_length(vectors: Tensor, shapes: Shapes) -> list[Tensor]:
    """Split word vectors (m, x, s) into (m, n, w, s) per shape (n, w)."""
    parts = zip(vectors.split([w * n for n, w in shapes], dim=1), shapes, strict=True)
    return [part.unflatten(1, (w, n)).transpose(1, 2) for part, (n, w) in parts]


def pair_blocks(
    images: Images, texts: Texts, sim_dim: int, at_once: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Packed]]:
    """Yield blocks of all pairs, in training all at once.

    A block is image indices (m,), their regions (m, r, d), caption indices (n,) and their words. Indices are on the CPU.
    """
    rows, known = pack(images), with_lengths(texts)
    indices = rows.order.split([n for n, _ in rows.shapes])
    device = known.local.device
    columns = items_per_chunk(known.local[0].numel(), len(known), device)
    by_length = known.lengths.argsort(stable=True)
    for part in by_length.split(len(known) if at_once else columns):
        packed = pack(known[part], by_position=True)
        for index, regions in zip(indices, rows.groups(), strict=True):
            size = len(index)
            if not at_once:
                size = items_per_chunk(len(packed.vectors) * sim_dim, size, device)
            for block in zip(index.split(size), regions.split(size), strict=True):
                yield *block, part[packed.order], packed


def fuse_projections(query: nn.Linear, key: nn.Linear) -> tuple[Tensor, ...]:
    """M, u, v, t such that query(a) · key(n) = a·Mn + u·n + v·a + t."""
    matrix = query.weight.T @ key.weight
    u, v = query.bias @ key.weight, key.bias @ query.weight
    return matrix, u, v, query.bias @ key.bias


def fused_logits(queries: Tensor, nodes: Tensor, fused: tuple[Tensor, ...]) -> Tensor:
    """Logits (..., q, k) of queries (..., q, s) with nodes (..., k, s), from what ``fuse_projections`` returned."""
    matrix, u, v, t = fused
    constant = queries @ v + t  # per query: the softmax is invariant to it
    return (queries @ matrix + u) @ nodes.mT + constant[..., None]


# ------------------------------------------------------------- few rows of a table: products with all of it (PFAN)


def table_products(queries: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Inner products (…, r, k) of each query (…, r, p) with its own rows of a table (n, p), given by index (…, r, k)."""
    return (queries @ table.T).gather(-1, index)


def table_sums(weights: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Weighted sums (…, r, p) of rows of a table (n, p): weights and index (…, r, k)."""
    zeros = weights.new_zeros(*index.shape[:-1], len(table))
    return zeros.scatter_add(-1, index, weights) @ table.to(weights.dtype)
