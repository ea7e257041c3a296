"""Evidence comes from a clean checkout: what counts as a change, and what `itm run` does about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import runner
from itm_lab.experiments.clean_start import check_clean, is_evidence
from itm_lab.experiments.plan import plan
from itm_lab.paths import Paths
from itm_lab.records.checkout import Code, changed_files, code_of, git
from itm_lab.records.receipts import make_receipt
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
NAME = "vsepp/scenes/after_warmup"
EXPERIMENTS = """
base: {teach: false, dataset: scenes, device: cpu, seeds: 5-9}
datasets: {scenes: {variants: {after_warmup: {variant: VSE++ hardest after warm-up}}}}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A committed checkout with the book's experiments and notebooks."""
    root = tmp_path / "book of one"
    for folder in ("notebooks", "experiments", "itm_lab", "receipts/01_vsepp", "runs"):
        (root / folder).mkdir(parents=True)
    (root / "notebooks/01_vsepp.ipynb").write_bytes((ROOT / "notebooks/01_vsepp.ipynb").read_bytes())
    (root / "experiments/vsepp.yaml").write_text(EXPERIMENTS)
    for file in ("pyproject.toml", "README.md", "itm_lab/code.py", "receipts/01_vsepp/a.json", "runs/README.md"):
        (root / file).write_text("as committed\n")
    call(root, "init", "-q")
    call(root, "add", "-A")
    call(root, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "All")
    return root


def call(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def jobs(root: Path, *pairs: str, seeds: str = ""):
    return plan(root, [NAME], "", seeds, list(pairs), [], None, root / "receipts")


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("README.md", True),
        ("itm_lab/code.py", True),
        ("itm_lab/new.py", True),
        ("experiments/new.yaml", True),
        ("notebooks/99 new.ipynb", True),
        ("receipts/01_vsepp/a.json", True),  # one that was there is other now
        ("receipts/01_vsepp/b.json", False),
        ("receipts/01_vsepp/choices/c.json", False),
        ("runs/vsepp/scenes/s0/log.jsonl", False),
        ("data/f30k_precomp/test_caps.txt", False),
        ("notes.txt", False),
    ],
)
def test_what_is_a_change(checkout: Path, path: str, counts: bool) -> None:
    before = code_of(Paths(checkout))
    assert before == Code(git(checkout, "rev-parse", "HEAD"), True) and len(before.commit or "") == 40
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path).write_text("changed\n")
    assert code_of(Paths(checkout)) == Code(before.commit, not counts)
    assert changed_files(checkout) == [path] * counts
    call(checkout, "add", "-A")
    staged = counts or path in ("notes.txt",) or path.startswith(("runs/", "data/"))
    assert code_of(Paths(checkout)) == Code(before.commit, not staged)


def test_a_receipt_that_replaces_one_of_the_old_protocol_is_no_change(checkout: Path) -> None:
    """A queue that replaces old receipts would otherwise make its own later runs unclean."""
    old, new = checkout / "receipts/01_vsepp/old.json", checkout / "receipts/01_vsepp/new.json"
    for path, schema in ((old, 3), (new, 4)):
        path.write_text(f'{{\n "schema": {schema},\n "seed": 5\n}}\n')
        path.with_suffix(".npz").write_bytes(b"ranks")
    call(checkout, "add", "-A")
    call(checkout, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "Receipts")
    for path in (old, old.with_suffix(".npz")):
        path.write_text("replaced")
    assert changed_files(checkout) == [] and code_of(Paths(checkout)).clean
    new.with_suffix(".npz").write_bytes(b"other ranks")
    assert changed_files(checkout) == ["receipts/01_vsepp/new.npz"]


def test_a_deleted_file_is_a_change(checkout: Path) -> None:
    (checkout / "itm_lab/code.py").unlink()
    assert changed_files(checkout) == ["itm_lab/code.py"]


def test_without_git_nobody_knows(tmp_path: Path) -> None:
    assert code_of(None) == code_of(Paths(tmp_path)) == Code(None, None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the runs that would have been started."""
    labels: list[str] = []
    monkeypatch.setattr(
        runner, "run_jobs", lambda planned, *more: labels.extend(job.label for job in planned) or planned
    )
    return labels


def itm_run(root: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.chdir(root)
    result = CliRunner().invoke(app, ["run", NAME, *arguments])
    return result.exit_code, result.output


def test_runs_for_the_ledger_do_not_start_from_changed_code(
    checkout: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert itm_run(checkout, monkeypatch)[0] == 1 and len(started) == len(jobs(checkout)) > 1  # the stand-in fails
    started.clear()
    (checkout / "itm_lab/code.py").write_text("x = 1\n")
    code, text = itm_run(checkout, monkeypatch)
    assert code == 2 and not started and len(text.strip().splitlines()) == 1
    assert "uncommitted changes (itm_lab/code.py), expected a clean checkout" in text and "--dirty" in text
    itm_run(checkout, monkeypatch, "--dirty")
    assert len(started) == len(jobs(checkout))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--search", "learning_rate=0.1,0.2"),
        ("--grid", "learning_rate=0.1,0.2"),
        ("--seeds", "990"),
        ("-p", "evaluate_on=dev"),
        ("-p", "epochs=1"),
        ("--receipts", "elsewhere"),
    ],
)
def test_other_runs_start_from_any_code(
    checkout: Path, arguments: tuple[str, ...], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "README.md").write_text("being written")
    itm_run(checkout, monkeypatch, *arguments)
    assert started


def test_what_the_experiment_plans_is_evidence(checkout: Path) -> None:
    assert all(is_evidence(job) for job in jobs(checkout))
    assert not any(is_evidence(job) for job in jobs(checkout, "margin=0.3"))
    (checkout / "README.md").write_text("being written")
    with pytest.raises(ItmError, match=r"uncommitted changes \(README.md\)"):
        check_clean(checkout, jobs(checkout, seeds="5"), checkout / "receipts")
    check_clean(checkout, jobs(checkout), checkout / "elsewhere")


def test_the_receipt_says_what_the_checkout_was(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> dict:
        about = {"chapter": "01_vsepp", "variant": "x", "seed": 0, "parameters": {}, "seconds": 1.0, "device": "cpu"}
        data = {"name": "toy", "split": "test", "fingerprint": "0" * 64}
        return make_receipt(**about, dataset=data, metrics={"rsum": 1.0})["run"]

    monkeypatch.chdir(checkout)
    head = git(checkout, "rev-parse", "HEAD")
    assert (run()["commit"], run()["clean"]) == (head, True)
    (checkout / "README.md").write_text("being written")
    assert (run()["commit"], run()["clean"]) == (head, False)
