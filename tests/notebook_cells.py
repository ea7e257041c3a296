"""Run single cells of a chapter, so that tests can call what a chapter defines but does not export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def run_cells(notebook: str, ids: tuple[str, ...], given: Mapping[str, Any]) -> SimpleNamespace:
    """The names after running the cells ``ids`` of a notebook, in this order. given: names they find."""
    cells = {cell["id"]: cell.source for cell in nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", 4).cells}
    names = dict(given)
    for cell in ids:
        exec(compile(cells[cell], f"{notebook}, cell {cell}", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})
