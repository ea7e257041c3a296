"""Photographs with their captions: which file each line of the captions means, and which split each image goes to."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from itm_lab.photos.captions import Line, read_lines
from itm_lab.photos.folder import find_files, is_image_name, same_form
from itm_lab.photos.report import CAPTION, IMAGE, NOTE, Remark
from itm_utils.errors import input_error
from itm_utils.files import read_text

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Photo:
    """One image that has captions. name: below the folder, as in ``_ids.txt``. size: bytes of its file."""

    name: str
    path: Path
    size: int
    captions: tuple[str, ...]

    def digest(self) -> str:
        """A hash of its bytes; empty where they cannot be read, which whoever reads the image says."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""


@dataclass
class Album:
    """photos: in the order of their names. remarks: what was left out or changed."""

    photos: list[Photo]
    remarks: list[Remark] = field(default_factory=list)


def read_album(folder: Path, captions: Path) -> Album:
    """Bring the files of a folder and the lines of a captions file together."""
    files, remarks = find_files(folder)
    lines, said = read_lines(captions)
    names = _Names(files, remarks)
    of_file: dict[str, dict[str, int]] = {}  # image → caption → its line
    for line in lines:
        where = f"{captions.name}, line {line.number}"
        if (name := names.resolve(line.name)) is None:
            said.append(Remark(CAPTION, where, names.why_not(line.name)))
        elif (first := of_file.setdefault(name, {}).setdefault(line.caption, line.number)) != line.number:
            said.append(Remark(CAPTION, where, f"the same as line {first}"))
    if not of_file:
        raise _nothing_fits(folder, captions, lines, files)
    silent = [Remark(IMAGE, name, "no caption") for name in files if is_image_name(name) and name not in of_file]
    photos = [Photo(name, files[name], files[name].stat().st_size, tuple(of_file[name])) for name in sorted(of_file)]
    return Album(photos, [*remarks, *said, *silent, *_twins(photos)])


class _Names:
    """What a captions file may call an image: its name below the folder, or its last part where that is unique."""

    def __init__(self, files: dict[str, Path], remarks: list[Remark]) -> None:
        self.files = files
        self.refused = {remark.where: remark.why for remark in remarks}
        self.by_last: dict[str, list[str]] = {}
        for name in files:
            self.by_last.setdefault(name.rpartition("/")[2], []).append(name)

    def resolve(self, called: str) -> str | None:
        called = self._plain(called)
        if called in self.files:
            return called
        if called in self.refused:
            return None
        alike = self.by_last.get(called.rpartition("/")[2], [])
        return alike[0] if len(alike) == 1 else None

    def why_not(self, called: str) -> str:
        plain = self._plain(called)
        if plain in self.refused:
            return f"{called} is {self.refused[plain]}"
        alike = self.by_last.get(plain.rpartition("/")[2], [])
        if alike:
            return f"{called} may be {' or '.join(alike[:3])}"
        other_case = [name for name in self.files if name.lower() == plain.lower()]
        return f"no image {called}" + (f"; there is {other_case[0]}" if other_case else "")

    @staticmethod
    def _plain(called: str) -> str:
        return same_form(called.replace("\\", "/")).removeprefix("./")


def _nothing_fits(folder: Path, captions: Path, lines: list[Line], files: dict[str, Path]) -> Exception:
    there = next((name for name in files if is_image_name(name)), None)
    found = f"no image of {folder} (its first line is about {lines[0].name})"
    expected = f"names such as {there}" if there else f"images in {folder}, which has none"
    return input_error(captions, found, expected)


def _twins(photos: list[Photo]) -> list[Remark]:
    """Files with the same bytes: in two splits they would make a test too easy. Only files of one size are compared."""
    sizes = Counter(photo.size for photo in photos)
    first: dict[str, str] = {}
    remarks = []
    for photo in photos:
        digest = photo.digest() if sizes[photo.size] > 1 and photo.size else ""
        if digest and (other := first.setdefault(digest, photo.name)) != photo.name:
            remarks.append(Remark(NOTE, photo.name, f"the same bytes as {other}"))
    return remarks


def by_lot(photos: list[Photo]) -> list[Photo]:
    """The images in an order that only their names decide, and that has nothing to do with the alphabet."""
    return sorted(photos, key=lambda photo: hashlib.sha256(photo.name.encode()).digest())


def split_by_lot(photos: list[Photo], sizes: str) -> dict[str, list[Photo]]:
    """Split → images. sizes: proportions of train, dev and test, as ``"80,10,10"`` or ``"6000,1000,1000"``.

    The same names give the same splits on every machine, and each has at least one image.
    """
    parts = _proportions(sizes)
    order = by_lot(photos)
    dev, test = (max(1, round(len(order) * part / sum(parts))) for part in parts[1:])
    if len(order) < dev + test + 1:
        raise input_error("--split-sizes", f"{sizes} of {len(order)} images", "at least one image in each split")
    return {"train": order[dev + test :], "dev": order[test : dev + test], "test": order[:test]}


def _proportions(sizes: str) -> list[float]:
    try:
        parts = [float(part) for part in sizes.split(",")]
    except ValueError:
        parts = []
    if len(parts) != len(SPLITS) or not all(0 < part < float("inf") for part in parts):
        raise input_error(
            "--split-sizes", repr(sizes), "three numbers above 0 for train, dev and test, such as 80,10,10"
        )
    return parts


def split_by_lists(album: Album, lists: list[str]) -> dict[str, list[Photo]]:
    """Split → images in the order of its list. lists: ``"train=FILE"`` for each split, a name a line in the files."""
    by_name = {photo.name: photo for photo in album.photos}
    names = _Names({photo.name: photo.path for photo in album.photos}, album.remarks)
    splits: dict[str, list[Photo]] = {}
    home: dict[str, str] = {}
    for split, path in _read_lists(lists).items():
        for called in _listed(path):
            if (name := names.resolve(called)) is None:
                why = f"listed in {path.name}, but {names.why_not(called)} with captions"
                album.remarks.append(Remark(IMAGE, called, why))
            elif home.setdefault(name, split) != split:
                raise input_error(path, f"{name}, which is in {home[name]} too", "an image in one split only")
        splits[split] = [by_name[name] for name, chosen in home.items() if chosen == split]
        if not splits[split]:
            raise input_error(path, "no image that is in the folder and has captions", f"the images of {split}")
    album.remarks += [Remark(IMAGE, name, "in no list") for name in by_name if name not in home]
    return splits


def _read_lists(lists: list[str]) -> dict[str, Path]:
    paths = {}
    for pair in lists:
        split, equals, path = pair.partition("=")
        if not equals or not path or split not in SPLITS or split in paths:
            raise input_error("--split-list", repr(pair), f"split=FILE, once for each of {', '.join(SPLITS)}")
        paths[split] = Path(path)
    if absent := [split for split in SPLITS if split not in paths]:
        raise input_error("--split-list", f"no list for {' and '.join(absent)}", f"one for each of {', '.join(SPLITS)}")
    return {split: paths[split] for split in SPLITS}


def _listed(path: Path) -> list[str]:
    lines = read_text(path, "a list of images, one name a line, in UTF-8").split("\n")
    return [line.strip() for line in lines if line.strip()]
