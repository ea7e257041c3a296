"""What commands take besides the work they are for: planning a table, and a lab run of one epoch."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.runner import Case, Work, times

ROOT = Path(__file__).parents[1]
ITM = "from itm_lab.cli import app; app()"
EXPERIMENT = "vsepp/scenes/all_negatives"  # its scores are one matrix product
RATE = "learning_rate=0.004"  # given, so that no search comes first


def command(*given: str) -> None:
    """Run a command of the book as its users do, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", *given], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(given)}: {done.stderr[-500:]}")


def children(job: Callable[[], object]) -> float:
    """Processor seconds of the processes that a job starts and waits for."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    job()
    return spent() - before


def dry_run() -> Work:
    """The plan of a table."""
    plan = lambda: command(ITM, "run", "--table", "lab/foundations", "--dry-run")  # noqa: E731
    return Work({"ours": plan}, given={"a second": 1.0}, clock=children)


def one_epoch(epochs: int) -> float:
    """Processor seconds of a run of so many epochs."""
    with tempfile.TemporaryDirectory() as folder:
        given = ("run", EXPERIMENT, "--dirty", "--seeds", "5", "--receipts", folder)
        changed = ("-p", f"epochs={epochs}", "-p", RATE, "-p", f"run_dir={folder}/run")
        return children(lambda: command(ITM, *given, *changed))


def besides() -> float:
    """What a run of one epoch takes besides the epoch, which is what a second epoch adds, and the start of Python."""
    first, both = one_epoch(1), one_epoch(2)
    return first - (both - first) - children(lambda: command("import torch"))


def lab_run() -> Work:
    """Scoring is part of what remains; it is one product."""
    measured: list[float] = []
    return Work(
        {"ours": lambda: measured.append(besides())},
        given={"a second": 1.0},
        clock=lambda job: (job(), measured[-1])[1],
    )


CASES = (
    Case("dry-run", "commands", "`itm run --table lab/foundations --dry-run`, in processor seconds", dry_run,
         (times("seconds", 2.5, of="a second"),), full={}, tiny={}),
    Case("lab-run", "commands", "a lab run of one epoch besides training and the start of Python, in processor seconds",
         lab_run, (times("seconds", 4.0, of="a second"),), full={}, tiny={}, rounds=1),
)  # fmt: skip
