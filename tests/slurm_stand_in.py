"""sbatch, srun, squeue, sacct, scancel and scontrol as far as jobs need them: they run the jobs, on this machine.

``install(folder)`` writes the programs to a folder that a test puts before the others of PATH. The state of job N is the
file ``N.json`` there. Jobs wait for their dependencies, and are queued again when they ask for it or their node is lost.
A test writes ``N.limit`` to say that the time of a job is up, and ``N.lost`` to take its node away. Whatever a job still
runs when it has to leave its node is killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol")
OPEN = ("PENDING", "RUNNING")
TICK = 0.05


def install(folder: Path) -> Path:
    """Write the programs; returns the folder."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{HERE}" {name} "{folder}" "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return folder


def remove_jobs(folder: Path) -> None:
    """Cancel what a test left in the queue, and wait for its end."""
    for number in numbers(folder):
        if state_of(folder, number)["state"] in OPEN:
            scancel(folder, number)
    while any(state_of(folder, number)["state"] in OPEN for number in numbers(folder)):
        time.sleep(TICK)


def numbers(folder: Path) -> list[str]:
    return sorted((path.stem for path in folder.glob("*.json")), key=int)


def state_of(folder: Path, number: int | str) -> dict[str, Any]:
    return json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))


def write_state(folder: Path, number: str, known: dict[str, Any]) -> None:
    """In one step; whoever watches over a job is the only one that writes."""
    beside = folder / f"{number}.new"
    beside.write_text(json.dumps(known), encoding="utf-8")
    beside.replace(folder / f"{number}.json")


def taken(path: Path) -> bool:
    """Whether a file was there; now it is not."""
    with suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


# ---------------------------------------------------------------- the programs


def sbatch(folder: Path, script: str) -> None:
    """Queue a job, and start what watches over it."""
    text = Path(script).read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    if options.get("partition") == "nowhere":
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    number = str(1 + len(numbers(folder)))
    (folder / f"{number}.sh").write_text(text, encoding="utf-8")
    write_state(folder, number, {"state": "PENDING", "starts": 0, "options": options, "began": 0.0, "ended": 0.0})
    command = [sys.executable, str(HERE), "watch", str(folder), number]
    with (folder / f"{number}.out").open("w", encoding="utf-8") as out:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    print(f"Submitted batch job {number}")


def srun(folder: Path, *arguments: str) -> None:
    """Become the command; what it says goes where the options want it."""
    words, number = list(arguments), os.environ["SLURM_JOB_ID"]
    while words[0].startswith("--"):
        name = words.pop(0)
        if name in ("--output", "--error"):
            path = Path(words.pop(0).replace("%j", number).replace("%t", "0"))
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(opened, {"--output": 1, "--error": 2}[name])
    os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    os.execvp(words[0], words)


def squeue(folder: Path, *arguments: str) -> None:
    """Number, state and reason of the jobs that have not ended."""
    assert arguments == ("--me", "--noheader", "--format=%i|%T|%r")
    for number in numbers(folder):
        if (known := state_of(folder, number))["state"] in OPEN:
            waits = known["state"] == "PENDING" and "dependency" in known["options"]
            print(f"{number}|{known['state']}|{'Dependency' if waits else 'None'}")


def sacct(folder: Path, *arguments: str) -> None:
    """The states of the jobs that are asked for."""
    print("JobID|State|NodeList")
    for option, number in pairwise(arguments):
        if option == "-j" and (folder / f"{number}.json").exists():
            print(f"{number}|{state_of(folder, number)['state']}|here")


def scancel(folder: Path, number: str) -> None:
    (folder / f"{number}.cancel").touch()


def scontrol(folder: Path, what: str, number: str) -> None:
    assert what == "requeue"
    (folder / f"{number}.requeue").touch()


# ---------------------------------------------------------------- the cluster


def watch(folder: Path, number: str) -> None:
    """One job from the queue to its end, as often as it is queued again."""
    known = state_of(folder, number)
    after = known["options"].get("dependency", "").removeprefix("afterany:")
    while any(state_of(folder, other)["state"] in OPEN for other in after.split(":") if other):
        time.sleep(TICK)
    while known["state"] in OPEN:
        known |= {"state": "RUNNING", "starts": known["starts"] + 1, "began": known["began"] or time.time()}
        write_state(folder, number, known)
        environment = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
        job = subprocess.Popen(["bash", str(folder / f"{number}.sh")], env=environment, start_new_session=True)
        known |= {"state": end_of(folder, number, job, known["options"]), "ended": time.time()}
        write_state(folder, number, known)


def end_of(folder: Path, number: str, job: subprocess.Popen, options: dict[str, str]) -> str:
    """Wait for the end of a job, and bring it about; returns the state that follows."""
    while job.poll() is None:
        time.sleep(TICK)
        if taken(folder / f"{number}.limit"):
            assert re.fullmatch(r"USR2@\d+", options["signal"])
            send(signal.SIGUSR2, family(job.pid)[1:])  # to every process but the batch script
        if taken(folder / f"{number}.cancel"):
            kill(job)
            return "CANCELLED"
        if taken(folder / f"{number}.lost"):
            kill(job)
            return "PENDING" if "requeue" in options else "NODE_FAIL"
    if taken(folder / f"{number}.requeue"):
        return "PENDING"
    return "FAILED" if job.returncode else "COMPLETED"


def kill(job: subprocess.Popen) -> None:
    """A job and all that it started, in whichever session."""
    send(signal.SIGKILL, family(job.pid))
    job.wait()


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def family(pid: int) -> list[int]:
    """A process and all that it started, and what these started."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def children(parent: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(place.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(place.parent.name))
    return found


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
