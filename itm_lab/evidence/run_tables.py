"""Receipts of runs as lines of a table, and beside those that came with the book."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.evidence.statistics import seed_interval
from itm_lab.experiments.runner import TableRow
from itm_lab.records.receipts import is_old_protocol, read_named_receipt

RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")


def table_of(results: Path, wanted: list[TableRow]) -> Iterator[str]:
    """Some rows as a table: the mean over seeds, and for rsum its interval over them."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in wanted:
        place = row.dataset["name"] + (" dev" if row.dataset["split"] == "dev" else "")
        for receipt in row.receipts(results):
            age = ", old protocol" if is_old_protocol(receipt) else ""
            found[row.chapter, row.variant, place, receipt["protocol"] + age].append(receipt)
    if found:
        yield f"{'':36}  i2t R@1   R@5  R@10   t2i R@1   R@5  R@10    rsum"
    for (_, variant, place, protocol), receipts in found.items():
        means = [np.mean([receipt["metrics"][name]["value"] for receipt in receipts]) for name in RECALLS]
        rsum = [receipt["metrics"]["rsum"]["value"] for receipt in receipts]
        spread = f" [{seed_interval(rsum).low:.1f}, {seed_interval(rsum).high:.1f}]" if len(rsum) > 1 else ""
        cells = "{:9.1f}{:6.1f}{:6.1f}{:10.1f}{:6.1f}{:6.1f}".format(*means)
        seeds = f"{len(rsum)} seed{'s' if len(rsum) > 1 else ''}"
        yield f"{variant:28} {receipts[0]['models']} model{cells}{np.mean(rsum):8.1f}{spread}  {place} {protocol}, {seeds}"


def compared(results: Path, committed: Path) -> Iterator[str]:
    """How far receipts made here lie from those that came with the book."""
    differences = {}
    for path in sorted(results.glob("*/*.json")):
        other = committed / path.relative_to(results)
        if other.exists():
            both = read_named_receipt(path, results), read_named_receipt(other, committed)
            values = [receipt["metrics"]["rsum"]["value"] for receipt in both]
            differences[path.stem] = abs(values[0] - values[1])
    if differences:
        worst = max(differences, key=lambda name: differences[name])
        same = sum(difference == 0 for difference in differences.values())
        yield f"{same} of {len(differences)} runs gave exactly the rsum of the committed receipts"
        yield f"the largest difference is {differences[worst]:.2f} ({worst})"
