"""The queue of trials: ``experiments/queue.yaml`` lists them, the most informative first, and ``itm run --queue`` works it off.

Each entry names experiments or a table, and the seeds it wants (the experiment's own otherwise), so that a comparison may
get two seeds everywhere before anything gets its fifth. Searches that an entry needs run first, as part of the queue. What is
finished is not run again: the queue can be stopped at any time, lengthened, and started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from itm_lab.experiments.chain import linked
from itm_lab.experiments.ensembles import run_ensembles
from itm_lab.experiments.experiment_files import Experiment, experiments_of_table, find_experiment, read_seeds
from itm_lab.experiments.plan import missing_searches, with_choices
from itm_lab.experiments.processes import interrupted_by_signals
from itm_lab.experiments.runner import (
    Job,
    ensemble_variant,
    expected_receipt,
    is_finished,
    make_jobs,
    remove_damaged,
    work_off,
)
from itm_lab.records.nested_yaml import load_yaml
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
    """What a queue has open at any moment. results: where receipts and recorded choices lie."""

    def __init__(self, root: Path, entries: list[Entry], results: Path) -> None:
        self.root, self.entries, self.results = root, entries, results
        self.open: list[Job] | None = None
        self.failed: set[str] = set()

    def jobs(self) -> list[Job]:
        """Runs that may start now, in the order of the queue; found anew after every run that ends."""
        if self.open is None:
            found: dict[str, Job] = {}
            for experiment, seeds in self.wanted():
                for job in self.next_runs(experiment, seeds):
                    found.setdefault(job.parameters["run_dir"], job)
            self.open = list(found.values())
        return self.open

    def wanted(self) -> Iterator[tuple[Experiment, list[int]]]:
        """Every experiment with the seeds that an entry asks for."""
        for entry in self.entries:
            for experiment in entry.experiments:
                yield experiment, read_seeds(entry.seeds or experiment.seeds)

    def next_runs(self, experiment: Experiment, seeds: list[int]) -> list[Job]:
        """The unfinished runs of an experiment, or of the search that it needs first."""
        while (search := next(missing_searches(self.root, experiment, {}, self.results), None)) is not None:
            if open_runs := search.open_runs(
                self.results
            ):  # where all that are left have failed, nothing can be chosen
                return self.unfinished(open_runs)
            tqdm.write(search.record(self.results))
        return self.unfinished(linked(make_jobs(with_choices(self.root, experiment, {}, self.results), seeds, {})))

    def unfinished(self, jobs: list[Job]) -> list[Job]:
        """Without those that are finished, and those that have failed in this queue."""
        waiting = [job for job in jobs if job.parameters["run_dir"] not in self.failed]
        return [job for job in waiting if not is_finished(job, self.results)]

    def ended(self, job: Job, fine: bool) -> None:
        """A run has ended: others may be open now."""
        self.open = None
        if not fine:
            self.failed.add(job.parameters["run_dir"])
        elif job.experiment.ensemble:
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

    def average(self) -> None:
        """Make the ensembles whose members have all finished and whose scores are still there."""
        groups: dict[Path, list[Job]] = {}
        for experiment, seeds in self.wanted():
            if not experiment.ensemble or next(missing_searches(self.root, experiment, {}, self.results), None):
                continue
            for job in make_jobs(with_choices(self.root, experiment, {}, self.results), seeds, {}):
                path = expected_receipt(job, self.results, variant=ensemble_variant(job))
                groups.setdefault(path, []).append(job)
        for path, jobs in groups.items():
            there = all(is_finished(job, self.results) and (job.folder / SCORES).is_file() for job in jobs)
            if there and len(jobs) > 1 and not path.exists():
                run_ensembles(jobs, self.results)

    def evidence(self) -> Iterator[Job]:
        """The runs that receipts will count for, whatever a search chooses."""
        for experiment, seeds in self.wanted():
            yield from make_jobs(experiment, seeds, {})


@interrupted_by_signals()
def run_queue(queue: TrialQueue, at_a_time: int) -> list[Job]:
    """Work off a queue; returns the runs that failed."""
    for job in queue.jobs():
        remove_damaged(job)
    queue.average()
    return work_off(queue.jobs, queue.results, at_a_time, ended=queue.ended)
