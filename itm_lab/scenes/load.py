"""Read what only Scenes has: the symbolic scenes, the images, the claims and the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from itm_lab.scenes.build import SPLITS, ScenesSpec, scenes_folder
from itm_lab.scenes.captions import Caption, ScenePhrase
from itm_lab.scenes.logic import Ask, Claim
from itm_lab.scenes.oracle import truth_matrix
from itm_lab.scenes.world import Scene
from itm_utils.data.precomp import read_captions
from itm_utils.errors import input_error


@dataclass(frozen=True)
class SceneSplit:
    """One split: n scenes, 5 n captions.

    images: (n, 96, 96, 3) uint8, memory-mapped. boxes: tight boxes of each scene's toys, (toys, 4) each.
    twins: for each scene the scenes that its captions must not fit. owner: (5 n,) scene of each caption.
    """

    folder: Path
    name: str
    scenes: list[Scene]
    captions: list[Caption]
    pixels: np.ndarray
    boxes: list[np.ndarray]
    twins: list[tuple[int, ...]]
    owner: np.ndarray


def load_scenes(split: str, spec: ScenesSpec | None = None) -> SceneSplit:
    """A split of the dataset (built first if need be)."""
    if split not in SPLITS:
        raise input_error("scenes", f"split {split!r}", f"one of {', '.join(SPLITS)}")
    folder = scenes_folder(spec)
    records = json.loads((folder / f"{split}_scenes.json").read_text(encoding="utf-8"))
    grounding = json.loads((folder / f"{split}_grounding.json").read_text(encoding="utf-8"))
    texts = read_captions(folder / f"{split}_caps.txt")
    boxes = [np.array(record.pop("boxes")) for record in records]
    twins = [tuple(record.pop("twins")) for record in records]
    return SceneSplit(
        folder=folder,
        name=split,
        scenes=[Scene.from_json(record) for record in records],
        captions=[_caption(text, record) for text, record in zip(texts, grounding, strict=True)],
        pixels=np.load(folder / f"{split}_pixels.npy", mmap_mode="r"),
        boxes=boxes,
        twins=twins,
        owner=np.repeat(np.arange(len(records)), len(texts) // len(records)),
    )


def _caption(text: str, record: dict) -> Caption:
    phrases = tuple(
        ScenePhrase(phrase["text"], start, end, tuple(phrase["objects"]), Ask(**phrase["asks"]))
        for phrase in record["phrases"]
        for start, end in [phrase["chars"]]
    )
    asks = tuple(phrase.ask for phrase in phrases)
    return Caption(text, phrases, Claim(asks, record["relation"], record["place"]))


@lru_cache(maxsize=6)
def _oracle(folder: Path, split: str, spec: ScenesSpec | None) -> np.ndarray:
    data = load_scenes(split, spec)
    matrix = truth_matrix(data.scenes, [caption.claim for caption in data.captions])
    matrix.setflags(write=False)
    return matrix


def oracle_matrix(split: str, spec: ScenesSpec | None = None) -> np.ndarray:
    """(n_images, n_captions) bool: which captions are true of which images. Read-only."""
    return _oracle(scenes_folder(spec), split, spec)
