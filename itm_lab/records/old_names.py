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
    "11_ccr_ccs": {"host": "base_model", "ways": "directions"},
}


def modernised(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt of schema 2 with today's names; the seal is that of its file."""
    names = PARAMETERS | OF_CHAPTER.get(receipt["chapter"], {})
    parameters = {names.get(name, name): value for name, value in receipt["parameters"].items()}
    renamed = {("variant" if name == "arm" else name): value for name, value in receipt.items()}
    return renamed | {"parameters": parameters}
