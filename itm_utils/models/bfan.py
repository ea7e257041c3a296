# Generated from notebooks/03_bfan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/03_bfan.ipynb exports."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from itm_lab.parity.comparison import batches, load_public
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.matcher import Attention, Images, Scores, Texts
from itm_utils.models import scan
from itm_utils.models.scan import (
    RegionsAndWords,
    attend,
    by_item,
    cosine_from_gram,
    pair_attention,
    score_all_pairs,
    score_given_pairs,
)


# cell kept-as-published
def kept_as_published(weights: Tensor, focal: str) -> Tensor:
    """Which keys stay, by the paper's sum over pairs of keys; weights (m, k, x)."""
    others = weights[:, None]  # (m, 1, j, x)
    worth = others.sqrt() if focal == "prob" else torch.ones_like(others)
    return ((weights[:, :, None] - others) * worth).sum(dim=2) > 0


# cell refocus
FOCALS = ("equal", "prob", "none")
TIES = ("keep", "drop")
TIE = 1e-5  # a weight this close to the bar, relative to it, is as good as on it


def check_focal(focal: str, ties: str) -> None:
    """Refuse names that are not in the two lists."""
    for name, value, allowed in (("focal", focal, FOCALS), ("ties", ties, TIES)):
        if value not in allowed:
            raise input_error(name, repr(value), f"one of {', '.join(allowed)}")


def bar(weights: Tensor, focal: str) -> Tensor:
    """The weight (m, 1, x) that a key has to reach: a mean of all keys' weights (m, k, x)."""
    if focal == "equal":
        return weights.mean(dim=1, keepdim=True)
    root = weights.sqrt()
    return (weights * root).sum(dim=1, keepdim=True) / root.sum(dim=1, keepdim=True)


def refocus(weights: Tensor, focal: str, ties: str = "keep") -> Tensor:
    """Drop the keys below the bar and share their weight among the rest: (m, k, x)."""
    if focal == "none":
        return weights
    with torch.no_grad():  # who stays is a decision, and has no slope
        if ties == "drop":
            stays = kept_as_published(weights, focal)
        else:
            stays = weights >= (1 - TIE) * bar(weights, focal)
    rest = weights * stays
    return rest * rest.sum(dim=1, keepdim=True).reciprocal()


# cell focal-score
def focal_look(
    affinity: Tensor,
    shapes: list[tuple[int, int]],
    temperature: float,
    focal: str,
    ties: str,
) -> Tensor:
    """Focal weights (m, k, x): look as SCAN does, then drop and share."""
    weights = attend(affinity, shapes, "clipped_l2norm", temperature)
    return refocus(weights, focal, ties)


def focal_score(
    affinity: Tensor,
    gram: Tensor,
    query_length: Tensor,
    shapes: list[tuple[int, int]],
    temperature: float,
    focal: str,
    ties: str,
) -> Tensor:
    """Affinities (m, k, x) to scores (m, n): look, refocus, compare, average."""
    weights = focal_look(affinity, shapes, temperature, focal, ties)
    relevance = cosine_from_gram(affinity, weights, gram, query_length)
    return torch.cat([part.mean(dim=1) for part in by_item(relevance, shapes)], dim=-1)


# cell score-by-loop
def score_by_loop(
    images: Images, texts: Texts, temperature: float, focal: str, ties: str = "keep"
) -> Tensor:
    """Scores (i, c), one caption at a time, every attended vector built; no region masks."""
    columns = []
    for words, mask in zip(texts.local, texts.mask, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        regions, column = images.local, 0
        for keys, queries in ((regions, repeated), (repeated, regions)):
            shapes = [(queries.shape[1], 1)]
            weights = focal_look(keys @ queries.mT, shapes, temperature, focal, ties)
            attended = weights.mT @ keys  # (i, q, d)
            relevance = torch.cosine_similarity(queries, attended, dim=-1)
            column = column + relevance.mean(dim=1)
        columns.append(column)
    return torch.stack(columns, dim=1)


# cell bfan-class
class BFAN(RegionsAndWords):
    """Bidirectional focal attention: words look at regions and regions at words."""

    PUBLIC_NAMES: ClassVar = scan.SCAN.PUBLIC_NAMES

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        focal: str = "equal",
        temperature: float = 20.0,
        ties: str = "keep",
        **encoders: Any,
    ) -> None:
        check_focal(focal, ties)
        chosen = {"focal": focal, "temperature": temperature, "ties": ties}
        super().__init__(vocabulary_size, image_dim, **encoders, **chosen)
        self.pair_score = partial(focal_score, **chosen)
        self.look = partial(focal_look, **chosen)

    def score(self, images: Images, texts: Texts) -> Scores:
        words_look = score_all_pairs(images, texts, self.pair_score)
        regions_look = score_all_pairs(texts, images, self.pair_score)
        return Scores.same(words_look + regions_look.T)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        words_look = score_given_pairs(images, texts, self.pair_score)
        regions_look = score_given_pairs(texts, images, self.pair_score)
        return Scores.same(words_look + regions_look)

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """The weights after dropping and sharing, in both directions."""
        return {
            "t2i": pair_attention(images, texts, self.look),
            "i2t": pair_attention(texts, images, self.look),
        }

    @classmethod
    def from_public(
        cls, state_dict: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Self:
        model = cls(**from_public_options(options))
        load_public(model, state_dict, cls.PUBLIC_NAMES)
        return model


# cell public-options
# What SCAN lets one choose and BFAN does not.
SETTLED = {
    "bi_gru": True,
    "cross_attn": "t2i",
    "raw_feature_norm": "clipped_l2norm",
    "agg_func": "Mean",
    "lambda_lse": 1.0,
}


def from_public_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our keywords for the options of the public command line."""
    if "focal_type" not in options:
        raise input_error("public options", "no focal_type", "all options of BFAN")
    ours = scan.from_public_options(options | SETTLED)
    for name in ("direction", "first_norm", "pooling", "lse"):
        del ours[name]
    return ours | {"focal": options["focal_type"], "ties": options.get("ties", "keep")}


# cell public-values
def public_values(model: BFAN, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case of the public code holds under ``mid.*``."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    words = model.word_embedding(text_batch.words)
    values = {
        "mid.img_emb": images.local,
        "mid.cap_gru": scan.read_words(model.gru, words, text_batch.lengths),
        "mid.cap_emb": texts.local,
    }
    if "mid.pair" in arrays:
        i, c = (slice(int(n), int(n) + 1) for n in arrays["mid.pair"])
        values |= _one_pair(model, images[i], texts[c])
    return {name: value for name, value in values.items() if name in arrays}


def _one_pair(model: BFAN, images: Images, texts: Texts) -> dict[str, Tensor]:
    """Every step of one pair, by its public name; attention is (query, key)."""
    values = {}
    temperature = model.config["temperature"]
    look = partial(attend, first_norm="clipped_l2norm", temperature=temperature)
    sides = {"t2i": (images, texts), "i2t": (texts, images)}
    for direction, (keys, queries) in sides.items():
        found = model.attention(images, texts)[direction]
        real = found.query_mask[0]
        focal = found.weights[0][real][:, found.key_mask[0]]
        plain = pair_attention(keys, queries, look).weights[0][real]
        attended = found.weights[0][real] @ found.keys[0]
        relevance = torch.cosine_similarity(found.queries[0][real], attended)
        values[f"mid.pair_{direction}_attn"] = plain[:, found.key_mask[0]]
        values[f"mid.pair_{direction}_mask"] = (focal > 0).float()
        values[f"mid.pair_{direction}_reattn"] = focal
        values[f"mid.pair_{direction}_context"] = attended
        values[f"mid.pair_{direction}_rowsim"] = relevance
    return values


# cell build
def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> BFAN:
    """The model that the parameters of this chapter describe."""
    names = ("width", "word_dim", "focal", "temperature", "ties")
    chosen = {name: parameters[name] for name in names}
    return BFAN(vocabulary_size, image_dim, **chosen)
