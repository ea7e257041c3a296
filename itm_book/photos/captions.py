"""Read a captions file: CSV or TSV of file name and caption, or Flickr8k's ``name.jpg#0<TAB>caption``."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from itm_book.photos.report import CAPTION, NOTE, Remark
from itm_utils.errors import problem
from itm_utils.files import read_text
from itm_utils.precomp import PRINTED_BYTES

TOKEN = re.compile(r"^(?P<name>[^\t]+)#\d+\t")
NUMBER = re.compile(r"#\d+$")
LONGEST = 100  # words: what is longer is a text, and it would make every batch it is in as long
# First cells of a first line that is no picture but the name of a column.
HEADINGS = frozenset(
    ("image", "image_name", "image name", "file", "filename", "file_name", "file name", "name", "photo")
)


@dataclass(frozen=True)
class Line:
    """One caption. number: its line in the file, from 1."""

    number: int
    name: str
    caption: str


def read_lines(path: Path) -> tuple[list[Line], list[Remark]]:
    """Every usable caption of a file, in its order, and what was wrong with the others."""
    lines: list[Line] = []
    remarks: list[Remark] = []
    text = read_text(
        path, "a captions file in UTF-8", "Save it as UTF-8; spreadsheets have that choice in their export."
    )
    for number, name, raw in _cells(path, text):
        where = f"{path.name}, line {number}"
        caption = " ".join("".join(c if c.isprintable() else " " for c in raw).split())
        if why := _unusable(name, caption):
            remarks.append(Remark(CAPTION, where, why))
            continue
        if any(not c.isprintable() for c in raw.strip()):
            remarks.append(Remark(NOTE, where, "control characters in its caption, now spaces"))
        lines.append(Line(number, name, caption))
    if not lines:
        raise problem(path, "no usable caption", "lines of file name and caption", _example(remarks))
    return lines, remarks


def _unusable(name: str, caption: str) -> str:
    """Why a line cannot be used; empty if it can."""
    if not name:
        return "no file name"
    if not caption:
        return f"no caption for {name}"
    if (words := len(caption.split())) > LONGEST:
        return f"{words} words, more than {LONGEST}"
    if PRINTED_BYTES.match(caption):
        return "printed bytes (b'…') instead of text"
    return ""


def _example(remarks: list[Remark]) -> str:
    return f"The first one: {remarks[0].where}: {remarks[0].why}." if remarks else "The file is empty."


def _cells(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, caption as it stands there), heading and empty lines skipped."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    rows = _tabbed(text) if _has_tabs(path, first) else _commas(path, text)
    for place, (number, name, caption) in enumerate(rows):
        if place == 0 and name.lower() in HEADINGS:
            continue
        yield number, name, caption


def _has_tabs(path: Path, first: str) -> bool:
    """Which of the two characters stands between name and caption: the first line says it, or the file's ending."""
    comma, tab = "," in first, "\t" in first
    if TOKEN.match(first) or (tab and not (comma and path.suffix.lower() == ".csv")):
        return True
    if comma:
        return False
    hint = "Write one line a caption: photo.jpg,Two dogs on a beach."
    raise problem(f"{path}, line 1", f"{first[:40]!r}", "a file name, a comma or a tab, and a caption", hint)


def _tabbed(text: str) -> Iterator[tuple[int, str, str]]:
    """Quotation marks have no meaning here; the number behind a name of Flickr8k's file goes."""
    for number, line in enumerate(text.split("\n"), start=1):
        name, _, caption = line.partition("\t")
        if line.strip():
            yield number, NUMBER.sub("", name.strip()).strip(), caption


def _commas(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Comma-separated values; a caption that has commas and no quotation marks around it is put together again."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, NUMBER.sub("", row[0].strip()).strip(), ",".join(row[1:])
    except csv.Error as error:
        hint = 'A quotation mark inside a quoted caption is written twice: "a sign that says ""stop""".'
        raise problem(f"{path}, line {reader.line_num}", f"no CSV ({error})", "name,caption", hint) from error
