"""What there is in Scenes: toys with a shape, a colour, a pattern and a size, in a place.

A scene is a list of integers and words, nothing else: the same scene gives the same image, captions and
boxes everywhere. Toys that agree in all four attributes form a group ("two big striped red fish").
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from itm_lab.scenes.portable_random import PortableRandom

CANVAS = 96  # pixels, width and height
UNIT = 4  # positions and radii are kept in quarter pixels, so that they stay integers

SHAPES = (
    "ball",
    "cube",
    "ring",
    "star",
    "heart",
    "moon",
    "flower",
    "house",
    "fish",
    "boat",
    "mushroom",
    "cup",
)
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
PATTERNS = ("plain", "striped", "spotted", "checked")
SIZES = ("small", "medium", "big")
PLACES = ("grass", "sea", "night", "sand", "wall", "sky")
ATTRIBUTES = {"shape": SHAPES, "colour": COLOURS, "pattern": PATTERNS, "size": SIZES}

# Radii in quarter pixels. The gaps between the classes keep "big" and "small" a matter of seeing, not of chance.
RADII = {"small": (25, 30), "medium": (39, 45), "big": (57, 66)}
# How often each kind of edit is tried; some are possible less often than others.
EDIT_KINDS = {"colour": 18, "pattern": 12, "size": 16, "shape": 12, "binding": 24, "count": 14, "swap": 10}
TURNS = (-18, 18)  # degrees: a house may lean, but it stays a house


@dataclass(frozen=True)
class Toy:
    """One object. ``x, y, radius`` in quarter pixels, ``turn`` in degrees, ``tint`` added to its RGB colour."""

    shape: str
    colour: str
    pattern: str
    size: str
    x: int = 0
    y: int = 0
    radius: int = 0
    turn: int = 0
    flip: bool = False
    tint: tuple[int, int, int] = (0, 0, 0)

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """What a caption can say of it."""
        return self.shape, self.colour, self.pattern, self.size


@dataclass(frozen=True)
class Scene:
    """An image before it is drawn. Later toys lie in front of earlier ones.

    light: percent of brightness and of the red and blue channels. look: seed of textures and noise.
    family: number of its family in the split. role: base, retake, alone, or the name of an edit.
    """

    toys: tuple[Toy, ...]
    place: str
    light: tuple[int, int, int] = (100, 100, 100)
    look: int = 0
    family: int = 0
    role: str = "alone"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``<split>_scenes.json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Scene:
        """The scene again."""
        toys = tuple(Toy(**{**toy, "tint": tuple(toy["tint"])}) for toy in record["toys"])
        return cls(**{**record, "toys": toys, "light": tuple(record["light"])})


@dataclass(frozen=True)
class Knobs:
    """How hard the world is. The defaults are the book's; ``little-world.md`` shows what each one does.

    Percentages unless said otherwise. Changing a knob changes the dataset's fingerprint.
    """

    family: int = 70  # base scenes that get a family
    edits: int = 2  # near-duplicates of a family: one attribute, binding, place or count changed
    retakes: int = 2  # other images of the base scene's toys: most of its captions are true of them too
    echo: int = 55  # a new group shares its shape or colour with an earlier one
    colour: int = 55  # captions that mention it, a phrase
    pattern: int = 25
    size: int = 25
    toy: int = 4  # "toy" instead of the noun
    relation: int = 20
    place: int = 10
    words: int = 16  # longest caption (a number)
    third: int = 30  # captions with three phrases instead of two
    regions: int = 24  # proposals an image (a number)
    missed: int = 6  # toys without a tight proposal
    doubles: int = 20  # toys with a second, looser proposal


def sample_scene(rng: PortableRandom, knobs: Knobs) -> Scene:
    """A fresh scene of three to seven toys in two to four groups."""
    toys: list[Toy] = []
    groups: list[Toy] = []
    while len(toys) < 3 or len(groups) < 2 or (len(groups) < 4 and len(toys) < 6 and rng.chance(60)):
        group = sample_group(rng, groups, knobs)
        count = min(rng.weighted({1: 55, 2: 30, 3: 15}), 7 - len(toys))
        groups.append(group)
        toys += [group] * count
    return arrange(rng, Scene(tuple(toys), rng.pick(PLACES)))


def sample_group(rng: PortableRandom, groups: list[Toy], knobs: Knobs) -> Toy:
    """A kind of toy that is not there yet; often it echoes the shape or colour of one that is."""
    while True:
        toy = Toy(*(rng.pick(values) for values in ATTRIBUTES.values()))
        if rng.chance(40):
            toy = replace(toy, pattern="plain")
        if groups and rng.chance(knobs.echo):
            attribute = rng.pick(("shape", "colour"))
            toy = replace(toy, **{attribute: getattr(rng.pick(groups), attribute)})
        if toy.kind not in {other.kind for other in groups}:
            return toy


def arrange(rng: PortableRandom, scene: Scene) -> Scene:
    """The same toys at new positions, in new light: a fresh photograph of them."""
    toys = [_pose(rng, toy) for toy in rng.shuffled(scene.toys)]
    while True:
        placed = _place_all(rng, toys)
        if placed:
            return relight(rng, replace(scene, toys=tuple(placed)))


def relight(rng: PortableRandom, scene: Scene) -> Scene:
    """New light, texture, noise and tints; nothing that a caption speaks of."""
    light = (rng.between(82, 112), rng.between(91, 109), rng.between(91, 109))
    toys = tuple(replace(toy, tint=_tint(rng)) for toy in scene.toys)
    return replace(scene, toys=toys, light=light, look=rng.below(2**31))


def fits(toys: tuple[Toy, ...] | list[Toy]) -> bool:
    """Whether every toy lies on the canvas and none hides more than a rim of another."""
    inside = all(_inside(toy) for toy in toys)
    return inside and all(_apart(a, b) for k, a in enumerate(toys) for b in toys[:k])


def resize(rng: PortableRandom, toy: Toy) -> Toy:
    """A radius drawn anew for the toy's size class."""
    return replace(toy, radius=rng.between(*RADII[toy.size]))


def _pose(rng: PortableRandom, toy: Toy) -> Toy:
    return replace(resize(rng, toy), turn=rng.between(*TURNS), flip=rng.chance(50))


def _tint(rng: PortableRandom) -> tuple[int, int, int]:
    return (rng.between(-22, 22), rng.between(-22, 22), rng.between(-22, 22))


def _place_all(rng: PortableRandom, toys: list[Toy]) -> list[Toy] | None:
    """Drop the toys one after the other; None when one finds no room in 60 tries."""
    placed: list[Toy] = []
    for toy in toys:
        low, high = toy.radius, CANVAS * UNIT - toy.radius
        for _ in range(60):
            tried = replace(toy, x=rng.between(low, high), y=rng.between(low, high))
            if all(_apart(tried, other) for other in placed):
                placed.append(tried)
                break
        else:
            return None
    return placed


def _inside(toy: Toy) -> bool:
    low, high = toy.radius * 3 // 4, CANVAS * UNIT - toy.radius * 3 // 4
    return low <= toy.x <= high and low <= toy.y <= high


def _apart(a: Toy, b: Toy) -> bool:
    """Centres at least 74 % of the radii's sum apart: neighbours overlap by a rim."""
    reach = 74 * (a.radius + b.radius)
    return 10_000 * ((a.x - b.x) ** 2 + (a.y - b.y) ** 2) >= reach * reach
