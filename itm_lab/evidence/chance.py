"""The chance level of an attention F1: that of a word that attends to every region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from itm_lab.paths import Paths
from itm_lab.records.nested_yaml import load_yaml

FILE = "attention_chance.yaml"


def chance_level(metric: str, receipts: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean chance level of the runs behind an attention F1, in per cent; None for other metrics.

    It depends on phrases and boxes alone, not on the model. Receipts from before it was recorded have that of their
    dataset, where ``attention_chance.yaml`` knows it.
    """
    if not metric.startswith("att_f1") or "-" in metric:
        return None
    overlap = metric.removeprefix("att_f1") if metric.startswith("att_f1_iou_") else ""  # which regions are relevant
    found = [_level(receipt, f"att_f1_chance{overlap}") for receipt in receipts]
    known = [level for level in found if level is not None]
    return fmean(known) if known else None


def chance_beside(metric: str, receipts: Sequence[Mapping[str, Any]]) -> str:
    """The same as text behind a number; empty where there is none."""
    level = chance_level(metric, receipts)
    return "" if level is None else f"; every region {level:.1f}"


def with_chance(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt with an attention F1 and its chance level, also where it was written without; others as they are."""
    level = chance_level("att_f1", [receipt]) if "att_f1" in receipt["metrics"] else None
    if level is None:
        return dict(receipt)
    return {**receipt, "metrics": {"att_f1_chance": {"value": level}, **receipt["metrics"]}}


def _level(receipt: Mapping[str, Any], name: str) -> float | None:
    if name in receipt["metrics"]:
        return receipt["metrics"][name]["value"]
    data, paths = receipt.get("dataset", {}), Paths.find_or_none()
    if paths is None or not (paths.book_data / FILE).is_file():
        return None
    known = _levels(paths.book_data / FILE).get(data.get("name"), {})
    same = all(known.get(key) == data.get(key) for key in ("split", "fingerprint"))
    return known["levels"].get(name) if known and same else None


@cache
def _levels(path: Path) -> dict[str, Any]:
    return load_yaml(path.read_bytes())
