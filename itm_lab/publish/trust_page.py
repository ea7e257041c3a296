"""The computed part of the page on trust: faults, damaged inputs and attacks, with what became of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from itm_lab.publish.markdown import table
from itm_lab.records.nested_yaml import load_yaml

FAULTS, ATTACKS = "book/data/faults.json", "book/data/attacks.yaml"
HEADS = {"works": "Works", "itm run": "`itm run`"}  # parts of the campaign that were struck by faults
WORKS = tuple(HEADS)


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    counted = json.loads((root / FAULTS).read_text(encoding="utf-8"))
    yield "## Faults\n"
    for part in WORKS:
        yield f"{HEADS[part]}: {circumstances(counted[part]['run'])}\n"
    yield from counts([row for part in WORKS for row in counted[part]["faults"]], ["work", "fault"], "faults")
    yield "## Damaged inputs\n"
    yield f"{circumstances(counted['inputs']['run'])}\n"
    yield from counts(counted["inputs"]["inputs"], ["reader"], "inputs")
    yield "## Attacks\n"
    yield from attack_table(load_yaml((root / ATTACKS).read_text(encoding="utf-8")))


def circumstances(run: dict[str, Any]) -> str:
    """When, of which state of the book and where a part of the campaign ran, in a line."""
    commit = str(run["commit"])
    state = f"`{commit[:12]}`{' with changes' if commit.endswith('+') else ''}"
    return (
        f"{run['began'][:10]}, {run['seconds'] / 60:.0f} minutes, commit {state}, {run['machine']}, "
        f"Python {run['python']}, PyTorch {run['torch']}."
    )


def counts(rows: list[dict[str, Any]], names: list[str], what: str) -> Iterator[str]:
    """A line with the sums, and a row for each line of the campaign."""
    heads = [head for head in rows[0] if head not in names]
    sums = {head: sum(row[head] for row in rows) for head in heads}
    said = ", ".join(f"{sums[head]} {head}" for head in sorted(heads, key=lambda head: -sums[head]))
    yield f"{sum(sums.values())} {what}: {said}.\n"
    ordered = [*names, *sorted(heads)]
    yield from table(ordered, [[str(row[head]) for head in ordered] for row in rows])


def attack_table(attacks: list[dict[str, Any]]) -> Iterator[str]:
    """How many attacks there are of each area, and a row for each of them."""
    areas = list(dict.fromkeys(one["area"] for one in attacks))
    said = ", ".join(f"{sum(one['area'] == area for one in attacks)} on {area}" for area in areas)
    yield f"{len(attacks)} attacks: {said}.\n"
    rows = [[one["area"], one["attack"], one["before"], one["now"], tests(one["test"])] for one in attacks]
    yield from table(["area", "attack", "before", "now", "test"], rows)


def tests(named: str | Iterable[str]) -> str:
    """The names of one test or several, as code."""
    return ", ".join(f"`{one}`" for one in ([named] if isinstance(named, str) else named))
