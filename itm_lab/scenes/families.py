"""Families of scenes: a base, near-duplicates with one edit, and retakes of the same toys.

An edit changes what is there (one attribute, a binding, a count, who stands where) and as little as possible
of how it looks: these are the hard negatives. A retake changes everything but the toys: most captions of the
base are true of it too, so these are the false negatives that every large dataset has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from itm_lab.scenes.captions import Caption, describe
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.world import (
    ATTRIBUTES,
    CANVAS,
    EDIT_KINDS,
    PLACES,
    TURNS,
    UNIT,
    Knobs,
    Scene,
    Toy,
    arrange,
    fits,
    relight,
    resize,
    sample_scene,
)


@dataclass(frozen=True)
class Described:
    """A scene with its captions, and the members of its family that its captions must not fit.

    ``twins`` are positions in the split, once the split is put together.
    """

    scene: Scene
    captions: tuple[Caption, ...]
    twins: tuple[int, ...]


def sample_split(seed: int, split: int, size: int, knobs: Knobs) -> list[Described]:
    """``size`` scenes of whole families (the last one is cut), shuffled."""
    members: list[Described] = []
    family = 0
    while len(members) < size:
        offset = len(members)
        for member in sample_family(PortableRandom(seed, split, family), family, knobs):
            members.append(replace(member, twins=tuple(offset + twin for twin in member.twins)))
        family += 1
    return _shuffle(members[:size], PortableRandom(seed, split, 2**40))


def _shuffle(members: list[Described], rng: PortableRandom) -> list[Described]:
    """Random order, with twins renamed (those that were cut off are forgotten)."""
    order = rng.shuffled(range(len(members)))
    place = {old: new for new, old in enumerate(order)}
    return [
        replace(members[old], twins=tuple(place[twin] for twin in members[old].twins if twin in place)) for old in order
    ]


def sample_family(rng: PortableRandom, number: int, knobs: Knobs) -> list[Described]:
    """One scene, or a base with its edits and retakes, each with five captions.

    Every caption is false of its scene's twins: a base's of all edits, an edit's of the base and the retakes.
    Families for which the grammar finds no such captions are thrown away.
    """
    while True:
        scenes = _sample_members(rng, knobs)
        family = []
        for scene in scenes:
            twins = tuple(other for other in range(len(scenes)) if _are_twins(scene.role, scenes[other].role))
            captions = describe(rng, scene, [scenes[twin] for twin in twins], knobs)
            if captions is None:
                break
            family.append(Described(replace(scene, family=number), captions, twins))
        else:
            return family


def _are_twins(role: str, other: str) -> bool:
    """An edit against the originals. A retake moves the toys, so it is no twin of an edit that swaps places."""
    originals = {"base", "retake"}
    if (role in originals) == (other in originals):
        return False
    return {role, other} != {"retake", "swap"}


def _sample_members(rng: PortableRandom, knobs: Knobs) -> list[Scene]:
    base = sample_scene(rng, knobs)
    if not rng.chance(knobs.family):
        return [base]
    base = replace(base, role="base")
    edits = [sample_edit(rng, base) for _ in range(knobs.edits)]
    retakes = [retake(rng, base) for _ in range(knobs.retakes)]
    return [base, *edits, *retakes]


def retake(rng: PortableRandom, base: Scene) -> Scene:
    """The same toys, moved about, in other light, half of the time in another place."""
    place = rng.pick(PLACES) if rng.chance(50) else base.place
    return arrange(rng, replace(base, place=place, role="retake"))


# -- edits -----------------------------------------------------------------------------------------------------


def sample_edit(rng: PortableRandom, base: Scene) -> Scene:
    """A near-duplicate of ``base``. Not every edit is possible everywhere: try a kind for a while, then another."""
    while True:
        kind = rng.weighted(EDIT_KINDS)
        for _ in range(30):
            toys = EDITS[kind](rng, base.toys) if kind in EDITS else _change(rng, base.toys, kind)
            nudged = tuple(_nudge(rng, toy) for toy in toys or ())
            if fits(nudged) and len({toy.kind for toy in nudged}) > 1:
                return relight(rng, replace(base, toys=nudged, role=kind))


def _change(rng: PortableRandom, toys: tuple[Toy, ...], attribute: str) -> tuple[Toy, ...] | None:
    """One attribute of one group. Nobody calls a toy medium-sized, so sizes go from small to big and back."""
    old = rng.pick(toys)
    if old.size == "medium" and attribute == "size":
        return None
    values = [value for value in ATTRIBUTES[attribute] if value not in (getattr(old, attribute), "medium")]
    new = rng.pick(values)
    return _repaint(rng, toys, {old.kind: {attribute: new}})


def _bind(rng: PortableRandom, toys: tuple[Toy, ...]) -> tuple[Toy, ...] | None:
    """Two groups swap their colours, patterns or sizes: the same words, bound differently."""
    a, b = rng.pick(toys), rng.pick(toys)
    attribute = rng.weighted({"colour": 6, "pattern": 2, "size": 2})
    if a.shape == b.shape or getattr(a, attribute) == getattr(b, attribute):
        return None
    new_a, new_b = {attribute: getattr(b, attribute)}, {attribute: getattr(a, attribute)}
    return _repaint(rng, toys, {a.kind: new_a, b.kind: new_b})


def _repaint(
    rng: PortableRandom, toys: tuple[Toy, ...], changes: dict[tuple, dict[str, str]]
) -> tuple[Toy, ...] | None:
    """Change whole groups; None when that would melt two groups into one."""
    changed = []
    for toy in toys:
        new = replace(toy, **changes.get(toy.kind, {}))
        changed.append(resize(rng, new) if new.size != toy.size else new)
    return tuple(changed) if len({t.kind for t in changed}) == len({t.kind for t in toys}) else None


def _count(rng: PortableRandom, toys: tuple[Toy, ...]) -> tuple[Toy, ...] | None:
    """One toy more of a group, or one less."""
    toy = rng.pick(toys)
    same = sum(other.kind == toy.kind for other in toys)
    if same > 1 and (rng.chance(50) or len(toys) == 7):
        return tuple(other for other in toys if other is not toy)
    if len(toys) == 7:
        return None
    for _ in range(40):
        low, high = toy.radius, CANVAS * UNIT - toy.radius
        x, y = rng.between(low, high), rng.between(low, high)
        more = (*toys, replace(resize(rng, toy), x=x, y=y))
        if fits(more):
            return more
    return None


def _swap(rng: PortableRandom, toys: tuple[Toy, ...]) -> tuple[Toy, ...] | None:
    """Two different toys change places."""
    a, b = rng.below(len(toys)), rng.below(len(toys))
    if toys[a].kind == toys[b].kind:
        return None
    swapped = list(toys)
    swapped[a] = replace(toys[a], x=toys[b].x, y=toys[b].y)
    swapped[b] = replace(toys[b], x=toys[a].x, y=toys[a].y)
    return tuple(swapped)


EDITS: dict[str, Callable] = {"binding": _bind, "count": _count, "swap": _swap}


def _nudge(rng: PortableRandom, toy: Toy) -> Toy:
    """Move by two pixels at most: twins must not be told apart by comparing pixels."""
    x, y = toy.x + rng.between(-2 * UNIT, 2 * UNIT), toy.y + rng.between(-2 * UNIT, 2 * UNIT)
    turn = max(TURNS[0], min(TURNS[1], toy.turn + rng.between(-6, 6)))
    return replace(toy, x=x, y=y, turn=turn)
