"""What the regions of a dataset cover: the share of the boxes of its phrases, by kind of region, split by split.

python -m benchmarks.photo_recall --data data/flickr8k     (a minute of one core; writes results/photo_recall.json)
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, finish
from itm_lab.data.disk import read_json
from itm_lab.data.entities import UNMATCHED, entities_grounding
from itm_lab.photos.extract import FACTS
from itm_lab.photos.regions import BOX, CELL, WHOLE, kinds_of
from itm_utils.boxes import iou
from itm_utils.data.precomp import PrecompSplit, open_split

KINDS = {"cells": (CELL,), "boxes": (BOX,), "all": (CELL, BOX, WHOLE)}
OVERLAPS = (0.5, 0.3)


def covered(split: PrecompSplit, wanted: list[np.ndarray]) -> dict[str, dict[str, float]]:
    """Share in percent of the wanted boxes that a region of each kind covers. wanted: (n, 4) of each image."""
    kinds = kinds_of(split)
    best: dict[str, list[np.ndarray]] = {name: [] for name in KINDS}
    for image, boxes in enumerate(wanted):
        if len(boxes):
            overlaps = iou(boxes, split.region_boxes(np.array([image]))[0].astype(np.float64))
            for name, of in KINDS.items():
                chosen = overlaps[:, np.isin(kinds[image], of)]
                best[name].append(chosen.max(axis=1, initial=0))
    values = {name: np.concatenate(some) for name, some in best.items()}
    return {name: {f"{o:g}": 100 * float((some >= o).mean()) for o in OVERLAPS} for name, some in values.items()}


def describe(data: Path, name: str) -> dict:
    """Counts, what was left out, and what is covered."""
    split = open_split(data, name)
    grounding = entities_grounding(data, split)
    own = np.searchsorted(split.owner, np.arange(split.n_images + 1))
    boxes = [
        [phrase.boxes for caption in grounding.phrases[first:end] for phrase in caption] for first, end in pairwise(own)
    ]
    wanted = [np.unique(np.concatenate([np.zeros((0, 4)), *some]), axis=0) for some in boxes]
    return {
        "images": split.n_images,
        "captions": split.n_captions,
        "phrases": sum(map(len, grounding.phrases)),
        "boxed": sum(len(phrase.boxes) > 0 for some in grounding.phrases for phrase in some),
        "boxes": sum(map(len, wanted)),
        "skipped": grounding.skipped,
        "fingerprint": split.identity()["fingerprint"],
        "recall": covered(split, wanted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "photo_recall.json")
    args = parser.parse_args()
    facts = read_json(args.data / FACTS, "the description of features")
    made = {key: value for key, value in facts.items() if key not in ("files", "seal")}
    splits = {name: describe(args.data, name) for name in ("train", "dev", "test")}
    finish(
        args, {"made": made, "kinds": list(KINDS), "overlaps": list(OVERLAPS), "unmatched": UNMATCHED, "splits": splits}
    )


if __name__ == "__main__":
    main()
