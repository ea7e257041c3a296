"""`itm run`: checked before anything starts, resumed after a stop, ended by a receipt and a row of a table."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click.testing
import numpy as np
import papermill.cli
import pytest
import torch
import yaml
from conftest import listens_to_interrupts
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner as running
from itm_lab.experiments.cost import described, plan
from itm_lab.experiments.ensembles import ensemble_of, is_averaged, run_ensembles
from itm_lab.experiments.recipes import (
    find_recipe,
    read_overrides,
    read_recipe,
    read_seeds,
    recipes_of_table,
    tables_of,
)
from itm_lab.experiments.runner import (
    Job,
    collect,
    expected_receipt,
    grid_jobs,
    make_jobs,
    next_jobs,
    run_jobs,
    search_jobs,
    shown,
    table_of,
)
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import Evidence, make_receipt, read_receipt, receipt_path, seal_of, write_receipt
from itm_lab.records.scores import save_scores, write_scores
from itm_utils.data.precomp import open_split
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import evaluate, fold_ranks

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# What makes a paper-scale recipe small enough for a test; epochs, schedule and everything else stay as published.
SMALL = ["width=16", "word_dim=8", "batch_size=4", "device=cpu", "num_workers=0"]


def recipe(name: str):
    return read_recipe(ROOT, find_recipe(ROOT, name))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_fits_its_notebook(path: Path) -> None:
    found = read_recipe(ROOT, path)
    text = path.read_text(encoding="utf-8")
    assert path.stem.startswith(f"{found.chapter}_")
    assert found.table, "no `# table:` line"
    assert f"papermill notebooks/{found.chapter}.ipynb" in text and f"-f recipes/{path.name}" in text
    assert found.parameters["teach"] is False
    assert found.parameters["run_dir"] == f"runs/{path.stem}"
    # What `itm run` adds to the papermill command in the file is a folder for each seed, and nothing else.
    (job,) = make_jobs(found, [found.values()["seed"]], {})
    given = [word for flag, *word in zip(*(job.command()[n:] for n in range(3)), strict=False) if flag == "-p"]
    assert given == [["run_dir", f"runs/{path.stem}/s{job.seed}"]]
    assert yaml.safe_load(text)["variant"]


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("mmca/table_1", ["08_mmca_f30k"]),
        ("mmca/table_3", ["08_mmca_coco"]),
        ("mmca/table_5", ["08_mmca_coco", *(f"08_mmca_coco_width_{width}" for width in (128, 512, 64))]),
        ("mmca/table_6", ["08_mmca_f30k", *(f"08_mmca_f30k_alpha_{alpha}" for alpha in ("01", "04", "08"))]),
    ],
)
def test_a_row_may_stand_in_several_tables(table: str, rows: list[str]) -> None:
    assert [found.name for found in recipes_of_table(ROOT, table)] == rows


def test_the_arms_of_a_dataset_have_different_names() -> None:
    names = [
        (r.chapter, r.parameters["dataset"], r.parameters["variant"]) for r in map(recipe, (p.stem for p in RECIPES))
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["02_scan_f30k"], "no such recipe"),
        (["02_scan_scenes_t2i_avg", "-p", "widths=3"], "Did you mean width?"),
        (["02_scan_scenes_t2i_avg", "-p", "width=wide"], "parameter width: found 'wide', expected an int"),
        (["02_scan_scenes_t2i_avg", "-p", "teach=1"], "true or false"),
        (["02_scan_scenes_t2i_avg", "-p", "width"], "name=value"),
        (["02_scan_scenes_t2i_avg", "--seeds", "4-2"], "--seeds"),
        (["02_scan_f30k_t2i_avg", "-p", "dataset=no/such/folder"], "no such folder"),
        (["--table", "scan/table_9"], "one of"),
        (["02_scan_scenes_t2i_avg", "--table", "scan/table_1"], "not both"),
        (["02_scan_scenes_t2i_avg", "--search", "width"], "name=a,b,c"),
        (["02_scan_scenes_t2i_avg", "--grid", "width"], "--grid: found 'width', expected name=a,b,c"),
        (["02_scan_scenes_t2i_avg", "--grid", "width=8,wide"], "parameter width: found 'wide'"),
        (["02_scan_scenes_t2i_avg", "--grid", "width=8,16", "--seeds", "0-4"], "without --search and --seeds"),
        (["02_scan_scenes_t2i_avg", "--grid", "width=8,16", "-p", "seed=3"], "without --search and --seeds"),
        (["02_scan_scenes_t2i_avg", "--grid", "width=8", "--grid", "width=16"], "--grid: found width twice"),
        (["02_scan_scenes_t2i_avg", "--search", "width=8,16", "--seeds", "0-4"], "--search without a seed"),
        (["02_scan_scenes_t2i_avg", "--search", "width=8,16", "-p", "seed=3"], "--search without a seed"),
        (["02_scan_scenes_t2i_avg", "--search", "width=8", "--search", "width=16"], "--search: found width twice"),
        *(
            (["02_scan_scenes_t2i_avg", option, f"{name}={value}"], f"{option}: found the parameter {name}, expected")
            for option in ("--search", "--grid")
            for name, value in (
                ("seed", 1),
                ("dataset", "a,b"),
                ("device", "cpu,cuda"),
                ("num_workers", 2),
                ("variant", "x"),
            )
        ),
        (["02_scan_f30k_t2i_avg", "--dry-run", "--gpu", "Voodoo"], "--gpu"),
        *(
            (
                [name, "-p", wrong, *more],
                f"{name}, {wrong.partition('=')[0]}: found {wrong.partition('=')[2]}, expected a",
            )
            for more in (["--dry-run"], ["--print"], [])
            for name, wrong in (
                ("02_scan_f30k_t2i_avg", "batch_size=0"),
                ("02_scan_f30k_t2i_avg", "width=0"),
                ("02_scan_f30k_t2i_avg", "epochs=-3"),
                ("02_scan_scenes_t2i_avg", "epochs=0"),
                ("02_scan_f30k_t2i_avg", "learning_rate=nan"),
                ("08_mmca_f30k", "validate_every=-1"),
                ("08_mmca_f30k", "heads=0"),
                ("09_dcpa_f30k", "inter_batch_size=0"),
                ("09_dcpa_f30k", "train_fraction=-0.5"),
                ("10_aoq_f30k_vsrn_adapoffquin", "first_epochs=0"),
                ("10_aoq_f30k_vsrn_adapoffquin", "miner_width=-1"),
            )
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["run", *arguments, "--receipts", str(tmp_path), "-p", f"run_dir={tmp_path}"])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_fewer_than_no_runs_side_by_side_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["run", "02_scan_scenes_t2i_avg", "--jobs", "-1", "--print"])
    assert result.exit_code == 2 and "--jobs" in result.output


def test_a_recipe_with_a_wrong_parameter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "02_scan_scenes_bad.yaml"
    path.write_text("arm: x\ntemperture: 9.0\n", encoding="utf-8")
    with pytest.raises(ItmError, match="Did you mean temperature"):
        read_recipe(ROOT, path)
    path.write_text("arm: x\nwidth: '64'\n", encoding="utf-8")
    with pytest.raises(ItmError, match="a value of type int"):
        read_recipe(ROOT, path)
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(ItmError, match="a list"):
        read_recipe(ROOT, path)


def test_other_settings_are_another_arm_in_another_folder() -> None:
    scan = recipe("02_scan_scenes_t2i_avg")
    plain, wide = (make_jobs(scan, [5], read_overrides(scan, pairs))[0] for pairs in ([], ["width=32"]))
    elsewhere = make_jobs(scan, [5], read_overrides(scan, ["device=cuda"]))[0]
    assert wide.parameters["variant"] == "SCAN t2i AVG width=32"
    assert elsewhere.parameters["variant"] == plain.parameters["variant"] == "SCAN t2i AVG"
    assert len({job.parameters["run_dir"] for job in (plain, wide)}) == 2
    assert "-p width 32" in shown(wide) and "-p width" not in shown(plain)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("01_vsepp_f30k_vsepp", "hardest=false"),
        ("01_vsepp_f30k_vse0", "hardest=true"),
        ("08_mmca_f30k", "text_layers=-2"),
        ("08_mmca_f30k", "text_layers=0,-1"),
        ("08_mmca_f30k", "width=64"),
        ("01_vsepp_f30k_vsepp", "learning_rate=1"),
        *(
            ("01_vsepp_f30k_vsepp", f"arm={variant}")
            for variant in ("2024", "1e3", "nan", "True", "None", "-p", "", "VSE++ a b")
        ),
    ],
)
def test_papermill_reads_what_was_planned(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line guesses types: ``false`` is text to it, and 2024 a number."""
    given: dict[str, object] = {}
    monkeypatch.setattr(papermill.cli, "execute_notebook", lambda **call: given.update(call["parameters"]))
    monkeypatch.chdir(ROOT)
    (job,) = plan(ROOT, [name], "", "0", [change], [])
    program, *arguments = job.command()
    ended = click.testing.CliRunner().invoke(papermill.cli.papermill, arguments, catch_exceptions=False)
    assert program == "papermill" and ended.exit_code == 0, ended.output
    defaults = {parameter: default for parameter, (_, default) in job.recipe.declared.items()}
    assert repr(defaults | given) == repr(job.parameters)  # True is no 1 here


def test_a_search_is_judged_on_dev_with_a_seed_of_its_own() -> None:
    scan = recipe("02_scan_scenes_t2i_avg")
    rate = scan.parameters["learning_rate"]
    jobs = search_jobs(scan, {"learning_rate": [0.001, 0.5], "width": [32]}, {})
    tried = [(job.parameters["learning_rate"], job.parameters["width"]) for job in jobs]
    assert tried == [(0.001, 64), (0.5, 64), (rate, 32)]
    assert jobs[0].parameters["variant"] == "SCAN t2i AVG learning_rate=0.001"
    assert {job.parameters["evaluate_on"] for job in jobs} == {"dev"}
    assert {job.seed for job in jobs}.isdisjoint(read_seeds(scan.seeds))


def test_a_grid_is_every_combination_each_with_its_own_seed() -> None:
    both = recipe("11_ccr_ccs_scenes_scan_both")
    weights, margins = [0.1, 1.0], [0.0, 0.1, 0.2]
    choices = {"ccr_weight": weights, "ccr_margin": margins, "ccs_weight": weights, "ccs_margin": margins}
    jobs = grid_jobs(both, choices, {})
    tried = [tuple(job.parameters[name] for name in choices) for job in jobs]
    assert tried == [(a, b, c, d) for a in weights for b in margins for c in weights for d in margins]
    assert [job.seed for job in jobs] == list(range(100, 136)) and len(set(tried)) == 36
    assert {job.parameters["evaluate_on"] for job in jobs} == {"dev"}
    assert jobs[1].parameters["variant"] == "SCAN CCR+CCS ccr_weight=0.1 ccr_margin=0.0 ccs_weight=0.1 ccs_margin=0.1"
    assert len({job.parameters["run_dir"] for job in jobs}) == 36


def test_a_grid_and_the_runs_it_is_measured_by_have_places_of_their_own(tmp_path: Path) -> None:
    """Of chapter 11: the grids of three recipes, and as many runs of the baseline, beside its runs for the table."""
    grid = ["ccr_weight=0.1,1", "ccr_margin=0,0.1,0.2"]
    variants = {"both": [*grid, "ccs_weight=0.1,1", "ccs_margin=0,0.1,0.2"], "ccr": grid, "ccs": ["ccs_margin=0,0.1"]}
    names = {variant: f"11_ccr_ccs_scenes_scan_{variant}" for variant in (*variants, "baseline")}
    jobs = [job for variant in variants for job in plan(ROOT, [names[variant]], "", "", [], [], variants[variant])]
    assert len(jobs) == 36 + 6 + 2
    jobs += plan(ROOT, [names["baseline"]], "", "100-135", ["evaluate_on=dev"], [])
    searched = [expected_receipt(job, tmp_path) for job in jobs]
    assert {path.parent for path in searched} == {tmp_path / "11_ccr_ccs/search"}
    tables = [job for name in names.values() for job in plan(ROOT, [name], "", "", [], [])]
    places = [*searched, *(expected_receipt(job, tmp_path) for job in tables)]
    assert len(set(places)) == len(places) == 44 + 36 + 20
    assert len({job.folder for job in (*jobs, *tables)}) == len(places)


def test_runs_that_share_a_folder_take_turns() -> None:
    names = ["11_ccr_ccs_f30k_scan_baseline", "11_ccr_ccs_f30k_scan_both", "11_ccr_ccs_f30k_saf_baseline"]
    base, both, other = plan(ROOT, names, "", "0", [], [])
    assert next_jobs([base, both, other], [], 2) == [base, other]
    assert next_jobs([both, other], [base], 2) == [other]
    assert next_jobs([both], [other], 2) == [both]
    assert next_jobs([other], [base, both], 2) == []
    two, intra = plan(ROOT, ["09_dcpa_f30k", "09_dcpa_f30k_intra"], "", "0", [], [])
    assert next_jobs([two, intra], [], 2) == [two]  # whoever comes first trains stage one
    assert next_jobs([intra], plan(ROOT, ["09_dcpa_f30k"], "", "1", [], []), 2) == [intra]


def test_a_recipe_that_changes_while_its_runs_wait_changes_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("notebooks", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    names, paths = ["02_scan_scenes_t2i_avg", "02_scan_scenes_i2t_avg"], []
    (tmp_path / "recipes").mkdir()
    for name in names:
        paths.append(tmp_path / f"recipes/{name}.yaml")
        paths[-1].write_text((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    jobs = plan(tmp_path, names, "", "5-6", ["width=16"], [])
    before = paths[0].read_text(encoding="utf-8")
    epochs = jobs[0].parameters["epochs"]
    changed = re.sub(
        r"^epochs:.*$", "epochs: 99\nmargin: 0.5", before.replace("margin:", "# margin:"), flags=re.MULTILINE
    )
    started: list[list[str]] = []

    def papermill(command: list[str], **how: object) -> subprocess.Popen:
        started.append(command)
        paths[0].write_text(changed, encoding="utf-8")  # while the first run is under way
        paths[1].unlink(missing_ok=True)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running.subprocess, "Popen", papermill)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    failed = run_jobs(jobs, tmp_path / "receipts", at_a_time=1)
    first, second = (shlex.join(command) for command in started)
    assert "-p epochs" not in first and "-p width 16" in first
    assert f"-p epochs {epochs}" in second and "-p margin 0.2" in second and "-p width 16" in second
    assert failed == jobs[2:]  # their recipe is gone
    said = capsys.readouterr()
    assert "02_scan_scenes_t2i_avg.yaml has changed since this command began; the run is as planned" in said.out
    assert said.err.count("not started: ") == 2 and "02_scan_scenes_i2t_avg.yaml" in said.err


def test_one_name_for_two_runs_is_refused_before_any_of_them_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "start", lambda job: pytest.fail(f"{job.label} was started"))
    places = [f"dataset={fake(tmp_path / 'f30k', 'test')}", f"run_dir={tmp_path / 'run'}"]
    names = ["01_vsepp_f30k_vsepp", "01_vsepp_f30k_vse0"]
    jobs = plan(ROOT, names, "", "0", [*places, "arm=smoke"], [])
    with pytest.raises(
        ItmError, match=r"smoke_f30k_s0\.json: found the receipt of two runs, of 01_vsepp_f30k_vsepp and"
    ):
        run_jobs(jobs, tmp_path / "receipts", at_a_time=2)
    with pytest.raises(ItmError, match="the receipt of two runs"):
        run_jobs(plan(ROOT, names[:1], "", "3,3", places, []), tmp_path / "receipts", at_a_time=2)


def test_a_receipt_that_cannot_be_collected_stops_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    data, results = fake(tmp_path / "f30k", "test"), tmp_path / "receipts"
    first, second = plan(ROOT, ["01_vsepp_f30k_vsepp"], "", "0-1", [f"dataset={data}", f"run_dir={tmp_path / 'r'}"], [])

    def start(job: Job) -> SimpleNamespace:
        leave(job)
        if job is first:  # as if another command had written to the same place meanwhile
            leave(job, seed=9, folder=results)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running, "start", start)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    assert run_jobs([first, second], results, at_a_time=2) == [first]
    assert expected_receipt(second, results).exists()
    assert "seed 0: failed: " in (said := capsys.readouterr().err) and "a receipt with other metrics" in said


def leave(job: Job, seed: int = 0, folder: Path | None = None) -> None:
    """What a run leaves in its folder, with made-up scores."""
    split = open_split(job.data, job.parameters["evaluate_on"])
    generator = torch.Generator().manual_seed(1000 * seed + 10 * job.seed + len(job.parameters["variant"]))
    scores = Scores.same(torch.rand(split.n_images, split.n_captions, generator=generator))
    about = {
        "chapter": job.recipe.chapter,
        "variant": job.parameters["variant"],
        "seed": job.seed,
        "dataset": split.identity(),
    }
    more = {"parameters": settings_of(job.parameters), "seconds": 1.0, "device": "cpu"}
    save_scores(scores, split.owner, folder or job.folder, {}, **about, **more)
    if folder is None:
        write_scores(job.folder / "scores.safetensors", scores)


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., list[Job]]:
    """Two runs that make an ensemble, finished and collected."""
    data = fake(tmp_path / "f30k", "test")

    def finished(*changes: str, seed: int = 0) -> list[Job]:
        given = [f"dataset={data}", f"run_dir={tmp_path / 'run'}", *changes]
        jobs = plan(ROOT, ["02_scan_f30k_t2i_avg", "02_scan_f30k_i2t_avg"], "", "0", given, [])
        for job in jobs:
            if not expected_receipt(job, tmp_path / "receipts").exists():
                leave(job, seed)
                collect(job, tmp_path / "receipts")
        return jobs

    return finished


def averaged(results: Path, *, kind: str = "SCAN-ensemble-AVG") -> dict[str, dict]:
    return {path.stem: read_receipt(path) for path in sorted(results.rglob(f"{kind}*.json"))}


def test_an_ensemble_is_named_after_the_settings_of_its_members(
    pair: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "receipts"
    rows = {}
    for width in (16, 24):
        jobs = pair("epochs=1", f"width={width}")
        rows[width] = run_ensembles(jobs, results)
        assert [row.variant for row in rows[width]][2] == f"SCAN ensemble AVG epochs=1 width={width}"
    found = averaged(results)
    assert list(found) == [f"SCAN-ensemble-AVG-epochs=1-width={width}_f30k_s0" for width in (16, 24)]
    for width, receipt in zip((16, 24), found.values(), strict=True):
        assert receipt["parameters"]["members"] == [
            f"SCAN {way} AVG epochs=1 width={width}, seed 0" for way in ("t2i", "i2t")
        ]
        assert receipt["rules"] == {}  # it speaks for no claim
        assert (
            f"{receipt['metrics']['rsum']['value']:8.1f}  f30k all 20, 1 seed"
            in list(table_of(results, rows[width]))[3]
        )
    run_ensembles(pair(), results)
    assert list(averaged(results))[2] == "SCAN-ensemble-AVG_f30k_s0"
    assert "kept" not in capsys.readouterr().out
    run_ensembles(pair(), results)
    assert "SCAN ensemble AVG, seed 0: receipt is there, kept" in capsys.readouterr().out


def test_an_ensemble_of_other_runs_under_the_same_name_is_refused(pair: Callable, tmp_path: Path) -> None:
    results = tmp_path / "receipts"
    run_ensembles(pair(), results)
    again = pair()[1]
    for folder in (results, again.folder):
        expected_receipt(again, folder).unlink()
    jobs = pair(seed=1)  # the second was run again, to other ranks
    with pytest.raises(ItmError, match=r"SCAN-ensemble-AVG_f30k_s0\.json: found an ensemble with other ranks"):
        run_ensembles(jobs, results)
    with pytest.raises(ItmError, match="found an ensemble with other ranks"):
        ensemble_of([job.folder for job in jobs], "SCAN ensemble AVG", results)
    with pytest.raises(ItmError, match="found an ensemble with other members"):
        ensemble_of([job.folder for job in pair("width=16")], "SCAN ensemble AVG", results)
    assert is_averaged(results / "none.json", []) is False


def test_an_ensemble_from_before_its_members_ranks_were_noted_is_kept(
    pair: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results, jobs = tmp_path / "receipts", pair()
    run_ensembles(jobs, results)
    (path,) = results.rglob("SCAN-ensemble*.json")
    receipt = read_receipt(path)
    del receipt["parameters"]["ranks"]
    receipt["seal"] = seal_of(receipt)
    path.write_text(json.dumps(receipt), encoding="utf-8")
    run_ensembles(jobs[::-1], results)  # whatever their order
    assert "kept" in capsys.readouterr().out
    ensemble_of([job.folder for job in jobs[::-1]], "SCAN ensemble AVG", results)
    assert read_receipt(path)["parameters"] == receipt["parameters"]
    receipt["parameters"]["members"][0] += "0"
    receipt["seal"] = seal_of(receipt)
    path.write_text(json.dumps(receipt), encoding="utf-8")
    with pytest.raises(ItmError, match="found an ensemble with other members"):
        run_ensembles(jobs, results)


def test_the_ensembles_of_the_book_are_recognised(tmp_path: Path) -> None:
    """They are from before ranks were noted. Twins, of two seeds of one arm, are made by ``itm ensemble`` alone."""
    paths = [path for path in sorted((ROOT / "receipts").rglob("*ensemble*.json")) if "twin" not in path.name]
    assert len(paths) >= 19
    for path in paths:
        receipt = read_receipt(path)
        named = [member.rpartition(", seed ") for member in receipt["parameters"]["members"]]
        members = [
            receipt_path(receipt | {"variant": variant, "seed": seed}, ROOT / "receipts") for variant, _, seed in named
        ]
        assert is_averaged(path, [read_receipt(member) for member in members])
    jobs = plan(ROOT, ["02_scan_scenes_i2t_avg", "02_scan_scenes_t2i_avg"], "", "5-9", [], [])
    shutil.copytree(ROOT / "receipts/02_scan", tmp_path / "02_scan")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    rows = run_ensembles(jobs, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert [row.variant for row in rows] == ["SCAN i2t AVG", "SCAN t2i AVG", "SCAN ensemble AVG"]


def test_scores_of_another_split_are_not_averaged(
    pair: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "receipts"
    on_test = pair()
    capsys.readouterr()
    on_dev = pair("evaluate_on=dev")  # in the same folders, over the scores
    assert "f30k test" not in (said := capsys.readouterr().out) and said.count("on f30k dev (all 10)") == 2
    assert [job.folder for job in on_dev] == [job.folder for job in on_test]
    with pytest.raises(
        ItmError, match=r"scores\.safetensors: found scores with other ranks than SCAN-t2i-AVG_f30k_s0\.json"
    ):
        run_ensembles(on_test, results)
    lines = list(table_of(results, run_ensembles(on_dev, results)))
    known = {path.stem: read_receipt(path) for path in sorted(results.rglob("search/*.json"))}
    assert list(known) == [f"SCAN-{variant}_f30k_s0" for variant in ("ensemble-AVG", "i2t-AVG", "t2i-AVG")]
    assert {receipt["dataset"]["split"] for receipt in known.values()} == {"dev"}
    # The table is of what was run, although the same arms have receipts on test.
    assert len(lines) == 4
    for line, name in zip(lines[1:], ("t2i-AVG", "i2t-AVG", "ensemble-AVG"), strict=True):
        assert line.endswith(
            f"{known[f'SCAN-{name}_f30k_s0']['metrics']['rsum']['value']:8.1f}  f30k dev all 10, 1 seed"
        )


def test_of_several_receipts_in_a_folder_the_one_that_the_scores_give_is_taken(tmp_path: Path) -> None:
    """After ``testall`` and then ``test`` a folder has three, and ``…_5K_…`` is not the last of them."""
    rng, folders = torch.Generator().manual_seed(0), [tmp_path / name for name in ("one", "two")]
    about = {"chapter": "02_scan", "seed": 0, "parameters": {}, "seconds": 1.0, "device": "cpu"}
    for folder in folders:
        for split, images in (("testall", 10), ("test", 6)):
            scores, owner = Scores.same(torch.rand(images, 5 * images, generator=rng)), np.repeat(np.arange(images), 5)
            evidence = Evidence.of(fold_ranks(scores, owner, 1), owner)
            whole = evaluate(scores, owner)
            protocol = "5K" if split == "testall" else whole.protocol
            dataset = {"name": "coco", "split": split, "fingerprint": split}
            made = make_receipt(
                **about,
                variant=folder.name,
                dataset=dataset,
                metrics=whole.as_dict(),
                protocol=protocol,
                evidence=evidence,
            )
            write_receipt(made, folder, evidence)
            write_scores(folder / "scores.safetensors", scores)
    ensemble_of(folders, "both", tmp_path / "receipts")
    (receipt,) = map(read_receipt, (tmp_path / "receipts").rglob("*.json"))
    assert receipt["dataset"]["split"] == "test" and receipt["protocol"] == "all 6"
    write_scores(folders[1] / "scores.safetensors", Scores.same(torch.rand(10, 50, generator=rng)))
    with pytest.raises(ItmError, match=r"two/scores\.safetensors: found scores with other ranks than"):
        ensemble_of(folders, "both", tmp_path / "receipts")
    with pytest.raises(ItmError, match="found no receipt, expected the folder of a finished run"):
        ensemble_of([tmp_path], "both", tmp_path / "receipts")


def test_splits_that_do_not_fit_together_start_no_run(tmp_path: Path) -> None:
    data = fake(tmp_path / "f30k", "test")
    np.save(data / "test_ims.npy", np.load(data / "test_ims.npy")[..., :16])
    ended = subprocess.run(command("01_vsepp_f30k_vsepp", data, tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "test_ims.npy: found pictures of shape (36, 16), expected (36, 32), as in train." in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_may_fetch_its_text_encoder(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chapters of the book are executed offline. A run at paper scale needs BERT, which comes from the model hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    job = plan(ROOT, ["08_mmca_f30k"], "", "", [f"device={device}"], [])[0]
    assert "HF_HUB_OFFLINE" not in running.environment_of(job)
    assert running.environment_of(job)["OMP_NUM_THREADS"] == ("1" if device == "cpu" else "8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert running.environment_of(job)["HF_HUB_OFFLINE"] == "1"


def test_seeds() -> None:
    assert read_seeds("0-2,7") == [0, 1, 2, 7]


@pytest.mark.parametrize("table", sorted(set().union(*map(tables_of, RECIPES))))
def test_a_plan_names_every_run_and_its_cost(table: str) -> None:
    jobs = plan(ROOT, [], table, "0-1", [], [])
    lines = list(described(jobs, "RTX 3090", ROOT / "receipts"))
    assert len(lines) > len(jobs) >= 2
    for job, line in zip(jobs, lines, strict=False):
        assert job.parameters["variant"] in line
        if job.parameters["dataset"] != "scenes":
            took = re.search(r"at least ([\d.]+) (h|min) on one RTX 3090", line)
            assert took and 0 < float(took[1]) < 100, line


def test_a_table_has_means_and_intervals_over_seeds() -> None:
    (job,) = plan(ROOT, ["02_scan_scenes_t2i_avg"], "", "5", [], [])
    lines = list(table_of(ROOT / "receipts", run_ensembles([job], ROOT / "receipts")))
    assert len(lines) == 2
    assert re.search(r"SCAN t2i AVG +1 model.*\[\d+\.\d, \d+\.\d\]  scenes all 500, 5 seeds", lines[1])


def fake(folder: Path, test_split: str) -> Path:
    """A small dataset in the real file format: 36 regions, one file a split, the vocabulary beside."""
    return write_toy_dataset(folder, {"train": 40, "dev": 10, test_split: 20}, regions=36, width=32)


def command(name: str, data: Path, folder: Path, *more: str) -> list[str]:
    changes = [*SMALL, f"dataset={data}", f"run_dir={folder / 'run'}", *more]
    options = [word for change in changes for word in ("-p", change)]
    itm = Path(sys.executable).with_name("itm")
    return [str(itm), "run", name, *options, "--receipts", str(folder / "receipts")]


def finished(arguments: list[str]) -> str:
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_paper_scale_recipe_runs_to_a_receipt_and_a_row(tmp_path: Path) -> None:
    """Of VSE++; those of the other chapters have a file of tests for themselves."""
    name = "01_vsepp_coco_vsepp"
    data, variant = fake(tmp_path / "coco", "testall"), recipe(name).parameters["variant"]
    output = finished(command(name, data, tmp_path, "epochs=2", f"arm={variant}"))
    receipts = [read_receipt(path) for path in sorted((tmp_path / "receipts").rglob("*.json"))]
    assert {receipt["protocol"] for receipt in receipts} == {"all 20", "5 folds of 4"}
    assert {receipt["variant"] for receipt in receipts} == {variant}
    rows = [line for line in output.splitlines() if line.startswith(f"{variant:28} 1 model")]
    assert len(rows) == len(receipts)
    assert f"{receipts[0]['metrics']['rsum']['value']:.1f}" in "".join(rows)


def test_an_interrupted_run_goes_on_to_the_same_receipt(tmp_path: Path) -> None:
    data = fake(tmp_path / "f30k", "test")
    whole = command("01_vsepp_f30k_vsepp", data, tmp_path / "whole", "arm=VSE++")
    cut = command("01_vsepp_f30k_vsepp", data, tmp_path / "cut", "arm=VSE++")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(cut, cwd=ROOT, preexec_fn=listens_to_interrupts, **pipes)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "cut").rglob("step-*.safetensors")):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGINT)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 2 and "interrupted" in said, said
    assert not list((tmp_path / "cut" / "receipts").rglob("*.json"))
    finished(cut)
    finished(whole)
    one, other = (next((tmp_path / which / "receipts").rglob("*.json")) for which in ("whole", "cut"))
    assert read_receipt(one)["metrics"] == read_receipt(other)["metrics"]
    assert read_receipt(one)["ranks"] == read_receipt(other)["ranks"]
    log = next((tmp_path / "cut").rglob("papermill.log")).read_text(encoding="utf-8")
    assert log.count("Input Notebook") >= 2  # two papermill calls in one log
    assert "kept" in finished(cut)  # a third call has nothing to do
    other.unlink()  # as if the interruption had come between the run's end and the collection of its receipt
    finished(cut)
    assert read_receipt(other)["metrics"] == read_receipt(one)["metrics"]
    again = next((tmp_path / "cut").rglob("papermill.log")).read_text(encoding="utf-8")
    assert again == log  # nothing ran for it
    changed = subprocess.run([*cut, "-p", "margin=0.3"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert changed.returncode == 2 and "a receipt with other parameters" in changed.stderr
