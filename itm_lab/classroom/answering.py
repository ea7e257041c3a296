"""Run one submission's answers, each in a forked process with limits; print what they give as JSON.

Started by :mod:`itm_lab.classroom.isolation`, which judges what is printed. Nothing here knows a right answer's place:
solutions are no part of the task.
"""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from itm_lab.teaching.checks import Foreign, collect
from itm_lab.teaching.exercises import find_exercise

MOST_BYTES = 16 * 2**20  # of one answer


def packed(value: Any) -> Any:
    """A plain value as JSON."""
    if isinstance(value, Foreign):
        return {"foreign": value.words}
    if isinstance(value, np.ndarray):
        return {"array": list(value.shape), "kind": value.dtype.kind, "data": value.ravel().tolist()}
    if isinstance(value, list):
        return {"list": [packed(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": {name: packed(part) for name, part in value.items()}}
    if isinstance(value, set):
        return {"set": sorted(value, key=str)}
    return {"value": value}


def unpacked(value: Any) -> Any:
    """The plain value of such JSON, or Foreign."""
    match value:
        case {"foreign": str(words)}:
            return Foreign(words)
        case {"array": list(shape), "kind": "f" | "b" as kind, "data": list(data)}:
            return np.asarray(data, dtype=np.float64 if kind == "f" else bool).reshape(shape)
        case {"list": list(parts)}:
            return [unpacked(part) for part in parts]
        case {"dict": dict(parts)}:
            return {str(name): unpacked(part) for name, part in parts.items()}
        case {"set": list(parts)}:
            return {tuple(part) if isinstance(part, list) else part for part in parts}
        case {"value": None | bool() | int() | float() | str() as found}:
            return found
    return Foreign("an answer that cannot be read")


def definitions(sources: list[str]) -> dict[str, Any]:
    """The names of a chapter: its imports, functions, classes and constants; what needs a trained model is left out."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        run_statements(source, names, only_definitions=True)
    return names


def run_statements(source: str, names: dict[str, Any], only_definitions: bool) -> None:
    """Run a cell statement by statement, and go on after one that fails."""
    try:
        statements = ast.parse(without_magic(source)).body
    except SyntaxError:
        return
    for statement in statements:
        if only_definitions and not defines(statement):
            continue
        with suppress(Exception):  # a name that is missing later is told where it is missed
            exec(compile(ast.Module([statement], []), "<chapter>", "exec"), names)  # in a process of its own  # nosec B102


def without_magic(source: str) -> str:
    """A cell without the lines that only IPython understands."""
    return re.sub(r"^[ \t]*[%!].*$", "", source, flags=re.MULTILINE)


def defines(statement: ast.stmt) -> bool:
    """Whether a statement only defines something: an import, a function, a class, a constant in capitals."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def answer_of(task: Mapping[str, Any], names: dict[str, Any]) -> list[Any]:
    """Run the cells of one answer and collect what it gives for every case."""
    for source in task["before"]:
        run_statements(source, names, only_definitions=False)
    try:
        exec(compile(without_magic(task["source"]), "<answer>", "exec"), names)  # in a process of its own  # nosec B102
    except SyntaxError as error:
        return [Foreign(f"a SyntaxError in line {error.lineno} of the answer's cell")]
    except BaseException as error:
        return [Foreign(f"its cell stops with {type(error).__name__} ({str(error)[:120]})")]
    if task["name"] not in names:
        return [Foreign(f"{task['name']} is not defined")]
    return collect(find_exercise(task["label"]), names[task["name"]], task["seed"])


def limit(seconds: int, megabytes: int) -> None:
    """Bounds of this process: processor time, memory beyond what is in use, size of files, open files, processes."""
    in_use = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    bounds = {
        resource.RLIMIT_AS: in_use + megabytes * 2**20,
        resource.RLIMIT_FSIZE: 64 * 2**20,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    mine = [process for process in psutil.process_iter(["uids", "num_threads"]) if owned(process.info["uids"])]
    threads = sum(process.info["num_threads"] or 1 for process in mine)
    bounds[resource.RLIMIT_NPROC] = threads + 32
    for which, most in bounds.items():
        resource.setrlimit(which, (most, most))


def owned(uids: Any) -> bool:
    return uids is not None and uids.real == os.getuid()


def forked(work: Callable[[], list[Any]], seconds: int, megabytes: int) -> list[Any]:
    """Do something in a child with limits; what became of the child is the answer if it gives none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.close(reading)
            limit(seconds, megabytes)
            result = json.dumps([packed(value) for value in work()])
        except MemoryError:
            result = json.dumps([packed(Foreign("it takes more memory than there is for it"))])
        except BaseException as error:
            result = json.dumps([packed(Foreign(f"it ends with {type(error).__name__}"))])
        with os.fdopen(writing, "w") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(writing)
    try:
        return finished(child, reading, seconds)
    finally:
        os.close(reading)


def finished(child: int, reading: int, seconds: int) -> list[Any]:
    """Wait for a child: at most three times its processor time, then it is killed with all it started."""
    content, end, late = b"", time.monotonic() + 3 * seconds + 5, False
    while len(content) <= MOST_BYTES:
        left = end - time.monotonic()
        late = left <= 0 or not select.select([reading], [], [], left)[0]
        part = b"" if late else os.read(reading, 2**16)
        if not part:
            break
        content += part
    ended = status = 0
    for _ in range(1 if late else 100):  # who has said everything ends within a second
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    if len(content) > MOST_BYTES:
        return [Foreign("it returns more than can be read")]
    if not content:
        late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
        return [
            Foreign(
                f"stopped after {seconds} s: a loop without an end?" if late else "the process ended without an answer"
            )
        ]
    try:
        return [unpacked(value) for value in json.loads(content)]
    except (ValueError, TypeError):
        return [Foreign("an answer that cannot be read")]


def main() -> None:
    """Read the task from the first argument's file, print the answers."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    target = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what an answer prints is nobody's
        os.dup2(nowhere, stream)
    names, found = definitions(task["definitions"]), {}
    for item in task["answers"]:
        begun = time.monotonic()
        values = forked(lambda item=item: answer_of(item, dict(names)), task["seconds"], task["megabytes"])
        found[item["label"]] = {"values": [packed(value) for value in values], "seconds": time.monotonic() - begun}
    target.write(json.dumps(found))
    target.close()


if __name__ == "__main__":
    main()
