"""Copies of the chapters for Colab and the like: no outputs, plain Markdown, and a cell that installs the package."""

from __future__ import annotations

from pathlib import Path

from nbformat import v4

from itm_lab.notebook_io import clean, find_notebooks, read_notebook, refuse_chapters, write_notebook
from itm_lab.publish.plain_markdown import convert, read_citations
from itm_utils.errors import input_error

INSTALL = """\
# Install the book's package. torch and numpy stay exactly as they are on this machine.
from importlib import metadata, util
from pathlib import Path

kept = [f"{{name}}=={{metadata.version(name)}}" for name in ("torch", "numpy") if util.find_spec(name)]
Path("kept.txt").write_text("\\n".join(kept) + "\\n")
%pip install -q -c kept.txt "itm-utils @ git+{repository}@{ref}"
"""


def launch_copies(root: Path, target: Path, repository: str, ref: str) -> list[Path]:
    """Write a clean copy of every chapter to ``target`` and return their paths."""
    refuse_chapters(root, target)
    for name, text in (("--repository", repository), ("--ref", ref)):
        if not text.strip() or not text.isprintable():  # it is written into every copy
            raise input_error(name, repr(text), "printable text")
    citations = read_citations(root / "book/references.bib")
    written = []
    for path in find_notebooks(root):
        notebook = clean(read_notebook(path), keep_outputs=False)
        convert(notebook, citations, lambda file: f"{repository}/raw/{ref}/{file}")
        install = INSTALL.format(repository=repository, ref=ref)
        notebook.cells.insert(0, v4.new_code_cell(install, id="install"))
        write_notebook(target / path.name, notebook)
        written.append(target / path.name)
    return written
