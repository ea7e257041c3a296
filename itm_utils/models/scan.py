# Generated from notebooks/02_scan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/02_scan.ipynb exports."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from itm_utils.errors import input_error
from itm_utils.matcher import (
    Attention,
    Encoded,
    ImageBatch,
    Images,
    Matcher,
    Scores,
    TextBatch,
    Texts,
    length_mask,
)
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.vsepp import GlobalEmbeddingMixin, HingeTriplet
from itm_utils.training import Stage, train_config


# cell lengths
EPS = 1e-8  # of the public code: added to a norm before dividing by it
TINY = 1e-30  # keeps the gradient of a square root finite at zero


def vector_norm(x: Tensor, dim: int = -1) -> Tensor:
    """L2 norm along ``dim``, which stays as an axis of size 1.

    torch.linalg.vector_norm rounds differently, and is slower along a middle axis.
    """
    return x.square().sum(dim=dim, keepdim=True).clamp_min(TINY).sqrt()


def l2_normalize_eps(x: Tensor, dim: int = -1) -> Tensor:
    """Divide by the L2 norm plus EPS, as the public code does."""
    return x * (vector_norm(x, dim) + EPS).reciprocal()


# cell compete
L_NORMS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm")
FIRST_NORMS = (*L_NORMS, "softmax", "clipped", "no_norm")


def normalize_affinity(affinity: Tensor, first_norm: str) -> Tensor:
    """Normalise affinity (m, k, q, n) over the queries q: the first normalisation."""
    if first_norm not in FIRST_NORMS:
        raise input_error(
            "first_norm", repr(first_norm), f"one of {', '.join(FIRST_NORMS)}"
        )
    if first_norm == "softmax":
        return affinity.softmax(dim=2)
    if first_norm.startswith("clipped"):
        affinity = nn.functional.leaky_relu(affinity, 0.1)
    if first_norm.endswith("l2norm"):
        return l2_normalize_eps(affinity, dim=2)
    if first_norm.endswith("l1norm"):
        return affinity * (affinity.abs().sum(dim=2, keepdim=True) + EPS).reciprocal()
    return affinity


# cell attend
class PairMask(NamedTuple):
    """Which keys and queries of given pairs are real; the others are zero vectors."""

    keys: Tensor  # (m, k, 1)
    queries: Tensor  # (m, 1, q)


def split_groups(columns: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Split the last axis into groups of n items with q queries each: (..., q, n)."""
    parts = columns.split([q * n for q, n in shapes], dim=-1)
    return [
        part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def attend(
    affinity: Tensor,
    shapes: list[tuple[int, int]],
    first_norm: str,
    temperature: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Attention weights (m, k, x): a softmax over the keys k for each of the x queries.

    temperature: an inverse one, the factor λ before the softmax. mask: None if all
    keys and queries are real.
    """
    if mask is not None and first_norm == "softmax":  # zeros add nothing to other norms
        affinity = affinity.masked_fill(~mask.queries, -torch.inf)
    parts = [
        normalize_affinity(part, first_norm).flatten(-2)
        for part in split_groups(affinity, shapes)
    ]
    normalized = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    logits = temperature * normalized
    if mask is not None:
        logits = logits.masked_fill(~mask.keys, -torch.inf)
    return logits.softmax(dim=1)


# cell pool
POOLINGS = ("LogSumExp", "Mean", "Max", "Sum")


def pool(
    relevance: Tensor, pooling: str, lse: float, real: Tensor | None = None
) -> Tensor:
    """Pool the relevance (m, q, n) over the queries of each item: (m, n).

    real: (m, q, 1), True at queries that are no padding; None if all are real.
    """
    if pooling not in POOLINGS:
        raise input_error("pooling", repr(pooling), f"one of {', '.join(POOLINGS)}")
    added = pooling in ("Mean", "Sum")
    if real is not None:
        relevance = relevance.masked_fill(~real, 0.0 if added else -torch.inf)
    if pooling == "LogSumExp":
        return torch.logsumexp(lse * relevance, dim=1) / lse
    if pooling == "Max":
        return relevance.max(dim=1).values
    count = relevance.shape[1] if real is None else real.sum(dim=1)
    total = relevance.sum(dim=1)
    return total / count if pooling == "Mean" else total


# cell score-by-loop
def score_by_loop(images, texts, direction, first_norm, temperature, pooling, lse):
    """Scores (i, c), one caption at a time, every attended vector built; no region masks."""
    columns = []
    for words, mask in zip(texts.local, texts.mask, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        if direction == "i2t":
            keys, queries = queries, keys
        affinity = keys @ queries.mT  # (i, k, q)
        weights = attend(affinity, [(queries.shape[1], 1)], first_norm, temperature)
        attended = weights.mT @ keys  # (i, q, d)
        relevance = nn.functional.cosine_similarity(queries, attended, dim=-1)
        columns.append(pool(relevance[..., None], pooling, lse))
    return torch.cat(columns, dim=1)


# cell cosine-from-gram
def cosine_from_gram(
    affinity: Tensor, weights: Tensor, gram: Tensor, query_norm: Tensor
) -> Tensor:
    """Relevance (m, x): cosine of each query with its attended vector, never built.

    affinity, weights: (m, k, x). gram: (m, k, k). query_norm: (x,) or (m, x).
    """
    dot = (weights * affinity).sum(dim=1)
    square = (weights * (gram @ weights)).sum(dim=1)
    attended_norm = square.clamp_min(TINY).sqrt()
    return dot / (query_norm * attended_norm).clamp_min(EPS)


# cell pack
class Packed(NamedTuple):
    """The vectors of some items without padding, items of equal length side by side."""

    vectors: Tensor  # (x, d), group by group
    shapes: list[tuple[int, int]]  # (n, k) per group: its items, the vectors of each
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
        raise input_error(
            "mask", "an item without regions or words", "at least one in each"
        )


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


def send(index: Tensor, device: torch.device) -> Tensor:
    """Copy indices to a device without waiting for it."""
    return index.to(device, non_blocking=True)


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


# cell all-pairs
TILE = {"cpu": 2**20}  # affinities in work at a time: they fit into the cache


def full_precision(x: Tensor) -> AbstractContextManager:
    """Disable autocast around attention. (The meta device has no autocast.)"""
    kind = x.device.type
    return nullcontext() if x.is_meta else torch.autocast(kind, enabled=False)


def row_strips(affinity: Tensor, keys: Packed) -> list[Tensor]:
    """Affinities (m, k, x) of each group of keys, from those of all keys, (y, x)."""
    parts = affinity.split([m * k for m, k in keys.shapes])
    return [p.unflatten(0, shape) for p, shape in zip(parts, keys.shapes, strict=True)]


def score_strips(
    strips: Iterable[Tensor],
    keys: Packed,
    queries: Packed,
    pair_score: Callable[..., Tensor],
) -> Tensor:
    """Scores (m, n) of all items, from the affinities (m, k, x) of each group of keys.

    pair_score: affinity (m, k, x), gram (m, k, k), query_norm (x,), shapes -> (m, n).
    """
    norms = [vector_norm(group)[..., 0].T.flatten() for group in queries.groups()]
    query_norm, shapes = torch.cat(norms), [(q, n) for n, q in queries.shapes]
    scores = []
    for strip, group in zip(strips, keys.groups(), strict=True):
        gram = group @ group.mT
        tile_size = TILE.get(strip.device.type) or 2**26
        step = max(1, tile_size // strip[0].numel())
        for tile, part in zip(strip.split(step), gram.split(step), strict=True):
            scores.append(pair_score(tile, part, query_norm, shapes))
    rows, columns = (
        send(side.order.argsort(), strip.device) for side in (keys, queries)
    )
    return torch.cat(scores).index_select(0, rows).index_select(1, columns)


def score_all_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Score every item that holds keys with every item that holds queries: (m, n).

    pair_score: see score_strips.
    """
    rows, columns = pack(keys), pack(queries, by_position=True)
    with full_precision(keys.local):
        affinity = rows.vectors @ columns.vectors.T  # the one product
        return score_strips(row_strips(affinity, rows), rows, columns, pair_score)


# cell scan-score
def pool_groups(
    values: Tensor,
    shapes: list[tuple[int, int]],
    pooling: str,
    lse: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Pool values (m, x) of queries over each item, group by group: (m, n)."""
    real = None if mask is None else mask.queries.mT
    parts = split_groups(values, shapes)
    return torch.cat([pool(part, pooling, lse, real) for part in parts], dim=-1)


def scan_score(
    affinity: Tensor,
    gram: Tensor,
    query_norm: Tensor,
    shapes: list[tuple[int, int]],
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Scores (m, n) from affinities (m, k, x): attend, compare, pool."""
    weights = attend(affinity, shapes, first_norm, temperature, mask)
    relevance = cosine_from_gram(affinity, weights, gram, query_norm)
    return pool_groups(relevance, shapes, pooling, lse, mask)


# cell given-pairs
def padded_pairs(keys: Encoded, queries: Encoded) -> tuple[Tensor, Tensor, PairMask]:
    """Keys (b, k, d), queries (b, q, d), both zero at padding, and which are real."""
    for side in (keys, queries):
        if side.lengths is not None:
            check_not_empty(side.lengths)
    k, q = (s.local.masked_fill(~s.mask[..., None], 0) for s in (keys, queries))
    return k, q, PairMask(keys.mask[:, :, None], queries.mask[:, None, :])


def score_padded(
    affinity: Tensor,
    keys: Tensor,
    queries: Tensor,
    mask: PairMask,
    pair_score: Callable[..., Tensor],
) -> Tensor:
    """Scores (b,) of padded pairs from their affinities (b, k, q)."""
    norm, shapes = vector_norm(queries)[..., 0], [(queries.shape[1], 1)]
    return pair_score(affinity, keys @ keys.mT, norm, shapes, mask=mask)[:, 0]


def score_given_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Score item b with item b only: (b,)."""
    k, q, mask = padded_pairs(keys, queries)
    with full_precision(k):
        return score_padded(k @ q.mT, k, q, mask, pair_score)


# cell pair-attention
def pair_attention(
    keys: Encoded, queries: Encoded, attend_fn: Callable[..., Tensor]
) -> Attention:
    """Attention weights of matched pairs, padded and inside the graph.

    attend_fn: affinity (b, k, q), shapes, mask -> weights (b, k, q).
    """
    k, q, mask = padded_pairs(keys, queries)
    with full_precision(k):
        weights = attend_fn(k @ q.mT, [(q.shape[1], 1)], mask=mask)
    weights = weights.masked_fill(~mask.queries, 0).mT
    return Attention(weights, queries.local, keys.local, queries.mask, keys.mask)


# cell read-regions
def region_layer(image_dim: int, width: int, weight_norm: bool) -> nn.Linear:
    """Linear projection of regions, initialised as in the public code."""
    linear = nn.Linear(image_dim, width)
    if weight_norm:
        # one scale for the matrix; torch documents None, and annotates int
        parametrizations.weight_norm(linear, dim=None)  # pyright: ignore[reportArgumentType]
        return linear
    bound = math.sqrt(6 / (image_dim + width))
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)
    return linear


# cell read-words
def encode_words(gru: nn.GRU, words: Tensor, lengths: Tensor) -> Tensor:
    """GRU states (c, w, d) of embedded words, directions averaged; zeros at padding.

    lengths: (c,), on the CPU. Captions are sorted there, which waits for no device.
    """
    lengths, order = lengths.cpu().sort(descending=True, stable=True)
    words, width = words.index_select(0, send(order, words.device)), words.shape[1]
    packed = pack_padded_sequence(words, lengths, batch_first=True)
    states, _ = pad_packed_sequence(
        gru(packed)[0], batch_first=True, total_length=width
    )
    states = states.index_select(0, send(order.argsort(), words.device))
    if gru.bidirectional:
        forward, backward = states.chunk(2, dim=-1)
        states = (forward + backward) / 2
    return states


# cell encoders
class RegionsAndWords(Matcher):
    """Encoders of SCAN and its descendants: one vector per region, one per word."""

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 1024,
        word_dim: int = 300,
        layers: int = 1,
        bidirectional: bool = True,
        image_norm: bool = True,
        text_norm: bool = True,
        weight_norm: bool = False,
    ) -> None:
        super().__init__()
        self.image_norm, self.text_norm = image_norm, text_norm
        self.region_proj = region_layer(image_dim, width, weight_norm)
        self.word_embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.word_embedding.weight, -0.1, 0.1)
        self.gru = nn.GRU(
            word_dim, width, layers, bidirectional=bidirectional, batch_first=True
        )

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = self.region_proj(batch.regions).to(self.word_embedding.weight.dtype)
        regions = l2_normalize_eps(regions) if self.image_norm else regions
        return Images(local=regions, mask=batch.mask, lengths=batch.lengths)

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = encode_words(self.gru, self.word_embedding(batch.words), batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not that of autocast
        words = l2_normalize_eps(words) if self.text_norm else words
        return Texts(local=words, mask=batch.mask, lengths=batch.lengths)


# cell one-looks
class CrossAttention(RegionsAndWords):
    """One side attends to the other; a subclass sets how."""

    direction: str  # t2i: words attend to regions, i2t: regions to words
    attend: Callable[..., Tensor]  # see pair_attention
    pair_score: Callable[..., Tensor]  # see score_all_pairs

    def keys_and_queries(self, images: Images, texts: Texts) -> tuple[Encoded, Encoded]:
        """The side that is attended to, and the side that attends."""
        return (images, texts) if self.direction == "t2i" else (texts, images)

    def score(self, images: Images, texts: Texts) -> Scores:
        keys, queries = self.keys_and_queries(images, texts)
        scores = score_all_pairs(keys, queries, self.pair_score)
        return Scores.same(scores if self.direction == "t2i" else scores.T)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        keys, queries = self.keys_and_queries(images, texts)
        return Scores.same(score_given_pairs(keys, queries, self.pair_score))

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        keys, queries = self.keys_and_queries(images, texts)
        return {self.direction: pair_attention(keys, queries, self.attend)}

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        """Affinities, and at most five tensors of their size at a time."""
        return 4 * 6 * images.local.shape[1] * texts.local.shape[1]


# cell choices
DIRECTIONS = ("t2i", "i2t")


def check_choices(direction: str, first_norm: str, pooling: str) -> None:
    """Refuse unknown names of the three options."""
    allowed = {"direction": DIRECTIONS, "first_norm": FIRST_NORMS, "pooling": POOLINGS}
    given = {"direction": direction, "first_norm": first_norm, "pooling": pooling}
    for name, value in given.items():
        if value not in allowed[name]:
            raise input_error(name, repr(value), f"one of {', '.join(allowed[name])}")


# cell scan-class
class SCAN(CrossAttention):
    """Stacked cross attention: words attend to regions (t2i), or vice versa (i2t)."""

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        direction: str = "t2i",
        first_norm: str = "clipped_l2norm",
        pooling: str = "LogSumExp",
        temperature: float = 9.0,
        lse: float = 6.0,
        **encoders: Any,
    ) -> None:
        check_choices(direction, first_norm, pooling)
        super().__init__(vocabulary_size, image_dim, **encoders)
        attention = {"first_norm": first_norm, "temperature": temperature}
        self.direction = direction
        self.attend = partial(attend, **attention)
        self.pair_score = partial(scan_score, pooling=pooling, lse=lse, **attention)


# cell build
class NoAttention(GlobalEmbeddingMixin, RegionsAndWords):
    """Control: the encoders of SCAN with mean pooling, without attention."""

    def encode_images(self, batch: ImageBatch) -> Images:
        encoded = super().encode_images(batch)
        return Images(pooled=l2_normalize_eps(masked_mean(encoded.local, encoded.mask)))

    def encode_texts(self, batch: TextBatch) -> Texts:
        encoded = super().encode_texts(batch)
        return Texts(pooled=l2_normalize_eps(masked_mean(encoded.local, encoded.mask)))


ATTENTION_OPTIONS = ("direction", "first_norm", "pooling", "temperature", "lse")


def build(parameters: Mapping, vocabulary_size: int, image_dim: int) -> Matcher:
    """Build the matcher that the chapter's parameters describe."""
    sizes = {name: parameters[name] for name in ("width", "word_dim")}
    if parameters["direction"] == "none":
        return NoAttention(vocabulary_size, image_dim, **sizes)
    attention = {name: parameters[name] for name in ATTENTION_OPTIONS}
    return SCAN(vocabulary_size, image_dim, **sizes, **attention)


# cell stages
def stages(parameters: Mapping, model: Matcher) -> list[Stage]:
    """The one training of a run: hardest negatives, after a warm-up over all."""
    margin, warmup = parameters["margin"], parameters["warmup_epochs"]
    objective = HingeTriplet(margin, hardest=True, warmup_epochs=warmup)
    return [Stage("train", model, objective, train_config(parameters))]
