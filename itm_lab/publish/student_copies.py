"""Copies of the chapters for a class: exercises and their checks stay, solutions and answers go.

Plain ones, ones that nbgrader grades, and the instructor's, from which nbgrader makes the latter.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from nbformat import NotebookNode, v4

from itm_lab.notebook_io import clean, find_notebooks, is_chapter, read_notebook, refuse_chapters, write_notebook
from itm_lab.publish.exercise_cells import exercises_of, solved
from itm_lab.publish.plain_markdown import convert, read_citations
from itm_utils.errors import input_error

# A fenced {solution} block, or a folded admonition that gives answers away; the closing fence is the opening one.
GIVEN_AWAY = re.compile(
    r"^(`{3,}|:{3,})\{(?:solution\}|admonition\} Answers?\b|dropdown\} (?:Answers?|Solution)\b).*?^\1[ \t]*$\n?",
    re.DOTALL | re.MULTILINE,
)
UNFOLD = re.compile(r",? then unfold(?: the answers?| them| it)?(?=[.;:\n]|$)")  # where nothing is left to unfold
Kind = Literal["plain", "nbgrader", "instructor"]
STUDENT_CELL = """\
# Your id in the course: check cells then draw cases of your own.
import os

os.environ["ITM_STUDENT"] = \"\""""
ANSWER = "*Your answer:*"
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HIDDEN = """
### BEGIN HIDDEN TESTS
verdict = check("{label}", {name}, student="hidden")
assert verdict.right, verdict
### END HIDDEN TESTS"""


def without_solutions(notebook: NotebookNode, keep_outputs: bool = False) -> NotebookNode:
    """Drop everything between ``{solution-start}`` and ``{solution-end}``, fenced answers, and outputs."""
    kept, inside = [], False
    for cell in notebook.cells:
        inside = inside or "{solution-start}" in cell.source
        if not inside:
            if cell.cell_type == "markdown":
                left = GIVEN_AWAY.sub("", cell.source).strip()
                cell.source = UNFOLD.sub("", left) if left != cell.source else left
                if cell["id"] == "solution-reading":
                    cell["id"], cell.source = "answer-reading", ANSWER
            if cell.source:
                kept.append(cell)
        inside = inside and "{solution-end}" not in cell.source
    notebook.cells = kept
    return clean(notebook, keep_outputs=keep_outputs)


def with_nbgrader(notebook: NotebookNode, where: str) -> NotebookNode:
    """The instructor's copy: solutions in the stubs and hidden tests, marked as nbgrader wants it; answers to questions go."""
    for exercise in exercises_of(notebook, where):
        if exercise.stub is None or exercise.check is None:
            answer = GIVEN_AWAY.search(exercise.solution.source)
            text = re.sub(r"^[`:].*\n?", "", answer[0], flags=re.M) if answer else exercise.solution.source
            exercise.solution.update(v4.new_markdown_cell(text.strip(), id="answer-reading"))
            exercise.solution.metadata["nbgrader"] = marks(exercise.label, exercise.points, solution=True, grade=True)
            continue
        exercise.stub.source = solved(exercise, BEGIN, END)
        exercise.stub.metadata["nbgrader"] = marks(exercise.label, solution=True)
        exercise.check.source += HIDDEN.format(label=exercise.label, name=exercise.name)
        exercise.check.metadata["nbgrader"] = marks(f"{exercise.label}-check", exercise.points, grade=True)
    return without_solutions(notebook)


def marks(name: str, points: int | None = None, *, solution: bool = False, grade: bool = False) -> dict[str, Any]:
    """The metadata by which nbgrader knows a cell."""
    known = {
        "grade_id": name,
        "schema_version": 3,
        "solution": solution,
        "grade": grade,
        "locked": not solution,
        "task": False,
    }
    return known | ({"points": points} if points is not None else {})


def released(notebook: NotebookNode) -> NotebookNode:
    """What nbgrader hands out of an instructor's copy: no solutions, no hidden tests, cells locked."""
    try:
        from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions, ComputeChecksums, LockCells
    except ImportError:
        raise input_error(
            "--nbgrader", "no nbgrader", "it", "Install it: pip install 'itm-utils[classroom]'."
        ) from None
    resources: Any = {"nbgrader": {"notebook": "copy", "assignment": "", "student": "."}}
    for step in (LockCells(), ClearSolutions(code_stub={"python": "..."}), ClearHiddenTests(), ComputeChecksums()):
        notebook, _ = step.preprocess(notebook, resources)
    return notebook


class Images:
    """Where a copy finds images and other chapters; what it needs is written beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wanted: dict[str, Path] = {}

    def __call__(self, file: str) -> str:
        if file.startswith("notebooks/"):
            return Path(file).name
        if (self.root / file).is_file():
            self.wanted[Path(file).name] = self.root / file
            return f"files/{Path(file).name}"
        return file

    def write(self, folder: Path) -> None:
        for name, path in self.wanted.items():
            (folder / "files").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / "files" / name)


def copy_of(root: Path, path: Path, kind: Kind, images: Images) -> NotebookNode:
    """One chapter as a class gets it."""
    notebook = read_notebook(path)
    notebook = without_solutions(notebook) if kind == "plain" else with_nbgrader(notebook, path.name)
    convert(notebook, read_citations(root / "book/references.bib"), images)
    notebook.cells.insert(1, v4.new_code_cell(STUDENT_CELL, id="student"))
    return released(notebook) if kind == "nbgrader" else notebook


def student_copies(root: Path, folder: Path, kind: Kind = "plain", names: Iterable[str] = ()) -> list[Path]:
    """Write a copy of every chapter to ``folder``, never over a copy somebody has worked on."""
    refuse_chapters(root, folder)
    images = Images(root)
    chapters = filter(is_chapter, find_notebooks(root, names))
    copies = {folder / path.name: copy_of(root, path, kind, images) for path in chapters}
    for path, copy in copies.items():
        if path.exists() and read_notebook(path) != copy:
            raise input_error(path, "a notebook that was changed", "none, or an untouched copy", "Move it away first.")
    for path, copy in copies.items():
        write_notebook(path, copy)
    images.write(folder)
    return list(copies)
