"""Whether a comparison is a fair one: computed from what its receipts say of data, budget, search and training.

The numbers stand in the ``protocol`` section of ``book/data/rules.yaml`` and nowhere else. A check that fails makes a
comparison *not comparable*, whatever its interval; one that cannot be made is reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from itm_lab.experiments.experiment_files import values_of
from itm_lab.records.rules import DECLARED, Comparison

Receipt = Mapping[str, Any]
Runs = Mapping[str, Mapping[int, Receipt]]  # variant → seed → receipt
DOUBLED = "{} doubled"  # the control of a variant: the same settings, twice the captions


@dataclass(frozen=True)
class Checks:
    """failed: why a comparison says nothing. missing: checks that could not be made."""

    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class ModelControl(NamedTuple):
    """The variant of a model that has a control, its runs, and its control with twice the captions."""

    variant: str
    runs: Mapping[int, Receipt]
    control: Receipt


def check_protocol(
    comparison: Comparison,
    runs: Runs,
    doubled: Mapping[str, Receipt],
    protocol: Receipt,
    baselines: Mapping[str, str] | None = None,
    models: Mapping[str, ModelControl] | None = None,
) -> Checks:
    """Every check of a comparison. runs: the receipts it rests on. doubled: variant → its control with twice the captions.

    baselines: record of a search → the variant that got as many runs of its own, having nothing to choose. models:
    variant → the control of its model, for variants that have none of their own.
    """
    models = models or {}
    declared = {key: comparison.declared.get(key, values[0]) for key, values in DECLARED.items()}
    if declared["checks"] == "none":
        return Checks()
    failed = [*same_test(runs)]
    missing: list[str] = []
    trained = {variant: of for variant, of in runs.items() if all(run.get("training") for run in of.values())}
    if untold := [variant for variant in runs if variant not in trained]:
        missing.append(f"the training of {_and(untold)} is not recorded")
    if declared["data"] == "equal":
        failed += same_training(trained)
    if declared["budget"] != "unequal":
        failed += same_budget(trained, declared["budget"] == "last stage")
    failed += searched(trained, protocol, declared["search"] == "equal", baselines or {})
    for variant, of in trained.items():
        failed += validated(variant, of)
        failed += converged(variant, of, protocol)
        if variant in doubled:
            failed += settled(variant, of, doubled[variant], protocol)
        elif variant in models:
            failed += settled(*models[variant], protocol)
    if alone := [variant for variant in trained if variant not in {*doubled, *models}]:
        missing.append(f"no run with twice the captions of {_and(alone)}")
    return Checks(tuple(dict.fromkeys(failed)), tuple(missing))


def model_of(variant: str, controls: Mapping[str, Sequence[str]]) -> str | None:
    """The variant whose control speaks for this one: that of the longest beginning of its name; None if there is none.

    controls: variant that has a control → the beginnings of the names of the variants of its model.
    """
    fitting = [
        (len(beginning), model)
        for model, beginnings in controls.items()
        for beginning in beginnings
        if f"{variant} ".startswith(f"{beginning} ")
    ]
    return max(fitting)[1] if fitting else None


# ---------------------------------------------------------------------------------------------- data and budget


def same_test(runs: Runs) -> Iterator[str]:
    """All runs were scored on the same files."""
    if len({run["dataset"]["fingerprint"] for of in runs.values() for run in of.values()}) > 1:
        yield "scored on different test data"


def same_training(runs: Runs) -> Iterator[str]:
    """All runs were trained on the same files."""
    if len({(run.get("inputs") or {}).get("train") for of in runs.values() for run in of.values()}) > 1:
        yield "trained on different data"


def same_budget(runs: Runs, last_stage: bool = False) -> Iterator[str]:
    """All variants saw as many captions, up to a batch per epoch; in all, or in their last stage alone."""
    seen = {variant: fmean(_captions(run, last_stage) for run in of.values()) for variant, of in runs.items()}
    if not seen:
        return
    slack = max(_slack(run, last_stage) for of in runs.values() for run in of.values())
    fewest, most = min(seen, key=lambda name: seen[name]), max(seen, key=lambda name: seen[name])
    if seen[most] - seen[fewest] > slack:
        where = " in their last stage" if last_stage else ""
        yield f"{most} saw {seen[most]:,.0f} captions{where}, {fewest} {seen[fewest]:,.0f}"


def _captions(run: Receipt, last_stage: bool) -> float:
    training = run["training"]
    return training["stages"][-1]["captions_seen"] if last_stage else training["captions_seen"]


def _slack(run: Receipt, last_stage: bool) -> float:
    """One batch for each epoch: a last batch that is not full is left out by some variants and not by others."""
    stages = run["training"]["stages"]
    return sum(stage["epochs"] * stage["batch_size"] for stage in (stages[-1:] if last_stage else stages))


# ---------------------------------------------------------------------------------------------- search


def searched(runs: Runs, protocol: Receipt, equally: bool, baselines: Mapping[str, str]) -> Iterator[str]:
    """Settings were searched on dev, with enough seeds, as often for every variant, and not found at an edge.

    Baselines with as many runs beside the search of another count as searched with that effort; several searches share
    the runs of one baseline.
    """
    one_each = {variant: next(iter(of.values())) for variant, of in runs.items()}
    effort = {variant: search_effort(run["search"]) for variant, run in one_each.items()}
    beside: dict[str, int] = {}
    for search in {one["record"]: one for run in one_each.values() for one in run["search"]}.values():
        if (baseline := baselines.get(search["record"])) in effort:
            beside[baseline] = max(beside.get(baseline, 0), planned_runs(search))
    effort = {variant: number + beside.get(variant, 0) for variant, number in effort.items()}
    for variant, run in one_each.items():
        for search in run["search"]:
            if search["seeds"] < protocol["search_seeds"]:
                yield f"{variant} was searched with {search['seeds']} of {protocol['search_seeds']} seeds"
            for name in at_edge(search, run["parameters"], protocol):
                yield f"{variant} has its {name} from the edge of the grid"
    if effort and not any(effort.values()):
        yield "no setting was searched on dev"
    elif equally and len(set(effort.values())) > 1:
        yield f"searched unequally: {', '.join(f'{variant} with {number} runs' for variant, number in effort.items())}"


def search_effort(searches: Sequence[Receipt]) -> int:
    """Planned runs of all searches; of several learning rates, one of each stage, those of the one searched most.

    A training of two stages has two learning rates to choose: each gets the runs that the one of another training gets.
    """
    rates: dict[str, int] = {}
    others = 0
    for search in searches:
        if len(names := settings_of_grid(search["grid"])) == 1 and names[0].endswith("learning_rate"):
            rates[names[0]] = rates.get(names[0], 0) + planned_runs(search)
        else:
            others += planned_runs(search)
    return others + max(rates.values(), default=0)


def planned_runs(search: Receipt) -> int:
    """Runs of the grid as its file has it: a ladder that went on beyond its ends was not searched for longer by choice."""
    return search.get("planned", search["runs"])


def settings_of_grid(grid: Any) -> list[str]:
    """The settings that a search tried."""
    return list(grid if isinstance(grid, Mapping) else grid[0])


def at_edge(search: Receipt, chosen: Mapping[str, Any], protocol: Receipt) -> Iterator[str]:
    """Searched settings whose chosen value is the first or last of its grid: the best may lie beyond.

    Two values have no inside, and some grids are the papers' own; these are not asked.
    """
    grid = search["grid"]
    for name, values in (grid if isinstance(grid, Mapping) else values_of(tuple(grid))).items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        inside = len(numbers) > 2 and len(numbers) == len(values) and name not in protocol["grids_of_papers"]
        if inside and chosen.get(name) in (min(numbers), max(numbers)):
            yield name


# ---------------------------------------------------------------------------------------------- convergence


def validated(variant: str, runs: Mapping[int, Receipt]) -> Iterator[str]:
    """Every stage was validated at least once per epoch."""
    for seed, run in runs.items():
        for stage in run["training"]["stages"]:
            if len(stage["dev"]) < stage["epochs"]:
                told = f"{len(stage['dev'])} times in {stage['epochs']:g} epochs"
                yield f"{variant}, seed {seed}, was validated {told} of {stage['name']}"
                return


def converged(variant: str, runs: Mapping[int, Receipt], protocol: Receipt) -> Iterator[str]:
    """Over the last part of each stage the dev rsum no longer rises, on average over the seeds."""
    names = [stage["name"] for stage in next(iter(runs.values()))["training"]["stages"]]
    for number, name in enumerate(names):
        stages = [run["training"]["stages"][number] for run in runs.values() if len(run["training"]["stages"]) > number]
        gains = [late_gain(stage, protocol) for stage in stages]
        if None in gains:
            yield f"{variant} was validated too seldom to see whether {name} converged"
        elif (gain := fmean(gain for gain in gains if gain is not None)) >= protocol["converged_within"]:
            yield f"{variant} had not converged: dev rsum rose {gain:.1f} over the last quarter of {name}"


def late_gain(stage: Receipt, protocol: Receipt) -> float | None:
    """How far the running best of the smoothed dev rsum rose over the last part; None where it was seen too seldom.

    Each point of the curve is averaged with those before it: one lucky validation is no progress.
    """
    points: Sequence[Sequence[float]] = stage["dev"]
    over = protocol["smoothed_over"]
    smooth = [
        (points[k][0], fmean(rsum for _, rsum in points[k - over + 1 : k + 1])) for k in range(over - 1, len(points))
    ]
    if not smooth:
        return None
    begins = points[-1][0] - protocol["converged_over"] * stage["captions_seen"]
    early = [rsum for seen, rsum in smooth if seen <= begins]
    return max(rsum for _, rsum in smooth) - max(early) if early else None


def settled(variant: str, runs: Mapping[int, Receipt], control: Receipt, protocol: Receipt) -> Iterator[str]:
    """Twice the captions move the test rsum by little. A decayed learning rate alone looks flat on dev."""
    ours, twice = _captions(next(iter(runs.values())), False), _captions(control, False)
    if twice < 1.9 * ours:
        yield f"the control of {variant} saw {twice / ours:.1f} times the captions, not twice"
    own = runs.get(control["seed"])
    known = _rsum(own) if own else fmean(map(_rsum, runs.values()))
    if abs(moved := _rsum(control) - known) >= protocol["doubled_within"]:
        yield f"{variant} had not converged: twice the captions moved its test rsum by {moved:+.1f}"


def _rsum(run: Receipt) -> float:
    return run["metrics"]["rsum"]["value"]


# ---------------------------------------------------------------------------------------------- collapse


def collapsed(runs: Runs, protocol: Receipt) -> Iterator[str]:
    """Names of runs that rank hardly better than chance; a recall at K of N images is K / N by chance."""
    for variant, of in runs.items():
        for seed, run in of.items():
            chance = 100 * 2 * (1 + 5 + 10) / candidates(run["protocol"])
            if "rsum" in run["metrics"] and _rsum(run) < protocol["collapsed_below"] * chance:
                yield f"{variant}, seed {seed}"


def candidates(protocol: str) -> int:
    """Images that a caption is compared with: 500 of ``all 500``, 1,000 of a fold of COCO."""
    words = protocol.removeprefix("all ")
    return int(words) if words.isdigit() else {"1K": 1000, "5K": 5000}[words]


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
