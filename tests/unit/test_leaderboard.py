"""The grid of chapter 13: every pair has a row, whatever receipts there are; a loss joins in ten lines."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebook_cells import cells_of

from itm_lab.evidence import leaderboard as board
from itm_lab.evidence.leaderboard import (
    HERE,
    NO_ATTENTION,
    NOT_PLANNED,
    NOT_RUN,
    OLD,
    RUN,
    Row,
    built,
    comparable,
    gain,
    gains_by_objective,
    gains_by_step,
    joined,
    leaderboard,
    parameter_count,
    read_grid,
    scoring_seconds,
)
from itm_lab.evidence.planned import variant_of_experiment
from itm_lab.evidence.statistics import Interval
from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.paths import Paths
from itm_utils.data.batches import PairDataset
from itm_utils.matcher import Matcher, Scores
from itm_utils.models.keeping_score import MeanPool
from itm_utils.training import TrainResult

ROOT = Paths.find(Path(__file__)).root
GRID = read_grid(ROOT)
EXPERIMENTS = {run[key] for model in GRID.models.values() for run in model["runs"].values() for key in run}


def receipt(seed: int, rsum: float, old: bool = False, **metrics: float) -> dict[str, Any]:
    trained = {} if old else {"training": {"captions_seen": 900 + seed}}
    values = {"rsum": rsum} | metrics
    found = {name: {"value": value} for name, value in values.items()}
    return {
        "schema": 3 if old else 4,
        "seed": seed,
        "metrics": found,
        "run": {"seconds": 60.0},
        "dataset": {},
    } | trained


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Receipts by experiment, in place of those of the checkout."""
    found: dict[str, list[dict[str, Any]]] = {}
    monkeypatch.setattr(board, "receipts_of", lambda root, experiment, dataset: found.get(experiment, []))
    return found


@pytest.mark.parametrize("experiment", sorted(EXPERIMENTS))
def test_every_experiment_of_the_grid_exists(experiment: str) -> None:
    chapter, _, key = experiment.partition("/")
    assert variant_of_experiment(ROOT, f"{chapter}/scenes/{key}")
    assert find_experiment(ROOT, f"{chapter}/scenes/{key}").values()["epochs"] > 0


def test_what_stands_beside_a_run_differs_in_its_objective_alone() -> None:
    """Of CCR and CCS: one experiment file, the same base model and the same passes."""
    for model in GRID.models.values():
        for objective in ("CCR", "CCS", "both"):
            if one := model["runs"].get(objective):
                run, beside = (
                    find_experiment(ROOT, one[key].replace("/", "/scenes/")).values() for key in ("run", "beside")
                )
                differing = {name for name in run if run[name] != beside[name]}
                assert differing <= {
                    "variant",
                    "ccr_weight",
                    "ccs_weight",
                    "ccr_margin",
                    "ccs_margin",
                    "stage_one",
                    "run_dir",
                    "baseline",  # a folder to measure against, after training
                }


def test_the_family_tree_is_one_tree() -> None:
    roots = [name for name, one in GRID.models.items() if "from" not in one]
    assert len(roots) == 1 and all(parent in GRID.models for parent, _, _ in GRID.steps())
    for name in GRID.models:
        seen = []
        while name not in roots:
            assert name not in seen
            seen.append(name)
            name = GRID.models[name]["from"]


@pytest.mark.parametrize("dataset", ["scenes", "flickr8k"])
def test_the_board_is_right_with_whatever_receipts_are_there(dataset: str) -> None:
    rows = leaderboard(dataset, GRID, ROOT)
    assert len(rows) == len(GRID.models) * len(GRID.objectives)
    for row in rows:
        assert row.state in (RUN, OLD, NOT_RUN, NOT_PLANNED, NO_ATTENTION)
        assert (row.rsum is not None) == (row.state in (RUN, OLD)) == (row.seeds > 0)
        assert (row.f1 is None) == (row.chance is None)
        if row.rsum is not None:
            assert 0 <= row.rsum.low <= row.rsum.value <= row.rsum.high <= 600
    assert len({row.state for row in comparable(rows)}) <= 1
    gains = gains_by_objective(dataset, GRID, ROOT) | gains_by_step(dataset, GRID, ROOT)
    assert all(one.low <= one.value <= one.high for one in gains.values())


def test_models_without_attention_have_no_place_under_constraints() -> None:
    states = {(row.model, row.objective): row.state for row in leaderboard("scenes", GRID, ROOT)}
    assert states["VSE++", "CCR"] == states["VSRN", "both"] == NO_ATTENTION
    assert states["PFAN", "CCR"] == states["SGRAF", "AOQ"] == NOT_PLANNED


def test_a_row_says_what_its_receipts_say(known: dict) -> None:
    known["scan/t2i_avg"] = [
        receipt(seed, rsum, att_f1=50.0 + seed, att_f1_chance=16.0) for seed, rsum in ((0, 300.0), (1, 310.0))
    ]
    known["bfan/equal"] = [receipt(0, 320.0, old=True)]
    rows = {row.model: row for row in leaderboard("scenes", GRID, ROOT) if row.objective == "hardest"}
    scan, bfan, pfan = rows["SCAN"], rows["BFAN"], rows["PFAN"]
    assert scan.state == RUN and scan.rsum and scan.rsum.value == 305 and scan.rsum.low < 300
    assert (scan.f1, scan.chance, scan.seeds, scan.captions) == (50.5, 16.0, 2, 901)
    assert bfan.state == OLD and bfan.rsum == Interval(320.0, 320.0, 320.0) and bfan.captions is None
    assert pfan.state == NOT_RUN and pfan.rsum is None
    assert comparable(list(rows.values())) == [scan]
    assert comparable([bfan, pfan]) == [bfan]  # where there is nothing newer


def test_two_protocols_are_never_compared(known: dict) -> None:
    known["a/b"] = [receipt(seed, 310.0 + seed) for seed in range(3)]
    known["a/c"] = [receipt(seed, 300.0 + seed) for seed in range(5)]
    found = gain(ROOT, "a/b", "a/c", "scenes")
    assert found == Interval(10.0, 10.0, 10.0)
    known["a/c"] = [receipt(seed, 300.0, old=True) for seed in range(5)]
    assert gain(ROOT, "a/b", "a/c", "scenes") is None
    known["a/c"] = [receipt(2, 300.0)]
    assert gain(ROOT, "a/b", "a/c", "scenes") is None  # one shared seed has no spread
    assert gain(ROOT, "a/b", "a/none", "scenes") is None


@pytest.mark.parametrize(
    "model", [name for name in GRID.models if name not in ("SAEM", "MMCA", "DCPA", "DCPA stage one")]
)
def test_cost_of_a_model(model: str, toy_pairs: PairDataset) -> None:
    split = toy_pairs.split
    made, parameters = built(ROOT, GRID.experiment(model, "hardest"), len(toy_pairs), split.feature_dim)
    assert isinstance(made, Matcher) and parameter_count(made) > 1000 and parameters["epochs"]
    few = split.first(6)
    if model != "PFAN":  # its boxes are pixels of Scenes
        assert scoring_seconds(made, few, toy_pairs.texts) > 0


def test_stage_one_of_dcpa_is_what_ranks_in_its_experiment() -> None:
    alone, _ = built(ROOT, GRID.experiment("DCPA stage one", "hardest"), 50, 24)
    both, _ = built(ROOT, GRID.experiment("DCPA", "hardest"), 50, 24)
    assert type(alone).__name__ == "IntraPAM" and type(both).__name__ == "DCPA"
    assert parameter_count(alone) < parameter_count(both)


def test_frozen_weights_are_no_parameters() -> None:
    model = MeanPool(10, 4, 8)
    whole = parameter_count(model)
    model.region_proj.requires_grad_(False)
    assert whole == 10 * 8 + 4 * 8 + 8 and parameter_count(model) == 80


def test_a_training_joins_with_its_row() -> None:
    log = [{"step": 1, "loss": 1.0}, {"step": 7, "loss": 0.5}]
    result = TrainResult(log, {}, 3.0, MeanPool(10, 4, 8))
    row = joined("mean-pool", "mine", Scores.same(np.eye(4, dtype=np.float32)), np.arange(4), result)
    assert isinstance(row, Row) and row.state == HERE and row.rsum == Interval(600.0, 600.0, 600.0)
    assert row.seeds == 1 and row.captions == 7 * result.captions_a_step


def test_the_loss_of_the_page_has_ten_lines() -> None:
    """Without blank lines, documentation and imports: what somebody has to write."""
    (defined,) = (one for one in ast.parse(cells_of("13_leaderboard")["sigmoid"]).body if isinstance(one, ast.ClassDef))
    defined.body = [part for part in defined.body if not isinstance(part, ast.Expr)]
    assert len(ast.unparse(defined).replace("\n\n", "\n").splitlines()) <= 11
