"""Phrases with the boxes they name: one form of ground truth for Scenes and for Flickr30K Entities.

A phrase is a character span of a caption *as the model is given it*, with the boxes of what it names in the pixels of
the split's own boxes. Tokens are assigned to phrases by the characters they cover, so that words and word pieces are
treated alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from torch import Tensor

from itm_utils.digests import digest_of

NOT_A_PHRASE = -1


@dataclass(frozen=True, eq=False)
class Phrase:
    """Characters ``start:end`` of a caption, and boxes (n, 4) x1 y1 x2 y2 in pixels; n may be 0."""

    start: int
    end: int
    boxes: np.ndarray


@dataclass(frozen=True, eq=False)
class Grounding:
    """The phrases of a split. phrases: one list per caption, in order. skipped: reason → how many."""

    phrases: list[list[Phrase]]
    skipped: dict[str, int] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of every phrase and box, wherever they were read."""
        return digest_of([[(p.start, p.end, p.boxes.tolist()) for p in phrases] for phrases in self.phrases])

    def first(self, captions: int) -> Self:
        """Keep the first captions, as ``split.first(images)`` does for a split; ``skipped`` stays as it is."""
        return replace(self, phrases=self.phrases[:captions])


def phrase_of_words(spans: Tensor | np.ndarray, phrases: Sequence[Phrase]) -> np.ndarray:
    """Index (w,) of the phrase that covers more than half of each token; -1 for none, and for special tokens.

    spans: (w, 2) characters that the tokens cover, as in ``TextBatch.spans``. Of nested phrases the shortest counts.
    """
    spans = np.asarray(spans.cpu() if isinstance(spans, Tensor) else spans)
    if not phrases:
        return np.full(len(spans), NOT_A_PHRASE)
    starts, ends = np.array([(phrase.start, phrase.end) for phrase in phrases]).T
    shared = np.minimum(spans[:, 1:], ends) - np.maximum(spans[:, :1], starts)  # (w, p)
    inside = 2 * shared > spans[:, 1:] - spans[:, :1]
    lengths = np.where(inside, ends - starts, np.iinfo(np.int64).max)
    return np.where(inside.any(axis=1), lengths.argmin(axis=1), NOT_A_PHRASE)
