"""The folder of an index: segments that are written once, and a manifest that names those that count.

Every call of ``add`` writes one segment, and costs what it adds. The manifest is replaced in one step when the segment is on
the disk: a killed call leaves the index as it was, and a file that nobody names, which the next call removes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from itm_lab.index.nearest import KINDS, automatic_kind, build_nearest, checked, nearest, read_nearest, write_nearest
from itm_utils.digests import file_digest
from itm_utils.errors import input_error
from itm_utils.files import atomic, check_file, read_text, write_json

MANIFEST = "index.json"
FORMAT = 1
ITEMS = ("images", "captions")
SEGMENT = re.compile(r"segment-\d{5}\.faiss")


@dataclass(frozen=True)
class Source:
    """Where the items of a segment come from. data: a dataset folder, or scenes. fingerprint: of the split's content."""

    data: str
    split: str
    fingerprint: str


@dataclass(frozen=True)
class Segment:
    """Vectors that were added together. kind: how faiss searches them. digest: of the file's bytes."""

    source: Source
    file: str
    kind: str
    rows: int
    digest: str


@dataclass(frozen=True)
class Encoder:
    """The model whose vectors an index holds. run: its folder or checkpoint. digest: of its weights.

    trained_on: the dataset folder with its vocabulary; empty if that is searched.
    """

    run: str
    digest: str
    name: str
    trained_on: str = ""


@dataclass(frozen=True)
class Index:
    """An index on disk. items: images or captions. width: of a vector."""

    folder: Path
    items: str
    width: int
    encoder: Encoder
    segments: tuple[Segment, ...] = ()

    @property
    def rows(self) -> int:
        """How many items it holds."""
        return sum(segment.rows for segment in self.segments)

    @property
    def starts(self) -> np.ndarray:
        """(segments,) number of the first item of each segment."""
        return np.cumsum([0, *(segment.rows for segment in self.segments)])[:-1]

    @cached_property
    def opened(self) -> list[Any]:
        """The faiss index of every segment, mapped into memory once its bytes are known to be those that were written."""
        return [self._open(segment) for segment in self.segments]

    def _open(self, segment: Segment) -> Any:
        path = check_file(self.folder / segment.file, "a segment of this index")
        if file_digest(path) != segment.digest:
            raise input_error(path, "other bytes than were written", "the segment as it was", "Build the index again.")
        found = read_nearest(path, segment.kind)
        if (found.ntotal, found.d) != (segment.rows, self.width):
            said = f"{found.ntotal:,} vectors of width {found.d}"
            raise input_error(path, said, f"{segment.rows:,} of width {self.width}, as {MANIFEST} says")
        return found

    def search(self, queries: np.ndarray, count: int, effort: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Scores and numbers (q, count) of the nearest items of all segments, the best first."""
        if count < 1:
            raise input_error("candidates", str(count), "at least 1")
        found = [
            nearest(index, segment.kind, queries, count, effort)
            for index, segment in zip(self.opened, self.segments, strict=True)
        ]
        scores = np.concatenate([part for part, _ in found], axis=1)
        numbers = [np.where(part < 0, -1, part + start) for (_, part), start in zip(found, self.starts, strict=True)]
        scores = np.where((numbers := np.concatenate(numbers, axis=1)) < 0, -np.inf, scores)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(scores, best, 1), np.take_along_axis(numbers, best, 1)

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Segment, and row within it, of each item."""
        segment = np.searchsorted(self.starts, numbers, side="right") - 1
        return segment, numbers - self.starts[segment]

    def add(self, source: Source, vectors: np.ndarray, kind: str = "auto") -> Index:
        """Write the vectors (n, d) of a split as a new segment; returns the index with it."""
        vectors = checked(vectors)
        if vectors.shape[1] != self.width:
            raise input_error("vectors", f"width {vectors.shape[1]}", f"{self.width}, as in {self.folder}")
        kind = automatic_kind(len(vectors)) if kind == "auto" else kind
        built = build_nearest(vectors, kind)
        with locked(self.folder):
            now = open_index(self.folder) if self.segments else self  # another process may have added meanwhile
            now.check_new(source)
            file = f"segment-{len(now.segments):05d}.faiss"
            for path in self.folder.iterdir():  # what a killed call left
                if SEGMENT.fullmatch(path.name) and path.name not in {one.file for one in now.segments}:
                    path.unlink()
            with atomic(self.folder / file) as temporary:
                write_nearest(built, temporary)
            segment = Segment(source, file, kind, len(vectors), file_digest(self.folder / file))
            grown = Index(self.folder, self.items, self.width, self.encoder, (*now.segments, segment))
            grown.write()
        return grown

    def check_new(self, source: Source) -> None:
        """Refuse what is in the index already."""
        if any(segment.source.fingerprint == source.fingerprint for segment in self.segments):
            expected = "a split that the index does not hold yet"
            raise input_error(self.folder, f"{source.data}, split {source.split}, already added", expected)

    def write(self) -> None:
        """Replace the manifest."""
        facts = {"items": self.items, "width": self.width, "encoder": asdict(self.encoder)}
        write_json(self.folder / MANIFEST, {"format": FORMAT, **facts, "segments": [asdict(s) for s in self.segments]})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time changes an index."""
    try:
        with FileLock(folder / ".lock", timeout=60):
            yield
    except Timeout:
        raise input_error(folder, "another process that adds to it", "one at a time", "Try again later.") from None


def create_index(folder: Path, items: str, width: int, encoder: Encoder) -> Index:
    """An index without segments, in a new folder; it is on the disk when the first segment is."""
    if items not in ITEMS:
        raise input_error("items", repr(items), f"one of {', '.join(ITEMS)}")
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return Index(folder, items, width, encoder)


def check_free(folder: Path) -> None:
    """Refuse a place where something is: nothing is overwritten. What a killed first call left is no index."""
    if folder.exists() and not folder.is_dir():
        raise input_error(folder, "a file", "a new folder for the index")
    if (folder / MANIFEST).exists():
        raise input_error(folder, "an index", "a new folder", "`itm index add` adds to it.")
    ours = re.compile(rf"\.lock|{SEGMENT.pattern}|\.segment-.*\.tmp")
    if folder.is_dir() and any(not ours.fullmatch(path.name) for path in folder.iterdir()):
        raise input_error(folder, "a folder that holds other files", "a new folder for the index")


def open_index(folder: Path) -> Index:
    """Read the manifest of an index."""
    if not folder.is_dir():
        raise input_error(folder, "no such folder", "an index that `itm index build` made")
    path = folder / MANIFEST
    try:
        found = json.loads(read_text(path, "the manifest of an index"))
        if (version := found["format"]) != FORMAT:
            raise input_error(path, f"format {version!r}", f"format {FORMAT}", "Build the index again.")
        encoder = _typed(Encoder, found["encoder"])
        segments = tuple(_segment(one) for one in found["segments"])
        index = Index(folder, found["items"], found["width"], encoder, segments)
        if index.items not in ITEMS or not isinstance(index.width, int) or not segments:
            raise ValueError("items, width or segments")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        raise input_error(path, f"no manifest of an index ({error!r})", "one that `itm index` wrote") from None
    return index


def _segment(found: dict[str, Any]) -> Segment:
    segment = _typed(Segment, found | {"source": _typed(Source, found["source"])})
    if not SEGMENT.fullmatch(segment.file) or segment.kind not in KINDS or segment.rows < 1:
        raise ValueError(f"segment {segment.file!r}")
    return segment


def _typed(kind: Any, found: dict[str, Any]) -> Any:
    """A dataclass from exactly its fields, each of its type."""
    made = kind(**found)
    for one in fields(kind):
        wanted = {"str": str, "int": int}.get(str(one.type))
        if wanted and not isinstance(getattr(made, one.name), wanted):
            raise ValueError(f"{one.name} = {getattr(made, one.name)!r}")
    return made
