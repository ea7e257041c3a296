"""What a file holds, as a digest of all of its bytes; a large file is read once, and again only when it has changed.

What was read is remembered in the user's cache folder, by path, size and time of change: COCO's 33 GB cost one reading
(BLAKE2b takes 0.8 GB a second on one core), and microseconds a file afterwards. Nothing beside the data is believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from itm_utils.cache import cache_root
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_json
from itm_utils.progress import bar

BLOCK = 2**24  # bytes
NOTES = 1_000  # files that are remembered; the oldest note goes first
TICK = 2_000_000_000  # nanoseconds: a file that changed less than this ago may change again without a new time


def digest_of(value: Any) -> str:
    """BLAKE2b (256 bits, hexadecimal) of a plain value: text, numbers, lists, dictionaries."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=32).hexdigest()


def file_digest(path: str | Path) -> str:
    """BLAKE2b (256 bits, hexadecimal) of every byte of a file, remembered while the file stays as it is."""
    path = Path(path).resolve()
    try:
        before = _state(path)
        note = cache_root() / "digests" / f"{digest_of(str(path))[:32]}.json"
        if (known := _remembered(note)) and known.get("state") == before and isinstance(known.get("digest"), str):
            return known["digest"]
        found = {"path": str(path), "state": before, "digest": _read(path, before["size"])}
        after = _state(path)
    except OSError as error:
        raise input_error(path, f"a file that cannot be read ({error.strerror})", "a file of the data") from error
    if after != before:
        raise input_error(path, "a file that changes while it is read", "data that nobody is writing")
    if time.time_ns() - after["mtime_ns"] > TICK:
        with suppress(ItmError):  # a cache that cannot be written: the file is read again next time
            write_json(note, found)
            _forget_oldest(note.parent)
    return found["digest"]


def _state(path: Path) -> dict[str, int]:
    """What changes when a file is written to; ``ctime`` also where somebody sets the time of change back."""
    stat = os.stat(path)
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _remembered(note: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _forget_oldest(folder: Path) -> None:
    """Keep the newest notes only: files come and go."""
    if len(notes := list(folder.glob("[!.]*.json"))) > NOTES:
        with suppress(OSError):  # another process may be doing the same
            for note in sorted(notes, key=lambda one: one.stat().st_mtime_ns)[:-NOTES]:
                note.unlink(missing_ok=True)


def _read(path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        for _ in bar(range(0, size, BLOCK), f"read {path.name}", "block"):
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
