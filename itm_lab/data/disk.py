"""Files in and out: what is read is a whole file, and what is written never replaces something else."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from itm_utils.errors import input_error
from itm_utils.files import atomic, check_file, read_text, write_json


def read_lines(path: str | Path, expected: str) -> list[str]:
    """The lines of a text file without spaces around them; an empty one is an error that names its number."""
    lines = [line.strip() for line in read_text(path, expected).removesuffix("\n").split("\n")]
    for number, line in enumerate(lines, start=1):
        if not line:
            raise input_error(path, f"an empty line {number}", expected)
    return lines


def read_json(path: str | Path, expected: str, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The content of a JSON file. hook: what becomes of each object in it, at once: large files stay small so."""
    text = read_text(path, expected)
    try:
        return json.loads(text, object_hook=hook)
    except (ValueError, RecursionError) as error:  # the second of brackets within brackets without end
        raise input_error(
            path, f"a damaged file ({error})", f"{expected}, complete", "Copy or download it again."
        ) from error


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a hash of itself: a note that steers later work must not be read with another number in it."""
    write_json(path, {**content, "seal": _seal(content)})


def read_sealed(path: Path, expected: str, hint: str) -> dict[str, Any]:
    """What :func:`write_sealed` wrote, without its seal; older files have none, and are read as they are."""
    try:
        content = json.loads(read_text(path, expected, hint))
    except (ValueError, RecursionError) as error:
        raise input_error(path, f"a damaged note ({error})", expected, hint) from error
    if not isinstance(content, dict):
        raise input_error(path, f"a damaged note, a {type(content).__name__}", expected, hint)
    seal = content.pop("seal", None)
    if seal is not None and seal != _seal(content):
        raise input_error(path, "other numbers than were written", expected, hint)
    return content


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Hash of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(path: Path) -> None:
    """A folder to write into, with those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise input_error(path, f"that no folder can be made here ({reason})", "a writable folder") from error


def lines_bytes(lines: list[str]) -> bytes:
    """One line each, as a file holds them."""
    return "".join(f"{line}\n" for line in lines).encode()


def array_bytes(array: np.ndarray) -> bytes:
    """An array as a ``.npy`` file holds it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def check_outputs(outputs: Mapping[Path, bytes]) -> list[Path]:
    """Those that are not there yet. One that is there with another content is an error, before anything is written."""
    missing = []
    for path, content in outputs.items():
        if not (path.exists() or path.is_symlink()):
            missing.append(path)
        elif check_file(path, "a file that this command wrote").read_bytes() != content:
            hint = "Nothing was written. Move the old file away, or choose another folder."
            raise input_error(path, "a file with another content", "no such file, or the same", hint)
    return missing


def write_outputs(outputs: Mapping[Path, bytes]) -> list[Path]:
    """Write what is not there yet, each file whole or not at all; returns what was written."""
    missing = check_outputs(outputs)
    for path in missing:
        with atomic(path) as temporary:
            temporary.write_bytes(outputs[path])
    return missing


def check_space(folder: Path, needed: int, what: str) -> None:
    """Enough free space for ``needed`` more bytes, before hours of work and not after."""
    free = free_space(folder)
    if free < needed:
        expected = f"about {gigabytes(needed)} for {what}"
        raise input_error(folder, f"{gigabytes(free)} of free space", expected, "Free some, or choose another disk.")


def free_space(folder: Path) -> int:
    """Bytes that are free on the disk of a folder."""
    return shutil.disk_usage(existing_folder(folder)).free


def existing_folder(folder: Path) -> Path:
    """A folder, or the closest one above it that is there: the disk on which it will be."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


def gigabytes(size: int) -> str:
    """A size as people say it, in units of a thousand.

    >>> gigabytes(8_552_448_128), gigabytes(294_912_128), gigabytes(900)
    ('8.6 GB', '295 MB', '900 bytes')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}" if unit == "GB" else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
