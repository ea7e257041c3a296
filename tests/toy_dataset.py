"""A toy dataset in the real file format: images of noisy attribute vectors, captions that name some of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from itm_utils.data.vocabulary import Vocabulary

COLOURS = ("red", "blue", "green", "yellow", "black", "white")
SHAPES = ("cube", "ball", "cone", "ring", "star", "cup")


def write_toy_dataset(
    root: Path, images: dict[str, int], seed: int = 0, regions: int = 6, width: int = 24, noise: float = 0.5
) -> Path:
    """Write splits of toy images to ``root`` in the precomputed format, with boxes, sizes, ids and vocabulary.

    images: number of images of each split, e.g. ``{"train": 200, "dev": 50, "test": 50}``.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    # One vector an attribute, the same in all splits: the frozen detector of this Scenes.
    looks = np.random.default_rng(1234).normal(size=(len(COLOURS) + len(SHAPES), width))
    captions = []
    for number, (split, count) in enumerate(images.items()):
        rng = np.random.default_rng([seed, number])
        lines = _write_split(root, split, rng, count, regions, looks, noise)
        captions += lines
    Vocabulary.build(captions, threshold=1).save(root / "toy_vocab.json")
    return root


def _write_split(root: Path, split: str, rng, count: int, regions: int, looks: np.ndarray, noise: float) -> list[str]:
    objects = np.stack(
        [rng.integers(len(COLOURS), size=(count, 3)), rng.integers(len(SHAPES), size=(count, 3))], axis=2
    )
    features = rng.normal(scale=noise, size=(count, regions, looks.shape[1]))
    features[:, :3] += looks[objects[..., 0]] + looks[len(COLOURS) + objects[..., 1]]
    corners = rng.integers(0, 60, size=(count, regions, 2))
    np.save(root / f"{split}_ims.npy", features.astype(np.float32))
    np.save(root / f"{split}_boxes.npy", np.concatenate([corners, corners + 30], axis=2).astype(np.float32))
    np.save(root / f"{split}_sizes.npy", np.full((count, 2), 96, dtype=np.int32))
    (root / f"{split}_ids.txt").write_text("".join(f"{split}_{i:05d}.png\n" for i in range(count)), encoding="utf-8")
    captions = [_caption(rng, objects[i]) for i in range(count) for _ in range(5)]
    (root / f"{split}_caps.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return captions


def _caption(rng: np.random.Generator, objects: np.ndarray) -> str:
    """Two or three of the objects, in any order, at times without their colour."""
    shown = rng.permutation(len(objects))[: rng.integers(2, len(objects) + 1)]
    names = [f"a {COLOURS[c]} {SHAPES[s]}" if rng.random() < 0.9 else f"a {SHAPES[s]}" for c, s in objects[shown]]
    return " and ".join(names) + "."


def write_entities(folder: Path, data: Path, names: list[str]) -> None:
    """Flickr30K Entities of the toy test images, under the given names: the first thing a caption names is region 0."""
    captions = (data / "test_caps.txt").read_text(encoding="utf-8").splitlines()
    boxes = np.load(data / "test_boxes.npy")[:, 0].astype(int) + 1  # files count pixels from 1
    for kind in ("Sentences", "Annotations"):
        (folder / kind).mkdir(parents=True)
    for number, (name, box) in enumerate(zip(names, boxes, strict=True)):
        own = [caption.partition(" and ") for caption in captions[5 * number : 5 * number + 5]]
        lines = [f"[/EN#1/other {first}]{joined}{rest}" for first, joined, rest in own]
        (folder / "Sentences" / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
        sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
        corners = "".join(f"<{side}>{place}</{side}>" for side, place in sides)
        text = f"<a><size><width>96</width><height>96</height></size><object><name>1</name><bndbox>{corners}</bndbox></object></a>"
        (folder / "Annotations" / f"{name}.xml").write_text(text, encoding="utf-8")
