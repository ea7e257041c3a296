"""Processes that end with the command that started them, however it ends.

usage: python -m itm_lab.experiments.processes PARENT MODULE [ARGUMENT …]      (as ``python -m MODULE``, for a parent)
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

PATIENCE = 20  # seconds in which a process may end in order before it is killed
SET_PDEATHSIG = 1  # prctl(2)


def start_dependent(module: list[str], **settings: Any) -> subprocess.Popen:
    """Start ``python -m module …`` in a process group of its own; on Linux it outlives not even a killed parent."""
    command = [sys.executable, "-m", "itm_lab.experiments.processes", str(os.getpid()), *module]
    return subprocess.Popen(command, process_group=0, **settings)


def end(processes: Iterable[subprocess.Popen]) -> None:
    """Ask processes to end, then kill what is left of them and of those that they started (Jupyter's kernels)."""
    family: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for one in psutil.wait_procs(family, timeout=2)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP what Ctrl-C is: a KeyboardInterrupt, once. Whoever ignores one (nohup) goes on doing so."""

    def interrupt(number: int, frame: object) -> None:
        for known in before:
            signal.signal(known, signal.SIG_IGN)  # a second one must not disturb the tidying up
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    wanted = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])] if here else []
    before = {number: signal.getsignal(number) for number in wanted if signal.getsignal(number) is signal.SIG_DFL}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Have Linux send SIGTERM to this process when its parent ends; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended meanwhile
            sys.exit(1)


def ignore_time_limits() -> None:
    """Leave to its job what SLURM says to every process of it shortly before its time is up (``experiments/cluster.py``)."""
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # so do all that this process starts


if __name__ == "__main__":
    ignore_time_limits()
    end_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
