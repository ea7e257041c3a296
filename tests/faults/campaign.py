"""Strike every work with every kind of fault, read damaged inputs, and count what became of them.

usage: python tests/faults/campaign.py [PART …] [--faults N] [--runs N] [--inputs N]      (`make faults`)

PART: works, `itm run`, inputs; all of them by default. Each is written to book/data/faults.json when it has ended. N: faults of
each kind for each work, the same for `itm run` (a minute each), and inputs of each kind of damage for each reader.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file's own folder is there already

import torch
from command_lines import COMMANDS, call, lines_of, write_checkout
from damaged_inputs import ACCEPTED, CLEAR, READERS, TRACEBACK, draw, read_damaged
from process_tree import KINDS as TREE_KINDS
from process_tree import MEMBERS, Tree
from striking import ERROR, KINDS, LOST, SAME, Ended, Outcome, Size, measure, strike
from workloads import ROOT, WORKLOADS, Workload, load_encoder

from itm_utils.files import write_json

FAULTS = ROOT / "book/data/faults.json"
EACH, RUNS, INPUTS = 5, 2, 3
LINES = 3  # times as many command lines as inputs of one kind: all of them are of one kind
ATTEMPTS = 20  # draws for one fault, as some come after the end of a work
ENDS = {"faults": (SAME, ERROR, LOST), "inputs": (ACCEPTED, CLEAR, TRACEBACK)}


class Struck:
    """One work, measured once and struck many times."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.inputs = workload, folder / "inputs"
        workload.prepare(self.inputs)
        (folder / "work").mkdir()
        self.size: Size = measure(workload, self.inputs, folder / "work", folder / "log")
        self.right = workload.result(folder / "work")

    def faults(self, kind: str, count: int) -> Iterator[Outcome]:
        """So many faults that struck."""
        found = 0
        for seed in range(ATTEMPTS * count):
            if found == count:
                return
            try:
                outcome = strike(self.workload, self.inputs, kind, self.size, self.right, seed)
            except Ended:
                continue
            found += 1
            yield outcome


def lost_after(name: str, kind: str, folder: Path) -> list[str] | None:
    """What one fault lost of a work; None if no fault struck."""
    outcomes = list(Struck(WORKLOADS[name], folder).faults(kind, 1))
    return [outcome.said for outcome in outcomes if outcome.kind == LOST] if outcomes else None


Row = dict[str, Any]


def strike_works(each: int) -> Iterator[Row]:
    """One row for each work and kind of fault."""
    load_encoder()
    for name, workload in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            struck = Struck(workload, Path(folder))
            for kind in KINDS:
                yield fault_row(name, kind, struck.faults(kind, each))


def strike_runs(each: int) -> Iterator[Row]:
    """The same for `itm run` itself, once for the command and once for the processes below it."""
    for member in MEMBERS:
        with tempfile.TemporaryDirectory() as folder:
            tree = Tree(Path(folder), member)
            for kind in TREE_KINDS[member]:
                yield fault_row(f"itm run, {member}", kind, tree.faults(kind, each))


def fault_row(work: str, kind: str, outcomes: Iterable[Outcome]) -> Row:
    """What became of a work after its faults of one kind; what was lost is printed."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts[outcome.kind] += 1
        if outcome.kind == LOST:
            print(f"{work}, {kind}: lost: {outcome.said}", flush=True)
    print(f"{work}, {kind}: {dict(counts)}", flush=True)
    return {"work": work, "fault": kind} | {word: counts[word] for word in ENDS["faults"]}


def read_all(each: int) -> Iterator[Row]:
    """One row for each reader, and one for each command."""
    for name, reader in READERS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [counts for _, counts in read_damaged(reader, Path(folder) / "x", each)]
            yield input_row(name, sum(found, Counter()))
    with tempfile.TemporaryDirectory() as folder:
        write_checkout(Path(folder) / "x")
        for name in COMMANDS:
            yield input_row(
                f"itm {name}", draw(lines_of(name), LINES * each, lambda words: call(words, Path(folder) / "x"))
            )


def input_row(reader: str, counts: Counter[str]) -> Row:
    print(f"{reader}: {dict(counts)}", flush=True)
    return {"reader": reader} | {word: counts[word] for word in ENDS["inputs"]}


PARTS = {"works": ("faults", strike_works), "itm run": ("faults", strike_runs), "inputs": ("inputs", read_all)}


def circumstances() -> dict[str, Any]:
    """Of which state of the book and on which machine, as a receipt says it of a run."""
    calls = (("rev-parse", "HEAD"), ("status", "--porcelain"))
    commit, changed = (subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True).stdout for one in calls)
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": (commit.strip() + ("+" if changed.strip() else "")) or None,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def campaign(part: str, number: int) -> list[Row]:
    """One part, from its first fault to its place in the file."""
    kind, strike_all = PARTS[part]
    about, start = circumstances(), time.perf_counter()
    rows = list(strike_all(number))
    about["seconds"] = round(time.perf_counter() - start)
    known = json.loads(FAULTS.read_text(encoding="utf-8")) if FAULTS.is_file() else {}
    write_json(FAULTS, known | {part: {"run": about, kind: rows}})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    for name, number in (("faults", EACH), ("runs", RUNS), ("inputs", INPUTS)):
        parser.add_argument(f"--{name}", type=int, default=number)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    numbers = dict(zip(PARTS, (asked.faults, asked.runs, asked.inputs), strict=True))
    lost = 0
    for part in asked.parts or PARTS:
        rows = campaign(part, numbers[part])
        words = ENDS[PARTS[part][0]]
        here = sum(row[words[-1]] for row in rows)
        print(
            f"{part}: {sum(row[word] for row in rows for word in words)} {PARTS[part][0]}, {here} {words[-1]}",
            flush=True,
        )
        lost += here
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
