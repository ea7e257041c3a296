"""What was counted of a training step, kept in the cache: a plan of many runs counts nothing a second time.

A count depends on the code that was run, so the names of the files have a hash of it, and of PyTorch's version.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

import itm_utils
from itm_lab.data.disk import read_sealed, write_sealed
from itm_utils.cache import cache_root
from itm_utils.errors import ItmError

FOLDER = "step-counts"


@cache
def code_digest() -> str:
    """Of PyTorch's version, the library with its models, and what counts."""
    digest = hashlib.sha256(torch.__version__.encode())
    library = sorted(Path(itm_utils.__file__).parent.rglob("*.py"))
    for path in (*library, *(Path(__file__).with_name(name) for name in ("cost.py", "shapes.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def place(key: Any) -> Path:
    """The file of a count. key: all that it depends on besides the code, with the same text in every process."""
    return cache_root() / FOLDER / f"{hashlib.sha256(f'{code_digest()} {key!r}'.encode()).hexdigest()}.json"


def read_count(key: Any) -> dict[str, Any] | None:
    """None if nothing was kept, or not whole."""
    with suppress(ItmError):
        return read_sealed(place(key), "a count", "It is counted again.")
    return None


def keep_count(key: Any, count: dict[str, Any]) -> None:
    """Keep a count for later plans; where nothing can be written they count again."""
    with suppress(ItmError, OSError):
        place(key).parent.mkdir(parents=True, exist_ok=True)
        write_sealed(place(key), count)
