"""``itm run --cluster``: jobs of a stand-in for SLURM and of submitit's executor for one machine.

Most jobs pretend to train (``stub_run.py``), since what is tested is their way through the queue; the last tests train.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import slurm_stand_in
from slurm_stand_in import install, remove_jobs, state_of
from stub_run import STEPS, StubRun
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import cluster, runner
from itm_lab.experiments.cluster import FOLDER, RECORD, ClusterRun, Request, Sent, read_options, run_on_cluster, status
from itm_lab.experiments.plan import plan
from itm_lab.experiments.processes import start_dependent
from itm_lab.experiments.runner import Job, expected_receipt
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import make_receipt, read_receipt, write_receipt
from itm_utils.errors import ItmError
from itm_utils.training.checkpoints import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"width": 16, "word_dim": 8, "batch_size": 4, "device": "cpu", "num_workers": 0}
PATIENCE = 600


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster: the folder with its programs and its jobs."""
    from submitit import SlurmJob
    from submitit.slurm.slurm import SlurmInfoWatcher

    folder = install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("SLURM_STAND_IN", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests"))))
    monkeypatch.setattr(SlurmJob, "watcher", SlurmInfoWatcher(delay_s=2))  # one remembers the jobs of other tests
    monkeypatch.setattr(SlurmJob, "_results_timeout_s", 0)  # files are there at once
    monkeypatch.setattr(cluster, "POLL", {"slurm": 0.1, "local": 0.1})
    yield folder
    remove_jobs(folder)


@pytest.fixture
def book(tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own with a small Flickr30K, beside a cluster."""
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "book"
    root.mkdir()
    for name in ("_toc.yml", "book", "notebooks", "pyproject.toml", "experiments"):
        (root / name).symlink_to(ROOT / name)
    data = write_toy_dataset(root / "data/f30k_precomp", {"train": 40, "dev": 10, "test": 10}, regions=6, width=16)
    (data / "toy_vocab.json").rename(data / "f30k_precomp_vocab.json")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs pretend to train."""
    monkeypatch.setattr(cluster, "ClusterRun", StubRun)


def given(**changes: object) -> list[str]:
    return [f"{name}={value}" for name, value in (SMALL | changes).items()]


def pretended(book: Path, folder: str, seeds: str = "0", events: dict[int, dict[int, str]] | None = None) -> list[Job]:
    """Runs of VSE++ whose jobs pretend. events: seed → step → what happens after it."""
    jobs = plan(book, ["vsepp/f30k/vsepp"], "", seeds, given(run_dir=folder, variant="VSE++"), [])
    for job in jobs:
        prepare(job, (events or {}).get(job.seed, {}))
    return jobs


def prepare(job: Job, events: dict[int, str]) -> None:
    """Put what a job pretends into the folder of its run."""
    metrics = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)} | {"rsum": 300.0}
    about = {"chapter": job.experiment.chapter, "variant": job.parameters["variant"], "seed": job.seed}
    about |= {"dataset": job.facts.identity, "parameters": settings_of(job.parameters), "device": "cpu"}
    write_receipt(make_receipt(**about, seconds=1.0, metrics=metrics), job.folder / "prepared")
    (job.folder / "events.json").write_text(json.dumps(events), encoding="utf-8")


def steps_of(job: Job) -> tuple[list[int], list[int]]:
    """The steps that a pretending job went, and after which one each of its starts went on."""
    records = [json.loads(line) for line in (job.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [one["step"] for one in records if "step" in one], [one["began"] for one in records if "began" in one]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(slurm: Path, number: int) -> dict:
    """The state of a job that has ended, a moment after its result is there."""
    until(lambda: state_of(slurm, number)["state"] not in slurm_stand_in.OPEN)
    return state_of(slurm, number)


def states(book: Path) -> list[str]:
    return [line.split("  ")[1].strip() for line in map(str.strip, status(book))]


# ---------------------------------------------------------------- SLURM


def test_a_job_goes_on_after_its_limit_and_after_the_loss_of_its_node(
    book: Path, slurm: Path, stubs: None, capsys: pytest.CaptureFixture
) -> None:
    request = Request("slurm", gpus=2, hours=1.5, options=read_options(["partition=some", "cpus-per-task=3"]))
    (job,) = pretended(book, "runs/a", events={0: {33: "limit", 45: "lost"}})
    assert run_on_cluster([job], book / "receipts", request, 0) == []
    # At the limit it saves where it is; a lost node costs what was done since the last checkpoint.
    assert steps_of(job) == ([*range(1, 46), *range(41, STEPS + 1)], [0, 33, 40])
    known = ended(slurm, 1)
    assert known["state"] == "COMPLETED" and known["starts"] == 3
    options = known["options"]
    assert (options["time"], options["partition"], options["cpus-per-task"]) == ("90", "some", "3")
    assert options["job-name"] == "runs-a-s0" and "requeue" in options and "dependency" not in options
    assert "gpus-per-node" not in options  # it trains on a CPU
    assert " --cpus-per-task=3 " in (slurm / "1.sh").read_text(encoding="utf-8")
    assert read_receipt(expected_receipt(job, book / "receipts"))["seed"] == 0
    assert "VSE++, seed 0: job 1\n" in capsys.readouterr().out
    (line,) = status(book)
    assert line.split() == ["1", "finished", str(STEPS), "of", f"{job.steps:,}", "steps", *job.label.split()]
    assert run_on_cluster([job], book / "receipts", request, 0) == []
    assert "receipt is there, kept" in capsys.readouterr().out and not (slurm / "2.json").exists()


def test_a_job_that_fails_for_good_is_named_and_stops_no_other(
    book: Path, slurm: Path, stubs: None, capsys: pytest.CaptureFixture
) -> None:
    jobs = pretended(book, "runs/b", "0-2", {1: {5: "fail"}, 2: {5: "stall"}})
    jobs[1].log.write_text("one\nValueError: \x1b[2J\n", encoding="utf-8")
    ending = threading.Timer(3, slurm_stand_in.scancel, (slurm, "3"))
    ending.start()
    assert run_on_cluster(jobs, book / "receipts", Request("slurm"), 0) == jobs[1:]
    said = capsys.readouterr().err
    assert f"{jobs[1].label}: job 2 ended as failed: ValueError: \\x1b[2J\n  logs: {jobs[1].log}, " in said
    assert f"{jobs[2].label}: job 3 ended as cancelled: no output\n" in said
    assert state_of(slurm, 2)["starts"] == 1 and steps_of(jobs[1])[0] == [1, 2, 3, 4, 5]
    assert states(book) == ["finished", "failed", "cancelled"]
    prepare(jobs[2], {})
    assert run_on_cluster(jobs, book / "receipts", Request("slurm"), 0) == []  # what is not finished is sent again
    assert steps_of(jobs[1])[1] == [0, 0] and states(book) == ["finished"] * 3
    assert len(slurm_stand_in.numbers(slurm)) == 5


def test_runs_that_share_a_stage_wait_for_each_other_in_the_queue(book: Path, slurm: Path, stubs: None) -> None:
    small = ["batch_size=4", "word_dim=8", "device=cpu", "num_workers=0"]
    jobs = plan(book, ["dcpa/f30k/intra", "dcpa/f30k/two_stages"], "", "0", small, [])
    other = pretended(book, "runs/c")
    for job in jobs:
        prepare(job, {})
    assert run_on_cluster([*jobs, *other], book / "receipts", Request("slurm"), 0) == []
    first, second, third = (ended(slurm, number) for number in (1, 2, 3))
    assert second["options"]["dependency"] == "afterany:1" and second["began"] >= first["ended"]
    assert not any("dependency" in one["options"] for one in (first, third))


def test_whoever_interrupts_leaves_the_jobs_and_the_next_call_waits_for_them(
    book: Path, slurm: Path, stubs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    first, second = pretended(book, "runs/d", "0-1", {0: {5: "stall"}})

    def interrupt(seconds: float) -> None:
        until(lambda: (first.folder / "log.jsonl").exists() and len(steps_of(first)[0]) == 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "time", SimpleNamespace(sleep=interrupt, strftime=time.strftime))
        with pytest.raises(ItmError, match=r"interrupted; the jobs stay in the queue \(`itm run --status`\)"):
            run_on_cluster([first], book / "receipts", Request("slurm"), 0)
    assert states(book) == ["running"]
    (other,) = plan(book, ["vsepp/f30k/vsepp"], "", "0", given(run_dir="runs/d", variant="VSE++", margin=0.3), [])
    assert run_on_cluster([other], book / "receipts", Request("slurm"), 0) == [other]
    assert "found job 1 with other parameters, expected none of this folder. Wait for it" in capsys.readouterr().err
    (slurm / "1.lost").touch()  # what waits a minute in it ends
    assert run_on_cluster([second, first], book / "receipts", Request("slurm"), 0) == []
    assert f"{first.label}: job 1 is in the queue" in capsys.readouterr().out
    assert slurm_stand_in.numbers(slurm) == ["1", "2"] and states(book) == ["finished"] * 2


def test_the_command_sends_waits_and_shows_the_table_and_status_collects_what_was_left(
    book: Path, slurm: Path, stubs: None
) -> None:
    (job,) = pretended(book, "runs/e")
    words = [word for one in given(run_dir="runs/e", variant="VSE++") for word in ("-p", one)]
    sends = ["run", "vsepp/f30k/vsepp", *words, "--seeds", "0", "--cluster", "slurm", "--hours", "0.5", "--dirty"]
    result = CliRunner().invoke(app, sends)
    assert result.exit_code == 0 and f"{job.label}: job 1 has finished" in result.output, result.output
    assert "300.0  f30k_precomp all, 1 seed" in result.output
    assert ended(slurm, 1)["options"]["time"] == "30"
    left = expected_receipt(job, book / "receipts")
    (job.folder / left.parent.name).mkdir()
    left.rename(expected_receipt(job, job.folder))
    shown = CliRunner().invoke(app, ["run", "--status"])
    assert shown.output.split()[-10:-7] == ["1", "finished", str(STEPS)] and read_receipt(left)["seed"] == 0


def test_only_so_many_jobs_are_in_the_queue(book: Path, slurm: Path, stubs: None) -> None:
    jobs = pretended(book, "runs/f", "0-1")
    assert run_on_cluster(jobs, book / "receipts", Request("slurm"), 1) == []
    assert ended(slurm, 2)["began"] > ended(slurm, 1)["began"] and steps_of(jobs[1])[0][-1] == STEPS


def test_what_sbatch_refuses_is_one_clear_line(
    book: Path, stubs: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = pretended(book, "runs/g")
    request = Request("slurm", options={"partition": "nowhere"})
    assert run_on_cluster([job], book / "receipts", request, 0) == [job]
    said = capsys.readouterr().err
    assert "not started: sbatch: found sbatch: error: invalid partition specified: nowhere" in said
    assert list(status(book)) == ["no jobs were sent from here"] and "Traceback" not in said
    monkeypatch.setattr(slurm_stand_in, "PROGRAMS", ())
    monkeypatch.setenv("PATH", str(install(book / "nothing")))
    with pytest.raises(ItmError, match=r"squeue: found .+No such file"):
        cluster.slurm_queue()
    with pytest.raises(ItmError, match="--cluster: found no srun on this machine"):
        Request("slurm")


# ---------------------------------------------------------------- this machine


def test_jobs_take_the_same_way_on_this_machine(book: Path, stubs: None) -> None:
    jobs = pretended(book, "runs/h", "0-2", {0: {7: "signal"}, 1: {7: "fail"}})
    assert run_on_cluster(jobs, book / "receipts", Request("local"), 2) == [jobs[1]]
    assert steps_of(jobs[0]) == ([*range(1, STEPS + 1)], [0, 7])
    assert sorted(states(book)) == ["ended", "finished", "finished"]  # by the numbers of processes, which start again


def test_local_jobs_end_with_the_command(book: Path, stubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = pretended(book, "runs/i", "0-1", {0: {7: "stall"}, 1: {7: "stall"}})
    family: list[psutil.Process] = []
    monkeypatch.setattr(psutil.Process, "children", children_but(psutil.Process().children(recursive=True)))

    def interrupt(place: cluster.Cluster, running: dict) -> list[Job]:
        until(lambda: all((job.folder / "log.jsonl").exists() for job in jobs))
        assert states(book) == ["running", "running"]
        family.extend(psutil.Process().children(recursive=True))
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster.Cluster, "wait", interrupt)
    with pytest.raises(ItmError, match="interrupted; the same command goes on from the last checkpoints"):
        run_on_cluster(jobs, book / "receipts", Request("local"), 2)
    assert len(family) >= 4 and not psutil.wait_procs(family, timeout=10)[1]


# ---------------------------------------------------------------- what a job does


@pytest.fixture
def termination() -> Iterator[None]:
    """What a job makes of SIGTERM ends with the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def sent(book: Path, **changes: object) -> Sent:
    (job,) = plan(book, ["vsepp/f30k/vsepp"], "", "0", given(run_dir="runs/j", variant="VSE++", **changes), [])
    return Sent.of(job, book / "receipts", "slurm")


def test_a_run_is_sent_in_plain_values(book: Path) -> None:
    one = sent(book, epochs=3)
    read = Sent(**json.loads(json.dumps(vars(one))))
    assert read == one
    job = read.job()
    assert job.parameters["epochs"] == 3 and job.root == book and job.experiment.name == "vsepp/f30k/vsepp"
    assert job.steps == one.steps > 0


def test_a_job_does_what_the_command_does_with_one_run(
    book: Path, monkeypatch: pytest.MonkeyPatch, termination: None
) -> None:
    run, results = ClusterRun(sent(book)), book / "receipts"
    job = run.sent.job()
    job.folder.mkdir(parents=True)
    job.save_request.touch()  # left over from the start before

    def start(given: Job) -> SimpleNamespace:
        assert not given.save_request.exists()
        prepare(given, {})
        made = expected_receipt(given, given.folder)
        made.parent.mkdir()
        expected_receipt(given, given.folder / "prepared").rename(made)
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(runner, "start", start)
    run()
    assert read_receipt(expected_receipt(job, results))["seed"] == 0
    run()  # queued again after its end: nothing is started, the folder would be there already
    expected_receipt(job, results).unlink()
    expected_receipt(job, job.folder).unlink()
    monkeypatch.setattr(runner, "start", lambda given: SimpleNamespace(poll=lambda: 1, returncode=1))
    job.log.write_text("loss: found nan\n", encoding="utf-8")
    slept: list[float] = []
    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=slept.append))
    with pytest.raises(ItmError, match="seed 0: failed: loss: found nan"):
        run()
    assert not slept

    def ended_from_outside(given: Job) -> SimpleNamespace:
        os.kill(os.getpid(), signal.SIGTERM)
        return SimpleNamespace(poll=lambda: -signal.SIGTERM, returncode=-signal.SIGTERM)

    monkeypatch.setattr(runner, "start", ended_from_outside)
    with pytest.raises(ItmError):
        run()
    assert slept == [cluster.GRACE]  # in which the job ends, and its run is not called a failure


def children_but(others: list[psutil.Process]) -> Callable[..., list[psutil.Process]]:
    """psutil's method, as if these processes were not there."""
    children = psutil.Process.children
    return lambda process, recursive=False: [one for one in children(process, recursive) if one not in others]


def test_a_job_waits_for_its_training_to_save_and_not_for_ever(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, request = ClusterRun(sent(book)), sent(book).job().save_request
    request.parent.mkdir(parents=True)
    others = psutil.Process().children()  # what other tests of this process have left running
    monkeypatch.setattr(psutil.Process, "children", children_but(others))
    began = time.monotonic()
    again = run.checkpoint()  # nobody trains: nobody is asked
    assert not request.exists() and isinstance(again.function, ClusterRun) and again.function.sent == run.sent
    script = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nos.unlink(sys.argv[1])\n"
    training = subprocess.Popen([sys.executable, "-IS", "-c", script + "time.sleep(60)", str(request)])
    try:
        run.checkpoint()
        assert not request.exists() and time.monotonic() - began < 30
        monkeypatch.setitem(cluster.SAVE_PATIENCE, "slurm", 0.3)
        run.checkpoint()  # it does not look any more
        assert request.exists()
    finally:
        training.kill()
        training.wait()


def test_what_a_run_starts_does_not_die_of_the_warning_that_is_for_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends it to every process, and its default is the end."""
    says = "import signal; print(signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN, flush=True)"
    module = f"import subprocess, sys\n{says}\nsubprocess.run([sys.executable, '-c', {says!r}])\n"
    (tmp_path / "a_run.py").write_text(module, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))
    said = start_dependent(["a_run"], stdout=subprocess.PIPE, text=True).communicate(timeout=PATIENCE)[0]
    assert said.split() == ["True", "True"]


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "pbs"], "--cluster: found 'pbs', expected one of slurm, local"),
        (["--cluster", "slurm", "--hours", "0"], "--hours: found 0.0"),
        (["--cluster", "slurm", "--gpus", "-1"], "--gpus: found -1"),
        (["--cluster", "slurm", "--slurm", "partition"], "--slurm: found 'partition', expected an option of sbatch"),
        (["--cluster", "slurm", "--slurm", "a b=c"], "--slurm: found 'a b=c'"),
        (["--cluster", "slurm", "--slurm", "cpus-per-task=all"], "--slurm: found 'cpus-per-task=all'"),
        (["--cluster", "local", "--slurm", "partition=x"], "--slurm: found options for --cluster local"),
        (["--gpus", "1"], "give --cluster slurm"),
        (["--hours", "2"], "give --cluster slurm"),
        (["--cluster", "slurm", "--gpus", "8", "-p", "device=cuda"], "--processes: found 8 for batches of 4"),
        (["--cluster", "slurm", "--gpus", "1", "--processes", "2", "-p", "device=cuda"], "--processes: found 2"),
        (["--processes", "3"], "--processes: found 3 for batches of 4, expected at least 2 rows"),
        (["--queue", "--cluster", "slurm"], "itm run --queue: its file says what is run"),
    ],
)
def test_requests_that_cannot_be(options: list[str], message: str, book: Path) -> None:
    words = [word for one in given(run_dir="runs/q") for word in ("-p", one)]
    arguments = [] if "--queue" in options else ["vsepp/f30k/vsepp", *words, "--dirty"]
    result = CliRunner().invoke(app, ["run", *arguments, *options])
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (book / "runs").exists()


def test_each_gpu_of_a_job_has_a_process(book: Path) -> None:
    gpu, cpu = (sent(book, batch_size=16, device=name).job() for name in ("cuda", "cpu"))
    request = Request("slurm", gpus=4)
    assert [job.processes for job in request.prepared([gpu, cpu], 0)] == [4, 1]
    assert [job.processes for job in request.prepared([gpu, cpu], 2)] == [2, 2]


def test_the_last_job_of_a_run_counts(book: Path) -> None:
    one = sent(book)
    for name in ("20260101-000000-9", "20260101-000000-10", "20251231-000000-11"):
        path = book / FOLDER / name / RECORD
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(vars(one)), encoding="utf-8")
    (known,) = cluster.sent_from(book).values()
    assert known.id == "10" and known.sent == one


def test_a_record_that_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / FOLDER / "20260101-000000-1" / RECORD
    path.parent.mkdir(parents=True)
    for content in ("{", "[]", '{"cluster": 1}', "[" * 100_000):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ItmError, match=r"run\.json: found a damaged file"):
            list(status(tmp_path))


# ---------------------------------------------------------------- runs that train


def trained(folder: Path) -> tuple[list[str], dict[str, bytes]]:
    """What a run leaves: its log, and every tensor of its last checkpoint."""
    tensors = read_checkpoint(max(folder.glob("step-*.safetensors"))).tensors
    log = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return log, {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if name != "log.records"}


@pytest.mark.slow
def test_a_training_that_was_queued_again_goes_on_bit_for_bit(book: Path, slurm: Path) -> None:
    """It ends with the weights, the log and the ranks of a run that nobody disturbed."""
    names = [(name, given(epochs=10, variant="VSE++", run_dir=f"runs/{name}")) for name in ("whole", "cut")]
    (whole,), (cut,) = (plan(book, ["vsepp/f30k/vsepp"], "", "0", changes, []) for _, changes in names)
    saved: list[str] = []

    def end_the_first_job() -> None:
        until(lambda: cut.steps_done() > 40)
        (slurm / "1.limit").touch()
        until(lambda: state_of(slurm, 1)["starts"] == 2)
        saved.extend(path.stem for path in cut.folder.rglob("step-*.safetensors"))

    ending = threading.Thread(target=end_the_first_job)
    ending.start()
    assert run_on_cluster([cut], book / "receipts", Request("slurm", hours=1), 0) == []
    ending.join()
    assert ended(slurm, 1)["starts"] == 2 and ended(slurm, 1)["state"] == "COMPLETED"
    (step,) = (int(name.removeprefix("step-")) for name in saved)
    assert 40 < step < 500 and step % 20 == 0  # of its own accord it saves after 500 steps, which are all
    assert runner.run_jobs([whole], book / "expected", 1) == []
    assert trained(cut.folder / "train") == trained(whole.folder / "train")
    one, other = (read_receipt(next((book / name).rglob("*.json"))) for name in ("receipts", "expected"))
    assert one["ranks"] == other["ranks"]
