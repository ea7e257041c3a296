"""Where the time goes: the operators of PyTorch with the largest shares, and what all matrix products take.

    python -m benchmarks.profiles                     every case that misses its target
    python -m benchmarks.profiles --only mmca dcpa    these

(minutes; updates results/profiles.json; the page on benchmarks shows it where a target is not reached)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.__main__ import CASES, COMMITTED, one_thread
from benchmarks.harness import RESULTS, finish
from benchmarks.runner import Case, Way
from itm_lab.publish.benchmarks_page import missed
from itm_utils.files import read_text

LARGEST = 4  # operators of a case that are kept
RUNS = 2  # of which the one that was disturbed less counts
GROUPS = ("scoring", "training steps")  # what is computed by PyTorch
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn_convolution", "convolution_backward",
            "_scaled_dot_product_flash_attention_for_cpu"}  # fmt: skip


def spent(way: Way) -> dict[str, float]:
    """Seconds of each operator itself, without those it calls."""
    way()  # warm
    return min((one_run(way) for _ in range(RUNS)), key=lambda found: sum(found.values()))  # other programs only add


def one_run(way: Way) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        way()
    return {event.key.removeprefix("aten::"): event.self_cpu_time_total / 1e6 for event in found.key_averages()}


def profiled(case: Case) -> dict[str, object]:
    """Shares of ours, largest first; seconds of all operators and of the products, of ours and the straightforward."""
    torch.manual_seed(0)
    work = case.build(**case.full)
    by_way = {name: spent(work.ways[name]) for name in ("ours", "straightforward")}
    ours, whole = by_way["ours"], sum(by_way["ours"].values())
    largest = sorted(ours, key=lambda name: -ours[name])[:LARGEST]
    scale = {name: work.scale.get(name, 1.0) for name in by_way}
    return {
        "runs": RUNS,
        "largest": {name: ours[name] / whole for name in largest},
        "seconds": {name: scale[name] * sum(of.values()) for name, of in by_way.items()},
        "product_seconds": {name: scale[name] * sum(of.get(op, 0.0) for op in PRODUCTS) for name, of in by_way.items()},
    }


def arguments() -> argparse.Namespace:
    known = sorted(name for name, case in CASES.items() if case.group in GROUPS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help="cases; default: all that miss")
    parser.add_argument("--out", type=Path, default=RESULTS / "profiles.json")
    given = parser.parse_args()
    committed = json.loads(read_text(COMMITTED, "the receipt of a benchmark"))["cases"]
    given.only = given.only or [name for name in missed(committed) if name in known]
    return given


def main() -> None:
    args = arguments()
    found = json.loads(args.out.read_text(encoding="utf-8"))["profiles"] if args.out.exists() else {}
    for name in args.only:
        found[name] = profiled(CASES[name])
        print(name, found[name], flush=True)
        finish(args, {"profiles": {case: found[case] for case in CASES if case in found}})


if __name__ == "__main__":
    one_thread()
    main()
