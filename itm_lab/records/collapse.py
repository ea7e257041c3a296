"""Numbers in which a collapse shows: a loss that stands still, items that are all alike, scores that hardly differ.

A collapsed model gives every pair nearly the same score. Its recalls say only that it is bad; these say why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from itm_utils.data.batches import image_batch
from itm_utils.data.precomp import PrecompSplit
from itm_utils.matcher import Encoded, Matcher, Scores
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.vsepp import l2_normalize
from itm_utils.scoring import Captions, evaluating

STEPS = 100  # last steps over which the loss is averaged
ITEMS = 256  # images, each with its first caption, that are compared with each other
NUMBERS = {  # of a receipt → what it is
    "final_loss": "loss of a batch at the end",
    "image_cosine": "mean cosine of two images",
    "caption_cosine": "mean cosine of two captions",
    "score_spread": "spread of the scores",
}


def collapse_numbers(
    scores: Scores, log: Sequence[Mapping[str, Any]], model: Matcher | None, split: PrecompSplit, texts: Captions
) -> dict[str, float]:
    """Final loss, spread of the scores, mean cosine of two images and of two captions; without what is not known.

    log: the records of a training. model: the trained one, or None. split, texts: what the scores were made from.
    """
    loss = final_loss(log)
    found = {"final_loss": math.nan if loss is None else loss, "score_spread": float(scores.i2t.std())}
    if model is not None:
        images, captions = encode_some(model, split, texts)
        found |= {"image_cosine": mean_cosine(images), "caption_cosine": mean_cosine(captions)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def final_loss(log: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean loss of the last steps of a training; None without any."""
    losses = [record["loss"] for record in log if "loss" in record][-STEPS:]
    return float(np.mean(losses)) if losses else None


def encode_some(model: Matcher, split: PrecompSplit, texts: Captions) -> tuple[Tensor, Tensor]:
    """Vectors of the first images of a split and of the first caption of each: (n, d) twice."""
    images, captions = (index[:ITEMS] for index in np.unique(split.owner, return_index=True))
    with evaluating(model) as device:
        seen = model.encode_images(image_batch(split, images).to(device))
        return item_vectors(seen), item_vectors(model.encode_texts(texts.batch(captions).to(device)))


def item_vectors(encoded: Encoded) -> Tensor:
    """One vector per item (n, d): its own, or the mean of its regions or words where it has none."""
    return masked_mean(encoded.local, encoded.mask) if encoded.pooled is None else encoded.pooled


def mean_cosine(vectors: Tensor) -> float:
    """Mean cosine of two different rows of (n, d); NaN if there is one row only."""
    count = len(vectors)
    total = l2_normalize(vectors.double().cpu()).sum(dim=0).square().sum()  # n ones, and every pair twice
    return float(total - count) / (count * (count - 1)) if count > 1 else math.nan
