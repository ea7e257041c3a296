"""ECCV Caption and CxC metrics on COCO's 5K test: ours from the score matrix, against the package ``eccv_caption``.

Both start from the same 5,000 x 25,000 matrix without ties, in one process with one thread. The package takes ranked
lists of ids, so making them is part of its time. Three ways to use it are timed: the lists its documentation asks
for (everything ranked, Python lists), the same lists left as arrays, and lists cut to the longest that these
metrics read, which its own COCO 1K recalls refuse. Ours is the best of three runs, the package runs once. Writes
benchmarks/results/multi_positive.json.

usage: python -m benchmarks.multi_positive     (one thread, 6 GB of memory, a few minutes)
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from itm_lab.data.coco_judgements import COCO_SIZE, coco_extended
from itm_utils.files import write_json
from itm_utils.matcher import Scores

warnings.simplefilter("ignore", UserWarning)
from eccv_caption import Metrics  # noqa: E402  (it warns about an optional reader)

OUT = Path(__file__).parent / "results" / "multi_positive.json"
LONGEST = 48  # the most right candidates of any query in the package's data
Lists = dict[int, list[int] | np.ndarray]


def scores_without_ties(
    captions_of: dict[int, list[int]], image_ids: np.ndarray, caption_ids: np.ndarray
) -> np.ndarray:
    """(i, c) float32: noise, right pairs a little higher, no number twice in a row or in a column."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=COCO_SIZE)
    column = {int(number): position for position, number in enumerate(caption_ids)}
    for row, image in enumerate(image_ids.tolist()):
        scores[row, [column[c] for c in captions_of.get(image, []) if c in column]] += 2.5
    scores = scores.astype(np.float32)
    for _ in range(20):  # 32-bit numbers repeat: nudge what is equal in a row or a column until nothing is
        tied = _tied(scores) | _tied(scores.T).T
        if not tied.any():
            return scores
        scores[tied] += rng.normal(scale=1e-3, size=int(tied.sum())).astype(np.float32)
    raise RuntimeError("ties are left")


def _tied(scores: np.ndarray) -> np.ndarray:
    """(n, m) True where an equal number stands in the same row."""
    tied = np.zeros(scores.shape, dtype=bool)
    for row, values in enumerate(scores):
        order = np.argsort(values)
        same = np.flatnonzero(np.diff(values[order]) == 0)
        tied[row, order[same]] = True
    return tied


def ranked_lists(scores: np.ndarray, queries: np.ndarray, candidates: np.ndarray) -> Lists:
    """Everything ranked for each query, as the package's documentation asks."""
    return {int(q): candidates[np.argsort(-row)].tolist() for q, row in zip(queries, scores, strict=True)}


def ranked_arrays(scores: np.ndarray, queries: np.ndarray, candidates: np.ndarray) -> Lists:
    return {int(q): candidates[np.argsort(-row)] for q, row in zip(queries, scores, strict=True)}


def cut_lists(scores: np.ndarray, queries: np.ndarray, candidates: np.ndarray) -> Lists:
    lists = {}
    for q, row in zip(queries, scores, strict=True):
        top = np.argpartition(row, -LONGEST)[-LONGEST:]
        lists[int(q)] = candidates[top[np.argsort(-row[top])]].tolist()
    return lists


def package_metrics(metrics: Metrics, scores: np.ndarray, ids: tuple, make: Callable[..., Lists]) -> dict[str, float]:
    """The package's numbers, one direction at a time so that its lists fit into memory."""
    images, captions = ids
    found = {}
    for side, arguments in (("i2t", (scores, images, captions)), ("t2i", (scores.T, captions, images))):
        items = {side: make(*arguments)}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
            eccv = metrics.eccv_metrics(items, side)
        names = {"map_at_r": "eccv_map_at_r", "r_precision": "eccv_rprecision", "r1": "eccv_r1"}
        found |= {f"eccv_{side}_{ours}": eccv[theirs][side] for ours, theirs in names.items()}
        found |= {f"cxc_{side}_r{k}": metrics.cxc_recalls(items, side, K=k)[side] for k in (1, 5, 10)}
        del items
    return {name: 100 * float(value) for name, value in found.items()}


def timed(function: Callable, *arguments) -> tuple[float, dict[str, float]]:
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def main() -> None:
    metrics = Metrics()
    caption_ids = metrics.coco_ids
    image_ids = np.array([metrics.coco_gts["t2i"][c][0] for c in caption_ids.tolist()[::5]])
    scores = scores_without_ties(metrics.eccv_gts["i2t"] | metrics.cxc_gts["i2t"], image_ids, caption_ids)
    ids = (image_ids, caption_ids)
    ours, found = min((timed(coco_extended, Scores.same(scores), *ids) for _ in range(3)), key=lambda run: run[0])
    result = {
        "images": COCO_SIZE[0],
        "captions": COCO_SIZE[1],
        "eccv_caption": version("eccv_caption"),
        "ours_seconds": round(ours, 2),
        "metrics": {name: round(value, 4) for name, value in found.items()},
    }
    for name, make in (("cut_lists", cut_lists), ("whole_arrays", ranked_arrays), ("whole_lists", ranked_lists)):
        seconds, expected = timed(package_metrics, metrics, scores, ids, make)
        result[f"package_{name}_seconds"] = round(seconds, 2)
        result[f"ratio_{name}"] = round(seconds / ours, 1)
        result[f"largest_difference_{name}"] = max(abs(found[key] - expected[key]) for key in expected)
        print(name, f"{seconds:.1f} s", result[f"ratio_{name}"], flush=True)
    print("\n".join(f"{name:34} {value}" for name, value in result.items()))
    write_json(OUT, result)


if __name__ == "__main__":
    main()
