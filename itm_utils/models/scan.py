# Generated from notebooks/02_scan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/02_scan.ipynb exports."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    EPS,
    PairMask,
    Shapes,
    attend_groups,
    cosine_from_gram,
    pair_attention,
    pool_groups,
    score_all_pairs,
    score_given_pairs,
    send,
    vector_norm,
)
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
def l2_normalize_eps(x: Tensor, dim: int = -1) -> Tensor:
    """Divide by the L2 norm plus EPS, as the public code does."""
    return x * (vector_norm(x, dim) + EPS).reciprocal()


# cell compete
L_NORMS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm")
FIRST_NORMS = (*L_NORMS, "softmax", "clipped", "no_norm")


def normalize_affinity(
    affinity: Tensor, first_norm: str, real: Tensor | None = None
) -> Tensor:
    """Normalise affinity (m, k, q, …) over the queries q: the first normalisation.

    real: False at queries that are padding (zero vectors); None if all are real.
    """
    if first_norm not in FIRST_NORMS:
        raise input_error(
            "first_norm", repr(first_norm), f"one of {', '.join(FIRST_NORMS)}"
        )
    if first_norm == "softmax":
        if real is not None:  # zeros add nothing to the other norms
            affinity = affinity.masked_fill(~real, -torch.inf)
        return affinity.softmax(dim=2)
    if first_norm.startswith("clipped"):
        affinity = nn.functional.leaky_relu(affinity, 0.1)
    if first_norm.endswith("l2norm"):
        return l2_normalize_eps(affinity, dim=2)
    if first_norm.endswith("l1norm"):
        return affinity * (affinity.abs().sum(dim=2, keepdim=True) + EPS).reciprocal()
    return affinity


# cell attend
def attend(affinity: Tensor, first_norm: str, temperature: float) -> Tensor:
    """Attention weights (m, k, q): a softmax over the keys k for each query q.

    temperature: an inverse one, the factor λ before the softmax.
    """
    return (temperature * normalize_affinity(affinity, first_norm)).softmax(dim=1)


# cell pool
POOLINGS = ("LogSumExp", "Mean", "Max", "Sum")


def pool(
    relevance: Tensor, pooling: str, lse: float, real: Tensor | None = None
) -> Tensor:
    """Pool the relevance (m, q, …) over the queries of each item: (m, …).

    real: True at queries that are no padding; None if all are real.
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
        weights = attend(affinity, first_norm, temperature)
        attended = weights.mT @ keys  # (i, q, d)
        relevance = nn.functional.cosine_similarity(queries, attended, dim=-1)
        columns.append(pool(relevance, pooling, lse))
    return torch.stack(columns, dim=1)


# cell scan-score
def scan_attention(
    affinity: Tensor,
    shapes: Shapes,
    first_norm: str,
    temperature: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Attention weights (m, k, x) of affinities (m, k, x): ``attend`` for many items."""
    normalize = partial(normalize_affinity, first_norm=first_norm)
    return attend_groups(affinity, shapes, normalize, temperature, mask)


def pool_queries(
    values: Tensor,
    shapes: Shapes,
    pooling: str,
    lse: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Pool values (m, x) of queries over each item: (m, n)."""
    return pool_groups(values, shapes, partial(pool, pooling=pooling, lse=lse), mask)


def scan_score(
    affinity: Tensor,
    gram: Tensor,
    query_norm: Tensor,
    shapes: Shapes,
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Scores (m, n) from affinities (m, k, x): attend, compare, pool."""
    weights = scan_attention(affinity, shapes, first_norm, temperature, mask)
    relevance = cosine_from_gram(affinity, weights, gram, query_norm)
    return pool_queries(relevance, shapes, pooling, lse, mask)


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
        self.attend = partial(scan_attention, **attention)
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
