"""``itm doctor``: a machine and its data in a minute, and the acceptance of a GPU, rehearsed on this processor."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import second_device
import torch
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.data.report import MISSING, NOTE, OK
from itm_lab.doctor import acceptance
from itm_lab.doctor.acceptance import (
    EXPERIMENTS,
    HALF_PRECISION,
    accept,
    attempted,
    kill_and_resume,
    reference_cases,
    steps_of,
    write_report,
)
from itm_lab.doctor.machine import check_cache, check_data, check_machine
from itm_lab.experiments.cost import make_batch, make_stages, shape_of, sizes_of, timed_steps
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


def test_an_unknown_device_or_parameter_is_one_line() -> None:
    """Both before anything is computed."""
    with pytest.raises(ItmError, match=r"'cdua'.*cuda, mps, cpu"):
        next(accept(ROOT, "cdua", ROOT / "tests/golden"))
    with pytest.raises(ItmError, match="batch_sice"):
        next(accept(ROOT, "cpu", ROOT / "tests/golden", overrides=("batch_sice=4",)))


def test_a_check_that_breaks_off_is_a_finding() -> None:
    """The next check follows; what is wrong with the input still ends the command."""

    def fails(error: Exception) -> acceptance.Finding:
        def check() -> acceptance.Finding:
            raise error

        return attempted("a check", check)

    assert "does not fit into the memory" in fails(torch.OutOfMemoryError("CUDA out of memory")).found
    assert fails(NotImplementedError("aten::foo\nmore")).found == "NotImplementedError: aten::foo"
    with pytest.raises(ItmError):
        fails(ItmError("a typo"))


def test_a_killed_training_that_had_ended_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its last checkpoint: nothing was resumed, whatever the weights are."""
    weights = {"w": torch.zeros(1)}

    def train_small(folder: Path, device: str) -> dict[str, torch.Tensor]:
        folder.mkdir(exist_ok=True)
        (folder / f"step-{acceptance.RESUMED_STEPS:08d}.safetensors").touch()
        return weights

    monkeypatch.setattr(acceptance, "train_small", train_small)
    monkeypatch.setattr(acceptance, "TRAIN", "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'step-00000040.safetensors').touch()")  # fmt: skip
    finding = kill_and_resume("cpu")
    assert not finding.ok and finding.numbers == {"difference": 0.0, "killed after": 40}


def test_steps_are_those_of_the_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its learning rate, its clipping and its precision, without weights that are not trained."""
    job = plan_one(ROOT, "vsepp/f30k/vsepp", [*SMALL, "learning_rate=0.03", "precision=bf16"])
    shape = shape_of(job, sizes_of(job))
    (stage,) = make_stages(job, shape, "cpu")
    stage = replace(stage, config=replace(stage.config, clip_norm=0.5))
    next(stage.model.parameters()).requires_grad_(False)
    seen: dict[str, Any] = {"half": []}

    class Adam(torch.optim.Adam):
        def __init__(self, trained: list[torch.Tensor], lr: float) -> None:
            seen.update(rate=lr, frozen=[weight for weight in trained if not weight.requires_grad])
            super().__init__(trained, lr=lr)

        def step(self) -> None:
            weights = self.param_groups[0]["params"]
            seen["norm"] = torch.stack([w.grad.norm() for w in weights if w.grad is not None]).norm().item()
            super().step()

    def objective(model, batch):
        seen["half"].append(torch.is_autocast_enabled("cpu"))
        loss, logs = stage.objective(model, batch)
        return 1000 * loss, logs

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    steps = timed_steps(replace(stage, objective=objective), make_batch(4, shape), steps=2, warm_up=1)
    assert len(steps.seconds) == 2 and steps.loss > 0
    assert seen["rate"] == 0.03 and seen["frozen"] == [] and seen["half"] == [True] * 3
    assert seen["norm"] == pytest.approx(0.5, rel=1e-3)


def test_a_loss_or_gradient_that_is_no_number_is_told() -> None:
    job = plan_one(ROOT, "vsepp/f30k/vsepp", list(SMALL))
    shape = shape_of(job, sizes_of(job))
    (stage,) = make_stages(job, shape, "cpu")

    def root_of_nothing(model, batch):
        """0, with an infinite gradient."""
        loss, logs = stage.objective(model, batch)
        return (loss * 0).sqrt(), logs

    assert math.isnan(timed_steps(replace(stage, objective=root_of_nothing), make_batch(4, shape), 1, 0).loss)


def test_memory_of_a_processor_is_a_peak() -> None:
    with acceptance.peak_memory("cpu") as memory:
        block = torch.ones(2**25)  # 128 MiB
        time.sleep(0.2)
        held = psutil.Process().memory_info().rss
        del block
    assert memory.peak >= held > 2**27


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
    assert all(finding.numbers["peak bytes"] > 4 * finding.numbers["weights"] for finding in steps)
    assert {finding.numbers["batch"] for finding in steps} == {4, 2}
    path = tmp_path / "doctor.json"
    write_report(path, "cpu", findings, 1.0, SMALL)
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["ok"] and report["complete"] and len(report["findings"]) == len(findings)
    assert report["machine"]["torch"] == torch.__version__ and report["overrides"] == list(SMALL)
    write_report(path, "cpu", findings[:1], 1.0, complete=False)
    assert not json.loads(path.read_text(encoding="utf-8"))["ok"]


@pytest.mark.slow
def test_the_command_takes_experiments_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``itm doctor --gpu --device cpu --experiment … -p …``, and the report it writes."""
    monkeypatch.setattr(acceptance, "reference_cases", lambda golden, device: acceptance.Finding("cases", True, ""))
    monkeypatch.setattr(acceptance, "kill_and_resume", lambda device: acceptance.Finding("kill", True, ""))
    out = tmp_path / "doctor.json"
    settings = [part for setting in SMALL for part in ("-p", setting)]
    asked = ["doctor", "--gpu", "--device", "cpu", "--out", str(out), "--experiment", "scan/f30k/t2i_avg", *settings]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [one["name"] for one in report["findings"]] == ["cases", "kill", "scan/f30k/t2i_avg, train", "scan/f30k/t2i_avg, train, bf16"]  # fmt: skip
    assert report["findings"][2]["numbers"]["batch"] == 4 and report["overrides"] == list(SMALL)


NARROW = {
    "saem": ["token_dim=32"],
    "mmca": ["token_dim=32", "channels=16"],
    "dcpa": ["token_dim=32", "feed_forward=32", "inter_batch_size=4", "inter_feed_forward=32", "channels=16"],
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_step_on_a_second_device(name: str) -> None:
    """Every tensor on a device that is not the CPU, except lengths: what a GPU would refuse is refused here."""
    job = plan_one(ROOT, name, ["batch_size=4", "width=32", *NARROW.get(name.partition("/")[0], [])])
    shape, device = shape_of(job, sizes_of(job)), str(second_device.DEVICE)
    for stage in make_stages(job, shape, device):
        assert timed_steps(stage, make_batch(4, shape, device), steps=1, warm_up=0).loss >= 0


def test_the_command_says_what_is_there() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "PyTorch" in result.output
