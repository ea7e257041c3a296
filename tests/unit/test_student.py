"""Student copies: the exercises are there, the solutions are not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from tiny_book import tiny_book

from itm_lab.notebook_io import find_notebooks, is_chapter, read_notebook, write_notebook
from itm_lab.publish.notebook_lint import check_cell
from itm_lab.publish.student_copies import student_copies, without_solutions
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]


def test_gated_fenced_and_folded_solutions_are_removed() -> None:
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# Title"),
            new_markdown_cell("Why?\n\n```{admonition} Answers\n:class: dropdown\nBecause.\n```\n\nGo on."),
            new_markdown_cell("```{exercise}\n:label: ex\nDo it.\n```"),
            new_code_cell("def mine(): ..."),
            new_markdown_cell("````{solution-start} ex\n:class: dropdown\n````"),
            new_code_cell("def solved(): return 42"),
            new_markdown_cell("````{solution-end}\n````"),
            new_markdown_cell("```{solution} ex\nForty-two.\n```"),
            new_markdown_cell("The end."),
        ]
    )
    copy = without_solutions(notebook)
    text = "\n".join(cell.source for cell in copy.cells)
    for gone in ("42", "Because", "Forty-two", "solution"):
        assert gone not in text
    for kept in ("# Title", "Why?", "Go on.", "Do it.", "def mine", "The end."):
        assert kept in text


def test_neither_chapters_nor_work_are_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ItmError, match="the chapters themselves"):
        student_copies(ROOT, ROOT / "notebooks")
    first, *_ = student_copies(ROOT, tmp_path)
    student_copies(ROOT, tmp_path)  # untouched copies may be written again
    worked_on = read_notebook(first)
    worked_on.cells[-1].source += "\nmy answer"
    write_notebook(first, worked_on)
    with pytest.raises(ItmError, match="Move it away first"):
        student_copies(ROOT, tmp_path)
    assert "my answer" in first.read_text(encoding="utf-8")


def test_pages_are_not_handed_out(tmp_path: Path) -> None:
    chapter = tiny_book(tmp_path / "project")
    shutil.copy(chapter, chapter.with_name("clinic.ipynb"))
    assert len(find_notebooks(tmp_path / "project")) == 2
    assert student_copies(tmp_path / "project", tmp_path / "copies") == [tmp_path / "copies/01_tiny.ipynb"]


def test_copies_are_plain_markdown_with_their_drawings(tmp_path: Path) -> None:
    """No directive, role or label is left, every image lies beside the copies, nothing is to be unfolded."""
    for path in student_copies(ROOT, tmp_path):
        copy = read_notebook(path)
        prose = "\n\n".join(cell.source for cell in copy.cells if cell.cell_type == "markdown")
        prose = re.sub(r"^```\w*\n.*?^```|\$\$.*?\$\$|\$[^$\n]+\$|`[^`\n]+`", "", prose, flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"\{[\w:-]+\}|^:\w+:|^\([\w-]+\)=|^%|unfold", prose, re.MULTILINE), path.name
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            assert re.match(r"https?:|#", target) or (tmp_path / target).exists(), f"{path.name}: {target}"
        assert "ITM_STUDENT" in copy.cells[1].source


@pytest.mark.parametrize("path", list(filter(is_chapter, find_notebooks(ROOT))), ids=lambda path: path.stem)
def test_no_chapter_gives_its_solutions_away(path: Path) -> None:
    whole = read_notebook(path)
    exercises = sum("{exercise" in cell.source for cell in whole.cells)
    assert exercises >= 2
    assert sum("{solution" in cell.source for cell in whole.cells) >= exercises
    copy = without_solutions(whole)
    assert sum("{exercise" in cell.source for cell in copy.cells) == exercises
    for cell in copy.cells:
        assert "{solution" not in cell.source
        assert "olution(" not in cell.source, "a cell that stays calls a solution"
        assert not list(check_cell(cell))
