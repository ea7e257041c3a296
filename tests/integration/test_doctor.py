"""``itm doctor``: a machine and its data in a minute, and the acceptance of a GPU, rehearsed on this processor."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.data.report import MISSING, NOTE, OK
from itm_lab.doctor import acceptance
from itm_lab.doctor.acceptance import (
    EXPERIMENTS,
    HALF_PRECISION,
    accept,
    kill_and_resume,
    reference_cases,
    steps_of,
    write_report,
)
from itm_lab.doctor.machine import check_cache, check_data, check_machine
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.plan import plan_one
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
# The settings of a page, for a step of the published recipe on a processor.
SMALL = ("batch_size=4", "width=32", "device=cpu")


def copy_case(model: str, folder: Path) -> None:
    """The first reference case of a model."""
    case = sorted((ROOT / "tests/golden" / model).glob("*.npz"))[0]
    for path in (case, case.with_suffix(".json")):
        shutil.copy(path, folder)


def test_a_machine_in_a_minute() -> None:
    found = {result.what: result for result in check_machine(ROOT)}
    assert {"Python", "PyTorch", "GPU", "Jupyter kernel", "memory", "disk", "cache"} <= set(found)
    assert found["Jupyter kernel"].state == found["cache"].state == OK
    assert (found["GPU"].state == OK) == (torch.cuda.is_available() or torch.backends.mps.is_available())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert check_cache().state == MISSING and "ITM_CACHE" in check_cache().advice


def test_missing_data_come_with_what_to_do(tmp_path: Path) -> None:
    found = {result.what: result for result in check_data(tmp_path)}
    assert found["Flickr30K"].state == MISSING and "itm data check f30k" in found["Flickr30K"].advice
    assert found["Flickr30K Entities"].state == NOTE and found["bert-base-uncased"].state in (OK, NOTE)
    (nowhere,) = check_data(tmp_path / "nowhere")
    assert nowhere.state == MISSING


def test_every_model_has_an_experiment_that_exists() -> None:
    experiments = read_experiments(ROOT)
    assert set(EXPERIMENTS) <= set(experiments)
    assert {name.partition("/")[0] for name in EXPERIMENTS} == {name.partition("/")[0] for name in experiments}


def test_half_precision_is_what_the_page_promises() -> None:
    page = (ROOT / "book/how-to-use.md").read_text(encoding="utf-8")
    assert float(re.search(r"^\| `precision=bf16.*\| at most ([\d.]+)", page, re.MULTILINE)[1]) == HALF_PRECISION


def test_a_missing_gpu_is_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ItmError, match="PyTorch sees no GPU"):
        next(accept(ROOT, "cuda", ROOT / "tests/golden"))


def test_a_reference_case_beyond_its_tolerance_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_case("vsepp", tmp_path)
    assert reference_cases(tmp_path, "cpu").ok
    monkeypatch.setattr("itm_lab.parity.comparison.TOLERANCES", dict.fromkeys(("values", "losses", "gradients", "after five steps", "metrics"), -1.0))  # fmt: skip
    finding = reference_cases(tmp_path, "cpu")
    assert not finding.ok and "0 of" in finding.found


@pytest.mark.slow
def test_killed_and_resumed_on_this_processor() -> None:
    finding = kill_and_resume("cpu")
    assert finding.ok and finding.numbers["difference"] == 0 and 0 < finding.numbers["killed after"] < 40


@pytest.mark.slow
def test_the_whole_acceptance_on_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small batches and widths; the numbers of a GPU come from a GPU."""
    golden = tmp_path / "golden"
    golden.mkdir()
    copy_case("scan", golden)
    monkeypatch.setattr(acceptance, "STEPS", 1)
    monkeypatch.setattr(acceptance, "WARM_UP", 0)
    monkeypatch.setattr(acceptance, "kill_and_resume", lambda device: acceptance.Finding("kill and resume", True, ""))
    findings = list(accept(ROOT, "cpu", golden, ("vsepp/f30k/vsepp", "ccr_ccs/f30k/scan_ccr_ccs"), SMALL))
    narrow = ("inter_batch_size=2", "token_dim=32", "feed_forward=32", "inter_feed_forward=32", "channels=16")
    findings += steps_of(plan_one(ROOT, "dcpa/f30k/two_stages", [*SMALL, *narrow]), "cpu")
    assert [finding.name for finding in findings if not finding.ok] == []
    steps = [finding for finding in findings if "seconds" in finding.numbers]
    assert {"dcpa/f30k/two_stages, intra", "dcpa/f30k/two_stages, inter"} <= {finding.name for finding in steps}
    assert all(finding.numbers["pairs per second"] > 0 for finding in steps)
    write_report(tmp_path / "doctor.json", "cpu", findings, 1.0)
    report = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert report["ok"] and report["torch"] == torch.__version__ and len(report["findings"]) == len(findings)


def test_the_command_says_what_is_there() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "PyTorch" in result.output
