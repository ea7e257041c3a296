"""Runs on a cluster: ``itm run --cluster slurm`` sends each to the queue as a job, which trains it to its receipt.

submitit writes the batch script, hands the job over, and sends it to the queue again when its time is up. What a job does
is what ``itm run`` does on one machine with one run. Runs that wait for each other are dependencies of SLURM.

``--cluster local`` takes the same path with submitit's executor for one machine, to try it out. A plain ``itm run`` keeps
processes of its own: a job of submitit goes on when the command that sent it is killed, and nothing of ``itm run`` may.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import psutil
from tqdm import tqdm

from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.experiments.processes import interrupted_by_signals
from itm_lab.experiments.runner import (
    Job,
    collect,
    is_finished,
    last_words,
    next_jobs,
    run_jobs,
    still_to_run,
    with_processes,
    work_off,
)
from itm_utils.errors import ItmError, input_error, printable
from itm_utils.files import read_text, write_json

if TYPE_CHECKING:  # submitit itself is imported where it is used: `itm run` without a cluster does without it
    import submitit

CLUSTERS = ("slurm", "local")
FOLDER = Path("runs/cluster")  # what submitit writes, and what was sent
RECORD = "run.json"  # of one job, beside submitit's files
REQUEUES = 1000  # a run may need many times its limit; each time it goes on from a checkpoint
SAVE_PATIENCE = {"slurm": 60, "local": 15}  # of the 90 and 30 seconds between submitit's signal and the end of a job
POLL = {"slurm": 10.0, "local": 0.5}  # seconds between two looks at the jobs
GRACE = 900.0  # seconds for SLURM to end a job, once its processes were told to end
ASKING = 60  # seconds that SLURM has for an answer
RECORD_FORM = "what `itm run --cluster` writes of a job"


@dataclass(frozen=True)
class Request:
    """What each job is given. options: further ones of sbatch, such as partition and account."""

    cluster: str
    gpus: int = 1
    hours: float = 24.0
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cluster not in CLUSTERS:
            raise input_error("--cluster", repr(self.cluster), f"one of {', '.join(CLUSTERS)}")
        if self.gpus < 0:
            raise input_error("--gpus", str(self.gpus), "the GPUs of a job, 0 or more")
        if self.hours <= 0:
            raise input_error("--hours", str(self.hours), "the time limit of a job, above 0")
        if self.options and self.cluster != "slurm":
            raise input_error("--slurm", f"options for --cluster {self.cluster}", "options for --cluster slurm")
        if self.cluster == "slurm" and not which("srun"):
            raise input_error("--cluster", "no srun on this machine", "a login node of a cluster with SLURM")

    def gpus_of(self, job: Job) -> int:
        """The GPUs that a run asks for: none if it trains on a CPU."""
        return 0 if job.parameters["device"] == "cpu" else self.gpus

    def prepared(self, jobs: Sequence[Job], processes: int) -> list[Job]:
        """The same runs with their processes; 0: one for each of its GPUs."""
        found = []
        for job in jobs:
            gpus = self.gpus_of(job)
            found += with_processes([job], processes or gpus or 1, gpus)
        return found

    def executor(self, folder: Path, job: Job, after: Sequence[str]) -> submitit.Executor:
        """submitit's executor for one job. after: jobs that must have ended before it starts."""
        from submitit import AutoExecutor

        cpus = int(self.options.get("cpus_per_task", job.processes * (1 + job.parameters["num_workers"])))
        again = {f"{self.cluster}_max_num_timeout": REQUEUES}
        executor = AutoExecutor(folder=folder, cluster=self.cluster, **again)
        executor.update_parameters(
            name="-".join(Path(job.parameters["run_dir"]).parts[-4:]).replace("/", ""),
            timeout_min=max(1, round(60 * self.hours)),
            nodes=1,
            gpus_per_node=self.gpus_of(job) or None,
            cpus_per_task=cpus,
        )
        if self.cluster == "slurm":
            # "afterany": a stage that runs share may be trained by the second where the first has failed
            waits = {"dependency": "afterany:" + ":".join(after)} if after else {}
            waits |= {"requeue": True}  # by SLURM itself, where a node is lost
            executor.update_parameters(slurm_additional_parameters=waits | dict(self.options))
            # Between 22.05 and 23.11 srun does not know how many CPUs its job has.
            executor.update_parameters(slurm_srun_args=[f"--cpus-per-task={cpus}"])
        return executor


def read_options(given: Sequence[str]) -> dict[str, str]:
    """Options of sbatch from ``name=value``, named as submitit names them."""
    found = {}
    for one in given:
        name, _, value = one.partition("=")
        name = name.replace("-", "_")
        if not value or not name.isidentifier() or (name == "cpus_per_task" and not value.isdecimal()):
            raise input_error("--slurm", repr(one), "an option of sbatch as name=value, such as partition=gpu")
        found[name] = value
    return found


@dataclass(frozen=True)
class Sent:
    """A run in plain values: what a job is given, and what is kept of it on disk. records, settings: of searches before it."""

    cluster: str
    root: str
    results: str
    experiment: str
    settings: dict[str, Any]
    records: list[str]
    parameters: dict[str, Any]
    processes: int
    steps: int

    @classmethod
    def of(cls, job: Job, results: Path, cluster: str) -> Sent:
        """A run as it is sent."""
        one = job.experiment
        places = cluster, str(job.root), str(results)
        return cls(*places, one.name, one.settings, [*one.records], job.parameters, job.processes, job.steps)

    def job(self) -> Job:
        """The run that was sent."""
        experiment = find_experiment(Path(self.root), self.experiment)
        chosen = replace(experiment, settings=self.settings, records=tuple(self.records))
        return Job(chosen, self.parameters, self.processes)


class ClusterRun:
    """What a job does: one run, until its receipt is among the others. submitit pickles it, and calls it in the job."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent

    def __call__(self) -> None:
        """Train, or go on training, and collect the receipt."""
        job, told = self.sent.job(), list[int]()
        job.save_request.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        if run_jobs([job], Path(self.sent.results), at_a_time=1):
            if told:  # so was the training: the job is cancelled, or makes room for another and is queued again
                time.sleep(GRACE)
            raise ItmError(f"{job.label}: failed: {last_words(job.log)}")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit before the time is up: have the training save, and go on with the next job."""
        from submitit.helpers import DelayedSubmission

        request, deadline = self.sent.job().save_request, time.monotonic() + SAVE_PATIENCE[self.sent.cluster]
        if training := psutil.Process().children():
            request.touch()
        while training and request.exists() and time.monotonic() < deadline:  # not answered while it validates or mines
            time.sleep(0.1)
        return DelayedSubmission(ClusterRun(self.sent))


@dataclass(frozen=True)
class Known:
    """A job that was sent from a checkout. folder: of submitit's files."""

    id: str
    folder: Path
    sent: Sent

    def slurm_job(self) -> submitit.SlurmJob:
        """submitit's view of it."""
        from submitit import SlurmJob

        return SlurmJob(folder=self.folder, job_id=self.id)

    def runs_here(self) -> bool:
        """Whether a local job runs: its number is that of a process, which others have later."""
        try:
            words = psutil.Process(int(self.id)).cmdline()
        except psutil.Error:
            return False
        return any(word.startswith(str(self.folder.parent)) for word in words)


def sent_from(root: Path) -> dict[str, Known]:
    """Folder of a run → the job that was last sent for it."""
    found = {}
    for path in sorted((root / FOLDER).glob(f"*/{RECORD}"), key=sending):
        try:
            known = Sent(**json.loads(read_text(path, RECORD_FORM)))
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, ItmError):
                raise
            raise input_error(path, f"a damaged file ({error})", RECORD_FORM) from None
        found[known.parameters["run_dir"]] = Known(path.parent.name.rpartition("-")[2], path.parent, known)
    return found


def sending(record: Path) -> tuple[str, int]:
    """When the job of a record was sent, and its number."""
    when, _, number = record.parent.name.rpartition("-")
    return when, int(number)


def slurm_queue() -> dict[str, str]:
    """Number → state of every job of this user that SLURM has in its queue, with the reason why it waits."""
    command = ["squeue", "--me", "--noheader", "--format=%i|%T|%r"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=ASKING, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise input_error("squeue", printable(words[-1])[:300], "the jobs of the queue") from None
    found = {}
    for line in said.splitlines():
        number, state, reason = [*line.split("|"), "", ""][:3]
        found[number] = state.lower() + (f" ({reason})" if reason not in ("", "None") else "")
    return found


class Cluster:
    """A place for runs: each is a job of submitit. at_a_time: jobs in the queue; 0: all of them.

    Whoever interrupts leaves the jobs of SLURM in its queue, and the next call waits for them. Local jobs are ended.
    """

    def __init__(self, root: Path, results: Path, request: Request, at_a_time: int) -> None:
        self.results, self.request, self.at_a_time = results, request, at_a_time
        self.slurm = request.cluster == "slurm"
        self.folder = root / FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-%j"
        waiting = slurm_queue() if self.slurm else {}
        known = sent_from(root) if waiting else {}
        self.queued = {name: one for name, one in known.items() if one.sent.cluster == "slurm" and one.id in waiting}
        self.after_interruption = "the same command goes on from the last checkpoints"
        if self.slurm:
            self.after_interruption = "the jobs stay in the queue (`itm run --status`); the same command waits for them"

    def ready(self, waiting: list[Job], running: Collection[Job]) -> list[Job]:
        """Those for which there is room. In SLURM's queue they wait for each other; those that are in it come first."""
        if not self.slurm:
            return next_jobs(waiting, running, self.at_a_time)
        first = sorted(waiting, key=lambda job: job.parameters["run_dir"] not in self.queued)
        return first[: max(0, self.at_a_time - len(running))] if self.at_a_time else first

    def start(self, job: Job, running: Mapping[Job, submitit.Job]) -> submitit.Job:
        """Send a run, unless a job of an earlier call is in the queue with it."""
        if (known := self.queued.get(job.parameters["run_dir"])) is not None:
            if known.sent.parameters != job.parameters:
                hint = f"Wait for it, or end it with `scancel {known.id}`."
                raise input_error(job.folder, f"job {known.id} with other parameters", "none of this folder", hint)
            tqdm.write(f"{job.label}: job {known.id} is in the queue")
            return known.slurm_job()
        return self.send(job, [one.job_id for other, one in running.items() if job.must_wait_for([other])])

    def send(self, job: Job, after: Sequence[str]) -> submitit.Job:
        """Send a run. after: numbers of the jobs that it waits for."""
        sent = Sent.of(job, self.results, self.request.cluster)
        try:
            submitted = self.request.executor(self.folder, job, after).submit(ClusterRun(sent))
        except RuntimeError as error:  # whatever sbatch says of a partition or an account that is not there
            said = [line for line in str(error).splitlines() if line.strip()]
            hint = "Check --slurm, --gpus and --hours."
            raise input_error("sbatch", printable(said[-1])[:300] if said else "no answer", "a number", hint) from error
        write_json(submitted.paths.folder / RECORD, asdict(sent))
        tqdm.write(f"{job.label}: job {submitted.job_id}{' after ' + ', '.join(after) if after else ''}")
        return submitted

    def wait(self, running: Mapping[Job, submitit.Job]) -> list[Job]:
        """Return those whose jobs have ended, after a while."""
        time.sleep(POLL[self.request.cluster])
        return [job for job, submitted in running.items() if submitted.done()]

    def finish(self, job: Job, started: submitit.Job, results: Path, again: bool) -> bool:
        """Whether a job did what it had to; it has collected the receipt itself."""
        if started.exception() is None:
            tqdm.write(f"{job.label}: job {started.job_id} has finished")
            return True
        state = (
            "failed" if started.paths.result_pickle.exists() else started.state.lower()
        )  # SLURM says so a little later
        what = f"{job.label}: job {started.job_id} ended as {state}: {last_words(job.log)}"
        tqdm.write(f"{what}\n  logs: {job.log}, {started.paths.folder}", file=sys.stderr)
        return False

    def leave(self, running: Mapping[Job, submitit.Job]) -> None:
        """End local jobs."""
        for submitted in () if self.slurm else running.values():
            submitted.cancel()
        for submitted in () if self.slurm else running.values():
            submitted.wait()


@interrupted_by_signals()
def run_on_cluster(jobs: list[Job], results: Path, request: Request, at_a_time: int) -> list[Job]:
    """Send what is not finished, wait until all jobs have ended, and return the runs that failed."""
    waiting, collected = still_to_run(jobs, results)
    if not waiting:
        return []
    place = Cluster(waiting[0].root, results, request, at_a_time)
    return work_off(lambda: waiting, results, place, sum(job.steps for job in waiting), collected)


def status(root: Path) -> Iterator[str]:
    """A line for each run that was sent; receipts that are still in the folder of their run are collected."""
    sent = sent_from(root)
    if not sent:
        yield "no jobs were sent from here"
    queue = slurm_queue() if any(known.sent.cluster == "slurm" for known in sent.values()) else {}
    for known in sent.values():
        job = known.sent.job()
        steps = f"{job.steps_done():,} of {known.sent.steps:,} steps"
        yield f"{known.id:>8}  {state_of(known, job, queue):<22}  {steps:>24}  {job.label}"


def state_of(known: Known, job: Job, queue: Mapping[str, str]) -> str:
    """Of a job, in SLURM's word for it, or finished where the receipt of its run is there."""
    results = Path(known.sent.results)
    try:
        if not is_finished(job, results) and is_finished(job, job.folder):
            collect(job, results)
        if is_finished(job, results):
            return "finished"
    except ItmError as error:  # such as data that is no longer there: the others are told of
        return str(error)
    if known.sent.cluster == "local":
        return "running" if known.runs_here() else "ended"
    return queue.get(known.id) or known.slurm_job().get_info(mode="force").get("State", "unknown").lower()
