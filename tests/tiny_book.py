"""A book of one small chapter, for the tests of the tools around it."""

from __future__ import annotations

from pathlib import Path

from nbformat import NotebookNode, v4

from itm_lab.notebook_io import clean, write_notebook

ROOT = Path(__file__).resolve().parents[1]
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EXPORTED = """\
#| export
import math

LIMIT = 3


def half(x: float) -> float:
    return math.floor(x) / 2
"""


def code(source: str, name: str, outputs: list | None = None, **metadata) -> NotebookNode:
    """A code cell with a fixed id."""
    return v4.new_code_cell(source, id=name, outputs=outputs or [], metadata=metadata)


def text(source: str, name: str) -> NotebookNode:
    """A Markdown cell with a fixed id."""
    return v4.new_markdown_cell(source, id=name)


def printed(words: str) -> NotebookNode:
    """A stored line of standard output."""
    return v4.new_output("stream", name="stdout", text=words)


def tiny_notebook() -> NotebookNode:
    """A notebook that breaks no rule."""
    cells = [
        text("# A tiny chapter\n\nIt halves numbers.", "title"),
        code("epochs: int = 1  # passes over the data", "parameters", tags=["parameters"]),
        code(EXPORTED, "halving"),
        text("## Checked halves", "checks"),
    ]
    for number in range(8):
        source = f"# NBVAL_CHECK_OUTPUT\nprint(epochs * half({number}))"
        cells.append(code(source, f"check{number}", [printed(f"{number / 2}\n")]))
    return clean(v4.new_notebook(cells=cells, nbformat_minor=5))


def tiny_book(root: Path) -> Path:
    """A project folder with that chapter, ready for every command; returns the notebook's path."""
    (root / "book/_ext").mkdir(parents=True)
    (root / "itm_utils/models").mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    (root / "constraints.txt").write_text("")
    (root / "book/index.md").write_text("# Tiny\n\nSee {doc}`/notebooks/01_tiny`.\n")
    (root / "book/execution.md").write_text("# Time\n\n```{execution-table}\n```\n")
    (root / "book/_ext/book_ext.py").write_text((ROOT / "book/_ext/book_ext.py").read_text(encoding="utf-8"))
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n- file: notebooks/01_tiny\n- file: book/execution\n"
    )
    (root / "_config.yml").write_text(
        'title: Tiny\nonly_build_toc_files: true\nexecute:\n  execute_notebooks: "off"\n'
        "sphinx:\n  local_extensions:\n    book_ext: book/_ext\n  config:\n    nb_ipywidgets_js: {}\n"
    )
    (root / "notebooks").mkdir()
    (root / "notebooks/conftest.py").write_text((ROOT / "notebooks/conftest.py").read_text(encoding="utf-8"))
    path = root / "notebooks/01_tiny.ipynb"
    write_notebook(path, tiny_notebook())
    return path
