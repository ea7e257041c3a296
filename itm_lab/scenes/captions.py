"""Five captions a scene, from a small grammar, with the span and the toys of every noun phrase.

A phrase is true of exactly the toys it is grounded in: "a red fish" is said only where there is one red fish,
"two fish" where there are two of whatever colour. So boxes never depend on which fish was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from itm_lab.scenes.logic import Ask, Claim, holds, is_true
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.world import Knobs, Scene

NOUNS = {
    "ball": (("ball", "balls"), ("sphere", "spheres")),
    "cube": (("cube", "cubes"), ("block", "blocks")),
    "ring": (("ring", "rings"), ("hoop", "hoops")),
    "star": (("star", "stars"),),
    "heart": (("heart", "hearts"),),
    "moon": (("moon", "moons"), ("crescent", "crescents")),
    "flower": (("flower", "flowers"), ("blossom", "blossoms")),
    "house": (("house", "houses"), ("cottage", "cottages")),
    "fish": (("fish", "fish"),),
    "boat": (("boat", "boats"), ("ship", "ships")),
    "mushroom": (("mushroom", "mushrooms"), ("toadstool", "toadstools")),
    "cup": (("cup", "cups"), ("mug", "mugs")),
    None: (("toy", "toys"), ("thing", "things")),
}
COLOUR_WORDS = {"red": ("red", "red", "crimson"), "purple": ("purple", "purple", "violet")}
PATTERN_WORDS = {
    "plain": ("plain", "unpatterned"),
    "striped": ("striped", "stripy"),
    "spotted": ("spotted", "dotted"),
    "checked": ("checked", "checkered"),
}
PATTERN_TAILS = {"striped": "with stripes", "spotted": "with dots", "checked": "with a checked pattern"}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "big": ("big", "large")}
NUMBER_WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}
RELATION_WORDS = {
    "left": ("to the left of", "left of"),
    "right": ("to the right of", "right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
PLACE_WORDS = {
    "grass": ("on the grass", "in a meadow"),
    "sea": ("in the water", "at sea"),
    "night": ("at night", "in the dark"),
    "sand": ("on the sand", "on the beach"),
    "wall": ("in front of a wall", "by a brick wall"),
    "sky": ("in the sky", "among clouds"),
}
# These words are the dataset: change one, and its fingerprint and every number change.
OPENINGS = ("", "", "", "there {be} ", "here {be} ", "a picture of ", "we see ")
JOINS = (" and ", " and ", " with ", " beside ")  # none of them claims a position

CAPTIONS = 5
TRIES = 150


@dataclass(frozen=True)
class ScenePhrase:
    """A noun phrase: its text, its characters ``start:end`` in the caption, its toys, what it asks."""

    text: str
    start: int
    end: int
    toys: tuple[int, ...]
    ask: Ask


@dataclass(frozen=True)
class Caption:
    """A sentence, its noun phrases from left to right, and what it claims."""

    text: str
    phrases: tuple[ScenePhrase, ...]
    claim: Claim


def describe(rng: PortableRandom, scene: Scene, twins: Sequence[Scene], knobs: Knobs) -> tuple[Caption, ...] | None:
    """Five different captions, true of the scene and false of every twin; None if they are not found.

    The longer it takes, the more the captions say: most need a few tries, those with a subtle twin more.
    """
    captions: dict[str, Caption] = {}
    for attempt in range(TRIES):
        care = 100 * max(0, attempt - 10) // TRIES
        caption = sample_caption(rng, scene, knobs, care)
        if caption and caption.text not in captions and not any(is_true(caption.claim, twin) for twin in twins):
            captions[caption.text] = caption
        if len(captions) == CAPTIONS:
            return tuple(captions.values())
    return None


def sample_caption(rng: PortableRandom, scene: Scene, knobs: Knobs, care: int = 0) -> Caption | None:
    """One caption; ``care`` (percent) raises every chance of saying more.

    None if it did not work out: phrases that speak of the same toy, or too many words.
    """

    def says(percent: int) -> bool:
        return rng.chance(percent + (100 - percent) * care // 100)

    asks: list[Ask] = []
    groups: list[tuple[int, ...]] = []
    for _ in range(3 if says(knobs.third) else 2):
        ask, toys = _sample_ask(rng, scene, knobs, says)
        if not any(set(toys) & set(group) for group in groups):
            asks.append(ask)
            groups.append(toys)
    if len(asks) < 2:
        return None
    relation = _sample_relation(rng, scene, groups) if says(knobs.relation) else None
    place = scene.place if says(knobs.place) else None
    caption = _write(rng, Claim(tuple(asks), relation, place), groups)
    return caption if len(caption.text.split()) <= knobs.words else None


def _sample_ask(rng: PortableRandom, scene: Scene, knobs: Knobs, says) -> tuple[Ask, tuple[int, ...]]:
    """What to say of a random toy, and all the toys of which that is true."""
    toy = rng.pick(scene.toys)
    ask = Ask(
        shape=None if rng.chance(knobs.toy) else toy.shape,
        colour=toy.colour if says(knobs.colour) else None,
        pattern=toy.pattern if says(knobs.pattern if toy.pattern != "plain" else knobs.pattern // 4) else None,
        size=toy.size if toy.size != "medium" and says(knobs.size) else None,
    )
    toys = tuple(k for k, other in enumerate(scene.toys) if ask.matches(other))
    number = len(toys)
    if number == 1:
        exact = says(10)
    else:
        exact = not rng.chance(12)
        number = number if exact else 2
    return Ask(*ask.words, number=number, exact=exact), toys


def _sample_relation(rng: PortableRandom, scene: Scene, groups: list[tuple[int, ...]]) -> str | None:
    """A relation that holds between the first two groups, if there is one."""
    ours, theirs = ([scene.toys[k] for k in group] for group in groups[:2])
    true = [relation for relation in RELATION_WORDS if holds(relation, ours, theirs)]
    return rng.pick(true) if true else None


# -- words -----------------------------------------------------------------------------------------------------


def _write(rng: PortableRandom, claim: Claim, groups: list[tuple[int, ...]]) -> Caption:
    """The sentence, built from left to right so that every span is known."""
    texts = [noun_phrase(rng, ask, len(toys)) for ask, toys in zip(claim.asks, groups, strict=True)]
    place = rng.pick(PLACE_WORDS[claim.place]) if claim.place else ""
    place_first = bool(place) and rng.chance(30)
    be = "is" if len(groups[0]) == 1 else "are"
    text = f"{place}, " if place_first else ""
    if claim.relation is None:
        text += rng.pick(OPENINGS).format(be=be)
    phrases = []
    for k, (phrase, ask, toys) in enumerate(zip(texts, claim.asks, groups, strict=True)):
        if k == 1 and claim.relation is not None:
            verb = f" {be} " if rng.chance(40) else " "
            text += verb + rng.pick(RELATION_WORDS[claim.relation]) + " "
        elif k == 1:
            text += ", " if len(texts) == 3 else rng.pick(JOINS)
        elif k == 2:
            text += ", and " if claim.relation is not None else " and "
        phrases.append(ScenePhrase(phrase, len(text), len(text) + len(phrase), toys, ask))
        text += phrase
    if place and not place_first:
        text += f" {place}"
    return Caption(text, tuple(phrases), claim)


def noun_phrase(rng: PortableRandom, ask: Ask, count: int) -> str:
    """For example "two big striped red fish" or "a yellow mug with dots"."""
    noun = rng.pick(NOUNS[ask.shape])[count > 1]
    words, tail = [], ""
    if ask.size:
        words.append(rng.pick(SIZE_WORDS[ask.size]))
    if ask.pattern in PATTERN_TAILS and rng.chance(30):
        tail = f" {PATTERN_TAILS[ask.pattern]}"
    elif ask.pattern:
        words.append(rng.pick(PATTERN_WORDS[ask.pattern]))
    if ask.colour:
        words.append(rng.pick(COLOUR_WORDS.get(ask.colour, (ask.colour,))))
    words.append(noun)
    return f"{_quantity(ask, words[0])} {' '.join(words)}{tail}"


def _quantity(ask: Ask, next_word: str) -> str:
    if ask.number == 1:
        return "a single" if ask.exact else "an" if next_word[0] in "aeiou" else "a"
    return NUMBER_WORDS[ask.number] if ask.exact else "some"
