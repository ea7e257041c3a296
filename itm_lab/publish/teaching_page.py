"""How long every chapter takes in a course, from its length, and what exercises it sets: tables of the page on teaching."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from itm_lab.notebook_io import find_notebooks, is_chapter, read_notebook, tags
from itm_lab.publish.exercise_cells import ExerciseCells, exercises_of

WORDS_A_MINUTE = 150  # read to be understood, formulas included
LINES_A_MINUTE = 4  # of code
HIDDEN = {"hide-cell", "hide-input", "remove-cell", "remove-input"}


@dataclass(frozen=True)
class Length:
    """What a chapter asks of a reader."""

    words: int
    lines: int
    exercises: tuple[ExerciseCells, ...]

    @property
    def reading(self) -> int:
        """Minutes to read text and code, to the next five."""
        return 5 * math.ceil((self.words / WORDS_A_MINUTE + self.lines / LINES_A_MINUTE) / 5)

    @property
    def practice(self) -> int:
        """Minutes of all exercises."""
        return sum(exercise.minutes for exercise in self.exercises)


def length_of(notebook: NotebookNode) -> Length:
    """Words of prose and lines of visible code before the exercises, and the exercises."""
    words = lines = 0
    for cell in notebook.cells:
        if re.match(r"(exercise|solution)", cell.get("id", "")):
            continue
        if cell.cell_type == "markdown":
            words += len(re.findall(r"[\w'’-]+", re.sub(r"\$[^$]+\$|^:\w.*$", " x ", cell.source, flags=re.M)))
        elif cell.cell_type == "code" and not HIDDEN & set(tags(cell)):
            lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    return Length(words, lines, tuple(exercises_of(notebook)))


def fragment(root: Path) -> Iterator[str]:
    """The table of times, a row a chapter."""
    yield "| chapter | words | lines of code | reading, minutes | exercises, minutes | easy / solid / hard |"
    yield "|---|---|---|---|---|---|"
    for path in filter(is_chapter, find_notebooks(root)):
        found = length_of(read_notebook(path))
        levels = " / ".join(str(sum(e.level == level for e in found.exercises)) for level in ("easy", "solid", "hard"))
        practice = (str(found.practice), levels) if found.exercises else ("", "")
        row = (f"{{doc}}`/notebooks/{path.stem}`", f"{found.words:,}", str(found.lines), str(found.reading), *practice)
        yield f"| {' | '.join(row)} |"
