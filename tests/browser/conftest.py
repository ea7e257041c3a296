"""The built book in headless Chromium. Without a browser, or without built pages, these tests skip and say so."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build/html"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def skip_loudly(reason: str) -> None:
    """Skip, with a line that shows up even where skips are not listed."""
    warnings.warn(f"no page was looked at: {reason}", stacklevel=2)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def html() -> Path:
    """The folder of the built book."""
    if not (HTML / "index.html").is_file() or (ROOT / "_build/.unfinished").exists():
        skip_loudly("_build/html is not built: run `make pages` first")
    return HTML


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Chromium of the system: the variable CHROMIUM names another one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        skip_loudly(f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=SWITCHES)
        yield running
        running.close()
