"""Which regions? Cells, boxes of a detector and both, from one or two layers of a network, with and without PCA.

On the first images of Flickr8k's train and dev: the sum of recalls of two quick yardsticks on dev, and the share of the
boxes of Flickr30K Entities that regions cover. Give the public folders, as for `itm data convert flickr8k`:

    python -m benchmarks.photo_regions FOLDER … --work DIR
    python -m benchmarks.photo_regions FOLDER … --work DIR --only cca   (or features, scan, recall; report: what there is)

(half an hour of one core and 3 GB on disk; called again it goes on; writes results/photo_regions.json)
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import photo_cca
from benchmarks.harness import RESULTS, finish
from itm_lab.data.entities import entities_name, read_boxes
from itm_lab.photos import pca
from itm_lab.photos.album import Photo
from itm_lab.photos.detector import open_detector
from itm_lab.photos.flickr8k import Public, read_public, unpacked
from itm_lab.photos.image_files import read_image
from itm_lab.photos.network import EfficientNetLite0, MapNetwork, grid_boxes, open_network
from itm_lab.photos.regions import DETAIL, SIDE, squared
from itm_lab.photos.roi_align import pool_boxes
from itm_utils.boxes import iou
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.files import atomic, write_json, write_text
from itm_utils.metrics.retrieval import evaluate
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.scoring import score_split
from itm_utils.training import TrainConfig, train

CELLS, MOST, BATCH = 36, 100, 16  # cells; boxes that are kept for the recall; images at once
SEEN = 36  # boxes of each image that get features
LAYERS = {"last": slice(0, 1), "both": slice(0, 2)}
RIDGES, POWERS = (0.1, 1, 10), (0.5, 1, 2)
OVERLAPS = (0.5, 0.3)
FOUND, COVERED = "found.json", "recall.json"
SETTINGS = {"epochs": 8, "batch_size": 64, "learning_rate": 0.002, "width": 128, "word_dim": 128, "warmup_epochs": 1}


class Variant(NamedTuple):
    """Regions and what is known of them. cells: 0, or the pixels of the image that the network sees."""

    network: str
    cells: int
    boxes: int
    layers: str
    components: int = 0
    scan: bool = False

    def __str__(self) -> str:
        cells = f"{CELLS} cells at {self.cells} px" if self.cells else ""
        boxes = f"{self.boxes} boxes" if self.boxes else ""
        left = f", {self.components} components" if self.components else ""
        return f"{' and '.join(filter(None, (cells, boxes)))}, {self.network}, {self.layers} layer{'s' * (self.layers == 'both')}{left}"


VARIANTS = [
    Variant("lite0", 192, 0, "last", scan=True),
    Variant("lite0", SIDE, 0, "last", scan=True),
    Variant("lite0", SIDE, 0, "both"),
    Variant("lite0", 0, 12, "last"),
    Variant("lite0", 0, 36, "last", scan=True),
    Variant("lite0", 0, 36, "both"),
    Variant("lite0", 192, 12, "last"),
    Variant("lite0", SIDE, 12, "last", scan=True),
    Variant("lite0", SIDE, 12, "last", 512, scan=True),
    Variant("lite0", SIDE, 12, "last", 256),
    Variant("lite0", SIDE, 12, "both", scan=True),
    Variant("lite0", SIDE, 12, "both", 512),
    Variant("lite2", SIDE, 12, "last"),
    Variant("lite2", SIDE, 12, "both", scan=True),
    Variant("lite2", SIDE, 12, "both", 512),
]


class Part:
    """Some images of each split, and a folder in which everything is kept. sizes: images of each split."""

    def __init__(self, public: Public, sizes: dict[str, int], work: Path) -> None:
        self.public, self.work = public, work
        self.photos = {split: public.splits[split][:count] for split, count in sizes.items()}
        work.mkdir(parents=True, exist_ok=True)

    def kept(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array that is made once, and the processor seconds it took beside it."""
        path = self.work / f"{name}.npy"
        if not path.exists():
            begin = time.process_time()
            array = make()
            write_json(path.with_suffix(".json"), {"seconds": time.process_time() - begin, "images": len(array)})
            with atomic(path) as temporary, temporary.open("wb") as file:
                np.save(file, array)
        return np.load(path, mmap_mode="r")

    def boxes(self, split: str) -> np.ndarray:
        """(i, MOST, 4) in shares, best first; what a detector did not find is a box of no size."""
        detector = open_detector("yolox_nano")

        def make() -> np.ndarray:
            found = np.zeros((len(self.photos[split]), MOST, 4), dtype=np.float32)
            for row, photo in zip(found, self.photos[split], strict=True):
                some = detector(read_image(photo.path, DETAIL).pixels, MOST)
                row[: len(some)] = some
            return found

        return self.kept(f"{split}_boxes", make)

    def maps(self, split: str, network: str) -> list[np.ndarray]:
        """For each layer of a network (i, 72, d): the cells and the best boxes."""
        both = self.kept(
            f"{split}_{network}",
            lambda: pooled(
                self.photos[split], self.boxes(split)[:, :SEEN], lambda: open_network(network, SIDE, earlier=True)
            ),
        )
        last = 1280
        return [both[..., :last], both[..., last:]]

    def small(self, split: str) -> np.ndarray:
        """(i, 36, d) the cells as the network sees them in a small image."""

        def make() -> np.ndarray:
            network = EfficientNetLite0()
            parts = [
                network(np.stack([squared(read_image(photo.path, DETAIL).pixels, network.side) for photo in some]))
                for some in batches(self.photos[split])
            ]
            return np.concatenate(parts).astype(np.float16)

        return self.kept(f"{split}_small", make)

    def features(self, split: str, variant: Variant) -> np.ndarray:
        """(i, r, d) float16 of a variant, before components."""
        layers = self.maps(split, variant.network)[LAYERS[variant.layers]]
        cells = [self.small(split)] if variant.cells == 192 else [layer[:, :CELLS] for layer in layers]
        boxes = [layer[:, CELLS : CELLS + variant.boxes] for layer in layers]
        parts = ([cells] if variant.cells else []) + ([boxes] if variant.boxes else [])
        return np.concatenate([np.concatenate(part, axis=2) for part in parts], axis=1)

    def write(self, variant: Variant) -> Path:
        """A dataset of a variant."""
        folder = self.work / "dataset"
        folder.mkdir(exist_ok=True)
        features, components, captions = {split: self.features(split, variant) for split in self.photos}, None, []
        if variant.components:
            train = features["train"]
            widths = [layer.shape[2] for layer in self.maps("train", variant.network)[LAYERS[variant.layers]]]
            components = pca.fit(
                train.reshape(-1, train.shape[2])[:: max(1, len(train) // pca.FIT_IMAGES)], widths, variant.components
            )
        for split, photos in self.photos.items():
            values = (
                features[split] if components is None else pca.project(features[split].astype(np.float32), components)
            )
            np.save(folder / f"{split}_ims.npy", values.astype(np.float16))
            np.save(
                folder / f"{split}_owners.npy", np.repeat(np.arange(len(photos)), [len(p.captions) for p in photos])
            )
            said = [caption for photo in photos for caption in photo.captions]
            write_text(folder / f"{split}_caps.txt", "".join(f"{caption}\n" for caption in said))
            captions += said
        Vocabulary.build(captions).save(folder / "part_vocab.json")
        return folder


def batches(photos: Sequence[Photo]) -> list[Sequence[Photo]]:
    return [photos[start : start + BATCH] for start in range(0, len(photos), BATCH)]


def pooled(photos: Sequence[Photo], boxes: np.ndarray, opened: Callable[[], MapNetwork]) -> np.ndarray:
    """(i, 72, d) float16: all layers side by side, over the cells and the given boxes (i, 36, 4)."""
    network = opened()
    found = np.empty((len(photos), CELLS + boxes.shape[1], sum(network.widths)), dtype=np.float16)
    for first in range(0, len(photos), BATCH):
        some = photos[first : first + BATCH]
        pixels = np.stack([squared(read_image(photo.path, DETAIL).pixels, network.side) for photo in some])
        cells = np.tile(grid_boxes(), (len(some), 1, 1))
        regions = torch.from_numpy(np.concatenate([cells, boxes[first : first + BATCH]], axis=1)).float()
        with torch.inference_mode():
            found[first : first + BATCH] = torch.cat(
                [pool_boxes(each, regions) for each in network(pixels)], dim=2
            ).numpy()
    return found


def recall(part: Part, split: str = "dev") -> dict[str, dict[str, float]]:
    """Share in percent of the annotated boxes that some region covers, by the overlap that is asked for."""
    boxes, photos = part.boxes(split), part.photos[split]
    whole, cells = np.array([[0.0, 0.0, 1.0, 1.0]]), grid_boxes()
    kinds: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "36 cells": lambda found: cells,
        "best 12 boxes": lambda found: found[:12],
        "36 cells and best 12 boxes": lambda found: np.concatenate([cells, found[:12]]),
        "36 cells, best 11 boxes and the whole image": lambda found: np.concatenate([cells, found[:11], whole]),
        "best 36 boxes": lambda found: found[:36],
        "best 35 boxes and the whole image": lambda found: np.concatenate([found[:35], whole]),
        "best 100 boxes": lambda found: found,
    }
    best: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    assert part.public.entities is not None  # without annotations there is nothing to cover
    with unpacked(part.public.entities, {entities_name(photo.name) for photo in photos}) as folder:
        for photo, found in zip(photos, boxes, strict=True):
            size = np.array(read_image(photo.path, DETAIL).size)
            path = folder / "Annotations" / f"{entities_name(photo.name)}.xml"
            if chains := read_boxes(path, size, Counter()):
                wanted = np.unique(np.concatenate([*chains.values()]), axis=0) / np.tile(size, 2)
                for kind, regions in kinds.items():
                    best[kind].append(iou(wanted, regions(found).astype(np.float64)).max(axis=1))
    covered = {kind: np.concatenate(values) for kind, values in best.items()}
    return {
        kind: {f"{overlap:g}": 100 * float((values >= overlap).mean()) for overlap in OVERLAPS}
        | {"annotated": len(values)}
        for kind, values in covered.items()
    }


def cca(folder: Path) -> float:
    """rsum on dev of canonical correlation between mean regions and weighted bags of words."""
    splits = {name: open_split(folder, name) for name in ("train", "dev")}
    texts = photo_cca.weighted_bags(splits, folder)
    sides = {name: photo_cca.Sides(photo_cca.mean_regions(s), texts[name], s.owner) for name, s in splits.items()}
    known, best = photo_cca.covariances(sides["train"]), 0.0
    for ridge, word_ridge in product(RIDGES, RIDGES[:2]):
        maps = photo_cca.directions(known, ridge, word_ridge)
        for power in POWERS:
            scores = photo_cca.scores_of(sides["dev"], known, maps, power)
            best = max(best, evaluate(scores, sides["dev"].owner).rsum)
    return best


def scan(folder: Path, runs: Path, seed: int = 0) -> float:
    """rsum on dev of SCAN t2i AVG after the last epoch."""
    splits, vocabulary = {name: open_split(folder, name) for name in ("train", "dev")}, Vocabulary.of_folder(folder)
    texts = {name: WordCaptions(split, vocabulary) for name, split in splits.items()}
    torch.manual_seed(seed)
    sizes = {name: SETTINGS[name] for name in ("width", "word_dim")}
    model = SCAN(len(vocabulary), splits["train"].feature_dim, pooling="Mean", **sizes)
    given = {name: SETTINGS[name] for name in ("epochs", "batch_size", "learning_rate")}
    config = TrainConfig(**given, schedule="cosine", decay_every=SETTINGS["epochs"], seed=seed, device="cpu")
    objective = HingeTriplet(0.2, hardest=True, warmup_epochs=SETTINGS["warmup_epochs"])
    train(model, objective, PairDataset(splits["train"], texts["train"]), config, runs)
    return evaluate(score_split(model, splits["dev"], texts["dev"]), splits["dev"].owner).rsum


def measure(part: Part, only: str) -> dict[str, dict]:
    """Every variant by CCA, some by SCAN; what was measured before is read."""
    path = part.work / FOUND
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for variant in VARIANTS:
        row = found.setdefault(str(variant), {})
        jobs = {"cca": True, "scan": variant.scan}
        todo = [job for job, wanted in jobs.items() if wanted and job not in row and only in ("", job)]
        if not todo:
            continue
        folder = part.write(variant)
        for job in todo:
            begin = time.process_time()
            place = part.work / "runs" / str(variant).replace(" ", "_").replace(",", "")
            row[job] = cca(folder) if job == "cca" else scan(folder, place)
            row[f"{job}_seconds"] = time.process_time() - begin
            row["width"], row["regions"] = (
                int(side) for side in np.load(folder / "dev_ims.npy", mmap_mode="r").shape[:0:-1]
            )
            print(f"{variant}: {job} {row[job]:.1f} ({row[f'{job}_seconds']:.0f} s)", flush=True)
            write_json(path, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="the public folders")
    parser.add_argument("--work", type=Path, required=True, help="where features and datasets are kept")
    parser.add_argument("--images", type=int, nargs=2, default=(2000, 500), metavar=("TRAIN", "DEV"))
    parser.add_argument("--only", choices=("features", "recall", "cca", "scan", "report"), default="")
    parser.add_argument("--out", type=Path, default=RESULTS / "photo_regions.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    part = Part(read_public(args.folders), dict(zip(("train", "dev"), args.images, strict=True)), args.work)
    if args.only in ("", "features"):
        for network, split in product(("lite0", "lite2"), part.photos):
            part.maps(split, network)
            part.small(split)
    if args.only in ("", "cca", "scan"):
        measure(part, args.only)
    if args.only in ("", "recall"):
        write_json(args.work / COVERED, recall(part))
    if args.only in ("", "report"):
        report(args, part)


def report(args: argparse.Namespace, part: Part) -> None:
    """What has been measured so far."""
    covered, found = (json.loads((args.work / name).read_text(encoding="utf-8")) for name in (COVERED, FOUND))
    made = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.work.glob("*_*.json"))}
    what = {split: len(photos) for split, photos in part.photos.items()}
    what |= {"scan": SETTINGS, "seed": 0, "pixels": SIDE, "ridges": RIDGES, "powers": POWERS}
    finish(
        args, {"what": what, "recall": covered, "rsum": {name: row for name, row in found.items() if row}, "made": made}
    )


if __name__ == "__main__":
    main()
