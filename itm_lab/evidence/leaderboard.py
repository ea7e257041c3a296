"""Every matcher with every objective that fits it, from receipts: the grid of chapter 13."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.evidence.chance import chance_level
from itm_lab.evidence.planned import variant_of_experiment
from itm_lab.evidence.statistics import Interval, paired_seeds, seed_interval
from itm_lab.evidence.tables import of_one_protocol
from itm_lab.paths import Paths
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.receipts import is_old_protocol, variant_receipts
from itm_utils.data.precomp import PrecompSplit
from itm_utils.matcher import Images, Matcher, Scores
from itm_utils.metrics.retrieval import evaluate
from itm_utils.scoring import Captions, encode_images, evaluating, score_all
from itm_utils.training import TrainResult

FILE = "leaderboard.yaml"
RUN, OLD, NOT_RUN, NOT_PLANNED, NO_ATTENTION = "run", "old protocol", "not run", "not planned", "no attention"
HERE = "this page"  # trained where it is shown, without a receipt
NEEDS_ATTENTION = ("CCR", "CCS", "both")


@dataclass(frozen=True)
class Grid:
    """models: in the order of the file, name → what it says. objectives: name → what it is."""

    models: Mapping[str, Mapping[str, Any]]
    objectives: Mapping[str, str]

    def experiment(self, model: str, objective: str, key: str = "run") -> str:
        """``<chapter>/<variant>`` of a pair, or of what stands beside it; empty where there is none."""
        return self.models[model]["runs"].get(objective, {}).get(key, "")

    def steps(self) -> Iterator[tuple[str, str, str]]:
        """Parent, child and what the child adds, of every edge of the family tree."""
        for name, one in self.models.items():
            if "from" in one:
                yield one["from"], name, one["step"]


@dataclass(frozen=True)
class Row:
    """A pair of matcher and objective on one dataset. state: run, old protocol, not run, not planned, or no attention.

    rsum: mean over seeds with Student's interval. f1, chance: attention F1 and that of attending to every region.
    seconds: of training, mean over seeds. captions: seen in training.
    """

    model: str
    objective: str
    dataset: str
    state: str
    experiment: str = ""
    rsum: Interval | None = None
    seeds: int = 0
    f1: float | None = None
    chance: float | None = None
    seconds: float | None = None
    captions: int | None = None


def read_grid(root: Path | None = None) -> Grid:
    """The grid of the checkout; every model's parent is a model."""
    folder = (root or Paths.find().root) / "book" / "data"
    content = load_yaml((folder / FILE).read_bytes())
    return Grid(content["models"], content["objectives"])


def leaderboard(dataset: str, grid: Grid | None = None, root: Path | None = None) -> list[Row]:
    """A row for every pair, run or not, in the order of the grid."""
    root = root or Paths.find().root
    grid = grid or read_grid(root)
    return [row_of(root, grid, model, objective, dataset) for model in grid.models for objective in grid.objectives]


def row_of(root: Path, grid: Grid, model: str, objective: str, dataset: str) -> Row:
    """One pair, from its receipts."""
    if objective in NEEDS_ATTENTION and not grid.models[model]["attention"]:
        return Row(model, objective, dataset, NO_ATTENTION)
    experiment = grid.experiment(model, objective)
    if not experiment:
        return Row(model, objective, dataset, NOT_PLANNED)
    empty = Row(model, objective, dataset, NOT_RUN, experiment)
    receipts = receipts_of(root, experiment, dataset)
    return with_numbers(empty, receipts) if receipts else empty


def receipts_of(root: Path, experiment: str, dataset: str) -> list[dict[str, Any]]:
    """The receipts of an experiment, of today's protocol where there are any; none where it was not run."""
    chapter, _, key = experiment.partition("/")
    variant = variant_of_experiment(root, f"{chapter}/{dataset}/{key}")
    if variant is None:
        return []
    (notebook,) = (root / "notebooks").glob(f"[0-9]*_{chapter}.ipynb")
    return of_one_protocol(variant_receipts(notebook.stem, variant, dataset, root / "receipts"))


def with_numbers(row: Row, receipts: Sequence[Mapping[str, Any]]) -> Row:
    """A row with what its receipts say."""
    rsum = [receipt["metrics"]["rsum"]["value"] for receipt in receipts]
    f1 = [receipt["metrics"]["att_f1"]["value"] for receipt in receipts if "att_f1" in receipt["metrics"]]
    trained = [receipt["training"] for receipt in receipts if receipt.get("training")]
    return replace(
        row,
        state=OLD if is_old_protocol(receipts[0]) else RUN,
        rsum=seed_interval(rsum) if len(rsum) > 1 else Interval(rsum[0], rsum[0], rsum[0]),
        seeds=len(rsum),
        f1=float(np.mean(f1)) if f1 else None,
        chance=chance_level("att_f1", list(receipts)) if f1 else None,
        seconds=float(np.mean([receipt["run"]["seconds"] for receipt in receipts])),
        captions=max((one["captions_seen"] for one in trained), default=None),
    )


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows with numbers that may stand in one figure: of today's protocol, or all old ones where there are no others."""
    found = [row for row in rows if row.rsum is not None]
    return [row for row in found if row.state == RUN] or found


def gain(root: Path, experiment: str, other: str, dataset: str) -> Interval | None:
    """rsum of one experiment minus that of another over the seeds that both have; None where fewer than two are shared.

    Runs of two protocols are never compared.
    """
    values = []
    for name in (experiment, other):
        receipts = receipts_of(root, name, dataset)
        values.append({one["seed"]: (one["metrics"]["rsum"]["value"], is_old_protocol(one)) for one in receipts})
    shared = sorted(values[0].keys() & values[1].keys())
    if len(shared) < 2 or any(values[0][seed][1] != values[1][seed][1] for seed in shared):
        return None
    ours, theirs = ([of[seed][0] for seed in shared] for of in values)
    return paired_seeds(ours, theirs)


def gains_by_objective(dataset: str, grid: Grid, root: Path) -> dict[tuple[str, str], Interval]:
    """(model, objective) → what the objective buys, against the run beside it that differs in its objective alone."""
    found = {}
    for model in grid.models:
        for objective in grid.objectives:
            run, beside = (grid.experiment(model, objective, key) for key in ("run", "beside"))
            if run and beside and (bought := gain(root, run, beside, dataset)) is not None:
                found[model, objective] = bought
    return found


def gains_by_step(dataset: str, grid: Grid, root: Path, objective: str = "hardest") -> dict[tuple[str, str], Interval]:
    """(parent, child) → what a step of the family tree buys, both trained with one objective."""
    found = {}
    for parent, child, _ in grid.steps():
        both = grid.experiment(child, objective), grid.experiment(parent, objective)
        if all(both) and (bought := gain(root, *both, dataset)) is not None:
            found[parent, child] = bought
    return found


def built(
    root: Path, experiment: str, words: int, image_dim: int, dataset: str = "scenes"
) -> tuple[Matcher, dict[str, Any]]:
    """What ranks in an experiment, untrained, and its parameters: of DCPA's stage one alone, that stage."""
    from itm_lab.experiments.experiment_files import find_experiment

    chapter, _, key = experiment.partition("/")
    parameters = find_experiment(root, f"{chapter}/{dataset}/{key}").values()
    module = import_module(f"itm_utils.models.{chapter}")
    *_, last = module.stages(parameters, module.build(parameters, words, image_dim))
    return last.validated, parameters


def parameter_count(model: Matcher) -> int:
    """Numbers that training may change."""
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def scoring_seconds(model: Matcher, split: PrecompSplit, texts: Captions) -> float:
    """Processor seconds of one thread that a million pairs would take, from the images of a split and their captions.

    Encodings are not counted: they are made once per item.
    """
    with evaluating(model):
        images = Images.cat(encode_images(model, split))
        captions = model.encode_texts(texts.batch(np.arange(split.n_captions)))
    seconds = []
    for _ in range(2):  # the first one warms up
        begin = time.process_time()
        score_all(model, images, captions, progress=False)
        seconds.append(time.process_time() - begin)
    return 1e6 * min(seconds) / (len(images) * len(captions))


def joined(model: str, objective: str, scores: Scores, owner: np.ndarray, result: TrainResult) -> Row:
    """The row of a training that has no receipt: one run, on the page that shows it."""
    rsum = evaluate(scores, owner).rsum
    numbers = {"rsum": Interval(rsum, rsum, rsum), "seeds": 1, "seconds": result.seconds}
    steps = max((entry["step"] for entry in result.log), default=0)
    return Row(model, objective, "scenes", HERE, **numbers, captions=steps * result.captions_a_step)
