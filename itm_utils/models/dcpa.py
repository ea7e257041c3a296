# Generated from notebooks/09_dcpa.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/09_dcpa.ipynb exports."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    additive_mask,
    all_pair_logits,
    attend_pairs,
    best_cosines,
    weighted_values,
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
from itm_utils.models.mmca import HardNegativeTripletLoss, TokenEncoder
from itm_utils.models.saem import MultiHeadAttention, TextCNN, TransformerLayer
from itm_utils.models.vsepp import HingeTriplet, l2_normalize
from itm_utils.training import Stage, train_config


# cell top-mean
def topk_mean(values: Tensor, mask: Tensor, k: int) -> Tensor:
    """Mean of the ``k`` largest entries of each row (…, n), of all where there are fewer.

    mask: broadcastable to values, True where there is an entry. Returns (…).
    """
    values = values.masked_fill(~mask, -math.inf)
    largest = values.topk(min(k, values.shape[-1]), dim=-1).values
    valid = largest > -math.inf
    total = largest.masked_fill(~valid, 0).sum(dim=-1)
    return total / valid.sum(dim=-1).clamp(min=1)


# cell compare
def local_score(decoded: Tensor, mask: Tensor, memory: Encoded, k: int) -> Tensor:
    """Best match of each decoded vector in memory, and the top-k mean of these: (…).

    decoded: (…, n, d) with a mask that broadcasts to (…, n). memory: L2-normalised.
    """
    return topk_mean(best_cosines(decoded, memory.local, memory.mask), mask, k)


def global_score(decoded: Tensor, mask: Tensor, memory: Encoded) -> Tensor:
    """Cosine of the two means: (…)."""
    total = (decoded * mask[..., None]).sum(dim=-2)  # a cosine ignores the scale
    return (l2_normalize(total) * memory.pooled).sum(dim=-1)


# cell check-scoring
SIMILARITIES = ("local", "global")


def check_scoring(stage: str, similarity: str, top_k: int) -> None:
    """Refuse an unknown similarity, and a top-k mean of nothing."""
    if similarity not in SIMILARITIES:
        expected = f"one of {', '.join(SIMILARITIES)}"
        raise input_error(f"similarity of stage {stage}", repr(similarity), expected)
    if top_k < 1:
        expected = "how many of the best are averaged, at least 1"
        raise input_error("top_k", str(top_k), expected)


# cell intra-parts
class IntraPAM(Matcher):
    """Stage one of DCPA: visual phrases against one vector per caption.

    top_k: regions in the top-k mean. similarity: local, or global for the cosine with
    the mean of the regions, as in SAEM.
    """

    def __init__(
        self,
        image_dim: int,
        token_dim: int = 768,
        width: int = 256,
        heads: int = 16,
        feed_forward: int = 2048,
        channels: int = 512,
        dropout: float = 0.0,
        top_k: int = 10,
        similarity: str = "local",
        text_backbone: str = "bert",
        vocabulary_size: int = 0,
        word_dim: int = 300,
    ) -> None:
        super().__init__()
        check_scoring("intra", similarity, top_k)
        self.top_k, self.similarity = top_k, similarity
        self.region_proj = nn.Linear(image_dim, width)
        sizes = (width, heads, feed_forward, dropout)
        self.encoder = TransformerLayer(*sizes, "relu", eps=1e-5)
        words = (text_backbone, vocabulary_size, word_dim)
        self.token_encoder = TokenEncoder(*words, token_dim)
        self.text_cnn = TextCNN(token_dim, channels)
        self.text_proj = nn.Linear(3 * channels, width)
        self.dropout = nn.Dropout(dropout)

    def encode_images(self, batch: ImageBatch) -> Images:
        phrases, _ = self.encoder(self.region_proj(batch.regions), batch.mask)
        pooled = l2_normalize(masked_mean(phrases, batch.mask))
        return Images(l2_normalize(phrases), batch.mask, pooled, lengths=batch.lengths)

    def encode_texts(self, batch: TextBatch) -> Texts:
        features = self.text_cnn(self.token_encoder(batch), batch.mask)
        return Texts(pooled=l2_normalize(self.text_proj(self.dropout(features))))

    def score(self, images: Images, texts: Texts) -> Scores:
        if self.similarity == "global":
            return Scores.same(images.pooled @ texts.pooled.T)
        cosines = torch.einsum("ird,cd->icr", images.local, texts.pooled)
        return Scores.same(topk_mean(cosines, images.mask[:, None], self.top_k))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        if self.similarity == "global":
            return Scores.same((images.pooled * texts.pooled).sum(dim=-1))
        cosines = torch.einsum("brd,bd->br", images.local, texts.pooled)
        return Scores.same(topk_mean(cosines, images.mask, self.top_k))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        if self.similarity == "global":
            return 4  # one number; the rest is a matrix product
        return 4 * 4 * images.local.shape[1]  # cosines, their order, and copies


# cell decoder
class PhraseDecoder(TransformerLayer):
    """Transformer decoder layer: self-attention, cross-attention, feed-forward.

    The cross-attention is the ``attention`` of TransformerLayer.
    """

    def __init__(
        self, width: int, heads: int, feed_forward: int, dropout: float
    ) -> None:
        super().__init__(width, heads, feed_forward, dropout, "relu", eps=1e-5)
        self.self_attention = MultiHeadAttention(width, heads, dropout)
        self.self_attn_norm = nn.LayerNorm(width, eps=1e-5)
        self.activation = torch.relu_  # in place: nothing else reads its input

    def phrases(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """Vectors (n, k, d) after self-attention: (n, k, d)."""
        attended, _ = self.self_attention(vectors, vectors, mask)
        return self.self_attn_norm(vectors + self.dropout(attended))

    def project_queries(self, phrases: Tensor) -> Tensor:
        """Queries of the cross-attention, divided by the root of e: (n, k, h, e)."""
        query = self.attention.q_proj(phrases).unflatten(-1, (self.attention.heads, -1))
        return query / math.sqrt(query.shape[-1])

    def project_keys_values(self, vectors: Tensor) -> dict[str, Tensor]:
        """Keys and values of the cross-attention, from the other side: (n, k, h, e)."""
        split = (self.attention.heads, -1)
        key, value = self.attention.k_proj(vectors), self.attention.v_proj(vectors)
        return {"key": key.unflatten(-1, split), "value": value.unflatten(-1, split)}

    def attention_output(self, phrases: Tensor, attended: Tensor) -> Tensor:
        """What follows the cross-attention; phrases (…, k, d), attended (…, k, h, e)."""
        out_proj, attended = self.attention.out_proj, attended.flatten(-2)
        phrases = self.attn_norm(self.add_residual(phrases, out_proj, attended))
        return self.feed_forward(phrases)


# cell decode
def decode_pairs(decoder: PhraseDecoder, source: Encoded, memory: Encoded) -> Tensor:
    """Decode ``source`` into the space of ``memory``, for given pairs: (b, k, d)."""
    own, other = source.extra_local, memory.extra_local
    args = own["query"], other["key"], other["value"], memory.mask
    attended, _ = attend_pairs(*args)
    return decoder.attention_output(own["phrase"], attended)


def decode_all_pairs(
    decoder: PhraseDecoder, source: Encoded, memory: Encoded
) -> Tensor:
    """The same for all pairs of m items of source and n of memory: (m, n, k, d)."""
    own, other = source.extra_local, memory.extra_local
    logits = all_pair_logits(own["query"], other["key"], memory.mask)
    attended = weighted_values(logits.softmax(dim=2), other["value"])
    return decoder.attention_output(own["phrase"][:, None], attended)


# cell inter-parts
class InterPAM(Matcher):
    """Stage two of DCPA: each side decoded into the space of the other, two scores.

    special_tokens: whether start and end tokens count as words; in a caption without
    other tokens they always do. decoupled: false gives both directions the mean.
    """

    tile = 2**25  # bytes of pairs at a time on a CPU: more would not fit into its cache

    def __init__(
        self,
        image_dim: int,
        token_dim: int = 768,
        width: int = 256,
        heads: int = 16,
        feed_forward: int = 2048,
        dropout: float = 0.0,
        top_k: int = 10,
        similarity: str = "local",
        decoupled: bool = True,
        special_tokens: bool = True,
        text_backbone: str = "bert",
        vocabulary_size: int = 0,
        word_dim: int = 300,
    ) -> None:
        super().__init__()
        check_scoring("inter", similarity, top_k)
        self.top_k, self.similarity = top_k, similarity
        self.decoupled, self.special_tokens = decoupled, special_tokens
        self.region_proj = nn.Linear(image_dim, width)
        words = (text_backbone, vocabulary_size, word_dim)
        self.token_encoder = TokenEncoder(*words, token_dim)
        self.token_proj = nn.Linear(token_dim, width)
        sizes = (width, heads, feed_forward, dropout)
        self.i2t, self.t2i = PhraseDecoder(*sizes), PhraseDecoder(*sizes)

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = self.region_proj(batch.regions)
        sides = prepare(regions, batch.mask, self.i2t, self.t2i)
        return Images(**sides, lengths=batch.lengths)

    def encode_texts(self, batch: TextBatch) -> Texts:
        words, mask = self.token_proj(self.token_encoder(batch)), batch.mask
        if not self.special_tokens:
            inner = mask & ~batch.special
            mask = torch.where(inner.any(dim=1, keepdim=True), inner, mask)
        sides = prepare(words, mask, self.t2i, self.i2t)
        return Texts(**sides, lengths=batch.lengths)

    def compare(self, decoded: Tensor, mask: Tensor, memory: Encoded) -> Tensor:
        """Score of one direction: (…)."""
        if self.similarity == "global":
            return global_score(decoded, mask, memory)
        return local_score(decoded, mask, memory, self.top_k)

    def both_directions(self, i2t: Tensor, t2i: Tensor) -> Scores:
        """Scores with the directions apart if decoupled, else their mean for both."""
        if self.decoupled:
            return Scores(i2t=i2t, t2i=t2i)
        return Scores.same((i2t + t2i) / 2)

    def score(self, images: Images, texts: Texts) -> Scores:
        regions_as_text = decode_all_pairs(self.i2t, images, texts)  # (i, c, r, d)
        i2t = self.compare(regions_as_text, images.mask[:, None], texts)
        words_as_image = decode_all_pairs(self.t2i, texts, images)  # (c, i, w, d)
        t2i = self.compare(words_as_image, texts.mask[:, None], images)
        return self.both_directions(i2t, t2i.T)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        regions_as_text = decode_pairs(self.i2t, images, texts)  # (b, r, d)
        words_as_image = decode_pairs(self.t2i, texts, images)  # (b, w, d)
        i2t = self.compare(regions_as_text, images.mask, texts)
        t2i = self.compare(words_as_image, texts.mask, images)
        return self.both_directions(i2t, t2i)

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        r, width = images.local.shape[1:]
        w, layer = texts.local.shape[1], self.i2t
        rows = max(r, w)  # one decoder after the other
        inside = rows * (4 * width + 2 * layer.linear1.out_features)
        return 4 * (inside + 3 * layer.attention.heads * r * w)


# cell inter-encode
def prepare(
    vectors: Tensor, mask: Tensor, as_source: PhraseDecoder, as_memory: PhraseDecoder
) -> dict[str, Any]:
    """Fields of an encoded side (n, k, d): all that does not depend on the pair.

    as_source: the decoder to which it gives queries; as_memory: keys and values.
    """
    phrase = as_source.phrases(vectors, mask)
    own = {"phrase": phrase, "query": as_source.project_queries(phrase)}
    return {
        "local": l2_normalize(vectors),
        "mask": mask,
        "pooled": l2_normalize(masked_mean(vectors, mask)),
        "extra_local": own | as_memory.project_keys_values(vectors),
    }


# cell dcpa-class
class DCPA(Matcher):
    """Decoupled cross-modal phrase attention (Shi et al., 2022).

    Both stages, each a matcher of its own, and the weighted sum of their scores. intra,
    inter: arguments of the stages besides image_dim.
    """

    tile = InterPAM.tile

    def __init__(
        self,
        image_dim: int,
        intra: Mapping[str, Any],
        inter: Mapping[str, Any],
        intra_weight: float = 0.6,
    ) -> None:
        super().__init__()
        self.intra_weight = intra_weight  # stage two has the rest
        self.intra = IntraPAM(image_dim, **intra)
        self.inter = InterPAM(image_dim, **inter)

    def encode_images(self, batch: ImageBatch) -> Images:
        intra, inter = self.intra.encode_images(batch), self.inter.encode_images(batch)
        local = inter.extra_local | {"visual_phrase": intra.local}
        return replace(inter, extra={"intra": intra.pooled}, extra_local=local)

    def encode_texts(self, batch: TextBatch) -> Texts:
        intra, inter = self.intra.encode_texts(batch), self.inter.encode_texts(batch)
        return replace(inter, extra={"intra": intra.pooled})

    def intra_encodings(self, images: Images, texts: Texts) -> tuple[Images, Texts]:
        """The part of the encodings that stage one scores."""
        phrases, pooled = images.extra_local["visual_phrase"], images.extra["intra"]
        return Images(phrases, images.mask, pooled), Texts(pooled=texts.extra["intra"])

    def fuse(self, intra: Scores, inter: Scores) -> Scores:
        """Weighted sum of the stages' scores, direction by direction."""
        return weighted_sum(intra, inter, self.intra_weight)

    def score(self, images: Images, texts: Texts) -> Scores:
        intra = self.intra.score(*self.intra_encodings(images, texts))
        return self.fuse(intra, self.inter.score(images, texts))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        intra = self.intra.score_pairs(*self.intra_encodings(images, texts))
        return self.fuse(intra, self.inter.score_pairs(images, texts))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        intra = self.intra.bytes_per_pair(*self.intra_encodings(images, texts))
        return intra + self.inter.bytes_per_pair(images, texts)

    def head_weights(self, source: Encoded, memory: Encoded) -> Tensor:
        """Cross-attention weights of each head, for given pairs: (b, h, q, k)."""
        query, key = source.extra_local["query"], memory.extra_local["key"]
        logits = torch.einsum("bqhe,bkhe->bhqk", query, key)
        logits = logits + additive_mask(memory.mask, logits)[:, None, None]
        return logits.softmax(dim=-1)

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        def head_mean(source: Encoded, memory: Encoded) -> Attention:
            weights = self.head_weights(source, memory).mean(dim=1)
            sides = (source.local, memory.local, source.mask, memory.mask)
            return Attention(weights, *sides)

        return {"t2i": head_mean(texts, images), "i2t": head_mean(images, texts)}

    def selected_regions(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Regions that enter the score of stage one, and the t2i score of stage two: (b, r)."""
        regions = images.mask.shape[1]
        phrases, caption = self.intra_encodings(images, texts)
        cosines = torch.einsum("brd,bd->br", phrases.local, caption.pooled)
        cosines = cosines.masked_fill(~images.mask, -math.inf)
        largest = cosines.topk(min(self.intra.top_k, regions)).indices
        intra = index_mask(largest, regions) & images.mask

        decoded = l2_normalize(decode_pairs(self.inter.t2i, texts, images))
        affinity = decoded @ images.local.mT
        affinity = affinity + additive_mask(images.mask, decoded)[:, None]
        best, region = affinity.max(dim=-1)  # of each word: (b, w)
        best = best.masked_fill(~texts.mask, -math.inf)
        words = best.topk(min(self.inter.top_k, best.shape[1]))
        selected = region.gather(1, words.indices)
        # in a caption with fewer words its best word stands for the missing ones
        selected = torch.where(words.values > -math.inf, selected, selected[:, :1])
        return intra, index_mask(selected, regions)


# cell dcpa-scores
def weighted_sum(intra: Scores, inter: Scores, intra_weight: float) -> Scores:
    """Scores of both stages added direction by direction; stage two has the rest."""
    i2t = intra_weight * intra.i2t + (1 - intra_weight) * inter.i2t
    if not inter.decoupled:
        return Scores.same(i2t)
    t2i = intra_weight * intra.t2i + (1 - intra_weight) * inter.t2i
    return Scores(i2t=i2t, t2i=t2i)


# cell dcpa-regions
def index_mask(index: Tensor, size: int) -> Tensor:
    """(b, size), True at the positions that row b of ``index`` (b, k) names."""
    empty = torch.zeros(len(index), size, dtype=torch.bool, device=index.device)
    return empty.scatter(1, index, True)


# cell build
SIZES = ("token_dim", "width", "heads", "dropout", "top_k")
TEXT = ("text_backbone", "word_dim")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> DCPA:
    """The model that the chapter's parameters describe."""
    p = parameters
    both = {name: p[name] for name in (*SIZES, *TEXT)}
    both["vocabulary_size"] = vocabulary_size if p["text_backbone"] == "gru" else 0
    intra = {name: p[name] for name in ("feed_forward", "channels", "similarity")}
    inter = {name: p[name] for name in ("decoupled", "special_tokens")}
    inter |= {name: p[f"inter_{name}"] for name in ("feed_forward", "similarity")}
    return DCPA(image_dim, both | intra, both | inter, p["intra_weight"])


# cell stages
TRAININGS = ("two", "intra", "inter", "joint")


def share_region_proj(model: DCPA) -> None:
    """Give stage two the region projection of stage one, and freeze it there."""
    model.inter.region_proj.load_state_dict(model.intra.region_proj.state_dict())
    model.inter.region_proj.requires_grad_(False)


def stages(parameters: Mapping[str, Any], model: DCPA) -> list[Stage]:
    """The trainings of a run, in order.

    After stage one, stage two is validated with the sum of both; alone, by its own
    scores. Trained jointly, the model sees the batches of stage two, for as many updates
    as both stages have together.
    """
    p = parameters
    if p["training"] not in TRAININGS:
        expected = f"one of {', '.join(TRAININGS)}"
        raise input_error("training", repr(p["training"]), expected)
    if p["shared_region_proj"] and p["training"] in ("inter", "joint"):
        expected = "two stages: the projection comes from a trained stage one, frozen"
        raise input_error("shared_region_proj", f"training {p['training']!r}", expected)
    restarts = {"schedule": "cosine", "decay_every": p["cycle"], "decay": 0.0}
    decay = {} if p["schedule"] == "lab" else restarts  # lab: one cosine
    hinge = HingeTriplet(p["margin"], True, p["warmup_epochs"], p["by_image"])
    warmup = (p["inter_warmup_epochs"], p["negatives"], p["budget_mb"] * 2**20)
    hardest = HardNegativeTripletLoss(p["margin"], True, *warmup, p["by_image"])
    batch_size, epochs = p["inter_batch_size"], p["inter_epochs"]
    joint_epochs = epochs + round(p["epochs"] * batch_size / p["batch_size"])
    more = decay | {"batch_size": batch_size, "learning_rate": p["inter_learning_rate"]}
    intra = Stage("intra", model.intra, hinge, train_config(p, **decay))
    config = train_config(p, epochs=epochs, **more)
    inter = Stage("inter", model.inter, hardest, config, ranker=model)
    alone = replace(inter, ranker=None)
    config = train_config(p, epochs=joint_epochs, **more)
    joint = Stage("joint", model, hardest, config)
    lists = {
        "two": [intra, inter],
        "intra": [intra],
        "inter": [alone],
        "joint": [joint],
    }
    return lists[p["training"]]
