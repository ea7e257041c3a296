"""The queue of trials: order, searches in between, what fails, and going on. Runs are pretended; the queue is real."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner
from itm_lab.experiments.runner import Job
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import make_receipt, write_receipt

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

    def run(*options: str, queue: str = QUEUE, breaks: str = "") -> tuple[int, str, list[str]]:
        started: list[str] = []

        def start(job: Job) -> SimpleNamespace:
            given = job.parameters
            started.append(f"{given['variant']} s{job.seed}")
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "papermill.log").write_text("said\n", encoding="utf-8")
            if started[-1] == breaks:
                return SimpleNamespace(poll=lambda: 1, returncode=1)
            about = {"chapter": job.experiment.chapter, "variant": given["variant"], "seed": job.seed}
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


SEARCH = [f"A learning_rate={rate} s100" for rate in ("0.002", "0.004", "0.008")]


def test_a_queue_runs_in_its_order_and_searches_where_it_must(itm_queue) -> None:
    code, said, started = itm_queue("--jobs", "1")
    assert code == 0, said
    assert started == [*SEARCH, "B s5", "C s5", "C s6", "A s5", "A s6", "B s6"]
    assert "scan/f30k/rates takes learning_rate=0.004" in said
    assert itm_queue("--jobs", "2")[2] == []  # nothing is run again
    _, said, _ = itm_queue("--dry-run")
    assert said.splitlines()[0] == "scan/f30k/follows: 1 of 1 seeds" and "scan/f30k/plain: 2 of 2 seeds" in said


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


def test_other_options_do_not_go_with_a_queue(itm_queue) -> None:
    code, said, _ = itm_queue("--seeds", "1")
    assert code == 2 and "only --jobs, --receipts, --dirty and --dry-run" in said
