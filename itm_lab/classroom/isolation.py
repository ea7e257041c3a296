"""Grade one submitted notebook apart from ourselves: in a process of its own, in a throw-away copy, under limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from itm_lab.classroom.answering import unpacked
from itm_lab.publish.exercise_cells import CALL
from itm_lab.teaching.checks import Foreign, Verdict, judge, seed_of
from itm_lab.teaching.exercises import all_exercises
from itm_utils.errors import input_error

STARTING = 300  # seconds that imports may take on a busy machine


@dataclass(frozen=True)
class Limits:
    """What one answer may use."""

    seconds: int = 20
    megabytes: int = 2048


@dataclass(frozen=True)
class Graded:
    """One answer of a submission."""

    label: str
    verdict: Verdict
    seconds: float


def grade_notebook(
    submitted: NotebookNode, source: NotebookNode, folder: Path, student: str, salt: str, limits: Limits
) -> dict[str, Graded]:
    """Label → how each exercise of a submission was answered.

    source: the instructor's copy. folder: what was submitted, of which a copy is made. salt: draws cases nobody knows before.
    """
    if os.name != "posix":
        raise input_error(
            "itm classroom grade", f"the system {os.name}", "Linux or macOS", "Limits are set by the system."
        )
    tasks = answers_in(submitted, source)
    for task in tasks:
        task["seed"] = seed_of(task["label"], student, salt)
    job = {
        "definitions": [
            cell.source for cell in source.cells if cell.cell_type == "code" and "nbgrader" not in cell.metadata
        ],
        "answers": tasks,
        "seconds": limits.seconds,
        "megabytes": limits.megabytes,
    }
    found, note = run_apart(job, folder)
    return {task["label"]: judged(task, found.get(task["label"]), note) for task in tasks}


def answers_in(submitted: NotebookNode, source: NotebookNode) -> list[dict[str, Any]]:
    """The cells of each answer: those the student added before it, and its own. Checks are taken from the source."""
    known = {cell["id"] for cell in source.cells}
    names = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in submitted.cells if "nbgrader" in cell.metadata}
    tasks, added = [], []
    calls = {}
    for cell in source.cells:
        if (call := CALL.search(cell.source)) and "nbgrader" in cell.metadata:
            calls[call["label"]] = call["name"]
    for cell in submitted.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        if cell.cell_type == "code" and cell["id"] not in known and not grade_id:
            added.append(cell.source)
        elif grade_id in calls:
            tasks.append(
                {"label": grade_id, "name": calls[grade_id], "source": names[grade_id].source, "before": list(added)}
            )
    return tasks + [
        {"label": label, "name": name, "source": "", "before": []}
        for label, name in calls.items()
        if label not in names
    ]


def run_apart(job: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Run a task in a throw-away copy of a folder; returns what it printed, and what became of the copy."""
    with tempfile.TemporaryDirectory(prefix="itm-grade-", ignore_cleanup_errors=True) as place:
        scratch = Path(place, "submission")
        shutil.copytree(folder, scratch, symlinks=True)
        before = {path.relative_to(scratch) for path in scratch.rglob("*")}
        task = Path(place, "task.json")
        task.write_text(json.dumps(job), encoding="utf-8")
        # -P: no module of the submission stands before ours
        command = [*container(place), sys.executable, "-P", "-m", "itm_lab.classroom.answering", str(task)]
        longest = STARTING + len(job["answers"]) * (3 * job["seconds"] + 10)
        try:
            result = subprocess.run(
                command, cwd=scratch, env=bare_environment(place), capture_output=True, timeout=longest
            )
            found = json.loads(result.stdout)
        except subprocess.TimeoutExpired:
            return {}, f"stopped after {longest} s"
        except ValueError:
            return {}, "its process ended without an answer"
        gone = sorted(str(path) for path in before if not (scratch / path).exists())
        return found, f"it deleted {', '.join(gone[:3])} of its copy" if gone else ""


def bare_environment(place: str) -> dict[str, str]:
    """Of our environment only what Python and torch need."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | numbers | {"HOME": place, "TMPDIR": place, "HF_HUB_OFFLINE": "1"}


def container(place: str) -> list[str]:
    """Bubblewrap's command before ours, where it works: everything but the throw-away copy is read-only, no network."""
    if not bubblewrap_works():
        return []
    return [
        *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", place, place),
        *("--unshare-all", "--die-with-parent", "--new-session"),
    ]


@cache
def bubblewrap_works() -> bool:
    """Whether bwrap is installed and this system lets it make a container."""
    if not shutil.which("bwrap"):
        return False
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


def judged(task: Mapping[str, Any], found: Mapping[str, Any] | None, note: str) -> Graded:
    """Judge what one answer gave, here, where its code never ran."""
    label = task["label"]
    if not isinstance(found, Mapping) or not isinstance(found.get("values"), Sequence):
        return Graded(label, Verdict(False, note or "no answer"), 0.0)
    values = [unpacked(value) for value in found["values"]]
    seconds = float(found.get("seconds", 0.0))
    if len(values) == 1 and isinstance(values[0], Foreign) and values[0].words != "NotImplementedError":
        verdict = Verdict(False, values[0].words)
    else:
        verdict = judge(all_exercises()[label], values, task["seed"])
    if note:
        verdict = Verdict(verdict.right, f"{verdict.words} ({note})")
    return Graded(label, verdict, seconds)
