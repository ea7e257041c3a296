"""Attention of each word of a caption over the regions of an image, for models that have it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from itm_lab.photos.regions import BOX
from itm_lab.photos.search import Opened
from itm_utils.data.batches import image_batch
from itm_utils.matcher import Attention
from itm_utils.scoring import Captions, evaluating

WORDS_ATTEND, REGIONS_ATTEND = "t2i", "i2t"


@dataclass(frozen=True, eq=False)
class WordAttention:
    """words: of the sentence, in order. weights: (w, r) what each gives to the regions; rows sum to 1.

    way: ``t2i`` where words attend to regions; ``i2t`` where regions attend to words, and the weights say which ones did.
    """

    words: list[str]
    weights: np.ndarray
    way: str


def word_attention(opened: Opened, image: int, texts: Captions, caption: int, text: str) -> WordAttention | None:
    """What a caption's words attend to in an image; None for a model without attention between the two sides.

    caption: its place in ``texts``. text: its characters.
    """
    batch = texts.batch(np.array([caption]), spans=True)
    with evaluating(opened.model) as device:
        encoded_image = opened.model.encode_images(image_batch(opened.split, np.array([image])).to(device))
        seen = opened.model.attention(encoded_image, opened.model.encode_texts(batch.to(device)))
    way = WORDS_ATTEND if WORDS_ATTEND in seen else REGIONS_ATTEND
    if way not in seen:
        return None
    weights = weights_by_word(seen[way], way)
    spans = batch.spans[0].numpy()
    if len(weights) != len(spans):  # such a model's queries are no tokens of the sentence
        return None
    words, merged = merge_pieces(text, spans, weights)
    return WordAttention(words, merged, way) if words else None


def weights_by_word(attention: Attention, way: str) -> np.ndarray:
    """(w, r) of one pair, regions that are padding at 0."""
    if way == WORDS_ATTEND:
        weights = attention.weights[0].masked_fill(~attention.key_mask[0][None, :], 0)
    else:
        weights = attention.weights[0].masked_fill(~attention.query_mask[0][:, None], 0).mT
    return torch.as_tensor(weights, dtype=torch.float32).cpu().numpy()


def merge_pieces(text: str, spans: np.ndarray, weights: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Words and (w, r) weights from tokens with spans (t, 2): pieces of one word share their mean; no punctuation.

    Tokens without characters (start, end) are left out; rows are scaled to sum to 1.
    """
    groups: list[list[int]] = []
    for token, (start, end) in enumerate(spans):
        if end <= start or not any(c.isalnum() for c in text[start:end]):
            continue
        goes_on = bool(groups) and groups[-1][-1] == token - 1 and spans[token - 1][1] == start
        if goes_on and text[start - 1].isalnum() and text[start].isalnum():
            groups[-1].append(token)
        else:
            groups.append([token])
    words = [text[spans[group[0]][0] : spans[group[-1]][1]] for group in groups]
    merged = np.array([weights[group].mean(axis=0) for group in groups]).reshape(len(groups), -1)
    return words, merged / np.maximum(merged.sum(axis=1, keepdims=True), 1e-12)


def words_on_boxes(attention: WordAttention, kinds: np.ndarray) -> dict[int, list[str]]:
    """Region → words whose largest weight it has, for regions that are boxes of a detector. kinds: (r,)."""
    found: dict[int, list[str]] = {}
    for word, region in zip(attention.words, attention.weights.argmax(axis=1).tolist(), strict=True):
        if kinds[region] == BOX:
            found.setdefault(region, []).append(word)
    return found


def heat(boxes: np.ndarray, weights: np.ndarray, size: tuple[float, float], cells: int = 96) -> np.ndarray:
    """(cells, cells) share of the largest weight at each place: where boxes (r, 4) overlap, the largest counts.

    weights: (r,). size: width and height that the boxes are measured in.
    """
    x, y = ((np.arange(cells) + 0.5) / cells * length for length in size)
    inside_x = (boxes[:, :1] <= x) & (x < boxes[:, 2:3])  # (r, cells)
    inside_y = (boxes[:, 1:2] <= y) & (y < boxes[:, 3:])
    inside = inside_y[:, :, None] & inside_x[:, None, :]
    covered = np.where(inside, weights[:, None, None], 0.0).max(axis=0, initial=0.0)
    return covered / max(float(covered.max()), 1e-12)
