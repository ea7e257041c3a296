"""One module per public code base: how its checkpoints become ours, and what its reference cases hold.

A module has ``NAMES`` (public name prefixes → ours) and ``load(state_dict, options)``, which builds our matcher with the
public weights; it may have ``values(model, arrays)`` for the ``mid.*`` arrays of a case, and
``compare_case(table, about, arrays)`` for cases that only this code base has, which returns True where it has compared everything.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from itm_utils.errors import input_error


def adapter_for(name: str, where: str | Path) -> ModuleType:
    """The adapter of a public code base by the name of its model; ``aoq_variants`` are cases of ``aoq``."""
    try:
        return importlib.import_module(f"itm_lab.parity.adapters.{name.removesuffix('_variants')}")
    except ModuleNotFoundError as error:
        raise input_error(where, f"model {name!r}", "a model that a chapter of this book exports") from error
