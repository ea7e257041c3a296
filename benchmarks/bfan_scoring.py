"""BFAN's scores against one caption at a time: time and memory, both focal types, one thread.

1,000 images x 5,000 captions, 36 regions, width 1,024; sizes, allocator and clock are those of harness.py. The
bare product, every region times every word, is all that no method can avoid. The loop builds every attended vector of both directions. It drops keys by the same two sums as the kernel, so it is faster
than one that compares every pair of keys.

    python -m benchmarks.bfan_scoring        (about ten minutes; writes benchmarks/results/bfan_scoring.json)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import (
    REGIONS,
    WIDTH,
    bare_product,
    finish,
    peak_beyond,
    random_side,
    sentence_lengths,
    settings,
    some_of,
    start,
    timed,
)
from itm_utils.matcher import Images, Texts
from itm_utils.models.bfan import BFAN, score_by_loop
from itm_utils.scoring import BUDGET, block_shape, score_all

TEMPERATURE = 20.0
FOCALS = ("equal", "prob")


def matcher(focal: str) -> BFAN:
    return BFAN(vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, focal=focal, temperature=TEMPERATURE).eval()


@torch.inference_mode()
def time_one(focal: str, images: Images, texts: Texts, part: Texts, rounds: int) -> dict[str, float | int | None]:
    """Loop on some captions (scaled by words to all) and kernel on all, in turns; the best round of each counts."""
    scale = float(texts.mask.sum() / part.mask.sum())
    seconds: dict[str, list[float]] = {"loop": [], "kernel": [], "bare product": []}
    shape = block_shape(matcher(focal), images, texts, BUDGET)
    by_loop: list[Tensor] = []
    peak = None
    for _ in range(rounds):
        seconds["loop"].append(scale * timed(lambda: by_loop.append(score_by_loop(images, part, TEMPERATURE, focal))))
        peak = peak_beyond(
            lambda: seconds["kernel"].append(timed(lambda: score_all(matcher(focal), images, texts, progress=False)))
        )
        seconds["bare product"].append(timed(lambda: bare_product(images, texts, *shape)))
        print(focal, {name: round(values[-1], 1) for name, values in seconds.items()}, f"peak {peak}", flush=True)
    ours = score_all(matcher(focal), images, part, progress=False).i2t
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "loop_seconds": best["loop"],
        "kernel_seconds": best["kernel"],
        "times_faster": best["loop"] / best["kernel"],
        "times_bare_product": best["kernel"] / best["bare product"],
        "peak_bytes_beyond_inputs": peak,
        "largest_difference": float((by_loop[0] - ours).abs().max()),
    }


def main() -> None:
    args = start(__doc__, "bfan_scoring.json", images=1000, captions=5000, loop_captions=100, rounds=1)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = random_side(Images, np.full(args.images, REGIONS), rng)
    texts = random_side(Texts, lengths, rng)
    part = texts[some_of(texts, args.loop_captions)]
    result = {
        "what": settings(
            images=args.images,
            captions=args.captions,
            width=WIDTH,
            words_mean=round(float(lengths.mean()), 2),
            words_max=int(lengths.max()),
            loop_captions=args.loop_captions,
            rounds=args.rounds,
            seconds="processor time of one thread; loop and kernel take turns, best of rounds; the loop is scaled",
        ),
        **{focal: time_one(focal, images, texts, part, args.rounds) for focal in FOCALS},
    }
    finish(args, result)


if __name__ == "__main__":
    main()
