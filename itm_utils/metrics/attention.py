"""Precision, recall and F1 of attention against the boxes of phrases: does a word attend to what it names?

For a word, the *relevant* regions are those that overlap a box of its phrase, the *attended* ones those whose weight is
above a threshold. Precision is the share of attended regions that are relevant, recall the share of relevant regions
that are attended, F1 their harmonic mean, all between 0 and 1. A phrase has the maximum over its words, each measure for
itself (or, by choice, the mean over its words); the result is the mean over phrases.

Both thresholds are strict. Where nothing is attended precision and F1 are 0. A phrase without relevant regions has no
recall: it is dropped and counted. The chance level of F1 is that of attending to every region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from itm_utils.boxes import iou as box_iou
from itm_utils.data.batches import image_batch
from itm_utils.data.phrases import NOT_A_PHRASE, Grounding, phrase_of_words
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.matcher import Attention, Matcher
from itm_utils.progress import bar
from itm_utils.scoring import BATCH, Captions, evaluating

THRESHOLDS = np.arange(11) / 100  # of a weight: 0, 0.01, … 0.1
WITHIN = ("max", "mean")
NO_BOX, NO_REGION, NO_WORD = "no box", "no relevant region", "no token of the model"
NOT_A_REGION = -1.0  # overlap of padding
PHRASES_AT_ONCE = 2048  # words x thresholds x regions are compared at once: memory does not grow with the split


@dataclass(frozen=True, eq=False)
class AttentionQuality:
    """Precision, recall and F1 (t,) at each threshold (t,): means over phrases.

    values: (p, t, 3) the three of every phrase. keys: (p, 2) caption, and index of the phrase in it.
    chance: (p,) F1 of a word that attends to every region. reasons: why phrases were dropped → how many.
    """

    thresholds: np.ndarray
    values: np.ndarray
    keys: np.ndarray
    chance: np.ndarray
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def precision(self) -> np.ndarray:
        return self.values[..., 0].mean(axis=0)

    @property
    def recall(self) -> np.ndarray:
        return self.values[..., 1].mean(axis=0)

    @property
    def f1(self) -> np.ndarray:
        return self.values[..., 2].mean(axis=0)

    @property
    def chance_f1(self) -> float:
        """F1 of attending to every region."""
        return float(self.chance.mean())

    @property
    def phrases(self) -> int:
        """Number of measured phrases."""
        return len(self.values)

    @property
    def dropped(self) -> int:
        """Number of phrases without a box, a relevant region or a token."""
        return sum(self.reasons.values())

    @property
    def best(self) -> tuple[float, float, float, float]:
        """Threshold, precision, recall and F1 where F1 is largest (of equals, at the lowest threshold)."""
        return self.at(self.thresholds[self.f1.argmax()])

    def at(self, threshold: float) -> tuple[float, float, float, float]:
        """Threshold, precision, recall and F1 at one of the measured thresholds."""
        index = self._index(threshold)
        precision, recall, f1 = self.values[:, index].mean(axis=0).tolist()
        return float(self.thresholds[index]), precision, recall, f1

    def per_phrase(self, threshold: float | None = None) -> dict[str, np.ndarray]:
        """Precision, recall and F1 (p,) per phrase, in the order of ``keys``; by default at the best threshold."""
        index = self._index(self.best[0] if threshold is None else threshold)
        return {name: self.values[:, index, k] for k, name in enumerate(("precision", "recall", "f1"))}

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Recall, rising, and precision; of thresholds with the same recall the one with the highest precision."""
        order = np.lexsort((-self.precision, self.recall))
        recall, first = np.unique(self.recall[order], return_index=True)
        return recall, self.precision[order][first]

    def area(self, low: float, high: float) -> float:
        """Area under precision against recall from ``low`` to ``high``, linear between thresholds.

        The curve is not extended beyond its ends: compare two curves where both have recalls.
        """
        recall, precision = self.curve()
        if not recall[0] <= low < high <= recall[-1]:
            raise input_error(
                "area", f"recalls from {low:g} to {high:g}", f"{recall[0]:.4f} to {recall[-1]:.4f}, in order"
            )
        inner = recall[(recall > low) & (recall < high)]
        points = np.concatenate([[low], inner, [high]])
        return float(np.trapezoid(np.interp(points, recall, precision), points))

    def _index(self, threshold: float) -> int:
        index = int(np.abs(self.thresholds - threshold).argmin())
        if not np.isclose(self.thresholds[index], threshold, rtol=0, atol=1e-9):
            raise input_error("threshold", f"{threshold:g}", f"one of {', '.join(f'{t:g}' for t in self.thresholds)}")
        return index

    def __str__(self) -> str:
        threshold, precision, recall, f1 = (f"{number:.3f}" for number in self.best)
        counts = f"every region: F1 {self.chance_f1:.3f}; {self.phrases:,} phrases, {self.dropped:,} dropped"
        return f"attention F1 {f1} (precision {precision}, recall {recall}) at weights above {threshold}; {counts}"


def common_phrases(one: AttentionQuality, other: AttentionQuality) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n,) of the phrases that both have measured, in ``one`` and in ``other``, in the same order."""
    rows = [{tuple(key): row for row, key in enumerate(quality.keys.tolist())} for quality in (one, other)]
    both = [key for key in rows[0] if key in rows[1]]
    ours, theirs = (np.array([row_of[key] for key in both], dtype=np.int64) for row_of in rows)
    return ours, theirs


def relevant_regions(region_boxes: np.ndarray, boxes: np.ndarray, threshold: float = 0.4) -> np.ndarray:
    """Mask (r,) of the regions (r, 4) whose IoU with any of the boxes (n, 4) is above the threshold.

    Boxes are continuous: width is x2 - x1, without an extra pixel.
    """
    return _largest_overlap(region_boxes, boxes) > threshold


def _largest_overlap(region_boxes: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Largest IoU (r,) of each region (r, 4) with any of the boxes (n, 4); 0 without boxes."""
    region_boxes, boxes = (np.asarray(some, dtype=np.float64).reshape(-1, 4) for some in (region_boxes, boxes))
    with np.errstate(invalid="ignore"):  # two boxes without area: NaN, which fmax passes over
        return np.fmax.reduce(box_iou(region_boxes, boxes), axis=1, initial=0.0)


def attention_quality(
    weights: Tensor | np.ndarray,
    mask: Tensor | np.ndarray | None,
    phrase: Tensor | np.ndarray,
    relevant: np.ndarray,
    thresholds: Sequence[float] | np.ndarray = THRESHOLDS,
    within: str = "max",
    keys: np.ndarray | None = None,
) -> AttentionQuality:
    """Measure given attention weights: of one caption (w, r), a batch (c, w, r) or any words (n, r).

    mask: True at words that count (all if None). phrase: index of each word's phrase, -1 for none; in a batch every
    caption's phrases have indices of their own. relevant: (p, r) of all phrases. keys: (p, 2) names of the phrases.
    """
    thresholds, relevant = _checked(thresholds, within), np.atleast_2d(_array(relevant))
    weights, phrase = _array(weights).reshape(-1, relevant.shape[1]), _array(phrase).reshape(-1)
    phrase = phrase if mask is None else np.where(_array(mask).reshape(-1), phrase, NOT_A_PHRASE)
    last = phrase.max(initial=NOT_A_PHRASE)
    if len(phrase) != len(weights) or last >= len(relevant):
        found = f"{len(phrase)} words up to phrase {last}"
        raise input_error("phrase", found, f"{len(weights)} words, phrases 0 to {len(relevant) - 1}")
    if keys is None:
        keys = np.stack([np.zeros(len(relevant), dtype=np.int64), np.arange(len(relevant))], axis=1)
    collected = PhraseAttention(weights, phrase, relevant.astype(np.float64), keys)
    return collected.quality(thresholds, iou=0.5, within=within)


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _checked(thresholds: Sequence[float] | np.ndarray, within: str) -> np.ndarray:
    thresholds = np.asarray(thresholds, dtype=np.float64)
    if thresholds.ndim != 1 or not len(thresholds) or not (np.diff(thresholds) > 0).all():
        raise input_error("thresholds", f"{thresholds.tolist()}", "one or more numbers in strictly rising order")
    if within not in WITHIN:
        raise input_error("within", repr(within), f"one of {', '.join(WITHIN)}")
    return thresholds


@dataclass(frozen=True, eq=False)
class PhraseAttention:
    """Attention weights of the words of phrases, collected once: measured at any threshold, overlap and reduction.

    weights: (n, r) per word. phrase: (n,) index of its phrase, -1 for none. overlap: (p, r) largest IoU of each region
    with the boxes of a phrase, -1 where there is no region. keys: (p, 2) caption, and index of the phrase in it.
    without_box: phrases that have no box, and are not among these.
    """

    weights: np.ndarray
    phrase: np.ndarray
    overlap: np.ndarray
    keys: np.ndarray
    without_box: int = 0

    def quality(
        self, thresholds: Sequence[float] | np.ndarray = THRESHOLDS, iou: float = 0.4, within: str = "max"
    ) -> AttentionQuality:
        """Measure every word at every threshold, then reduce over phrases. iou: relevant is a region above it."""
        thresholds, relevant = _checked(thresholds, within), self.overlap > iou
        has_region = relevant.any(axis=1)
        has_word = np.isin(np.arange(len(relevant)), self.phrase)
        reasons = Counter({NO_BOX: self.without_box, NO_REGION: int((~has_region).sum())})
        reasons += Counter({NO_WORD: int((has_region & ~has_word).sum())})
        if not len(kept := np.flatnonzero(has_region & has_word)):
            found = ", ".join(f"{count} with {reason}" for reason, count in reasons.items()) or "none at all"
            hint = "Boxes of regions and of phrases must both be x1 y1 x2 y2 in the pixels of the same image."
            raise input_error("phrases", found, "some with a relevant region and a token", hint)
        parts = np.split(kept, range(PHRASES_AT_ONCE, len(kept), PHRASES_AT_ONCE))
        values = np.concatenate([self._values(part, relevant, thresholds, within) for part in parts])
        regions, n_relevant = (self.overlap != NOT_A_REGION).sum(axis=1)[kept], relevant.sum(axis=1)[kept]
        chance = 2 * n_relevant / (regions + n_relevant)
        return AttentionQuality(thresholds, values, self.keys[kept], chance, dict(reasons))

    def _values(self, kept: np.ndarray, relevant: np.ndarray, thresholds: np.ndarray, within: str) -> np.ndarray:
        """Precision, recall and F1 (p, t, 3) of some phrases (p,), which have words and relevant regions."""
        words = np.flatnonzero(np.isin(self.phrase, kept))
        words = words[np.argsort(self.phrase[words], kind="stable")]  # phrase by phrase
        target = relevant[self.phrase[words]]  # (n, r)
        attended = self.weights[words, None, :] > thresholds[:, None]  # (n, t, r)
        hits = (attended & target[:, None, :]).sum(axis=-1)
        n_attended, n_relevant = attended.sum(axis=-1), target.sum(axis=-1)[:, None]
        # the last is 2 P R / (P + R), without a division that fails where nothing is attended
        values = np.stack(
            [hits / np.maximum(n_attended, 1), hits / n_relevant, 2 * hits / (n_attended + n_relevant)], axis=-1
        )
        first = np.searchsorted(self.phrase[words], kept)
        values = (np.maximum if within == "max" else np.add).reduceat(values, first, axis=0)
        return values / (1 if within == "max" else np.diff([*first, len(words)])[:, None, None])


def collect_attention(
    model: Matcher,
    split: PrecompSplit,
    texts: Captions,
    grounding: Grounding,
    direction: str = "t2i",
    batch: int = BATCH,
) -> PhraseAttention:
    """Collect the weights of every word of a phrase with a box, each caption with its own image: one pass.

    texts: where the captions come from, as for ``score_split``. Captions are encoded ``batch`` at a time.
    """
    check_split(split, grounding)
    parts: list[tuple[np.ndarray, ...]] = []
    boxed = [c for c, phrases in enumerate(grounding.phrases) if any(len(phrase.boxes) for phrase in phrases)]
    with evaluating(model) as device:
        for start in bar(range(0, len(boxed), batch), "attention", "batch"):
            captions = np.array(boxed[start : start + batch])
            unique, which = np.unique(split.owner[captions], return_inverse=True)  # each image is encoded once
            images, words = image_batch(split, unique), texts.batch(captions, spans=True)
            encoded = model.encode_images(images.to(device))[torch.from_numpy(which)]
            offered = model.attention(encoded, model.encode_texts(words.to(device)))
            attention = _word_attention(model, offered, direction, (*words.spans.shape[:2], images.mask.shape[1]))
            phrase, *about = _targets(grounding, captions, words.spans, images.boxes.numpy()[which], attention)
            weights = attention.weights.masked_fill(~attention.key_mask[:, None, :], 0).float().flatten(0, 1)
            named = np.flatnonzero(phrase != NOT_A_PHRASE)
            shift = sum(len(part[2]) for part in parts)
            parts.append((weights.cpu().numpy()[named], phrase[named] + shift, *about))
    without_box = sum(not len(phrase.boxes) for phrases in grounding.phrases for phrase in phrases)
    regions = split.regions(np.arange(1)).shape[1]
    none = np.zeros((0, regions), np.float32), np.zeros(0, np.int64), np.zeros((0, regions)), np.zeros((0, 2), np.int64)
    weights, phrase, overlap, keys = map(np.concatenate, zip(none, *parts, strict=True))
    return PhraseAttention(weights, phrase, overlap, keys, without_box)


def _targets(
    grounding: Grounding, captions: np.ndarray, spans: Tensor, boxes: np.ndarray, attention: Attention
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Phrase index of each word of a batch (c * w,), overlap with the regions (p, r) and keys (p, 2) of its phrases."""
    words, regions = (mask.cpu().numpy() for mask in (attention.query_mask, attention.key_mask))
    phrase, overlap, keys = np.full(words.shape, NOT_A_PHRASE), [], []
    for row, caption in enumerate(captions):
        own = phrase_of_words(spans[row], grounding.phrases[caption])
        for number, one in enumerate(grounding.phrases[caption]):
            if len(one.boxes):
                phrase[row, (own == number) & words[row]] = len(keys)
                overlap.append(np.where(regions[row], _largest_overlap(boxes[row], one.boxes), NOT_A_REGION))
                keys.append((int(caption), number))
    return phrase.reshape(-1), np.stack(overlap), np.array(keys)


def check_split(split: PrecompSplit, grounding: Grounding) -> None:
    """Check that :func:`collect_attention` finds boxes of the regions in pixels, and phrases of these captions."""
    path = split.root / f"{split.name}_boxes.npy"
    if split.boxes is None:
        raise input_error(path, "no such file", "the boxes of the regions, in pixels")
    if split.boxes.shape[-1] != 4:
        raise input_error(path, f"{split.boxes.shape[-1]} numbers per region", "x1 y1 x2 y2 in pixels")
    if split.box_shares and split.sizes is None:
        hint = f"Add {split.name}_sizes.npy, width and height of the images: then they are read as pixels."
        raise input_error(path, "shares of the sides, from 0 to 1", "x1 y1 x2 y2 in pixels", hint)
    if len(grounding.phrases) != split.n_captions:
        found = f"phrases of {len(grounding.phrases):,} captions"
        raise input_error("grounding", found, f"{split.n_captions:,}, as in split {split.name}")


def _word_attention(model: Matcher, offered: dict[str, Attention], direction: str, shape: tuple[int, ...]) -> Attention:
    """The attention of one direction, checked: its queries are the tokens of the captions."""
    name = type(model).__name__
    if direction == "i2t" or direction not in offered:
        found = f"attention {direction!r} (the model offers {', '.join(sorted(offered)) or 'none'})"
        raise input_error(name, found, "words that attend to regions, as 't2i' does")
    if (own := tuple(offered[direction].weights.shape)) != shape:
        raise input_error(name, f"weights {direction!r} of shape {own}", f"{shape}: captions, tokens, regions")
    return offered[direction]
