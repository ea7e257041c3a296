"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from itm_utils.errors import problem


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
        raise problem(path, f"that it cannot be written ({reason})", "a writable folder with free space") from error
    finally:
        with suppress(OSError):  # already renamed, or never made
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON atomically, keys sorted, so that a file under version control changes only where its content does."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
