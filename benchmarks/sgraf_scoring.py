"""SGRAF's scores in tiles against one caption at a time: time and memory of both heads.

1,000 images with 36 regions, width 1,024, 256 numbers a similarity vector, three rounds of reasoning, one thread. The
loop is the way of the public code: each caption with all images at once, every vector built, every node asked in every
round. The public code cuts the images into shards of 100 first, which is kinder to the cache; that loop is timed as well.
All ways score the same captions, in turns, with the same allocator.

    python benchmarks/sgraf_scoring.py        (about ten minutes; writes benchmarks/results/sgraf_scoring.json)
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from scan_scoring import ALLOCATOR, REGIONS, WIDTH, peak_beyond, random_side, sentence_lengths, timed

if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)

import numpy as np
import torch
from torch import Tensor, nn

from itm_utils.files import write_json
from itm_utils.matcher import Images, Texts
from itm_utils.models.sgraf import HEADS, SGRAF, sgraf_by_loop
from itm_utils.scoring import score_all

OUT = Path(__file__).parent / "results" / "sgraf_scoring.json"
SHARD = 100  # images that the public code scores at a time


def side(kind: type, lengths: np.ndarray, rng: torch.Generator) -> Images | Texts:
    """Random unit vectors, local and pooled."""
    items = random_side(kind, lengths, rng)
    items.pooled = nn.functional.normalize(torch.randn(len(lengths), WIDTH, generator=rng), dim=-1)
    return items


@torch.inference_mode()
def by_loop(model: SGRAF, images: Images, texts: Texts, step: int) -> Tensor:
    """The loop over captions, for ``step`` images at a time."""
    parts = [sgraf_by_loop(model, images[row : row + step], texts) for row in range(0, len(images), step)]
    return torch.cat(parts)


def measure(model: SGRAF, images: Images, texts: Texts, rounds: int) -> dict[str, object]:
    """Best processor time of each way, its peak memory beyond the inputs, and how far the ways differ."""
    ways: dict[str, Callable[[], Tensor]] = {
        "tiles": lambda: score_all(model, images, texts, progress=False).i2t,
        "loop": lambda: by_loop(model, images, texts, len(images)),
        "loop in shards": lambda: by_loop(model, images, texts, SHARD),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peak: dict[str, int | None] = {}
    scores: dict[str, Tensor] = {}
    for _ in range(rounds):
        for name, way in ways.items():

            def job(name: str = name, way: Callable[[], Tensor] = way) -> None:
                seconds[name].append(timed(lambda: scores.__setitem__(name, way())))

            peak[name] = peak_beyond(job)
            print(f"{model.config['head']} {name}: {seconds[name][-1]:.1f} s, peak {peak[name]}", flush=True)
    best = {name: min(values) for name, values in seconds.items()}
    difference = max(float((scores["tiles"] - scores[name]).abs().max()) for name in ways)
    return {
        "seconds": best,
        "times_faster": best["loop"] / best["tiles"],
        "times_faster_than_shards": best["loop in shards"] / best["tiles"],
        "largest_difference": difference,
        "peak_bytes_beyond_inputs": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--captions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = side(Images, np.full(args.images, REGIONS), rng)
    texts = side(Texts, lengths, rng)
    heads = {}
    for head in HEADS:
        torch.manual_seed(0)
        model = SGRAF(vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, head=head).eval()
        heads[head] = measure(model, images, texts, args.rounds)
    total = {way: sum(heads[head]["seconds"][way] for head in HEADS) for way in ("tiles", "loop", "loop in shards")}
    result = {
        "what": {
            "images": args.images,
            "captions": args.captions,
            "regions": REGIONS,
            "width": WIDTH,
            "sim_dim": model.config["sim_dim"],
            "rounds_of_reasoning": model.config["steps"],
            "words_mean": round(float(lengths.mean()), 2),
            "shard": SHARD,
            "threads": 1,
            "allocator": ALLOCATOR,
            "seconds": "processor time of one thread; the ways take turns, best of rounds",
        },
        "heads": heads,
        "both": {
            "seconds": total,
            "times_faster": total["loop"] / total["tiles"],
            "times_faster_than_shards": total["loop in shards"] / total["tiles"],
        },
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
