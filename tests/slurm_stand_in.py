"""sbatch, srun, sacct, scancel and scontrol as far as submitit asks them: they run the jobs, on this machine.

``install(folder)`` writes the five programs to a folder that a test puts before the others of PATH. The state of job N is
the file ``N.json`` in the same folder. Jobs wait for their dependencies, and are queued again when they or their node ask
for it; the limit of a job is up when a test writes the file ``N.limit``, and its node is lost when it writes ``N.lost``.
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
PROGRAMS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
OPEN = ("PENDING", "RUNNING", "REQUEUED")


def install(folder: Path) -> Path:
    """Write the programs; returns the folder."""
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" {name} "{folder}" "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return folder


def state_of(folder: Path, number: int | str) -> dict[str, Any]:
    return json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))


def change(folder: Path, number: int | str, **facts: Any) -> None:
    """Note something of a job, in one step."""
    path = folder / f"{number}.json"
    known = state_of(folder, number) if path.exists() else {}
    beside = path.with_suffix(f".{os.getpid()}.new")
    beside.write_text(json.dumps(known | facts), encoding="utf-8")
    beside.replace(path)


def options_of(script: str) -> dict[str, str]:
    """What follows #SBATCH in a batch script."""
    return {name: value for name, value in re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE)}


def sbatch(folder: Path, script: str) -> None:
    """Queue a job, and start what watches over it."""
    if "nowhere" in Path(script).read_text(encoding="utf-8"):
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    number = 1 + len(list(folder.glob("*.json")))
    kept = folder / f"{number}.sh"
    kept.write_text(Path(script).read_text(encoding="utf-8"), encoding="utf-8")
    change(folder, number, state="PENDING", starts=0, options=options_of(kept.read_text(encoding="utf-8")))
    command = [sys.executable, str(HERE), "watch", str(folder), str(number)]
    with (folder / f"{number}.out").open("w", encoding="utf-8") as out:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    print(f"Submitted batch job {number}")


def watch(folder: Path, number: str) -> None:
    """One job from the queue to its end, as often as it is queued again."""
    after = state_of(folder, number)["options"].get("dependency", "").removeprefix("afterany:")
    while any(state_of(folder, other)["state"] in OPEN for other in after.split(":") if other):
        time.sleep(0.1)
    while state_of(folder, number)["state"] in OPEN:
        starts = state_of(folder, number)["starts"] + 1
        environment = os.environ | {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
        change(folder, number, state="RUNNING", starts=starts)
        job = subprocess.Popen(["bash", str(folder / f"{number}.sh")], env=environment, start_new_session=True)
        lost = follow(folder, number, job)
        again = lost or state_of(folder, number)["state"] == "REQUEUED"
        cancelled = state_of(folder, number)["state"] == "CANCELLED"
        if not again and not cancelled:
            change(folder, number, state="FAILED" if job.returncode else "COMPLETED")


def follow(folder: Path, number: str, job: subprocess.Popen) -> bool:
    """Wait for the end of a job, and bring it about; returns whether its node was lost."""
    while job.poll() is None:
        time.sleep(0.05)
        state = state_of(folder, number)["state"]
        if (limit := folder / f"{number}.limit").exists():
            limit.unlink()
            srun_process = int((folder / f"{number}.pid").read_text(encoding="utf-8"))
            os.kill(
                srun_process,
                signal.SIGUSR2 if "USR2" in state_of(folder, number)["options"]["signal"] else signal.SIGUSR1,
            )
        if (lost := folder / f"{number}.lost").exists() or state == "CANCELLED":
            lost.unlink(missing_ok=True)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            return state != "CANCELLED"
    return False


def srun(folder: Path, *arguments: str) -> None:
    """Become the command; what it says goes where the options want it."""
    words, outputs = list(arguments), {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        if name in ("--output", "--error"):
            outputs[name] = value or words.pop(0)
    number = os.environ["SLURM_JOB_ID"]
    (folder / f"{number}.pid").write_text(str(os.getpid()), encoding="utf-8")
    for name, descriptor in (("--output", 1), ("--error", 2)):
        path = Path(outputs[name].replace("%j", number).replace("%t", "0"))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), descriptor)
    os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    os.execvp(words[0], words)


def sacct(folder: Path, *arguments: str) -> None:
    """The states of the jobs that are asked for."""
    print("JobID|State|NodeList")
    for option, number in pairwise(arguments):
        if option == "-j" and (folder / f"{number}.json").exists():
            print(f"{number}|{state_of(folder, number)['state']}|here")


def scancel(folder: Path, number: str) -> None:
    change(folder, number, state="CANCELLED")


def scontrol(folder: Path, what: str, number: str) -> None:
    if what == "requeue":
        change(folder, number, state="REQUEUED")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
