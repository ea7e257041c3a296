"""What the scoring benchmarks share: allocator, clock, peak memory, random inputs, arguments and the report.

Every way of scoring in a benchmark gets the same allocator and one thread, and the ways take turns, so that a busy
minute of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from itm_utils.files import write_json
from itm_utils.matcher import Images, Texts, length_mask

# Large temporaries stay in the heap. An allocator reads this when a process starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
REGIONS, WIDTH = 36, 1024
T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"


def start(description: str, report: str, **defaults: int | list[int]) -> argparse.Namespace:
    """The arguments, in a process with the allocator of all benchmarks and one thread.

    defaults: an option and its value each; a list takes one or more numbers. report: name of the JSON in results/.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, value in defaults.items():
        several = {"nargs": "+"} if isinstance(value, list) else {}
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value, **several)
    parser.add_argument("--out", type=Path, default=RESULTS / report)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ALLOCATOR)
    torch.set_num_threads(1)
    return args


def random_side(kind: type, lengths: np.ndarray, rng: torch.Generator, width: int = WIDTH) -> Images | Texts:
    """Random unit vectors; zeros at padding; lengths on the host, as a loader gives them."""
    longest = int(lengths.max())
    local = nn.functional.normalize(torch.randn(len(lengths), longest, width, generator=rng), dim=-1)
    mask = length_mask(torch.from_numpy(lengths), longest)
    local[~mask] = 0
    return kind(local=local, mask=mask, lengths=torch.from_numpy(lengths))


@torch.inference_mode()
def bare_product(images: Images, texts: Texts, rows: int, columns: int) -> None:
    """Every region times every real word, in blocks of so many images and captions."""
    for column in range(0, len(texts), columns):
        words = texts[column : column + columns]
        flat = words.local[words.mask].T
        for row in range(0, len(images), rows):
            images.local[row : row + rows].flatten(0, 1) @ flat


def sentence_lengths(captions: int, seed: int) -> np.ndarray:
    """Start, end and about ten words between them, as in Flickr30K and COCO."""
    return 5 + np.random.default_rng(seed).poisson(7, size=captions)


def timed(job: Callable[[], object]) -> float:
    """Processor seconds of this one thread: other programs on the machine do not count."""
    begin = time.process_time()
    job()
    return time.process_time() - begin


def peak_beyond(job: Callable[[], object]) -> int | None:
    """How far the process grows beyond what it held before, in bytes; None where Linux does not tell."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what is free, or it would hide what is needed
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        return None
    before = _status("VmRSS")
    job()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def take_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, label: str = ""
) -> tuple[dict[str, float], dict[str, int | None], dict[str, T]]:
    """Seconds of each way (the best of its rounds), its peak memory beyond the inputs, and what it returned."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peak: dict[str, int | None] = {}
    found: dict[str, T] = {}
    for _ in range(rounds):
        for name, way in ways.items():

            def job(name: str = name, way: Callable[[], T] = way) -> None:
                seconds[name].append(timed(lambda: found.__setitem__(name, way())))

            peak[name] = peak_beyond(job)
            print(f"{label}{name}: {seconds[name][-1]:.1f} s, peak {peak[name]}", flush=True)
    return {name: min(values) for name, values in seconds.items()}, peak, found


def settings(**more: object) -> dict[str, object]:
    """What was measured: the settings of all benchmarks, and those of this one."""
    return {"regions": REGIONS, "threads": 1, "allocator": ALLOCATOR, **more}


def finish(args: argparse.Namespace, result: dict[str, object]) -> None:
    """Write and print the result, and where it was measured."""
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "system": platform.system(),
    }
    write_json(args.out, result | {"machine": machine})
    print(args.out.read_text(encoding="utf-8"))
