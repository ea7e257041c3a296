"""Read, find, clean and write the chapters' notebooks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from nbformat import NotebookNode, v4

from itm_utils.errors import input_error
from itm_utils.files import write_text

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_METADATA = {"tags", "mystnb", "slideshow", "nbgrader"}  # the last in copies for a class
NUMBER = re.compile(r"^\d+[a-z]?_")  # of a chapter
# One thread a kernel: two run side by side, and sums come out the same on every run. The malloc limits
# keep large temporaries in the heap (several times faster scoring with glibc).
KERNEL_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "4294967296"),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONHASHSEED": "0",
    "ITM_PROGRESS": "0",  # no bars in stored outputs
}


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook as it stands: nothing is repaired on the way in."""
    try:
        notebook = v4.reads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise input_error(path, "no such file", "a notebook") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise input_error(path, f"unreadable JSON ({error})", "a notebook of format 4.5") from None
    if notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise input_error(path, f"format {notebook.get('nbformat')}", "a notebook of format 4.5")
    return notebook


def write_notebook(path: Path, notebook: NotebookNode) -> None:
    """Write a notebook the way Jupyter does, atomically."""
    write_text(path, v4.writes(notebook) + "\n")


def find_notebooks(root: Path, names: Iterable[str] = ()) -> list[Path]:
    """The chapters' notebooks, or those meant by ``names`` (``01_vsepp``, ``vsepp`` or a path)."""
    known = sorted((root / "notebooks").glob("*.ipynb"))
    by_name = {path.stem: path for path in known}
    by_name |= {NUMBER.sub("", path.stem): path for path in known}
    found = {}
    for name in names:
        if Path(name).suffix == ".ipynb" and Path(name).is_file():
            found[Path(name).resolve()] = None
        elif (stem := Path(name).stem) in by_name:
            found[by_name[stem]] = None
        else:
            listed = ", ".join(path.stem for path in known) or "none yet"
            raise input_error(name, "no such notebook", f"one of: {listed}")
    return list(found) if names else known


def is_chapter(path: Path) -> bool:
    """Chapters are numbered (``01_vsepp``). Other notebooks are pages: they run, but neither export nor set exercises."""
    return bool(NUMBER.match(path.stem))


def refuse_chapters(root: Path, folder: Path) -> None:
    """Copies must not land on the chapters themselves."""
    if folder.resolve() == (root / "notebooks").resolve():
        raise input_error(folder, "the chapters themselves", "another folder for the copies")


def cell_id(index: int, source: str) -> str:
    """An id for a cell that has none: the same cell gets the same id on every machine."""
    return hashlib.sha256(f"{index}\n{source}".encode()).hexdigest()[:8]


def clean(notebook: NotebookNode, keep_outputs: bool = True) -> NotebookNode:
    """Remove, in place, what a run or an editor leaves behind; give ids to cells without."""
    notebook.metadata = NotebookNode(kernelspec=KERNELSPEC, language_info={"name": "python"})
    notebook.nbformat_minor = max(notebook.get("nbformat_minor", 0), 5)
    seen: set[str] = set()
    for index, cell in enumerate(notebook.cells):
        if cell.get("id") in seen | {None, ""}:
            cell["id"] = cell_id(index, cell.source)
        seen.add(cell["id"])
        cell["metadata"] = {key: value for key, value in cell.metadata.items() if key in CELL_METADATA}
        if cell.cell_type == "code":
            cell["execution_count"] = None
            cell["outputs"] = cell.get("outputs", []) if keep_outputs else []
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = None
    return notebook


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell, an empty list when there are none."""
    return cell.metadata.get("tags", [])
