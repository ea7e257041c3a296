"""From image files to regions: the cells of a grid; or these, the boxes of a detector and the whole image, with features.

Cells cover the scene and boxes the objects; ``<split>_kinds.npy`` says which a region is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from itm_lab.photos.detector import LOW, OVERLAP, Detector
from itm_lab.photos.image_files import ImageFile, read_image
from itm_lab.photos.network import GRID, MapNetwork, Network, grid_boxes
from itm_lab.photos.roi_align import SAMPLES, pool_boxes
from itm_utils.data.precomp import PrecompSplit, load_array
from itm_utils.errors import input_error

CELL, BOX, WHOLE = (
    0,
    1,
    2,
)  # what a region is; the whole image stands last, and in the places of boxes that were not found
KINDS = ("cell", "box", "whole image")
BOXES = 11
SIDE = 352  # pixels: the last map has 11 x 11 places, so that objects a tenth of the image wide survive
DETAIL = 416  # pixels of the longest side that an image is read with: what the detector takes


@dataclass(frozen=True, eq=False)
class Seen:
    """features: (i, r, d). boxes: (i, r, 4) x1 y1 x2 y2 in shares of the sides. kinds: (i, r), or None where all are cells."""

    features: np.ndarray
    boxes: np.ndarray
    kinds: np.ndarray | None = None


class Source(Protocol):
    """What turns images into regions. regions, width: of each image. facts: all that decides its numbers."""

    name: str
    regions: int
    width: int
    facts: dict[str, Any]

    def read(self, path: Path) -> ImageFile:
        """An image file as this source wants it."""
        ...

    def __call__(self, images: Sequence[ImageFile]) -> Seen:
        """The regions of some images."""
        ...


class Cells:
    """The 36 cells of a grid, as a network sees them when the whole image is squashed to a small square."""

    regions = GRID * GRID

    def __init__(self, network: Network) -> None:
        self.network, self.name, self.width = network, network.name, network.width
        self.facts = {
            "network": network.name,
            "weights": network.fingerprint,
            "pixels": network.side,
            "grid": [GRID, GRID],
            "width": network.width,
        }

    def read(self, path: Path) -> ImageFile:
        return read_image(path, self.network.side, squash=True)

    def __call__(self, images: Sequence[ImageFile]) -> Seen:
        features = self.network(np.stack([image.pixels for image in images]))
        return Seen(features, np.tile(grid_boxes(), (len(images), 1, 1)))


class CellsAndBoxes:
    """36 cells, the best boxes of a detector and the whole image, with features by RoI-align from maps of a frozen network."""

    def __init__(self, network: MapNetwork, detector: Detector, boxes: int = BOXES) -> None:
        self.network, self.detector, self.boxes = network, detector, boxes
        self.name = f"{network.name}; {detector.name}"
        self.regions, self.width = GRID * GRID + boxes + 1, sum(network.widths)
        self.facts = {
            "network": network.name,
            "weights": network.fingerprint,
            "pixels": network.side,
            "layers": list(network.widths),
            "grid": [GRID, GRID],
            "width": self.width,
            "detector": detector.name,
            "detector_weights": detector.fingerprint,
            "boxes": boxes,
            "boxes_from": {"score": LOW, "overlap": OVERLAP},
            "samples": SAMPLES,
            "kinds": list(KINDS),
        }

    def read(self, path: Path) -> ImageFile:
        return read_image(path, DETAIL)

    def __call__(self, images: Sequence[ImageFile]) -> Seen:
        found = [self._boxes(image.pixels) for image in images]
        boxes, kinds = (np.stack(each) for each in zip(*found, strict=True))
        with torch.inference_mode():
            shares = torch.from_numpy(boxes).float()
            maps = self.network(np.stack([squared(image.pixels, self.network.side) for image in images]))
            features = torch.cat([pool_boxes(each, shares) for each in maps], dim=2)
        return Seen(features.numpy(), boxes, kinds)

    def _boxes(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(r, 4) the cells, the boxes, best first, and the whole image in all places that are left; (r,) kinds."""
        found = self.detector(pixels, self.boxes)
        left = self.boxes - len(found) + 1
        boxes = np.concatenate([grid_boxes(), found, np.tile([0.0, 0.0, 1.0, 1.0], (left, 1))])
        return boxes, np.repeat([CELL, BOX, WHOLE], [GRID * GRID, len(found), left]).astype(np.uint8)


def squared(pixels: np.ndarray, side: int) -> np.ndarray:
    """(side, side, 3) uint8: what the network takes."""
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC))


def kinds_of(split: PrecompSplit) -> np.ndarray:
    """(i, r) what each region of a split is; all are boxes in a dataset that does not say."""
    shape = split.n_images, (split.features.shape[1] if len(split.features.shape) == 3 else 1)
    if (path := split.files.get("kinds")) is None:
        return np.full(shape, BOX, dtype=np.uint8)
    kinds = load_array(path)
    if kinds.shape != (len(split.features), shape[1]) or kinds.dtype != np.uint8 or kinds.max(initial=0) >= len(KINDS):
        found = f"{kinds.dtype} of shape {kinds.shape}"
        raise input_error(path, found, f"{shape} of uint8 below {len(KINDS)}: {', '.join(KINDS)}")
    return kinds[:: split.repeat][: split.n_images]
