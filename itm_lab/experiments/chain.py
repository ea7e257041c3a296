"""Runs that build on one another: in which order they start, and where one finds what another made.

Two kinds of parameter name a folder besides the run's own. ``BUILT_ON`` is the folder of another run, which must be
finished before. ``SHARED`` is the folder of a stage that several runs have in common: whoever comes first trains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from itm_lab.experiments.runner import Job
from itm_lab.records.parameters import ASIDE
from itm_utils.errors import input_error
from itm_utils.training import Stage

BUILT_ON = ("online_run", "baseline")
SHARED = ("stage_one", "round_one")
SEED_FOLDER = "s{seed}"
# What a shared stage reads besides its model, its objective and its training.
READ_BY_STAGE = ("train_fraction", "text_encoder", "text_layers", "max_tokens", "text_backbone", "captions_mined")


def built_on(job: Job) -> dict[str, str]:
    """Parameter → folder of each run that must be finished before this one. A search on dev needs no baseline."""
    named = {name: job.parameters.get(name, "") for name in BUILT_ON}
    if job.parameters["evaluate_on"] == "dev":
        named["baseline"] = ""
    return {name: folder.format(seed=job.seed) for name, folder in named.items() if folder}


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """The same runs, each after those of them that it builds on; otherwise in the order that was given."""
    jobs = list(jobs)
    by_folder = {job.parameters["run_dir"]: job for job in jobs}
    found: list[Job] = []

    def add(job: Job, above: tuple[Job, ...] = ()) -> None:
        if job in above:
            raise input_error(
                job.label, "a run that builds on itself", "folders of other runs", "See online_run, baseline."
            )
        for folder in built_on(job).values():
            if (before := by_folder.get(folder)) is not None and before not in found:
                add(before, (*above, job))
        if job not in found:
            found.append(job)

    for job in jobs:
        add(job)
    return found


def linked(jobs: Iterable[Job]) -> list[Job]:
    """Runs whose other folders follow what a command changed, in the order in which they can run.

    With ``-p epochs=1`` a run goes to a folder of its own. What builds on it must read that one, and a shared stage that
    is trained in another way must not go to the folder where the published one belongs.
    """
    jobs = list(jobs)
    planned = {(job.experiment.settings["run_dir"], job.seed): job.parameters["run_dir"] for job in jobs}
    found = []
    for job in jobs:
        as_filed = [name for name in (*BUILT_ON, *SHARED) if is_as_filed(job, name)]
        moved = {name: moved_run(job, name, planned) for name in BUILT_ON if name in as_filed}
        moved |= {name: moved_stage(job, name) for name in SHARED if name in as_filed}
        moved = {name: folder for name, folder in moved.items() if folder}
        found.append(replace(job, parameters=job.parameters | moved) if moved else job)
    return in_order(found)


def is_as_filed(job: Job, name: str) -> bool:
    """Whether a folder is the one that the experiment's file gives: one that a command gives is left alone."""
    return bool(job.parameters.get(name)) and job.parameters[name] == job.experiment.values()[name]


def moved_run(job: Job, name: str, planned: Mapping[tuple[str, int], str]) -> str:
    """Where the run that a parameter names goes in this plan, with ``{seed}``; empty where it is not part of the plan."""
    folder = PurePosixPath(job.parameters[name])
    if folder.name != SEED_FOLDER or (str(folder.parent), job.seed) not in planned:
        return ""
    return planned[str(folder.parent), job.seed].removesuffix(f"s{job.seed}") + SEED_FOLDER


def moved_stage(job: Job, name: str) -> str:
    """The folder of a shared stage, named after those changed settings that its training depends on; empty without any.

    A run that keeps the published name (``-p variant=…``) is taken for what that name says, here as for its own folder.
    """
    usual = job.experiment.values()
    changed = [one for one in usual if one not in (*ASIDE, *BUILT_ON, *SHARED) and job.parameters[one] != usual[one]]
    if not changed or job.parameters["variant"] == usual["variant"]:
        return ""
    now = shared_training(job)
    without = {one: shared_training(replace(job, parameters=job.parameters | {one: usual[one]})) for one in changed}
    added = "-".join(f"{one}={job.parameters[one]}" for one in changed if without[one] != now)
    parts = [f"{added}-{part}" if part == SEED_FOLDER else part for part in PurePosixPath(job.parameters[name]).parts]
    return str(PurePosixPath(*parts)) if added else ""


def shared_training(job: Job) -> Any:
    """All that the training of a shared stage depends on, as something that can be compared."""
    trained = [stage for stage in job.stages(vocabulary_size=1, image_dim=1) if is_shared(stage)]
    given = {name: job.parameters.get(name) for name in READ_BY_STAGE}
    return given, [(comparable(one.model.config), comparable(one.objective), comparable(one.config)) for one in trained]


def is_shared(stage: Stage) -> bool:
    """Whether runs may share this stage: DCPA's first, and AOQ's miner."""
    return stage.mines or stage.name == "intra"


def shared_folder(job: Job, stage: Stage) -> str:
    """The folder of a stage that runs share, from the repository on; empty where a run has it for itself."""
    if not is_shared(stage) or not (folder := job.parameters.get("round_one" if stage.mines else "stage_one")):
        return ""
    return str(job.root / folder.format(seed=job.seed))


def comparable(thing: Any) -> Any:
    """An objective or configuration as plain values: two of the same settings are equal."""
    if thing is None or isinstance(thing, str | int | float):
        return thing
    if isinstance(thing, Mapping):
        return {str(name): comparable(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [comparable(value) for value in thing]
    kind = getattr(thing, "__qualname__", type(thing).__qualname__)
    return kind, comparable(getattr(thing, "__dict__", {}))
