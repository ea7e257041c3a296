"""The queue of trials: order, searches in between, what fails, and going on. Runs are pretended; the queue is real."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner
from itm_lab.experiments.experiment_files import Experiment
from itm_lab.experiments.runner import Job
from itm_lab.experiments.trial_queue import TrialQueue
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import make_receipt, read_receipt, write_receipt
from itm_lab.records.scores import save_scores, write_scores
from itm_utils.matcher import Scores

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = """
base: {teach: false, device: cpu}
datasets:
  f30k:
    base: {dataset: data/f30k, seeds: 5-6}
    variants:
      rates: {variant: A, select: {grid: {learning_rate: [0.002, 0.004, 0.008]}, on: dev, seeds: 1}}
      follows: {variant: B, choice_of: rates}
      plain: {variant: C}
"""
QUEUE = """
- {run: scan/f30k/follows, seeds: 5}
- {run: [scan/f30k/plain, scan/f30k/rates]}
- {run: scan/f30k/follows}
"""


@pytest.fixture
def itm_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``itm run --queue`` in a checkout of its own: returns exit code, output and the runs in the order of their start."""
    for name in ("notebooks", "pyproject.toml", "_config.yml", "_toc.yml", "book"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/scan.yaml").write_text(EXPERIMENTS, encoding="utf-8")
    write_toy_dataset(tmp_path / "data/f30k", {"train": 20, "dev": 5, "test": 5}, regions=6, width=8)

    def run(*options: str, queue: str = QUEUE, breaks: str = "", shift: int = 0) -> tuple[int, str, list[str]]:
        started: list[str] = []

        def start(job: Job) -> SimpleNamespace:
            given = job.parameters
            started.append(f"{given['variant']} s{job.seed}")
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "papermill.log").write_text("said\n", encoding="utf-8")
            if started[-1] == breaks:
                return SimpleNamespace(poll=lambda: 1, returncode=1)
            about = {"chapter": job.experiment.chapter, "variant": given["variant"], "seed": job.seed}
            if job.experiment.ensemble or job.experiment.twins:
                leave_scores(job, shift, about)
                return SimpleNamespace(poll=lambda: 0, returncode=0)
            rsum = 300 - 1000 * abs(given["learning_rate"] - 0.004)
            metrics = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)} | {"rsum": rsum}
            receipt = make_receipt(
                **about,
                dataset=job.facts.identity,
                parameters=settings_of(given),
                seconds=1.0,
                device="cpu",
                metrics=metrics,
            )
            write_receipt(receipt, job.folder)
            return SimpleNamespace(poll=lambda: 0, returncode=0)

        (tmp_path / "experiments/queue.yaml").write_text(queue, encoding="utf-8")
        monkeypatch.setattr(runner, "start", start)
        monkeypatch.setattr(runner.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(Job, "steps_done", lambda job: 0)
        result = CliRunner().invoke(app, ["run", "--queue", *options])
        return result.exit_code, result.output, started

    monkeypatch.chdir(tmp_path)
    return run


def leave_scores(job: Job, shift: int, about: dict) -> None:
    """What a run leaves whose scores are averaged; another ``shift`` is another ranking."""
    draw = torch.Generator().manual_seed(job.seed + shift)
    scores = Scores.same(torch.rand(5, 25, generator=draw))
    write_scores(job.folder / "scores.safetensors", scores)
    more = {"dataset": job.facts.identity, "parameters": settings_of(job.parameters), "seconds": 1.0, "device": "cpu"}
    save_scores(scores, np.repeat(np.arange(5), 5), job.folder, {}, **about, **more, rules={})


SEARCH = [f"A learning_rate={rate} s100" for rate in ("0.002", "0.004", "0.008")]


def test_a_queue_runs_in_its_order_and_searches_where_it_must(itm_queue) -> None:
    code, said, started = itm_queue("--jobs", "1")
    assert code == 0, said
    assert started == [*SEARCH, "B s5", "C s5", "C s6", "A s5", "A s6", "B s6"]
    assert "scan/f30k/rates takes learning_rate=0.004" in said
    assert itm_queue("--jobs", "2")[2] == []  # nothing is run again
    _, said, _ = itm_queue("--dry-run")
    assert said.splitlines()[0] == "scan/f30k/follows: 1 of 1 seeds" and "scan/f30k/plain: 2 of 2 seeds" in said


def test_only_what_waited_for_a_run_is_asked_again(itm_queue, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    next_runs = TrialQueue.next_runs

    def noted(queue: TrialQueue, experiment: Experiment, *more) -> list[Job]:
        asked.append(experiment.name)
        return next_runs(queue, experiment, *more)

    monkeypatch.setattr(TrialQueue, "next_runs", noted)
    code, said, started = itm_queue("--jobs", "1")
    assert code == 0 and len(started) == 9, said
    assert (
        asked.count("scan/f30k/plain") == 3
    )  # at the start, and after each of its two runs; not after the other seven


def test_what_needs_no_search_fills_the_second_core(itm_queue) -> None:
    _, _, started = itm_queue("--jobs", "2", queue="- {run: scan/f30k/follows}\n- {run: scan/f30k/plain}\n")
    assert started[:3] == SEARCH and set(started[3:]) == {"B s5", "B s6", "C s5", "C s6"}


def test_a_failed_run_stops_what_needs_it_and_nothing_else(itm_queue) -> None:
    code, said, started = itm_queue("--jobs", "1", breaks=SEARCH[1])
    assert code == 1 and "failed" in said
    assert started == [*SEARCH, "C s5", "C s6"]
    code, said, started = itm_queue("--jobs", "1")  # the next call goes on
    assert code == 0 and started == [SEARCH[1], "B s5", "A s5", "A s6", "B s6"]


def test_a_plan_of_a_queue_says_what_waits_for_a_search(itm_queue) -> None:
    code, said, started = itm_queue("--dry-run")
    assert (code, started) == (0, []) and "scan/f30k/follows: waits for the search of scan/f30k/rates" in said


@pytest.mark.parametrize(
    ("queue", "message"),
    [
        ("{}", "expected a list of"),
        ("- {}", "entry 1: found {}"),
        ("- {run: scan/f30k/plane}", "such as scan/f30k/plain"),
        ("- {run: scan/f30k/plain, seds: 3}", "entry 1"),
        ("- {run: scan/f30k/plain, seeds: none}", "found 'none', expected numbers and ranges"),
        ("- {table: scan/table_9}", "table: found 'scan/table_9'"),
        ("[", "no YAML"),
    ],
)
def test_a_queue_that_cannot_be_is_one_clear_line(queue: str, message: str, itm_queue) -> None:
    code, said, started = itm_queue(queue=queue)
    assert (code, started) == (2, []) and message in said and len(said.strip().splitlines()) == 1


BUILT = """
base: {teach: false, device: cpu, evaluate_on: test}
datasets:
  f30k:
    base: {dataset: data/f30k, seeds: 5-6}
    variants:
      plain: {variant: SCAN baseline, ccr_weight: 0.0, ccs_weight: 0.0}
      ccr: {variant: SCAN CCR, baseline: "runs/ccr_ccs/{dataset}/plain/s{seed}"}
"""


def test_receipts_alone_say_what_is_finished(itm_queue, tmp_path: Path) -> None:
    """Runs happen in another checkout, or their folders were cleaned: what has a receipt is not run again."""
    assert itm_queue("--jobs", "1")[0] == 0
    shutil.rmtree(tmp_path / "runs")
    assert itm_queue("--jobs", "1") == (0, "", [])


def test_what_a_run_builds_on_comes_first_and_again_where_its_folder_is_gone(itm_queue, tmp_path: Path) -> None:
    (tmp_path / "experiments/ccr_ccs.yaml").write_text(BUILT, encoding="utf-8")
    queue = "- {run: ccr_ccs/f30k/ccr, seeds: 5}\n"
    code, said, started = itm_queue("--jobs", "2", queue=queue)
    assert code == 0 and started == ["SCAN baseline s5", "SCAN CCR s5"], said
    shutil.rmtree(tmp_path / "runs")
    assert itm_queue("--jobs", "1", queue=queue)[2] == []
    for path in (tmp_path / "receipts/11_ccr_ccs").glob("SCAN-CCR*"):
        path.unlink()
    code, said, started = itm_queue("--jobs", "1", queue=queue)
    assert code == 0 and started == ["SCAN baseline s5", "SCAN CCR s5"] and said.count("run again: ") == 1
    failed = itm_queue("--jobs", "2", queue="- {run: ccr_ccs/f30k/ccr}\n", breaks="SCAN baseline s6")
    assert failed[0] == 1 and failed[2] == ["SCAN baseline s6"] and "tried again by the next start" in failed[1]


MEMBERS = """
base: {teach: false, device: cpu}
datasets:
  f30k:
    base: {dataset: data/f30k, ensemble: both}
    variants:
      a: {variant: A, seeds: 5-8, twins: twins of A}
      b: {variant: B, seeds: 5-6, direction: i2t}
"""


def test_ensembles_and_twins_are_averaged_as_their_members_end(itm_queue, tmp_path: Path) -> None:
    (tmp_path / "experiments/scan.yaml").write_text(MEMBERS, encoding="utf-8")
    queue = "- {run: [scan/f30k/a, scan/f30k/b]}\n"
    assert itm_queue(queue=queue)[0] == 0
    made = {path.stem for path in (tmp_path / "receipts/02_scan").glob("*.json")}
    assert {f"{name}_f30k_s{seed}" for name in ("both", "twins-of-A") for seed in (5, 6)} <= made and len(made) == 10
    twins = read_receipt(tmp_path / "receipts/02_scan/twins-of-A_f30k_s6.json")
    assert twins["parameters"]["members"] == ["A, seed 6", "A, seed 8"]
    shutil.rmtree(tmp_path / "runs")
    assert itm_queue(queue=queue) == (0, "", [])
    (tmp_path / "receipts/02_scan/both_f30k_s6.json").unlink()
    code, said, started = itm_queue("--jobs", "1", queue=queue)  # two members run again, for their scores
    assert code == 0 and started == ["A s6", "B s6"] and said.count("its scores are needed and not there") == 2
    assert (tmp_path / "receipts/02_scan/both_f30k_s6.json").is_file()


def test_a_run_that_is_made_again_must_have_the_ranks_of_its_receipt(itm_queue, tmp_path: Path) -> None:
    (tmp_path / "experiments/scan.yaml").write_text(MEMBERS, encoding="utf-8")
    queue = "- {run: [scan/f30k/a, scan/f30k/b], seeds: 5}\n"
    assert itm_queue(queue=queue)[0] == 0
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "receipts/02_scan/both_f30k_s5.json").unlink()
    code, said, _ = itm_queue(queue=queue, shift=1)
    assert code == 1 and "other ranks than A_f30k_s5.json has" in said
    assert not (tmp_path / "receipts/02_scan/both_f30k_s5.json").exists()


def test_a_receipt_that_does_not_fit_leaves_the_others(itm_queue, tmp_path: Path) -> None:
    queue = "- {run: [scan/f30k/plain, scan/f30k/follows]}\n"
    assert itm_queue(queue="- {run: scan/f30k/plain, seeds: 5}\n")[0] == 0
    path = tmp_path / "experiments/scan.yaml"
    path.write_text(EXPERIMENTS.replace("variant: C", "variant: C, width: 32"), encoding="utf-8")
    code, said, started = itm_queue("--jobs", "1", queue=queue)
    assert code == 1 and started == ["C s6", *SEARCH, "B s5", "B s6"] and "a receipt with other parameters" in said


def test_other_options_do_not_go_with_a_queue(itm_queue) -> None:
    code, said, _ = itm_queue("--seeds", "1")
    assert code == 2 and "only --jobs, --receipts, --dirty and --dry-run" in said
