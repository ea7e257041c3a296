"""Captions of Scenes with a word replaced by its twin, so that they are false of their image and, often, true of a near-duplicate.

Four kinds, as the families of Scenes have them: a binding (two phrases exchange a word), a position, an attribute, a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from itm_lab.scenes.captions import COLOUR_WORDS, NOUNS, NUMBER_WORDS, PATTERN_WORDS, SIZE_WORDS, Caption, ScenePhrase
from itm_lab.scenes.logic import Claim, is_true
from itm_lab.scenes.world import ATTRIBUTES, Scene

WORD = re.compile(r"[A-Za-z]+")
KINDS = ("binding", "position", "attribute", "number")
OPPOSITE_WORDS = {"left": "right", "above": "below", "over": "under"}
OPPOSITE_WORDS |= {other: word for word, other in OPPOSITE_WORDS.items()}
OPPOSITES = {"left": "right", "right": "left", "above": "below", "below": "above"}


@dataclass(frozen=True)
class Replaced:
    """A caption with a word, or two, replaced. said: what became what. claim: what it claims now."""

    kind: str
    said: str
    text: str
    claim: Claim


def twins_of(caption: Caption, scene: Scene, family: list[Scene]) -> list[Replaced]:
    """One replacement of each kind that makes the caption false of its scene; one that is true of a twin comes first."""
    found = [one for one in replacements(caption) if not is_true(one.claim, scene)]
    found.sort(key=lambda one: not any(is_true(one.claim, other) for other in family))
    first = {kind: next((one for one in found if one.kind == kind), None) for kind in KINDS}
    return [one for one in first.values() if one is not None]


def replacements(caption: Caption) -> Iterator[Replaced]:
    """Every replacement of the four kinds."""
    yield from bindings(caption)
    yield from positions(caption)
    for number, phrase in enumerate(caption.phrases):
        for attribute, word in attribute_words(phrase).items():
            for value in ATTRIBUTES[attribute]:
                if value not in (getattr(phrase.ask, attribute), "medium"):
                    new = word_for(attribute, value, phrase)
                    asks = changed(caption.claim, {number: {attribute: value}})
                    yield Replaced("attribute", f"{word[0]} → {new}", rewritten(caption.text, {word: new}), asks)
        yield from numbers(caption, number, phrase)


def bindings(caption: Caption) -> Iterator[Replaced]:
    """Two phrases exchange a colour, a pattern or a size."""
    for b, second in enumerate(caption.phrases):
        for a, first in enumerate(caption.phrases[:b]):
            ours, theirs = attribute_words(first), attribute_words(second)
            for attribute in sorted((ours.keys() & theirs.keys()) - {"shape"}):
                mine, other = ours[attribute], theirs[attribute]
                values = getattr(first.ask, attribute), getattr(second.ask, attribute)
                if values[0] == values[1]:
                    continue
                claim = changed(caption.claim, {a: {attribute: values[1]}, b: {attribute: values[0]}})
                text = rewritten(caption.text, {mine: other[0], other: mine[0]})
                yield Replaced("binding", f"{mine[0]} ↔ {other[0]}", text, claim)


def positions(caption: Caption) -> Iterator[Replaced]:
    """The relation turned round."""
    if caption.claim.relation is None:
        return
    first, second = caption.phrases[:2]
    for word in WORD.finditer(caption.text, first.end, second.start):
        if (new := OPPOSITE_WORDS.get(word[0])) is not None:
            claim = replace(caption.claim, relation=OPPOSITES[caption.claim.relation])
            yield Replaced(
                "position", f"{word[0]} → {new}", rewritten(caption.text, {(word[0], word.start()): new}), claim
            )


def numbers(caption: Caption, number: int, phrase: ScenePhrase) -> Iterator[Replaced]:
    """One more or one less, where the phrase says how many and stays in the plural."""
    word = WORD.search(caption.text, phrase.start, phrase.end)
    if word is None or word[0] != NUMBER_WORDS.get(phrase.ask.number) or not phrase.ask.exact:
        return
    for count in (phrase.ask.number + 1, phrase.ask.number - 1):
        if count in NUMBER_WORDS:
            new, claim = NUMBER_WORDS[count], changed(caption.claim, {number: {"number": count}})
            yield Replaced(
                "number", f"{word[0]} → {new}", rewritten(caption.text, {(word[0], word.start()): new}), claim
            )


def attribute_words(phrase: ScenePhrase) -> dict[str, tuple[str, int]]:
    """Attribute → the word of a phrase that names it, and where in the caption it stands."""
    found = {}
    for word in WORD.finditer(phrase.text):
        for attribute in ATTRIBUTES:
            value = getattr(phrase.ask, attribute)
            if value is not None and word[0] in surfaces(attribute, value):
                found[attribute] = word[0], phrase.start + word.start()
    return found


def surfaces(attribute: str, value: str) -> tuple[str, ...]:
    """The words for a value of an attribute."""
    if attribute == "shape":
        return tuple(form for forms in NOUNS[value] for form in forms)
    tables = {"colour": COLOUR_WORDS, "pattern": PATTERN_WORDS, "size": SIZE_WORDS}
    return tables[attribute].get(value, (value,))


def word_for(attribute: str, value: str, phrase: ScenePhrase) -> str:
    """The first word for a value, in the number of the phrase."""
    return NOUNS[value][0][len(phrase.toys) > 1] if attribute == "shape" else surfaces(attribute, value)[0]


def changed(claim: Claim, changes: dict[int, dict[str, object]]) -> Claim:
    """The claim with other values in some of its phrases."""
    asks = tuple(replace(ask, **changes.get(number, {})) for number, ask in enumerate(claim.asks))  # pyright: ignore[reportArgumentType]
    return replace(claim, asks=asks)


def rewritten(text: str, words: dict[tuple[str, int], str]) -> str:
    """The text with words replaced at their places; "a" and "an" follow."""
    for (old, start), new in sorted(words.items(), key=lambda item: -item[0][1]):  # from the end: places stay
        before, after = text[:start], text[start + len(old) :]
        article = re.search(r"\b(a|an) $", before)
        if article:
            before = before[: article.start()] + ("an " if new[0] in "aeiou" else "a ")
        text = before + new + after
    return text
