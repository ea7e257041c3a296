"""Read the precomputed format: the embedded scenes, Flickr30K and COCO all come through here.

A dataset is a folder with, for each split,

==========================  ====================================================================
``<split>_ims.npy``         (rows, r, d) region features, or (rows, d) one vector per image
``<split>_caps.txt``        one caption a line, those of an image on consecutive lines
``<split>_boxes.npy``       optional, (rows, r, 4) boxes x1 y1 x2 y2 in pixels, or as shares of the sides from
                            0 to 1, which are read as pixels where sizes are there (or a model's own code)
``<split>_kinds.npy``       optional, (rows, r) what each region is: 0 a cell of a grid, 1 a detector's box, 2 the image
``<split>_sizes.npy``       optional, (rows, 2) width and height of the images in pixels
``<split>_ids.txt``         optional, one image name a line, for each row or for each caption
``<split>_owners.npy``      optional, (captions,) image row of each caption, where the number of
                            captions differs from image to image
==========================  ====================================================================

Features are memory-mapped: opening COCO's 33 GB costs no memory, and a batch costs its own rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from itm_utils.digests import digest_of, file_digest
from itm_utils.errors import input_error
from itm_utils.files import check_file, read_text

FLOATS = (np.float16, np.float32, np.float64)
LARGEST_SHARE = 1.01  # of a side: the whole, and room for rounding; boxes in pixels reach into the hundreds
ALMOST = 1e-3  # of the largest number: copies that were rounded differ by less, images by more
# What `str(line)` makes of bytes in Python 3: ports of the public loaders train on such captions.
PRINTED_BYTES = re.compile(r"""^b(['"]).*\1$""")
KINDS = ("ims.npy", "caps.txt", "boxes.npy", "sizes.npy", "ids.txt", "owners.npy", "kinds.npy")
LONG_ROW = 2**12  # numbers: reading a row costs more than a step of a Python loop


class FeatureFile:
    """A memory-mapped ``.npy`` array of which only the rows that are asked for are read.

    The map is opened again in every process that receives a copy: pickling an open map would send the
    whole array to each worker.
    """

    def __init__(self, path: Path, ranks: tuple[int, ...], what: str) -> None:
        self.path = Path(path)
        array = self._open()
        if array.dtype not in FLOATS:
            raise input_error(
                self.path, f"numbers of type {array.dtype}", f"{what} of type float16, float32 or float64"
            )
        if array.ndim not in ranks:
            wanted = " or ".join(str(rank) for rank in ranks)
            raise input_error(self.path, f"an array of shape {array.shape}", f"{what} with {wanted} axes")
        if 0 in array.shape[1:]:
            raise input_error(self.path, f"an array of shape {array.shape}", f"{what} with at least one number a row")
        self.shape = array.shape
        self._array = array

    def _open(self) -> np.ndarray:
        return np.asarray(load_array(self.path, mmap_mode="r"))  # still mapped; a row of a np.memmap is slow to make

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_array": None}

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, index: np.ndarray) -> np.ndarray:
        """Copies of the given rows as float32; a NaN or infinity among them is an error that names its row."""
        if self._array is None:
            self._array = self._open()
        index = np.asarray(index)
        # In file order the disk is read forward once, however the batch was shuffled.
        order = np.argsort(index, kind="stable")
        values = np.empty((len(index), *self.shape[1:]), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if math.prod(self.shape[1:]) < LONG_ROW:
                values[order] = self._array[index[order]]
                suspect = True
            else:
                suspect = self._copy_long_rows(values, index, order)
        if suspect:
            self._check_finite(values, index)
        return values

    def _copy_long_rows(self, values: np.ndarray, index: np.ndarray, order: np.ndarray) -> bool:
        """Copy one row at a time, checked while it is in the processor's cache; whether one may not be finite."""
        suspect = False
        for place, number in zip(order.tolist(), index[order].tolist(), strict=True):
            row = self._array[number].astype(np.float32, copy=False)
            suspect |= not math.isfinite(np.vdot(row, row))  # a finite sum of squares has finite terms
            values[place] = row
        return suspect

    def _check_finite(self, values: np.ndarray, index: np.ndarray) -> None:
        finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        if not finite.all():
            found = f"a NaN or infinity in row {int(index[np.argmin(finite)])}"
            raise input_error(self.path, found, "finite numbers", "Extract or copy this file again.")


# Name of a dataset → what stands for the digest of a split's features. For features that every machine computes itself:
# their last digits differ between processors, though nothing else does.
MADE_FROM: dict[str, Callable[[PrecompSplit], str]] = {}


def load_array(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """``np.load`` with one clear error for everything that can be wrong with a download."""
    check_file(path, "a .npy file of the precomputed format")
    try:
        with np.errstate(over="raise"):  # of a damaged shape
            array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as error:  # damaged bytes fail in many ways, and each concerns this one file only
        reason = str(error).split(".")[0].split("  ")[0]
        hint = "Copy or download it again."
        raise input_error(path, f"a damaged file ({reason})", "a complete .npy array", hint) from error
    if not isinstance(array, np.ndarray):
        raise input_error(path, f"an archive of {len(array.files)} arrays", "one .npy array")
    return array


def read_captions(path: str | Path) -> list[str]:
    """The lines of a caption file, as text: decoded once, here, and never printed as bytes."""
    text = read_text(path, "one caption a line")
    # Not str.splitlines: it also splits at form feeds and other characters that occur inside captions.
    captions = [line.strip() for line in text.removesuffix("\n").split("\n")]
    for number, caption in enumerate(captions, start=1):
        if not caption:
            raise input_error(path, f"an empty caption in line {number}", "a caption in every line")
    if captions and all(PRINTED_BYTES.match(caption) for caption in captions[:20]):
        hint = "The file was written by str(bytes) in Python 3; decode the captions and write them again."
        raise input_error(path, f"printed bytes such as {captions[0][:30]}", "plain text", hint)
    return captions


@dataclass
class PrecompSplit:
    """One split of a dataset in the precomputed format.

    Images are numbered 0 … n_images-1 and captions 0 … n_captions-1; ``owner[c]`` is the image of caption c.
    """

    root: Path
    name: str
    n_images: int
    features: FeatureFile
    captions: list[str]
    owner: np.ndarray
    repeat: int = 1
    boxes: FeatureFile | None = None
    sizes: np.ndarray | None = None
    ids: list[str] | None = field(default=None, repr=False)

    @property
    def n_captions(self) -> int:
        return len(self.captions)

    @property
    def feature_dim(self) -> int:
        """Width d of a region feature."""
        return self.features.shape[-1]

    def regions(self, images: np.ndarray) -> np.ndarray:
        """(i, r, d) float32 features of the given images; one vector per image counts as one region."""
        values = self.features.rows(np.asarray(images) * self.repeat)
        return values if values.ndim == 3 else values[:, None, :]

    @cached_property
    def box_shares(self) -> bool:
        """Whether the file has boxes as shares of width and height; a few images say it."""
        if self.boxes is None or self.boxes.shape[-1] != 4:
            return False
        few = np.linspace(0, self.n_images - 1, 8).astype(int) * self.repeat
        return bool(self.boxes.rows(few).max() <= LARGEST_SHARE)

    def region_boxes(self, images: np.ndarray) -> np.ndarray | None:
        """(i, r, 4) boxes of the given images, shares made pixels where sizes are there; None without boxes."""
        boxes = None if self.boxes is None else self.boxes.rows(np.asarray(images) * self.repeat)
        if self.sizes is not None and self.box_shares:
            boxes *= np.tile(self.sizes[images], 2)[:, None, :]
        return boxes

    @property
    def files(self) -> dict[str, Path]:
        """Kind → path of every file that the split is read from."""
        named = {kind.partition(".")[0]: self.root / f"{self.name}_{kind}" for kind in KINDS}
        return {kind: path for kind, path in named.items() if path.exists()}

    def identity(self) -> dict[str, str]:
        """Name, split and fingerprint for a receipt: of every byte of every file, and of what is held of the captions.

        Of a dataset in the cache (``scenes-…``) the name is what stands before the hash. See :mod:`itm_utils.digests`
        for the cost, and ``MADE_FROM`` for features that are computed anew on every machine.
        """
        whole = self.n_images * self.repeat == len(self.features)
        split = self.name if whole else f"{self.name}, first {self.n_images}"
        name = re.sub("-[0-9a-f]{16}$", "", self.root.name)
        digests = {kind: file_digest(path) for kind, path in self.files.items()}
        if name in MADE_FROM:
            digests["ims"] = MADE_FROM[name](self)
        held = {"captions": digest_of(self.captions), "owner": digest_of(self.owner.tolist()), "repeat": self.repeat}
        fingerprint = digest_of({"files": digests, "images": self.n_images} | held)
        return {"name": name, "split": split, "fingerprint": fingerprint}

    def first(self, images: int) -> PrecompSplit:
        """The split cut to its first images, e.g. ``dev.first(1000)`` as the public code validates."""
        if not 0 < images <= self.n_images:
            raise input_error(f"{self.root}, split {self.name}", f"first({images})", f"1 to {self.n_images} images")
        captions = int(np.searchsorted(self.owner, images))
        return replace(
            self,
            n_images=images,
            captions=self.captions[:captions],
            owner=self.owner[:captions],
            sizes=None if self.sizes is None else self.sizes[:images],
            ids=None if self.ids is None else self.ids[:images],
        )


def open_split(root: str | Path, name: str) -> PrecompSplit:
    """Open one split, checking everything that can be checked without reading the features."""
    root = Path(root)
    if not root.is_dir():
        raise input_error(root, "no such folder", "a dataset in the precomputed format", "See book/datasets.md.")
    features_path, captions_path = root / f"{name}_ims.npy", root / f"{name}_caps.txt"
    if not features_path.exists():
        there = sorted(path.name.removesuffix("_ims.npy") for path in root.glob("*_ims.npy"))
        raise input_error(features_path, "no such file", f"a split of this folder: {', '.join(there) or 'it has none'}")
    features = FeatureFile(features_path, ranks=(2, 3), what="features")
    captions = read_captions(captions_path)
    owner, repeat = _owners(root, name, features, captions)
    boxes_path, sizes_path, ids_path = (root / f"{name}_{kind}" for kind in ("boxes.npy", "sizes.npy", "ids.txt"))
    boxes = FeatureFile(boxes_path, ranks=(3,), what="boxes") if boxes_path.exists() else None
    if boxes is not None and boxes.shape[:2] != features.shape[:2]:
        found = f"boxes for {boxes.shape[:2]} rows and regions"
        raise input_error(boxes_path, found, f"{features.shape[:2]} as in {features_path.name}")
    sizes = _sizes(sizes_path, len(features))[::repeat] if sizes_path.exists() else None
    ids = _ids(ids_path, len(features), owner)[::repeat] if ids_path.exists() else None
    images = len(features) // repeat
    return PrecompSplit(root, name, images, features, captions, owner, repeat, boxes, sizes, ids)


def _owners(root: Path, name: str, features: FeatureFile, captions: list[str]) -> tuple[np.ndarray, int]:
    """(captions,) image of each caption, and how many times the feature file repeats every image."""
    path = root / f"{name}_owners.npy"
    rows = len(features)
    if path.exists():
        return _read_owners(path, rows, len(captions)), 1
    if rows == 0 or len(captions) == 0 or len(captions) % rows:
        found, expected = f"{len(captions):,} captions for {rows:,} feature rows", "as many captions for every image"
        hint = f"Where images differ in this, say which image each caption belongs to in {path.name}."
        raise input_error(root / f"{name}_caps.txt", found, expected, hint)
    per_row = len(captions) // rows
    repeat = _repeats(features, path.name) if per_row == 1 else 1
    return np.arange(len(captions)) // (per_row * repeat), repeat


def _read_owners(path: Path, rows: int, captions: int) -> np.ndarray:
    owner = load_array(path)
    if owner.shape != (captions,) or not np.issubdtype(owner.dtype, np.integer):
        found = f"{owner.dtype} of shape {owner.shape}"
        raise input_error(path, found, f"one image number for each of {captions} captions")
    if owner[0] != 0 or owner[-1] != rows - 1 or not np.isin(np.diff(owner), (0, 1)).all():
        raise input_error(path, "image numbers that jump or go back", f"0 to {rows - 1} in order, each at least once")
    return owner.astype(np.int64)


def _repeats(features: FeatureFile, owners: str, group: int = 5, samples: int = 8) -> int:
    """5 where every image stands five times in a row (the old packages do that), else 1.

    With as many rows as captions the shape cannot tell; a few groups are read and compared. Almost equal ones are an
    error: each copy would count as a wrong answer to the captions of the others. owners: a file that the hint names.
    """
    if len(features) % group:
        return 1
    starts = np.unique(np.linspace(0, len(features) // group - 1, samples).astype(int)) * group
    groups = [features.rows(np.arange(start, start + group)) for start in starts]
    same = [bool((rows == rows[0]).all()) for rows in groups]
    close = [np.allclose(rows, rows[0], rtol=0, atol=ALMOST * np.abs(rows).max()) for rows in groups]
    if any(close) and not all(same):
        found = f"as many rows as captions, {sum(same)} of {len(same)} groups of five equal, {sum(close) - sum(same)} almost"
        hint = f"Repair the copies, or keep one of five; if they are images of their own, add {owners}."
        raise input_error(features.path, found, "every image five times in a row, or never", hint)
    return group if all(same) else 1


def _sizes(path: Path, rows: int) -> np.ndarray:
    sizes = load_array(path)
    numbers = sizes.dtype.kind in "iuf" and bool(np.isfinite(sizes).all())
    if sizes.shape != (rows, 2) or not numbers or (sizes <= 0).any():
        found = f"{sizes.dtype} of shape {sizes.shape}" if numbers else f"{sizes.dtype} that are no finite numbers"
        raise input_error(path, found, f"({rows}, 2) positive widths and heights")
    return sizes


def _ids(path: Path, rows: int, owner: np.ndarray) -> list[str]:
    """One name per feature row; the public files have one per caption, five times the same."""
    lines = read_text(path, "one image name a line").removesuffix("\n")
    ids = [line.strip() for line in lines.split("\n")] if lines else []
    if "" in ids:
        raise input_error(path, f"an empty line {1 + ids.index('')}", "an image name in every line")
    if len(ids) == len(owner) != rows:
        first = np.searchsorted(owner, np.arange(rows))
        differing = next((line for line, image in enumerate(owner) if ids[line] != ids[first[image]]), None)
        if differing is not None:
            found = f"{ids[differing]} in line {differing + 1}, between the captions of {ids[first[owner[differing]]]}"
            raise input_error(path, found, "the same image for all captions of an image")
        return [ids[line] for line in first]
    if len(ids) != rows:
        raise input_error(path, f"{len(ids)} names", f"{rows}, one per feature row, or {len(owner)}, one per caption")
    one_each = owner[-1] + 1 == rows == len(owner)
    if one_each and rows % 5 == 0 and all(len(set(ids[start : start + 5])) == 1 for start in range(0, rows, 5)):
        found = f"every name five times ({ids[0]} in lines 1 to 5), though the features of its rows differ"
        raise input_error(path, found, "equal rows for every name, or a name of its own for every row")
    return ids
