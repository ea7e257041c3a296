"""Runs on a cluster: ``itm run --cluster slurm`` sends each to the queue as a job, which trains it to its receipt.

submitit writes the batch script, hands the job over, and sends it to the queue again when its time is up; that it does
for SLURM, and, to try a job out, on this machine. Runs that wait for each other are dependencies of SLURM. Without a
cluster ``itm run`` keeps processes of its own: a job of submitit is made to go on when the session that started it has
ended, and nothing of ``itm run`` may.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.experiments.processes import end, interrupted_by_signals
from itm_lab.experiments.runner import (
    Job,
    collect,
    finish,
    is_finished,
    next_jobs,
    start,
    still_to_run,
)
from itm_utils.errors import ItmError, input_error, printable
from itm_utils.files import read_text, write_json
from itm_utils.progress import interactive
from itm_utils.training.loop import SAVE_REQUEST

if TYPE_CHECKING:
    import submitit

CLUSTERS = ("slurm", "local")
FOLDER = Path("runs/cluster")  # what submitit writes, and the list of what was sent
REQUEUES = 1000  # a run may need many times its limit; each time it goes on from a checkpoint
SAVE_PATIENCE = 60  # seconds for a training to save itself, of the 90 between SLURM's signal and the end
POLL = 2.0  # seconds between two looks at the queue
LIST_FORM = "the list of jobs that `itm run --cluster` writes"


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
        if self.hours <= 0:
            raise input_error("--hours", str(self.hours), "the time limit of a job, above 0")

    def executor(self, folder: Path, name: str, after: Sequence[str]) -> Any:
        """submitit's executor for one job. after: jobs that must have ended before it starts."""
        executor = _submitit().AutoExecutor(folder=folder, cluster=self.cluster, slurm_max_num_timeout=REQUEUES)
        gpus = {"gpus_per_node": self.gpus} if self.gpus else {}
        executor.update_parameters(name=name, timeout_min=max(1, round(60 * self.hours)), nodes=1, **gpus)
        if self.cluster == "slurm":
            # "afterany": a stage that runs share may be trained by the second where the first has failed
            waits: dict[str, Any] = {"requeue": True}  # by SLURM itself, where a node is lost
            waits |= {"dependency": "afterany:" + ":".join(after)} if after else {}
            executor.update_parameters(slurm_additional_parameters=waits | dict(self.options))
        return executor


def read_options(given: Sequence[str]) -> dict[str, str]:
    """Options of sbatch from ``name=value``."""
    pairs = [one.partition("=") for one in given]
    for one, (name, equals, value) in zip(given, pairs, strict=True):
        if not (name and equals and value) or not name.replace("-", "").replace("_", "").isalnum():
            raise input_error("--slurm", repr(one), "an option of sbatch as name=value, such as partition=gpu")
    return {name: value for name, _, value in pairs}


def _submitit() -> Any:
    try:
        import submitit  # here: it comes with the extra [cluster]
    except ImportError as error:
        hint = "pip install 'itm-utils[cluster]'"
        raise input_error("--cluster", "no submitit", "the package that talks to SLURM", hint) from error
    return submitit


class ClusterRun:
    """What a job does: one run, until its receipt is among the others. submitit pickles it, and calls it in the job."""

    def __init__(self, job: Job, results: Path, again: bool) -> None:
        self.job, self.results, self.again = job, results, again

    def __call__(self) -> str:
        """Train, and collect the receipt; says where it is."""
        request = self.job.folder / ".save-now"
        request.unlink(missing_ok=True)
        os.environ[SAVE_REQUEST] = str(request)
        process = start(self.job)
        try:
            while process.poll() is None:
                time.sleep(0.2)
        finally:
            end([process])
        if not finish(self.job, process, self.results, self.again):
            raise ItmError(f"{self.job.label} failed; log: {self.job.folder / 'papermill.log'}")
        return self.job.label

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit before the time is up: have the training save, and go on with the next job."""
        request, deadline = Path(os.environ[SAVE_REQUEST]), time.monotonic() + SAVE_PATIENCE
        request.touch()
        while request.exists() and time.monotonic() < deadline:  # in a validation or in mining it does not look
            time.sleep(0.1)
        return _submitit().helpers.DelayedSubmission(ClusterRun(self.job, self.results, self.again))


@dataclass(frozen=True)
class Sent:
    """A run that was sent to the queue, as the list on disk has it."""

    id: str
    cluster: str
    experiment: str
    parameters: dict[str, Any]
    processes: int = 1

    def job(self, root: Path) -> Job:
        """The run that was sent."""
        return Job(find_experiment(root, self.experiment), self.parameters, self.processes)


class Queue:
    """The jobs that were sent from a checkout. folder: of submitit's files and of the list."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / FOLDER
        self.path = self.folder / "jobs.json"

    def sent(self) -> dict[str, Sent]:
        """Folder of a run → what was sent for it last."""
        if not self.path.exists():
            return {}
        try:
            return {name: Sent(**one) for name, one in json.loads(read_text(self.path, LIST_FORM)).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ItmError):
                raise
            raise input_error(self.path, f"a damaged file ({error})", LIST_FORM) from None

    def note(self, job: Job, job_id: str, cluster: str) -> None:
        """Add a job to the list."""
        sent = Sent(job_id, cluster, job.experiment.name, job.parameters, job.processes)
        listed = {name: asdict(one) for name, one in self.sent().items()}
        write_json(self.path, listed | {job.parameters["run_dir"]: asdict(sent)})

    def open(self, sent: Sent) -> Any:
        """submitit's view of a job of SLURM that was sent before."""
        return _submitit().SlurmJob(folder=self.folder / "%j", job_id=sent.id)

    def submit(self, job: Job, results: Path, again: bool, request: Request, after: Sequence[str]) -> Any:
        """Send a run; returns submitit's view of its job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(Path(job.parameters["run_dir"]).parts[-3:])
        executor = request.executor(self.folder / "%j", name, after)
        try:
            submitted = executor.submit(ClusterRun(job, results, again))
        except Exception as error:  # whatever sbatch says of a partition or an account that is not there
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise input_error("sbatch", printable(said[-1])[:300], "a job number", "Check --slurm, --gpus.") from error
        self.note(job, submitted.job_id, request.cluster)
        tqdm.write(f"{job.label}: job {submitted.job_id}{' after ' + ', '.join(after) if after else ''}")
        return submitted


@interrupted_by_signals()
def run_on_cluster(jobs: Sequence[Job], results: Path, request: Request, at_a_time: int) -> list[Job]:
    """Send what is not finished, wait until all jobs have ended, and return the runs that failed.

    Whoever interrupts leaves the jobs of a cluster in its queue; called again, the command waits for them.
    """
    waiting, collected = still_to_run(jobs, results)
    if not waiting:
        return []
    queue, running = Queue(waiting[0].root), dict[Job, Any]()
    failed: list[Job] = []
    bar = tqdm(total=sum(job.steps for job in waiting), unit="step", disable=not interactive())
    done = 0
    if request.cluster == "slurm":
        running = _attached(queue, waiting)
    try:
        while waiting or running:
            waiting = [job for job in waiting if job not in running]
            ready = waiting if request.cluster == "slurm" else next_jobs(waiting, running, at_a_time)
            for job in ready:
                after = [other.job_id for sooner, other in running.items() if job.must_wait_for([sooner])]
                running[job] = queue.submit(job, results, job in collected, request, after)
            waiting = [job for job in waiting if job not in running]
            time.sleep(POLL)
            bar.n = done + sum(job.steps_done() for job in running) if not bar.disable else 0
            bar.refresh()
            for job in [job for job, submitted in running.items() if submitted.done()]:
                done += job.steps
                failed += [] if _ended_well(job, running.pop(job), results) else [job]
    except KeyboardInterrupt:
        if request.cluster == "slurm":
            said = f"interrupted; {len(running)} jobs stay in the queue: `itm run --status` shows them"
            raise ItmError(f"{said}, the same command waits for them") from None
        for submitted in running.values():
            submitted.cancel()
        raise ItmError("interrupted; the same command goes on from the last checkpoints") from None
    finally:
        bar.close()
    return failed


def _attached(queue: Queue, jobs: Sequence[Job]) -> dict[Job, Any]:
    """The jobs that are in the queue already."""
    sent, found = queue.sent(), {}
    for job in jobs:
        known = sent.get(job.parameters["run_dir"])
        if known is None or known.cluster != "slurm" or (open_job := queue.open(known)).done(force_check=True):
            continue
        if known.parameters != job.parameters:
            hint = f"Wait for it, or end it with `scancel {known.id}`."
            raise input_error(job.folder, f"job {known.id} with other parameters", "none of this folder", hint)
        tqdm.write(f"{job.label}: job {known.id} is in the queue")
        found[job] = open_job
    return found


def _ended_well(job: Job, submitted: Any, results: Path) -> bool:
    """Whether a job left its receipt; says what went wrong otherwise."""
    if is_finished(job, results):
        tqdm.write(f"{job.label}: finished")
        return True
    lines = [line for line in (submitted.stderr() or "").splitlines() if line.strip()]
    said = printable(lines[-1])[:300] if lines else "no output"
    tqdm.write(f"{job.label}: job {submitted.job_id} {submitted.state}: {said}\n  log: {job.folder / 'papermill.log'}")
    return False


def status(root: Path, results: Path) -> Iterator[str]:
    """A line for each run that was sent; receipts that are still in the folder of their run are collected."""
    queue = Queue(root)
    sent = queue.sent()
    if not sent:
        yield "no jobs were sent from here"
    for known in sent.values():
        job = known.job(root)
        if not is_finished(job, results) and is_finished(job, job.folder):
            collect(job, results)
        if is_finished(job, results):
            state = "finished"
        elif known.cluster == "slurm":
            state = queue.open(known).get_info(mode="force").get("State", "UNKNOWN").lower()
        else:
            state = "of a session of this machine"
        yield f"{known.id:>10}  {state:12}  {job.steps_done():>7,} of {job.steps:,} steps  {job.label}"
