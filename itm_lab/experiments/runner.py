"""Run experiments: each run is one papermill call, can be interrupted, and saves a receipt.

Nothing is hidden in here: ``itm run --print`` shows the papermill command of every run.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import yaml
from tqdm import tqdm

from itm_lab.data.opening import dataset_folder, open_splits, open_vocabulary
from itm_lab.experiments.experiment_files import Experiment
from itm_lab.experiments.processes import end, interrupted_by_signals, start_dependent
from itm_lab.experiments.shapes import shapes_only
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import (
    is_old_protocol,
    read_evidence,
    read_named_receipt,
    read_receipt,
    receipt_path,
    write_receipt,
)
from itm_lab.records.scores import read_scores
from itm_lab.records.training import SEARCH_RECORD
from itm_utils.cache import cache_root
from itm_utils.data.precomp import PrecompSplit
from itm_utils.distributed import LEAST
from itm_utils.errors import ItmError, input_error, printable
from itm_utils.progress import interactive
from itm_utils.training import Stage
from itm_utils.training.loop import SAVE_REQUEST

SEARCH_SEED = 100  # settings are chosen with a seed that no table uses


@dataclass(frozen=True, eq=False)
class Job:
    """One run of one experiment.

    parameters: all of the notebook, as they will be. processes: how many train it together; no number depends on it.
    """

    experiment: Experiment
    parameters: dict[str, Any]
    processes: int = 1

    @property
    def root(self) -> Path:
        """The repository: relative folders count from here, and papermill runs here."""
        return self.experiment.notebook.parents[1]

    @property
    def folder(self) -> Path:
        return self.root / self.parameters["run_dir"]

    @property
    def log(self) -> Path:
        """All that its processes say."""
        return self.folder / "papermill.log"

    @property
    def save_request(self) -> Path:
        """A file: whoever makes it asks the training for a checkpoint, which removes it."""
        return self.folder / ".save-now"

    @property
    def folders(self) -> set[Path]:
        """What it writes to or reads from: its own, and those it shares with other runs (``{seed}`` is in their names)."""
        named = [value for value in self.parameters.values() if isinstance(value, str) and "{seed}" in value]
        return {self.folder, *(self.root / value.format(seed=self.seed) for value in named)}

    def must_wait_for(self, others: Iterable[Job]) -> bool:
        """A stage that runs share is trained by one of them at a time, and a run that is built on comes first."""
        theirs = {folder for other in others for folder in other.folders}
        return any(a == b or a in b.parents or b in a.parents for a in self.folders for b in theirs)

    @property
    def data(self) -> Path:
        name = self.parameters["dataset"]
        return data_folder(name if name == "scenes" else str(self.root / name), cache_root())

    @property
    def seed(self) -> int:
        return self.parameters["seed"]

    @property
    def label(self) -> str:
        return f"{self.experiment.chapter}, {self.parameters['variant']}, seed {self.seed}"

    @property
    def recipe(self) -> str:
        """All parameters as YAML: what ``itm recipe`` prints and papermill is given."""
        return yaml.safe_dump(self.parameters, sort_keys=False, allow_unicode=True, width=1000)

    def command(self, recipe: str = "") -> list[str]:
        """The papermill call. recipe: what stands for the parameters where they are only named."""
        output = Path(self.parameters["run_dir"]) / f"{self.experiment.chapter}.ipynb"
        notebook = os.path.relpath(self.experiment.notebook, self.root)
        # What the notebook prints goes to the log; the executed copy is saved twice a minute, not after every cell.
        quiet = ["--log-output", "--no-progress-bar", "--no-request-save-on-cell-execute"]
        return ["papermill", notebook, str(output), *quiet, "-y", recipe or self.recipe]

    @cached_property
    def facts(self) -> Facts:
        return read_data(self.data, self.parameters["evaluate_on"])

    @property
    def steps(self) -> int:
        """Training steps of all its stages, for the bar."""
        configs = [stage.config for stage in self.stages(vocabulary_size=1, image_dim=1)]  # no step depends on either
        return sum(config.epochs * (self.captions // config.batch_size) for config in configs)

    @property
    def captions(self) -> int:
        """Those that it trains on."""
        return round(self.parameters.get("train_fraction", 1.0) * self.facts.captions)

    def stages(self, vocabulary_size: int, image_dim: int, device: str = "meta") -> list[Stage]:
        """Its trainings, as its chapter describes them. On "meta", models have shapes and no numbers."""
        given = self.parameters | {"device": "auto"}
        with torch.random.fork_rng(devices=[]), torch.device(device), shapes_only(device):
            model = self.module.build(given, vocabulary_size, image_dim)
            return self.module.stages(given, model)

    @property
    def module(self) -> ModuleType:
        """The generated module of its chapter: ``08_mmca`` exports ``mmca``."""
        return importlib.import_module("itm_utils.models." + self.experiment.chapter.partition("_")[2])

    def steps_done(self) -> int:
        """What the logs of its stages say."""
        return sum(map(last_step, self.folder.rglob("log.jsonl")))


def last_step(log: Path) -> int:
    """Step of the last whole line of a training log."""
    for line in reversed(log.read_bytes().splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError, RecursionError):  # the last line is being written
            continue
    return 0


def make_jobs(experiment: Experiment, seeds: list[int] | None, overrides: dict[str, Any]) -> list[Job]:
    """One job per seed, each in a folder of its own."""
    jobs = []
    for seed in seeds if seeds is not None else [experiment.values(overrides)["seed"]]:
        values: dict[str, Any] = experiment.values(overrides) | {"seed": seed}
        base = Path(values["run_dir"] or f"runs/{experiment.name}")
        other = added_name(experiment, values["variant"]).replace(" ", "-")
        values["run_dir"] = str(base / "-".join(part for part in (other, f"s{seed}") if part))
        jobs.append(Job(experiment, values))
    return jobs


def added_name(experiment: Experiment, variant: str) -> str:
    """What the name of a run has besides that of its experiment: the settings that differ."""
    return variant.removeprefix(experiment.values()["variant"]).strip()


def search_jobs(experiment: Experiment, choices: dict[str, list[Any]], overrides: dict[str, Any]) -> list[Job]:
    """Each choice alone, everything else as in the experiment, on dev with a seed of its own."""
    jobs = []
    for name, values in choices.items():
        for value in values:
            jobs += make_jobs(experiment, [SEARCH_SEED], overrides | {name: value, "evaluate_on": "dev"})
    return jobs


def grid_jobs(
    experiment: Experiment, choices: Mapping[str, list[Any]], overrides: dict[str, Any], seeds: int = 1
) -> list[Job]:
    """Every combination of the choices, on dev, seeds of its own for every run: the last choice changes first.

    As many runs of something without choices are a baseline for the best of them: they show the sampling noise.
    """
    settings = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return setting_jobs(experiment, settings, overrides, seeds)


def setting_jobs(
    experiment: Experiment,
    settings: Sequence[dict[str, Any]],
    overrides: dict[str, Any],
    seeds: int = 1,
    same_seeds: bool = False,
) -> list[Job]:
    """The given combinations of settings, on dev, seeds of its own for every run, or the same ones for each combination."""
    jobs = []
    for number, chosen in enumerate(settings):
        first = SEARCH_SEED + (0 if same_seeds else number * seeds)
        given = overrides | chosen | {"evaluate_on": "dev"}
        jobs += make_jobs(experiment, list(range(first, first + seeds)), given)
    return jobs


@dataclass(frozen=True)
class Facts:
    """What a run asks of its data. captions: of train. identity: what a receipt says of the evaluated split."""

    captions: int
    identity: dict[str, str]
    images: int


@cache
def data_folder(dataset: str, cached: Path) -> Path:
    """The folder of a dataset, looked for once: Scenes is named after the source of its generator. cached: where it is."""
    return dataset_folder(dataset)


@cache
def open_data(folder: Path, evaluated: str) -> tuple[PrecompSplit, ...]:
    """Train, the part of dev that validates, and the split that is judged: opened once for all runs."""
    return tuple(open_splits(folder, evaluated))


@cache
def read_data(folder: Path, evaluated: str) -> Facts:
    """The data is there, can be read and fits together; all runs on it share one reading."""
    train, _, split = open_data(folder, evaluated)
    open_vocabulary(folder, train)
    return Facts(train.n_captions, split.identity(), split.n_images)


def expected_receipt(job: Job, results: Path, variant: str = "") -> Path:
    """Where the receipt of a job, or of the ensemble it is a member of, goes."""
    identity = job.facts.identity
    protocol = "5K" if identity["split"] == "testall" and job.facts.images == 5000 else "all"
    described = {"chapter": job.experiment.chapter, "variant": variant or job.parameters["variant"], "seed": job.seed}
    return receipt_path(described | {"dataset": identity, "protocol": protocol}, results)


def is_finished(job: Job, results: Path) -> bool:
    """Whether its receipt is there; one with other settings or data under the same name is an error."""
    path = expected_receipt(job, results)
    if not path.exists():
        return False
    known = known_receipt(path)
    if is_old_protocol(known):
        return False  # it is replaced
    for name, wanted in (("dataset", job.facts.identity), ("parameters", settings_of(job.parameters))):
        if known[name] != wanted:
            hint = "Move it away, or give this run another name with -p variant=…"
            raise input_error(path, f"a receipt with other {name}", "none, or one of this very run", hint)
    return True


def known_receipt(path: Path) -> dict[str, Any]:
    """A receipt, read and checked again only when its file has changed: plans and queues ask for the same ones often."""
    stat = path.stat()
    return _read_once(path, stat.st_mtime_ns, stat.st_size)


@cache
def _read_once(path: Path, changed: int, size: int) -> dict[str, Any]:
    return read_receipt(path)


def remove_damaged(job: Job) -> None:
    """Remove receipts in a run's own folder that cannot be read: the run goes on from its checkpoint and writes them again."""
    for path in sorted((job.folder / job.experiment.chapter).rglob("*.json")):
        try:
            read_receipt(path)
        except ItmError as error:
            tqdm.write(f"{error} It is removed, and written again.")
            path.unlink()


def lacks_scores(job: Job, results: Path) -> bool:
    """Whether a finished run must be opened again: its scores are damaged or missing, and its checkpoints are there.

    Once the ensemble that it is a member of has a receipt, nobody needs them.
    """
    if job.experiment.ensemble and expected_receipt(job, results, ensemble_variant(job)).exists():
        return False
    try:
        read_scores(job.folder / "scores.safetensors")
    except ItmError:
        return any(job.folder.rglob("step-*.safetensors"))
    return False


def ensemble_variant(job: Job) -> str:
    """The name of the ensemble that a run is a member of: other settings make another ensemble."""
    return f"{job.experiment.ensemble} {added_name(job.experiment, job.parameters['variant'])}".strip()


def check_names(jobs: list[Job], results: Path) -> None:
    """Every run has a receipt of its own: the second of one name could not be written, after all its training."""
    taken: dict[Path, Job] = {}
    for job in jobs:
        path = expected_receipt(job, results)
        if path in taken:
            found = f"the receipt of two runs, of {taken[path].experiment.name} and of {job.experiment.name}"
            raise input_error(
                path, found, "one run of this name", "Start them one by one, each with -p variant=… of its own."
            )
        taken[path] = job


@interrupted_by_signals()
def run_jobs(jobs: list[Job], results: Path, at_a_time: int) -> list[Job]:
    """Run what is not finished, a few side by side; returns the jobs that failed."""
    waiting, collected = still_to_run(jobs, results)
    return work_off(lambda: waiting, results, Here(at_a_time), sum(job.steps for job in waiting), collected)


def still_to_run(jobs: list[Job], results: Path) -> tuple[list[Job], set[Job]]:
    """The runs that are not finished, and those among them whose receipts are there already, but not their scores."""
    check_names(jobs, results)
    waiting, collected = list[Job](), set[Job]()
    for job in jobs:
        remove_damaged(job)
        if is_finished(job, results):
            tqdm.write(f"{job.label}: receipt is there, kept")
        elif is_finished(job, job.folder):  # it ended, and the interruption came before its receipt was collected
            collect(job, results)
        else:
            waiting.append(job)
            continue
        if lacks_scores(job, results):
            tqdm.write(f"{job.label}: its scores are not there: computed again")
            collected.add(job)
            waiting.append(job)
    return waiting, collected


class Place(Protocol):
    """Where runs are made. What ``start`` returns for a run is handed to the other methods.

    after_interruption: what whoever interrupted is told.
    """

    after_interruption: str

    def ready(self, waiting: list[Job], running: Collection[Job]) -> list[Job]:
        """Those of the waiting runs that may start now, in this order."""
        ...

    def start(self, job: Job, running: Mapping[Job, Any]) -> Any:
        """Start a run beside those that are running."""
        ...

    def wait(self, running: Mapping[Job, Any]) -> list[Job]:
        """Return those that have ended, after a short while."""
        ...

    def finish(self, job: Job, started: Any, results: Path, again: bool) -> bool:
        """See to the receipts of a run that has ended; returns whether it ended well, and says why not."""
        ...

    def leave(self, running: Mapping[Job, Any]) -> None:
        """The command ends: see to what still runs."""
        ...


class Here:
    """This machine: runs are processes of this command, a few side by side, and end with it."""

    after_interruption = "the same command goes on from the last checkpoints"

    def __init__(self, at_a_time: int) -> None:
        self.at_a_time = at_a_time

    def ready(self, waiting: list[Job], running: Collection[Job]) -> list[Job]:
        """As many as there is room for; none that shares a folder with another before it."""
        return next_jobs(waiting, running, self.at_a_time)

    def start(self, job: Job, running: Mapping[Job, subprocess.Popen]) -> subprocess.Popen:
        """Start a process."""
        return start(job)

    def wait(self, running: Mapping[Job, subprocess.Popen]) -> list[Job]:
        """Return soon after a process has ended."""
        wait_for_one(running.values())
        return [job for job, process in running.items() if process.poll() is not None]

    def finish(self, job: Job, started: subprocess.Popen, results: Path, again: bool) -> bool:
        """Collect the receipts."""
        return finish(job, started, results, again)

    def leave(self, running: Mapping[Job, subprocess.Popen]) -> None:
        """End the processes and whatever they started."""
        end(running.values())


def work_off(
    open_jobs: Callable[[], list[Job]],
    results: Path,
    place: Place,
    steps: int | None = None,
    collected: Collection[Job] = (),
    ended: Callable[[Job, bool], None] = lambda job, fine: None,
) -> list[Job]:
    """Run open jobs until there are none; returns those that failed.

    open_jobs: what may start, the most urgent first; asked again whenever a run has ended, so more may open. collected:
    jobs whose receipts are there already. ended: told of every run that ends, and whether it ended well.
    """
    failed: list[Job] = []
    running: dict[Job, Any] = {}
    bar = tqdm(total=steps, unit="step", disable=not interactive())
    done, tried, waiting = 0, set[str](), open_jobs()
    try:
        while waiting or running:
            for job in place.ready(waiting, running):
                tried.add(job.parameters["run_dir"])
                try:
                    running[job] = place.start(job, running)
                except (ItmError, OSError) as error:
                    tqdm.write(f"{job.label}: not started: {error}", file=sys.stderr)
                    failed.append(job)
                    ended(job, False)
            ended_now = place.wait(running)
            if not bar.disable:
                bar.n = done + sum(job.steps_done() for job in running)
                bar.refresh()
            for job in ended_now:
                done += job.steps
                fine = place.finish(job, running.pop(job), results, job in collected)
                failed += [] if fine else [job]
                ended(job, fine)
            waiting = [job for job in open_jobs() if job.parameters["run_dir"] not in tried]
    except KeyboardInterrupt:
        raise ItmError(f"interrupted; {place.after_interruption}") from None
    finally:
        place.leave(running)
        bar.close()
    return failed


def wait_for_one(processes: Collection[subprocess.Popen]) -> None:
    """Return soon after one of the processes has ended, at the latest after half a second."""
    for _ in range(10):
        time.sleep(0.05)
        if any(process.poll() is not None for process in processes):
            return


def next_jobs(waiting: list[Job], running: Iterable[Job], at_a_time: int) -> list[Job]:
    """Those that may start now, in their order; one that shares a folder with another before it waits."""
    before, chosen = list(running), []
    free = at_a_time - len(before)
    for job in waiting:
        if len(chosen) < free and not job.must_wait_for(before):
            chosen.append(job)
        before.append(job)
    return chosen


def start(job: Job) -> subprocess.Popen:
    """Start papermill; all it says goes to a log beside the checkpoints."""
    job.folder.mkdir(parents=True, exist_ok=True)
    given = {SEARCH_RECORD: os.pathsep.join(job.experiment.records), SAVE_REQUEST: str(job.save_request)}
    environment = environment_of(job.parameters) | given
    with job.log.open("a", encoding="utf-8") as log:
        command = ["itm_lab.experiments.papermill_process", *job.command()[1:]]
        if job.processes > 1:
            command = ["itm_lab.experiments.launch", str(job.processes), *command]
        return start_dependent(command, stdout=log, stderr=subprocess.STDOUT, cwd=job.root, env=environment)


def environment_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """That of an executed chapter, less what would hold a long run back."""
    from itm_lab.notebook_io import KERNEL_ENVIRONMENT  # here: a plan does without nbformat

    left_out = ["HF_HUB_OFFLINE"]  # BERT comes from the model hub, unless the user says otherwise
    if parameters.get("device", "cpu") != "cpu":  # one thread each is for runs that share a processor
        left_out += [name for name in KERNEL_ENVIRONMENT if name.endswith("_NUM_THREADS")]
    return os.environ | {name: value for name, value in KERNEL_ENVIRONMENT.items() if name not in left_out}


def finish(job: Job, process: subprocess.Popen, results: Path, again: bool = False) -> bool:
    """Collect the receipts of a run, or say why there are none. again: they are there, and this run must have their ranks."""
    if process.returncode:
        tqdm.write(f"{job.label}: failed: {last_words(job.log)}\n  log: {job.log}", file=sys.stderr)
        return False
    try:
        (check_again if again else collect)(job, results)
    except (ItmError, OSError) as error:  # others may still be training
        tqdm.write(f"{job.label}: failed: {error}", file=sys.stderr)
        return False
    return True


def last_words(log: Path) -> str:
    """The last line that a run said; a log may hold anything, commands of a terminal too."""
    if not log.is_file():
        return "no output"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("[IPKernelApp]")]  # a kernel that outlived its parent
    return printable(lines[-1]) if lines else "no output"


def collect(job: Job, results: Path) -> None:
    """Bring the receipts that a run left in its folder to the others; one on dev may have those on test beside it."""
    wanted = job.parameters["variant"], job.seed, job.facts.identity["split"]
    for path in sorted((job.folder / job.experiment.chapter).rglob("*.json")):
        receipt = read_receipt(path)
        if (receipt["variant"], receipt["seed"], receipt["dataset"]["split"]) == wanted:
            evidence = read_evidence(path) if receipt["ranks"] else None
            write_receipt(receipt, results, evidence)
            tqdm.write(line_of(receipt))


def check_again(job: Job, results: Path) -> None:
    """Refuse a run that was made again and ranks in another way than its receipt says; times may differ."""
    path = expected_receipt(job, results)
    if read_receipt(expected_receipt(job, job.folder))["ranks"] != read_receipt(path)["ranks"]:
        hint = "Another processor or version? What builds on this run would not be what its receipt describes."
        raise input_error(job.folder, f"other ranks than {path.name} has", "the same run again", hint)


def line_of(receipt: dict[str, Any]) -> str:
    """One receipt as one line of a table."""
    rsum, data = receipt["metrics"]["rsum"], receipt["dataset"]
    spread = f" [{rsum['low']:.1f}, {rsum['high']:.1f}]" if "low" in rsum else ""
    kind = "" if receipt["models"] == 1 else f", ensemble of {receipt['models']}"
    where = f"{data['name']} {data['split']} ({receipt['protocol']}{kind})"
    return f"{receipt['variant']}, seed {receipt['seed']}: rsum {rsum['value']:.1f}{spread} on {where}, {receipt['run']['seconds']:.0f} s"


class TableRow(NamedTuple):
    """What stands in a row of a table. dataset: as receipts identify it, with its split."""

    chapter: str
    variant: str
    dataset: dict[str, str]

    def receipts(self, results: Path) -> list[dict[str, Any]]:
        """Of every seed and protocol, those of the old protocol only where there are no others."""
        one = receipt_path(self._asdict() | {"protocol": "all", "seed": 0}, results)
        beginning = one.name.removesuffix("_s0.json")
        paths = [path for path in sorted(one.parent.glob("*.json")) if path.name.startswith(beginning)]
        known = [read_named_receipt(path, results) for path in paths]
        mine = [receipt for receipt in known if receipt["variant"] == self.variant]
        # The old protocol computed fingerprints in another way: its receipts are shown where there are no others.
        old = [receipt for receipt in mine if is_old_protocol(receipt) and self.is_same_split(receipt)]
        return [receipt for receipt in mine if receipt["dataset"] == self.dataset] or old

    def is_same_split(self, receipt: Mapping[str, Any]) -> bool:
        """Whether a receipt is of this split, as far as its name tells."""
        return all(receipt["dataset"][name] == self.dataset[name] for name in ("name", "split"))


def with_processes(jobs: Sequence[Job], count: int, gpus: int) -> list[Job]:
    """The same runs, each trained by so many processes; refused where these cannot have a GPU each, or rows to share.

    gpus: of the machine that trains; without any, processes share the CPU.
    """
    least = LEAST * count
    for job in jobs if count > 1 else ():
        if job.parameters["device"] != "cpu" and 0 < gpus < count:
            raise input_error("--processes", str(count), f"at most {gpus}, one for each GPU, or -p device=cpu")
        if job.parameters["batch_size"] < least:
            found = f"{count} for batches of {job.parameters['batch_size']}"
            raise input_error("--processes", found, f"at least {LEAST} rows of a batch for each")
    return [replace(job, processes=count) for job in jobs] if count > 1 else list(jobs)


def shown(job: Job) -> str:
    """The command of a job, to be pasted into a shell: the parameters come from ``itm recipe``."""
    given = job.parameters | {
        "run_dir": str(Path(job.parameters["run_dir"]).parent)
    }  # `itm recipe` adds the seed's folder
    asked = job.experiment.values()
    changes = [f"{name}={value}" for name, value in given.items() if asked[name] != value]
    options = [word for change in changes for word in ("-p", change)]
    recipe = shlex.join(["itm", "recipe", job.experiment.name, *options])
    folder = shlex.quote(job.parameters["run_dir"])
    return f'mkdir -p {folder} && {shlex.join(job.command("RECIPE")[:-1])} "$({recipe})"'
