"""One progress bar for the whole package: there for a person, silent for logs, tests and stored notebooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from tqdm import tqdm


def interactive() -> bool:
    """Whether somebody watches. ``ITM_PROGRESS=1`` (as ``make serve`` sets it) or ``0`` decides; else a terminal does."""
    wish = os.environ.get("ITM_PROGRESS")
    return sys.stderr.isatty() if wish is None else wish == "1"


def bar(items: Iterable, what: str, unit: str = "it", **more) -> tqdm:
    """Iterate with a progress bar named ``what``."""
    return tqdm(items, desc=what, unit=unit, disable=not interactive(), leave=False, **more)
