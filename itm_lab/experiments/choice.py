"""The ``select`` of an experiment: settings that a search on dev chooses before the experiment itself runs.

Every combination of the grid runs on dev, and a baseline as often where one is named, all with seeds that no table uses.
Each setting is chosen by the mean of the runs that share it: the best single run is mostly a lucky one. Where a file
lists combinations that are no whole grid, one of them is chosen as a whole. One number alone whose values rise by a
factor, as a learning rate, is a ladder: the search goes on beyond its ends until the best value lies between two others.
The choice is recorded with the dev number of every run, below ``choices/`` of the chapter's receipts; where its record
is, nothing is searched again. Other experiments take the same settings with ``choice_of``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from itm_lab.experiments.chain import linked
from itm_lab.experiments.experiment_files import Experiment, Select
from itm_lab.experiments.runner import (
    SEARCH_SEED,
    Job,
    expected_receipt,
    grid_jobs,
    is_finished,
    make_jobs,
    setting_jobs,
)
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import read_named_receipt
from itm_utils.errors import input_error
from itm_utils.files import write_json

JUDGED_BY = "rsum"
STEPS_BEYOND = 4  # further values of a ladder: after these the best one may lie at an end


def chosen_setting(runs: Iterable[tuple[Mapping[str, Any], float]], whole: bool = False) -> dict[str, Any]:
    """The value of each setting with the highest mean over the runs that share it. runs: settings and result of each.

    whole: the combination with the highest mean instead; the first of equal ones.
    """
    runs = list(runs)
    if whole:
        tried = [dict(given) for given, _ in runs]
        return max(tried, key=lambda one: float(np.mean([number for given, number in runs if dict(given) == one])))
    means = setting_means(runs)
    return {name: max(values, key=lambda pair: pair[1])[0] for name, values in means.items()}


def setting_means(runs: list[tuple[Mapping[str, Any], float]]) -> dict[str, list[tuple[Any, float]]]:
    """Setting → (value, mean over the runs that share it) in the order of the runs."""
    found: dict[str, list[tuple[Any, float]]] = {}
    for name in runs[0][0]:
        values = list(dict.fromkeys(given[name] for given, _ in runs))
        found[name] = [(v, float(np.mean([number for given, number in runs if given[name] == v]))) for v in values]
    return found


class Selection(NamedTuple):
    """The search that an experiment asks for. overrides: what the command changed, for every run.

    baseline: what runs as often without choosing anything, where the search names something.
    """

    experiment: Experiment
    baseline: Experiment | None
    overrides: dict[str, Any]

    def __str__(self) -> str:
        searched, runs = ", ".join(self.select.grid), len(self.tried())
        beside = f", beside {runs} of {self.baseline.name}" if self.baseline else ""
        further = " (and more, until the best value has neighbours on both sides)" if self.select.ladder else ""
        return f"{self.experiment.name}: {runs} runs on dev choose {searched}{further}{beside}"

    @property
    def select(self) -> Select:
        assert self.experiment.select is not None
        return self.experiment.select

    @property
    def given(self) -> dict[str, Any]:
        """What every run of the search has besides its setting."""
        return self.overrides | self.select.shorter

    def tried(self, added: tuple[Any, ...] = ()) -> list[Job]:
        """Every combination of the grid, none of them a member of an ensemble; ``added`` are further values of a ladder.

        The values of one number are compared on the same seeds, combinations of several settings on seeds of their own.
        """
        single = replace(self.experiment, ensemble="")
        if ladder := self.select.ladder:
            settings = [{ladder: value} for value in (*self.select.grid[ladder], *added)]
            return setting_jobs(single, settings, self.given, self.select.seeds, same_seeds=True)
        if not self.select.settings:
            return grid_jobs(single, self.select.grid, self.given, self.select.seeds)
        return setting_jobs(single, self.select.settings, self.given, self.select.seeds)

    @property
    def baselines(self) -> list[Job]:
        """As many runs of the baseline: it has nothing to choose, so its best one shows what choosing alone gives."""
        if self.baseline is None:
            return []
        seeds = list(range(SEARCH_SEED, SEARCH_SEED + len(self.tried())))
        given = self.given | {"evaluate_on": "dev"}
        if "run_dir" in given:  # named after the baseline, whose runs other searches share
            given["run_dir"] = given["run_dir"].replace(self.experiment.name, self.baseline.name)
        return make_jobs(replace(self.baseline, ensemble=""), seeds, given)

    def next_value(self, runs: Sequence[tuple[Mapping[str, Any], float]]) -> float | None:
        """A further value of a ladder: one step beyond the best, if that lies at an end and there are steps left.

        So the chosen learning rate has a worse one on either side. runs: setting and result of each.
        """
        if not (ladder := self.select.ladder):
            return None
        first = self.select.grid[ladder]
        values = sorted({given[ladder] for given, _ in runs})
        best, factor = chosen_setting(runs)[ladder], first[1] / first[0]
        if len(values) - len(first) >= STEPS_BEYOND or values[0] < best < values[-1]:
            return None
        # Rounded, so that the same value comes from either end and is written the same way everywhere.
        return float(f"{best * factor if best == values[-1] else best / factor:.6g}")

    def runs(self, results: Path) -> list[Job]:
        """Every run of the search, a ladder followed as far as the finished ones tell."""
        added: tuple[Any, ...] = ()
        while True:
            jobs = self.tried(added)
            if not all(self.finished(job, results) for job in jobs):
                return jobs
            value = self.next_value([self.judged(job, results) for job in jobs])
            if value is None:
                return jobs
            added = (*added, value)

    def open_runs(self, results: Path) -> list[Job]:
        """What the search still has to run; empty at its end."""
        return [job for job in (*self.baselines, *self.runs(results)) if not self.finished(job, results)]

    def finished(self, job: Job, results: Path) -> bool:
        """Whether a run of the search has its receipt; without its data none can tell, and a plan goes on."""
        name = job.parameters["dataset"]
        return (name == "scenes" or (job.root / name).is_dir()) and is_finished(job, results)

    def judged(self, job: Job, results: Path) -> tuple[dict[str, Any], float]:
        """Setting and dev result of a finished run."""
        run = self.result(job, results)
        return run["setting"], run[JUDGED_BY]

    def path(self, results: Path) -> Path:
        """Where the choice is recorded: one file per experiment, and per settings that a command changed."""
        own = self.experiment.values(self.overrides)["variant"].removeprefix(self.experiment.values()["variant"])
        name = self.experiment.name.replace("/", "_") + own.replace("/", "-").replace(" ", "-")
        return results / self.experiment.chapter / "choices" / f"{name}.json"

    def about(self) -> dict[str, Any]:
        """What a recorded choice must share with this search."""
        values = self.experiment.values(self.overrides)
        given = {name: value for name, value in settings_of(values).items() if name not in self.select.grid}
        tried = {"settings": list(self.select.settings)} if self.select.settings else {"grid": self.select.grid}
        select = tried | {"on": "dev", "seeds": self.select.seeds}
        select |= {"baseline": self.baseline.name} if self.baseline else {}
        select |= {"shorter": self.select.shorter} if self.select.shorter else {}
        folder = Path(values["dataset"]).name
        return {"experiment": self.experiment.name, "data": folder, "select": select, "parameters": given}

    def recorded(self, results: Path) -> dict[str, Any] | None:
        """The settings that were chosen; None if there is no record. One of another search is an error."""
        if not (path := self.path(results)).is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            known = {name: record[name] for name in self.about()}
            runs = [(run["setting"], run[JUDGED_BY]) for run in record["runs"]]
            consistent = chosen_setting(runs, bool(self.select.settings)) == record["chosen"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise input_error(path, f"no record of a choice ({error!r})", "what `itm run` wrote") from None
        if not consistent:
            raise input_error(path, "another choice than its runs give", "a record as `itm run` wrote it")
        if differing := [name for name, value in self.about().items() if known[name] != value]:
            hint = "Move it away, and the search runs again."
            raise input_error(path, f"a choice with other {differing[0]}", "one of this very search", hint)
        return record["chosen"]

    def record(self, results: Path) -> str:
        """Choose from the receipts of a finished search and write the record; returns a line that says what was chosen."""
        tried, plain = ([self.result(job, results) for job in jobs] for jobs in (self.runs(results), self.baselines))
        runs = [(run["setting"], run[JUDGED_BY]) for run in tried]
        chosen = chosen_setting(runs, bool(self.select.settings))
        means = {name: [list(pair) for pair in sorted(pairs)] for name, pairs in setting_means(runs).items()}
        dataset = self.tried()[0].facts.identity
        numbers = {"dataset": dataset, "chosen": chosen, "means": means, "runs": tried, "baseline_runs": plain}
        path = self.path(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.about() | numbers)
        takes = ", ".join(f"{name}={value}" for name, value in chosen.items())
        said = f"dev rsum: best of {len(tried)} runs {max(run[JUDGED_BY] for run in tried):.1f}"
        if self.baseline:
            most = max(run[JUDGED_BY] for run in plain)
            said += f", best of as many runs of {self.baseline.name} {most:.1f}"
        return f"{self.experiment.name} takes {takes} ({said}); {path}"

    def result(self, job: Job, results: Path) -> dict[str, Any]:
        """What the record says of one run; the seal names its receipt."""
        receipt = read_named_receipt(expected_receipt(job, results), results)
        setting = {name: job.parameters[name] for name in self.select.grid}
        return {
            "seed": job.seed,
            "setting": setting,
            JUDGED_BY: receipt["metrics"][JUDGED_BY]["value"],
            "seal": receipt["seal"],
        }

    def chosen(self, results: Path) -> Experiment:
        """The experiment with the recorded choice; as its file describes it where there is none yet."""
        return self.lend(self.experiment, results)

    def lend(self, experiment: Experiment, results: Path) -> Experiment:
        """An experiment with what this search chose, as far as its notebook has such settings, and with its records."""
        if not (found := self.recorded(results)):
            return experiment
        known = {name: value for name, value in found.items() if name in experiment.model.model_fields}
        records = dict.fromkeys((*experiment.records, *self.experiment.records, str(self.path(results))))
        return replace(experiment, settings=experiment.settings | known, records=tuple(records))


def search_runs(selections: Iterable[Selection], results: Path) -> list[Job]:
    """What some searches still have to run, each run once: searches beside the same baseline share its runs."""
    found: dict[str, Job] = {}
    for selection in selections:
        for job in selection.open_runs(results):
            found.setdefault(job.parameters["run_dir"], job)
    return linked(found.values())
