"""Features of 2,000 synthetic photographs: rate, memory, and the same bytes after a kill.

Blurred noise as JPEG files: most of 500 x 375 pixels, one of fifty of 4,000 x 3,000 as a telephone makes them, one of a
hundred cut off in the middle; five captions each. `itm features` with EfficientNet-Lite0 on one thread, in a process of
its own. Then a second process makes the same dataset, is killed on its way, and is started again.

    python -m benchmarks.photo_features   (some minutes, 1 GB of memory, 0.6 GB on disk; writes results/photo_features.json)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import ALLOCATOR, finish, start
from itm_lab.photos import extract as extraction
from itm_lab.photos.network import EfficientNetLite0
from itm_lab.photos.report import IMAGE

PER_PICTURE = 5
WORDS = [
    "a",
    "the",
    "two",
    "three",
    "red",
    "blue",
    "green",
    "dog",
    "cat",
    "man",
    "woman",
    "ball",
    "tree",
    "house",
    "on",
    "in",
    "near",
    "under",
    "runs",
    "sits",
]


def write_data(root: Path, count: int) -> int:
    """Pictures and captions below ``root``; returns the bytes of the pictures."""
    rng = np.random.default_rng(0)
    (root / "photos").mkdir()
    lines, total = [], 0
    for number in range(count):
        size = (4000, 3000) if number % 50 == 7 else (500, 375) if number % 3 else (375, 500)
        coarse = rng.integers(0, 256, size=(24, 32, 3), dtype=np.uint8)
        path = root / "photos" / f"{number:05d}.jpg"
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
        if number % 100 == 42:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        total += path.stat().st_size
        said = (" ".join(rng.choice(WORDS, size=10)) for _ in range(PER_PICTURE))
        lines += [f"{path.name}\t{number} {caption}" for caption in said]
    (root / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return total


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


class Watched(EfficientNetLite0):
    """The network, with a clock for its own seconds and a look at the memory after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.processor, self.peaks, self.before = 0.0, [], resident("VmRSS")

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        begin = time.process_time()
        seen = super().__call__(pixels)
        self.processor += time.process_time() - begin
        self.peaks.append(resident("VmHWM"))
        return seen


def make(root: Path, out: Path, threads: int) -> None:
    """What each process does; it prints what it measured as JSON."""
    torch.set_num_threads(threads)
    network = Watched()
    wall, processor = time.perf_counter(), time.process_time()
    made = extraction.extract(root / "photos", root / "captions.tsv", out, network=network)
    found = {
        "pictures": sum(pictures for pictures, _ in made.splits.values()),
        "left_out": sum(remark.kind == IMAGE for remark in made.remarks),
        "seconds": time.perf_counter() - wall,
        "processor_seconds": {"all": time.process_time() - processor, "network": network.processor},
        "resident_before": network.before,
        "peak_resident": resident("VmHWM"),
        "peak_resident_after_a_tenth": network.peaks[len(network.peaks) // 10],
    }
    print(json.dumps(found))


def command(root: Path, out: Path, threads: int) -> list[str]:
    call = f"photo_features.make(Path({str(root)!r}), Path({str(out)!r}), {threads})"
    return [sys.executable, "-c", f"from pathlib import Path; from benchmarks import photo_features; {call}"]


def make_killed(root: Path, out: Path, threads: int, batches: int) -> int:
    """Kill a second process once it has noted so many batches, and start it again; returns how many it had noted."""
    here, note = Path(__file__).parents[1], out.parent / f".{out.name}.unfinished" / extraction.STATE
    first = subprocess.Popen(command(root, out, threads), cwd=here, stdout=subprocess.DEVNULL)
    while first.poll() is None and (not note.exists() or json.loads(note.read_text())["batches"] < batches):
        time.sleep(0.1)
    first.kill()
    if first.wait() != -9:
        raise SystemExit("the second process ended before it could be killed: give it more pictures")
    noted = json.loads(note.read_text())["batches"]
    subprocess.run(command(root, out, threads), cwd=here, check=True, stdout=subprocess.DEVNULL)
    return noted


def main() -> None:
    args = start(__doc__, "photo_features.json", pictures=2000, threads=1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        size = write_data(root, args.pictures)
        print(f"{args.pictures} pictures, {size / 1e6:.0f} MB", flush=True)
        call = command(root, root / "whole", args.threads)
        told = subprocess.run(call, cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(told.stdout)
        print(found, flush=True)
        noted = make_killed(root, root / "killed", args.threads, args.pictures // extraction.BATCH // 2)
        names = sorted(path.name for path in (root / "whole").iterdir())
        same = names == sorted(path.name for path in (root / "killed").iterdir()) and all(
            (root / "whole" / name).read_bytes() == (root / "killed" / name).read_bytes() for name in names
        )
        written = sum((root / "whole" / name).stat().st_size for name in names)
    what = {
        "pictures": args.pictures,
        "bytes_of_pictures": size,
        "captions": args.pictures * PER_PICTURE,
        "batch": extraction.BATCH,
        "threads": args.threads,
        "allocator": ALLOCATOR,
        "seconds": "by the wall and of the processor, from the folder to the finished dataset; other work on the machine",
    }
    read = found["pictures"] + found["left_out"]
    rates = {
        "pictures_per_second": read / found["seconds"],
        "pictures_per_processor_second": read / found["processor_seconds"]["all"],
        "times_bare_network_processor": found["processor_seconds"]["all"] / found["processor_seconds"]["network"],
        "peak_bytes_beyond_loaded_network": found["peak_resident"] - found["resident_before"],
        "bytes_written": written,
        "killed_after_batches": noted,
        "killed_and_resumed_same_bytes": same,
    }
    finish(args, {"what": what, **found, **rates})


if __name__ == "__main__":
    main()
