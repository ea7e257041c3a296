"""Run the chapters' notebooks and store what they print."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from nbformat import NotebookNode
from PIL import Image
from tqdm import tqdm

from itm_lab.notebook_io import KERNEL_ENVIRONMENT, KERNELSPEC, clean, find_notebooks, read_notebook, write_notebook
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_json
from itm_utils.progress import interactive

CELL_TIMEOUT = 600  # seconds
LARGE_IMAGE = 200_000  # characters of base64
# Files that decide what a chapter prints, besides its own cells.
RUN_INPUTS = (
    "itm_utils", "itm_lab/scenes", "itm_lab/records", "itm_lab/evidence", "itm_lab/data/opening.py", "constraints.txt", "receipts", "weights",
    "benchmarks/results", "book/data/published_tables.yaml",
)  # fmt: skip


def run_key(root: Path, notebook: NotebookNode) -> str:
    """A hash of all that decides a chapter's outputs; any change of it means running again."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        digest.update(json.dumps([cell.cell_type, cell.source, cell.metadata], sort_keys=True).encode())
    for start in RUN_INPUTS:
        folder = root / start
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(" ".join(versions().values()).encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """The Python and torch a chapter ran on."""
    return {"python": platform.python_version(), "torch": metadata.version("torch")}


def sections(notebook: NotebookNode) -> list[str]:
    """For each cell, the title or second-level heading it stands under."""
    current, found = "", []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", cell.source, flags=re.DOTALL | re.MULTILINE)
            headings = re.findall(r"^##? +(.+?) *$", prose, flags=re.MULTILINE)
            current = headings[-1] if headings else current
        found.append(current)
    return found


@dataclass
class Run:
    """One notebook on its way through a kernel."""

    path: Path
    notebook: NotebookNode
    key: str
    original: str  # the file's text, to see whether somebody edits it meanwhile
    cells: dict[int, float] = field(default_factory=dict)  # cell number -> seconds
    client: object = None

    def code_cells(self) -> int:
        return sum(cell.cell_type == "code" for cell in self.notebook.cells)

    def execute(self, folder: Path, on_cell: Callable[[], object]) -> None:
        """Run every cell. nbclient itself, not papermill: its hooks time each cell, and it adds no metadata."""
        from nbclient import NotebookClient

        def start(cell: NotebookNode, cell_index: int) -> None:
            self.cells[cell_index] = -time.perf_counter()

        def end(cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
            self.cells[cell_index] += time.perf_counter()
            on_cell()

        self.client = NotebookClient(
            self.notebook,
            timeout=CELL_TIMEOUT,
            kernel_name=KERNELSPEC["name"],
            resources={"metadata": {"path": str(folder)}},
            on_cell_execute=start,
            on_cell_executed=end,
            extra_arguments=["--IPKernelApp.log_level=40"],  # errors only: no warning about TCP
            record_timing=False,
            coalesce_streams=True,
            shutdown_kernel="immediate",
        )
        self.client.execute(env=os.environ | KERNEL_ENVIRONMENT)

    def kill(self) -> None:
        """End the kernel at once; the thread that waits for it then sees a dead kernel and stops."""
        process = getattr(getattr(getattr(self.client, "km", None), "provisioner", None), "process", None)
        if process is not None:
            process.kill()

    def record(self) -> dict:
        """When, how long and on what: nothing that names a machine or a person."""
        titles = sections(self.notebook)
        return {
            "chapter": self.path.stem,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(sum(self.cells.values()), 2),
            "cells": [
                {"cell": self.notebook.cells[i]["id"], "section": titles[i], "seconds": round(seconds, 3)}
                for i, seconds in sorted(self.cells.items())
            ],
            "cpu_count": os.cpu_count(),
            "machine": platform.machine(),
            **versions(),
            "key": self.key,
        }

    def describe_failure(self, error: BaseException) -> str:
        """Where it broke and the last lines of the error, for a human."""
        number = max(self.cells, default=0)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines() or [type(error).__name__]
        tail = "\n".join(f"    {line}" for line in lines[-6:])
        name = self.notebook.cells[number]["id"] if self.notebook.cells else "?"
        return f"{self.path.name}: cell {number + 1} ({name}) failed\n{tail}"


def prepare(root: Path, path: Path) -> Run:
    """Read one notebook, without the outputs of an earlier run."""
    original = path.read_text(encoding="utf-8")
    notebook = clean(read_notebook(path), keep_outputs=False)
    return Run(path, notebook, run_key(root, notebook), original)


def is_current(root: Path, run: Run) -> bool:
    """Whether ``_build`` holds a copy made from just these sources."""
    record = root / "_build/executions" / f"{run.path.stem}.json"
    try:
        known = json.loads(record.read_text(encoding="utf-8")).get("key")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return known == run.key and (root / "_build/notebooks" / run.path.name).is_file()


def compress_images(notebook: NotebookNode) -> None:
    """Store, in place, large image outputs as JPEG: drawn scenes with their grain are no matter for PNG."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        encoded = output.get("data", {}).get("image/png", "")
        if len(encoded) > LARGE_IMAGE:
            figure = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
            packed = io.BytesIO()
            figure.save(packed, "JPEG", quality=88, subsampling=0)  # full colour resolution: red text stays sharp
            del output["data"]["image/png"]
            output["data"]["image/jpeg"] = base64.b64encode(packed.getvalue()).decode()


def save(root: Path, run: Run, in_place: bool) -> None:
    """Store a finished notebook, then its record: a record without a notebook never exists."""
    compress_images(clean(run.notebook))
    if in_place:
        if run.path.read_text(encoding="utf-8") != run.original:
            raise input_error(run.path, "a file changed during the run", "the file as it was", "Run it again.")
        write_notebook(run.path, run.notebook)
    else:
        write_notebook(root / "_build/notebooks" / run.path.name, run.notebook)
    folder = root / ("book/data/executions" if in_place else "_build/executions")
    write_json(folder / f"{run.path.stem}.json", run.record())


def run_notebooks(root: Path, names: Iterable[str], in_place: bool, jobs: int) -> list[str]:
    """Run chapters, ``jobs`` at a time, and store what they give; returns the names that failed."""
    runs = [prepare(root, path) for path in find_notebooks(root, names)]
    if not in_place:
        remove_vanished(root)
        for run in [run for run in runs if is_current(root, run)]:
            tqdm.write(f"{run.path.stem}: nothing changed, kept")
            runs.remove(run)
    total, failed = sum(run.code_cells() for run in runs), []
    with tqdm(total=total, unit="cell", disable=not interactive()) as bar, ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run.execute, root / "notebooks", bar.update): run for run in runs}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    run = waiting.pop(future)
                    if not finish(root, run, future, in_place):
                        failed.append(run.path.stem)
        except BaseException:  # Ctrl-C above all: leave no kernel behind
            pool.shutdown(wait=False, cancel_futures=True)
            for run in waiting.values():
                run.kill()
            raise
    return failed


def finish(root: Path, run: Run, future: Future, in_place: bool) -> bool:
    """Store one run or say why it failed."""
    try:
        future.result()
        save(root, run, in_place)
    except ItmError as error:
        tqdm.write(str(error), file=sys.stderr)
    except Exception as error:
        tqdm.write(run.describe_failure(error), file=sys.stderr)
    else:
        tqdm.write(f"{run.path.stem}: {run.code_cells()} cells in {sum(run.cells.values()):.1f} s")
        return True
    return False


def remove_vanished(root: Path) -> None:
    """Drop copies and records of notebooks that are no more."""
    names = {path.stem for path in find_notebooks(root)}
    for folder in ("notebooks", "executions"):
        for path in (root / "_build" / folder).glob("*.*"):  # editors leave folders of their own here
            if path.is_file() and path.suffix in (".ipynb", ".json") and path.stem not in names:
                path.unlink()
