"""Boxes of objects from a detector: YOLOX (Ge et al. 2021) as an ONNX file, which is given by its path or by its name.

The file stays with its authors (Apache-2.0); the one that is known by name is checked by its SHA-256.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from itm_lab.photos.onnx_file import OnnxFile
from itm_utils.boxes import iou
from itm_utils.cache import cache_root
from itm_utils.errors import input_error

STRIDES = (8, 16, 32)  # pixels of the input between the cells of each output grid
GREY = 114  # what fills the input around the image, as in training
LOW = 0.001  # of objectness x class score: nearly everything, for regions need coverage and not certainty
OVERLAP = 0.6  # two boxes of an image that share more than this are one, whatever their classes
CANDIDATES = 1000  # best boxes that overlap is looked for among


class Detector(Protocol):
    """What finds objects. name, fingerprint: for the description of a dataset."""

    name: str
    fingerprint: str

    def __call__(self, pixels: np.ndarray, most: int) -> np.ndarray:
        """At most so many boxes (n, 4) x1 y1 x2 y2 in shares of the sides of an image (h, w, 3) uint8, the best first."""
        ...


@dataclass(frozen=True)
class Known:
    """A published file. where: the page that has it."""

    file: str
    digest: str
    title: str
    where: str


KNOWN = {
    "yolox_nano": Known(
        "yolox_nano.onnx",
        "695e750a5d5754bb5a8d5325643b59282191a7e7a564e435a415fd3c578eab14",
        "YOLOX-nano, 3.7 MB, Apache-2.0",
        "https://github.com/Megvii-BaseDetection/YOLOX/releases",
    )
}


def open_detector(given: str) -> Yolox:
    """A detector by name (looked for in ``data`` and in the cache folder) or by the path of an ONNX file."""
    if given not in KNOWN:
        path = Path(given)
        if path.suffix.lower() != ".onnx":
            raise input_error("--detector", given, f"the path of a .onnx file, or one of {', '.join(KNOWN)}")
        return Yolox(OnnxFile(path, "a YOLOX detector as ONNX"), path.stem)
    known = KNOWN[given]
    places = [Path("data") / known.file, cache_root() / known.file]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        hint = f"Get {known.file} ({known.title}) from {known.where} and put it there, or give --detector PATH."
        raise input_error(places[0], "no such file", "the detector", hint)
    return Yolox(OnnxFile(path, known.title, known.digest), given)


class Yolox:
    """A YOLOX detector whose output has one row per cell: box, objectness, class scores."""

    def __init__(self, file: OnnxFile, name: str) -> None:
        self.file, self.name, self.fingerprint = file, name, file.digest[:16]
        self.cells, self.strides = grid_cells(file.side)

    def __call__(self, pixels: np.ndarray, most: int) -> np.ndarray:
        planes, scale = letterbox(pixels, self.file.side)
        rows = self.file.run(planes)[0]
        if rows.ndim != 3 or rows.shape[:2] != (1, len(self.cells)) or rows.shape[2] < 6:
            expected = (
                f"an output of shape (1, {len(self.cells)}, 5 + classes), as YOLOX has for {self.file.side} pixels"
            )
            raise input_error(self.file.path, f"an output of shape {rows.shape}", expected)
        boxes, scores = decode(rows[0], self.cells, self.strides)
        height, width = pixels.shape[:2]
        return best_boxes(boxes / (scale * np.array([width, height, width, height])), scores, most)


def letterbox(pixels: np.ndarray, side: int) -> tuple[np.ndarray, float]:
    """(3, side, side) float32 blue, green, red from 0 to 255, the image at the top left; and how it was scaled."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
    canvas = np.full((side, side, 3), GREY, dtype=np.float32)
    canvas[: size[1], : size[0]] = small[..., ::-1]
    return canvas.transpose(2, 0, 1), scale


def grid_cells(side: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) column and row of each output row's cell in its grid, and (n, 1) the stride of that grid."""
    cells, strides = [], []
    for stride in STRIDES:
        rows, columns = np.divmod(np.arange((side // stride) ** 2), side // stride)
        cells.append(np.stack([columns, rows], axis=1))
        strides.append(np.full((len(rows), 1), stride))
    return np.concatenate(cells), np.concatenate(strides)


def decode(rows: np.ndarray, cells: np.ndarray, strides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boxes (n, 4) x1 y1 x2 y2 in pixels of the input, and scores (n,), from output rows (n, 5 + classes)."""
    centre = (rows[:, :2] + cells) * strides
    half = np.exp(np.minimum(rows[:, 2:4], 20)) * strides / 2  # bounded: a foreign file may say anything
    return np.concatenate([centre - half, centre + half], axis=1), rows[:, 4] * rows[:, 5:].max(axis=1)


def best_boxes(
    boxes: np.ndarray, scores: np.ndarray, most: int, low: float = LOW, overlap: float = OVERLAP
) -> np.ndarray:
    """Greedy non-maximum suppression without classes. boxes: (n, 4) in shares; what leaves the image is cut off."""
    boxes = boxes.clip(0, 1)
    usable = (scores >= low) & (boxes[:, 2:] - boxes[:, :2] > 1e-3).all(axis=1)  # a NaN is not usable either
    order = np.argsort(-scores[usable], kind="stable")[:CANDIDATES]
    left, kept = boxes[usable][order], []
    while len(left) and len(kept) < most:
        kept.append(left[0])
        left = left[1:][iou(left[:1], left[1:])[0] <= overlap]
    return np.array(kept, dtype=np.float32).reshape(-1, 4)
