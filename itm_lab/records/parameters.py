"""The parameters of a chapter: declared in one cell of typed literals, checked before a run starts."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from typing import Any

from itm_utils.errors import input_error

TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}
# Not settings of the experiment: a receipt has its own place for them, or they change nothing in its numbers.
ASIDE = ("variant", "seed", "dataset", "evaluate_on", "run_dir", "teach", "device", "compiled", "num_workers")
INJECTED = "# Parameters"  # how papermill marks its cell


def declared_parameters(source: str) -> dict[str, tuple[str, Any]]:
    """Name → (type, default) of a cell of typed literals; empty where the cell is none."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a cell with a magic
        return {}
    if not statements or not all(isinstance(line, ast.AnnAssign) and line.value for line in statements):
        return {}
    return {ast.unparse(one.target): (ast.unparse(one.annotation), ast.literal_eval(one.value)) for one in statements}


def annotated(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Name → (type, value) of what a notebook has annotated so far; from Python 3.14 on a function knows it."""
    found = values.get("__annotations__") or values.get("__annotate__", lambda _: {})(1)
    return {name: (getattr(kind, "__name__", kind), values[name]) for name, kind in found.items() if name in values}


def check_parameters(values: Mapping[str, Any], declared: Mapping[str, tuple[str, Any]], where: str) -> None:
    """Every value has a declared name and the declared type."""
    for name, value in values.items():
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(declared)}."
            raise input_error(where, f"the parameter {name}", "one that the chapter has", hint)
        kind = declared[name][0]
        if kind not in TYPES:
            raise input_error(where, f"{name} of type {kind}", f"one of {', '.join(TYPES)}")
        if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise input_error(where, f"{name} = {value!r}", f"a value of type {kind}")


def settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a receipt lists: those that make two runs of one seed differ."""
    return {name: value for name, value in parameters.items() if name not in ASIDE}
