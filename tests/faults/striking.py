"""Faults at chosen points: a signal, a disk that is full, a process that dies in the middle of a write, a flipped bit.

A point is the n-th call of a function, or the n-th call that touches the disk. Works run in forked children: the parent
has everything imported, and what a child changes dies with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from workloads import Workload

from itm_utils.errors import ItmError

SAME, ERROR, LOST = "same result", "one clear error", "lost"
KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "death in a write", "full disk", "flipped bit")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
# C functions after which a disk holds something else.
DISK = frozenset(
    [
        "open",
        "write",
        "writelines",
        "flush",
        "close",
        "truncate",
        "replace",
        "rename",
        "unlink",
        "mkdir",
        "rmdir",
        "fsync",
        "posix_fallocate",
        "chmod",
        "serialize_file",
        "tofile",
        "link",
    ]
)
CLEAR, UNCLEAR = 2, 70  # exit codes of a child: it said one line; it ended in a traceback
ROUNDS = 3  # errors in a row that may each ask to remove something


@dataclass(frozen=True)
class Size:
    """What an undisturbed run does. calls, disk: of functions. bytes: of its largest file, and of all at its end."""

    calls: int
    disk: int
    largest: int
    total: int


@dataclass(frozen=True)
class Outcome:
    """What became of a work after a fault. kind: SAME, ERROR or LOST. said: the error, or what went wrong."""

    kind: str
    said: str = ""


class Ended(Exception):
    """The work ended before its fault could strike: no fault happened."""


def in_child(act: Callable[[], object], log: Path) -> int:
    """Run ``act`` in a child whose output goes to ``log``; returns its exit code, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = UNCLEAR
    try:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            act()
            code = 0
        except (ItmError, OSError) as error:  # what `itm` prints as one line
            os.write(2, f"\nitm: {error}\n".encode(errors="backslashreplace"))
            code = CLEAR
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def call_at(number: int, act: Callable[[], None], disk: bool) -> None:
    """Call ``act`` at the given call of a function of this process, or of one that touches the disk."""
    left = number

    def count(frame: object, event: str, function: object) -> None:
        nonlocal left
        if event == "c_call" or (event == "call" and not disk):
            if disk and getattr(function, "__name__", "") not in DISK:
                return
            left -= 1
            if left == 0:
                sys.setprofile(None)
                act()

    sys.setprofile(count)


def measure(workload: Workload, inputs: Path, work: Path, log: Path) -> Size:
    """Run a work undisturbed, and count."""
    counts = log.with_suffix(".counts")

    def act() -> None:
        calls = disk = 0

        def count(frame: object, event: str, function: object) -> None:
            nonlocal calls, disk
            calls += event in ("call", "c_call")
            disk += event == "c_call" and getattr(function, "__name__", "") in DISK

        sys.setprofile(count)
        try:
            workload.run(inputs, work)
        finally:
            sys.setprofile(None)
        counts.write_text(f"{calls} {disk}")

    if in_child(act, log):
        raise RuntimeError(f"{workload.name} fails undisturbed:\n{log.read_text(encoding='utf-8')}")
    sizes = [path.stat().st_size for path in work.rglob("*") if path.is_file()]
    calls, disk = map(int, counts.read_text().split())
    return Size(calls, disk, max(sizes), sum(sizes))


# -- the faults ---------------------------------------------------------------------------------------------------------


def interrupted(workload: Workload, inputs: Path, work: Path, log: Path, kind: str, size: Size, random: Random) -> None:
    """Run a work into a signal, or into its death in the middle of a write."""
    disk = random.random() < 0.5
    number = random.randint(1, size.disk if disk else size.calls)
    limit = random.randint(1, size.largest)

    def act() -> None:
        if kind == "death in a write":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            call_at(number, lambda: os.kill(os.getpid(), SIGNALS[kind]), disk)
        workload.run(inputs, work)

    code = in_child(act, log)
    if code == 0:
        raise Ended
    if code == UNCLEAR:
        raise RuntimeError(log.read_text(encoding="utf-8", errors="replace"))


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[[], None]]:
    """A file system of so many kilobytes at ``folder``; yields what makes it large. OSError where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.name != "posix" or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        raise OSError("no file system can be mounted here")
    try:
        yield (
            lambda: (
                subprocess.run(["mount", "-o", "remount,size=256m", str(folder)], check=True, capture_output=True)
                and None
            )
        )
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def filled(workload: Workload, inputs: Path, work: Path, log: Path, kilobytes: int, limited: bool) -> None:
    """Run a work on a disk that fills up; it must say so in one line. limited: by the size of a file instead."""

    def act() -> None:
        if limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kilobytes, 1024 * kilobytes))
        workload.run(inputs, work)

    code = in_child(act, log)
    if code == 0:
        raise Ended
    if code != CLEAR:
        raise RuntimeError(f"exit code {code}: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def flip(work: Path, random: Random) -> Path:
    """Flip one bit of one file, any file and any bit."""
    files = [path for path in sorted(work.rglob("*")) if path.is_file() and path.stat().st_size]
    if not files:
        raise Ended
    path = random.choice(files)
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    return path


# -- what became of it --------------------------------------------------------------------------------------------------


def resumed(workload: Workload, inputs: Path, work: Path, log: Path, right: str) -> Outcome:
    """Call a work again until it ends. An error must name what to remove; without it, the result must be the right one."""
    said = ""
    for _ in range(ROUNDS):
        code = in_child(lambda: workload.run(inputs, work), log)
        text = log.read_text(encoding="utf-8", errors="replace")
        if code == 0:
            try:
                same = workload.result(work) == right
            except Exception:
                return Outcome(LOST, f"a result that cannot be read: {traceback.format_exc()}")
            if not same:
                return Outcome(LOST, "another result")
            return Outcome(ERROR, said) if said else Outcome(SAME)
        if code != CLEAR:
            return Outcome(LOST, f"exit code {code}: {text[-3000:]}")
        said = said or text.rsplit("\nitm: ", 1)[-1].strip()
        if not remove_named(text, work):
            return Outcome(LOST, f"an error that names nothing to remove: {text[-2000:]}")
    return Outcome(LOST, f"one error after the other, first: {said}")


def remove_named(text: str, work: Path) -> bool:
    """Remove the file or folder that an error asks to remove, else the one that it finds fault with."""
    inside = re.escape(str(work))
    for clause in re.findall(rf"(?:Remove|remove) ({inside}.*?) to (?:begin|start|convert|repeat)", text):
        return all(removed(Path(name)) for name in clause.split(", ") if Path(name).exists())
    named = re.findall(rf"{inside}/[^:,;()\n]*[^:,;()\n. ]", text)
    return any(removed(Path(name)) for name in named)


def removed(path: Path) -> bool:
    """Remove a folder, or a file with the ranks beside it; False if it is not there."""
    if path.is_dir():
        shutil.rmtree(path)
        return True
    there = path.exists()
    path.unlink(missing_ok=True)
    path.with_suffix(".npz").unlink(missing_ok=True)
    return there


def strike(workload: Workload, inputs: Path, kind: str, size: Size, right: str, seed: int) -> Outcome:
    """One fault of one kind, drawn by ``seed``, and what became of the work. Raises :class:`Ended` if nothing struck."""
    random = Random(f"{workload.name} {kind} {seed}")
    with tempfile.TemporaryDirectory(prefix="fault-") as folder, contextlib.ExitStack() as stack:
        work, log = Path(folder, "work"), Path(folder, "log")
        work.mkdir()
        common = workload, inputs, work, log
        try:
            if kind == "full disk":
                pages = max(1, size.total // 4096)
                kilobytes, enlarge = 4 * random.randint(1, pages), None
                with suppress(OSError):
                    enlarge = stack.enter_context(small_disk(work, kilobytes))
                if enlarge is None:
                    kilobytes = random.randint(1, max(1, size.largest // 1024 - 1))
                filled(*common, kilobytes, limited=enlarge is None)
                if enlarge is not None:
                    enlarge()
            elif kind == "flipped bit":
                if random.random() < 0.25:  # after the end
                    in_child(lambda: workload.run(inputs, work), log)
                else:
                    interrupted(*common, "SIGKILL", size, random)
                flip(work, random)
            else:
                interrupted(*common, kind, size, random)
        except RuntimeError as error:
            return Outcome(LOST, str(error))
        return resumed(*common, right)
