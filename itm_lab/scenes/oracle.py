"""The symbolic oracle: which captions are true of which scenes.

It sees the scenes' words and numbers, not the pixels. Its matrix is the ceiling of every metric and the judge
of every mined list: a negative that the oracle calls true is a false negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from itm_lab.scenes.logic import Claim, is_true
from itm_lab.scenes.world import ATTRIBUTES, PLACES, Scene

Array = np.ndarray


def truth_matrix(scenes: Sequence[Scene], claims: Sequence[Claim]) -> Array:
    """(number of scenes, number of claims) bool: ``is_true`` of every pair.

    Counting toys for all scenes at once rules out nearly all pairs; only the rest is read closely.
    """
    counts = _Counts(scenes)
    possible = np.stack([counts.possible(claim) for claim in claims], axis=1)
    for s, c in zip(*np.nonzero(possible), strict=True):
        possible[s, c] = is_true(claims[c], scenes[s])
    return possible


class _Counts:
    """How many toys of a scene match a phrase, for all scenes at once."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self.size = len(scenes)
        self.owner = np.array([s for s, scene in enumerate(scenes) for _ in scene.toys])
        kinds = [toy.kind for scene in scenes for toy in scene.toys]
        self.codes = np.array(
            [[values.index(word) for values, word in zip(ATTRIBUTES.values(), kind, strict=True)] for kind in kinds]
        )
        self.places = np.array([PLACES.index(scene.place) for scene in scenes])
        self.known: dict[tuple, Array] = {}

    def of(self, words: tuple[str | None, ...]) -> Array:
        """(number of scenes,) toys that match."""
        if words not in self.known:
            match = np.ones(len(self.codes), dtype=bool)
            for column, (values, word) in enumerate(zip(ATTRIBUTES.values(), words, strict=True)):
                if word is not None:
                    match &= self.codes[:, column] == values.index(word)
            self.known[words] = np.bincount(self.owner[match], minlength=self.size)
        return self.known[words]

    def possible(self, claim: Claim) -> Array:
        """(number of scenes,) False where a count or the place is wrong already."""
        result = np.ones(self.size, dtype=bool)
        if claim.place is not None:
            result &= self.places == PLACES.index(claim.place)
        for ask in claim.asks:
            count = self.of(ask.words)
            result &= (count == ask.number) if ask.exact else (count >= ask.number)
        return result


def ceiling(truth: Array, owner: Array, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Expected recalls (percent) of a matcher that knows exactly what is true and nothing more.

    truth: (i, c) bool; owner: (c,) the image each caption was written for. True candidates come first, in
    random order: the expectation over that order is taken exactly.
    """
    fits = truth.sum(axis=0)  # images a caption is true of
    result = {f"t2i_r{k}": 100.0 * float(np.mean(np.minimum(1.0, k / fits))) for k in ks}
    true_captions = truth.sum(axis=1)
    own = np.bincount(owner, minlength=len(truth))  # its own captions, all of them true
    for k in ks:
        misses = [_miss(int(n), int(m), k) for n, m in zip(true_captions, own, strict=True)]
        result[f"i2t_r{k}"] = 100.0 * (1.0 - float(np.mean(misses)))
    result["rsum"] = sum(result.values())
    return result


def _miss(total: int, own: int, k: int) -> float:
    """Chance that none of ``own`` among ``total`` shuffled captions is among the first k."""
    chance = Fraction(1)
    for drawn in range(min(k, total)):
        chance *= Fraction(max(0, total - own - drawn), total - drawn)
    return float(chance)
