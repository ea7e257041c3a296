"""What a caption claims, and whether a scene bears it out.

A caption claims: for each of its noun phrases, that so many toys of such a kind are there; that the phrases
speak of different toys; perhaps that one phrase's toys stand left of (right of, above, below) another's;
perhaps the place. Numbers are exact ("two", "a single"); "a" and "some" mean at least one and at least two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from itm_lab.scenes.world import UNIT, Scene, Toy

CLEARLY = 8 * UNIT  # a relation needs this distance between centres, in quarter pixels


@dataclass(frozen=True)
class Ask:
    """One noun phrase as a condition. None: the phrase does not say."""

    shape: str | None = None
    colour: str | None = None
    pattern: str | None = None
    size: str | None = None
    number: int = 1
    exact: bool = False

    def matches(self, toy: Toy) -> bool:
        """Whether the phrase's words are true of the toy."""
        return (
            self.shape in (None, toy.shape)
            and self.colour in (None, toy.colour)
            and self.pattern in (None, toy.pattern)
            and self.size in (None, toy.size)
        )

    @property
    def words(self) -> tuple[str | None, ...]:
        """The condition without its number."""
        return self.shape, self.colour, self.pattern, self.size


@dataclass(frozen=True)
class Claim:
    """A caption as a condition. ``relation`` holds between phrases 0 and 1."""

    asks: tuple[Ask, ...]
    relation: str | None = None
    place: str | None = None


def stands(relation: str, a: Toy, b: Toy) -> bool:
    """Whether toy ``a`` is clearly left of, right of, above or below toy ``b``."""
    gap = {"left": b.x - a.x, "right": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[relation]
    return gap >= CLEARLY


def holds(relation: str, ours: Iterable[Toy], theirs: Sequence[Toy]) -> bool:
    """Whether the relation holds between all of ours and all of theirs."""
    return all(stands(relation, a, b) for a in ours for b in theirs)


def is_true(claim: Claim, scene: Scene) -> bool:
    """Whether the caption is true of the scene."""
    if claim.place is not None and claim.place != scene.place:
        return False
    return any(True for _ in readings(claim, scene))


def readings(claim: Claim, scene: Scene) -> Iterable[tuple[tuple[int, ...], ...]]:
    """Every way to give each phrase toys of its own so that the caption is true (positions in ``scene.toys``)."""
    yield from _extend(claim, scene, [])


def _extend(claim: Claim, scene: Scene, chosen: list[tuple[int, ...]]) -> Iterable[tuple[tuple[int, ...], ...]]:
    if len(chosen) >= 2 and claim.relation is not None:
        ours, theirs = ([scene.toys[k] for k in group] for group in chosen[:2])
        if not holds(claim.relation, ours, theirs):
            return
    if len(chosen) == len(claim.asks):
        yield tuple(chosen)
        return
    ask = claim.asks[len(chosen)]
    taken = {k for group in chosen for k in group}
    matching = [k for k, toy in enumerate(scene.toys) if ask.matches(toy)]
    if ask.exact and len(matching) != ask.number:
        return
    for group in combinations([k for k in matching if k not in taken], ask.number):
        yield from _extend(claim, scene, [*chosen, group])
