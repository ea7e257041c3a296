"""Words that retrieved captions share with those of the query image: whether even the first negative result is near."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Overlap(NamedTuple):
    """Means over all images. first_negative: of the negative caption ranked first. negatives: of all negative captions."""

    first_negative: float
    negatives: float


def negative_overlap(scores: np.ndarray, owner: np.ndarray, captions: Sequence[str]) -> Overlap:
    """Overlap of an image's negative captions with its own captions, averaged over these.

    The overlap of two captions is the number of words in both over the number of words in either. scores: (i, c).
    owner: (c,) the image of each caption.
    """
    found, words = [], bags_of_words(captions)
    counts = words.sum(axis=1)
    for image, row in enumerate(scores):
        own = owner == image
        overlap = shared_words(words[own], words, counts).mean(axis=0)[~own]
        found.append((overlap[row[~own].argmax()], overlap.mean()))
    return Overlap(*np.mean(found, axis=0).tolist())


def bags_of_words(captions: Sequence[str]) -> np.ndarray:
    """(c, words) float32: 1 at the words that a caption has."""
    texts = [caption.lower().split() for caption in captions]
    index = {word: column for column, word in enumerate(sorted({word for text in texts for word in text}))}
    rows = np.zeros((len(texts), len(index)), dtype=np.float32)
    for row, text in enumerate(texts):
        rows[row, [index[word] for word in text]] = 1
    return rows


def shared_words(some: np.ndarray, words: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(n, c) words in both over words in either, for bags ``some`` (n, words) and ``words`` (c, words) with row sums ``counts``."""
    both = some @ words.T
    return both / (some.sum(axis=1)[:, None] + counts - both)
