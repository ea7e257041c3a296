"""Read a whole feature or box file once, a block at a time: NaN, empty and repeated rows, and a hash of everything."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from itm_lab.data.tsv import EDGE
from itm_utils.data.precomp import load_array
from itm_utils.progress import bar

BLOCK = 2**25  # bytes that are read at once


@dataclass
class Scanned:
    """Rows of a file that something is wrong with, and a hash of all its numbers.

    twins: (row, earlier row) with the same numbers, though of different images. torn: rows that differ from the first
    of their image, where a file repeats every image. images: (images,) eight bytes of each one's hash, so that splits
    can be compared.
    """

    not_finite: list[int] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    twins: list[tuple[int, int]] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    digest: str = ""
    images: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


def blocks(path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """First row and copies of the rows of each block; the map is opened anew, so that memory stays at one block."""
    array = load_array(path, mmap_mode="r")
    rows, row_bytes = len(array), max(1, array[:1].nbytes)
    step = max(1, BLOCK // row_bytes)
    del array
    for start in bar(range(0, rows, step), f"read {path.name}", "block"):
        yield start, np.array(load_array(path, mmap_mode="r")[start : start + step])


def scan_features(path: Path, repeat: int = 1) -> Scanned:
    """Look at every number of a feature file. repeat: how many rows in a row each image has.

    Numbers are looked at in single precision, as they are read: saved with other bits an image stays the same one.
    """
    found, seen, content = Scanned(), {}, hashlib.sha256()
    first, images = b"", bytearray()
    for start, values in blocks(path):
        with np.errstate(over="ignore"):  # what is too large becomes infinite here as it does for a model
            flat = values.reshape(len(values), -1).astype(np.float32, copy=False)
        finite = np.isfinite(flat).all(axis=1)
        found.not_finite += (start + np.flatnonzero(~finite)).tolist()
        found.zero += (start + np.flatnonzero(~flat.any(axis=1))).tolist()
        for row, numbers in enumerate(flat, start=start):
            digest = hashlib.blake2b(np.ascontiguousarray(numbers).data, digest_size=16).digest()
            content.update(digest)
            if row % repeat:
                if digest != first:
                    found.torn.append(row)
                continue
            first = digest
            images += digest[:8]
            if seen.setdefault(digest, row) != row:
                found.twins.append((row, seen[digest]))
    found.digest, found.images = content.hexdigest(), np.frombuffer(images, dtype=np.uint64)
    return found


@dataclass
class ScannedBoxes:
    """Rows of a box file with a box that is not finite, ends before it begins, or lies outside its image."""

    not_finite: list[int] = field(default_factory=list)
    turned: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)


def scan_boxes(path: Path, sizes: np.ndarray | None, edge: float = EDGE) -> ScannedBoxes:
    """Look at every box (rows, r, 4). sizes: (rows, 2) width and height in the units of the boxes, where they are known.

    edge: how far a box may reach beyond its image.
    """
    found = ScannedBoxes()
    for start, boxes in blocks(path):
        here = slice(start, start + len(boxes))
        rows = start + np.arange(len(boxes))
        finite = np.isfinite(boxes).all(axis=(1, 2))
        found.not_finite += rows[~finite].tolist()
        found.turned += rows[finite & (boxes[..., 2:] < boxes[..., :2]).any(axis=(1, 2))].tolist()
        beyond = (boxes < -edge).any(axis=(1, 2))
        if sizes is not None:
            beyond |= (boxes[..., 2:] > sizes[here, None, :] + edge).any(axis=(1, 2))
        found.outside += rows[finite & beyond].tolist()
    return found
