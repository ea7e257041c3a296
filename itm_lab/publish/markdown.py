"""Pieces of Markdown that several pages share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
