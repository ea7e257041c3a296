"""The parameters of a chapter: typed literals in one cell of its notebook, and the one model that validates them.

A runner reads the cell from the notebook's file (:func:`notebook_model`), a running chapter from its kernel
(:func:`declared_parameters`, or the annotations it left); both validate with :func:`parameters_model`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from itm_utils.errors import input_error
from itm_utils.files import read_text
from itm_utils.training.schedule import TRAIN_TYPES
from itm_utils.validation import Count, CountOrZero, Fraction, Settings, settings_model

TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
# Not settings of the experiment: a receipt has its own place for them, or they change nothing in its numbers.
ASIDE = (
    "variant", "seed", "dataset", "evaluate_on", "run_dir", "teach", "device", "compiled", "num_workers", "photos",
    "compare_with",
)  # fmt: skip
INJECTED = "# Parameters"  # how papermill marks its cell
TAG = "parameters"  # of the cell that papermill takes for the parameters
# Limits besides those of a training (TrainConfig): sizes are at least one. Every other whole number may be 0.
SIZES = (
    "width", "word_dim", "heads", "feed_forward", "channels", "token_dim", "sim_dim", "caption_width", "caption_word_dim",
)  # fmt: skip
LIMITS = TRAIN_TYPES | dict.fromkeys(SIZES, Count) | {"train_fraction": Fraction}
OTHER_TRAINING = re.compile("^(first|base|inter)_")  # a parameter of another training, such as inter_epochs

Declared = Mapping[str, tuple[str, Any]]  # name → (name of the type, default)


def declared_parameters(source: str) -> dict[str, tuple[str, Any]]:
    """Name → (type, default) of a cell of typed literals; empty where the cell is none."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a cell with a magic
        return {}
    typed = [one for one in statements if isinstance(one, ast.AnnAssign) and one.value]
    if not typed or len(typed) < len(statements):
        return {}
    return {ast.unparse(one.target): (ast.unparse(one.annotation), ast.literal_eval(one.value or "")) for one in typed}


def annotated(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Name → (type, value) of what a notebook has annotated so far; from Python 3.14 on a function knows it."""
    found = values.get("__annotations__") or values.get("__annotate__", lambda _: {})(1)
    return {name: (getattr(kind, "__name__", kind), values[name]) for name, kind in found.items() if name in values}


def parameters_model(chapter: str, declared: Declared) -> type[Settings]:
    """The model of a chapter's parameters, from their declared types."""
    fields = {}
    for name, (kind, default) in declared.items():
        if kind not in TYPES:
            raise input_error(chapter, f"{name} of type {kind}", f"one of {', '.join(TYPES)}")
        fields[name] = field_type(name, TYPES[kind]), default
    return settings_model(chapter, fields)


def field_type(name: str, kind: type) -> Any:
    """A declared type with the limits that a parameter of this name has."""
    limited = LIMITS.get(OTHER_TRAINING.sub("", name), CountOrZero if kind is int else kind)
    same = getattr(limited, "__origin__", limited) is kind or (kind is str and name in ("device", "precision"))
    return limited if same else kind


def notebook_model(path: Path) -> type[Settings]:
    """The model of the parameters that a notebook declares; read again only if the file has changed."""
    return _read_model(path, path.stat().st_mtime_ns)


@cache
def _read_model(path: Path, changed: int) -> type[Settings]:
    """From the cell that papermill takes for the parameters: the first with that tag. Papermill itself takes a second."""
    try:
        cells = json.loads(read_text(path, "a notebook"))["cells"]
        tagged = [cell for cell in cells if TAG in cell["metadata"].get("tags", [])]
        source = "".join(tagged[0]["source"]) if tagged else ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise input_error(path, f"what papermill cannot read ({error!r})", "a notebook with a Python kernel") from None
    if not (declared := declared_parameters(source)):
        raise input_error(path, "no cell of parameters", "a cell of typed literals with the tag `parameters`")
    return parameters_model(path.stem, declared)


def settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a receipt lists: those that make two runs of one seed differ."""
    return {name: value for name, value in parameters.items() if name not in ASIDE}
