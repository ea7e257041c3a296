"""Names in receipts of schema 2, written before the vocabulary was settled: read, checked, and given today's names.

Receipts are sealed, so their bytes stay as they are; this table goes when their runs have been repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAMETERS = {"size": "schedule", "train_part": "train_fraction"}
OF_CHAPTER = {
    "05_vsrn": {"variant": "architecture"},
    "06_saem": {"angular": "angular_weight"},
    "09_dcpa": {
        "reader": "text_backbone",
        "top": "top_k",
        "specials": "special_tokens",
        "shared_map": "shared_region_proj",
        "stages": "training",
    },
    "10_aoq": {
        "variant": "architecture",
        "host": "base_model",
        "host_epochs": "base_epochs",
        "host_decay_every": "base_decay_every",
    },
    "11_ccr_ccs": {"host": "base_model", "ways": "directions", "all_queries": "queries"},
}
# Values of parameters that had another name, by chapter and (new) name of the parameter.
VALUES: dict[str, dict[str, dict[Any, Any]]] = {
    "08_mmca": {"blocks": {"own": "self", "other": "cross"}},
    "11_ccr_ccs": {"queries": {False: 1, True: 0}},
}

# Parameters that came later, with what such a run did: a value, or the name of the parameter that decided it then.
ADDED: dict[str, dict[str, Any]] = {
    "08_mmca": {"channels": "width", "full_windows": True, "by_image": False},
    "09_dcpa": {"by_image": False},
    "10_aoq": {"pooling": "Mean", "lse": 6.0, "select_by": "rsum", "first_select_by": "rsum"},
}


def modernised(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt of schema 2 with today's names; the seal is that of its file."""
    parameters = modern_parameters(receipt["chapter"], receipt["parameters"])
    renamed = {("variant" if name == "arm" else name): value for name, value in receipt.items()}
    return renamed | {"parameters": parameters}


def modern_parameters(chapter: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a chapter with today's names and values."""
    names, values = PARAMETERS | OF_CHAPTER.get(chapter, {}), VALUES.get(chapter, {})
    renamed = {names.get(name, name): value for name, value in parameters.items()}
    modern = {name: values[name].get(value, value) if name in values else value for name, value in renamed.items()}
    added = {name: modern.get(value, value) for name, value in ADDED.get(chapter, {}).items()}
    return added | modern
