"""Rows of bottom-up attention's TSV files: one image a line, numbers in base64.

Two layouts are in use, told apart by the number of columns; a first line with names of columns is also understood.
Lines are read as bytes and cut at tabs: a row has 400,000 characters, more than Python's CSV reader takes.
"""

from __future__ import annotations

import binascii
import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from itm_lab.data.disk import check_file, gigabytes
from itm_utils.errors import ItmError, input_error

SIX = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
TEN = (
    "img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf", "num_boxes", "boxes", "features",
)  # fmt: skip
LAYOUTS = {len(names): names for names in (SIX, TEN)}
SHORT = {"image_id": "id", "img_id": "id", "image_w": "width", "img_w": "width", "image_h": "height", "img_h": "height"}
WANTED = ("id", "width", "height", "num_boxes", "boxes", "features")
EDGE = 1.0  # pixels that a box may reach beyond its image: detectors round
LONGEST = 2**26  # bytes of a line: a hundred boxes take one million


@dataclass(frozen=True)
class Line:
    """A line that is cut into columns and not decoded yet. end: where the next one begins. number: from 1."""

    path: Path
    number: int
    end: int
    columns: dict[str, bytes]

    @property
    def name(self) -> str:
        """The image, as the file calls it."""
        return self.columns["id"].decode("utf-8", "replace").strip()

    def input_error(self, found: str, expected: str, hint: str = "") -> ItmError:
        """An error that names file, line and image."""
        name = "".join(c if c.isprintable() else "?" for c in self.name[:40]) or "?"
        return input_error(f"{self.path}, line {self.number} (image {name})", found, expected, hint)


@dataclass(frozen=True, eq=False)
class Regions:
    """What a line says of its image. features: (r, d); boxes: (r, 4) x1 y1 x2 y2 in pixels; size: width, height."""

    features: np.ndarray
    boxes: np.ndarray
    size: tuple[int, int]

    def same(self, other: Regions) -> bool:
        """Equal to the last bit."""
        arrays = (self.features, other.features), (self.boxes, other.boxes)
        return self.size == other.size and all(np.array_equal(here, there) for here, there in arrays)


def read_tsv(path: str | Path, start: int = 0, number: int = 0) -> Iterator[Line]:
    """The rows of a file, from byte ``start`` on, before which ``number`` lines stand."""
    path = check_file(path, "a TSV file of bottom-up features")
    with path.open("rb") as file:
        names = _header(path, file.readline(LONGEST))
        file.seek(start)
        while text := file.readline(LONGEST):
            number += 1
            if len(text) == LONGEST:  # a file without line ends would fill the memory
                found = f"a line of {gigabytes(LONGEST)} or more"
                raise input_error(f"{path}, line {number}", found, "an image a line", "Is it a TSV file?")
            fields = _fields(text, first=number == 1)
            if number == 1 and names is not None:
                continue
            if fields == [b""]:
                continue
            yield Line(path, number, file.tell(), _columns(path, number, fields, names))


def _fields(text: bytes, first: bool) -> list[bytes]:
    """A line cut at its tabs; the first may begin with a byte-order mark."""
    text = text.removeprefix(codecs.BOM_UTF8) if first else text
    return text.rstrip(b"\r\n").split(b"\t")


def _header(path: Path, text: bytes) -> list[str] | None:
    """Names of columns, if the first line has them."""
    first = _fields(text, first=True)
    if first[0] not in (b"image_id", b"img_id"):
        return None
    names = [name.decode("utf-8", "replace").strip() for name in first]
    missing = sorted(set(WANTED) - {SHORT.get(name, name) for name in names})
    if missing:
        raise input_error(path, f"no column {missing[0]}", f"the columns {', '.join(SIX)}")
    return names


def _columns(path: Path, number: int, fields: list[bytes], names: list[str] | None) -> dict[str, bytes]:
    """Name of a column → its text; names: those of the file's first line, else by the number of columns."""
    layout = names or LAYOUTS.get(len(fields))
    if layout is None or len(layout) != len(fields):
        expected = f"{len(names)} as in the first line" if names else f"6 ({', '.join(SIX)}) or 10 ({', '.join(TEN)})"
        hint = "A file that ends in the middle of a row was not copied to its end."
        raise input_error(f"{path}, line {number}", f"{len(fields)} columns", expected, hint)
    return {SHORT.get(name, name): field for name, field in zip(layout, fields, strict=True)}


def decode(line: Line, swap_sizes: bool = False) -> Regions:
    """Numbers of a line, checked. swap_sizes: its width is a height, as in some files of the first layout."""
    if not line.name or "\ufffd" in line.name:
        raise line.input_error("no name of an image", "its file name or number in UTF-8")
    if not line.name.isprintable():  # it is to stand on one line of the ids
        raise line.input_error(f"control characters in the name {line.name[:40]!r}", "a file name or number")
    width, height = (_whole(line, side) for side in ("width", "height"))
    if swap_sizes:
        width, height = height, width
    regions = _whole(line, "num_boxes")
    boxes = _floats(line, "boxes", regions).reshape(regions, -1)
    if boxes.shape[1] != 4:
        found = f"{boxes.size} numbers for {regions} boxes"
        raise line.input_error(found, "four a box", "Is num_boxes that of the file?")
    features = _floats(line, "features", regions).reshape(regions, -1)
    _check_boxes(line, boxes, width, height)
    return Regions(features, boxes, (width, height))


def _whole(line: Line, name: str) -> int:
    """A positive whole number, of pixels or boxes."""
    text = line.columns[name].strip()
    if not text.isdigit() or len(text) > 9 or int(text) == 0:
        found = f"{text[:20].decode('utf-8', 'replace') or 'nothing'} as {name}"
        raise line.input_error(found, "a positive whole number of at most nine digits")
    return int(text)


def _floats(line: Line, name: str, regions: int) -> np.ndarray:
    """float32 numbers from base64, as many for each region."""
    try:
        content = binascii.a2b_base64(line.columns[name].strip(), strict_mode=True)
    except binascii.Error as error:
        hint = "Copy or download the file again."
        raise line.input_error(f"damaged base64 in {name} ({error})", "base64 of float32 numbers", hint) from error
    if not content or len(content) % (4 * regions):
        found = f"{len(content):,} bytes of {name} for {regions} boxes"
        raise line.input_error(found, f"a multiple of {4 * regions}: float32 numbers, as many for each box")
    values = np.frombuffer(content, dtype="<f4")
    if not np.isfinite(values).all():
        raise line.input_error(f"a NaN or infinity in {name}", "finite numbers", "Extract this image again.")
    return values


def _check_boxes(line: Line, boxes: np.ndarray, width: int, height: int) -> None:
    """Boxes begin before they end, within the image."""
    turned = (boxes[:, 2:] < boxes[:, :2]).any(axis=1)
    if turned.any():
        box = boxes[turned.argmax()].tolist()
        raise line.input_error(f"a box {_said(box)} that ends before it begins", "x1 y1 x2 y2 with x1 <= x2, y1 <= y2")
    if not _inside(boxes, width, height):
        outside = (boxes < -EDGE).any(axis=1) | (boxes[:, 2:] > np.array([width, height]) + EDGE).any(axis=1)
        found = f"a box {_said(boxes[outside.argmax()].tolist())} outside its image of {width} x {height}"
        fits = _inside(boxes, height, width)
        hint = "It fits if width and height are exchanged: --swap-sizes does that." if fits else ""
        raise line.input_error(found, "boxes in the pixels of the image", hint)


def _inside(boxes: np.ndarray, width: int, height: int) -> bool:
    return bool((boxes >= -EDGE).all() and (boxes[:, 2] <= width + EDGE).all() and (boxes[:, 3] <= height + EDGE).all())


def _said(box: list[float]) -> str:
    return "(" + ", ".join(f"{side:g}" for side in box) + ")"
