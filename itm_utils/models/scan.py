# Generated from notebooks/02_scan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/02_scan.ipynb exports."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
def split_groups(columns: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Split the last axis into groups of n items with q queries each: (..., q, n)."""
    parts = columns.split([q * n for q, n in shapes], dim=-1)
    return [
        part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def attend(
    affinity: Tensor, shapes: list[tuple[int, int]], first_norm: str, temperature: float
) -> Tensor:
    """Attention weights (m, k, x): a softmax over the keys k for each of the x queries.

    temperature: an inverse one, the factor λ before the softmax.
    """
    parts = [
        normalize_affinity(part, first_norm).flatten(-2)
        for part in split_groups(affinity, shapes)
    ]
    normalized = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return torch.softmax(temperature * normalized, dim=1)


# cell pool
POOLINGS = ("LogSumExp", "Mean", "Max", "Sum")


def pool(relevance: Tensor, pooling: str, lse: float) -> Tensor:
    """Pool the relevance (m, q, n) over the queries of each item: (m, n)."""
    if pooling == "LogSumExp":
        return torch.logsumexp(lse * relevance, dim=1) / lse
    if pooling == "Mean":
        return relevance.mean(dim=1)
    if pooling == "Max":
        return relevance.max(dim=1).values
    if pooling == "Sum":
        return relevance.sum(dim=1)
    raise input_error("pooling", repr(pooling), f"one of {', '.join(POOLINGS)}")


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
class PackedGroup(NamedTuple):
    """Items with equally many vectors, without padding."""

    index: Tensor  # (n,) rows of the items
    positions: Tensor  # (n, k) where their vectors were
    vectors: Tensor  # (n, k, d)


def pack(items: Encoded, kind: Tensor | None = None) -> list[PackedGroup]:
    """Group items by their number of vectors (and by ``kind`` (n,), if given)."""
    if items.mask.is_meta:  # shapes only: every position counts as real
        positions = torch.ones_like(items.mask).cumsum(dim=1)
        return [PackedGroup(positions[:, 0], positions, items.local)]
    counts = items.mask.sum(dim=1)
    if int(counts.min()) == 0:
        raise input_error(
            "mask", "an item without regions or words", "at least one in each"
        )
    labels = counts if kind is None else counts + (items.mask.shape[1] + 1) * kind
    groups = []
    for label in labels.unique():
        index = (labels == label).nonzero()[:, 0]
        positions = items.mask[index].nonzero()[:, 1].view(len(index), -1)
        # One group without padding: nothing to copy.
        if positions.numel() == items.mask.numel():
            return [PackedGroup(index, positions, items.local)]
        vectors = items.local[index[:, None], positions]
        groups.append(PackedGroup(index, positions, vectors))
    return groups


# cell all-pairs
TILE = {"cpu": 2**20}  # affinities in work at a time: they fit into the cache


def full_precision(x: Tensor) -> AbstractContextManager:
    """Disable autocast around attention. (The meta device has no autocast.)"""
    kind = x.device.type
    return nullcontext() if x.is_meta else torch.autocast(kind, enabled=False)


def score_all_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Score every item that holds keys with every item that holds queries: (m, n).

    pair_score: affinity (m, k, x), gram (m, k, k), query_norm (x,), shapes -> (m, n).
    """
    rows, columns = pack(keys), pack(queries)
    with full_precision(keys.local):
        flat_keys = torch.cat([g.vectors.flatten(0, 1) for g in rows])  # item by item
        flat_queries = torch.cat(
            [g.vectors.transpose(0, 1).flatten(0, 1) for g in columns]
        )
        affinity = flat_keys @ flat_queries.T  # the one product
        query_norm = vector_norm(flat_queries)[:, 0]
        shapes = [tuple(reversed(group.positions.shape)) for group in columns]
        scores = []
        for strip, group in zip(
            affinity.split([g.positions.numel() for g in rows]), rows, strict=True
        ):
            gram = group.vectors @ group.vectors.mT
            tile_size = TILE.get(affinity.device.type) or 2**26
            step = max(1, tile_size // strip[: gram.shape[1]].numel())
            tiles = strip.unflatten(0, group.positions.shape).split(step)
            for tile, part in zip(tiles, gram.split(step), strict=True):
                scores.append(pair_score(tile, part, query_norm, shapes))
    order = [
        torch.cat([group.index for group in side]).argsort() for side in (rows, columns)
    ]
    return torch.cat(scores)[order[0]][:, order[1]]


# cell scan-score
def scan_score(
    affinity: Tensor,
    gram: Tensor,
    query_norm: Tensor,
    shapes: list[tuple[int, int]],
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
) -> Tensor:
    """Scores (m, n) from affinities (m, k, x): attend, compare, pool."""
    weights = attend(affinity, shapes, first_norm, temperature)
    relevance = cosine_from_gram(affinity, weights, gram, query_norm)
    parts = split_groups(relevance, shapes)
    return torch.cat([pool(part, pooling, lse) for part in parts], dim=-1)


# cell given-pairs
def pack_pairs(
    keys: Encoded, queries: Encoded
) -> list[tuple[PackedGroup, PackedGroup]]:
    """Group pairs by their number of keys and of queries."""
    groups = pack(keys, kind=queries.mask.sum(dim=1))
    return [(group, pack(queries[group.index])[0]) for group in groups]


def score_given_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Score item b with item b only: (b,)."""
    scores, order = [], []
    with full_precision(keys.local):
        for group, other in pack_pairs(keys, queries):
            affinity = group.vectors @ other.vectors.mT  # (b, k, q)
            gram = group.vectors @ group.vectors.mT
            norm = vector_norm(other.vectors)[..., 0]
            part = pair_score(affinity, gram, norm, [(affinity.shape[2], 1)])
            scores.append(part[:, 0])
            order.append(group.index)
    return torch.cat(scores)[torch.cat(order).argsort()]


# cell pair-attention
def pair_attention(
    keys: Encoded, queries: Encoded, attend_fn: Callable[..., Tensor]
) -> Attention:
    """Attention weights of matched pairs, padded and inside the graph.

    attend_fn: affinity (b, k, q), shapes -> weights (b, k, q).
    """
    shape = (len(keys.mask), queries.mask.shape[1], keys.mask.shape[1])
    weights = keys.local.new_zeros(shape)
    with full_precision(keys.local):
        for group, other in pack_pairs(keys, queries):
            affinity = group.vectors @ other.vectors.mT
            part = attend_fn(affinity, [(affinity.shape[2], 1)]).mT  # (b, q, k)
            pair = group.index[:, None, None]
            place = (pair, other.positions[:, :, None], group.positions[:, None, :])
            weights = weights.index_put(place, part)
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
    """GRU states (c, w, d) of embedded words, directions averaged; zeros at padding."""
    if words.is_meta:  # shapes only: nothing to pack
        states = gru(words)[0]
    else:
        packed = pack_padded_sequence(
            words, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states = pad_packed_sequence(
            gru(packed)[0], batch_first=True, total_length=words.shape[1]
        )[0]
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
        return Images(local=regions, mask=batch.mask)

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = encode_words(self.gru, self.word_embedding(batch.words), batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not that of autocast
        words = l2_normalize_eps(words) if self.text_norm else words
        return Texts(local=words, mask=batch.mask)


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
