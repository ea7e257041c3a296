"""The computed part of the page on trust: faults, damaged inputs and attacks, with what became of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from itm_lab.publish.markdown import table

FAULTS, ATTACKS = "book/data/faults.json", "book/data/attacks.yaml"


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    counted = json.loads((root / FAULTS).read_text(encoding="utf-8"))
    yield "## Faults\n"
    yield from counts(counted["faults"], ["work", "fault"], "faults")
    yield "## Damaged inputs\n"
    yield from counts(counted["inputs"], ["reader"], "inputs")
    yield "## Attacks\n"
    attacks = yaml.safe_load((root / ATTACKS).read_text(encoding="utf-8"))
    rows = [[one["area"], one["attack"], one["outcome"], f"`{one['test']}`"] for one in attacks]
    yield from table(["area", "attack", "outcome", "test"], rows)


def counts(rows: list[dict[str, Any]], names: list[str], what: str) -> Iterator[str]:
    """A line with the sums, and a row for each line of the campaign."""
    heads = [head for head in rows[0] if head not in names]
    sums = {head: sum(row[head] for row in rows) for head in heads}
    said = ", ".join(f"{sums[head]} {head}" for head in sorted(heads, key=lambda head: -sums[head]))
    yield f"{sum(sums.values())} {what}: {said}.\n"
    ordered = [*names, *sorted(heads)]
    yield from table(ordered, [[str(row[head]) for head in ordered] for row in rows])
