"""Answers people give to the exercises: right ones in several styles, wrong ones with what the message must name.

Each module of this folder ``bank_*`` belongs to a chapter and fills the two tables when it is imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

RIGHT: dict[str, list[Callable[..., Any]]] = defaultdict(list)
WRONG: dict[str, list[tuple[Callable[..., Any], str]]] = defaultdict(list)


def right(label: str) -> Callable[[Any], Any]:
    """File a right answer."""

    def file(answer: Any) -> Any:
        RIGHT[label].append(answer)
        return answer

    return file


def wrong(label: str, says: str) -> Callable[[Any], Any]:
    """File a wrong answer. says: a pattern of what the message must name."""

    def file(answer: Any) -> Any:
        WRONG[label].append((answer, says))
        return answer

    return file


def fill() -> None:
    """Import the banks of all chapters."""
    for path in sorted(Path(__file__).parent.glob("bank_*.py")):
        import_module(path.stem)
