"""Which runs a command of ``itm run`` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from itm_lab.experiments.chain import linked
from itm_lab.experiments.choice import Selection
from itm_lab.experiments.experiment_files import (
    Experiment,
    baseline_name,
    experiments_of_table,
    find_experiment,
    read_overrides,
    read_seeds,
    read_value,
)
from itm_lab.experiments.runner import SEARCH_SEED, Job, grid_jobs, make_jobs, search_jobs
from itm_lab.records.parameters import ASIDE
from itm_utils.errors import ItmError, input_error


def plan(
    root: Path,
    names: list[str],
    table: str,
    seeds: str,
    pairs: list[str],
    search: list[str],
    grid: list[str] | None = None,
    results: Path | None = None,
) -> list[Job]:
    """The runs that a command asks for, each after those it builds on; every parameter of each is validated.

    results: where choices are recorded, for experiments that select settings.
    """
    if bool(names) == bool(table):
        raise ItmError("itm run: give experiments, or --table, and not both")
    seeded = seeds or any(pair.partition("=")[0] == "seed" for pair in pairs)
    if grid and (search or seeded):  # a setting of a grid has its own seed
        raise ItmError("itm run: give --grid without --search and --seeds")
    if search and seeded:
        raise ItmError(f"itm run: give --search without a seed: what is tried has seed {SEARCH_SEED}")
    jobs: list[Job] = []
    for experiment, overrides in asked_for(root, names, table, pairs):
        if search:
            jobs += search_jobs(experiment, read_choices(experiment, search), overrides)
        elif grid:
            jobs += grid_jobs(experiment, read_choices(experiment, grid, "--grid"), overrides)
        else:
            asked = seeds or ("" if "seed" in overrides else experiment.seeds)
            chosen = with_choices(root, experiment, overrides, results) if results else experiment
            jobs += make_jobs(chosen, read_seeds(asked) if asked else None, overrides)
    return linked(jobs)


def asked_for(root: Path, names: list[str], table: str, pairs: list[str]) -> list[tuple[Experiment, dict[str, Any]]]:
    """The experiments of a command, each with the parameters that the command changes."""
    experiments = experiments_of_table(root, table) if table else [find_experiment(root, name) for name in names]
    found = []
    for experiment in experiments:
        overrides = read_overrides(experiment, pairs)
        if "run_dir" in overrides and len(experiments) > 1:  # two experiments in one folder would resume each other
            overrides["run_dir"] = f"{overrides['run_dir']}/{experiment.name}"
        found.append((experiment, overrides))
    return found


def selection_of(
    root: Path, experiment: Experiment, overrides: dict[str, Any], results: Path | None = None
) -> Selection | None:
    """The search that comes before an experiment; None if it asks for none, or the command gives what is searched.

    results: where the choices are recorded that the search itself builds on.
    """
    if experiment.select is None or overrides.keys() & experiment.select.grid.keys():
        return None
    shared = shared_overrides(experiment, overrides)
    name = experiment.select.baseline
    baseline = find_experiment(root, baseline_name(experiment)) if name else None
    if results is not None:
        experiment = taking_choices(root, experiment, shared, results)
        baseline = with_choices(root, baseline, shared, results) if baseline else None
    return Selection(experiment, baseline, shared)


def shared_overrides(experiment: Experiment, overrides: dict[str, Any]) -> dict[str, Any]:
    """What a command changed, as far as it concerns every run of an experiment's search."""
    aside = ("seed", "evaluate_on")
    return {
        name: value for name, value in overrides.items() if name in experiment.model.model_fields and name not in aside
    }


def with_choices(root: Path, experiment: Experiment, overrides: dict[str, Any], results: Path) -> Experiment:
    """The experiment with every recorded choice that concerns it; as its file describes it where there is none yet."""
    selection = selection_of(root, experiment, overrides, results)
    if selection is not None:
        return selection.chosen(results)
    return taking_choices(root, experiment, overrides, results)


def taking_choices(root: Path, experiment: Experiment, overrides: dict[str, Any], results: Path) -> Experiment:
    """The experiment with the recorded choices of those whose settings it takes (``choice_of``)."""
    for other in chosen_elsewhere(root, experiment, overrides, results):
        experiment = other.lend(experiment, results)
    return experiment


def chosen_elsewhere(
    root: Path, experiment: Experiment, overrides: dict[str, Any], results: Path
) -> Iterator[Selection]:
    """The searches of the experiments whose settings this one takes, if the command does not give what they choose."""
    for name in experiment.chosen_elsewhere:
        other = find_experiment(root, name)
        if other.select is None:
            expected = "an experiment that selects settings"
            raise input_error(f"{experiment.name}, choice_of", name, expected)
        if selection := selection_of(root, other, shared_overrides(other, without_place(overrides)), results):
            yield selection


def without_place(overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides that concern another experiment's runs as well: each has a folder and a name of its own."""
    return {name: value for name, value in overrides.items() if name not in ("run_dir", "variant")}


def missing_searches(
    root: Path, experiment: Experiment, overrides: dict[str, Any], results: Path
) -> Iterator[Selection]:
    """Searches without a record that an experiment needs, in the order in which they can run."""
    needed = [find_experiment(root, name) for name in experiment.chosen_elsewhere]
    own = selection_of(root, experiment, overrides, results)
    if own is not None and own.baseline is not None:
        needed.append(find_experiment(root, baseline_name(experiment)))
    for other in needed:
        yield from missing_searches(root, other, shared_overrides(other, without_place(overrides)), results)
    if own is not None and own.recorded(results) is None:
        yield own


def plan_searches(root: Path, names: list[str], table: str, pairs: list[str], results: Path) -> list[Selection]:
    """The searches that can run now, of those whose choice a command's runs need and that is not recorded yet.

    What builds on another search waits for its record: call again when these are recorded.
    """
    found: dict[str, Selection] = {}
    for experiment, overrides in asked_for(root, names, table, pairs):
        first = next(missing_searches(root, experiment, overrides, results), None)
        if first is not None:
            found.setdefault(str(first.path(results)), first)
    return list(found.values())


def unsearched(root: Path, name: str, pairs: list[str], results: Path) -> str:
    """What to know before an experiment runs as its file describes it: its search has not been run. Empty if it needs none."""
    ((experiment, overrides),) = asked_for(root, [name], "", pairs)
    missing = list(missing_searches(root, experiment, overrides, results))
    searched = ", ".join(dict.fromkeys(setting for one in missing for setting in one.select.grid))
    if not searched:
        return ""
    return f"{name}: {searched} are placeholders: a search on dev chooses them, which `itm run {name}` runs first"


def plan_one(root: Path, name: str, pairs: list[str]) -> Job:
    """The one run that an experiment describes, with its own seed if no other is given."""
    ((experiment, overrides),) = asked_for(root, [name], "", pairs)
    chosen = with_choices(root, experiment, overrides, root / "receipts")
    return linked(make_jobs(chosen, None, overrides))[0]


def read_choices(experiment: Experiment, search: list[str], option: str = "--search") -> dict[str, list[Any]]:
    """``["width=32,64"]`` as name → values."""
    choices = {}
    for pair in search:
        name, equals, values = pair.partition("=")
        if not equals or not values:
            raise input_error(option, repr(pair), "name=a,b,c")
        found = [read_value(experiment, name, value) for value in values.split(",")]
        if name in ASIDE:  # runs are not named after it: all would have one name, in one folder
            raise input_error(option, f"the parameter {name}", "a setting of the model or of its training")
        if name in choices:
            raise input_error(option, f"{name} twice", f"{name} once, with all its values: {name}=a,b,c")
        choices[name] = found
    return choices
