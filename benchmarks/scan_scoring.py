"""SCAN's scores at the price of one matrix product: time and memory against the bare product and the loop.

1,000 images x 5,000 captions, 36 regions, width 1,024, one thread. The bare product is all that no method can avoid:
every region times every word. The loop scores one caption at a time and builds every attended vector.

    python -m benchmarks.scan_scoring        (about ten minutes; writes benchmarks/results/scan_scoring.json)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import (
    REGIONS,
    WIDTH,
    bare_product,
    finish,
    random_side,
    sentence_lengths,
    settings,
    some_of,
    start,
    take_turns,
    timed,
)
from itm_utils.matcher import Images, Texts
from itm_utils.models.scan import SCAN, score_by_loop
from itm_utils.scoring import BUDGET, block_shape, score_all

LOOK = {"first_norm": "clipped_l2norm", "temperature": 9.0, "pooling": "LogSumExp", "lse": 6.0}


def matcher(direction: str) -> SCAN:
    return SCAN(vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, direction=direction, **LOOK).eval()


def time_scoring(images: Images, texts: Texts, rounds: int) -> tuple[dict[str, float], dict[str, int | None]]:
    """Seconds for all pairs, and peak memory; the jobs take turns, and the best round of each counts."""
    jobs = {
        "bare product": lambda: bare_product(images, texts, *block_shape(matcher("t2i"), images, texts, BUDGET)),
        "t2i": lambda: score_all(matcher("t2i"), images, texts, progress=False),
        "i2t": lambda: score_all(matcher("i2t"), images, texts, progress=False),
    }
    seconds, peak, _ = take_turns(jobs, rounds)
    return seconds, peak


@torch.inference_mode()
def time_loop(images: Images, texts: Texts, rounds: int, captions: int) -> tuple[dict[str, float], float]:
    """Seconds of the loop on some captions, scaled to all; and its largest difference from the kernel."""
    chosen = some_of(texts, captions)
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
            sides = [replace(side, local=side.local.clone().requires_grad_())
                     for side in (images, texts)]  # fmt: skip
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
    args = start(__doc__, "scan_scoring.json", images=1000, captions=5000, loop_captions=100, rounds=2)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = random_side(Images, np.full(args.images, REGIONS), rng)
    texts = random_side(Texts, lengths, rng)
    batch = images[:128], random_side(Texts, sentence_lengths(128, seed=1), rng)

    backward = time_backward(*batch, rounds=3)
    loop, difference = time_loop(images, texts, args.rounds, args.loop_captions)
    seconds, peak = time_scoring(images, texts, args.rounds)
    result = {
        "what": settings(
            images=args.images,
            captions=args.captions,
            width=WIDTH,
            words_mean=round(float(lengths.mean()), 2),
            words_max=int(lengths.max()),
            loop_captions=args.loop_captions,
            batch=128,
            seconds="processor time of one thread; jobs take turns, best of rounds",
        ),
        "seconds": seconds | {f"loop {direction}": value for direction, value in loop.items()},
        "times_bare_product": {d: seconds[d] / seconds["bare product"] for d in loop},
        "times_faster_than_loop": {d: loop[d] / seconds[d] for d in loop},
        "largest_difference": difference,
        "peak_bytes_beyond_inputs": peak,
        "backward_seconds": backward,
        "backward_times_faster": {d: backward["loop"][d] / backward["kernel"][d] for d in loop},
    }
    finish(args, result)


if __name__ == "__main__":
    main()
