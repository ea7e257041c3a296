"""Feature extraction for test_photos.py to kill, again and again, at the moments it is given.

usage: python killed_photos.py KIND PHOTOS CAPTIONS OUT MOMENT …
(KIND: cells, or regions with components. MOMENT: __call__:3, append:5, replace:2, rename:1 or rmtree:1, the call at which to die)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from killing import die_at

from itm_lab.photos import extract
from itm_lab.photos.appendable_npy import GrowingArray
from itm_lab.photos.regions import Cells, CellsAndBoxes
from itm_utils import files


class Tiny:
    """A stand-in for a network: the mean colour of each cell."""

    name, fingerprint, side, width = "tiny", "0" * 16, 12, 3

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        return self.attention(pixels)

    @staticmethod
    def attention(pixels: np.ndarray) -> np.ndarray:
        cells = pixels.reshape(len(pixels), 6, 2, 6, 2, 3).mean(axis=(2, 4), dtype=np.float32)
        return cells.reshape(len(pixels), 36, 3)


class TinyMaps:
    """A stand-in for a network with two layers: the image itself, and its places four by four."""

    name, fingerprint, side, widths = "tiny maps", "1" * 16, 24, (3, 3)

    def __call__(self, pixels: np.ndarray) -> list[torch.Tensor]:
        planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        return [torch.nn.functional.avg_pool2d(planes, 4), planes]


class TinyDetector:
    """A stand-in for a detector: quarters of the image, the brightest first, and only those brighter than the image."""

    name, fingerprint = "tiny detector", "2" * 16

    def __call__(self, pixels: np.ndarray, most: int) -> np.ndarray:
        corners = np.array([[0, 0], [0.5, 0], [0, 0.5], [0.5, 0.5]])
        down, across = (side // 2 for side in pixels.shape[:2])
        parts = (pixels[:down, :across], pixels[:down, across:], pixels[down:, :across], pixels[down:, across:])
        light = np.array([part.mean() for part in parts])
        order = [corner for corner in np.argsort(-light, kind="stable") if light[corner] > pixels.mean()]
        return np.concatenate([corners, corners + 0.5], axis=1)[order[:most]].astype(np.float32)


def tiny_regions() -> CellsAndBoxes:
    """Thirty-six cells, two boxes and the image, six numbers each."""
    return CellsAndBoxes(TinyMaps(), TinyDetector(), boxes=2)


SOURCES = {"cells": (lambda: Cells(Tiny()), ""), "regions": (tiny_regions, "4")}


def main(kind: str, photos: Path, captions: Path, out: Path, moments: list[str]) -> None:
    extract.BATCH = 4
    source, components = SOURCES[kind]
    called = {"cells": Cells, "regions": CellsAndBoxes}[kind]
    places = {"__call__": called, "append": GrowingArray, "replace": files.os, "rename": Path, "rmtree": extract.shutil}
    for moment in moments:
        if not (child := os.fork()):
            name, call = moment.split(":")
            die_at(places[name], name, int(call))
            extract.extract(photos, captions, out, "2,1,1", least=1, source=source(), components=components)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.exists(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(Path(word) for word in sys.argv[2:5]), sys.argv[5:])
