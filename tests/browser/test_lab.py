"""Notebooks in a JupyterLab that runs: nothing of MyST is left raw, every drawing is there.

Student copies are opened without the extension jupyterlab-myst, as a class may have it; chapters with it, as `make serve` does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from itm_lab.publish.student_copies import student_copies

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "05_vsrn"  # drawings, admonitions, references, exercises
RAW = ("{admonition}", "{doc}", "{cite", "{numref}", "```{", ":::", ":class:")
EXTENSION = "jupyterlab-myst"
PATIENCE = 120_000  # milliseconds, on a busy machine
# Windowing leaves out what is below the window; nothing is fetched or asked on the side.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
CELLS = ".jp-Notebook .jp-MarkdownCell.jp-mod-rendered"
# The extension leaves nothing of the cell that ends a solution: what counts is that there is an element.
RENDERED = f"""(count) => [...document.querySelectorAll("{CELLS}")].filter(
  (cell) => cell.querySelector(".jp-MarkdownOutput *, .myst *")).length >= count"""
WIDTHS = f"""() => [...document.querySelectorAll("{CELLS} img")].map((image) => [image.src, image.naturalWidth])"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + PATIENCE / 1000
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.3)


def copied(kind: str, folder: Path) -> str:
    """Write one notebook of a kind with its drawings into a folder; returns its path there."""
    if kind == "student copy":
        return student_copies(ROOT, folder, names=[CHAPTER])[0].name
    shutil.copytree(ROOT / "book/img", folder / "book/img")
    (folder / "notebooks").mkdir()
    shutil.copy(ROOT / f"notebooks/{CHAPTER}.ipynb", folder / "notebooks")
    return f"notebooks/{CHAPTER}.ipynb"


def written_settings(home: Path, disabled: bool) -> dict[str, str]:
    """A JupyterLab of its own: settings, and whether the extension is off; returns the variables that say so."""
    for name, values in SETTINGS.items():
        place = home / "settings" / f"{name}.jupyterlab-settings"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(values), encoding="utf-8")
    (home / "config/labconfig").mkdir(parents=True)
    page = {"disabledExtensions": {EXTENSION: True} if disabled else {}}
    (home / "config/labconfig/page_config.json").write_text(json.dumps(page), encoding="utf-8")
    places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    lab = {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    return {**os.environ, **places, **lab}


@pytest.fixture(scope="module", params=["student copy", "chapter"])
def address(request: pytest.FixtureRequest, browser: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a notebook in a JupyterLab, which ends with all that it started."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed (extra book)")
    folder, home = tmp_path_factory.mktemp("class"), tmp_path_factory.mktemp("jupyter")
    name, port, student = copied(request.param, folder), free_port(), request.param == "student copy"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
    command += [f"--ServerApp.root_dir={folder}"]
    variables, log = written_settings(home, disabled=student), home / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/status", server, log)
        yield f"http://127.0.0.1:{port}/lab/tree/{name}"
    finally:
        end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, which ends its kernels, too; make it if it does not."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def page(address: str, browser: Any) -> Iterator[Any]:
    """The notebook with all of its cells rendered; what the console says of errors is in ``errors``."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.errors = []
    opened.on("console", lambda message: opened.errors.append(message) if message.type == "error" else None)
    opened.goto(address, wait_until="commit")
    opened.wait_for_selector(CELLS, timeout=PATIENCE)
    count = opened.locator(".jp-Notebook .jp-MarkdownCell").count()
    assert count > 20
    opened.wait_for_function(RENDERED, arg=count, timeout=PATIENCE)
    yield opened
    opened.close()


def test_no_cell_shows_raw_myst(page: Any) -> None:
    shown = page.eval_on_selector_all(CELLS, "cells => cells.map((cell) => cell.innerText)")
    assert any("Exercises" in text for text in shown)
    assert not [(raw, text[:200]) for text in shown for raw in RAW if raw in text]


def test_every_drawing_loads(page: Any) -> None:
    page.wait_for_function(f"() => ({WIDTHS})().every(([, width]) => width > 0)", timeout=PATIENCE)
    assert page.evaluate(WIDTHS)


def test_the_console_has_no_error_of_ours(page: Any) -> None:
    """Extensions may complain of each other; what names a notebook or a file of the folder is ours."""
    said = [f"{error.text} {error.location.get('url', '')}" for error in page.errors]
    assert not [text for text in said if "/files/" in text or "/api/contents" in text or "img/" in text]


def test_the_extension_shows_chapters_alone(page: Any, address: str) -> None:
    """Off for copies, at work for chapters, whatever `jupyter labextension list` thinks of its version."""
    assert (page.locator(".jp-MarkdownCell .myst").count() > 20) == ("/notebooks/" in address)


def test_the_extension_of_make_serve_is_listed() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "jupyterlab.labextensions", "list"], capture_output=True, text=True, timeout=120
    )
    lines = (found.stdout + found.stderr).splitlines()
    assert any(EXTENSION in line and "enabled" in line for line in lines), lines
