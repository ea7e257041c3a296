"""The words of the book: a deny-list over code, comments, messages, chapters and pages, so that private terms do not come back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

SUFFIXES = (".py", ".json", ".yaml", ".md", ".ipynb")


@dataclass(frozen=True)
class DeniedWord:
    """A pattern that is not to be written, and the standard term for it."""

    deny: str
    pattern: re.Pattern[str]
    write: str


def read_vocabulary() -> dict:
    """The list that comes with this package."""
    return yaml.safe_load(resources.files("itm_lab.publish").joinpath("vocabulary.yaml").read_text(encoding="utf-8"))


def denied_words(root: Path) -> Iterator[str]:
    """One line for each denied word in the checked files: file, line number, what to write."""
    vocabulary = read_vocabulary()
    words = [
        DeniedWord(entry["deny"], re.compile(rf"(?<![\w-])(?:{entry['deny']})(?![\w-])", re.IGNORECASE), entry["write"])
        for entry in vocabulary["words"]
    ]
    for pattern in vocabulary["checked"]:
        for path in sorted(root.glob(pattern)):
            place = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and place not in vocabulary["skipped"] and "__pycache__" not in path.parts:
                excused = {
                    word for start, of in vocabulary["allowed"].items() if place.startswith(start) for word in of
                }
                counted = [word for word in words if word.deny not in excused]
                for where, text in _texts(path, place):
                    yield from _denied_in(text, where, counted)


def _texts(path: Path, place: str) -> Iterator[tuple[str, str]]:
    """What people wrote in a file: all of it, or the cells of a notebook, each with its number."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield place, text
        return
    for number, cell in enumerate(json.loads(text)["cells"]):
        yield f"{place}, cell {number}", "".join(cell["source"])


def _denied_in(text: str, place: str, words: list[DeniedWord]) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        # identifiers count by their parts: a private word in a name counts too
        plain = line.replace("_", " ")
        for word in words:
            if found := word.pattern.search(plain):
                yield f"{place}:{number}: “{found[0]}”: write {word.write}"
