"""Read a captions file: file name and caption with a comma, a tab or ``|`` between them.

Flickr8k's ``name.jpg#0<TAB>caption`` is such a file. Where there are more columns, a heading says which is the caption,
as in Flickr30K's ``image_name| comment_number| comment``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from itm_lab.photos.folder import is_image_name
from itm_lab.photos.report import CAPTION, NOTE, Remark
from itm_utils.data.precomp import PRINTED_BYTES
from itm_utils.errors import input_error
from itm_utils.files import read_text

TOKEN = re.compile(r"^(?P<name>[^\t]+)#\d+\t")
NUMBER = re.compile(r"#\d+$")
LONGEST = 100  # words: what is longer is a text, and it would make every batch it is in as long
# First cells of a first line that is no image but the name of a column.
HEADINGS = frozenset(
    ("image", "image_name", "image name", "file", "filename", "file_name", "file name", "name", "photo")
)
CAPTION_HEADINGS = frozenset(("caption", "comment", "sentence", "text"))
NumberedCells = tuple[int, list[str]]  # its line in the file, from 1, and its cells


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
        raise input_error(path, "no usable caption", "lines of file name and caption", _example(remarks))
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
    separator = _separator(path, first)
    rows = list(_commas(path, text) if separator == "," else _split(text, separator))
    heading = rows[0] if rows and _name(rows[0][1]).lower() in HEADINGS else None
    place, behind = _caption_column(path, rows, heading)
    for number, cells in rows[heading is not None :]:
        # A caption may have the separator in it: what belongs to no other column is put together again.
        yield number, _name(cells), separator.join(cells[place : len(cells) - behind])


def _name(cells: list[str]) -> str:
    """The image that a row is about; the number behind a name of Flickr8k's file goes."""
    return NUMBER.sub("", cells[0].strip()).strip()


def _caption_column(path: Path, rows: list[NumberedCells], heading: NumberedCells | None) -> tuple[int, int]:
    """Where the caption begins, and how many columns are behind it."""
    if heading is None:
        _check_two_columns(path, rows)
        return 1, 0
    line, columns = heading[0], [cell.strip().lower() for cell in heading[1]]
    if len(columns) < 3:
        return 1, 0
    named = [place for place, column in enumerate(columns) if place and column in CAPTION_HEADINGS]
    if len(named) != 1:
        found = f"columns {', '.join(columns)}"
        hint = "Name the column of the captions so, or leave only file names and captions."
        raise input_error(
            f"{path}, line {line}", found, f"one of {', '.join(sorted(CAPTION_HEADINGS))} among them", hint
        )
    return named[0], len(columns) - 1 - named[0]


def _check_two_columns(path: Path, rows: list[NumberedCells]) -> None:
    """A number in front of every caption is a column of its own, and would become a word of all of them."""
    if rows and all(len(cells) > 2 and cells[1].strip().isdecimal() for _, cells in rows):
        found = f"a number between name and caption in every line, first {rows[0][1][1].strip()}"
        hint = "Add a heading, such as image,number,caption, or remove the column."
        raise input_error(path, found, "file name and caption", hint)


def _separator(path: Path, first: str) -> str:
    """What stands between name and caption: the first line says it, or the file's ending."""
    comma, tab, name = "," in first, "\t" in first, first.partition("|")[0]
    if name != first and (name.strip().lower() in HEADINGS or is_image_name(name.strip())):
        return "|"
    if TOKEN.match(first) or (tab and not (comma and path.suffix.lower() == ".csv")):
        return "\t"
    if comma:
        return ","
    hint = "Write one line per caption: photo.jpg,Two dogs on a beach."
    raise input_error(f"{path}, line 1", f"{first[:40]!r}", "a file name, a comma or a tab, and a caption", hint)


def _split(text: str, separator: str) -> Iterator[NumberedCells]:
    """Rows in which quotation marks have no meaning."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.split(separator)


def _commas(path: Path, text: str) -> Iterator[NumberedCells]:
    """Comma-separated values."""
    # A carriage return that ends no line would end one for csv; as another control character it is reported.
    reader = csv.reader(io.StringIO(text.replace("\r", "\v"), newline=""), strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        hint = 'A quotation mark inside a quoted caption is written twice: "a sign that says ""stop""".'
        raise input_error(f"{path}, line {reader.line_num}", f"no CSV ({error})", "name,caption", hint) from error
