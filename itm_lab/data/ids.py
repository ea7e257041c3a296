"""Which image is which row: ``<split>_ids.txt`` for a folder that has none, or numbers where names are needed.

The public packages do not say which image a row is (Flickr30K's ids are numbers of their own), but their captions
are Karpathy's, in the order of his file. So the captions are compared line by line, and only if all agree are the ids
written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from itm_lab.data.disk import check_file, check_outputs, lines_bytes, read_lines, write_outputs
from itm_lab.data.karpathy import Karpathy, KarpathyImage
from itm_lab.data.registry import PER_IMAGE
from itm_utils.data.precomp import load_array, read_captions
from itm_utils.errors import input_error


@dataclass(frozen=True)
class Alignment:
    """How far a way of listing images explains a caption file: all lines, or up to ``line`` (from 1)."""

    images: list[KarpathyImage]
    line: int | None = None
    here: str = ""
    there: str = ""


def align(captions: list[str], splits: Karpathy, split: str) -> Alignment:
    """The images of a caption file, in order; else how far the best of all ways came.

    The ways: in the order of the file, or with the images of restval last; with all captions of an image, or with
    its first five. The file may end early, after a whole image: validation sets are often cut.
    """
    listed = splits.images_of(split)
    orders = [listed]
    if any(image.rest for image in listed):
        orders.append(sorted(listed, key=lambda image: image.rest))
    tried: list[Alignment] = []
    for order in orders:
        for most in (None, PER_IMAGE):
            found = _compare(captions, order, most)
            if found.line is None:
                return found
            tried.append(found)
    return max(tried, key=lambda found: found.line or 0)  # the first of equals


def _compare(captions: list[str], images: list[KarpathyImage], most: int | None) -> Alignment:
    """Compare line by line; ends with the image that the last caption belongs to."""
    taken = 0
    for count, image in enumerate(images):
        if taken == len(captions):
            return Alignment(images[:count])
        for caption in image.captions[:most]:
            here = captions[taken] if taken < len(captions) else "the end of the file"
            if taken == len(captions) or letters(here) != letters(caption):
                return Alignment([], taken + 1, here, caption)
            taken += 1
    if taken < len(captions):
        return Alignment([], taken + 1, captions[taken], "the end of the split")
    return Alignment(images)


def letters(caption: str) -> str:
    """Letters and digits only: packages differ in spaces, case and punctuation."""
    return "".join(character for character in caption.casefold() if character.isalnum())


def write_ids(
    folder: str | Path, split: str, splits: Karpathy, names: bool | None = None, set_aside: bool = False
) -> tuple[int, list[Path]]:
    """Write ``<split>_ids.txt`` (and for COCO ``<split>_names.txt``); returns the number of images, and the files.

    names: True for file names, False for numbers; by default what the book's readers want, names for Flickr
    (Flickr30K Entities) and numbers for COCO (ECCV Caption). set_aside: rename a present file that says otherwise.
    """
    folder = Path(folder)
    path = folder / f"{split}_caps.txt"
    captions = read_captions(check_file(path, "the captions of the split"))
    found = align(captions, splits, split)
    if found.line is not None:
        expected = f"“{found.there[:60]}” as in {splits.path.name}"
        hint = "The captions are not those of this file, or in another order: no ids were written."
        raise input_error(path, f"“{found.here[:60]}” in line {found.line}", expected, hint)
    rows_per_image = _repeats(folder, split, len(found.images), len(captions))
    ids = [splits.id_of(image, names) for image in found.images for _ in range(rows_per_image)]
    outputs = {folder / f"{split}_ids.txt": lines_bytes(ids)}
    if splits.coco:
        outputs[folder / f"{split}_names.txt"] = lines_bytes([image.name for image in found.images])
    check_outputs({other: content for other, content in outputs.items() if other.name != f"{split}_ids.txt"})
    _make_way(folder / f"{split}_ids.txt", ids, outputs, set_aside)
    return len(found.images), write_outputs(outputs)


def _repeats(folder: Path, split: str, images: int, captions: int) -> int:
    """How many feature rows an image has: the ids file has a line for each. 1 where there are no features."""
    path = folder / f"{split}_ims.npy"
    if not path.exists():
        return 1
    rows = len(load_array(path, mmap_mode="r"))
    if rows not in (images, captions):
        raise input_error(path, f"{rows:,} rows", f"{images:,}, one per image, or {captions:,}, one per caption")
    if rows == images:
        return 1
    if rows % images:
        raise input_error(path, f"{rows:,} rows for {images:,} images", "the same number of rows for every image")
    return rows // images


def _make_way(path: Path, ids: list[str], outputs: dict[Path, bytes], set_aside: bool) -> None:
    """A present ids file that says the same stays; one that says otherwise is set aside, or an error."""
    if not path.is_file():
        return
    present = read_lines(path, "one image name a line")
    if without_repeats(present) == without_repeats(ids):
        outputs.pop(path)  # the public files have a line per caption: as good
        return
    aside = path.with_name(f"{path.stem}.aside.txt")
    if not set_aside or aside.exists():
        differing = zip_longest(without_repeats(present), without_repeats(ids), fillvalue="nothing")
        here, there = next((here, there) for here, there in differing if here != there)
        hint = f"Nothing was written. --set-aside renames the old file to {aside.name}."
        if aside.exists():
            hint = f"Nothing was written. Move {aside.name} away first."
        raise input_error(path, f"a file that says {here}", f"{there}", hint)
    os.replace(path, aside)


def without_repeats(ids: list[str]) -> list[str]:
    """A name once where it stands on several lines in a row."""
    return [name for before, name in _pairs(ids) if before != name]


def _pairs(ids: list[str]) -> Iterator[tuple[str | None, str]]:
    return zip(chain([None], ids), ids, strict=False)
