"""Karpathy's JSON splits: ``dataset_flickr30k.json``, ``dataset_coco.json``, ``dataset_flickr8k.json``.

A file holds ``images``, each with ``filename``, ``split`` and ``sentences`` (``raw`` text and ``tokens``); COCO's also
with ``cocoid``. Its split ``restval`` (COCO's validation images that are neither val nor test) belongs to train.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.data.disk import array_bytes, counted, lines_bytes, read_json, write_outputs
from itm_utils.errors import input_error

# Our name of a split → Karpathy's.
SPLITS = {"train": "train", "dev": "val", "val": "val", "test": "test", "testall": "test"}
JOINED = {"train": "train", "restval": "train", "val": "val", "test": "test"}
FOLD = 1000  # the public COCO package calls the first 1,000 of testall test
MANY_WORDS = 100
COCO_NAME = re.compile(r"COCO_[a-z]+\d{4}_(\d{12})$")
IMAGE_SUFFIX = re.compile(r"\.(jpe?g|png|gif|bmp|webp)$", re.IGNORECASE)
# Control characters, what some readers take for the end of a line, and halves of pairs that no file can hold.
BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
NOT_READ = ("tokens", "sentids", "sentid", "filepath")  # most of a file's content
HINT = "Karpathy's dataset_coco.json, dataset_flickr30k.json or dataset_flickr8k.json are meant."


@dataclass(frozen=True)
class KarpathyImage:
    """An image of a split. number: COCO's id, or the number within Karpathy's file. rest: it came from restval."""

    name: str
    number: int
    captions: tuple[str, ...]
    rest: bool = False


@dataclass(frozen=True)
class Karpathy:
    """A file of splits. remarks: what was found in captions, and what was done about it."""

    path: Path
    coco: bool
    splits: dict[str, list[KarpathyImage]]
    remarks: list[str]

    def images_of(self, split: str) -> list[KarpathyImage]:
        """The images of one of our splits in the order of the file; COCO's ``test`` is the first fold of ``testall``."""
        if split not in SPLITS:
            raise input_error("split", split, f"one of {', '.join(SPLITS)}")
        found = self.splits.get(SPLITS[split], [])
        if not found:
            there = ", ".join(sorted(self.splits))
            raise input_error(
                self.path, f"no image of split {SPLITS[split]}", f"a file that has it; this one has {there}"
            )
        return found[:FOLD] if self.coco and split == "test" else found

    def ours(self) -> list[str]:
        """The names that the precomputed format has for the splits of this file."""
        tests = ["testall", "test"] if self.coco else ["test"]
        named = {"train": ["train"], "val": ["dev"], "test": tests}
        return [name for theirs, names in named.items() if theirs in self.splits for name in names]

    def id_of(self, image: KarpathyImage, names: bool | None = None) -> str:
        """How ``*_ids.txt`` calls an image: by its file name; in COCO by its number, as the judgements of ECCV do."""
        by_name = not self.coco if names is None else names
        return image.name if by_name else str(image.number)

    def file_names(self) -> dict[int, str]:
        """Number of an image → its file name, over all splits."""
        return {image.number: image.name for found in self.splits.values() for image in found}


def coco_file_name(number: int, folder: str = "val2014") -> str:
    """File name of a COCO image.

    >>> coco_file_name(391895)
    'COCO_val2014_000000391895.jpg'
    """
    return f"COCO_{folder}_{number:012d}.jpg"


def image_key(name: str) -> str:
    """One spelling for all names of an image: COCO's number, or the file name without folder and ending.

    >>> image_key("val2014/COCO_val2014_000000391895.jpg"), image_key("391895"), image_key("100_ab.jpg")
    ('391895', '391895', '100_ab')
    """
    stem = IMAGE_SUFFIX.sub("", re.split(r"[/\\]", name.strip())[-1])
    coco = COCO_NAME.fullmatch(stem)
    digits = coco[1] if coco else stem
    return (digits.lstrip("0") or "0") if digits.isascii() and digits.isdigit() else stem


def read_karpathy(path: str | Path) -> Karpathy:
    """Read and check a file of splits."""
    path = Path(path)
    content = read_json(path, "a JSON file of Karpathy's splits", _what_is_read)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not images:
        found = f"a {type(content).__name__}" if images is None else f"images that are a {type(images).__name__}"
        raise input_error(path, f"{found} without a list of images", "an object with images", HINT)
    remarks = _Remarks()
    splits: dict[str, list[KarpathyImage]] = {}
    for place, record in enumerate(images):
        split, image = _karpathy_image(path, place, record, remarks)
        splits.setdefault(split, []).append(image)
    _check_unique(path, splits)
    coco = sum("cocoid" in record for record in images)
    if coco not in (0, len(images)):
        raise input_error(
            path, f"a cocoid in {coco:,} of {len(images):,} images", "one in all of them, or in none", HINT
        )
    return Karpathy(path, bool(coco), splits, remarks.lines())


def _what_is_read(record: dict[str, Any]) -> dict[str, Any]:
    """An object of the file without what is not asked for: all of COCO's would be a gigabyte in memory."""
    if "tokens" in record and "raw" not in record:
        return record
    return {name: value for name, value in record.items() if name not in NOT_READ}


def _karpathy_image(path: Path, place: int, record: Any, remarks: _Remarks) -> tuple[str, KarpathyImage]:
    """The split of one record, and the record as an image."""
    where = f"{path}, images[{place}]"
    if not isinstance(record, dict):
        raise input_error(where, f"a {type(record).__name__}", "an object with filename, split and sentences", HINT)
    for name, kind in {"filename": str, "split": str, "sentences": list}.items():
        if not isinstance(record.get(name), kind):
            found = "none" if name not in record else f"a {type(record[name]).__name__}"
            raise input_error(where, f"{found} as {name}", f"a {kind.__name__}", HINT)
    if record["split"] not in JOINED:
        raise input_error(where, f"split {record['split']}", f"one of {', '.join(JOINED)}")
    name = record["filename"].strip()
    if not name or BREAKS.search(name):
        raise input_error(where, f"{name!r} as filename", "a name on one line of text", HINT)
    number = record.get("cocoid", record.get("imgid", place))
    if type(number) is not int:  # not isinstance: true is no number
        raise input_error(where, f"{number!r} as number of the image", "a whole number")
    kept = [remarks.cleaned(_words(where, sentence), name) for sentence in record["sentences"]]
    captions = tuple(caption for caption in kept if caption)
    if not captions:
        raise input_error(where, f"not one caption of {name}", "at least one")
    return JOINED[record["split"]], KarpathyImage(name, number, captions, record["split"] == "restval")


def _words(where: str, sentence: Any) -> str:
    """The text of a sentence: raw, or its tokens where a file has only those."""
    raw = sentence.get("raw", sentence.get("tokens")) if isinstance(sentence, dict) else None
    if isinstance(raw, list) and all(isinstance(token, str) for token in raw):
        return " ".join(raw)
    if not isinstance(raw, str):
        raise input_error(where, "a sentence without raw text and tokens", "sentences with raw or tokens", HINT)
    return raw


def _check_unique(path: Path, splits: dict[str, list[KarpathyImage]]) -> None:
    """No image stands twice, in whichever splits."""
    everything = [image for found in splits.values() for image in found]
    for what in ("name", "number"):
        value, times = Counter(getattr(image, what) for image in everything).most_common(1)[0]
        if times > 1:
            raise input_error(path, f"{what} {value} of {times} images", "every image once")


class _Remarks:
    """Counts what is odd about captions, and remembers the first of each kind."""

    def __init__(self) -> None:
        self.count: Counter[tuple[str, str]] = Counter()
        self.first: dict[tuple[str, str], str] = {}

    def cleaned(self, raw: str, image: str) -> str:
        """A caption on one line; empty where nothing is left of it."""
        # A line break within a caption would shift all captions after it by one.
        caption = BREAKS.sub(" ", raw).strip()
        if caption != raw.strip():
            self._add("caption", "with control characters, now spaces", image)
        if not caption:
            self._add("empty caption", "left out", image)
        if len(caption.split()) > MANY_WORDS:
            self._add("caption", f"of more than {MANY_WORDS} words, kept", image)
        return caption

    def _add(self, noun: str, rest: str, image: str) -> None:
        self.count[noun, rest] += 1
        self.first.setdefault((noun, rest), image)

    def lines(self) -> list[str]:
        return [f"{counted(self.count[what], what[0])} {what[1]} (first: {self.first[what]})" for what in self.count]


def split_files(splits: Karpathy, split: str, most: int = 0) -> dict[str, bytes]:
    """The text files of a split in the precomputed format: ending of the name → content.

    most: captions of an image, at most; 0 for all. ``owners.npy`` is there where the numbers differ,
    ``names.txt`` (file name of each image) where ``ids.txt`` has numbers.
    """
    images_of = splits.images_of(split)
    captions = [image.captions[: most or None] for image in images_of]
    counts = [len(of_one) for of_one in captions]
    files = {
        "caps.txt": lines_bytes([caption for of_one in captions for caption in of_one]),
        "ids.txt": lines_bytes([splits.id_of(image) for image in images_of]),
    }
    if splits.coco:
        files["names.txt"] = lines_bytes([image.name for image in images_of])
    if len(set(counts)) > 1:
        files["owners.npy"] = array_bytes(np.repeat(np.arange(len(counts)), counts))
    return files


def write_split_captions(path: str | Path, out: str | Path, most: int = 0) -> tuple[Karpathy, list[Path]]:
    """Captions, ids and owners of every split of a file; returns the file as read, and what was written."""
    splits = read_karpathy(path)
    outputs = {
        Path(out) / f"{split}_{ending}": content
        for split in splits.ours()
        for ending, content in split_files(splits, split, most).items()
    }
    return splits, write_outputs(outputs)
