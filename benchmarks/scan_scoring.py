"""SCAN's scores at the price of one matrix product: time and memory against the bare product and the loop.

1,000 images x 5,000 captions, 36 regions, width 1,024, one thread. The bare product is all that no method can avoid:
every region times every word. The loop scores one caption at a time and builds every attended vector.

    python benchmarks/scan_scoring.py        (about ten minutes; writes benchmarks/results/scan_scoring.json)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

# The same allocator for all: large temporaries stay in the heap. It has to be set before the process starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from itm_utils.files import write_json  # noqa: E402
from itm_utils.matcher import Images, Texts, length_mask  # noqa: E402
from itm_utils.models.scan import SCAN, score_by_loop  # noqa: E402
from itm_utils.scoring import BUDGET, block_shape, score_all  # noqa: E402

OUT = Path(__file__).parent / "results" / "scan_scoring.json"
REGIONS, WIDTH = 36, 1024
LOOK = {"first_norm": "clipped_l2norm", "temperature": 9.0, "pooling": "LogSumExp", "lse": 6.0}


def random_side(kind: type, lengths: np.ndarray, rng: torch.Generator) -> Images | Texts:
    """Random unit vectors; zeros at padding."""
    width = int(lengths.max())
    local = nn.functional.normalize(torch.randn(len(lengths), width, WIDTH, generator=rng), dim=-1)
    mask = length_mask(torch.from_numpy(lengths), width)
    local[~mask] = 0
    return kind(local=local, mask=mask)


def sentence_lengths(captions: int, seed: int) -> np.ndarray:
    """Start, end and about ten words between them, as in Flickr30K and COCO."""
    return 5 + np.random.default_rng(seed).poisson(7, size=captions)


def matcher(direction: str) -> SCAN:
    return SCAN(vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, direction=direction, **LOOK).eval()


@torch.inference_mode()
def bare_product(images: Images, texts: Texts) -> None:
    """Every region times every real word, in blocks of the size that scoring uses."""
    rows, columns = block_shape(matcher("t2i"), images, texts, BUDGET)
    for column in range(0, len(texts), columns):
        words = texts[column : column + columns]
        flat = words.local[words.mask].T
        for row in range(0, len(images), rows):
            images.local[row : row + rows].flatten(0, 1) @ flat


def timed(job: Callable[[], object]) -> float:
    """Processor seconds of this one thread: other programs on the machine do not count."""
    start = time.process_time()
    job()
    return time.process_time() - start


def peak_beyond(job: Callable[[], object]) -> int | None:
    """How far the process grows beyond what it held before, in bytes (Linux only)."""
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


def time_scoring(images: Images, texts: Texts, rounds: int) -> tuple[dict[str, float], dict[str, int | None]]:
    """Seconds for all pairs, and peak memory; the jobs take turns, and the best round of each counts."""
    jobs = {
        "bare product": lambda: bare_product(images, texts),
        "t2i": lambda: score_all(matcher("t2i"), images, texts, progress=False),
        "i2t": lambda: score_all(matcher("i2t"), images, texts, progress=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    peak: dict[str, int | None] = {}
    for _ in range(rounds):
        for name, job in jobs.items():
            peak[name] = peak_beyond(lambda job=job, name=name: seconds[name].append(timed(job)))
            print(f"{name}: {seconds[name][-1]:.1f} s, peak {peak[name]}", flush=True)
    return {name: min(values) for name, values in seconds.items()}, peak


@torch.inference_mode()
def time_loop(images: Images, texts: Texts, rounds: int, captions: int) -> tuple[dict[str, float], float]:
    """Seconds of the loop on some captions, scaled to all; and its largest difference from the kernel."""
    chosen = torch.arange(0, len(texts), len(texts) // captions)[:captions]
    part = texts[chosen]
    scale = float(texts.mask.sum() / part.mask.sum())  # by words: the slice may be a little shorter or longer
    seconds, difference = {}, 0.0
    for direction in ("t2i", "i2t"):
        results: list[Tensor] = []
        best = min(
            timed(lambda d=direction, r=results: r.append(score_by_loop(images, part, d, **LOOK)))
            for _ in range(rounds)
        )
        seconds[direction] = best * scale
        ours = score_all(matcher(direction), images, part, progress=False).i2t
        difference = max(difference, float((results[0] - ours).abs().max()))
        print(f"loop {direction}: {best:.1f} s for {len(chosen)} captions", flush=True)
    return seconds, difference


def time_backward(images: Images, texts: Texts, rounds: int) -> dict[str, dict[str, float]]:
    """Score a batch and go back through it."""
    seconds: dict[str, dict[str, float]] = {"kernel": {}, "loop": {}}
    for direction in ("t2i", "i2t"):
        model = matcher(direction)

        def run(score: Callable[[Images, Texts], Tensor]) -> None:
            sides = [kind(local=side.local.clone().requires_grad_(), mask=side.mask)
                     for kind, side in ((Images, images), (Texts, texts))]  # fmt: skip
            score(*sides).sum().backward()

        ways = {
            "kernel": lambda i, t, model=model: model.score(i, t).i2t,
            "loop": lambda i, t, d=direction: score_by_loop(i, t, d, **LOOK),
        }
        for name, way in ways.items():
            tries = rounds if name == "kernel" else max(1, rounds // 2)
            seconds[name][direction] = min(timed(lambda way=way: run(way)) for _ in range(tries))
        print(f"score and backward {direction}:", {n: round(s[direction], 2) for n, s in seconds.items()}, flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--captions", type=int, default=5000)
    parser.add_argument("--loop-captions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = random_side(Images, np.full(args.images, REGIONS), rng)
    texts = random_side(Texts, lengths, rng)
    batch = images[:128], random_side(Texts, sentence_lengths(128, seed=1), rng)

    backward = time_backward(*batch, rounds=3)
    loop, difference = time_loop(images, texts, args.rounds, args.loop_captions)
    seconds, peak = time_scoring(images, texts, args.rounds)
    result = {
        "what": {
            "images": args.images,
            "captions": args.captions,
            "regions": REGIONS,
            "width": WIDTH,
            "words_mean": round(float(lengths.mean()), 2),
            "words_max": int(lengths.max()),
            "loop_captions": args.loop_captions,
            "batch": 128,
            "threads": 1,
            "allocator": ALLOCATOR,
            "seconds": "processor time of one thread; jobs take turns, best of rounds",
        },
        "seconds": seconds | {f"loop {direction}": value for direction, value in loop.items()},
        "times_bare_product": {d: seconds[d] / seconds["bare product"] for d in loop},
        "times_faster_than_loop": {d: loop[d] / seconds[d] for d in loop},
        "largest_difference": difference,
        "peak_bytes_beyond_inputs": peak,
        "backward_seconds": backward,
        "backward_times_faster": {d: backward["loop"][d] / backward["kernel"][d] for d in loop},
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "system": platform.system(),
        },
    }
    write_json(args.out, result)
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
