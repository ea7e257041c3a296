"""The exercises of a chapter's notebook: which cells belong to which, how hard they are, how long they take."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode

from itm_lab.teaching.checks import POINTS
from itm_utils.errors import input_error

CELL = re.compile(r"(?:exercise|solution)-(?P<number>\d+|reading)(?P<part>-\w+)?$")
HEAD = re.compile(
    r"^`{3,}\{exercise\} (?P<title>.+?) \((?P<level>\w+), (?P<minutes>\d+) minutes\)\n:label: (?P<label>[\w-]+)$", re.M
)
CALL = re.compile(r'check\("(?P<label>[\w-]+)", (?P<name>\w+)\)')
READING_POINTS = 2


@dataclass(frozen=True)
class ExerciseCells:
    """One exercise as it stands in a notebook; a reading task has no stub, check and code."""

    label: str
    title: str
    level: str
    minutes: int
    text: NotebookNode
    solution: NotebookNode
    stub: NotebookNode | None = None
    check: NotebookNode | None = None

    @property
    def points(self) -> int:
        return POINTS.get(self.level, READING_POINTS)

    @property
    def name(self) -> str:
        """What the answer is called."""
        assert self.check is not None
        return CALL.search(self.check.source)["name"]  # type: ignore[index]


def exercises_of(notebook: NotebookNode, where: str = "notebook") -> list[ExerciseCells]:
    """The exercises of a chapter that can be graded, in their order."""
    return list(_exercises(notebook, where))


def _exercises(notebook: NotebookNode, where: str) -> Iterator[ExerciseCells]:
    cells = {cell["id"]: cell for cell in notebook.cells}
    for cell in notebook.cells:
        found = CELL.match(cell["id"])
        if not found or not cell["id"].startswith("exercise") or found["part"]:
            continue
        head, number = HEAD.search(cell.source), found["number"]
        check = cells.get(f"exercise-{number}-check")
        if not head and (check is None or not CALL.search(check.source)):
            continue  # an exercise with a check of its own, which prints: nothing grades it
        if not head:
            expected = "`{exercise} Title (easy, 10 minutes)` and a label"
            raise input_error(where, f"an exercise without level and time in cell {cell['id']}", expected)
        solution = cells.get(f"solution-{number}")
        stub = cells.get(f"exercise-{number}-start")
        if solution is None or (number != "reading" and (stub is None or check is None)):
            raise input_error(where, f"exercise-{number} without stub, check or solution", "all three")
        level, minutes = head["level"], int(head["minutes"])
        yield ExerciseCells(head["label"], head["title"], level, minutes, cell, solution, stub, check)


def solved(exercise: ExerciseCells, begin: str, end: str) -> str:
    """The stub with the solution between two marks, under the stub's name."""
    assert exercise.stub is not None
    stub, solution = exercise.stub.source, exercise.solution.source
    head, body = definition(stub), definition(solution)
    lines = solution.splitlines()[body.body[0].lineno - 1 : body.end_lineno]
    renamed = re.sub(rf"\b{re.escape(body.name)}\b", head.name, "\n".join(lines))
    extra = [ast.unparse(node) for node in ast.parse(solution).body if isinstance(node, ast.Import | ast.ImportFrom)]
    kept = stub.splitlines()[: head.body[0].end_lineno]
    return "\n".join([*extra, *kept, f"    {begin}", renamed, f"    {end}"])


def definition(source: str) -> ast.FunctionDef | ast.ClassDef:
    """The function or class that a cell defines first."""
    return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
