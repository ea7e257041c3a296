"""The computed part of the page on kept models: each with its seed, its size and what it scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from itm_lab.paths import Paths
from itm_lab.publish.markdown import table
from itm_lab.records.kept import SUFFIX, kept_records
from itm_lab.records.receipts import read_receipt

HEADS = ["chapter", "variant", "seed", "rsum of the stored weights", "rsum of its run", "ranks the same", "size"]


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    paths = kept_records(Paths(root).weights)
    if not paths:
        yield "No model is kept yet: their runs have not finished. The table fills by itself when `itm keep` has written some.\n"
        return
    sizes = [path.with_suffix(SUFFIX).stat().st_size for path in paths]
    yield f"{len(paths)} models, {sum(sizes) / 2**20:.1f} MB together.\n"
    yield from table(HEADS, [row(path, size) for path, size in zip(paths, sizes, strict=True)])


def row(path: Path, size: int) -> list[str]:
    """One kept model."""
    record = read_receipt(path)
    number = {name: metric["value"] for name, metric in record["metrics"].items()}
    rsum = record["metrics"]["rsum"]
    return [
        f"{{doc}}`/notebooks/{record['chapter']}`",
        record["variant"],
        seed_of(record, number),
        f"{rsum['value']:.1f} \\[{rsum['low']:.1f}, {rsum['high']:.1f}\\]",
        f"{number['receipt_rsum']:.1f}",
        f"{number['same_ranks']:.1f} %",
        f"{size / 2**10:.0f} KB",
    ]


def seed_of(record: dict[str, Any], number: dict[str, float]) -> str:
    """The seed, and among how many it is the median."""
    among, planned = (int(number[name]) for name in ("seeds", "seeds_planned"))
    said = f"{record['seed']}, median of {among}" if among > 1 else str(record["seed"])
    return said if among == planned else f"{said} (provisional: {planned} are planned)"
