"""Run single cells of a chapter, so that tests can call what a chapter defines but does not export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@cache
def cells_of(notebook: str, kind: str = "") -> Mapping[str, str]:
    """The sources of a notebook's cells (of one kind) by id; a notebook of a megabyte is parsed once per process."""
    content = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in content["cells"] if kind in ("", cell["cell_type"])}


def run_cells(notebook: str, ids: tuple[str, ...], given: Mapping[str, Any]) -> SimpleNamespace:
    """The names after running the cells ``ids`` of a notebook, in this order. given: names they find."""
    cells = cells_of(notebook)
    names = dict(given)
    for cell in ids:
        exec(compile(cells[cell], f"{notebook}, cell {cell}", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")})
