"""A course folder from chapters to grades: right, wrong, blank and malicious submissions, each told what became of it."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from nbformat import NotebookNode

from itm_lab.classroom import course as course_module
from itm_lab.classroom.grading import grade
from itm_lab.classroom.isolation import Limits, container
from itm_lab.classroom.questions import questions_of, write_questions
from itm_lab.classroom.slides import write_slides
from itm_lab.notebook_io import find_notebooks, is_chapter, read_notebook, write_notebook
from itm_lab.publish.build import stage
from itm_lab.publish.exercise_cells import exercises_of
from itm_lab.publish.student_copies import BEGIN, student_copies
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "03_bfan"
ANSWERS = {
    "right": {
        "refocus": "kept = weights * keep\n    return kept / kept.sum(dim=1, keepdim=True).clamp_min(1e-12)",
        "threshold_by_weight": "return weights.square().sum(dim=1, keepdim=True)",
        "keep_with_padding": "real = mask[..., None]\n    mean = weights.sum(1, keepdim=True) / real.sum(1, keepdim=True)\n"
        "    return (weights >= (1 - TIE_TOLERANCE) * mean) & real",
    },
    "wrong": {
        "refocus": "return weights * keep",
        "threshold_by_weight": "return weights.mean(dim=1, keepdim=True)",
        "keep_with_padding": "return weights >=",
    },
    "blank": {},
    "malicious": {
        "refocus": "while True:\n        pass",
        "threshold_by_weight": "import os, glob\n    [os.remove(f) for f in glob.glob('*.ipynb')]\n    return weights",
        "keep_with_padding": "import torch, itm_lab.teaching.checks as c\n    c.difference = c.judge = lambda *a: ''\n"
        "    torch.allclose = lambda *a, **k: True\n    return bytearray(2**40)",
    },
}


def fill(notebook: NotebookNode, answers: dict[str, str]) -> NotebookNode:
    """Write answers into a released copy, as a student does."""
    for cell in notebook.cells:
        for name, body in answers.items():
            if cell.cell_type == "code" and cell.source.startswith(f"def {name}("):
                head = cell.source.split("\n    ...")[0]
                cell.source = f"{head}\n    {body}"
    return notebook


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("class") / "course"
    return course_module.make_course(ROOT, folder, [CHAPTER], with_data=False)


@pytest.mark.slow
def test_from_chapter_to_grades(course: Path) -> None:
    released = course / "release" / CHAPTER / f"{CHAPTER}.ipynb"
    text = released.read_text(encoding="utf-8")
    assert "HIDDEN TESTS" not in text
    assert "clamp_min(1e-12)" not in text
    for student, answers in ANSWERS.items():
        place = course / "submitted" / student / CHAPTER
        shutil.copytree(released.parent, place)
        write_notebook(place / released.name, fill(read_notebook(released), answers))
    handed_in = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    rows = list(csv.DictReader(grade(course, Limits(seconds=5, megabytes=512)).open(encoding="utf-8")))
    points = {(row["student"], row["exercise"]): (row["points"], row["verdict"]) for row in rows}
    labels = ("ex-bfan-refocus", "ex-bfan-bar", "ex-bfan-padding")
    assert [points["right", label][0] for label in labels] == ["1", "2", "3"]
    for student in ("wrong", "blank", "malicious"):
        assert [points[student, label][0] for label in labels] == ["0", "0", "0"], student
    assert points["right", "ex-bfan-reading"] == ("", "read by hand")
    assert [points["blank", label][1].split(" (")[0] for label in labels] == ["nothing returned yet"] * 3
    assert "sum to one again" in points["wrong", labels[0]][1]
    assert "threshold of equal" in points["wrong", labels[1]][1]
    assert "SyntaxError" in points["wrong", labels[2]][1]
    assert "loop without an end" in points["malicious", labels[0]][1]
    assert f"it deleted {CHAPTER}.ipynb" in points["malicious", labels[1]][1]
    assert "Memory" in points["malicious", labels[2]][1]
    assert handed_in.items() <= {path: path.read_bytes() for path in course.rglob("*.ipynb")}.items(), (
        "no file of ours was touched"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not container("/tmp"), reason="bubblewrap is not installed, or this system lets it make no container"
)
def test_a_container_keeps_files_with_a_full_path(course: Path, tmp_path: Path) -> None:
    keep = tmp_path / "keep.txt"
    keep.write_text("mine")
    released = course / "release" / CHAPTER / f"{CHAPTER}.ipynb"
    place = course / "submitted" / "outside" / CHAPTER
    shutil.copytree(released.parent, place)
    body = f"import os\n    os.remove({str(keep)!r})\n    return weights"
    write_notebook(place / released.name, fill(read_notebook(released), {"refocus": body}))
    grade(course, Limits(seconds=5, megabytes=512))
    assert keep.read_text() == "mine"


def test_a_course_folder_holds_what_a_class_needs(course: Path) -> None:
    source = read_notebook(course / "source" / CHAPTER / f"{CHAPTER}.ipynb")
    assert any(BEGIN in cell.source for cell in source.cells)
    assert list((course / "source" / CHAPTER / "files").iterdir())
    wheels = (course / "wheels.txt").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("torch==") and "+" not in line for line in wheels)
    assert not any(line.startswith("itm-utils") for line in wheels)
    html = (course / "slides" / f"{CHAPTER}.html").read_text(encoding="utf-8")
    assert html.count("<section") > 8
    assert 'src="http' not in html
    assert 'href="http' not in html.split("</head>")[0]
    fonts = "reveal/output/chtml/fonts/woff-v2/MathJax_Main-Regular.woff"
    for file in ("reveal/dist/reveal.js", "reveal/dist/reveal.css", "reveal/tex-chtml-full.js", fonts):
        assert (course / "slides" / file).is_file()
    with pytest.raises(ItmError, match="not empty"):
        course_module.make_course(ROOT, course, [CHAPTER])
    with pytest.raises(ItmError, match="no course folder"):
        grade(course / "source")


def test_questions_become_two_sheets(tmp_path: Path) -> None:
    write_questions(ROOT, tmp_path)
    for path in filter(is_chapter, find_notebooks(ROOT)):
        found = questions_of(read_notebook(path), path.name)
        if not found:
            continue
        sheet, answers = (tmp_path / f"{path.stem}{end}.md" for end in ("", "_answers"))
        assert sheet.read_text(encoding="utf-8").count("\n\n") >= len(found)
        first = found[0][1].split(".")[0].split("$")[0].split("{")[0][:40]
        assert first in answers.read_text(encoding="utf-8")
        assert first not in sheet.read_text(encoding="utf-8")


def test_copies_for_nbgrader(tmp_path: Path) -> None:
    student_copies(ROOT, tmp_path / "nbgrader", "nbgrader", [CHAPTER])
    student_copies(ROOT, tmp_path / "instructor", "instructor")  # of all chapters, also those that nothing grades yet
    ours = read_notebook(tmp_path / "nbgrader" / f"{CHAPTER}.ipynb")
    exercises = exercises_of(read_notebook(ROOT / "notebooks" / f"{CHAPTER}.ipynb"))
    graded = [cell.metadata.nbgrader for cell in ours.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    assert sum(marks.points for marks in graded) == sum(exercise.points for exercise in exercises)
    assert all(marks.get("checksum") for marks in graded)
    text = json.dumps(ours)
    assert "HIDDEN TESTS" not in text
    assert BEGIN not in text
    instructor = json.dumps(read_notebook(tmp_path / "instructor" / f"{CHAPTER}.ipynb"))
    assert "HIDDEN TESTS" in instructor
    assert BEGIN in instructor


def test_slides_follow_the_metadata_of_cells(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "book/_static/vendor", tmp_path / "book/_static/vendor")
    notebook = read_notebook(ROOT / "notebooks" / f"{CHAPTER}.ipynb")
    notebook.cells[0].metadata["slideshow"] = {"slide_type": "slide"}
    write_notebook(tmp_path / "notebooks/03_bfan.ipynb", notebook)
    html = write_slides(tmp_path, tmp_path / "notebooks/03_bfan.ipynb", tmp_path / "out").read_text(encoding="utf-8")
    assert html.count("<section") == 2  # one slide in one column


def test_a_book_without_solutions_until_a_day(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("book", "notebooks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("img", "vendor", "data", "api"))
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, project / name)
    stage(project, executed=False, closed=True)
    closed = (project / "_build/stage/notebooks" / f"{CHAPTER}.ipynb").read_text(encoding="utf-8")
    assert "{solution" not in closed
    assert "image/png" in closed
    stage(project, executed=False)
    assert "{solution" in (project / "_build/stage/notebooks" / f"{CHAPTER}.ipynb").read_text(encoding="utf-8")
