"""Pieces of Markdown that several pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def table(heads: list[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Lines of a Markdown table, with an empty line behind it; a bar inside a cell becomes a slash.

    Four lines instead of tabulate: it pads every column to its widest cell, and some cells hold paragraphs.
    """
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"
    yield ""


def escape(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_{}\[\]<>$#|~^])", r"\\\1", text)


def badge(word: str) -> str:
    """A verdict in its colour."""
    return f"[{word}]{{.verdict .verdict-{word.replace(' ', '-')}}}"


def joined(words: Sequence[str]) -> str:
    """Words in a row: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
