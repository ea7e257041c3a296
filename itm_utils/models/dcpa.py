# Generated from notebooks/09_dcpa.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/09_dcpa.ipynb exports."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from itm_lab.parity.comparison import Table, batches, compare_gradients, load_public
from torch import Tensor, nn

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
from itm_utils.models.mmca import (
    HardNegativeTripletLoss,
    additive_mask,
    attend,
    attend_all_pairs,
)
from itm_utils.models.saem import MultiHeadAttention, TextCNN, TransformerLayer
from itm_utils.models.scan import read_words
from itm_utils.models.vsepp import HingeTriplet, hinge_loss, l2_normalize


# cell top-mean
def top_mean(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """Mean of the ``count`` largest entries of each row, of all where there are fewer: (…).

    values: (…, k). mask: of a shape that fits, True where there is an entry.
    """
    values = values.masked_fill(~mask, -math.inf)
    best = values.topk(min(count, values.shape[-1]), dim=-1).values
    there = best > -math.inf
    return best.masked_fill(~there, 0).sum(dim=-1) / there.sum(dim=-1).clamp(min=1)


# cell word-states
TEXT_BACKBONES = ("bert", "gru")


class WordStates(nn.Module):
    """A state for each token: those of a frozen text encoder, or of a GRU that learns.

    token_dim: numbers a state has. vocabulary_size, word_dim: for the GRU alone.
    """

    def __init__(
        self, text_backbone: str, vocabulary_size: int, word_dim: int, token_dim: int
    ) -> None:
        super().__init__()
        if text_backbone not in TEXT_BACKBONES:
            raise input_error(
                "text_backbone",
                repr(text_backbone),
                f"one of {', '.join(TEXT_BACKBONES)}",
            )
        self.gru = None
        if text_backbone == "gru":
            self.word_embedding = nn.Embedding(vocabulary_size, word_dim)
            nn.init.uniform_(self.word_embedding.weight, -0.1, 0.1)
            self.gru = nn.GRU(word_dim, token_dim, bidirectional=True, batch_first=True)

    def forward(self, batch: TextBatch) -> Tensor:
        """States (c, w, token_dim)."""
        if self.gru is not None:
            if batch.words is None:
                raise input_error("captions", "states of a text encoder", "word ids")
            return read_words(self.gru, self.word_embedding(batch.words), batch.lengths)
        if batch.features is None:
            hint = "Open the captions with itm_lab.data.opening.token_states."
            raise input_error("captions", "word ids", "states of a text encoder", hint)
        return batch.features


# cell intra-parts
SIMILARITIES = ("local", "global")


def check_scoring(stage: str, similarity: str, top_k: int) -> None:
    """A misspelt option is an error, not another model."""
    if similarity not in SIMILARITIES:
        expected = f"one of {', '.join(SIMILARITIES)}"
        raise input_error(f"similarity of stage {stage}", repr(similarity), expected)
    if top_k < 1:
        raise input_error(
            "top_k", str(top_k), "how many of the best are averaged, at least 1"
        )


class IntraParts(Matcher):
    """The weights of stage one.

    top: how many of the best regions count. similarity: local, or global for the cosine
    with the mean of the regions, which is SAEM's.
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
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        check_scoring("intra", similarity, top_k)
        self.top_k, self.similarity = top_k, similarity
        self.region_proj = nn.Linear(image_dim, width)
        sizes = (width, heads, feed_forward, dropout)
        self.encoder = TransformerLayer(*sizes, "relu", eps=1e-5)
        self.words = WordStates(text_backbone, vocabulary_size, word_dim, token_dim)
        self.text_cnn = TextCNN(token_dim, channels)
        self.text_proj = nn.Linear(3 * channels, width)
        self.dropout = nn.Dropout(dropout)


# cell intra
class IntraPAM(IntraParts):
    """Stage one of DCPA: visual phrases, one vector a sentence, the mean of the best few."""

    def encode_images(self, batch: ImageBatch) -> Images:
        phrases, _ = self.encoder(self.region_proj(batch.regions), batch.mask)
        pooled = l2_normalize(masked_mean(phrases, batch.mask))
        return Images(l2_normalize(phrases), batch.mask, pooled)

    def encode_texts(self, batch: TextBatch) -> Texts:
        read = self.dropout(self.text_cnn(self.words(batch), batch.mask))
        return Texts(pooled=l2_normalize(self.text_proj(read)))

    def score(self, images: Images, texts: Texts) -> Scores:
        if self.similarity == "global":
            return Scores.same(images.pooled @ texts.pooled.T)
        cosines = torch.einsum("ird,cd->icr", images.local, texts.pooled)
        return Scores.same(top_mean(cosines, images.mask[:, None], self.top_k))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        if self.similarity == "global":
            return Scores.same((images.pooled * texts.pooled).sum(dim=-1))
        cosines = torch.einsum("brd,bd->br", images.local, texts.pooled)
        return Scores.same(top_mean(cosines, images.mask, self.top_k))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        if self.similarity == "global":
            return 4  # one number; the rest is a matrix product
        return 4 * 4 * images.local.shape[1]  # cosines, their order, and copies


# cell decoder
class PhraseDecoder(TransformerLayer):
    """A look at one's own kind, a look at the other kind, a thought."""

    def __init__(
        self, width: int, heads: int, feed_forward: int, dropout: float
    ) -> None:
        super().__init__(width, heads, feed_forward, dropout, "relu", eps=1e-5)
        self.gather = MultiHeadAttention(width, heads, dropout)
        self.norm_gather = nn.LayerNorm(width, eps=1e-5)

    def phrases(self, vectors: Tensor, mask: Tensor) -> Tensor:
        """Vectors (n, k, d) after the look at their own kind: (n, k, d)."""
        found, _ = self.gather(vectors, vectors, mask)
        return self.norm_gather(vectors + self.dropout(found))

    def project_queries(self, phrases: Tensor) -> Tensor:
        """Queries of the second look, divided by the root of a head's width: (n, k, h, e)."""
        query = self.attention.q_proj(phrases).unflatten(-1, (self.attention.heads, -1))
        return query / math.sqrt(query.shape[-1])

    def answers(self, vectors: Tensor) -> dict[str, Tensor]:
        """Keys and values for the second look, of the other kind: (n, k, h, e) each."""
        split = (self.attention.heads, -1)
        key, value = self.attention.k_proj(vectors), self.attention.v_proj(vectors)
        return {"key": key.unflatten(-1, split), "value": value.unflatten(-1, split)}

    def attention_output(self, phrases: Tensor, found: Tensor) -> Tensor:
        """What follows the second look; phrases (…, k, d), found (…, k, h, e)."""
        return self.ffn(phrases, self.attention.out_proj(found.flatten(-2)))


# cell say
def decode_pairs(decoder: PhraseDecoder, one: Encoded, other: Encoded) -> Tensor:
    """Side ``one`` of given pairs, said in the space of the other: (b, k, d)."""
    asks, has = one.extra_local, other.extra_local
    found, _ = attend(asks["query"], has["key"], has["value"], other.mask)
    return decoder.attention_output(asks["phrase"], found)


def decode_all_pairs(decoder: PhraseDecoder, one: Encoded, other: Encoded) -> Tensor:
    """Side ``one`` of all pairs, said in the space of the other: (m, n, k, d).

    m items of side one, n of the other.
    """
    asks, has = one.extra_local, other.extra_local
    found, _ = attend_all_pairs(asks["query"], has["key"], has["value"], other.mask)
    return decoder.attention_output(asks["phrase"][:, None], found)


# cell compare
def local_score(said: Tensor, mask: Tensor, other: Encoded, count: int) -> Tensor:
    """The best partner of each vector, and the mean of the ``count`` best of these: (…).

    said: (…, k, d) with a mask that fits (…, k); other: its vectors have length one.
    """
    affinity = said @ other.local.mT + additive_mask(other.mask, said)[:, None]
    length = said.norm(dim=-1).clamp(min=1e-12)  # one division a row, not one an entry
    return top_mean(affinity.amax(dim=-1) / length, mask, count)


def global_score(said: Tensor, mask: Tensor, other: Encoded) -> Tensor:
    """The cosine of the two means: (…)."""
    total = (said * mask[..., None]).sum(dim=-2)  # as long as it likes to be
    return (l2_normalize(total) * other.pooled).sum(dim=-1)


# cell inter-parts
class InterParts(Matcher):
    """The weights of stage two, and both sides up to where they meet.

    specials: whether start and end tokens count as words; in a caption that has no other
    token they always do. decoupled: false gives both directions the mean of the scores.
    """

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
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(**given)
        check_scoring("inter", similarity, top_k)
        self.top_k, self.similarity = top_k, similarity
        self.decoupled, self.special_tokens = decoupled, special_tokens
        self.region_proj = nn.Linear(image_dim, width)
        self.words = WordStates(text_backbone, vocabulary_size, word_dim, token_dim)
        self.token_proj = nn.Linear(token_dim, width)
        sizes = (width, heads, feed_forward, dropout)
        self.i2t, self.t2i = PhraseDecoder(*sizes), PhraseDecoder(*sizes)


# cell inter-encode
def prepare(
    vectors: Tensor, mask: Tensor, asks: PhraseDecoder, answers: PhraseDecoder
) -> dict[str, Any]:
    """All that one side (n, k, d) needs no partner for, as arguments of its encoding."""
    phrase = asks.phrases(vectors, mask)
    own = {"phrase": phrase, "query": asks.project_queries(phrase)}
    return {
        "local": l2_normalize(vectors),
        "mask": mask,
        "pooled": l2_normalize(masked_mean(vectors, mask)),
        "extra_local": own | answers.answers(vectors),
    }


class InterEncoders(InterParts):
    """Pictures ask in the decoder for sentences and answer in the one for pictures."""

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = self.region_proj(batch.regions)
        return Images(**prepare(regions, batch.mask, self.i2t, self.t2i))

    def encode_texts(self, batch: TextBatch) -> Texts:
        words, mask = self.token_proj(self.words(batch)), batch.mask
        if not self.special_tokens:
            inner = mask & ~batch.special
            mask = torch.where(inner.any(dim=1, keepdim=True), inner, mask)
        return Texts(**prepare(words, mask, self.t2i, self.i2t))


# cell inter
class InterPAM(InterEncoders):
    """Stage two of DCPA: each side said in the space of the other, and two scores."""

    tile = 2**24  # bytes of pairs at a time on a CPU: more would fall out of its cache

    def compare(self, said: Tensor, mask: Tensor, other: Encoded) -> Tensor:
        if self.similarity == "global":
            return global_score(said, mask, other)
        return local_score(said, mask, other, self.top_k)

    def ways(self, i2t: Tensor, t2i: Tensor) -> Scores:
        if self.decoupled:
            return Scores(i2t=i2t, t2i=t2i)
        return Scores.same((i2t + t2i) / 2)

    def score(self, images: Images, texts: Texts) -> Scores:
        regions_as_text = decode_all_pairs(self.i2t, images, texts)  # (i, c, r, d)
        i2t = self.compare(regions_as_text, images.mask[:, None], texts)
        words_as_image = decode_all_pairs(self.t2i, texts, images)  # (c, i, w, d)
        t2i = self.compare(words_as_image, texts.mask[:, None], images)
        return self.ways(i2t, t2i.T)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        regions_as_text = decode_pairs(self.i2t, images, texts)
        words_as_image = decode_pairs(self.t2i, texts, images)
        i2t = self.compare(regions_as_text, images.mask, texts)
        return self.ways(i2t, self.compare(words_as_image, texts.mask, images))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        r, width = images.local.shape[1:]
        w, layer = texts.local.shape[1], self.i2t
        rows = max(r, w)  # one decoder after the other
        inside = rows * (4 * width + 2 * layer.linear1.out_features)
        return 4 * (inside + 3 * layer.attention.heads * r * w)


# cell dcpa-scores
class TwoStages(Matcher):
    """Both stages, each a matcher of its own, and the weighted sum of their scores.

    intra, inter: arguments of the stages besides image_dim.
    """

    tile = InterPAM.tile

    def __init__(
        self,
        image_dim: int,
        intra: Mapping[str, Any],
        inter: Mapping[str, Any],
        intra_weight: float = 0.6,
    ) -> None:
        given = {"intra": dict(intra), "inter": dict(inter)}
        super().__init__(image_dim=image_dim, intra_weight=intra_weight, **given)
        self.intra_weight, self.inter_weight = intra_weight, 1 - intra_weight
        self.intra = IntraPAM(image_dim, **intra)
        self.inter = InterPAM(image_dim, **inter)

    def encode_images(self, batch: ImageBatch) -> Images:
        first, second = self.intra.encode_images(batch), self.inter.encode_images(batch)
        own = second.extra_local | {"visual_phrase": first.local}
        return replace(second, extra={"intra": first.pooled}, extra_local=own)

    def encode_texts(self, batch: TextBatch) -> Texts:
        first, second = self.intra.encode_texts(batch), self.inter.encode_texts(batch)
        return replace(second, extra={"intra": first.pooled})

    def first_stage(self, images: Images, texts: Texts) -> tuple[Images, Texts]:
        """What the encodings hold of stage one."""
        phrases, pooled = images.extra_local["visual_phrase"], images.extra["intra"]
        return Images(phrases, images.mask, pooled), Texts(pooled=texts.extra["intra"])

    def add(self, first: Scores, second: Scores) -> Scores:
        i2t = self.intra_weight * first.i2t + self.inter_weight * second.i2t
        if not second.decoupled:
            return Scores.same(i2t)
        t2i = self.intra_weight * first.t2i + self.inter_weight * second.t2i
        return Scores(i2t=i2t, t2i=t2i)

    def score(self, images: Images, texts: Texts) -> Scores:
        first = self.intra.score(*self.first_stage(images, texts))
        return self.add(first, self.inter.score(images, texts))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        first = self.intra.score_pairs(*self.first_stage(images, texts))
        return self.add(first, self.inter.score_pairs(images, texts))

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        first = self.intra.bytes_per_pair(*self.first_stage(images, texts))
        return first + self.inter.bytes_per_pair(images, texts)


# cell dcpa-looks
def marked(index: Tensor, size: int) -> Tensor:
    """(b, size), True at the positions that row b of ``index`` (b, k) names."""
    empty = torch.zeros(len(index), size, dtype=torch.bool, device=index.device)
    return empty.scatter(1, index, True)


class DCPALooks(TwoStages):
    """Where the model looks in given pairs."""

    def head_weights(self, one: Encoded, other: Encoded) -> Tensor:
        """The second look of each head: (b, h, q, k)."""
        query, key = one.extra_local["query"], other.extra_local["key"]
        logits = torch.einsum("bqhe,bkhe->bhqk", query, key)
        return (logits + additive_mask(other.mask, logits)[:, None, None]).softmax(
            dim=-1
        )

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        def shown(one: Encoded, other: Encoded) -> Attention:
            weights = self.head_weights(one, other).mean(dim=1)
            return Attention(weights, one.local, other.local, one.mask, other.mask)

        return {"t2i": shown(texts, images), "i2t": shown(images, texts)}

    def picks(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """Regions on which the score of stage one, and of stage two for pictures, rests: (b, r)."""
        first, sentence = self.first_stage(images, texts)
        cosines = torch.einsum("brd,bd->br", first.local, sentence.pooled)
        cosines = cosines.masked_fill(~images.mask, -math.inf)
        count, regions = self.intra.top_k, images.mask.shape[1]
        intra = marked(cosines.topk(min(count, regions)).indices, regions)
        said = l2_normalize(decode_pairs(self.inter.t2i, texts, images))
        affinity = said @ images.local.mT + additive_mask(images.mask, said)[:, None]
        best, where = affinity.max(dim=-1)  # (b, w)
        best = best.masked_fill(~texts.mask, -math.inf)
        words = best.topk(min(self.inter.top_k, best.shape[1]))
        chosen = where.gather(1, words.indices)
        # a caption with fewer words than that: its best word stands for the missing ones
        chosen = torch.where(words.values > -math.inf, chosen, chosen[:, :1])
        return intra & images.mask, marked(chosen, regions)


# cell dcpa-class
LOOK_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
LAYER_NAMES = {"ffn1": "linear1", "ffn2": "linear2"}
DECODER_NAMES = {
    **LAYER_NAMES,
    "norm1": "norm_gather",
    "norm2": "attn_norm",
    "norm3": "ffn_norm",
}


class DCPA(DCPALooks):
    """Decoupled cross-modal phrase attention (Shi et al., 2022)."""

    PUBLIC_NAMES: ClassVar[dict[str, str]] = {
        "region_fc": "intra.region_proj",
        "region_fc2": "inter.region_proj",
        "text_fc": "inter.token_proj",
        "text_cnn.fc": "intra.text_proj",
        "encoder.norm1": "intra.encoder.attn_norm",
        "encoder.norm2": "intra.encoder.ffn_norm",
        **{f"text_cnn.conv{n}": f"intra.text_cnn.convs.{n - 1}" for n in (1, 2, 3)},
        **{f"encoder.{n}": f"intra.encoder.attention.{LOOK_NAMES[n]}" for n in "qkvo"},
        **{f"encoder.{n}": f"intra.encoder.{LAYER_NAMES[n]}" for n in LAYER_NAMES},
        **{
            f"decoder_{way}.{attend}.{n}": f"inter.{way}.{ours}.{LOOK_NAMES[n]}"
            for way in ("i2t", "t2i")
            for attend, ours in (("self", "gather"), ("cross", "attention"))
            for n in "qkvo"
        },
        **{
            f"decoder_{way}.{n}": f"inter.{way}.{DECODER_NAMES[n]}"
            for way in ("i2t", "t2i")
            for n in DECODER_NAMES
        },
    }

    @classmethod
    def from_public(
        cls, state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Self:
        """From weights named as in the golden cases of this book."""
        width, image_dim = state_dict["region_fc.weight"].shape
        both = {"token_dim": state_dict["text_fc.weight"].shape[1], "width": width}
        both |= {"heads": options["h"], "feed_forward": options["f"]}
        both |= {"top_k": options["K"]}
        first = both | {"channels": options["filters"]}
        model = cls(image_dim, first, both, intra_weight=options["w1"])
        return load_public(model, state_dict, cls.PUBLIC_NAMES)


# cell build
SIZES = ("token_dim", "width", "heads", "feed_forward", "dropout", "top_k")
SENTENCES = ("text_backbone", "word_dim")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> DCPA:
    """The model that the chapter's parameters describe."""
    both = {name: parameters[name] for name in (*SIZES, *SENTENCES)}
    both["vocabulary_size"] = (
        vocabulary_size if parameters["text_backbone"] == "gru" else 0
    )
    names = ("channels", "similarity")
    first = both | {name: parameters[name] for name in names}
    second = both | {name: parameters[name] for name in ("decoupled", "special_tokens")}
    second["similarity"] = parameters["inter_similarity"]
    second["feed_forward"] = parameters["inter_feed_forward"]
    return DCPA(image_dim, first, second, parameters["intra_weight"])


# cell public-values
def public_values(model: DCPA, images: Images, texts: Texts, pair: list[int]) -> dict:
    """Our values for what a golden case holds under ``mid.*``; pair: image and caption."""
    i, c = (slice(place, place + 1) for place in pair)
    image, text = images[i], texts[c]
    n = int(text.mask.sum())
    said = {"i2t": decode_pairs(model.inter.i2t, image, text)[0]}
    said["t2i"] = decode_pairs(model.inter.t2i, text, image)[0, :n]
    regions, words = image.local[0], text.local[0, :n]
    return {
        "mid.visual_phrases": images.extra_local["visual_phrase"],
        "mid.sentence": texts.extra["intra"],
        "mid.pair_iP": image.extra_local["phrase"][0],
        "mid.pair_cP": text.extra_local["phrase"][0, :n],
        "mid.pair_iT": said["i2t"],
        "mid.pair_cV": said["t2i"],
        "mid.pair_A": l2_normalize(said["i2t"]) @ words.T,
        "mid.pair_A_t2i": l2_normalize(said["t2i"]) @ regions.T,
        "mid.pair_att_i2t": model.head_weights(image, text)[0, :, :, :n],
        "mid.pair_att_t2i": model.head_weights(text, image)[0, :, :n],
    }


def public_scores(model: DCPA, images: Images, texts: Texts) -> dict[str, Scores]:
    """Every score matrix of a golden case, by the names it has there."""
    sides, found = model.first_stage(images, texts), {}
    found["intra"], inter = model.intra.score(*sides), model.inter.score(images, texts)
    found["inter"] = inter
    found["nodecoupled"] = Scores.same((inter.i2t + inter.t2i) / 2)
    found["fused"] = model.add(found["intra"], inter)
    model.intra.similarity = model.inter.similarity = "global"
    found["intra_globalave"] = model.intra.score(*sides)
    found["nolocalagg"] = model.inter.score(images, texts)
    model.intra.similarity = model.inter.similarity = "local"
    return found


# cell compare-case
SCORE_NAMES = {
    "intra": ("intra", None),
    "intra_globalave": ("intra_globalave", None),
    "nodecoupled": ("nodecoupled", None),
    "inter": ("i2t", "t2i"),
    "fused": ("fused_i2t", "fused_t2i"),
    "nolocalagg": ("i2t_nolocalagg", "t2i_nolocalagg"),
}
LOSS_NAMES = {
    "stage1": "intra",
    "stage1_globalave": "intra_globalave",
    "stage2": "inter",
    "stage2_nodecoupled": "nodecoupled",
    "stage2_nolocalagg": "nolocalagg",
}


def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """One golden case: vectors, looks, scores with every switch, losses, gradients."""
    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k[:2] == "w."}
    model = DCPA.from_public(weights, about["options"]).eval()
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    pair = arrays["mid.pair"].tolist()
    for name, value in public_values(model, images, texts, pair).items():
        table.add("values", name, value, arrays[name])
    scores = public_scores(model, images, texts)
    for name, (i2t, t2i) in SCORE_NAMES.items():
        for ours, key in ((scores[name].i2t, i2t), (scores[name].t2i, t2i)):
            if key:
                table.add("values", key, ours, arrays[f"out.sims.{key}"])
    own = torch.from_numpy(arrays["in.pair_cap"])
    for name, source in LOSS_NAMES.items():
        paired = Scores(scores[source].i2t[:, own], scores[source].t2i[:, own])
        loss = hinge_loss(paired, float(about["options"]["margin"]), hardest=True)
        expected = arrays[f"out.loss_hard.{name}"]
        table.add("losses", name, loss, expected, relative=True)
        prefix = f"out.grad.{name}."
        if any(key.startswith(prefix) for key in arrays):
            compare_gradients(table, model, arrays, prefix, loss)
    return True


# cell stages
STAGES = ("two", "intra", "joint")


class Stage(NamedTuple):
    """One training: what is trained, for what, and for how long."""

    name: str
    matcher: Matcher
    objective: HingeTriplet | HardNegativeTripletLoss
    epochs: int
    batch_size: int
    learning_rate: float


def stages_of(parameters: Mapping[str, Any], model: DCPA) -> list[Stage]:
    """The trainings that a run consists of, one after the other.

    Trained jointly, the model sees the batches of stage two, for as many updates as both
    stages have together.
    """
    p = parameters
    if p["training"] not in STAGES:
        raise input_error(
            "training", repr(p["training"]), f"one of {', '.join(STAGES)}"
        )
    warm, budget = p["inter_warmup_epochs"], p["budget_mb"] * 2**20
    hinge = HingeTriplet(p["margin"], True, p["warmup_epochs"])
    picked = HardNegativeTripletLoss(p["margin"], True, warm, p["negatives"], budget)
    batch, rate = p["inter_batch_size"], p["inter_learning_rate"]
    first = (p["epochs"], p["batch_size"], p["learning_rate"])
    one = Stage("intra", model.intra, hinge, *first)
    two = Stage("inter", model.inter, picked, p["inter_epochs"], batch, rate)
    longer = p["inter_epochs"] + round(p["epochs"] * batch / p["batch_size"])
    joint = Stage("joint", model, picked, longer, batch, rate)
    return {"two": [one, two], "intra": [one], "joint": [joint]}[p["training"]]
