# Generated from notebooks/02_scan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/02_scan.ipynb exports."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from itm_lab.parity.comparison import batches, load_public
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
from itm_utils.models.vsepp import GlobalEmbeddingMixin


# cell lengths
EPS = 1e-8  # of the public code: added to a length before dividing by it
TINY = 1e-30  # keeps the slope of a square root finite at zero


def length(x: Tensor, dim: int = -1) -> Tensor:
    """Euclidean length along ``dim``, which stays as an axis of size 1."""
    return x.square().sum(dim=dim, keepdim=True).clamp_min(TINY).sqrt()


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """Divide by the length, as the public code does."""
    return x * (length(x, dim) + EPS).reciprocal()


# cell compete
L_NORMS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm")
FIRST_NORMS = (*L_NORMS, "softmax", "clipped", "no_norm")


def compete(affinity: Tensor, first_norm: str) -> Tensor:
    """First normalisation, along the queries q of affinity (m, k, q, n)."""
    if first_norm not in FIRST_NORMS:
        raise input_error(
            "first_norm", repr(first_norm), f"one of {', '.join(FIRST_NORMS)}"
        )
    if first_norm == "softmax":
        return affinity.softmax(dim=2)
    if first_norm.startswith("clipped"):
        affinity = nn.functional.leaky_relu(affinity, 0.1)
    if first_norm.endswith("l2norm"):
        return unit(affinity, dim=2)
    if first_norm.endswith("l1norm"):
        return affinity * (affinity.abs().sum(dim=2, keepdim=True) + EPS).reciprocal()
    return affinity


# cell attend
def by_item(columns: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Cut the last axis into groups of n items with q queries each: (..., q, n)."""
    parts = columns.split([q * n for q, n in shapes], dim=-1)
    return [
        part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def attend(
    affinity: Tensor, shapes: list[tuple[int, int]], first_norm: str, temperature: float
) -> Tensor:
    """Weights (m, k, x): for each of the x queries they sum to one over the keys k."""
    parts = [
        compete(part, first_norm).flatten(-2) for part in by_item(affinity, shapes)
    ]
    fair = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return torch.softmax(temperature * fair, dim=1)


# cell pool
POOLINGS = ("LogSumExp", "Mean", "Max", "Sum")


def pool(relevance: Tensor, pooling: str, lse: float) -> Tensor:
    """One score (m, n) from the relevance (m, q, n) of an item's queries."""
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
    affinity: Tensor, weights: Tensor, gram: Tensor, query_length: Tensor
) -> Tensor:
    """Relevance (m, x): cosine of each query with what it found, which is never built.

    affinity, weights: (m, k, x). gram: (m, k, k). query_length: (x,) or (m, x).
    """
    dot = (weights * affinity).sum(dim=1)
    square = (weights * (gram @ weights)).sum(dim=1)
    found_length = square.clamp_min(TINY).sqrt()
    return dot / (query_length * found_length).clamp_min(EPS)


# cell pack
class Group(NamedTuple):
    """Items with equally many vectors; their padding is left behind."""

    index: Tensor  # (n,) which items these are
    where: Tensor  # (n, k) the positions their vectors had
    vectors: Tensor  # (n, k, d)


def pack(items: Encoded, kind: Tensor | None = None) -> list[Group]:
    """Sort items into groups by how many vectors they have (and by ``kind`` (n,), if given)."""
    if items.mask.is_meta:  # shapes without numbers: every position counts as real
        where = torch.ones_like(items.mask).cumsum(dim=1)
        return [Group(where[:, 0], where, items.local)]
    counts = items.mask.sum(dim=1)
    if int(counts.min()) == 0:
        raise input_error(
            "mask", "an item without regions or words", "at least one in each"
        )
    labels = counts if kind is None else counts + (items.mask.shape[1] + 1) * kind
    groups = []
    for label in labels.unique():
        index = (labels == label).nonzero()[:, 0]
        where = items.mask[index].nonzero()[:, 1].view(len(index), -1)
        # All real and all alike: nothing to leave behind, so nothing to copy.
        if where.numel() == items.mask.numel():
            return [Group(index, where, items.local)]
        groups.append(Group(index, where, items.local[index[:, None], where]))
    return groups


# cell all-pairs
TILE = {"cpu": 2**20}  # affinities in work at a time: they stay in a processor's cache


def full_precision(x: Tensor) -> AbstractContextManager:
    """No autocast in here: attention needs every digit. (The meta device has none.)"""
    kind = x.device.type
    return nullcontext() if x.is_meta else torch.autocast(kind, enabled=False)


def score_all_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Every item that holds keys with every item that holds queries: (m, n).

    pair_score: affinity (m, k, x), gram (m, k, k), query_length (x,), shapes -> (m, n).
    """
    rows, columns = pack(keys), pack(queries)
    with full_precision(keys.local):
        flat_keys = torch.cat([g.vectors.flatten(0, 1) for g in rows])  # item by item
        flat_queries = torch.cat(
            [g.vectors.transpose(0, 1).flatten(0, 1) for g in columns]
        )
        affinity = flat_keys @ flat_queries.T  # the one product
        query_length = length(flat_queries)[:, 0]
        shapes = [tuple(reversed(group.where.shape)) for group in columns]
        scores = []
        for strip, group in zip(
            affinity.split([g.where.numel() for g in rows]), rows, strict=True
        ):
            gram = group.vectors @ group.vectors.mT
            step = max(
                1, TILE.get(strip.device.type, 2**26) // strip[: gram.shape[1]].numel()
            )
            tiles = strip.unflatten(0, group.where.shape).split(step)
            for tile, part in zip(tiles, gram.split(step), strict=True):
                scores.append(pair_score(tile, part, query_length, shapes))
    order = [
        torch.cat([group.index for group in side]).argsort() for side in (rows, columns)
    ]
    return torch.cat(scores)[order[0]][:, order[1]]


# cell scan-score
def scan_score(
    affinity: Tensor,
    gram: Tensor,
    query_length: Tensor,
    shapes: list[tuple[int, int]],
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
) -> Tensor:
    """Affinities (m, k, x) to scores (m, n): attend, compare, pool."""
    weights = attend(affinity, shapes, first_norm, temperature)
    relevance = cosine_from_gram(affinity, weights, gram, query_length)
    parts = by_item(relevance, shapes)
    return torch.cat([pool(part, pooling, lse) for part in parts], dim=-1)


# cell given-pairs
def pack_pairs(keys: Encoded, queries: Encoded) -> list[tuple[Group, Group]]:
    """Groups of pairs that agree in the number of keys and of queries."""
    groups = pack(keys, kind=queries.mask.sum(dim=1))
    return [(group, pack(queries[group.index])[0]) for group in groups]


def score_given_pairs(
    keys: Encoded, queries: Encoded, pair_score: Callable[..., Tensor]
) -> Tensor:
    """Item b with item b only: (b,)."""
    scores, order = [], []
    with full_precision(keys.local):
        for group, other in pack_pairs(keys, queries):
            affinity = group.vectors @ other.vectors.mT  # (b, k, q)
            gram = group.vectors @ group.vectors.mT
            shapes = [(affinity.shape[2], 1)]
            part = pair_score(affinity, gram, length(other.vectors)[..., 0], shapes)
            scores.append(part[:, 0])
            order.append(group.index)
    return torch.cat(scores)[torch.cat(order).argsort()]


# cell pair-attention
def pair_attention(
    keys: Encoded, queries: Encoded, look: Callable[..., Tensor]
) -> Attention:
    """Who looks at what in matched pairs. look: affinity (b, k, q), shapes -> (b, k, q)."""
    shape = (len(keys.mask), queries.mask.shape[1], keys.mask.shape[1])
    weights = keys.local.new_zeros(shape)
    with full_precision(keys.local):
        for group, other in pack_pairs(keys, queries):
            affinity = group.vectors @ other.vectors.mT
            seen = look(affinity, [(affinity.shape[2], 1)]).mT  # (b, q, k)
            pair = group.index[:, None, None]
            place = (pair, other.where[:, :, None], group.where[:, None, :])
            weights = weights.index_put(place, seen)
    return Attention(weights, queries.local, keys.local, queries.mask, keys.mask)


# cell read-regions
def region_layer(image_dim: int, width: int, weight_norm: bool) -> nn.Linear:
    """One linear map for all regions, with the first weights of the public code."""
    linear = nn.Linear(image_dim, width)
    if weight_norm:
        return parametrizations.weight_norm(
            linear, dim=None
        )  # one scale for the matrix
    bound = math.sqrt(6 / (image_dim + width))
    nn.init.uniform_(linear.weight, -bound, bound)
    nn.init.zeros_(linear.bias)
    return linear


# cell read-words
def read_words(gru: nn.GRU, words: Tensor, lengths: Tensor) -> Tensor:
    """States (c, w, d) of embedded words, both directions averaged; zeros at padding."""
    if words.is_meta:  # shapes without numbers: nothing to leave out
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
    """The encoders of SCAN and its descendants: a vector a region, a vector a word."""

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
        **own: Any,
    ) -> None:
        given = {
            k: v for k, v in locals().items() if k not in ("self", "own", "__class__")
        }
        super().__init__(**given, **own)
        self.image_norm, self.text_norm = image_norm, text_norm
        self.region_proj = region_layer(image_dim, width, weight_norm)
        self.word_embedding = nn.Embedding(vocabulary_size, word_dim)
        nn.init.uniform_(self.word_embedding.weight, -0.1, 0.1)
        self.gru = nn.GRU(
            word_dim, width, layers, bidirectional=bidirectional, batch_first=True
        )

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = self.region_proj(batch.regions).to(self.word_embedding.weight.dtype)
        return Images(
            local=unit(regions) if self.image_norm else regions, mask=batch.mask
        )

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = read_words(self.gru, self.word_embedding(batch.words), batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not the autocast one
        return Texts(local=unit(words) if self.text_norm else words, mask=batch.mask)


# cell one-looks
class CrossAttention(RegionsAndWords):
    """One side looks at the other. A subclass sets ``direction``, ``pair_score`` and ``look``."""

    def sides(self, images: Images, texts: Texts) -> tuple[Encoded, Encoded]:
        """Who is looked at, and who looks."""
        return (images, texts) if self.direction == "t2i" else (texts, images)

    def score(self, images: Images, texts: Texts) -> Scores:
        scores = score_all_pairs(*self.sides(images, texts), self.pair_score)
        return Scores.same(scores if self.direction == "t2i" else scores.T)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(
            score_given_pairs(*self.sides(images, texts), self.pair_score)
        )

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        return {self.direction: pair_attention(*self.sides(images, texts), self.look)}

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        """Affinities, and at most five tensors of their size at a time."""
        return 4 * 6 * images.local.shape[1] * texts.local.shape[1]


# cell choices
DIRECTIONS = ("t2i", "i2t")


def check_choices(direction: str, first_norm: str, pooling: str) -> dict[str, str]:
    """The three named options, once they are known to exist."""
    chosen = {"direction": direction, "first_norm": first_norm, "pooling": pooling}
    lists = (DIRECTIONS, FIRST_NORMS, POOLINGS)
    for (name, value), allowed in zip(chosen.items(), lists, strict=True):
        if value not in allowed:
            raise input_error(name, repr(value), f"one of {', '.join(allowed)}")
    return chosen


# cell public-names
PUBLIC_OPTIONS = {
    "vocab_size": "vocabulary_size",
    "img_dim": "image_dim",
    "embed_size": "width",
    "word_dim": "word_dim",
    "num_layers": "layers",
    "bi_gru": "bidirectional",
    "cross_attn": "direction",
    "raw_feature_norm": "first_norm",
    "agg_func": "pooling",
    "lambda_softmax": "temperature",
    "lambda_lse": "lse",
}


def from_public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our keywords for the options of the public command line."""
    needed = (*PUBLIC_OPTIONS, "no_imgnorm", "no_txtnorm", "precomp_enc_type")
    if missing := [name for name in needed if name not in options]:
        raise input_error(
            "public options", f"no {', '.join(missing)}", "all options of SCAN"
        )
    encoder = options["precomp_enc_type"]
    if encoder not in ("basic", "weight_norm"):
        raise input_error("precomp_enc_type", repr(encoder), "basic or weight_norm")
    ours = {name: options[public] for public, name in PUBLIC_OPTIONS.items()}
    norms = {
        "image_norm": not options["no_imgnorm"],
        "text_norm": not options["no_txtnorm"],
    }
    return ours | norms | {"weight_norm": encoder == "weight_norm"}


# cell scan-class
class SCAN(CrossAttention):
    """Stacked cross attention: words look at regions (t2i), or regions at words (i2t)."""

    PUBLIC_NAMES: ClassVar = {
        "img_enc.fc": "region_proj",
        "img_enc.fc.weight_g": "region_proj.parametrizations.weight.original0",
        "img_enc.fc.weight_v": "region_proj.parametrizations.weight.original1",
        "txt_enc.embed": "word_embedding",
        "txt_enc.rnn": "gru",
    }

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
        chosen = check_choices(direction, first_norm, pooling)
        chosen |= {"temperature": temperature, "lse": lse}
        super().__init__(vocabulary_size, image_dim, **encoders, **chosen)
        self.direction = chosen.pop("direction")
        self.pair_score = partial(scan_score, **chosen)
        self.look = partial(attend, first_norm=first_norm, temperature=temperature)

    @classmethod
    def from_public(
        cls, state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Self:
        model = cls(**from_public_options(options))
        load_public(model, state_dict, cls.PUBLIC_NAMES)
        return model


# cell public-values
def public_values(model: SCAN, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case of the public code holds under ``mid.*``."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    words = model.word_embedding(text_batch.words)
    values = {
        "mid.img_emb": images.local,
        "mid.cap_gru": read_words(model.gru, words, text_batch.lengths),
        "mid.cap_emb": texts.local,
    }
    if "mid.pair" in arrays:
        i, c = (slice(int(n), int(n) + 1) for n in arrays["mid.pair"])
        found = model.attention(images[i], texts[c])[model.direction]
        weights = found.weights[0][found.query_mask[0]]
        attended = weights @ found.keys[0]
        queries = found.queries[0][found.query_mask[0]]
        values["mid.pair_attn"] = weights[:, found.key_mask[0]].T
        values["mid.pair_context"] = attended
        values["mid.pair_rowsim"] = nn.functional.cosine_similarity(queries, attended)
    return {name: value for name, value in values.items() if name in arrays}


# cell build
class NoAttention(GlobalEmbeddingMixin, RegionsAndWords):
    """The control: the encoders of SCAN, then one mean vector each. Nothing attends."""

    def encode_images(self, batch: ImageBatch) -> Images:
        encoded = super().encode_images(batch)
        return Images(pooled=unit(masked_mean(encoded.local, encoded.mask)))

    def encode_texts(self, batch: TextBatch) -> Texts:
        encoded = super().encode_texts(batch)
        return Texts(pooled=unit(masked_mean(encoded.local, encoded.mask)))


LOOK = ("direction", "first_norm", "pooling", "temperature", "lse")


def build(parameters: Mapping, vocabulary_size: int, image_dim: int) -> Matcher:
    """The model that this chapter's parameters describe."""
    sizes = {name: parameters[name] for name in ("width", "word_dim")}
    if parameters["direction"] == "none":
        return NoAttention(vocabulary_size, image_dim, **sizes)
    look = {name: parameters[name] for name in LOOK}
    return SCAN(vocabulary_size, image_dim, **sizes, **look)
