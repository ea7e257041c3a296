"""Random numbers that are the same on every machine and in every version of numpy.

Numpy promises the raw 64-bit stream of a bit generator for ever, but not what ``Generator.normal`` and its
kin make of it. So Scenes draws everything from raw words with integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class PortableRandom:
    """A stream of random choices named by integers: ``PortableRandom(seed, split, family)``."""

    def __init__(self, *name: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(name)))

    def below(self, n: int) -> int:
        """An integer 0 .. n-1 (the modulo's bias is below n / 2^64)."""
        return int(self._bits.random_raw()) % n

    def between(self, low: int, high: int) -> int:
        """An integer low .. high, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        """True in ``percent`` of 100 cases."""
        return self.below(100) < percent

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def weighted(self, weights: dict[T, int]) -> T:
        """One of the keys, as often as its integer weight says."""
        ticket = self.below(sum(weights.values()))
        for item, weight in weights.items():
            ticket -= weight
            if ticket < 0:
                return item
        raise AssertionError("weights must be positive")

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order (Fisher and Yates)."""
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items

    def grid(self, *shape: int) -> np.ndarray:
        """Float64 array of multiples of 1/256 in [0, 1): eight random bits an entry."""
        count = int(np.prod(shape))
        words = np.asarray(self._bits.random_raw(-(-count // 8)), dtype="<u8")
        return words.view(np.uint8)[:count].reshape(shape) / 256.0
