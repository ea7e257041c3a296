"""Damaged inputs, as Hypothesis draws them: other bytes, other values in a tree of JSON or YAML, odd command lines.

A seed decides every draw, and what fails is made as small as it can be before it is shown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import click
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

ODD_TEXT = ["1e999", "-1", "null", "NaN", "\x00", "\x1b[31m", "{}", "\udce9", "\u202e", "../..", "/dev/null", "%s", ""]
ODD_BYTES = [text.encode("utf-8", "surrogateescape") for text in ODD_TEXT if text]
LONGEST = 64  # bytes that are struck at once
DEEP = 100_000  # brackets: no parser's stack holds so many


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_of(content: bytes) -> dict[str, SearchStrategy[bytes]]:
    """Kind of damage → what a file with this content may become."""
    last = max(0, len(content) - 1)
    here, length = st.integers(0, last), st.integers(1, LONGEST)

    def flipped(place: int, bit: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :] if content else b"\x01"

    return {
        "cut": here.map(lambda a: content[:a]),
        "empty": st.just(b""),
        "one bit": st.builds(flipped, here, st.integers(0, 7)),
        "replaced": st.builds(lambda a, new: content[:a] + new + content[a + len(new) :], here, st.binary(min_size=1, max_size=LONGEST)),
        "repeated": st.builds(lambda a, n, times: content[:a] + content[a : a + n] * times + content[a + n :], here, length, st.integers(2, 50)),
        "removed": st.builds(lambda a, n: content[:a] + content[a + n :], here, length),
        "inserted": st.builds(lambda a, new: content[:a] + new + content[a:], here, st.sampled_from(ODD_BYTES)),
        "foreign": st.binary(max_size=200),
        "UTF-16": st.just(content.decode("latin-1").encode("utf-16")),
        "nested": st.sampled_from([b"[", b"{", b'{"a":', b"<a>", b"- "]).map(lambda bracket: bracket * DEEP),
    }  # fmt: skip


# -- trees of values --------------------------------------------------------------------------------------------------

Place = tuple[Any, ...]  # keys and indices that lead to a value

ODD_VALUES: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([10**9, -(10**9), 2**63, 10**400]),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.5, 1e308]),
    st.sampled_from(ODD_TEXT),
    st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
    st.just([[[[{}]]]]),
)


def places(tree: Any, above: Place = ()) -> Iterator[Place]:
    """Where the values of a tree stand, its root first."""
    yield above
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield from places(value, (*above, key))


def values_of(tree: Any) -> dict[str, SearchStrategy[Any]]:
    """Kind of damage → what a tree of JSON or YAML may become."""
    known = list(places(tree))
    inside = st.sampled_from([place for place in known if place] or [()])
    return {
        "another value": st.builds(lambda place, value: changed(tree, place, value), st.sampled_from(known), ODD_VALUES),
        "no value": inside.map(lambda place: removed(tree, place)),
        "exchanged values": st.builds(lambda a, b: changed(tree, a, at(tree, b)), inside, inside),
        "one value more": st.builds(lambda place, value: grown(tree, place, value), st.sampled_from(known), ODD_VALUES),
    }  # fmt: skip


def at(tree: Any, place: Place) -> Any:
    """The value at a place, a copy."""
    for key in place:
        tree = tree[key]
    return copy.deepcopy(tree)


def changed(tree: Any, place: Place, value: Any) -> Any:
    """A tree with another value at a place."""
    if not place:
        return value
    tree = copy.deepcopy(tree)
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return tree


def removed(tree: Any, place: Place) -> Any:
    """A tree without the value at a place."""
    if not place:
        return None
    tree = copy.deepcopy(tree)
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    del holder[place[-1]]
    return tree


def grown(tree: Any, place: Place, value: Any) -> Any:
    """A tree with a value more in the list or mapping at a place; in place of another value a list of both."""
    found = at(tree, place)
    if isinstance(found, dict):
        return changed(tree, place, found | {"odd": value})
    return changed(tree, place, [*found, value] if isinstance(found, list) else [found, value])


# -- command lines ----------------------------------------------------------------------------------------------------

ODD_WORDS = ["", " ", "-1", "0", "3", "1e999", "nan", "a,b", "a=b", "x=1,2", "=", "--", "-", "\x1b[31mred", "\udce9", "ü",
             "../..", "/dev/null", "/proc/self/mem", "no/such/place", "%s%n", "{x}", "[", "9" * 400, "a" * 5000, "a\nb"]  # fmt: skip


def command_lines(command: click.Command, known: dict[str, Sequence[str]]) -> SearchStrategy[list[str]]:
    """Words after the name of a command. known: name of a parameter → words that fit it, or do not; else odd ones."""
    parts = [words_for(parameter, known) for parameter in command.params if parameter.name != "help"]
    return st.tuples(*parts).map(lambda drawn: [word for part in drawn for word in part])


def words_for(parameter: click.Parameter, known: dict[str, Sequence[str]]) -> SearchStrategy[list[str]]:
    """What one option or argument contributes: nothing, a word that fits, or an odd one."""
    fits = list(known.get(parameter.name or "", ()))
    # Mostly what fits: where each of ten parameters were odd, no line would come past the first.
    word = st.one_of(*([st.sampled_from(fits)] * 4 if fits else []), st.sampled_from(ODD_WORDS))
    if parameter.param_type_name == "argument":
        few = 0 if not parameter.required else 1
        return st.lists(word, min_size=few, max_size=2 if parameter.nargs == -1 else 1)
    if getattr(parameter, "is_flag", False):
        names = [*parameter.opts, *parameter.secondary_opts]
        return st.one_of(st.just([]), st.sampled_from(names).map(lambda name: [name]))
    given = word.map(lambda value: [parameter.opts[0], value])
    return given if parameter.required else st.one_of(st.just([]), given)
