"""Grade a course folder with nbgrader, whose in-kernel execution is replaced by :mod:`itm_lab.classroom.isolation`."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, v4

from itm_lab.classroom.isolation import Graded, Limits, grade_notebook
from itm_lab.notebook_io import read_notebook
from itm_utils.errors import input_error
from itm_utils.files import write_text

COLUMNS = ("student", "assignment", "exercise", "points", "of", "verdict", "seconds")
SALT = "salt"  # a file of the course folder: what draws the cases of hidden tests


def nbgrader_api(course: Path, extra: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """nbgrader on a course folder."""
    try:
        from nbgrader.apps import NbGraderAPI
        from traitlets.config import Config
    except ImportError:
        raise input_error(
            "itm classroom", "no nbgrader", "it", "Install it: pip install 'itm-utils[classroom]'."
        ) from None
    beside = str(Path(sys.executable).parent)  # nbgrader calls alembic by name
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ.get("PATH", "")
    settings = {
        "CourseDirectory": {"root": str(course.resolve()), "course_id": "itm"},
        "ClearSolutions": {"code_stub": {"python": "..."}},
        "NbGrader": {"logfile": str(course.resolve() / "nbgrader.log")},
        "Application": {"log_level": "CRITICAL"},
    }
    return NbGraderAPI(config=Config(settings | dict(extra or {})))


def apart(course: Path, limits: Limits) -> type:
    """The step of nbgrader that grades a notebook in a process of its own, instead of executing it."""
    from nbgrader.preprocessors import NbGraderPreprocessor

    salt = (course / SALT).read_text(encoding="utf-8")

    class GradeApart(NbGraderPreprocessor):
        """Put the verdict on every answer where the output of its hidden tests would stand."""

        def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
            where = resources["nbgrader"]
            source = course / "source" / where["assignment"] / f"{where['notebook']}.ipynb"
            submitted = course / "submitted" / where["student"] / where["assignment"]
            found = grade_notebook(nb, read_notebook(source), submitted, where["student"], salt, limits)
            for cell in nb.cells:
                label = cell.metadata.get("nbgrader", {}).get("grade_id", "").removesuffix("-check")
                if cell.cell_type == "code" and label in found and cell.metadata["nbgrader"]["grade"]:
                    cell.outputs = [output_of(found[label])]
            return nb, resources

    return GradeApart


def output_of(graded: Graded) -> NotebookNode:
    """A verdict as an output: an error is what nbgrader takes for no points."""
    words, seconds = str(graded.verdict), f"{graded.seconds:.1f} s"
    if graded.verdict.right:
        return v4.new_output("stream", name="stdout", text=f"{words}\n{seconds}\n")
    return v4.new_output("error", ename="AssertionError", evalue=words, traceback=[words, seconds])


def grade(course: Path, limits: Limits | None = None) -> Path:
    """Grade every submission of a course folder; returns the CSV of all verdicts."""
    if not (course / SALT).is_file() or not (course / "source").is_dir():
        raise input_error(course, "no course folder", "one made by `itm classroom make`")
    from nbgrader.preprocessors import AssignLatePenalties, CheckCellMetadata, LimitOutput, SaveAutoGrades

    steps = [apart(course, limits or Limits()), LimitOutput, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]
    api = nbgrader_api(course, {"Autograde": {"autograde_preprocessors": steps}})
    rows = []
    for folder in sorted(path for path in (course / "submitted").glob("*/*") if path.is_dir()):
        student, assignment = folder.parent.name, folder.name
        result = api.autograde(assignment, student, force=True, create=True)
        rows += (
            list(rows_of(course, student, assignment)) if result["success"] else [failed(student, assignment, result)]
        )
    target = course / "grades.csv"
    write_text(target, "".join(line + "\r\n" for line in table(rows)))
    return target


def failed(student: str, assignment: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a submission that nbgrader could not read."""
    said = re.findall(r"^\w*(?:Error|Exception)\b.*$", f"{result.get('error', '')}\n{result.get('log', '')}", re.M)
    words = said[-1] if said else "it could not be graded; see nbgrader.log"
    return {
        "student": student,
        "assignment": assignment,
        "exercise": "",
        "points": 0,
        "of": "",
        "verdict": words,
        "seconds": "",
    }


def rows_of(course: Path, student: str, assignment: str) -> Iterator[dict[str, Any]]:
    """A row for every graded cell of an autograded submission."""
    for path in sorted((course / "autograded" / student / assignment).glob("*.ipynb")):
        for cell in read_notebook(path).cells:
            marks = cell.metadata.get("nbgrader", {})
            if not marks.get("grade"):
                continue
            row = {
                "student": student,
                "assignment": assignment,
                "exercise": marks["grade_id"].removesuffix("-check"),
                "of": marks["points"],
            }
            if cell.cell_type != "code" or not cell.outputs:
                yield row | {"points": "", "verdict": "read by hand", "seconds": ""}
                continue
            output = cell.outputs[0]
            wrong = output.output_type == "error"
            words, seconds = output.traceback if wrong else output.text.strip().rsplit("\n", 1)
            yield row | {
                "points": 0 if wrong else marks["points"],
                "verdict": words,
                "seconds": seconds.removesuffix(" s"),
            }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Rows as CSV; a cell that a spreadsheet would compute is quoted by an apostrophe."""
    for row in ({name: name for name in COLUMNS}, *rows):
        line = StringIO()
        values = [str(row[name]) for name in COLUMNS]
        csv.writer(line, lineterminator="").writerow(["'" + v if v[:1] in ("=", "+", "-", "@") else v for v in values])
        yield line.getvalue()
