"""The queue of trials: ``experiments/queue.yaml`` lists them, the most informative first, and ``itm run --queue`` works it off.

Each entry names experiments or a table, and the seeds it wants (the experiment's own otherwise), so that a comparison may
get two seeds everywhere before anything gets its fifth. Searches that an entry needs run first, as part of the queue. What is
finished is not run again: the queue can be stopped at any time, lengthened, and started again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from tqdm import tqdm

from itm_lab.experiments.chain import built_on, linked
from itm_lab.experiments.ensembles import ensemble_of
from itm_lab.experiments.experiment_files import (
    Experiment,
    experiments_of_table,
    find_experiment,
    read_experiments,
    read_seeds,
    twin_seeds,
)
from itm_lab.experiments.plan import missing_searches, with_choices
from itm_lab.experiments.processes import interrupted_by_signals
from itm_lab.experiments.runner import (
    Here,
    Job,
    collect,
    ensemble_variant,
    expected_receipt,
    is_finished,
    make_jobs,
    remove_damaged,
    work_off,
)
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.receipts import is_old_protocol, read_receipt
from itm_utils.errors import ItmError, input_error
from itm_utils.files import read_text

SCORES = "scores.safetensors"
FORM = "a list of {run: experiment or list of them} or {table: name}, each with seeds: 5-9 if not the experiment's own"


@dataclass(frozen=True)
class Entry:
    """One line of the queue. seeds: "" for those of each experiment."""

    experiments: tuple[Experiment, ...]
    seeds: str = ""


def read_queue(root: Path, path: Path) -> list[Entry]:
    """The entries of a queue, in order; every name and every seed is checked."""
    try:
        content = load_yaml(read_text(path, FORM))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ItmError):
            raise
        raise input_error(path, f"no YAML ({str(error).splitlines()[0]})", FORM) from None
    if not isinstance(content, list) or not content:
        raise input_error(path, repr(content)[:60], FORM)
    return [read_entry(root, path, number, one) for number, one in enumerate(content, start=1)]


def read_entry(root: Path, path: Path, number: int, given: Any) -> Entry:
    """One entry, by its number in the file."""
    where = f"{path.name}, entry {number}"
    if (
        not isinstance(given, dict)
        or len(given.keys() & {"run", "table"}) != 1
        or given.keys() - {"run", "table", "seeds"}
    ):
        raise input_error(where, repr(given)[:80], FORM)
    if "table" in given:
        found = experiments_of_table(root, str(given["table"]))
    else:
        names = given["run"] if isinstance(given["run"], list) else [given["run"]]
        found = [find_experiment(root, str(name)) for name in names]
    seeds = str(given.get("seeds", ""))
    for experiment in found:
        wanted = seeds or experiment.seeds
        if not wanted:
            raise input_error(where, f"no seeds for {experiment.name}", "seeds here or in its file")
        read_seeds(wanted)
    return Entry(tuple(found), seeds)


class TrialQueue:
    """What a queue has open at any moment. results: where receipts and recorded choices lie.

    A receipt in ``results`` means that a run has finished, wherever it ran. Only what others need of it in its folder, such
    as scores for an ensemble, makes it run again (``again``), and then it must have the ranks of its receipt.
    """

    def __init__(self, root: Path, entries: list[Entry], results: Path) -> None:
        self.root, self.entries, self.results = root, entries, results
        self.open: list[Job] | None = None
        self.known: dict[tuple[str, tuple[int, ...]], list[Job]] = {}  # experiment, seeds → its open runs
        self.lacking: set[str] = set()  # folders of finished runs whose scores are needed and not there
        self.again: set[Job] = set()
        self.failed: dict[str, str] = {}  # folder of a run, or name of an experiment → what to call it

    def jobs(self) -> list[Job]:
        """Runs that may start now, in the order of the queue; a run that ends opens others only where it was waited for."""
        if self.open is None:
            found: dict[str, Job] = {}
            if (lacking := self.without_scores()) != self.lacking:
                self.lacking, self.known = lacking, {}
            for experiment, seeds in self.wanted():
                key = experiment.name, tuple(seeds)
                if key not in self.known:
                    self.known[key] = self.next_runs(experiment, seeds, lacking)
                for job in self.known[key]:
                    found.setdefault(job.parameters["run_dir"], job)
            self.open = list(found.values())
        return self.open

    def wanted(self) -> Iterator[tuple[Experiment, list[int]]]:
        """Every experiment with the seeds that an entry asks for."""
        for entry in self.entries:
            for experiment in entry.experiments:
                yield experiment, read_seeds(entry.seeds or experiment.seeds)

    def next_runs(self, experiment: Experiment, seeds: list[int], lacking: Collection[str] = ()) -> list[Job]:
        """The unfinished runs of an experiment, or of the search that it needs first; none where these cannot be told."""
        if experiment.name in self.failed:
            return []
        try:
            while (search := next(missing_searches(self.root, experiment, {}, self.results), None)) is not None:
                if open_runs := search.open_runs(
                    self.results
                ):  # where all that are left have failed, nothing is chosen
                    return self.unfinished(open_runs)
                tqdm.write(search.record(self.results))
            return self.unfinished(self.seeds_of(experiment, seeds), lacking)
        except ItmError as error:  # a receipt or choice that does not fit: the others can go on
            self.refuse(experiment.name, experiment.name, error)
            return []

    def seeds_of(self, experiment: Experiment, seeds: list[int]) -> list[Job]:
        """The runs of an experiment, with what was chosen for it."""
        return linked(make_jobs(with_choices(self.root, experiment, {}, self.results), seeds, {}))

    def unfinished(self, jobs: list[Job], lacking: Collection[str] = ()) -> list[Job]:
        """Without those that are finished, and those that have failed in this queue; what they build on comes first.

        lacking: folders of finished runs that must run again.
        """
        found: list[Job] = []
        for job in jobs:
            folder = job.parameters["run_dir"]
            if folder in self.failed:
                continue
            try:
                if not is_finished(job, self.results):
                    found += self.after_others(job)
                elif folder in lacking:
                    found += self.after_others(self.repeated(job, "its scores are needed and not there"))
            except ItmError as error:
                self.refuse(folder, job.label, error)
        return found

    def after_others(self, job: Job) -> list[Job]:
        """A run that may start, or else what must run before it; nothing where that has failed."""
        for folder in built_on(job).values():
            if (other := self.maker_of(folder)) is None or is_finished(other, other.folder):
                continue
            if not is_finished(other, self.results):
                return self.next_runs(other.experiment, [other.seed])
            if folder in self.failed:
                return []
            return self.after_others(self.repeated(other, f"{job.label} builds on it, and its folder is not there"))
        return [job]

    def maker_of(self, folder: str) -> Job | None:
        """The run that a folder belongs to, if an experiment says so."""
        parts = PurePosixPath(folder).parts
        if len(parts) != 5 or not (seed := parts[4].removeprefix("s")).isdigit():
            return None
        known = read_experiments(self.root, parts[1]).get("/".join(parts[1:4]))
        if known is None:
            return None
        (job,) = self.seeds_of(known, [int(seed)])
        return job if job.parameters["run_dir"] == folder else None

    def repeated(self, job: Job, why: str) -> Job:
        """A finished run that must run again; said once."""
        if all(job.parameters["run_dir"] != one.parameters["run_dir"] for one in self.again):
            tqdm.write(f"{job.label}: run again: {why}")
        self.again.add(job)
        return job

    def refuse(self, key: str, label: str, error: ItmError) -> None:
        """Leave out what cannot be planned, and say why."""
        tqdm.write(f"{label}: left out: {error}", file=sys.stderr)
        self.failed[key] = label

    def ended(self, job: Job, fine: bool) -> None:
        """A run has ended: others may be open now, of the experiments that waited for it."""
        self.open, folder = None, job.parameters["run_dir"]
        waited = [key for key, jobs in self.known.items() if any(one.parameters["run_dir"] == folder for one in jobs)]
        for key in waited:
            del self.known[key]
        if not fine:
            self.failed[job.parameters["run_dir"]] = job.label
        elif job.experiment.ensemble or job.experiment.twins:
            self.average()

    def counts(self) -> Iterator[str]:
        """A line for each experiment of the queue: what it has, and what it waits for."""
        for experiment, seeds in self.wanted():
            search = next(missing_searches(self.root, experiment, {}, self.results), None)
            if search is not None:
                yield f"{experiment.name}: waits for the search of {search.experiment.name}"
                continue
            jobs = make_jobs(with_choices(self.root, experiment, {}, self.results), seeds, {})
            done = sum(is_finished(job, self.results) for job in jobs)
            yield f"{experiment.name}: {done} of {len(jobs)} seeds"

    def groups(self) -> Iterator[tuple[str, list[Job]]]:
        """The ensembles that have no receipt and whose members have all finished, with their names."""
        named: dict[Path, tuple[str, list[Job]]] = {}
        for experiment, seeds in self.wanted():
            if not (experiment.ensemble or experiment.twins) or experiment.name in self.failed:
                continue
            if next(missing_searches(self.root, experiment, {}, self.results), None):
                continue
            jobs = {job.seed: job for job in self.seeds_of(experiment, seeds)}
            mates = [(ensemble_variant(job), job, [job]) for job in jobs.values() if experiment.ensemble]
            if experiment.twins:
                pairs = twin_seeds(read_seeds(experiment.seeds)).items()
                mates += [(experiment.twins, jobs[a], [jobs[a], jobs[b]]) for a, b in pairs if {a, b} <= jobs.keys()]
            for name, first, members in mates:
                path = expected_receipt(first, self.results, variant=name)
                known = named.setdefault(path, (name, []))[1]
                there = {job.parameters["run_dir"] for job in known}
                known += [job for job in members if job.parameters["run_dir"] not in there]
        for path, (name, members) in named.items():
            made = path.exists() and not is_old_protocol(read_receipt(path))
            if not made and len(members) > 1 and all(is_finished(job, self.results) for job in members):
                yield name, members

    def without_scores(self) -> set[str]:
        """Folders of finished members of ensembles that are to be averaged and whose scores are not there."""
        every = (job for _, members in self.groups() for job in members)
        return {job.parameters["run_dir"] for job in every if not (job.folder / SCORES).is_file()}

    def average(self) -> None:
        """Make the ensembles whose members have all finished and whose scores are still there."""
        for name, members in list(self.groups()):
            if all((job.folder / SCORES).is_file() for job in members):
                try:
                    paths = [expected_receipt(job, self.results) for job in members]
                    ensemble_of([job.folder for job in members], name, self.results, paths)
                except ItmError as error:
                    self.refuse(name, name, error)

    def tidy(self) -> None:
        """Remove damaged receipts of runs, and collect those that an interruption left in their folders."""
        for job in self.jobs():
            remove_damaged(job)
            if job not in self.again and is_finished(job, job.folder):
                collect(job, self.results)
                self.open, self.known = None, {}

    def evidence(self) -> Iterator[Job]:
        """The runs that receipts will count for, whatever a search chooses."""
        for experiment, seeds in self.wanted():
            yield from make_jobs(experiment, seeds, {})


@interrupted_by_signals()
def run_queue(queue: TrialQueue, at_a_time: int) -> bool:
    """Work off a queue and name at its end what failed; returns whether nothing did."""
    queue.tidy()
    queue.average()
    work_off(queue.jobs, queue.results, Here(at_a_time), collected=queue.again, ended=queue.ended)
    if queue.failed:
        named = "\n  ".join(dict.fromkeys(queue.failed.values()))
        tqdm.write(f"failed, and tried again by the next start of the queue:\n  {named}", file=sys.stderr)
    return not queue.failed
