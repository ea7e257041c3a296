"""Strike every work with every kind of fault, read damaged inputs, and count what became of them.

usage: python tests/faults/campaign.py [FAULTS OF EACH KIND] [INPUTS OF EACH READER]      (`make faults`)
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file's own folder is there already

import torch
from damaged_inputs import ACCEPTED, CLEAR, READERS, TRACEBACK, read_damaged
from striking import ERROR, KINDS, LOST, SAME, Ended, Outcome, Size, measure, strike
from workloads import ROOT, WORKLOADS, Workload, load_encoder

from itm_utils.files import write_json

EACH, INPUTS = 5, 50
ATTEMPTS = 20  # draws for one fault, as some come after the end of a work


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


def strike_all(each: int) -> list[dict[str, object]]:
    """One row for each work and kind of fault."""
    rows = []
    load_encoder()
    for name, workload in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            struck = Struck(workload, Path(folder))
            for kind in KINDS:
                outcomes = list(struck.faults(kind, each))
                for outcome in outcomes:
                    if outcome.kind == LOST:
                        print(f"{name}, {kind}: lost: {outcome.said}", flush=True)
                counts = Counter(outcome.kind for outcome in outcomes)
                rows.append({"work": name, "fault": kind} | {word: counts[word] for word in (SAME, ERROR, LOST)})
                print(f"{name}, {kind}: {dict(counts)}", flush=True)
    return rows


def read_all(each: int) -> list[dict[str, object]]:
    """One row for each reader."""
    rows = []
    for name, reader in READERS.items():
        with tempfile.TemporaryDirectory() as folder:
            drawn = (read_damaged(reader, Path(folder), Random(f"{name} {n}"), n % WAYS) for n in range(each))
            counts = Counter(drawn)
        rows.append({"reader": name} | {word: counts[word] for word in (ACCEPTED, CLEAR, TRACEBACK)})
        print(f"{name}: {dict(counts)}", flush=True)
    return rows


def main(each: int = EACH, inputs: int = INPUTS) -> int:
    torch.set_num_threads(1)
    faults, read = strike_all(each), read_all(inputs)
    write_json(ROOT / "book/data/faults.json", {"faults": faults, "inputs": read})
    lost = sum(int(str(row[LOST])) for row in faults) + sum(int(str(row[TRACEBACK])) for row in read)
    print(
        f"{sum(int(str(row[w])) for row in faults for w in (SAME, ERROR, LOST))} faults, {len(read) * inputs} inputs, {lost} lost"
    )
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
