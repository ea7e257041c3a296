"""The computed part of the pages on datasets: which regions of photographs were measured, and what the chosen ones cover."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from itm_lab.publish.markdown import table

MEASURED, DATASET = "benchmarks/results/photo_regions.json", "benchmarks/results/photo_recall.json"
RECALL_HEADS = ["regions of an image", "annotated boxes covered at IoU 0.5", "at IoU 0.3"]
RSUM_HEADS = ["regions", "width", "CCA", "SCAN"]


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    found = json.loads((root / MEASURED).read_text(encoding="utf-8"))
    yield from recall(found)
    yield from rsum(found)
    yield cost(found["made"])
    if (root / DATASET).is_file():
        yield from dataset(json.loads((root / DATASET).read_text(encoding="utf-8")))


def recall(found: Mapping[str, Any]) -> Iterator[str]:
    """What share of the annotated boxes some region covers."""
    rows = [[kind, f"{share['0.5']:.1f} %", f"{share['0.3']:.1f} %"] for kind, share in found["recall"].items()]
    number = next(iter(found["recall"].values()))["annotated"]
    yield f"On {found['what']['dev']:,} images of dev with {number:,} annotated boxes (`{MEASURED}`):\n"
    yield from table(RECALL_HEADS, rows)


def rsum(found: Mapping[str, Any]) -> Iterator[str]:
    """The sum of recalls of two quick models on dev, for each kind of regions."""
    what, rows = found["what"], []
    for name, row in sorted(found["rsum"].items(), key=lambda item: -item[1].get("cca", 0)):
        rows.append(
            [name, f"{row['width']:,}", *(f"{row[name]:.0f}" if name in row else "–" for name in ("cca", "scan"))]
        )
    trained, settings = any("scan" in row for row in found["rsum"].values()), what["scan"]
    yield f"The sum of recalls on {what['dev']:,} images of dev after learning from {what['train']:,}, of regularised CCA between mean "
    if trained:
        yield f"regions and words, and of SCAN t2i AVG ({settings['epochs']} epochs, width {settings['width']}, one seed: a few points are noise) "
    else:
        yield "regions and words "
    yield f"(`{MEASURED}`):\n"
    heads = RSUM_HEADS if trained else RSUM_HEADS[:-1]
    yield from table(heads, [row[: len(heads)] for row in rows])


def cost(made: Mapping[str, Any]) -> str:
    """Processor time of detector and network."""
    seconds = sum(made[name]["seconds"] / made[name]["images"] for name in ("train_boxes", "train_lite0"))
    return f"To find boxes and to compute both layers of Lite0 takes {seconds:.2f} s of one core per image, {1 / seconds:.0f} images a second.\n"


def dataset(found: Mapping[str, Any]) -> Iterator[str]:
    """What the whole dataset holds."""
    splits = found["splits"]
    captions, phrases, boxed = (
        sum(split[key] for split in splits.values()) for key in ("captions", "phrases", "boxed")
    )
    unmatched = sum(split["skipped"].get(found["unmatched"], 0) for split in splits.values())
    yield f"The whole dataset, as `{DATASET}` counts it: {captions:,} captions, {captions - unmatched:,} of which stand in "
    yield f"Flickr30K Entities with the same letters; {phrases:,} phrases, {boxed:,} with a box.\n"
    heads = ["split", "images", *(f"{kind}, IoU {overlap}" for kind in found["kinds"] for overlap in found["overlaps"])]
    rows = [
        [
            name,
            f"{split['images']:,}",
            *(
                f"{split['recall'][kind][str(overlap)]:.1f} %"
                for kind in found["kinds"]
                for overlap in found["overlaps"]
            ),
        ]
        for name, split in splits.items()
    ]
    yield from table(heads, rows)
