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
import psutil
import pytest
import torch
import yaml
from forked_runs import itm as itm_here
from killing import listens_to_interrupts
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.evidence.run_tables import table_of
from itm_lab.experiments import runner as running
from itm_lab.experiments.cost import Costs, described
from itm_lab.experiments.ensembles import ensemble_of, is_averaged, run_ensembles
from itm_lab.experiments.experiment_files import (
    expand,
    experiments_of_table,
    find_experiment,
    read_experiments,
    read_overrides,
    read_seeds,
)
from itm_lab.experiments.plan import plan
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
)
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import Evidence, make_receipt, read_receipt, receipt_path, seal_of, write_receipt
from itm_lab.records.scores import save_scores, write_scores
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import evaluate, fold_ranks

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = read_experiments(ROOT)
TABLES = sorted({table for experiment in EXPERIMENTS.values() for table in experiment.tables})
# What makes a paper-scale experiment small enough for a test; epochs, schedule and everything else stay as published.
SMALL = ["width=16", "word_dim=8", "batch_size=4", "device=cpu", "num_workers=0"]


def experiment_of(name: str):
    return find_experiment(ROOT, name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_fits_its_notebook(name: str) -> None:
    found = EXPERIMENTS[name]
    chapter, dataset, _ = name.split("/")
    assert found.chapter.endswith(f"_{chapter}") and found.path.name == f"{chapter}.yaml"
    assert found.table, "stands in no table"
    assert found.about and found.settings["variant"]
    assert found.settings["teach"] is False
    assert found.settings["run_dir"] == f"runs/{name}"
    assert Path(found.settings["dataset"]).name in (dataset, f"{dataset}_precomp")
    # What `itm run` adds to the settings of the file is a folder for each seed, and nothing else.
    (job,) = make_jobs(found, [found.values()["seed"]], {})
    differing = {key: value for key, value in job.parameters.items() if value != found.values()[key]}
    assert differing == {"run_dir": f"runs/{name}/s{job.seed}"}


FILE = """
base: {teach: false, margin: 0.1, table: a/b}
groups:
  small: {width: 8, word_dim: 4, note: for quick runs}
  tiny: {extends: small, width: 4}
variants:
  one: {extends: [tiny, warm], variant: One, about: The first}
  two: {extends: one, variant: Two}
datasets:
  scenes:
    base: {extends: small, dataset: scenes, seeds: 5-7}
    groups:
      warm: {warmup_epochs: 2}
    variants:
      one: {}
      two: {margin: 0.2, width: 16}
"""


def test_an_experiment_is_what_its_file_says_level_by_level(tmp_path: Path) -> None:
    path = tmp_path / "scan.yaml"
    path.write_text(FILE, encoding="utf-8")
    (_, first, one), (_, second, two) = expand(path)
    shared = {"teach": False, "table": "a/b", "word_dim": 4, "dataset": "scenes", "seeds": "5-7", "warmup_epochs": 2}
    assert (first, one) == ("one", shared | {"margin": 0.1, "width": 4, "variant": "One", "about": "The first"})
    assert (second, two) == ("two", shared | {"margin": 0.2, "width": 16, "variant": "Two"})  # notes are not taken over


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "scan.yaml: found a list, expected a mapping of base, groups, variants, datasets"),
        ("base: {}\nvariant: {}", "scan.yaml: found variant, expected a mapping of"),
        ("base: {", "found no YAML"),
        ("datasets: {scenes: {variant: {}}}", "scan.yaml, scenes: found variant, expected"),
        (
            "datasets: {scenes: {variants: {a: {extends: b}}}}",
            "found extends: b, expected the name of a group or variant",
        ),
        ("datasets: {scenes: {variants: {a: {extends: b}, b: {extends: a}}}}", "found a extends b extends a"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "scan.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ItmError, match=re.escape(message)):
        expand(tmp_path / "scan.yaml")


@pytest.mark.parametrize(
    "content", [FILE.encode("utf-16"), b"base: " + b"[" * 200_000, b"\xff\xff"], ids=["16", "deep", "bytes"]
)
def test_a_file_of_other_bytes_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "scan.yaml").write_bytes(content)
    with pytest.raises(ItmError, match=r"scan\.yaml: found") as caught:
        expand(tmp_path / "scan.yaml")
    assert "\n" not in str(caught.value)


def itm(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_a_recipe_is_all_that_a_run_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, text = itm("recipe", "scan/f30k/t2i_avg", "-p", "seed=7", "-p", "width=16")
    (job,) = plan(ROOT, ["scan/f30k/t2i_avg"], "", "7", ["width=16"], [])
    assert code == 0 and yaml.safe_load(text) == job.parameters
    code, text = itm("recipe", "--list")
    assert code == 0 and [line.partition(":")[0] for line in text.splitlines()] == list(EXPERIMENTS)
    code, text = itm("recipe", "scan/scenes/t2i_avg", "dcpa/f30k/intra", "--write", str(tmp_path))
    for name in ("scan/scenes/t2i_avg", "dcpa/f30k/intra"):
        written = yaml.safe_load((tmp_path / f"{name}.yaml").read_text(encoding="utf-8"))
        seed = written["seed"]
        assert written == EXPERIMENTS[name].values() | {"run_dir": f"runs/{name}/s{seed}"}
    assert itm("recipe")[0] == 2


@pytest.mark.parametrize("name", ["scan/scenes/t2i_avg", "dcpa/f30k/intra", "aoq/coco/vsrn_alpha_0.2"])
def test_the_command_that_is_shown_gives_papermill_the_run_as_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (job,) = plan(ROOT, [name], "", "3", ["learning_rate=0.5", "teach=true", "run_dir=runs/else where"], [])
    asked = re.search(r'-y "\$\(itm (.+)\)"$', shown(job))[1]
    code, text = itm(*shlex.split(asked))
    assert code == 0 and yaml.safe_load(text) == job.parameters
    assert shown(job).startswith("mkdir -p 'runs/else where/")  # papermill makes no folders


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("mmca/table_1", ["mmca/f30k/full"]),
        ("mmca/table_3", ["mmca/coco/full"]),
        ("mmca/table_5", ["mmca/coco/full", *(f"mmca/coco/{width}_width" for width in ("half", "double", "quarter"))]),
        ("mmca/table_6", ["mmca/f30k/full", *(f"mmca/f30k/alpha_{alpha}" for alpha in (0.1, 0.4, 0.8))]),
    ],
)
def test_a_row_may_stand_in_several_tables(table: str, rows: list[str]) -> None:
    assert [found.name for found in experiments_of_table(ROOT, table)] == rows


def test_the_variants_of_a_dataset_have_different_names() -> None:
    names = [(one.chapter, one.settings["dataset"], one.settings["variant"]) for one in EXPERIMENTS.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan/f30k"], "no such experiment"),
        (["scan/scenes/t2i_avg", "-p", "widths=3"], "Did you mean width?"),
        (["scan/scenes/t2i_avg", "-p", "width=wide"], "parameter width: found 'wide', expected an int"),
        (["scan/scenes/t2i_avg", "-p", "teach=1"], "true or false"),
        (["scan/scenes/t2i_avg", "-p", "width"], "name=value"),
        (["scan/scenes/t2i_avg", "--seeds", "4-2"], "--seeds"),
        (["scan/f30k/t2i_avg", "-p", "dataset=no/such/folder"], "no such folder"),
        (["--table", "scan/table_9"], "one of"),
        (["scan/scenes/t2i_avg", "--table", "scan/table_1"], "not both"),
        (["scan/scenes/t2i_avg", "--search", "width"], "name=a,b,c"),
        (["scan/scenes/t2i_avg", "--grid", "width"], "--grid: found 'width', expected name=a,b,c"),
        (["scan/scenes/t2i_avg", "--grid", "width=8,wide"], "parameter width: found 'wide'"),
        (["scan/scenes/t2i_avg", "--grid", "width=8,16", "--seeds", "0-4"], "without --search and --seeds"),
        (["scan/scenes/t2i_avg", "--grid", "width=8,16", "-p", "seed=3"], "without --search and --seeds"),
        (["scan/scenes/t2i_avg", "--grid", "width=8", "--grid", "width=16"], "--grid: found width twice"),
        (["scan/scenes/t2i_avg", "--search", "width=8,16", "--seeds", "0-4"], "--search without a seed"),
        (["scan/scenes/t2i_avg", "--search", "width=8,16", "-p", "seed=3"], "--search without a seed"),
        (["scan/scenes/t2i_avg", "--search", "width=8", "--search", "width=16"], "--search: found width twice"),
        *(
            (["scan/scenes/t2i_avg", option, f"{name}={value}"], f"{option}: found the parameter {name}, expected")
            for option in ("--search", "--grid")
            for name, value in (
                ("seed", 1),
                ("dataset", "a,b"),
                ("device", "cpu,cuda"),
                ("num_workers", 2),
                ("variant", "x"),
            )
        ),
        (["scan/f30k/t2i_avg", "--dry-run", "--gpu", "Voodoo"], "--gpu"),
        *(
            (
                ["dcpa/f30k/two_stages", "-p", f"stage_one={folder}"],
                f"stage_one: found '{folder}', expected no braces but",
            )
            for folder in ("runs/{x}", "runs/{seed}/{}", "runs/{", "runs/{seed.__class__}")
        ),
        *(
            (
                [name, "-p", wrong, *more],
                f"{name}, {wrong.partition('=')[0]}: found {wrong.partition('=')[2]}, expected a",
            )
            for more in (["--dry-run"], ["--print"], [])
            for name, wrong in (
                ("scan/f30k/t2i_avg", "batch_size=0"),
                ("scan/f30k/t2i_avg", "width=0"),
                ("scan/f30k/t2i_avg", "epochs=-3"),
                ("scan/scenes/t2i_avg", "epochs=0"),
                ("scan/f30k/t2i_avg", "learning_rate=nan"),
                ("mmca/f30k/full", "validate_every=-1"),
                ("mmca/f30k/full", "heads=0"),
                ("dcpa/f30k/two_stages", "inter_batch_size=0"),
                ("dcpa/f30k/two_stages", "train_fraction=-0.5"),
                ("aoq/f30k/vsrn_adapoffquin", "first_epochs=0"),
                ("aoq/f30k/vsrn_adapoffquin", "miner_width=-1"),
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
    result = CliRunner().invoke(app, ["run", "scan/scenes/t2i_avg", "--jobs", "-1", "--print"])
    assert result.exit_code == 2 and "--jobs" in result.output


def test_an_experiment_with_a_wrong_parameter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (tmp_path / "experiments").mkdir()
    path = tmp_path / "experiments/scan.yaml"
    for wrong, message in (
        ("temperture: 9.0", "scan/scenes/bad: found the parameter temperture, .+ Did you mean temperature"),
        ("width: '64'", "scan/scenes/bad: found width = '64', expected a value of type int"),
        ("width: 0", "scan/scenes/bad, width: found 0, expected a whole number from 1 up"),
        ("device: gpu", "scan/scenes/bad, device: found 'gpu', expected one of auto, cpu, cuda, mps"),
    ):
        path.write_text(f"datasets: {{scenes: {{variants: {{bad: {{{wrong}}}}}}}}}\n", encoding="utf-8")
        os.utime(path, ns=(0, hash(wrong) % 10**9))  # files within one tick of the clock are read anew all the same
        with pytest.raises(ItmError, match=message):
            read_experiments(tmp_path)


def test_other_settings_are_another_variant_in_another_folder() -> None:
    scan = experiment_of("scan/scenes/t2i_avg")
    plain, wide = (make_jobs(scan, [5], read_overrides(scan, pairs))[0] for pairs in ([], ["width=32"]))
    elsewhere = make_jobs(scan, [5], read_overrides(scan, ["device=cuda"]))[0]
    assert wide.parameters["variant"] == "SCAN t2i AVG width=32"
    assert elsewhere.parameters["variant"] == plain.parameters["variant"] == "SCAN t2i AVG"
    assert len({job.parameters["run_dir"] for job in (plain, wide)}) == 2
    assert "-p width=32" in shown(wide) and "-p width" not in shown(plain)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("vsepp/f30k/vsepp", "hardest=false"),
        ("vsepp/f30k/vse0", "hardest=true"),
        ("mmca/f30k/full", "text_layers=-2"),
        ("mmca/f30k/full", "text_layers=0,-1"),
        ("mmca/f30k/full", "width=64"),
        ("vsepp/f30k/vsepp", "learning_rate=1"),
        *(
            ("vsepp/f30k/vsepp", f"variant={variant}")
            for variant in ("2024", "1e3", "nan", "True", "None", "-p", "", "VSE++ a b")
        ),
    ],
)
def test_papermill_reads_what_was_planned(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads YAML, in which ``false`` is no text, and 2024 a number."""
    given: dict[str, object] = {}
    monkeypatch.setattr(papermill.cli, "execute_notebook", lambda **call: given.update(call["parameters"]))
    monkeypatch.chdir(ROOT)
    (job,) = plan(ROOT, [name], "", "0", [change], [])
    program, *arguments = job.command()
    ended = click.testing.CliRunner().invoke(papermill.cli.papermill, arguments, catch_exceptions=False)
    assert program == "papermill" and ended.exit_code == 0, ended.output
    assert repr(given) == repr(job.parameters)  # True is no 1 here


def test_a_search_is_judged_on_dev_with_a_seed_of_its_own() -> None:
    scan = experiment_of("scan/scenes/t2i_avg")
    rate = scan.settings["learning_rate"]
    jobs = search_jobs(scan, {"learning_rate": [0.001, 0.5], "width": [32]}, {})
    tried = [(job.parameters["learning_rate"], job.parameters["width"]) for job in jobs]
    assert tried == [(0.001, 64), (0.5, 64), (rate, 32)]
    assert jobs[0].parameters["variant"] == "SCAN t2i AVG learning_rate=0.001"
    assert {job.parameters["evaluate_on"] for job in jobs} == {"dev"}
    assert {job.seed for job in jobs}.isdisjoint(read_seeds(scan.seeds))


def test_a_grid_is_every_combination_each_with_its_own_seed() -> None:
    both = experiment_of("ccr_ccs/scenes/scan_ccr_ccs")
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
    variants = {
        "ccr_ccs": [*grid, "ccs_weight=0.1,1", "ccs_margin=0,0.1,0.2"],
        "ccr": grid,
        "ccs": ["ccs_margin=0,0.1"],
    }
    names = {variant: f"ccr_ccs/scenes/scan_{variant}" for variant in (*variants, "baseline")}
    jobs = [job for variant in variants for job in plan(ROOT, [names[variant]], "", "", [], [], variants[variant])]
    assert len(jobs) == 36 + 6 + 2
    jobs += plan(ROOT, [names["baseline"]], "", "100-135", ["evaluate_on=dev"], [])
    searched = [expected_receipt(job, tmp_path) for job in jobs]
    assert {path.parent for path in searched} == {tmp_path / "11_ccr_ccs/search"}
    tables = [job for name in names.values() for job in plan(ROOT, [name], "", "", [], [])]
    places = [*searched, *(expected_receipt(job, tmp_path) for job in tables)]
    assert len(set(places)) == len(places) == 44 + 36 + 40  # ten seeds of each of the four
    assert len({job.folder for job in (*jobs, *tables)}) == len(places)


def test_runs_that_share_a_folder_take_turns() -> None:
    names = ["ccr_ccs/f30k/scan_baseline", "ccr_ccs/f30k/scan_ccr_ccs", "ccr_ccs/f30k/saf_baseline"]
    base, both, other = plan(ROOT, names, "", "0", [], [])
    assert next_jobs([base, both, other], [], 2) == [base, other]
    assert next_jobs([both, other], [base], 2) == [other]
    assert next_jobs([both], [other], 2) == [both]
    assert next_jobs([other], [base, both], 2) == []
    two, intra = plan(ROOT, ["dcpa/f30k/two_stages", "dcpa/f30k/intra"], "", "0", [], [])
    assert next_jobs([two, intra], [], 2) == [two]  # whoever comes first trains stage one
    assert next_jobs([intra], plan(ROOT, ["dcpa/f30k/two_stages"], "", "1", [], []), 2) == [intra]


def test_an_experiment_that_changes_while_its_runs_wait_changes_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("notebooks", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    names, path = ["scan/scenes/t2i_avg", "scan/scenes/i2t_avg"], tmp_path / "experiments/scan.yaml"
    path.parent.mkdir()
    before = (ROOT / "experiments/scan.yaml").read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")
    jobs = plan(tmp_path, names, "", "5-6", ["width=16"], [])
    planned = [dict(job.parameters) for job in jobs]
    started: list[list[str]] = []

    def papermill(command: list[str], **how: object) -> subprocess.Popen:
        started.append(command)
        if len(started) == 1:  # while the first run is under way
            path.write_text(re.sub("epochs: .*", "epochs: 99", before), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running.subprocess, "Popen", papermill)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    assert run_jobs(jobs, tmp_path / "receipts", at_a_time=1) == []
    given = [yaml.safe_load(command[command.index("-y") + 1]) for command in started]
    assert given == planned and {one["width"] for one in given} == {16} and 99 not in {one["epochs"] for one in given}


def test_one_name_for_two_runs_is_refused_before_any_of_them_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "start", lambda job: pytest.fail(f"{job.label} was started"))
    places = [f"dataset={fake(tmp_path / 'f30k', 'test')}", f"run_dir={tmp_path / 'run'}"]
    names = ["vsepp/f30k/vsepp", "vsepp/f30k/vse0"]
    jobs = plan(ROOT, names, "", "0", [*places, "variant=smoke"], [])
    with pytest.raises(ItmError, match=r"smoke_f30k_s0\.json: found the receipt of two runs, of vsepp/f30k/vsepp and"):
        run_jobs(jobs, tmp_path / "receipts", at_a_time=2)
    with pytest.raises(ItmError, match="the receipt of two runs"):
        run_jobs(plan(ROOT, names[:1], "", "3,3", places, []), tmp_path / "receipts", at_a_time=2)


def test_a_receipt_that_cannot_be_collected_stops_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    data, results = fake(tmp_path / "f30k", "test"), tmp_path / "receipts"
    first, second = plan(ROOT, ["vsepp/f30k/vsepp"], "", "0-1", [f"dataset={data}", f"run_dir={tmp_path / 'r'}"], [])

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
        "chapter": job.experiment.chapter,
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
        jobs = plan(ROOT, ["scan/f30k/t2i_avg", "scan/f30k/i2t_avg"], "", "0", given, [])
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
    """They are from before ranks were noted. Twins, of two seeds of one variant, are made by ``itm ensemble`` alone."""
    paths = [path for path in sorted((ROOT / "receipts").rglob("*ensemble*.json")) if "twin" not in path.name]
    assert len(paths) >= 19
    for path in paths:
        receipt = read_receipt(path)
        named = [member.rpartition(", seed ") for member in receipt["parameters"]["members"]]
        members = [
            receipt_path(receipt | {"variant": variant, "seed": seed}, ROOT / "receipts") for variant, _, seed in named
        ]
        assert is_averaged(path, [read_receipt(member) for member in members])
    jobs = plan(ROOT, ["scan/scenes/i2t_avg", "scan/scenes/t2i_avg"], "", "5-9", [], [])
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
    # The table is of what was run, although the same variants have receipts on test.
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
            dataset = {"name": "coco", "split": split, "fingerprint": str(images)[0] * 64}
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
    ended = subprocess.run(command("vsepp/f30k/vsepp", data, tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "test_ims.npy: found images of shape (36, 16), expected (36, 32), as in train." in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_of_other_captions_starts_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word would be ``<unk>``, and nobody would notice but the recalls."""
    data = fake(tmp_path / "f30k", "test")
    Vocabulary.build(["un chien court"] * 4).save(data / "toy_vocab.json")
    monkeypatch.setattr(running, "start", lambda job: pytest.fail(f"{job.label} was started"))
    jobs = plan(ROOT, ["vsepp/f30k/vsepp"], "", "0", [f"dataset={data}", f"run_dir={tmp_path / 'run'}"], [])
    with pytest.raises(
        ItmError, match=r"train_caps\.txt: found that the vocabulary knows only 0% of its frequent words"
    ):
        run_jobs(jobs, tmp_path / "receipts", at_a_time=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_may_fetch_its_text_encoder(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chapters of the book are executed offline. A run at paper scale needs BERT, which comes from the model hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    job = plan(ROOT, ["mmca/f30k/full"], "", "", [f"device={device}"], [])[0]
    assert "HF_HUB_OFFLINE" not in running.environment_of(job.parameters)
    assert running.environment_of(job.parameters)["OMP_NUM_THREADS"] == ("1" if device == "cpu" else "8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert running.environment_of(job.parameters)["HF_HUB_OFFLINE"] == "1"
    unnamed = {
        name: value for name, value in job.parameters.items() if name != "device"
    }  # of a run that papermill started
    assert running.environment_of(unnamed)["OMP_NUM_THREADS"] == "1"


def test_seeds() -> None:
    assert read_seeds("0-2,7") == [0, 1, 2, 7]


@pytest.mark.parametrize("text", ["", "2-1", "-1", "0-999999999", "9" * 30, f"0-{'9' * 30}", "1,,2", "9" * 5000])
def test_seeds_that_are_none_or_without_end_are_one_clear_error(text: str) -> None:
    with pytest.raises(ItmError, match="--seeds: found"):
        read_seeds(text)


@pytest.mark.parametrize("table", TABLES)
def test_a_plan_names_every_run_and_its_cost(table: str) -> None:
    jobs = plan(ROOT, [], table, "0-1", [], [])
    lines = list(described(jobs, Costs("RTX 3090"), ROOT / "receipts"))
    assert len(lines) > len(jobs) >= 2
    for job, line in zip(jobs, lines, strict=False):
        assert job.parameters["variant"] in line
        if job.parameters["dataset"] != "scenes":
            took = re.search(r"at least ([\d.]+) (h|min) on one RTX 3090", line)
            assert took and 0 < float(took[1]) < 100, line


def test_a_table_has_means_and_intervals_over_seeds() -> None:
    (job,) = plan(ROOT, ["scan/scenes/t2i_avg"], "", "5", [], [])
    lines = list(table_of(ROOT / "receipts", run_ensembles([job], ROOT / "receipts")))
    assert len(lines) == 2
    assert re.search(r"SCAN t2i AVG +1 model.*\[\d+\.\d, \d+\.\d\]  scenes all 500, (old protocol, )?5 seeds", lines[1])


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


def finished_here(arguments: list[str]) -> str:
    """The same in this process, where neither the command nor papermill nor the kernel is the point."""
    result = itm_here(ROOT, *arguments[1:])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_paper_scale_experiment_runs_to_a_receipt_and_a_row(tmp_path: Path) -> None:
    """Of VSE++; those of the other chapters have a file of tests for themselves."""
    name = "vsepp/coco/vsepp"
    data, variant = fake(tmp_path / "coco", "testall"), experiment_of(name).settings["variant"]
    output = finished(command(name, data, tmp_path, "epochs=2", f"variant={variant}"))
    receipts = [read_receipt(path) for path in sorted((tmp_path / "receipts").rglob("*.json"))]
    assert {receipt["protocol"] for receipt in receipts} == {"all 20", "5 folds of 4"}
    assert {receipt["variant"] for receipt in receipts} == {variant}
    rows = [line for line in output.splitlines() if line.startswith(f"{variant:28} 1 model")]
    assert len(rows) == len(receipts)
    assert f"{receipts[0]['metrics']['rsum']['value']:.1f}" in "".join(rows)


@pytest.mark.slow
def test_two_processes_train_one_run(tmp_path: Path) -> None:
    """To the ranks of one process, and to one receipt; each has its executed notebook."""
    data = fake(tmp_path / "f30k", "test")
    one, two = (
        command("vsepp/f30k/vsepp", data, tmp_path / name, "variant=VSE++", "epochs=2") for name in ("one", "two")
    )
    finished_here(one)
    finished([*two, "--processes", "2"])
    receipts = [
        [read_receipt(path) for path in (tmp_path / name / "receipts").rglob("*.json")] for name in ("one", "two")
    ]
    ((first,), (second,)) = receipts
    assert (
        first["ranks"] == second["ranks"] and first["training"]["captions_seen"] == second["training"]["captions_seen"]
    )
    notebooks = sorted(path.name for path in (tmp_path / "two/run/s0").glob("*.ipynb"))
    assert notebooks == ["01_vsepp-process-2.ipynb", "01_vsepp.ipynb"]


@pytest.mark.slow
def test_of_two_processes_one_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    arguments = command("vsepp/f30k/vsepp", fake(tmp_path / "f30k", "test"), tmp_path, "epochs=100000")
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen([*arguments, "--processes", "2"], cwd=ROOT, **pipes)
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("step-*.safetensors")):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(started.pid).children(recursive=True)
    workers = [process for process in family if any("papermill_process" in word for word in process.cmdline())]
    victim = next(process for process in workers if process.environ().get("RANK") == "1")
    victim.kill()
    said = started.communicate(timeout=60)[1]
    assert started.returncode == 1 and "failed: process 2 of 2 was killed by SIGKILL; the others were ended" in said
    assert not psutil.wait_procs(family, timeout=10)[1]
    step = running_step(tmp_path)  # the first run logged steps after its last checkpoint
    again = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running_step(tmp_path) <= step:
        assert again.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait(60) == 2


def running_step(folder: Path) -> int:
    return max(running.last_step(log) for log in folder.rglob("log.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_goes_on_training_when_the_command_has_ended(number: signal.Signals, tmp_path: Path) -> None:
    arguments = command("vsepp/f30k/vsepp", fake(tmp_path / "f30k", "test"), tmp_path, "epochs=100000")
    before = signal.signal(number, signal.SIG_DFL) if number == signal.SIGHUP else None  # tests may run under nohup
    running = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if number == signal.SIGHUP:
        signal.signal(number, before)
    deadline = time.monotonic() + 300
    while not list(tmp_path.rglob("step-*.safetensors")):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(running.pid).children(recursive=True)
    assert any("ipykernel" in " ".join(process.cmdline()) for process in family)
    os.kill(running.pid, number)
    assert running.wait(60) == (-number if number == signal.SIGKILL else 2)
    assert not psutil.wait_procs(family, timeout=60 if number == signal.SIGKILL else 3)[1]


def test_a_run_without_its_scores_is_opened_again(
    pair: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As an interruption between receipt and scores left it."""
    results, started = tmp_path / "receipts", []
    jobs = pair()
    receipts = {path: path.read_bytes() for path in results.rglob("*.*")}
    scores = [job.folder / "scores.safetensors" for job in jobs]
    scores[0].unlink()
    flipped = bytearray(scores[1].read_bytes())
    flipped[-1] ^= 1
    scores[1].write_bytes(flipped)
    for job in jobs:
        (job.folder / "step-00000001.safetensors").touch()
    with pytest.raises(ItmError, match="`itm run` of the same experiment"):
        run_ensembles(jobs, results)

    def start(job: Job) -> SimpleNamespace:
        started.append(job)
        leave(job)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running, "start", start)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    assert run_jobs(jobs, results, at_a_time=2) == [] and started == jobs
    assert capsys.readouterr().out.count("its scores are not there: computed again") == 2
    assert {path: path.read_bytes() for path in results.rglob("*.*")} == receipts
    run_ensembles(jobs, results)
    scores[0].unlink()  # nobody needs them any more
    assert run_jobs(jobs, results, at_a_time=2) == [] and started == jobs


def test_a_damaged_receipt_in_the_folder_of_a_run_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    data, results = fake(tmp_path / "f30k", "test"), tmp_path / "receipts"
    (job,) = plan(ROOT, ["vsepp/f30k/vsepp"], "", "0", [f"dataset={data}", f"run_dir={tmp_path / 'r'}"], [])
    leave(job)
    expected_receipt(job, job.folder).write_bytes(b"\xff\xfe half a receipt")

    def start(job: Job) -> SimpleNamespace:
        leave(job)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(running, "start", start)
    monkeypatch.setattr(running.time, "sleep", lambda seconds: None)
    assert run_jobs([job], results, at_a_time=1) == []
    assert "It is removed, and written again." in capsys.readouterr().out
    assert read_receipt(expected_receipt(job, results))


@pytest.mark.parametrize("content", [b'{"step": 3}\n\xff\xfe', b'{"step": 3}\n[]', b'{"step": 3}\n' + b"[" * 100_000])
def test_a_log_that_is_damaged_stops_no_bar(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    assert running.last_step(tmp_path / "log.jsonl") == 3


def test_a_failed_run_may_have_said_anything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (job,) = plan(ROOT, ["vsepp/f30k/vsepp"], "", "0", [f"run_dir={tmp_path / 'r'}"], [])
    job.folder.mkdir(parents=True)
    (job.folder / "papermill.log").write_bytes(b"out of memory \xff\xfe \x1b]0;new title\x07\x1b[2J")
    assert not running.finish(job, SimpleNamespace(returncode=1), tmp_path)  # pyright: ignore
    said = capsys.readouterr().err
    assert "failed: out of memory" in said and "\\x1b]0;new title\\x07\\x1b[2J" in said
    assert "\x1b" not in said and "\x07" not in said


def test_an_interrupted_run_goes_on_to_the_same_receipt(tmp_path: Path) -> None:
    data = fake(tmp_path / "f30k", "test")
    whole = command("vsepp/f30k/vsepp", data, tmp_path / "whole", "variant=VSE++")
    cut = command("vsepp/f30k/vsepp", data, tmp_path / "cut", "variant=VSE++")
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
    finished_here(whole)
    one, other = (next((tmp_path / which / "receipts").rglob("*.json")) for which in ("whole", "cut"))
    assert read_receipt(one)["metrics"] == read_receipt(other)["metrics"]
    assert read_receipt(one)["ranks"] == read_receipt(other)["ranks"]
    log = next((tmp_path / "cut").rglob("papermill.log")).read_text(encoding="utf-8")
    assert log.count("Input Notebook") >= 2  # two papermill calls in one log
    assert "kept" in finished_here(cut)  # a third call has nothing to do
    other.unlink()  # as if the interruption had come between the run's end and the collection of its receipt
    finished_here(cut)
    assert read_receipt(other)["metrics"] == read_receipt(one)["metrics"]
    again = next((tmp_path / "cut").rglob("papermill.log")).read_text(encoding="utf-8")
    assert again == log  # nothing ran for it
    changed = itm_here(ROOT, *cut[1:], "-p", "margin=0.3")
    assert changed.exit_code == 2 and "a receipt with other parameters" in changed.output
