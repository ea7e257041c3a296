"""Every file in a folder of photographs, by name, links followed but never in a circle."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from itm_lab.photos.image_files import SUFFIXES
from itm_lab.photos.report import IMAGE, Remark
from itm_utils.errors import input_error


def is_image_name(name: str) -> bool:
    """Whether a name ends like an image's."""
    return Path(name).suffix.lower() in SUFFIXES


def same_form(name: str) -> str:
    """One spelling for letters with accents: some systems store them as two characters."""
    return unicodedata.normalize("NFC", name)


def find_files(root: Path) -> tuple[dict[str, Path], list[Remark]]:
    """Name → path of every file below ``root``, and what could not be taken.

    A name is the path below ``root`` with ``/`` between folders. Hidden files and folders do not count.
    """
    if not root.is_dir():
        raise input_error(root, "no such folder" if not root.exists() else "a file", "a folder of photographs")
    files: dict[str, Path] = {}
    remarks: list[Remark] = []
    around = frozenset((status.st_dev, status.st_ino) for status in map(Path.stat, root.resolve().parents))
    for name, path, why in sorted(_walk(root, "", around), key=lambda found: found[0]):
        name = same_form(name)
        if not why and name in files:
            why = "a second file of the same name, spelt with other characters"
        if not why and not fits_a_line(name):
            why = "a name that does not fit into one line of text"
        if why:
            remarks.append(Remark(IMAGE, name, why))
        else:
            files[name] = path
    return files, remarks


def fits_a_line(name: str) -> bool:
    """Whether a list with one name a line gives the name back."""
    return name.isprintable() and name == name.strip()


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path, str]]:
    """(name, path, "") of each file, or (name, path, why not). above: the folders around, by device and number."""
    status = folder.stat()
    above |= {(status.st_dev, status.st_ino)}
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield prefix or ".", folder, f"a folder that cannot be opened ({error.strerror})"
        return
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _entry(entry, prefix + entry.name, above)


def _entry(entry: os.DirEntry, name: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path, str]]:
    path = Path(entry.path)
    try:
        status = entry.stat()  # of what a link leads to
    except OSError as error:  # also a link to itself
        yield name, path, f"a link that leads nowhere ({error.strerror})"
        return
    if entry.is_dir():
        if (status.st_dev, status.st_ino) in above:
            yield name, path, "a link that leads back to a folder around it"
        elif is_image_name(name):
            yield name, path, "a folder with the name of an image"
        else:
            yield from _walk(path, f"{name}/", above)
    elif entry.is_file():
        yield name, path, ""
    elif is_image_name(name):
        yield name, path, "neither a file nor a folder"
