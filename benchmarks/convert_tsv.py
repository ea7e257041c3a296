"""Bottom-up TSV to the precomputed format: rate, memory, and the same bytes after a kill.

2,000 pictures of 36 regions and 2,048 numbers, as many as two folds of COCO; about half of the numbers are zero, as in
real features. They are converted in the order of a shuffled list, and then again by a second process that is killed on
its way and started anew. The bare copy is what no way can avoid: the TSV is read and as many bytes as the result has
are written and reach the disk. Conversion and copy take turns.

    python -m benchmarks.convert_tsv   (a minute or two, 3 GB on disk; writes benchmarks/results/convert_tsv.json)
"""

from __future__ import annotations

import base64
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import ALLOCATOR, REGIONS, finish, start
from itm_lab.data import bottom_up
from itm_lab.data.selection import Wanted, wanted_from_list

WIDTH, SIZE, CHUNK = 2048, (640, 480), 2**24
NOTE_SECONDS = bottom_up.NOTE_SECONDS


def write_tsv(path: Path, pictures: int) -> None:
    """Pictures 1, 2, … of random numbers."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for number in range(1, pictures + 1):
            corner = rng.uniform(0, 200, size=(REGIONS, 2))
            boxes = np.concatenate([corner, corner + rng.uniform(10, 200, size=(REGIONS, 2))], axis=1)
            features = np.maximum(rng.normal(size=(REGIONS, WIDTH)), 0)
            fields = [str(number), *map(str, SIZE), str(REGIONS)]
            fields += [base64.b64encode(values.astype("<f4").tobytes()).decode() for values in (boxes, features)]
            file.write("\t".join(fields).encode() + b"\r\n")
        file.flush()
        os.fsync(file.fileno())  # or the first conversion would wait for the disk to write its source


class Watch:
    """The memory of this process while something runs, beyond what it held before, looked at fifty times a second."""

    def __enter__(self) -> Watch:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what is free, or it would hide what is needed
        self.before, self.peak, self.stop = resident(), {}, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.stop.wait(0.02):
            for kind, size in resident().items():
                self.peak[kind] = max(self.peak.get(kind, 0), size - self.before[kind])


def resident() -> dict[str, int]:
    """Bytes of this process in memory: of its own, of mapped files, and together."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("Rss", "VmRSS"))}
    return {"own": found["RssAnon"], "mapped": found["RssFile"], "all": found["VmRSS"]}


def convert(tsv: Path, out: Path, note_seconds: float = NOTE_SECONDS) -> None:
    """What is measured; also what the second process does."""
    bottom_up.convert([tsv], out, "train", wanted_from_list(tsv.with_name("ids.txt")), note_seconds=note_seconds)


def bare_copy(tsv: Path, target: Path, size: int) -> None:
    """Read the TSV, write ``size`` bytes of it, and wait for the disk."""
    with tsv.open("rb") as source, target.open("wb") as file:
        while block := source.read(CHUNK):
            file.write(block[: max(0, size - file.tell())])
        file.flush()
        os.fsync(file.fileno())
    target.unlink()


@dataclass
class Clock:
    """Seconds of each round, by the wall and of the processor."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)


def time_turns(tsv: Path, root: Path, rounds: int) -> tuple[Clock, Clock, dict[str, int]]:
    """Seconds of conversion and of bare copy, in turns, and the peak memory of conversion."""
    conversion, copy = Clock(), Clock()
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        shutil.rmtree(root / "whole", ignore_errors=True)
        with Watch() as watch, conversion.running():
            convert(tsv, root / "whole")
        peaks = {kind: max(size, peaks.get(kind, 0)) for kind, size in watch.peak.items()}
        with copy.running():
            bare_copy(tsv, root / "copy", (root / "whole/train_ims.npy").stat().st_size)
        print(conversion, copy, peaks, flush=True)
    return conversion, copy, peaks


def convert_killed(tsv: Path, out: Path) -> int:
    """Kill a second process after its second note, and start it again; returns the pictures it had noted."""
    call = f"from pathlib import Path; from benchmarks import convert_tsv; convert_tsv.convert(Path({str(tsv)!r}), Path({str(out)!r}), 0.5)"
    command, here = [sys.executable, "-c", call], str(Path(__file__).parents[1])
    journal = out / ".train_unfinished" / bottom_up.JOURNAL
    first = subprocess.Popen(command, cwd=here)
    while not journal.exists() and first.poll() is None:
        time.sleep(0.02)
    time.sleep(0.7)
    first.kill()
    if first.wait() != -9:
        raise SystemExit("the second process ended before it could be killed: give it more pictures")
    note = bottom_up.read_json(journal, "a journal")
    filled = bottom_up.Progress.from_json(note["progress"], note["facts"]["rows"]).filled
    subprocess.run(command, cwd=here, check=True)
    return int(filled.sum())


def main() -> None:
    args = start(__doc__, "convert_tsv.json", pictures=2000, rounds=3)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tsv = root / "features.tsv"
        write_tsv(tsv, args.pictures)
        order = np.random.default_rng(1).permutation(np.arange(1, args.pictures + 1)).tolist()
        wanted = Wanted([str(number) for number in order])
        (root / "ids.txt").write_text("".join(f"{name}\n" for name in wanted.ids))
        conversion, copy, peaks = time_turns(tsv, root, args.rounds)
        killed = convert_killed(tsv, root / "killed")
        names = sorted(path.name for path in (root / "whole").iterdir() if path.suffix in (".npy", ".txt", ".json"))
        same = all((root / "whole" / name).read_bytes() == (root / "killed" / name).read_bytes() for name in names)
        sizes = {"tsv": tsv.stat().st_size, "features": (root / "whole/train_ims.npy").stat().st_size}
    what = {
        "pictures": args.pictures,
        "regions": REGIONS,
        "width": WIDTH,
        "bytes": sizes,
        "allocator": ALLOCATOR,
        "note_bytes": bottom_up.NOTE_BYTES,
        "note_seconds": NOTE_SECONDS,
        "seconds": "of each round, by the wall beside other work; conversion with decoding, checks, journal and the disk",
        "rates": "a second: of the median round; a processor second: of the best",
        "peak_bytes": "beyond what the process held before: of its own, of mapped files, and together",
    }
    finish(
        args,
        {
            "what": what,
            "seconds": {"conversion": conversion.wall, "bare copy": copy.wall},
            "processor_seconds": {"conversion": conversion.processor, "bare copy": copy.processor},
            "pictures_a_second": args.pictures / median(conversion.wall),
            "pictures_a_processor_second": args.pictures / min(conversion.processor),
            "tsv_megabytes_a_second": sizes["tsv"] / median(conversion.wall) / 1e6,
            "times_bare_copy": median(a / b for a, b in zip(conversion.wall, copy.wall, strict=True)),
            "peak_bytes": peaks,
            "compared_files": names,
            "killed_after_pictures": killed,
            "killed_and_resumed_same_bytes": same,
        },
    )


if __name__ == "__main__":
    main()
