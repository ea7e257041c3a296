"""`itm run` with its whole family of processes, struck at random moments: the command, papermill, the kernel of a chapter.

Unlike the other works it does not run in a forked child: it is the command itself, with real kernels. A moment is a
share of the processor time that the family of an undisturbed call takes, so that a busy machine does not move it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from striking import ERROR, LOST, ROUNDS, SAME, SIGNALS, Ended, Outcome, flip, remove_named, small_disk
from toy_dataset import write_toy_dataset

from itm_lab.records.receipts import read_evidence, read_receipt
from itm_lab.records.scores import read_scores
from itm_utils.training.checkpoints import read_checkpoint, tensor_digest

ROOT = Path(__file__).resolve().parents[2]
ITM = "from itm_lab.cli import app; app()"
NAME, EPOCHS = "vsepp/f30k/vsepp", 6
MEMBERS = ("the command", "its kernel")
# What happens to a disk happens to all of them at once.
KINDS = {
    "the command": ("SIGKILL", "SIGTERM", "SIGINT", "full disk", "flipped bit"),
    "its kernel": ("SIGKILL", "SIGTERM"),
}
PATIENCE = 600  # seconds for one call, on a busy machine
AFTERWARDS = 30  # seconds in which a family has ended after its head


@dataclass(frozen=True)
class Called:
    """How a call of the command ended, what it said, how many processes outlived it, and seconds of processor time."""

    code: int
    said: str
    left: int
    seconds: float


class Family:
    """A process and all that it started, as far as anybody has looked. seconds: of processor time."""

    def __init__(self, head: int) -> None:
        self.head = psutil.Process(head)
        self.below: dict[int, psutil.Process] = {}
        self.spent: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        return sum(self.spent.values())

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.below |= {one.pid: one for one in self.head.children(recursive=True)}
        for one in (self.head, *self.below.values()):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                self.spent[one.pid] = times.user + times.system

    def end(self) -> int:
        """How many of those below are still there after a while; they are killed."""
        left = psutil.wait_procs(list(self.below.values()), timeout=AFTERWARDS)[1]
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        return len(left)


@dataclass(frozen=True)
class Signal:
    """Strikes once the family has worked for so many seconds: the command, or the youngest process below it."""

    number: signal.Signals
    seconds: float
    member: str

    def __call__(self, family: Family) -> bool:
        one = (
            family.head
            if self.member == "the command"
            else max(family.below.values(), key=lambda p: p.pid, default=None)
        )
        if family.seconds < self.seconds or one is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(one.pid, self.number)
        return True


class Tree:
    """A small run of VSE++. member: who is struck by signals: "the command", or "its kernel" with papermill before it."""

    def __init__(self, folder: Path, member: str) -> None:
        self.folder, self.member = folder, member
        self.data = write_toy_dataset(folder / "f30k", {"train": 40, "dev": 10, "test": 20}, regions=36, width=32)
        whole = self.call(folder / "whole")
        self.seconds = whole.seconds
        if whole.code:
            raise RuntimeError(f"itm run fails undisturbed: {whole.said}")
        self.right = result(folder / "whole")
        self.megabytes = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file()) / 2**20

    def command(self, work: Path) -> list[str]:
        given = [
            f"dataset={self.data}",
            f"run_dir={work / 'run'}",
            "width=16",
            "word_dim=8",
            "batch_size=4",
            "device=cpu",
        ]
        given += ["num_workers=0", f"epochs={EPOCHS}", "variant=VSE++", "teach=false"]
        options = [word for change in given for word in ("-p", change)]
        return [sys.executable, "-c", ITM, "run", NAME, *options, "--receipts", str(work / "receipts")]  # fmt: skip

    def call(self, work: Path, strike: Callable[[Family], bool] | None = None, limit: int = 0) -> Called:
        """One call of the command. strike: asked again and again until it has struck. limit: bytes of a file, at most."""
        work.mkdir(parents=True, exist_ok=True)
        log = self.folder / "log"

        def prepare() -> None:
            for number in SIGNALS.values():
                if number != signal.SIGKILL:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with log.open("w", encoding="utf-8") as file:
            running = subprocess.Popen(self.command(work), cwd=ROOT, stdout=file, stderr=file, preexec_fn=prepare)
            family = Family(running.pid)
            until = time.monotonic() + PATIENCE
            while running.poll() is None and time.monotonic() < until:
                family.look()
                if strike is not None and strike(family):
                    strike = None
                time.sleep(0.1)
            running.kill()
            code = running.wait()
        return Called(code, log.read_text(encoding="utf-8", errors="replace"), family.end(), family.seconds)

    def faults(self, kind: str, count: int) -> Iterator[Outcome]:
        """So many faults that struck."""
        found, seed = 0, 0
        while found < count and seed < 10 * count:
            random = Random(f"itm run {self.member} {kind} {seed}")
            seed += 1
            work = self.folder / f"work-{kind.replace(' ', '-')}-{seed}"
            with contextlib.ExitStack() as stack:
                try:
                    outcome = self.struck(work, kind, random, stack)
                except Ended:
                    continue
            found += 1
            yield outcome

    def struck(self, work: Path, kind: str, random: Random, stack: contextlib.ExitStack) -> Outcome:
        """One fault, and what became of the run."""
        if kind in SIGNALS:
            first = self.call(work, Signal(SIGNALS[kind], random.uniform(0.2, 1) * self.seconds, self.member))
        elif kind == "full disk":
            first = self.filled(work, random, stack)
        else:
            first = self.call(work, Signal(signal.SIGKILL, random.uniform(0.6, 1.2) * self.seconds, "the command"))
            flip(work, random)
        if first.left:
            return Outcome(LOST, f"{first.left} processes outlived the command")
        if kind != "flipped bit" and first.code == 0:
            raise Ended
        if "Traceback (most recent call last)" in first.said:
            return Outcome(LOST, f"a traceback: {first.said[-3000:]}")
        return self.resumed(work)

    def filled(self, work: Path, random: Random, stack: contextlib.ExitStack) -> Called:
        """A call on a disk that fills up, and then is large again."""
        kilobytes = int(random.uniform(0.02, 0.9) * self.megabytes * 1024)
        try:
            enlarge = stack.enter_context(small_disk(work, kilobytes))
        except OSError:
            largest = max(path.stat().st_size for path in (self.folder / "whole").rglob("*") if path.is_file())
            return self.call(work, limit=int(random.uniform(0.05, 0.9) * largest))
        called = self.call(work)
        enlarge()
        return called

    def resumed(self, work: Path) -> Outcome:
        """Call the command again until the run has ended. An error must name what to remove."""
        said = ""
        for _ in range(ROUNDS):
            called = self.call(work)
            if called.left:
                return Outcome(LOST, f"{called.left} processes outlived the command")
            if called.code == 0:
                found = result(work)
                if found != self.right:
                    return Outcome(LOST, f"another result: {found} instead of {self.right}")
                return Outcome(ERROR, said) if said else Outcome(SAME)
            if called.code not in (1, 2) or "Traceback (most recent call last)" in called.said:
                return Outcome(LOST, f"exit code {called.code}: {called.said[-3000:]}")
            said = said or called.said.strip()
            if not remove_named(called.said, work):
                return Outcome(LOST, f"an error that names nothing to remove: {called.said[-2000:]}")
        return Outcome(LOST, f"one error after the other, first: {said}")


def result(work: Path) -> str:
    """Receipts but for their circumstances, ranks, scores and the best weights."""
    found: list[object] = []
    for path in sorted((work / "receipts").rglob("*.json")):
        content = {name: value for name, value in read_receipt(path).items() if name not in ("run", "seal")}
        for stage in content["training"]["stages"]:
            del stage["seconds"]
        found += [str(path.relative_to(work)), content, read_evidence(path).digest]
    found.append(tensor_digest({"i2t": read_scores(next((work / "run").rglob("scores.safetensors"))).i2t}))
    found.append(tensor_digest(read_checkpoint(next((work / "run").rglob("best.safetensors"))).tensors))
    return json.dumps(found, sort_keys=True)
