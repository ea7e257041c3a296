"""Captions with a word replaced by its twin: what they say, of whom it is true, and that nothing else changes."""

from __future__ import annotations

import re
from functools import cache

import pytest

from itm_lab.publish.twin_words import KINDS, WORD, Replaced, replacements, rewritten, twins_of
from itm_lab.scenes.captions import COLOUR_WORDS, NOUNS, NUMBER_WORDS, Caption
from itm_lab.scenes.families import Described, sample_split
from itm_lab.scenes.logic import is_true
from itm_lab.scenes.world import COLOURS, Knobs, Scene


@cache
def families() -> list[Described]:
    return sample_split(seed=11, split=0, size=120, knobs=Knobs())


@cache
def every() -> list[tuple[Described, Caption, Replaced]]:
    return [(one, caption, new) for one in families() for caption in one.captions for new in replacements(caption)]


def family(one: Described) -> list[Scene]:
    return [other.scene for other in families() if other.scene.family == one.scene.family]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_found_and_changes_as_many_words_as_it_should(kind: str) -> None:
    found = [(caption, new) for _, caption, new in every() if new.kind == kind]
    assert len(found) > 20
    for caption, new in found:
        before, after = (WORD.findall(text) for text in (caption.text, new.text))
        differing = [words for words in zip(before, after, strict=True) if words[0] != words[1]]
        differing = [words for words in differing if set(words) != {"a", "an"}]
        assert len(differing) == (2 if kind == "binding" else 1), new
        assert new.claim != caption.claim and new.said.split(" ")[0] in before
        if kind == "binding":
            assert sorted(set(before) - {"a", "an"}) == sorted(set(after) - {"a", "an"})


def test_articles_follow_the_word() -> None:
    for _, _, new in every():
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", new.text), new.text
    assert rewritten("a red fish and an orange cup", {("red", 2): "orange", ("orange", 18): "red"}) == (
        "an orange fish and a red cup"
    )


def test_the_claim_is_that_of_the_words() -> None:
    """A colour that a phrase names is the colour that it asks for, and so are its noun and its number."""
    of_word = {word: value for value in COLOURS for word in COLOUR_WORDS.get(value, (value,))}
    of_noun = {form: shape for shape, forms in NOUNS.items() for pair in forms for form in pair}
    of_number = {word: count for count, word in NUMBER_WORDS.items()}
    for _, _, new in every():
        words = WORD.findall(new.text)
        colours = [of_word[word] for word in words if word in of_word]
        assert colours == [ask.colour for ask in new.claim.asks if ask.colour], new
        nouns = [of_noun[word] for word in words if word in of_noun]
        assert nouns == [ask.shape for ask in new.claim.asks], new
        said = [of_number[word] for word in words if word in of_number]
        assert said == [ask.number for ask in new.claim.asks if ask.exact and ask.number > 1], new


def test_twins_are_false_of_their_image_and_those_that_fit_a_near_duplicate_come_first() -> None:
    fitting = 0
    for one in families():
        for caption in one.captions:
            twins = twins_of(caption, one.scene, family(one))
            assert [twin.kind for twin in twins] == [kind for kind in KINDS if kind in {t.kind for t in twins}]
            for twin in twins:
                assert is_true(caption.claim, one.scene) and not is_true(twin.claim, one.scene)
                same = [
                    new for new in replacements(caption) if new.kind == twin.kind and not is_true(new.claim, one.scene)
                ]
                possible = any(is_true(new.claim, other) for new in same for other in family(one))
                assert possible == any(is_true(twin.claim, other) for other in family(one))
                fitting += possible
    assert fitting > 30
