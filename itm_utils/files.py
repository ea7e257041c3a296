"""Files that are whole or not there, and text that can be read or is one clear error."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from itm_utils.errors import input_error


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it when the block ends well, remove it when it does not.

    Whoever reads ``path`` sees the old content or the new one, never half of either, even after a power cut.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # some writers make private files
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise input_error(path, f"that it cannot be written ({reason})", "a writable folder with free space") from error
    finally:
        with suppress(OSError):  # already renamed, or never made
            temporary.unlink()


def check_file(path: str | Path, expected: str) -> Path:
    """The path of a file that can be opened; a folder, a broken link and nothing at all are told apart."""
    path = Path(path)
    if path.is_dir():
        raise input_error(path, "a folder", expected)
    if path.is_symlink() and not path.exists():  # so do links in a circle
        raise input_error(
            path, "a symbolic link that leads nowhere or in a circle", expected, "Repair or remove the link."
        )
    if not path.exists():
        raise input_error(path, "no such file", expected)
    if not path.is_file():  # a pipe would be waited for, without end
        raise input_error(path, "neither a file nor a folder", expected)
    return path


def read_text(path: str | Path, expected: str, hint: str = "Save it as UTF-8.") -> str:
    """A whole UTF-8 file, with or without a byte-order mark, line ends of any system. hint: for other encodings."""
    path = check_file(path, expected)
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        # Alone it ends lines only where nothing else does, as on old Macs; elsewhere it is part of a caption.
        return text if "\n" in text else text.replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise input_error(path, f"bytes that are not UTF-8 at position {error.start}", expected, hint) from error
    except OSError as error:
        raise input_error(path, f"a file that cannot be read ({error.strerror})", expected) from error


def reserve(path: str | Path) -> None:
    """Give a sparse file its blocks: a full disk is an error now instead of a crash in the middle of a mapped write."""
    size = Path(path).stat().st_size
    try:
        with Path(path).open("r+b") as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "Free some, or choose another disk."
            raise input_error(path, "a full disk", f"{size / 1e9:.1f} GB of free space", hint) from error
        # else: a file system that cannot promise space


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON atomically, keys sorted, so that a file under version control changes only where its content does."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
