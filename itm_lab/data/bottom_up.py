"""From bottom-up attention's TSV files to the precomputed format, with boxes and sizes.

    convert(["trainval_36.tsv"], "data/coco_precomp", "testall", wanted_from_karpathy(splits, "testall"))

A file of COCO has 65 GB, so it is read once from front to back and every image goes straight to its row of a mapped
file. The files grow in a hidden folder, with a journal of how far reading came; called again after an interruption,
conversion goes on from there to the same bytes. Only when every row is filled are they moved to their names, features
last: a split without features does not open, so half a split never looks whole.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from itm_lab.data.disk import (
    check_file,
    check_outputs,
    check_space,
    file_digest,
    make_folder,
    read_sealed,
    write_outputs,
    write_sealed,
)
from itm_lab.data.karpathy import image_key
from itm_lab.data.selection import Wanted, wanted_from_sources
from itm_lab.data.tsv import Line, Regions, decode, read_tsv
from itm_utils.errors import ItmError, input_error
from itm_utils.files import reserve
from itm_utils.progress import bar

NOTE_SECONDS = 10.0  # between two notes in the journal
NOTE_BYTES = 2**28  # written between two notes, at most: also what the maps may hold in memory
SAMPLE = 2**16  # bytes at both ends of a source that tell it from another of its size
JOURNAL = "journal.json"
DIGESTS = "digests"  # of each row of each file, while they grow
DIGEST_BYTES = 16


@dataclass
class Progress:
    """How far conversion came. source, offset, line: what is read next. filled: rows that are written."""

    source: int = 0
    offset: int = 0
    line: int = 0
    unwanted: int = 0
    finished: bool = False
    repeated: list[str] = field(default_factory=list)
    filled: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "filled": np.packbits(self.filled).tobytes().hex()}

    @classmethod
    def from_json(cls, content: dict[str, Any], rows: int) -> Progress:
        bits = np.frombuffer(bytes.fromhex(content["filled"]), dtype=np.uint8)
        return cls(**{**content, "filled": np.unpackbits(bits, count=rows).astype(bool)})


@dataclass(frozen=True)
class Converted:
    """What a conversion did. repeated: images that stand several times, alike. already: it was finished before."""

    rows: int
    regions: int
    width: int
    unwanted: int
    repeated: list[str]
    already: bool = False


def convert(
    sources: Sequence[str | Path],
    out: str | Path,
    split: str,
    wanted: Wanted | None = None,
    swap_sizes: bool = False,
    note_seconds: float = NOTE_SECONDS,
) -> Converted:
    """Write ``<split>_ims.npy``, ``_boxes.npy``, ``_sizes.npy`` and the texts of ``wanted`` to ``out``.

    sources: TSV files; together they must have every wanted image. An image that stands twice is an error, unless
    both lines say the same. swap_sizes: the files give heights as widths.
    """
    sources = [check_file(source, "a TSV file of bottom-up features") for source in sources]
    if not sources:
        raise input_error("TSV files", "none", "at least one")
    if not split or Path(split).name != split:
        raise input_error("split", repr(split), "a plain name such as train, dev, test or testall")
    wanted = wanted or wanted_from_sources(sources)
    first = next(read_tsv(sources[0]), None)
    if first is None or not wanted.ids:
        raise input_error(sources[0], "no image", "rows of bottom-up features")
    regions, width = decode(first, swap_sizes).features.shape
    digest = hashlib.sha256("\n".join(wanted.ids).encode()).hexdigest()
    facts = {"rows": len(wanted.ids), "regions": regions, "width": width, "ids": digest, "swapped": swap_sizes}
    staging = Path(out) / f".{split}_unfinished"
    make_folder(staging)
    with FileLock(Path(out) / f".{split}.lock"):  # a second process waits, and finds the work of the first
        return _Conversion(sources, Path(out), split, wanted, facts, staging, note_seconds).run()


class _Conversion:
    """One call of :func:`convert`. facts: what an unfinished or finished conversion of this split must agree with."""

    def __init__(
        self, sources: list[Path], out: Path, split: str, wanted: Wanted, facts: dict, staging: Path, seconds: float
    ) -> None:
        self.sources, self.out, self.split, self.wanted = sources, out, split, wanted
        self.facts, self.staging, self.seconds = facts, staging, seconds
        self.places = wanted.places(f"{out}, split {split}")
        self.described = [_described(source) for source in sources]
        self.texts = {out / f"{split}_{ending}": content for ending, content in wanted.texts.items()}
        self.record = out / f"{split}_source.json"
        rows, regions, width = facts["rows"], facts["regions"], facts["width"]
        self.shapes = {
            "sizes": ((rows, 2), np.int32),
            "boxes": ((rows, regions, 4), np.float32),
            "ims": ((rows, regions, width), np.float32),
        }

    def run(self) -> Converted:
        """Go on from the journal to the end."""
        check_outputs(self.texts)
        if self._target("ims").exists() and self._is_finished():
            shutil.rmtree(self.staging)
            return self._converted(self._read_record()["report"], already=True)
        self.progress = self._resume()
        if not self.progress.finished:
            self._fill()
        self._publish()
        return self._converted(self._report(), already=False)

    def _converted(self, report: dict[str, Any], already: bool) -> Converted:
        return Converted(**{name: self.facts[name] for name in ("rows", "regions", "width")}, **report, already=already)

    def _report(self) -> dict[str, Any]:
        return {"unwanted": self.progress.unwanted, "repeated": self.progress.repeated}

    def _target(self, kind: str) -> Path:
        return self.out / f"{self.split}_{kind}.npy"

    def _is_finished(self) -> bool:
        """Whether the split is there and came from the same files; another one in its place is an error."""
        hint = "Nothing was written. Move the old files away, or choose another folder or split."
        if not self.record.is_file():
            raise input_error(self._target("ims"), "features of another origin", "no such file", hint)
        record = self._read_record()
        if not {"facts", "sources", "report"} <= set(record):
            raise input_error(self.record, "another content", "the record of a conversion", hint)
        if record["facts"] != self.facts or record["sources"] != self.described:
            raise input_error(self.record, "a conversion of other files or images", "the same, or no such file", hint)
        self._check_files(record)
        return True

    @property
    def _anew(self) -> str:
        """What to do about a finished split that is damaged."""
        return f"Remove {', '.join(map(str, (self.record, *map(self._target, self.shapes))))} to convert again."

    def _read_record(self) -> dict[str, Any]:
        return read_sealed(self.record, "the record of a conversion", self._anew)

    def _check_files(self, record: dict[str, Any]) -> None:
        """Every byte is as it was written: of COCO's features this takes a minute or two."""
        for kind, digest in record.get("files", {}).items():
            if not self._target(kind).is_file() or file_digest(self._target(kind)) != digest:
                raise input_error(self._target(kind), "other bytes than were written", "those that were", self._anew)

    # -- the journal ------------------------------------------------------------------------------------------------

    def _resume(self) -> Progress:
        """Where an interrupted call came; else new files with a row for each image."""
        path = self.staging / JOURNAL
        if not path.is_file():
            return self._begin()
        note = read_sealed(path, "the journal of a conversion", f"Remove {self.staging} to begin anew.")
        try:
            noted, facts = note["sources"], note["facts"]
            same = facts == self.facts and self.described[: len(noted)] == noted  # more files may follow
            progress = Progress.from_json(note["progress"], self.facts["rows"]) if same else None
            if progress is not None and (not progress.finished or not self.record.exists()):
                self._open_maps()
                self._check_rows(progress)
        except (KeyError, TypeError, ValueError, OSError) as error:
            hint = f"Remove {self.staging} to begin anew."
            raise input_error(
                self.staging, f"damaged files ({error})", "those of an unfinished conversion", hint
            ) from error
        if progress is None:
            hint = f"Give the same files and images, or remove {self.staging} to begin anew."
            raise input_error(self.staging, "an unfinished conversion of other files or images", "the same", hint)
        return progress

    def _begin(self) -> Progress:
        for path in (*map(self._target, self.shapes), self.record):
            if path.exists():
                hint = "Nothing was written. Move it away, or choose another folder or split."
                raise input_error(path, "a file that is there already", "no such file", hint)
        needed = sum(int(np.prod(shape)) * 4 for shape, _ in self.shapes.values())
        check_space(self.out, needed, f"split {self.split}")
        for kind, (shape, dtype) in self.shapes.items():
            path = self.staging / f"{kind}.npy"
            np.lib.format.open_memmap(path, "w+", dtype, shape)
            reserve(path)
        np.save(
            self.staging / f"{DIGESTS}.npy", np.zeros((self.facts["rows"], len(self.shapes), DIGEST_BYTES), np.uint8)
        )
        self._open_maps()
        return Progress(filled=np.zeros(self.facts["rows"], dtype=bool))

    def _check_rows(self, progress: Progress) -> None:
        """Rows that an earlier call wrote are as it wrote them: they are read once."""
        for kind, (shape, dtype) in self.shapes.items():
            header = _header(shape, dtype)
            with (self.staging / f"{kind}.npy").open("rb") as file:
                if file.read(len(header)) != header:
                    raise ValueError(f"another header of {kind}.npy than was written")
        for row in np.flatnonzero(progress.filled):
            if (self.maps[DIGESTS][row] != self._row_digests(int(row))).any():
                raise ValueError(f"row {row} other than was written")

    def _row_digests(self, row: int) -> np.ndarray:
        """(kinds, 16) hashes of a row of each file."""
        rows = (np.ascontiguousarray(self.maps[kind][row]) for kind in self.shapes)
        digests = [hashlib.blake2b(values.tobytes(), digest_size=DIGEST_BYTES).digest() for values in rows]
        return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(self.shapes), DIGEST_BYTES)

    def _open_maps(self) -> None:
        """Map the files anew: pages that are written are no longer counted as memory of this process."""
        kinds = (*self.shapes, DIGESTS)
        self.maps = {kind: np.lib.format.open_memmap(self.staging / f"{kind}.npy", "r+") for kind in kinds}
        self.unnoted, self.noted = 0, time.monotonic()

    def _note(self) -> None:
        """First the rows reach the disk, then the journal says so."""
        for array in self.maps.values():
            array.flush()
        note = {"facts": self.facts, "sources": self.described, "progress": self.progress.to_json()}
        write_sealed(self.staging / JOURNAL, note)
        self._open_maps()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Read on, to the end of the last file."""
        progress, rows = self.progress, self.facts["rows"]
        try:
            with bar((), "convert", "image", total=rows, initial=int(progress.filled.sum())) as shown:
                for number in range(progress.source, len(self.sources)):
                    for line in read_tsv(self.sources[number], progress.offset, progress.line):
                        shown.update(self._take(line))
                        progress.offset, progress.line = line.end, line.number
                        if self.unnoted >= NOTE_BYTES or time.monotonic() - self.noted >= self.seconds:
                            self._note()
                    progress.source, progress.offset, progress.line = number + 1, 0, 0
        except ItmError:  # of a damaged line: what stands before it need not be read again
            self._note()
            raise
        self._note()
        self._check_filled()
        progress.finished = True
        self._note()

    def _take(self, line: Line) -> bool:
        """Put an image into its row; False where it is not wanted or there already."""
        row = self.places.get(image_key(line.name))
        if row is None:
            self.progress.unwanted += 1
            return False
        found = decode(line, self.facts["swapped"])
        expected = self.facts["regions"], self.facts["width"]
        if found.features.shape != expected:
            shape = "{} boxes with {} numbers each"
            hint = "All images need as many boxes: use a file with a fixed number, such as 36."
            raise line.input_error(shape.format(*found.features.shape), shape.format(*expected) + ", as before", hint)
        if self.progress.filled[row]:
            if not found.same(self._row(row)):
                hint = "Remove one of them from the TSV files."
                raise line.input_error("the image again, with other numbers", "every image once", hint)
            self.progress.repeated.append(line.name)
            return False
        for kind, values in {"ims": found.features, "boxes": found.boxes, "sizes": found.size}.items():
            self.maps[kind][row] = values
        self.maps[DIGESTS][row] = self._row_digests(row)
        self.progress.filled[row] = True
        self.unnoted += found.features.nbytes
        return True

    def _row(self, row: int) -> Regions:
        width, height = self.maps["sizes"][row].tolist()
        return Regions(self.maps["ims"][row], self.maps["boxes"][row], (width, height))

    def _check_filled(self) -> None:
        missing = np.flatnonzero(~self.progress.filled)
        if len(missing):
            files = ", ".join(source.name for source in self.sources)
            first, rows = self.wanted.ids[missing[0]], len(self.wanted.ids)
            found = f"{len(missing):,} of {rows:,} images in no file, first {first}"
            hint = "Give the file that has them as well, after these: what was read is kept."
            raise input_error(files, found, "all images of the split", hint)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Move the files to their names, features last; after an interruption, those that are left."""
        self.maps = {}
        write_outputs(self.texts)
        if not self.record.exists():
            files = {kind: file_digest(self.staging / f"{kind}.npy") for kind in self.shapes}
            about = {"facts": self.facts, "sources": self.described, "report": self._report(), "files": files}
            write_sealed(self.record, about)
        for kind in self.shapes:  # features are the last of them
            staged = self.staging / f"{kind}.npy"
            if staged.exists():
                if self._target(kind).exists():
                    raise input_error(
                        self._target(kind), "a file that came in between", "no such file", "Move it away."
                    )
                os.replace(staged, self._target(kind))
        self._check_files(self._read_record())
        shutil.rmtree(self.staging)


def _header(shape: tuple[int, ...], dtype: Any) -> bytes:
    """The first bytes of an array's file."""
    buffer = io.BytesIO()
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()


def _described(source: Path) -> dict[str, Any]:
    """Name, size and a hash of both ends: tells a file from another without reading 65 GB."""
    size = source.stat().st_size
    with source.open("rb") as file:
        ends = file.read(SAMPLE)
        file.seek(max(0, size - SAMPLE))
        ends += file.read(SAMPLE)
    return {"name": source.name, "bytes": size, "ends": hashlib.sha256(ends).hexdigest()}
