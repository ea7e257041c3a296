"""How much room attention metrics have on Scenes: SCAN's F1 after a full training, chance, and attention on the right boxes.

    python -m benchmarks.scenes_headroom                       the design as it stands: results/scenes_headroom.json
    python -m benchmarks.scenes_headroom regions=36 epochs=8   another design or budget, only printed

A design is judged on generator seed 1, which no dataset of the book uses: a converged SCAN should reach an F1 of 45 to 70 at an
overlap of 0.5, attending to every region at most half of that, and attention on the right boxes at least 90. One thread, minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.paths import Paths
from itm_lab.scenes import ScenesSpec, scenes_folder
from itm_lab.scenes.phrases import scenes_grounding
from itm_lab.scenes.world import Knobs
from itm_utils.boxes import iou
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.phrases import Grounding
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import Matcher
from itm_utils.metrics.attention import PhraseAttention, collect_attention
from itm_utils.metrics.retrieval import evaluate
from itm_utils.models.ccr_ccs import build, stages
from itm_utils.scoring import score_split
from itm_utils.training import train

OUT = Path(__file__).parent / "results" / "scenes_headroom.json"
DESIGN_SEED = 1
BASELINE = "ccr_ccs/scenes/scan_baseline"
THRESHOLDS = np.arange(51) / 100
OVERLAPS = (0.4, 0.5, 0.6)


def train_scan(
    spec: ScenesSpec, epochs: int, seed: int = 1
) -> tuple[Matcher, PrecompSplit, WordCaptions, dict[str, Any]]:
    """SCAN as chapter 11's baseline, the test split with its captions, and how its training went."""
    folder = scenes_folder(spec)
    splits = [open_split(folder, name) for name in ("train", "dev", "test")]
    vocabulary = Vocabulary.load(folder / "scenes_vocab.json")
    texts = [WordCaptions(split, vocabulary) for split in splits]
    settings = find_experiment(Paths.find().root, BASELINE).values() | {"epochs": epochs, "seed": seed}
    torch.manual_seed(seed)
    model = build(settings, len(vocabulary), splits[0].feature_dim)
    stage = stages(settings, model)[-1]
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as run:
        result = train(
            model, stage.objective, PairDataset(splits[0], texts[0]), stage.config, run,
            lambda one: evaluate(score_split(one, splits[1], texts[1]), splits[1].owner).as_dict(),
        )  # fmt: skip
    seconds = time.process_time() - begun
    rsum = evaluate(score_split(model, splits[2], texts[2]), splits[2].owner).as_dict()["rsum"]
    dev = [round(record["val_rsum"], 1) for record in result.log if "val_rsum" in record]
    return model, splits[2], texts[2], {"rsum": round(rsum, 1), "dev_rsum": dev, "processor_seconds": round(seconds, 1)}


def room(collected: PhraseAttention, split: PrecompSplit, grounding: Grounding) -> dict[str, dict[str, float]]:
    """Overlap → F1 of the model and its best threshold, F1 of every region, F1 of attention on the best box of each object."""
    found = {}
    best_boxes = replace(collected, weights=on_the_best_boxes(collected, split, grounding))
    for overlap in OVERLAPS:
        quality = collected.quality(THRESHOLDS, iou=overlap)
        threshold, precision, recall, f1 = quality.best
        right = best_boxes.quality([0.0], iou=overlap).best[3]
        shares = {"f1": f1, "precision": precision, "recall": recall, "chance": quality.chance_f1, "right_boxes": right}
        found[str(overlap)] = {name: round(100 * share, 1) for name, share in shares.items()} | {"threshold": threshold}
    return found


def on_the_best_boxes(collected: PhraseAttention, split: PrecompSplit, grounding: Grounding) -> np.ndarray:
    """Weights (n, r) of a word that attends to the region with the largest IoU of each box of its phrase."""
    regions = split.region_boxes(np.arange(split.n_images))
    weights = np.zeros(collected.overlap.shape, dtype=np.float32)
    for row, (caption, number) in enumerate(collected.keys):
        match = iou(regions[split.owner[caption]], grounding.phrases[caption][number].boxes)
        weights[row, match.argmax(axis=0)] = 1.0
    return weights[collected.phrase]


def main(*changes: str) -> None:
    torch.set_num_threads(1)
    given = {name: int(value) for name, _, value in (change.partition("=") for change in changes)}
    epochs, images = given.pop("epochs", 6), given.pop("train", ScenesSpec().train)
    spec = ScenesSpec(DESIGN_SEED, train=images, knobs=replace(Knobs(), **given))
    model, test, texts, result = train_scan(spec, epochs)
    grounding = scenes_grounding("test", spec)
    result |= {
        "epochs": epochs,
        "train": images,
        "attention": room(collect_attention(model, test, texts, grounding), test, grounding),
    }
    print(json.dumps(result, indent=1))
    if not changes:
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
