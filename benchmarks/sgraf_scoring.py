"""SGRAF's scores in blocks against one caption at a time: time and memory of both heads.

1,000 images with 36 regions, width 1,024, similarity vectors of 256 dimensions, three reasoning steps, one thread. The
loop is the way of the public code: each caption with all images at once, every vector built, every node updated in every
step. The public code cuts the images into shards of 100 first, which is kinder to the cache; that loop is timed as well.
All ways score the same captions, in turns, with the same allocator. A training step scores a batch in training mode and goes
back through it, by the class and by the loop (whose SAF takes running statistics, which is less work).

    python -m benchmarks.sgraf_scoring        (about ten minutes; writes benchmarks/results/sgraf_scoring.json)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import REGIONS, WIDTH, finish, random_side, sentence_lengths, settings, start, take_turns
from itm_utils.matcher import Images, Texts
from itm_utils.models.sgraf import HEADS, SGRAF, score_by_loop
from itm_utils.scoring import score_all

SHARD = 100  # images that the public code scores at a time


def side(kind: type, lengths: np.ndarray, rng: torch.Generator) -> Images | Texts:
    """Random unit vectors, local and pooled."""
    items = random_side(kind, lengths, rng)
    items.pooled = nn.functional.normalize(torch.randn(len(lengths), WIDTH, generator=rng), dim=-1)
    return items


@torch.inference_mode()
def by_loop(model: SGRAF, images: Images, texts: Texts, step: int) -> Tensor:
    """The loop over captions, for ``step`` images at a time."""
    parts = [score_by_loop(model, images[row : row + step], texts) for row in range(0, len(images), step)]
    return torch.cat(parts)


def measure(model: SGRAF, images: Images, texts: Texts, rounds: int) -> dict[str, object]:
    """Best processor time of each way, its peak memory beyond the inputs, and how far the ways differ."""
    ways: dict[str, Callable[[], Tensor]] = {
        "tiles": lambda: score_all(model, images, texts, progress=False).i2t,
        "loop": lambda: by_loop(model, images, texts, len(images)),
        "loop in shards": lambda: by_loop(model, images, texts, SHARD),
    }
    best, peak, scores = take_turns(ways, rounds, label=f"{model.config['head']} ")
    difference = max(float((scores["tiles"] - scores[name]).abs().max()) for name in ways)
    return {
        "seconds": best,
        "times_faster": best["loop"] / best["tiles"],
        "times_faster_than_shards": best["loop in shards"] / best["tiles"],
        "largest_difference": difference,
        "peak_bytes_beyond_inputs": peak,
    }


def measure_step(model: SGRAF, images: Images, texts: Texts, rounds: int) -> dict[str, object]:
    """Seconds and peak memory of scores and gradients of one batch, by the class and by the loop, in turns."""

    def step(score: Callable[[Images, Texts], Tensor]) -> None:
        model.zero_grad()
        sides = [
            replace(side, local=side.local.clone().requires_grad_(), pooled=side.pooled.clone().requires_grad_())
            for side in (images, texts)
        ]
        score(*sides).sum().backward()

    ways = {
        "class": lambda: step(lambda i, t: model.score(i, t).i2t),
        "loop": lambda: step(lambda i, t: score_by_loop(model, i, t)),
    }
    model.train()
    best, peak, _ = take_turns(ways, rounds, label=f"{model.config['head']} step, ")
    model.eval()
    return {"seconds": best, "times_faster": best["loop"] / best["class"], "peak_bytes_beyond_inputs": peak}


def main() -> None:
    args = start(__doc__, "sgraf_scoring.json", images=1000, captions=100, batch=128, rounds=2)
    rng = torch.Generator().manual_seed(0)
    lengths = sentence_lengths(args.captions, seed=0)
    images = side(Images, np.full(args.images, REGIONS), rng)
    texts = side(Texts, lengths, rng)
    batch = images[: args.batch], side(Texts, sentence_lengths(args.batch, seed=1), rng)
    heads: dict[str, dict[str, Any]] = {}
    for head in HEADS:
        torch.manual_seed(0)
        model = SGRAF(vocabulary_size=4, image_dim=4, width=WIDTH, word_dim=4, head=head).eval()
        heads[head] = measure(model, images, texts, args.rounds)
        heads[head]["training step"] = measure_step(model, *batch, args.rounds)
    total = {way: sum(heads[head]["seconds"][way] for head in HEADS) for way in ("tiles", "loop", "loop in shards")}
    result = {
        "what": settings(
            images=args.images,
            captions=args.captions,
            width=WIDTH,
            sim_dim=model.config["sim_dim"],
            rounds_of_reasoning=model.config["steps"],
            words_mean=round(float(lengths.mean()), 2),
            shard=SHARD,
            batch=args.batch,
            seconds="processor time of one thread; the ways take turns, best of rounds",
        ),
        "heads": heads,
        "both": {
            "seconds": total,
            "times_faster": total["loop"] / total["tiles"],
            "times_faster_than_shards": total["loop in shards"] / total["tiles"],
        },
    }
    finish(args, result)


if __name__ == "__main__":
    main()
