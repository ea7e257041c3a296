"""Settings that a search on dev chooses before an experiment runs. Runs are pretended; all around them is real."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner
from itm_lab.experiments.choice import chosen_setting
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.runner import Job
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import make_receipt, read_receipt, write_receipt
from itm_lab.records.training import search_records
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
RECALLS = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
BASELINE = 399.0


def rsum_of(given: dict) -> float:
    """A weight of 0.1 and a margin of 0.1 are better on average; another setting has one lucky run."""
    if not given["ccr_weight"]:
        return BASELINE + given["seed"] % 7
    lucky = 23 * (given["ccr_weight"] == 1.0 and given["ccr_margin"] == 0.0)
    return 400 + 10 * (given["ccr_weight"] == 0.1) + 12 * (given["ccr_margin"] == 0.1) + lucky


@pytest.fixture
def itm_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``itm run`` with pretended papermill calls: returns exit code, output and the jobs that were started."""
    data = write_toy_dataset(tmp_path / "f30k", {"train": 26, "dev": 5, "test": 5}, regions=6, width=8)

    def pretend(job: Job) -> SimpleNamespace:
        given = job.parameters
        about = {"chapter": job.experiment.chapter, "variant": given["variant"], "seed": job.seed}
        receipt = make_receipt(
            **about, dataset=job.facts.identity, parameters=settings_of(given), seconds=1.0, device="cpu",
            metrics=RECALLS | {"rsum": rsum_of(given)},
        )  # fmt: skip
        write_receipt(receipt, job.folder)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    def run(*arguments: str, fails_after: int = 99, own: list[str] | None = None) -> tuple[int, str, list[dict]]:
        started: list[dict] = []

        def start(job: Job) -> SimpleNamespace:
            if len(started) == fails_after:
                raise ItmError("no more memory")
            started.append(job.parameters)
            return pretend(job)

        monkeypatch.setattr(runner, "start", start)
        monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
        own = ["entities=", "baseline="] if own is None else []
        places = [f"dataset={data}", f"run_dir={tmp_path / 'runs'}", "device=cpu", *own]
        options = [word for place in places for word in ("-p", place)]
        result = CliRunner().invoke(app, ["run", *arguments, *options, "--receipts", str(tmp_path / "receipts")])
        return result.exit_code, result.output, started

    monkeypatch.chdir(ROOT)
    return run


def test_a_search_is_resumed_recorded_and_its_choice_is_run(itm_run, tmp_path: Path) -> None:
    code, said, first = itm_run("ccr_ccs/f30k/scan_ccr", fails_after=5)
    assert code == 1 and "no more memory" in said and len(first) == 5
    choices = tmp_path / "receipts/11_ccr_ccs/choices"
    assert not choices.exists()
    code, said, rest = itm_run("ccr_ccs/f30k/scan_ccr")
    assert code == 0, said
    *search, last = first + rest
    assert len(search) == 12 and {one["evaluate_on"] for one in search} == {"dev"}
    by_variant = [[one for one in search if bool(one["ccr_weight"]) == constrained] for constrained in (False, True)]
    assert [sorted(one["seed"] for one in runs) for runs in by_variant] == 2 * [list(range(100, 106))]  # equal effort
    assert len({(one["ccr_weight"], one["ccr_margin"]) for one in by_variant[1]}) == 6
    assert (last["ccr_weight"], last["ccr_margin"], last["ccs_weight"]) == (0.1, 0.1, 0.0)
    assert (last["seed"], last["evaluate_on"]) == (0, "test") and last["variant"].startswith("SCAN CCR")
    assert "ccr_weight" not in last["variant"]
    assert "takes ccr_weight=0.1, ccr_margin=0.1 (dev rsum: best of 6 runs 423.0, best of as many" in said
    (path,) = choices.iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert [run["rsum"] for run in record["runs"]] == [410, 422, 410, 423, 412, 400]
    assert len(record["baseline_runs"]) == 6 and min(run["rsum"] for run in record["baseline_runs"]) >= BASELINE
    seals = {read_receipt(one)["seal"] for one in (tmp_path / "receipts/11_ccr_ccs/search").glob("*.json")}
    assert {run["seal"] for run in record["runs"] + record["baseline_runs"]} == seals
    assert itm_run("ccr_ccs/f30k/scan_ccr")[2] == []  # nothing is run again
    _, said, _ = itm_run("ccr_ccs/f30k/scan_ccr", "--dry-run")
    assert "1 runs planned" in said


def test_searches_share_the_runs_of_their_baseline_and_a_plan_shows_them(itm_run) -> None:
    names = "ccr_ccs/f30k/scan_ccr", "ccr_ccs/f30k/scan_ccr_ccs"
    code, said, _ = itm_run(*names, "--dry-run", "--seeds", "0-1")
    assert code == 0, said
    assert "scan_ccr: 6 runs on dev choose ccr_weight, ccr_margin, beside 6 of ccr_ccs/f30k/scan_baseline" in said
    assert "scan_ccr_ccs: 36 runs on dev choose" in said
    assert f"{36 + 6 + 36 + 2 * 2} runs planned, none started" in said  # 36 of the baseline serve both
    _, said, _ = itm_run(*names, "--print")
    assert said.count("papermill") == 36 + 6 + 36 + 2 and "known when the search has ended" in said


def test_a_setting_that_is_given_is_not_searched(itm_run) -> None:
    code, said, started = itm_run("ccr_ccs/f30k/scan_ccr", "-p", "ccr_weight=1.0")
    assert code == 0, said
    assert [(one["ccr_weight"], one["evaluate_on"]) for one in started] == [(1.0, "test")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record | {"chosen": {"ccr_weight": 1.0, "ccr_margin": 0.0}},
            "another choice than its runs give",
        ),
        (lambda record: record | {"select": {"grid": {}}}, "a choice with other select"),
        (lambda record: record | {"data": "coco"}, "a choice with other data"),
        (lambda record: {"chosen": {}}, "no record of a choice"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change, message: str, itm_run, tmp_path: Path) -> None:
    itm_run("ccr_ccs/f30k/scan_ccr")
    (path,) = (tmp_path / "receipts/11_ccr_ccs/choices").iterdir()
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    code, said, started = itm_run("ccr_ccs/f30k/scan_ccr")
    assert code == 2 and message in said and not started
    assert len(said.strip().splitlines()) == 1


def test_of_equal_means_the_first_value_is_taken() -> None:
    assert chosen_setting([({"width": 8}, 1.0), ({"width": 16}, 1.0)]) == {"width": 8}


LADDER = """
base: {teach: false}
datasets:
  f30k:
    base: {dataset: data/f30k_precomp, schedule: lab, epochs: 12}
    variants:
      a: {variant: A, select: {grid: {learning_rate: [0.002, 0.004, 0.008]}, on: dev, seeds: 2, shorter: {epochs: 3}}}
      b: {variant: B, choice_of: a, margin: 0.3}
      c:
        variant: C
        choice_of: scan/f30k/a
        search_baseline: a
        select: {grid: {margin: [0.1, 0.3], temperature: [4.0, 9.0]}, on: dev}
      d: {variant: D, choice_of: b}
"""


@pytest.fixture
def ladder_run(itm_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``itm run`` in a checkout whose experiments search a learning rate; the best one is what the test says."""
    for name in ("notebooks", "pyproject.toml", "_config.yml", "_toc.yml", "book"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/scan.yaml").write_text(LADDER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    best = {"learning_rate": 0.004}

    def rsum(given: dict) -> float:
        return 400 - 40 * abs(math.log2(given["learning_rate"] / best["learning_rate"])) + given["seed"] % 2

    monkeypatch.setattr(sys.modules[__name__], "rsum_of", rsum)
    return lambda *arguments, at=0.004: (best.update(learning_rate=at), itm_run(*arguments, own=[]))[1]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.004, [0.002, 0.004, 0.008]),
        (0.016, [0.002, 0.004, 0.008, 0.016, 0.032]),
        (0.001, [0.002, 0.004, 0.008, 0.001, 0.0005]),
        (1.0, [0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128]),  # four steps beyond, and no further
    ],
)
def test_a_learning_rate_is_followed_beyond_the_ends_of_its_grid(
    best: float, tried: list, ladder_run, tmp_path: Path
) -> None:
    code, said, started = ladder_run("scan/f30k/a", at=best)
    assert code == 0, said
    *search, last = started
    assert [(one["learning_rate"], one["seed"]) for one in search] == [(rate, s) for rate in tried for s in (100, 101)]
    assert {(one["epochs"], one["evaluate_on"]) for one in search} == {(3, "dev")}
    assert (last["learning_rate"], last["epochs"], last["evaluate_on"]) == (min(best, 0.128), 12, "test")
    assert ladder_run("scan/f30k/a", at=best)[2] == []
    (noted,) = search_records(str(tmp_path / "receipts/02_scan/choices/scan_f30k_a.json"))  # as a receipt has it
    assert (noted["planned"], noted["runs"], noted["seeds"]) == (6, len(search), 2)
    make_receipt(
        chapter="02_scan", variant="A", seed=0, dataset={"name": "f30k", "split": "test", "fingerprint": "f" * 64},
        parameters={}, seconds=1.0, device="cpu", metrics=RECALLS | {"rsum": 300.0}, search=[noted],
    )  # fmt: skip


def test_a_search_is_planned_where_its_data_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = CliRunner().invoke(app, ["run", "ccr_ccs/coco/saf_ccr", "--dry-run", "-p", "dataset=data/coco_nowhere"])
    assert (
        found.exit_code == 1 and "data/coco_nowhere  " in found.output and "runs planned, none started" in found.output
    )


def test_other_experiments_take_a_choice_and_search_on_top_of_it(ladder_run) -> None:
    code, said, started = ladder_run("scan/f30k/c", at=0.008)
    assert code == 0, said
    rates, margins = started[:8], started[8:]  # four values of a learning rate, then four settings beside a's runs
    assert len({one["learning_rate"] for one in rates}) == 4 and {one["variant"][0] for one in rates} == {"A"}
    assert len(margins) == 4 + 4 + 1 and {one["learning_rate"] for one in margins} == {0.008}
    assert [one["seed"] for one in margins if one["variant"][0] == "A"] == [100, 101, 102, 103]
    code, said, started = ladder_run("scan/f30k/b")
    assert code == 0 and [(one["learning_rate"], one["margin"]) for one in started] == [(0.008, 0.3)]


def test_a_choice_of_an_experiment_that_selects_nothing_is_refused(ladder_run) -> None:
    code, said, started = ladder_run("scan/f30k/d")
    assert (code, started) == (
        2,
        [],
    ) and "choice_of: found scan/f30k/b, expected an experiment that selects settings" in said


def test_a_recipe_says_which_of_its_settings_a_search_has_yet_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    missing = "ccr_ccs/coco/saf_ccr: ccr_weight, ccr_margin are placeholders"
    found = CliRunner().invoke(app, ["recipe", "ccr_ccs/coco/saf_ccr"])
    assert found.exit_code == 0 and missing in found.stderr
    assert found.stdout.startswith(f"# {missing}") and yaml.safe_load(found.stdout)["variant"] == "SAF CCR"
    for given in (["ccr_ccs/coco/saf_ccr", "-p", "ccr_weight=0.1"], ["ccr_ccs/coco/saf_baseline"]):
        found = CliRunner().invoke(app, ["recipe", *given])
        assert found.exit_code == 0 and not found.stderr and not found.stdout.startswith("#")


GRID = "grid: {width: [8, 16]}"


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (f"{{{GRID}, on: test}}", r"scan/scenes/a, select: found on: test, seeds: 1, expected .*on: dev"),
        (f"{{{GRID}, on: dev, seeds: 0}}", "seeds: 0, expected .* with one seed or more"),
        (f"{{{GRID}, on: dev, seeds: true}}", "seeds: True"),
        (f"{{{GRID}}}", r"select: found \{'grid': .*expected \{grid:"),
        (f"{{{GRID}, on: dev, sedes: 2}}", "sedes"),
        ("[width]", r"select: found \['width'\]"),
        ("{grid: {}, on: dev}", r"grid: \{\}"),
        ("{grid: {width: 8}, on: dev}", "width: 8, expected a list of different values"),
        ("{grid: {width: [8, 8]}, on: dev}", "a list of different values"),
        ("{grid: {widht: [8]}, on: dev}", "the parameter widht.*Did you mean width"),
        ("{grid: {width: [8, 0]}, on: dev}", "width: found 0"),
        ("{grid: {seed: [1, 2]}, on: dev}", "the parameter seed, expected a setting"),
        (f"{{{GRID}, on: dev}}, search_baseline: c", "search_baseline: c, expected a variant of the same dataset"),
        (f"{{{GRID}, on: dev}}, search_baseline: ''", "search_baseline: none"),
        (f"{{{GRID}, on: dev}}, search_baseline: a", "search_baseline: a, expected .* that selects nothing"),
    ],
)
def test_a_select_that_cannot_be_is_one_clear_error(select: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "experiments").mkdir()
    path = tmp_path / "experiments/scan.yaml"
    text = f"datasets: {{scenes: {{variants: {{a: {{select: {select}}}, b: {{}}}}}}}}\n"
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(0, hash(text) % 10**9))
    with pytest.raises(ItmError, match=message):
        read_experiments(tmp_path)


def test_every_constrained_run_at_paper_size_searches_what_the_paper_searched() -> None:
    known = {
        name: one for name, one in read_experiments(ROOT, "ccr_ccs").items() if one.settings["schedule"] == "paper"
    }
    for name, experiment in known.items():
        runs = {"": 0, "cr": 6, "cs": 6, "cr_ccs": 36}[name.rpartition("/")[2].partition("_c")[2]]
        found = 1
        for values in experiment.select.grid.values() if experiment.select else ():
            found *= len(values)
        assert found == (runs or 1), name
        if experiment.select:
            assert experiment.search_baseline == name.rpartition("/")[2].partition("_c")[0] + "_baseline"
    for row in ("SCAN", "PFAN"):
        for constraint in ("baseline", "CCR", "CCS", "CCR+CCS"):
            members = [one for one in known.values() if one.ensemble == f"{row} ensemble {constraint}"]
            assert sorted(one.values()["direction"] for one in members) == ["i2t", "t2i"]
