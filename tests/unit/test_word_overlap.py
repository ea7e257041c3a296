"""Words that negative results share with the query's own captions, against sets of words taken one by one."""

from __future__ import annotations

import numpy as np
import pytest

from itm_utils.metrics.word_overlap import Overlap, negative_overlap

CAPTIONS = ["A red cube", "red cube and a ball", "two blue balls", "a blue ball", "the red ball", "one green cup"]
OWNER = np.array([0, 0, 1, 1, 2, 2])


def by_sets(scores: np.ndarray) -> Overlap:
    """The slow, obvious way."""
    words, first, every = [set(text.lower().split()) for text in CAPTIONS], [], []
    for image, row in enumerate(scores):
        own, others = np.flatnonzero(image == OWNER), np.flatnonzero(image != OWNER)
        near = {c: np.mean([len(words[c] & words[o]) / len(words[c] | words[o]) for o in own]) for c in others}
        first.append(near[max(others, key=lambda c: row[c])])
        every.append(np.mean(list(near.values())))
    return Overlap(float(np.mean(first)), float(np.mean(every)))


def test_overlap_is_that_of_sets_of_words() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 6))
    assert negative_overlap(scores, OWNER, CAPTIONS) == pytest.approx(by_sets(scores), rel=1e-5)


def test_own_captions_take_no_part_however_high_they_rank() -> None:
    """Image 0 ranks its own captions first; its first negative result is the only one with two of their words."""
    scores = np.zeros((3, 6))
    scores[0] = [9, 8, 0, 1, 2, 0]
    first, _ = negative_overlap(scores[:1], OWNER, CAPTIONS)
    assert first == pytest.approx((1 / 5 + 2 / 6) / 2)
