"""Measure every ratio that the book claims, and fail if one is 20 % worse than the committed one.

python -m benchmarks                      all, compared with benchmarks/results/bench.json
python -m benchmarks --only scan-t2i      one case, or several
python -m benchmarks --quick              tiny sizes, one round: does everything run? nothing is compared
python -m benchmarks --save               the measured ratios become the committed ones
python -m benchmarks --list               the cases
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases_commands, cases_data, cases_scoring, cases_steps
from benchmarks.harness import ALLOCATOR, RESULTS
from benchmarks.runner import TOLERATED, compare, run
from itm_utils.files import read_text, write_json

EVERY = (*cases_scoring.CASES, *cases_steps.CASES, *cases_data.CASES, *cases_commands.CASES)
CASES = {case.name: case for case in EVERY}
COMMITTED = RESULTS / "bench.json"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="NAME", help="cases; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round; compared with --committed only")
    parser.add_argument("--save", action="store_true", help="write what was measured to the committed receipt")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--no-growth", action="store_true", help="leave out the growth curves")
    parser.add_argument("--committed", type=Path, help=f"the ratios to compare with; default: {COMMITTED.name}")
    parser.add_argument("--list", action="store_true", help="show the cases")
    return parser.parse_args(given)


def one_thread() -> None:
    """One thread, and large temporaries kept in the heap: an allocator reads its settings when a process starts."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
        )
    torch.set_num_threads(1)


def known_ratios(path: Path | None, quick: bool) -> dict[str, Any]:
    """The committed cases; tiny sizes have none of their own."""
    if path is None and (quick or not COMMITTED.exists()):
        return {}
    return json.loads(read_text(path or COMMITTED, "the receipt of a benchmark"))["cases"]


def save(measured: dict[str, Any]) -> None:
    """Measured cases replace the committed ones of their name; what is absent here does not."""
    before = known_ratios(None, quick=False)
    measured = {name: case for name, case in measured.items() if "absent" not in case or name not in before}
    for name, case in measured.items():
        for ratio, found in case["ratios"].items():
            known = before.get(name, {}).get("ratios", {}).get(ratio, found)
            found["first"] = known.get("first", known["ratio"])  # what it was when measuring began
    merged = before | measured
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__, "threads": 1}
    ordered = {name: merged[name] for name in CASES if name in merged}
    write_json(COMMITTED, {"machine": machine, "allocator": ALLOCATOR, "tolerated": TOLERATED, "cases": ordered})


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    if args.list:
        print("\n".join(f"{case.name:16} {case.group:15} {case.what}" for case in CASES.values()))
        return 0
    cases = {name: CASES[name] for name in args.only or CASES}
    committed, failed, measured = known_ratios(args.committed, args.quick), [], {}
    for name, found in run(cases, args.quick, args.rounds, not args.no_growth):
        measured[name] = found
        if "absent" in found:
            print(f"{name}: not measured, {found['absent']}", flush=True)
        for row, value, before, fails in compare(cases, {name: found}, committed):
            was = "" if before is None else f"  (committed {before:.2f})"
            print(f"{row:48} {value:8.2f}{was}{'  WORSE' if fails else ''}", flush=True)
            if fails:
                failed.append(f"{row}: {value:.2f}{was}")
        if args.save and not args.quick:
            save({name: found})
    if failed and not args.save:
        print(
            f"\n{len(failed)} of the ratios are more than {TOLERATED:.0%} worse than the committed ones:",
            file=sys.stderr,
        )
        print("\n".join(failed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    one_thread()
    sys.exit(main())
