"""``itm run --cluster``: jobs of a stand-in for SLURM and of submitit's local executor, which train real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from slurm_stand_in import install, state_of
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import cluster, runner
from itm_lab.experiments.cluster import ClusterRun, Queue, read_options
from itm_lab.records.receipts import read_receipt
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
ITM = str(Path(sys.executable).with_name("itm"))
SMALL = {"width": 16, "word_dim": 8, "batch_size": 4, "device": "cpu", "num_workers": 0}
WAIT = 300


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout of its own with a small Flickr30K, beside which there is a cluster."""
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(install(tmp_path / "slurm")) + os.pathsep + os.environ["PATH"])
    root = tmp_path / "book"
    root.mkdir()
    for name in ("_toc.yml", "book", "notebooks", "pyproject.toml", "experiments"):
        (root / name).symlink_to(ROOT / name)
    data = write_toy_dataset(root / "data/f30k_precomp", {"train": 40, "dev": 10, "test": 10}, regions=6, width=16)
    (data / "toy_vocab.json").rename(data / "f30k_precomp_vocab.json")
    monkeypatch.chdir(root)
    yield root
    for path in (tmp_path / "slurm").glob("*.json"):  # a test that failed must leave nothing behind
        (tmp_path / "slurm" / f"{path.stem}.lost").touch()
        state = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(state | {"state": "CANCELLED"}), encoding="utf-8")


def command(*names: str, receipts: str = "receipts", more: tuple[str, ...] = (), **changes: object) -> list[str]:
    given = [word for name, value in (SMALL | changes).items() for word in ("-p", f"{name}={value}")]
    return [ITM, "run", *names, *given, "--receipts", receipts, "--dirty", *more]


ON_SLURM = ("--cluster", "slurm", "--gpus", "0", "--hours", "1", "--slurm", "partition=some")


def ran(arguments: list[str], code: int = 0) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)


def ranks(root: Path, receipts: str) -> dict[str, object]:
    found = {path.name: read_receipt(path) for path in sorted((root / receipts).rglob("*_s?.json"))}
    return {name: (receipt["ranks"], receipt["metrics"]["rsum"]["value"]) for name, receipt in found.items()}


@pytest.mark.slow
def test_a_job_is_queued_again_at_its_limit_and_when_its_node_is_lost(book: Path, tmp_path: Path) -> None:
    """It goes on from a checkpoint of the moment, and ends with the ranks of a run that nobody disturbed."""
    long = {"epochs": 60, "variant": "VSE++"}
    ran(command("vsepp/f30k/vsepp", receipts="expected", run_dir="runs/whole", **long))
    folder, slurm = book / "runs/cut/s0", tmp_path / "slurm"
    running = subprocess.Popen(
        command("vsepp/f30k/vsepp", run_dir="runs/cut", more=ON_SLURM, **long), stdout=subprocess.PIPE, text=True
    )
    until(lambda: runner.last_step(folder / "log.jsonl") > 40 if (folder / "log.jsonl").exists() else 0, running)
    (slurm / "1.limit").touch()
    until(lambda: state_of(slurm, 1)["starts"] == 2, running)
    saved = max(folder.rglob("step-*.safetensors"))
    step = int(saved.stem.removeprefix("step-"))
    assert step % 20 == 0 and not (folder / ".save-now").exists()
    until(lambda: runner.last_step(folder / "log.jsonl") > step + 40, running)
    (slurm / "1.lost").touch()
    assert running.wait(WAIT) == 0, running.stdout and running.stdout.read()
    assert state_of(slurm, 1)["state"] == "COMPLETED" and state_of(slurm, 1)["starts"] == 3
    assert ranks(book, "receipts") == ranks(book, "expected") != {}
    options = state_of(slurm, 1)["options"]
    assert options["time"] == "60" and options["partition"] == "some" and "gpus-per-node" not in options
    assert "finished" in ran([ITM, "run", "--status"])
    assert "receipt is there, kept" in ran(command("vsepp/f30k/vsepp", run_dir="runs/cut", more=ON_SLURM, **long))


@pytest.mark.slow
def test_a_job_that_fails_for_good_is_named_and_stops_no_other(book: Path, tmp_path: Path) -> None:
    broken = command("vsepp/f30k/vsepp", learning_rate=1e30, epochs=1, run_dir="runs/x", more=ON_SLURM, variant="VSE++")
    said = ran(broken, code=1)
    assert "job 1 FAILED" in said and "runs/x/s0/papermill.log" in said
    assert state_of(tmp_path / "slurm", 1)["starts"] == 1
    fine = command("vsepp/f30k/vsepp", epochs=1, run_dir="runs/y", more=(*ON_SLURM, "--seeds", "0-1"), variant="VSE++")
    ran(fine)
    lines = ran([ITM, "run", "--status"]).splitlines()
    assert [line.split()[1] for line in lines] == ["failed", "finished", "finished"]
    assert len(ranks(book, "receipts")) == 2


@pytest.mark.slow
def test_runs_that_share_a_stage_wait_for_each_other_in_the_queue(book: Path, tmp_path: Path) -> None:
    """Stage one of DCPA is trained by the first job; the second, which depends on it, finds it."""
    small = {"inter_epochs": 1, "inter_batch_size": 4, "epochs": 1, "text_backbone": "gru"}
    given = {name: value for name, value in SMALL.items() if name != "width"} | small
    options = [word for name, value in given.items() for word in ("-p", f"{name}={value}")]
    names = ["dcpa/f30k/intra", "dcpa/f30k/two_stages"]
    call = [ITM, "run", *names, *options, "--seeds", "0", "--receipts", "receipts", "--dirty", *ON_SLURM]
    said = ran(call)
    slurm = tmp_path / "slurm"
    assert "dependency" not in state_of(slurm, 1)["options"]
    assert state_of(slurm, 2)["options"]["dependency"] == "afterany:1" and "job 2 after 1" in said
    assert [state_of(slurm, number)["state"] for number in (1, 2)] == ["COMPLETED", "COMPLETED"]
    assert len(ranks(book, "receipts")) == 2
    trained = [log for log in (book / "runs").rglob("log.jsonl") if log.parent.name == "intra"]
    assert len(trained) == 1


@pytest.mark.slow
def test_who_interrupts_leaves_the_jobs_and_the_next_call_waits_for_them(book: Path, tmp_path: Path) -> None:
    call = command("vsepp/f30k/vsepp", epochs=40, run_dir="runs/z", more=ON_SLURM, variant="VSE++")
    running = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: (book / "runs/z/s0/log.jsonl").exists(), running)
    os.kill(running.pid, signal.SIGTERM)
    said = running.communicate(timeout=WAIT)[0]
    assert running.returncode == 2 and "1 jobs stay in the queue" in said
    assert "running" in ran([ITM, "run", "--status"])
    other = command("vsepp/f30k/vsepp", epochs=41, run_dir="runs/z", more=ON_SLURM, variant="VSE++")
    assert "job 1 with other parameters" in ran(other, code=2)
    assert "job 1 is in the queue" in ran(call)
    assert len(list((tmp_path / "slurm").glob("*.json"))) == 1 and len(ranks(book, "receipts")) == 1


@pytest.mark.slow
def test_jobs_run_on_this_machine_too(book: Path) -> None:
    local = ("--cluster", "local", "--gpus", "0", "--hours", "1", "--seeds", "0-1", "--jobs", "2")
    ran(command("vsepp/f30k/vsepp", epochs=1, run_dir="runs/l", more=local, variant="VSE++"))
    assert len(ranks(book, "receipts")) == 2
    long = command("vsepp/f30k/vsepp", epochs=100_000, run_dir="runs/m", more=local, variant="VSE++")
    running = subprocess.Popen(long, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(list((book / "runs/m").rglob("log.jsonl"))) == 2, running)
    family = psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 2
    assert not psutil.wait_procs(family, timeout=60)[1]


# ---------------------------------------------------------------- without jobs


def test_what_sbatch_refuses_is_one_clear_line(book: Path) -> None:
    call = command("vsepp/f30k/vsepp", run_dir="runs/n", more=("--cluster", "slurm", "--slurm", "partition=nowhere"))
    said = ran(call, code=2)
    assert "invalid partition specified: nowhere" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "pbs"], "--cluster: found 'pbs', expected one of slurm, local"),
        (["--cluster", "slurm", "--hours", "0"], "--hours: found 0.0"),
        (["--cluster", "slurm", "--slurm", "partition"], "--slurm: found 'partition', expected an option of sbatch"),
        (["--cluster", "slurm", "--slurm", "a b=c"], "--slurm: found 'a b=c'"),
        (["--cluster", "slurm", "--gpus", "8"], "--processes: found 8 for batches of 4"),
        (["--processes", "3"], "--processes: found 3 for batches of 4, expected at least 2 rows"),
        (["--queue", "--cluster", "slurm"], "itm run --queue: its file says what is run"),
    ],
)
def test_requests_that_cannot_be(options: list[str], message: str, book: Path) -> None:
    given = [] if "--queue" in options else command("vsepp/f30k/vsepp", run_dir="runs/q")[2:]
    result = CliRunner().invoke(app, ["run", *given, *options])
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (book / "runs/q").exists()


def test_options_of_sbatch() -> None:
    assert read_options(["partition=gpu", "mail-type=END"]) == {"partition": "gpu", "mail-type": "END"}


def test_a_list_of_jobs_that_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.folder.mkdir(parents=True)
    for content in ("{", "[]", '{"a": {"id": 1}}'):
        queue.path.write_text(content, encoding="utf-8")
        with pytest.raises(ItmError, match=r"jobs\.json: found a damaged file"):
            queue.sent()


def test_nothing_was_sent(book: Path) -> None:
    assert ran([ITM, "run", "--status"]).strip() == "no jobs were sent from here"


def test_a_job_waits_for_its_training_to_save_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SAVE_PATIENCE", 0.2)
    monkeypatch.setenv(cluster.SAVE_REQUEST, str(tmp_path / ".save-now"))
    again = ClusterRun(SimpleNamespace(), tmp_path, False).checkpoint()  # pyright: ignore
    assert isinstance(again.function, ClusterRun) and (tmp_path / ".save-now").exists()
