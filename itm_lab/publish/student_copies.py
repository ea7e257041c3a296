"""Copies of the chapters for a class: exercises and their checks stay, solutions and answers go."""

from __future__ import annotations

import re
from pathlib import Path

from nbformat import NotebookNode

from itm_lab.notebook_io import clean, find_notebooks, is_chapter, read_notebook, refuse_chapters, write_notebook
from itm_utils.errors import input_error

# A fenced {solution} block, or a folded admonition that gives answers away; the closing fence is the opening one.
GIVEN_AWAY = re.compile(
    r"^(`{3,}|:{3,})\{(?:solution\}|admonition\} Answers?\b|dropdown\} (?:Answers?|Solution)\b).*?^\1[ \t]*$\n?",
    re.DOTALL | re.MULTILINE,
)


def without_solutions(notebook: NotebookNode) -> NotebookNode:
    """Drop everything between ``{solution-start}`` and ``{solution-end}``, fenced answers, and all outputs."""
    kept, inside = [], False
    for cell in notebook.cells:
        inside = inside or "{solution-start}" in cell.source
        if not inside:
            if cell.cell_type == "markdown":
                cell.source = GIVEN_AWAY.sub("", cell.source).strip()
            if cell.source:
                kept.append(cell)
        inside = inside and "{solution-end}" not in cell.source
    notebook.cells = kept
    return clean(notebook, keep_outputs=False)


def student_copies(root: Path, folder: Path) -> list[Path]:
    """Write a copy of every chapter to ``folder``, never over a copy somebody has worked on."""
    refuse_chapters(root, folder)
    chapters = filter(is_chapter, find_notebooks(root))
    copies = {folder / path.name: without_solutions(read_notebook(path)) for path in chapters}
    for path, copy in copies.items():
        if path.exists() and read_notebook(path) != copy:
            raise input_error(path, "a notebook that was changed", "none, or an untouched copy", "Move it away first.")
    for path, copy in copies.items():
        write_notebook(path, copy)
    return list(copies)
