"""What is in the shipped little world, how good its frozen features are, and what it costs to build.

    python -m benchmarks.scenes_dataset          writes results/scenes_dataset.json

Builds the dataset into an empty folder (timed), counts what is in it, asks the oracle, and trains linear probes on
the frozen features of ground-truth and of background boxes. One thread, a few minutes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from itm_lab.scenes import ScenesSpec, load_scenes, oracle_matrix, scenes_folder
from itm_lab.scenes.build import PROPOSAL_STREAM, SPLITS
from itm_lab.scenes.draw import draw, toy_boxes
from itm_lab.scenes.families import sample_split
from itm_lab.scenes.features import WEIGHTS, load_net, region_features
from itm_lab.scenes.oracle import ceiling
from itm_lab.scenes.phrases import scenes_grounding
from itm_lab.scenes.portable_random import PortableRandom
from itm_lab.scenes.proposals import propose
from itm_lab.scenes.world import ATTRIBUTES
from itm_utils.boxes import iou
from itm_utils.cache import read_manifest
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.metrics.attention import collect_attention
from itm_utils.models.scan import SCAN

OUT = Path(__file__).parent / "results" / "scenes_dataset.json"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ITM_CACHE"] = cache
        start, used = time.perf_counter(), time.process_time()
        folder = scenes_folder()
        seconds, used = time.perf_counter() - start, time.process_time() - used
        result = {
            "fingerprint": read_manifest(folder)["fingerprint"],
            "spec": read_manifest(folder)["spec"],
            "build_seconds": round(seconds, 1),
            "build_processor_seconds": round(used, 1),
            "megabytes": {
                kind: round(sum(p.stat().st_size for p in folder.iterdir() if kind in p.name) / 1e6, 1)
                for kind in ("ims", "boxes", "pixels", "caps", "scenes.json", "grounding", "")
            },
            "weights_kilobytes": round(WEIGHTS.stat().st_size / 1000),
            "milliseconds_a_picture": speed(),
            "statistics": statistics(folder),
            "oracle": oracle(),
            "regions": region_statistics(folder),
            "every_region": every_region_f1(folder),
            "probes": linear_probes(folder),
        }
    result["megabytes"]["all"] = result["megabytes"].pop("")
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def speed(pictures: int = 200) -> dict[str, float]:
    """Processor time of each step, a picture, on a seed of its own."""
    spec = ScenesSpec(seed=5)
    net = load_net()
    clock = time.process_time
    marks = [clock()]
    members = sample_split(spec.seed, 0, pictures, spec.knobs)
    marks.append(clock())
    images = np.stack([draw(member.scene) for member in members])
    marks.append(clock())
    boxes = np.stack(
        [
            propose(PortableRandom(5, 0, PROPOSAL_STREAM, k), toy_boxes(m.scene), spec.knobs)
            for k, m in enumerate(members)
        ]
    )
    marks.append(clock())
    region_features(net, images, boxes)
    marks.append(clock())
    names = ("scenes and captions", "drawing", "boxes and proposals", "features")
    return {n: round(1000 * (b - a) / pictures, 2) for n, a, b in zip(names, marks, marks[1:], strict=False)}


def statistics(folder: Path) -> dict:
    """Counts over all splits."""
    splits = [load_scenes(split) for split in SPLITS]
    scenes = [scene for data in splits for scene in data.scenes]
    captions = [caption for data in splits for caption in data.captions]
    phrases = [phrase for caption in captions for phrase in caption.phrases]
    toys = np.array([len(scene.toys) for scene in scenes])
    words = np.array([len(caption.text.split()) for caption in captions])
    return {
        "pictures": {data.name: len(data.scenes) for data in splits},
        "captions": len(captions),
        "different_captions": len({caption.text for caption in captions}),
        "vocabulary": len(Vocabulary.load(folder / "scenes_vocab.json")),
        "toys_a_picture": {str(n): int((toys == n).sum()) for n in range(3, 8)},
        "words_a_caption": {"mean": round(float(words.mean()), 2), "counts": np.bincount(words).tolist()},
        "phrases_a_caption": round(len(phrases) / len(captions), 2),
        "toys_a_phrase": round(float(np.mean([len(phrase.toys) for phrase in phrases])), 2),
        "phrases_with": {
            name: round(100 * float(np.mean([getattr(p.ask, name) is not None for p in phrases])), 1)
            for name in ATTRIBUTES
        }
        | {"a number": round(100 * float(np.mean([p.ask.exact for p in phrases])), 1)},
        "captions_with": {
            "a relation": round(100 * float(np.mean([c.claim.relation is not None for c in captions])), 1),
            "a place": round(100 * float(np.mean([c.claim.place is not None for c in captions])), 1),
        },
        "roles": dict(Counter(scene.role for scene in scenes).most_common()),
        "families": sum(len({scene.family for scene in data.scenes if scene.role != "alone"}) for data in splits),
    }


def oracle() -> dict:
    """Ceiling and ambiguity of the test split, and the false negatives of the training split."""
    data, truth = load_scenes("test"), oracle_matrix("test")
    fits = truth.sum(axis=0)
    family = np.array([scene.family for scene in data.scenes])
    same = family[:, None] == family[data.owner][None, :]
    train = oracle_matrix("train")
    return {
        "ceiling": {key: round(value, 2) for key, value in ceiling(truth, data.owner).items()},
        "ambiguity": round(float(fits.mean()), 3),
        "ambiguity_outside_family": round(float((truth & ~same).sum(axis=0).mean()), 3),
        "fits": np.bincount(np.minimum(fits, 10)).tolist(),
        "train_ambiguity": round(float(train.sum(axis=0).mean()), 3),
        "train_false_negatives_per_mille": round(1000 * float((train.sum() - train.shape[1]) / train.size), 3),
    }


def region_statistics(folder: Path) -> dict:
    """How well the proposals cover the phrases of the test split (IoU above 0.4, as attention is judged)."""
    data = load_scenes("test")
    boxes = np.load(folder / "test_boxes.npy")
    relevant, found = [], []
    for caption, image in zip(data.captions, data.owner, strict=True):
        for phrase in caption.phrases:
            match = iou(boxes[image], data.boxes[image][list(phrase.toys)])
            relevant.append((match > 0.4).any(axis=1).sum())
            found += (match > 0.5).any(axis=0).tolist()
    return {
        "toys_found": round(100 * float(np.mean(found)), 1),
        "relevant_regions_a_phrase": round(float(np.mean(relevant)), 2),
        "phrases_without_a_region": round(100 * float((np.array(relevant) == 0).mean()), 2),
    }


def every_region_f1(folder: Path) -> dict[str, float]:
    """Overlap → attention F1 in per cent of a word that attends to every region of the test split."""
    split = open_split(folder, "test")
    vocabulary = Vocabulary.of_folder(folder)
    model = SCAN(len(vocabulary), split.feature_dim, width=4, word_dim=4)  # chance depends on phrases and boxes alone
    seen = collect_attention(model, split, WordCaptions(split, vocabulary), scenes_grounding("test"))
    return {str(overlap): round(100 * seen.quality([0.0], overlap).chance_f1, 2) for overlap in (0.3, 0.4, 0.5, 0.6)}


# -- linear probes ---------------------------------------------------------------------------------------------


def linear_probes(folder: Path) -> dict:
    """Test accuracy in percent of a linear classifier on the frozen features."""
    net = load_net()
    toys = {split: toy_examples(net, split) for split in ("train", "test")}
    seen = {split: proposal_examples(folder, split) for split in ("train", "test")}
    empty = {split: background_examples(folder, split) for split in ("train", "test")}
    result = {}
    for name, values in ATTRIBUTES.items():
        classes = len(values)
        probe = fit(*pick(toys["train"], name), classes)
        other = fit(*pick(empty["train"], name), classes)
        detected = fit(*pick(seen["train"], name), classes)
        x, y = pick(toys["test"], name)
        bx, by = pick(empty["test"], name)
        result[name] = {
            "ground_truth_boxes": accuracy(probe, x, y),
            "proposals": accuracy(detected, *pick(seen["test"], name)),
            "majority": round(100 * float(torch.bincount(y).max() / len(y)), 1),
            "background_boxes": max(accuracy(probe, bx, by), accuracy(other, bx, by)),
            "background_majority": round(100 * float(torch.bincount(by).max() / len(by)), 1),
        }
    return result


def toy_examples(net: nn.Module, split: str) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Features of the tight boxes of all toys, and what the toys are."""
    data = load_scenes(split)
    features, labels = [], {name: [] for name in ATTRIBUTES}
    for scene, picture, boxes in zip(data.scenes, data.pixels, data.boxes, strict=True):
        features.append(region_features(net, picture[None].copy(), boxes[None])[0])
        for name, values in ATTRIBUTES.items():
            labels[name] += [values.index(getattr(toy, name)) for toy in scene.toys]
    return np.concatenate(features), labels


def proposal_examples(folder: Path, split: str) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Features of the proposals that cover a toy by half (IoU above 0.5): what a matcher really gets."""
    data = load_scenes(split)
    stored = np.load(folder / f"{split}_ims.npy", mmap_mode="r")
    boxes = np.load(folder / f"{split}_boxes.npy")
    features, labels = [], {name: [] for name in ATTRIBUTES}
    for k, scene in enumerate(data.scenes):
        match = iou(boxes[k], data.boxes[k])
        for region in np.flatnonzero(match.max(axis=1) > 0.5):
            features.append(stored[k, region])
            toy = scene.toys[int(match[region].argmax())]
            for name, values in ATTRIBUTES.items():
                labels[name].append(values.index(getattr(toy, name)))
    return np.stack(features), labels


def background_examples(folder: Path, split: str) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Features of proposals that hold no toy, labelled with the nearest toy: what leaks into the background?"""
    data = load_scenes(split)
    stored = np.load(folder / f"{split}_ims.npy", mmap_mode="r")
    boxes = np.load(folder / f"{split}_boxes.npy")
    features, labels = [], {name: [] for name in ATTRIBUTES}
    for k, scene in enumerate(data.scenes):
        toys = data.boxes[k]
        low = np.maximum(boxes[k][:, None, :2], toys[None, :, :2])
        high = np.minimum(boxes[k][:, None, 2:], toys[None, :, 2:])
        empty = np.clip(high - low, 0, None).prod(axis=2).sum(axis=1) == 0
        centres = (boxes[k][:, :2] + boxes[k][:, 2:]) / 2
        distance = ((centres[:, None] - (toys[None, :, :2] + toys[None, :, 2:]) / 2) ** 2).sum(axis=2)
        for region in np.flatnonzero(empty):
            features.append(stored[k, region])
            toy = scene.toys[int(distance[region].argmin())]
            for name, values in ATTRIBUTES.items():
                labels[name].append(values.index(getattr(toy, name)))
    return np.stack(features), labels


def pick(examples: tuple[np.ndarray, dict[str, list[int]]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.asarray(examples[0])), torch.tensor(examples[1][name])


def fit(x: torch.Tensor, y: torch.Tensor, classes: int) -> nn.Module:
    """Multinomial logistic regression with a little weight decay."""
    torch.manual_seed(0)
    mean, spread = x.mean(dim=0), x.std(dim=0) + 1e-3
    linear = nn.Linear(x.shape[1], classes)
    optimiser = torch.optim.LBFGS(linear.parameters(), max_iter=150, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        penalty = 1e-4 * linear.weight.square().sum()
        loss = F.cross_entropy(linear((x - mean) / spread), y) + penalty
        loss.backward()
        return loss

    optimiser.step(closure)
    return lambda features: linear((features - mean) / spread)


@torch.no_grad()
def accuracy(probe, x: torch.Tensor, y: torch.Tensor) -> float:
    return round(100 * float((probe(x).argmax(dim=1) == y).float().mean()), 1)


if __name__ == "__main__":
    main()
