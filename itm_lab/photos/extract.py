"""From a folder of photographs and a captions file to the precomputed format, in steps that can be interrupted.

Everything is written to ``.<name>.unfinished`` beside the place it shall have. After each batch a note says how far it is
safe; at the end the folder ``data`` in there gets its place in one step. So the place is empty or whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from filelock import FileLock, Timeout
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from itm_lab.data.disk import file_digest, make_folder, read_sealed, write_sealed
from itm_lab.photos import pca
from itm_lab.photos.album import SPLITS, Photo, by_lot, read_album, split_by_lists, split_by_lot
from itm_lab.photos.appendable_npy import GrowingArray
from itm_lab.photos.image_files import UnreadableError
from itm_lab.photos.network import EfficientNetLite0, Network
from itm_lab.photos.regions import Cells, Source
from itm_lab.photos.report import IMAGE, NOTE, Remark, as_text
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import SPECIAL, Vocabulary
from itm_utils.errors import input_error
from itm_utils.files import atomic, write_text
from itm_utils.progress import bar

BATCH = 16  # images that go through the network at once; it decides the last digits of the features
FACTS, SKIPPED, STATE, DATA, VOCABULARY = "features.json", "skipped.txt", "state.json", "data", "photos_vocab.json"
REPORTED = ("pictures", "captions", "made_with", "files")  # in the description, and no facts that decide the output
SAMPLE = "sample"  # the images that components are computed from, while they are


@dataclass(frozen=True)
class Made:
    """What is in the folder now. splits: name → (images, captions). kept: it was whole already.

    images, seconds: what this call did of it.
    """

    folder: Path
    splits: dict[str, tuple[int, int]]
    words: int
    remarks: list[Remark]
    kept: bool = False
    images: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Beside:
    """What else a dataset gets. facts: all that decides it. write: fills the folder of whole splits, given their images."""

    facts: Mapping[str, Any]
    write: Callable[[Path, Mapping[str, list[Photo]]], list[Remark]]


def extract(
    photos: Path,
    captions: Path,
    out: Path,
    sizes: str = "80,10,10",
    lists: list[str] | None = None,
    least: int = 4,
    network: Network | None = None,
    source: Source | None = None,
    components: str = "",
) -> Made:
    """Write the features of every image that has a caption. Called again after an interruption, it goes on.

    sizes: proportions of train, dev and test; or lists: ``split=FILE`` for each of them. least: how often a word must
    occur in train and dev to be in the vocabulary. source: what turns images into regions; else the cells of a network,
    EfficientNet-Lite0 unless another is given. components: how many numbers are left of each region, or the dataset whose
    components are taken.
    """
    album = read_album(photos, captions)
    splits = split_by_lists(album, lists) if lists else split_by_lot(album.photos, sizes)
    source = source or Cells(network or EfficientNetLite0())
    return extract_splits(splits, out, source, least, components, album.remarks)


def extract_splits(
    splits: dict[str, list[Photo]],
    out: Path,
    source: Source,
    least: int,
    components: str = "",
    remarks: list[Remark] | None = None,
    beside: Beside | None = None,
) -> Made:
    """The same from images whose splits are known. beside: what the folder gets besides features and texts."""
    check_vocabulary(splits, least)
    facts = (
        facts_of(splits, source, least)
        | _facts_of_components(components, source.width)
        | dict(beside.facts if beside else {})
    )
    out = out if out.name not in ("", "..") else out.resolve()
    _finished(out, facts)  # before anything is made
    staging = out.parent / f".{out.name}.unfinished"
    with _lock_run_dir(staging):
        if (made := _finished(out, facts)) is None:
            matrix = _components(components, staging, splits, source, facts)
            work = _Extraction(staging, splits, source, facts, matrix)
            work.run()
            made = work.finish(out, remarks or [], least, beside)
    shutil.rmtree(staging, ignore_errors=True)  # also what an interruption right at the end may have left
    return made


def facts_of(splits: dict[str, list[Photo]], source: Source, least: int) -> dict[str, Any]:
    """Everything that decides the output: an interrupted call may only go on where all of it is the same.

    Of the images that is every byte: one may change and keep its size. To read them is a hundredth of the work.
    """
    inputs = hashlib.sha256()
    pairs = [(split, photo) for split, photos in splits.items() for photo in photos]
    for split, photo in bar(pairs, "compare", "image"):
        inputs.update(json.dumps([split, photo.name, photo.digest(), photo.captions]).encode())
    return source.facts | {"batch": BATCH, "least_count": least, "inputs": inputs.hexdigest()}


def _facts_of_components(components: str, width: int) -> dict[str, Any]:
    """How many components, of how many images; or the digest of those of another dataset."""
    if not components:
        return {}
    if not components.isascii() or not components.isdigit():
        known = pca.read_components(Path(components), width)
        return {"components": known.shape[1], "components_digest": hashlib.sha256(known.tobytes()).hexdigest()}
    if len(components) > 6 or not 0 < int(components) < width:
        raise input_error("--pca", components, f"1 to {width - 1}, or a dataset that was made with --pca")
    return {"components": int(components), "components_from": pca.FIT_IMAGES}


def _components(
    components: str, staging: Path, splits: dict[str, list[Photo]], source: Source, facts: dict[str, Any]
) -> np.ndarray | None:
    """(d + 1, k) what features are multiplied with: that of another dataset, or of some training images, in steps too."""
    if not components:
        return None
    if "components_digest" in facts:
        return pca.read_components(Path(components), source.width)
    path = staging / pca.FILE
    if not path.exists():
        chosen = {SAMPLE: by_lot(splits["train"])[: pca.FIT_IMAGES]}
        work = _Extraction(staging / SAMPLE, chosen, source, facts)
        work.run()
        regions = work.close(SAMPLE).reshape(-1, source.width)
        if len(regions) <= (count := facts["components"]):
            found = f"{count} components of {len(regions):,} regions of training images"
            raise input_error("--pca", found, "more regions than components", "Give a smaller number, or more images.")
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.save(file, pca.fit(regions, facts.get("layers", [source.width]), count))
    shutil.rmtree(staging / SAMPLE, ignore_errors=True)
    return pca.read_components(path, source.width)


def check_vocabulary(splits: dict[str, list[Photo]], least: int) -> Vocabulary:
    """The words of train and dev; none at all is an error before anything is computed."""
    said = [caption for split in ("train", "dev") for photo in splits[split] for caption in photo.captions]
    words = Vocabulary.build(said, least)
    if len(words) == len(SPECIAL):
        found = f"no word that occurs {least} times in {len(said)} captions"
        raise input_error("--min-count", found, "a vocabulary", "Give a smaller number, or more captions.")
    return words


def _finished(out: Path, facts: dict[str, Any]) -> Made | None:
    """What stands in ``out`` if it was made from the same inputs; anything else there is not touched."""
    hint = "Give another --out, or move it away."
    if out.is_symlink() and not out.exists():
        raise input_error(out, "a symbolic link that leads nowhere or in a circle", "an empty place", hint)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / FACTS).is_file():
        raise input_error(out, "a folder with other files" if out.is_dir() else "a file", "an empty place", hint)
    known = read_sealed(out / FACTS, "the description of features", hint)
    for name, digest in known.get("files", {}).items():
        if not (out / name).is_file() or file_digest(out / name) != digest:
            raise input_error(
                out / name, "other bytes than were written", "those that were", f"Remove {out} to repeat."
            )
    try:
        splits = {split: (known["pictures"][split], known["captions"][split]) for split in SPLITS}
        same = {name: value for name, value in known.items() if name not in REPORTED} == facts
        said = [Remark(*line.split("\t")) for line in (out / SKIPPED).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise input_error(out / FACTS, f"no description of features ({error!r})", "an empty place", hint) from error
    if not same:
        raise input_error(out, "features of other images, captions or settings", "an empty place", hint)
    return Made(out, splits, len(Vocabulary.of_folder(out)), said, kept=True)


def _lock_run_dir(staging: Path) -> AbstractContextManager:
    """One process a folder. The lock falls with the process, however it ends."""
    make_folder(staging)
    try:
        return FileLock(staging / ".lock").acquire(timeout=0)
    except Timeout:
        raise input_error(staging, "that another process is writing it", "one at a time", "Wait for it.") from None


@dataclass
class State:
    """The note. batches: that are safe. rows: of each split. remarks: on images so far. left_out: their names.

    digests: of the rows of each split, as far as they are safe.
    """

    facts: dict[str, Any]
    batches: NonNegativeInt = 0
    rows: dict[str, NonNegativeInt] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    remarks: list[tuple[str, str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


NOTED = TypeAdapter(State)  # notes from before they were sealed hold what a disk made of them


class _Extraction:
    """One call of :func:`extract`, under its lock. components: (d + 1, k) what features are multiplied with, if anything."""

    def __init__(
        self,
        staging: Path,
        splits: dict[str, list[Photo]],
        source: Source,
        facts: dict[str, Any],
        components: np.ndarray | None = None,
    ) -> None:
        self.staging, self.data, self.splits = staging, staging / DATA, splits
        self.source, self.components = source, components
        self.width = source.width if components is None else components.shape[1]
        self.state = self._resume(facts)
        make_folder(self.data)
        for half in self.data.glob(".*.tmp"):  # a file that was being written when the last call ended
            half.unlink()
        rows = self.state.rows
        self.arrays = {split: self._arrays(split, rows.get(split, 0)) for split in splits}
        for split, digest in self.state.digests.items():
            if self._digest(split) != digest:
                found = "rows other than were written before the interruption"
                hint = f"Remove {staging} to start over."
                raise input_error(self.arrays[split]["ims"].path, found, "undamaged rows", hint)

    def _arrays(self, split: str, rows: int) -> dict[str, GrowingArray]:
        """The growing files of a split."""
        regions = self.source.regions
        kinds: dict[str, tuple[tuple[int, ...], str]] = {
            "ims": ((regions, self.width), "<f2"),
            "boxes": ((regions, 4), "<f4"),
            "sizes": ((2,), "<i4"),
            "kinds": ((regions,), "|u1"),
        }
        if "kinds" not in self.source.facts:  # all regions are cells
            del kinds["kinds"]
        return {
            kind: GrowingArray(self.data / f"{split}_{kind}.npy", row, dtype, rows)
            for kind, (row, dtype) in kinds.items()
        }

    def _digest(self, split: str) -> str:
        return " ".join(array.digest.hexdigest() for array in self.arrays[split].values())

    def _resume(self, facts: dict[str, Any]) -> State:
        path = self.staging / STATE
        if not path.exists():
            return State(facts)
        hint = f"Remove {self.staging} to start over."
        try:
            state = NOTED.validate_python(read_sealed(path, "how far the last call came", hint))
        except ValidationError as error:
            first = error.errors()[0]
            found = f"a damaged note ({'.'.join(map(str, first['loc']))}: {first['msg']})"
            raise input_error(path, found, "how far the last call came", hint) from error
        for name in (*facts, *(name for name in state.facts if name not in facts)):
            if state.facts.get(name) != facts.get(name):
                found = f"a call that was interrupted, with other {name}"
                raise input_error(path, found, "the same images, captions and settings", hint)
        return state

    def run(self) -> None:
        """All batches that are not safe yet. A batch never crosses from one split to another."""
        batches = [
            (split, photos[first : first + BATCH])
            for split, photos in self.splits.items()
            for first in range(0, len(photos), BATCH)
        ]
        done, start = self.state.batches, time.perf_counter()
        for number in bar(range(done, len(batches)), "features", "batch", initial=done, total=len(batches)):
            self._batch(*batches[number])
            self.state.batches = number + 1
            write_sealed(self.staging / STATE, asdict(self.state))
        self.images = sum(len(photos) for _, photos in batches[done:])
        self.seconds = time.perf_counter() - start

    def _batch(self, split: str, photos: list[Photo]) -> None:
        """Read, look, append: rows first, the note about them (by the caller) after."""
        images = []
        for photo in photos:
            try:
                image = self.source.read(photo.path)
            except UnreadableError as reason:
                self.state.left_out.append(photo.name)
                self.state.remarks.append((IMAGE, photo.name, str(reason)))
                continue
            images.append(image)
            self.state.remarks += [(NOTE, photo.name, note) for note in image.notes]
        arrays = self.arrays[split]
        if images:
            seen, sizes = self.source(images), np.array([image.size for image in images])
            features = seen.features if self.components is None else pca.project(seen.features, self.components)
            self._check(features, len(images))
            values = {
                "ims": features,
                "boxes": seen.boxes * np.tile(sizes, 2)[:, None],
                "sizes": sizes,
                "kinds": seen.kinds,
            }
            for kind, array in arrays.items():
                array.append(values[kind])
        self.state.rows[split], self.state.digests[split] = arrays["ims"].rows, self._digest(split)

    def _check(self, features: np.ndarray, images: int) -> None:
        wanted = (images, self.source.regions, self.width)
        with np.errstate(over="ignore"):  # what half precision cannot hold is found just here
            finite = features.shape == wanted and np.isfinite(features.astype(np.float16)).all()
        if not finite:
            found = f"features of shape {features.shape}" if features.shape != wanted else "a NaN or infinity"
            raise input_error(self.source.name, found, f"finite half-precision numbers of shape {wanted}")

    def close(self, split: str) -> np.ndarray:
        """Close the files of a split; returns its features, mapped."""
        for array in self.arrays[split].values():
            array.close()
        return np.load(self.arrays[split]["ims"].path, mmap_mode="r")

    def finish(self, out: Path, remarks: list[Remark], least: int, beside: Beside | None) -> Made:
        """Everything beside the features, then the last step: the folder gets its place."""
        left_out = set(self.state.left_out)
        read = {split: [p for p in photos if p.name not in left_out] for split, photos in self.splits.items()}
        for split, photos in read.items():
            if not photos:
                _, first, why = next(remark for remark in self.state.remarks if remark[1] == self.splits[split][0].name)
                found = f"none of {len(self.splits[split])} images readable (first: {first}, {why})"
                hint = f"Repair or replace images, then remove {self.staging} to start over."
                raise input_error(f"split {split}", found, "at least one that can be read", hint)
            self._write_split(split, photos)
        words = check_vocabulary(read, least)
        words.save(self.data / VOCABULARY)
        if self.components is not None:
            np.save(self.data / pca.FILE, self.components)
        remarks = [*remarks, *(Remark(*parts) for parts in self.state.remarks)]
        remarks += beside.write(self.data, read) if beside else []
        write_text(self.data / SKIPPED, as_text(remarks))
        counts = {split: (len(photos), sum(len(p.captions) for p in photos)) for split, photos in read.items()}
        versions = {"torch": torch.__version__, "pillow": PIL.__version__, "numpy": np.__version__}
        numbers = {
            what: {split: n[k] for split, n in counts.items()} for k, what in enumerate(("pictures", "captions"))
        }
        files = {path.name: file_digest(path) for path in sorted(self.data.iterdir()) if path.name != FACTS}
        write_sealed(self.data / FACTS, {**self.state.facts, **numbers, "made_with": versions, "files": files})
        for split in read:
            open_split(self.data, split)  # what our own reader refuses must not get its place
        give_place(self.data, out)
        return Made(out, counts, len(words), remarks, images=self.images, seconds=self.seconds)

    def _write_split(self, split: str, photos: list[Photo]) -> None:
        self.close(split)
        write_text(self.data / f"{split}_ids.txt", "".join(f"{photo.name}\n" for photo in photos))
        write_text(self.data / f"{split}_caps.txt", "".join(f"{c}\n" for photo in photos for c in photo.captions))
        counts = [len(photo.captions) for photo in photos]
        # Without this file the reader takes equal numbers for granted, and with one a row it looks for repeated rows.
        if len(set(counts)) > 1 or counts[0] == 1:
            np.save(self.data / f"{split}_owners.npy", np.repeat(np.arange(len(photos)), counts))


def give_place(folder: Path, out: Path) -> None:
    """Bring every byte to the disk, then rename."""
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if out.is_dir():
        out.rmdir()  # it is empty: the check was made before
    folder.rename(out)
