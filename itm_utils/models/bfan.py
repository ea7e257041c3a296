# Generated from notebooks/03_bfan.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/03_bfan.ipynb exports."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    PairMask,
    Shapes,
    cosine_from_gram,
    pair_attention,
    score_both_ways,
    score_given_pairs_both_ways,
)
from itm_utils.matcher import Attention, Images, Scores, Texts
from itm_utils.models.scan import RegionsAndWords, attend, pool_queries, scan_attention
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import Stage, train_config


# cell kept-as-published
def pairwise_focal_mask(
    weights: Tensor, focal: str, real: Tensor | None = None
) -> Tensor:
    """Mask (m, k, x) of the keys to keep, by the paper's sum over pairs of keys.

    weights: (m, k, x) attention weights. real: (m, k, 1) False at padding, or None.
    """
    others = weights[:, None]  # (m, 1, j, x)
    importance = others.sqrt() if focal == "prob" else torch.ones_like(others)
    if real is not None:
        importance = importance * real[:, None]
    return ((weights[:, :, None] - others) * importance).sum(dim=2) > 0


# cell refocus
FOCALS = ("equal", "prob", "none")
TIES = ("keep", "drop")
TIE_TOLERANCE = 1e-5  # relative: a weight this close to the threshold counts as on it


def check_focal(focal: str, ties: str) -> None:
    """Raise an error unless both options are known."""
    for name, value, allowed in (("focal", focal, FOCALS), ("ties", ties, TIES)):
        if value not in allowed:
            raise input_error(name, repr(value), f"one of {', '.join(allowed)}")


def focal_threshold(weights: Tensor, focal: str, real: Tensor | None = None) -> Tensor:
    """Weighted mean (m, 1, x) of the weights (m, k, x): what a key must reach.

    real: (m, k, 1) False at padded keys, whose weights are 0; None without padding.
    """
    if focal == "equal":
        count = weights.shape[1] if real is None else real.sum(dim=1, keepdim=True)
        return weights.sum(dim=1, keepdim=True) / count
    root = weights.sqrt()
    return (weights * root).sum(dim=1, keepdim=True) / root.sum(dim=1, keepdim=True)


# cell refocus-weights
def focal_weights(
    weights: Tensor,
    focal: str,
    ties: str = "keep",
    real: Tensor | None = None,
    renormalize: bool = True,
) -> Tensor:
    """Zero the weights (m, k, x) below the threshold and renormalise the rest.

    real: (m, k, 1) False at padded keys, whose weights are 0; None without padding.
    """
    if focal == "none":
        return weights
    with torch.no_grad():  # hard selection is not differentiable
        if ties == "drop":
            keep = pairwise_focal_mask(weights, focal, real)
        else:
            threshold = focal_threshold(weights, focal, real)
            keep = weights >= (1 - TIE_TOLERANCE) * threshold
    kept = weights * keep
    if not renormalize:
        return kept
    return kept * kept.sum(dim=1, keepdim=True).reciprocal()


# cell score-by-loop
def score_by_loop(
    images: Images, texts: Texts, temperature: float, focal: str, ties: str = "keep"
) -> Tensor:
    """Reference scores (i, c), one caption at a time; all regions must be real."""
    columns = []
    for words, mask in zip(texts.local, texts.mask, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        regions, column = images.local, 0
        for keys, queries in ((regions, repeated), (repeated, regions)):
            weights = attend(keys @ queries.mT, "clipped_l2norm", temperature)
            weights = focal_weights(weights, focal, ties)
            attended = weights.mT @ keys  # (i, q, d)
            relevance = torch.cosine_similarity(queries, attended, dim=-1)
            column = column + relevance.mean(dim=1)
        columns.append(column)
    return torch.stack(columns, dim=1)


# cell focal-score
def focal_attention(
    affinity: Tensor,
    shapes: Shapes,
    temperature: float,
    focal: str,
    ties: str,
    mask: PairMask | None = None,
    renormalize: bool = True,
) -> Tensor:
    """Focal weights (m, k, x) of affinities (m, k, x): SCAN's attention, refocused."""
    weights = scan_attention(affinity, shapes, "clipped_l2norm", temperature, mask)
    real = None if mask is None else mask.keys
    return focal_weights(weights, focal, ties, real, renormalize)


def focal_score(
    affinity: Tensor,
    gram: Tensor,
    query_norm: Tensor,
    shapes: Shapes,
    temperature: float,
    focal: str,
    ties: str,
    mask: PairMask | None = None,
) -> Tensor:
    """Scores (m, n) of affinities (m, k, x): mean relevance under focal attention."""
    # a cosine does not see the sum of the weights; 0/0 of dropped ties, it must see
    args = temperature, focal, ties, mask, ties == "drop"
    weights = focal_attention(affinity, shapes, *args)
    relevance = cosine_from_gram(affinity, weights, gram, query_norm)
    return pool_queries(relevance, shapes, "Mean", 1.0, mask)


# cell bfan-class
class BFAN(RegionsAndWords):
    """Bidirectional focal attention: words attend to regions and regions to words."""

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
        super().__init__(vocabulary_size, image_dim, **encoders)
        options = {"focal": focal, "temperature": temperature, "ties": ties}
        self.pair_score = partial(focal_score, **options)
        self.attend = partial(focal_attention, **options)

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(score_both_ways(images, texts, self.pair_score))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        scores = score_given_pairs_both_ways(images, texts, self.pair_score)
        return Scores.same(scores)

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """Focal weights of matched pairs, in both directions."""
        return {
            "t2i": pair_attention(images, texts, self.attend),
            "i2t": pair_attention(texts, images, self.attend),
        }


# cell build
def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> BFAN:
    """Build the model that the parameters of this chapter describe."""
    names = ("width", "word_dim", "focal", "temperature", "ties")
    chosen = {name: parameters[name] for name in names}
    return BFAN(vocabulary_size, image_dim, **chosen)


def stages(parameters: Mapping[str, Any], model: BFAN) -> list[Stage]:
    """List the one training of this chapter: hinge loss, hardest negatives."""
    margin, warmup = parameters["margin"], parameters["warmup_epochs"]
    objective = HingeTriplet(margin=margin, hardest=True, warmup_epochs=warmup)
    return [Stage("train", model, objective, train_config(parameters))]
