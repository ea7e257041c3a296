"""PFAN's scores by the kernel and by a loop over captions: time and memory in one run, one thread, one allocator.

1,000 images x 5,000 captions, 36 regions, width 1,024. The loop scores one caption at a time and builds every attended
vector; it is timed on some captions and scaled to all by the number of words. Positions are part of the encoder, which
runs once per image, so they are no part of this.

    python -m benchmarks.pfan_scoring        (a few minutes; writes benchmarks/results/pfan_scoring.json)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import (
    REGIONS,
    WIDTH,
    finish,
    peak_beyond,
    random_side,
    sentence_lengths,
    settings,
    some_of,
    start,
    timed,
)
from itm_lab.parity.adapters.pfan import BONUS
from itm_utils.matcher import Images, Texts
from itm_utils.models.pfan import PFAN, score_by_loop
from itm_utils.scoring import score_all

TEMPERATURE = {"t2i": 9.0, "i2t": 4.0}


def published(direction: str) -> dict[str, object]:
    """The published settings of a direction."""
    return {
        "direction": direction,
        "first_norm": "clipped_l2norm",
        "temperature": TEMPERATURE[direction],
        "pooling": "Mean",
        "lse": 6.0,
        "bonus": BONUS[direction],
    }


@torch.inference_mode()
def measure(direction: str, images: Images, texts: Texts, loop_captions: int, rounds: int) -> dict[str, float | None]:
    """Seconds of the kernel on all captions and of the loop on some, best of rounds; largest difference; peak memory."""
    model = PFAN(
        vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, position="none", **published(direction)
    ).eval()
    chosen = some_of(texts, loop_captions)
    part = texts[chosen]
    kept: dict[str, Tensor] = {}
    seconds: dict[str, list[float]] = {"kernel": [], "loop": []}

    def kernel() -> None:
        kept["kernel"] = score_all(model, images, texts, progress=False).i2t

    def loop() -> None:
        kept["loop"] = score_by_loop(images, part, **published(direction))

    peak = None
    for _ in range(rounds):  # in turns: a busy minute of the machine hits both
        seconds["loop"].append(timed(loop))
        peak = peak_beyond(lambda: seconds["kernel"].append(timed(kernel)))
        print(f"{direction}: loop {seconds['loop'][-1]:.1f} s for {len(part)} captions, "
              f"kernel {seconds['kernel'][-1]:.1f} s for all", flush=True)  # fmt: skip
    scale = float(texts.mask.sum() / part.mask.sum())
    return {
        "kernel_seconds": min(seconds["kernel"]),
        "loop_seconds": min(seconds["loop"]) * scale,
        "times_faster": min(seconds["loop"]) * scale / min(seconds["kernel"]),
        "largest_difference": float((kept["kernel"][:, chosen] - kept["loop"]).abs().max()),
        "peak_bytes_beyond_inputs": peak,
    }


def main() -> None:
    args = start(__doc__, "pfan_scoring.json", images=1000, captions=5000, loop_captions=100, rounds=2)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = random_side(Images, np.full(args.images, REGIONS), rng)
    texts = random_side(Texts, lengths, rng)
    result = {
        "what": settings(
            images=args.images,
            captions=args.captions,
            width=WIDTH,
            words_mean=round(float(lengths.mean()), 2),
            loop_captions=args.loop_captions,
            seconds="processor time of one thread; loop and kernel take turns, best of rounds; loop scaled by words",
        ),
        "directions": {d: measure(d, images, texts, args.loop_captions, args.rounds) for d in TEMPERATURE},
    }
    finish(args, result)


if __name__ == "__main__":
    main()
