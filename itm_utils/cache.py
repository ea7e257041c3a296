"""Folders that are made once and trusted only while they are whole.

A folder is whole when its manifest, written last, is there and every checksum is right. It is written beside
its place and moved there in one step, under a lock: two processes that start at once make it once, and a killed
one leaves nothing that could be mistaken for a finished folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_dir

from itm_utils.errors import input_error

LARGE = 2**30  # bytes: of files beyond this only some blocks are read, all would take many seconds
BLOCKS, BLOCK = 256, 2**14  # how many, spread evenly, and the bytes of one

log = logging.getLogger("itm_utils")
_verified: dict[Path, tuple] = {}  # folder → sizes and times of its files when this process found it whole


def cache_root() -> Path:
    """Where such folders are kept: ``ITM_CACHE``, or the user's cache folder."""
    return Path(os.environ.get("ITM_CACHE") or user_cache_dir("itm_utils"))


def ensure_folder(name: str, write: Callable[[Path], dict[str, Any]]) -> Path:
    """The folder ``name`` of the cache; ``write(folder)`` fills it and returns facts for its manifest."""
    root = cache_root()
    folder = root / name
    if is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise input_error(root, f"no folder to write to ({error})", "a place for caches", "Set ITM_CACHE.") from error
    with FileLock(root / f"{name}.lock"):
        if not is_whole(folder):  # another process may have made it while we waited
            _write_beside(folder, write)
    return folder


def _write_beside(folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Write in a temporary folder, then rename. Only called under the lock."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        log.warning("%s is damaged: making it again", folder)
        shutil.rmtree(folder)
    try:
        working = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            facts = write(working)
            files = {path.name: _checksum(path) for path in sorted(working.iterdir())}
            write_compact_json(working / "manifest.json", {**facts, "files": files})
            for path in working.iterdir():
                _to_disk(path)
            working.rename(folder)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    except OSError as error:
        found = f"that it cannot be written ({error.strerror or error})"
        raise input_error(folder, found, "a cache with free space", "Set ITM_CACHE to another place.") from error


def _to_disk(path: Path) -> None:
    """Wait until a file's content is on the disk: after a power cut the rename may be there without it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the maker of a folder said of it, and its checksums."""
    path = folder / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise input_error(path, f"no readable manifest ({error})", "a finished folder") from error


def is_whole(folder: Path) -> bool:
    """Whether the folder was finished and every byte is in place; bytes are read again once a size or time has changed."""
    try:
        state = _sizes_and_times(folder)
        if _verified.get(folder) == state:
            return True
        files = read_manifest(folder)["files"]
        named = files.keys() | {"manifest.json"}
        whole = (
            len(named) > 1
            and named == {path.name for path in folder.iterdir()}
            and all(_checksum(folder / name) == checksum for name, checksum in files.items())
        )
    except (ValueError, OSError, KeyError, AttributeError, TypeError, RecursionError):
        return False
    if whole:
        _verified[folder] = state
    return whole


def _sizes_and_times(folder: Path) -> tuple:
    """Name, size and time of change of every file, with the folder's own place on the disk."""
    there = folder.stat()
    files = sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder))
    return (there.st_dev, there.st_ino, *files)


def write_compact_json(path: Path, content: Any) -> None:
    """Compact JSON, the same bytes on every system."""
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8", newline="\n")


def _checksum(path: Path) -> str:
    """Hash of a file; of a large one, of its size and of blocks from its first byte to its last."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return f"{size} bytes, {digest.hexdigest()}"
