"""The training loop: schedules, best weights, and a run that survives anything."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import second_device
import torch
from accelerate.state import PartialState
from safetensors.torch import save_file
from torch import nn
from toy_dataset import write_toy_dataset

from itm_utils.data.batches import PairDataset, ResumableBatches, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.errors import ItmError
from itm_utils.models.keeping_score import InBatchSoftmax, MeanPool
from itm_utils.training import checkpoints, loop
from itm_utils.training.checkpoints import (
    FORMAT,
    Checkpoint,
    load_model,
    read_checkpoint,
    restore_rng,
    rng_tensors,
    save_model,
    write_checkpoint,
)
from itm_utils.training.loop import TrainConfig, lr_multiplier, train

CONFIG = TrainConfig(epochs=2, batch_size=32, learning_rate=0.01, device="cpu", checkpoint_every=5)
SCRIPT = Path(__file__).resolve().parents[1] / "killed_run.py"


def model_for(pairs: PairDataset, width: int = 8) -> MeanPool:
    torch.manual_seed(1)
    words = 1 + int(pairs.texts.ids.max())
    return MeanPool(words, pairs.split.feature_dim, width)


def run_script(*arguments: object) -> int:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True).returncode


def digest(folder: Path) -> dict[str, str]:
    """Hashes of every tensor a finished run leaves, and of its log without times."""
    files = {"last": max(folder.glob("step-*.safetensors")), "best": folder / "best.safetensors"}
    found = {}
    for name, path in files.items():
        for key, tensor in read_checkpoint(path).tensors.items():
            found[f"{name}/{key}"] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    found["log"] = hashlib.sha256((folder / "log.jsonl").read_bytes()).hexdigest()
    return found


@pytest.mark.slow
def test_killed_again_and_again_a_run_ends_in_the_same_weights_bit_for_bit(toy_root: Path, tmp_path: Path) -> None:
    assert run_script(toy_root, tmp_path / "whole") == 0
    expected = digest(tmp_path / "whole")
    # 24 steps, checkpoints every 4: die before the first one, right after one, between two, in the last epoch.
    for calls in (2, 5, 4, 7, 10):
        assert run_script(toy_root, tmp_path / "killed", calls) == -9
        (tmp_path / "killed" / ".step-00000099.safetensors.1.tmp").write_bytes(b"half a checkpoint")
        with (tmp_path / "killed" / "log.jsonl").open("a") as log:
            log.write('{"step": 9')  # half a line
    assert run_script(toy_root, tmp_path / "killed") == 0
    assert digest(tmp_path / "killed") == expected
    assert not list((tmp_path / "killed").glob(".*.tmp"))


def test_a_finished_run_is_not_run_again(toy_pairs: PairDataset, tmp_path: Path) -> None:
    model = model_for(toy_pairs)
    first = train(model, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    again = model_for(toy_pairs)
    second = train(again, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    assert second.log == first.log
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_training_that_is_asked_saves_between_its_checkpoints_and_goes_on_from_there(
    toy_pairs: PairDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a job of a cluster asks for it before its time is up; whatever is saved in between changes no number."""
    config, request = replace(CONFIG, checkpoint_every=1000), tmp_path / "save"
    monkeypatch.setattr(loop, "READ_EVERY", 3)
    torch.manual_seed(0)
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, config, tmp_path / "whole")
    monkeypatch.setenv(loop.SAVE_REQUEST, str(request))
    batches: list[int] = []

    class Asking(InBatchSoftmax):
        def __call__(self, model, batch):
            batches.append(1)
            if len(batches) == 4:
                request.touch()  # it is seen at the next reading, after step 6
            if len(batches) == 8:
                assert not request.exists()
                raise KeyboardInterrupt
            return super().__call__(model, batch)

    Asking.__qualname__ = InBatchSoftmax.__qualname__
    with pytest.raises(KeyboardInterrupt):
        train(model_for(toy_pairs), Asking(), toy_pairs, config, tmp_path / "cut")
    assert [path.stem for path in (tmp_path / "cut").glob("step-*")] == ["step-00000006"]
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, config, tmp_path / "cut")
    one, other = ((tmp_path / name / "log.jsonl").read_text() for name in ("whole", "cut"))
    assert one == other
    last = [read_checkpoint(max((tmp_path / name).glob("step-*"))).tensors for name in ("whole", "cut")]
    assert all(torch.equal(tensor, last[1][name]) for name, tensor in last[0].items())


def test_the_loop_is_plain_adam_with_clipping(toy_pairs: PairDataset, tmp_path: Path) -> None:
    config = replace(CONFIG, clip_norm=0.05, schedule="constant")
    trained = model_for(toy_pairs)
    result = train(trained, InBatchSoftmax(), toy_pairs, config, tmp_path)
    by_hand, objective = model_for(toy_pairs), InBatchSoftmax()
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=config.learning_rate)
    order = ResumableBatches(len(toy_pairs), config.batch_size, config.seed)
    for epoch in range(config.epochs):
        order.epoch = epoch
        for index in order:
            optimizer.zero_grad()
            loss, _ = objective(by_hand, toy_pairs[index])
            loss.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), config.clip_norm)
            optimizer.step()
    for mine, theirs in zip(trained.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert result.log[-1]["loss"] == loss.item()
    assert result.log[0]["learning_rate"] == config.learning_rate
    assert max(record["gradient_norm"] for record in result.log) > config.clip_norm


def test_workers_change_no_number(toy_pairs: PairDataset, tmp_path: Path) -> None:
    alone, helped = model_for(toy_pairs), model_for(toy_pairs)
    train(alone, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path / "a")
    train(helped, InBatchSoftmax(), toy_pairs, replace(CONFIG, num_workers=1), tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), helped.parameters(), strict=True))


def test_best_weights_are_kept(toy_pairs: PairDataset, tmp_path: Path) -> None:
    values = iter([3.0, 7.0, 5.0])
    seen = []

    def validate(model: MeanPool) -> dict[str, float]:
        seen.append(model.region_proj.weight.detach().clone())
        return {"rsum": next(values)}

    model = model_for(toy_pairs)
    result = train(model, InBatchSoftmax(), toy_pairs, replace(CONFIG, epochs=3), tmp_path, validate=validate)
    assert result.best["rsum"] == 7.0
    assert torch.equal(model.region_proj.weight, seen[1])
    assert [record["val_rsum"] for record in result.log if "val_rsum" in record] == [3.0, 7.0, 5.0]


def test_bf16_trains_close_to_fp32_and_stays_fp32_on_disk(toy_pairs: PairDataset, tmp_path: Path) -> None:
    full, half = model_for(toy_pairs), model_for(toy_pairs)
    a = train(full, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path / "a")
    b = train(half, InBatchSoftmax(), toy_pairs, replace(CONFIG, precision="bf16"), tmp_path / "b")
    assert a.log[-1]["loss"] != b.log[-1]["loss"]
    assert abs(a.log[-1]["loss"] - b.log[-1]["loss"]) < 0.05 * a.log[-1]["loss"]
    assert half.region_proj.weight.dtype == torch.float32


def test_objectives_hear_about_epochs(toy_pairs: PairDataset, tmp_path: Path) -> None:
    class Listening(InBatchSoftmax):
        heard: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.heard = [*getattr(self, "heard", []), epoch]

    objective = Listening()
    train(model_for(toy_pairs), objective, toy_pairs, CONFIG, tmp_path)
    assert objective.heard[-2:] == [0, 1]


def test_step_decay_equals_pytorch() -> None:
    config = TrainConfig(schedule="step", decay_every=3, decay=0.1, device="cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    for epoch in range(10):
        assert lr_multiplier(config, epoch + 0.5) == pytest.approx(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("growth", [1, 2])
def test_cosine_with_warm_restarts_equals_pytorch(growth: int) -> None:
    config = TrainConfig(schedule="cosine", decay_every=4, decay=0.05, cycle_growth=growth, device="cpu")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=growth, eta_min=0.05)
    for quarter in range(60):
        reference.step(quarter / 4)
        assert lr_multiplier(config, quarter / 4) == pytest.approx(reference.get_last_lr()[0]), quarter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "linear"}, "one of constant, step, cosine"),
        ({"precision": "fp16"}, "one of fp32, bf16"),
        ({"device": "gpu"}, "one of auto, cpu, cuda, mps"),
        ({"epochs": 0}, "a whole number from 1 up"),
        ({"epochs": "3"}, "a whole number from 1 up"),
        ({"batch_size": 32.5}, "a whole number from 1 up"),
        ({"seed": -1}, "a whole number from 0 up"),
        ({"num_workers": True}, "a whole number from 0 up"),
        ({"learning_rate": float("nan")}, "a number from"),
        ({"clip_norm": -1.0}, "a number from 0 up"),
    ],
)
def test_settings_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message) as caught:
        TrainConfig(**change)
    assert next(iter(change)) in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ItmError, match="a device this machine has"):
        TrainConfig(device="cuda")


def test_a_run_is_not_continued_with_other_settings_or_another_model(toy_pairs: PairDataset, tmp_path: Path) -> None:
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path, provenance={"vocabulary": "a"})
    before = sorted(path.read_bytes() for path in tmp_path.iterdir())
    soft, sharp, known = InBatchSoftmax(), InBatchSoftmax(0.01), {"vocabulary": "a"}
    calls = [
        (replace(CONFIG, learning_rate=0.5), soft, 8, known, "learning_rate = 0.01"),
        (CONFIG, soft, 9, known, "width = 8"),
        (CONFIG, soft, 8, {"vocabulary": "b"}, "vocabulary = 'a'"),
        (CONFIG, soft, 8, {}, "vocabulary = 'a', expected no vocabulary"),
        (CONFIG, sharp, 8, known, "temperature = 0.07"),
    ]
    for config, objective, width, provenance, message in calls:
        with pytest.raises(ItmError, match=message):
            train(model_for(toy_pairs, width), objective, toy_pairs, config, tmp_path, provenance=provenance)
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == before


def test_a_run_is_not_continued_on_other_data(toy_pairs: PairDataset, toy_vocabulary, tmp_path: Path) -> None:
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path / "run")
    other = open_split(write_toy_dataset(tmp_path / "data", {"train": 40}, seed=9), "train")
    with pytest.raises(ItmError, match="dataset = "):
        pairs = PairDataset(other, WordCaptions(other, toy_vocabulary))
        train(model_for(toy_pairs), InBatchSoftmax(), pairs, CONFIG, tmp_path / "run")


def test_a_damaged_checkpoint_is_passed_over(toy_pairs: PairDataset, tmp_path: Path, capsys) -> None:
    whole = model_for(toy_pairs)
    train(whole, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    newest = max(tmp_path.glob("step-*"))
    newest.write_bytes(newest.read_bytes()[:100])
    again = model_for(toy_pairs)
    train(again, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    assert "Going on from the one before" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rewritten(path: Path, drop: str = "", **info: object) -> None:
    """The checkpoint without some tensors or with other JSON, as whole as any."""
    known = read_checkpoint(path)
    tensors = {name: tensor for name, tensor in known.tensors.items() if not drop or not re.fullmatch(drop, name)}
    write_checkpoint(path, tensors, known.info | info)


@pytest.mark.parametrize("place", [0.2, 0.4, 0.6, 0.8, 0.999])
def test_one_flipped_bit_is_noticed(toy_pairs: PairDataset, tmp_path: Path, place: float) -> None:
    path = tmp_path / "m.safetensors"
    save_model(path, model_for(toy_pairs), {})
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flip_bit(path, int((header + place * (path.stat().st_size - header)) * 8))
    with pytest.raises(ItmError, match=r"m\.safetensors: found model other than was written"):
        read_checkpoint(path)


def test_every_byte_of_a_checkpoint_counts(tmp_path: Path) -> None:
    """Header and metadata too: one flipped bit in each byte, one after the other."""
    path = tmp_path / "c.safetensors"
    write_checkpoint(path, {"model.x": torch.ones(2), "rng.y": torch.arange(2)}, {"step": 12})
    whole, expected = path.read_bytes(), read_checkpoint(path)
    unnoticed = []
    for byte in range(len(whole)):
        path.write_bytes(whole)
        flip_bit(path, 8 * byte + byte % 7)
        try:
            found = read_checkpoint(path)
        except ItmError:
            continue
        if found.info != expected.info or found.tensors.keys() != expected.tensors.keys():
            unnoticed.append(byte)
        unnoticed += [byte for name in found.tensors if not torch.equal(found.tensors[name], expected.tensors[name])]
    assert not unnoticed


DAMAGE = {
    "a step beyond the last": {"step": 10**9},
    "a step that is no number": {"step": "ten"},
    "another step than its name says": {"step": 7},
    "no optimiser": {"drop": r"optimizer\..*"},
    "one tensor of the optimiser missing": {"drop": r"optimizer\.1\.exp_avg"},
    "all of one parameter missing": {"drop": r"optimizer\.1\..*"},
    "no generators": {"drop": r"rng\..*"},
    "no log": {"drop": r"log\..*"},
    "no weights": {"drop": r"model\..*"},
    "no best weights": {"drop": r"best\..*"},
    "a best that is none": {"best": 3},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_incomplete_checkpoint_is_passed_over(damage: dict, toy_pairs: PairDataset, tmp_path: Path, capsys) -> None:
    def run() -> MeanPool:
        model = model_for(toy_pairs)
        train(model, InBatchSoftmax(), toy_pairs, CONFIG, tmp_path, validate=lambda m: {"rsum": 1.0})
        return model

    whole = run()
    newest = max(tmp_path.glob("step-*"))
    rewritten(newest, **damage)
    again = run()
    assert f"{newest.name}: found" in (said := capsys.readouterr().out) and "Going on from the one before" in said
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert read_checkpoint(newest).info["step"] == 12


def test_damaged_checkpoints_of_later_steps_push_out_no_good_one(
    toy_pairs: PairDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, checkpoint_every=1)
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, config, tmp_path)
    for path in tmp_path.glob("step-*"):  # both, steps 11 and 12
        path.write_bytes(b"damaged")
    seen = []

    def looking(model, batch):  # before every step, what a kill would leave
        seen.append({path.name for path in tmp_path.glob("step-*") if path.read_bytes() != b"damaged"})
        return InBatchSoftmax()(model, batch)

    looking.__qualname__ = "InBatchSoftmax"
    looking.__dict__.update(vars(InBatchSoftmax()))
    train(model_for(toy_pairs), looking, toy_pairs, config, tmp_path)
    assert [len(files) for files in seen] == [0, 1, *[2] * 10]


def test_a_checkpoint_without_digests_is_refused(toy_pairs: PairDataset, tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", model_for(toy_pairs)
    info = {"model": "MeanPool", "config": model.config, "provenance": {}}
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "itm-checkpoint-1", "info": json.dumps(info)})
    with pytest.raises(ItmError, match="found format itm-checkpoint-1, expected itm-checkpoint-2"):
        load_model(path, model_for(toy_pairs))


@pytest.mark.parametrize(
    "line", [b"\xff\xfe{", b'{"loss": 1}', b"[]", b"[" * 100_000], ids=("bytes", "step", "list", "deep")
)
def test_a_damaged_line_of_the_log_is_restored_from_the_checkpoint(
    line: bytes, toy_pairs: PairDataset, tmp_path: Path
) -> None:
    first = train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines()
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[2:]]))
    again = train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
    assert again.log == first.log


def test_best_weights_that_are_damaged_or_missing_are_written_again(toy_pairs: PairDataset, tmp_path: Path) -> None:
    """As a kill between the last checkpoint and the best weights, or a disk, leaves them."""
    path, first = tmp_path / "best.safetensors", []
    for damage in (lambda: None, path.unlink, lambda: path.write_bytes(path.read_bytes()[:-1] + b"x")):
        damage()
        train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path, validate=lambda m: {"rsum": 1.0})
        found = checkpoints.read_checkpoint(path)
        first.append((checkpoints.tensor_digest(found.tensors), found.info))
    assert first[0] == first[1] == first[2]


def test_one_run_a_folder(toy_pairs: PairDataset, tmp_path: Path) -> None:
    def impatient(model: MeanPool) -> dict[str, float]:
        with pytest.raises(ItmError, match="another process that trains in it"):
            train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path)
        return {"rsum": 1.0}

    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path, validate=impatient)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(toy_pairs: PairDataset, tmp_path: Path) -> None:
    def broken(model, batch):
        return (model.region_proj.weight * 0).sum().abs().sqrt(), {}  # the loss is 0, its gradient is not a number

    model = model_for(toy_pairs)
    before = model.region_proj.weight.clone()
    with pytest.raises(ItmError, match="gradient: found nan at step 0"):
        train(model, broken, toy_pairs, CONFIG, tmp_path)
    assert torch.equal(model.region_proj.weight, before)
    assert not list(tmp_path.glob("step-*"))


def test_a_validation_that_is_not_a_number_is_never_the_best(toy_pairs: PairDataset, tmp_path: Path) -> None:
    values = iter([float("nan"), 4.0])
    config = replace(CONFIG, epochs=2)
    result = train(
        model_for(toy_pairs), InBatchSoftmax(), toy_pairs, config, tmp_path, lambda m: {"rsum": next(values)}
    )
    assert result.best["rsum"] == 4.0


def test_an_objective_has_no_weights_of_its_own(toy_pairs: PairDataset, tmp_path: Path) -> None:
    with pytest.raises(ItmError, match="belongs to the model"):
        train(model_for(toy_pairs), nn.Linear(1, 1), toy_pairs, CONFIG, tmp_path)


def test_every_generator_is_put_back() -> None:
    def draw() -> list[float]:
        numbers = [random.gauss(0, 1), random.random(), *np.random.randn(3), np.random.rand()]  # noqa: NPY002
        return [*numbers, torch.rand(1).item()]

    draw()  # an odd number of normal draws leaves one in store
    saved = Checkpoint(rng_tensors(torch.device("cpu")), {})
    expected = draw()
    draw()
    restore_rng(saved, torch.device("cpu"))
    assert draw() == expected


def test_a_checkpoint_of_another_model_is_refused(toy_pairs: PairDataset, tmp_path: Path) -> None:
    class Other(MeanPool):
        pass

    path = tmp_path / "m.safetensors"
    save_model(path, model_for(toy_pairs), {"vocabulary": "x"})
    model = model_for(toy_pairs)
    nn.init.zeros_(model.region_proj.weight)
    load_model(path, model)
    assert model.region_proj.weight.any()
    torch.manual_seed(1)
    with pytest.raises(ItmError, match=r"m\.safetensors: found model = 'MeanPool', expected model = 'Other'"):
        load_model(path, Other(model.config["vocabulary_size"], model.config["image_dim"], 8))
    with pytest.raises(ItmError, match="vocabulary = 'x'"):
        load_model(path, model, {"vocabulary": "y"})


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", None])
def test_files_that_are_no_checkpoint(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ItmError, match=r"c\.safetensors"):
        read_checkpoint(path)


@pytest.mark.parametrize("info", [None, "{", "[1, 2]", '{"model": "MeanPool", "config": [1], "provenance": 3}', "{}"])
def test_metadata_of_somebody_else(toy_pairs: PairDataset, tmp_path: Path, info: str | None) -> None:
    path, metadata = tmp_path / "c.safetensors", {"format": FORMAT} | ({"info": info} if info else {})
    save_file({"model.x": torch.zeros(1)}, path, metadata=metadata)
    with pytest.raises(ItmError, match=r"c\.safetensors"):
        load_model(path, model_for(toy_pairs))


def test_unwritable_output_is_one_clear_error(toy_pairs: PairDataset, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ItmError, match="cannot be written"):
        train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, blocked / "run")
    with pytest.raises(ItmError, match="cannot be written"):
        write_checkpoint(blocked / "c.safetensors", {}, {})


def test_a_loss_that_is_not_finite_stops_the_run(toy_pairs: PairDataset, tmp_path: Path) -> None:
    def broken(model, batch):
        return model.region_proj.weight.sum() * float("nan"), {}

    with pytest.raises(ItmError, match="loss: found nan at step 0"):
        train(model_for(toy_pairs), broken, toy_pairs, CONFIG, tmp_path)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_is_found_later_and_never_saved(
    toy_pairs: PairDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Numbers are read every so many steps: a run still stops, names the step, and leaves the checkpoint before it."""
    monkeypatch.setattr(loop, "READ_EVERY", 4)
    steps = iter(range(100))

    def breaks(model, batch):
        loss, logs = InBatchSoftmax()(model, batch)
        zero = (model.region_proj.weight * 0).sum()
        bad = zero * float("nan") if what == "loss" else zero.abs().sqrt()  # the root's value is 0, its gradient NaN
        return (loss + bad if next(steps) == 6 else loss), logs

    model, config = model_for(toy_pairs), replace(CONFIG, checkpoint_every=6, epochs=4)
    with pytest.raises(ItmError, match=f"{what}: found nan at step 6, expected .* images"):
        train(model, breaks, toy_pairs, config, tmp_path)
    assert next(steps) == 8, "read at step 8"
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    (saved,) = tmp_path.glob("step-*")
    assert saved.name == "step-00000006.safetensors"
    assert all(tensor.isfinite().all() for tensor in read_checkpoint(saved).part("model.").values())
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == list(range(1, 7))


def test_an_objective_may_log_tensors(toy_pairs: PairDataset, tmp_path: Path) -> None:
    def objective(model, batch):
        loss, _ = InBatchSoftmax()(model, batch)
        return loss, {"twice": 2 * loss, "share": 0.25, "pairs": torch.tensor(len(batch))}

    result = train(model_for(toy_pairs), objective, toy_pairs, CONFIG, tmp_path)
    assert all(record["twice"] == 2 * record["loss"] and record["share"] == 0.25 for record in result.log)
    assert {record["pairs"] for record in result.log} == {32}


def test_the_loop_waits_for_the_device_once_every_so_many_steps(
    toy_pairs: PairDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that counts waits, and with the numbers of a CPU."""
    expected, model = model_for(toy_pairs), model_for(toy_pairs)
    config = replace(CONFIG, epochs=8, checkpoint_every=1000)
    on_cpu = train(expected, InBatchSoftmax(), toy_pairs, config, tmp_path / "cpu")
    monkeypatch.setattr(PartialState, "default_device", second_device.DEVICE)
    with second_device.counting() as syncs:
        found = train(model, InBatchSoftmax(), toy_pairs, replace(config, device="auto"), tmp_path / "second")
    assert model.region_proj.weight.device == second_device.DEVICE
    asked = Counter(sync.where.split()[-1] for sync in syncs if "checkpoints.py" not in sync.where)
    assert asked.pop("__init__") == len(list(model.parameters()))  # the model goes to the device
    assert asked == {"_read_unread": -(-len(found.log) // loop.READ_EVERY)}
    assert found.log == on_cpu.log
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_nothing_on_disk_is_a_pickle(toy_pairs: PairDataset, tmp_path: Path) -> None:
    train(model_for(toy_pairs), InBatchSoftmax(), toy_pairs, CONFIG, tmp_path, validate=lambda model: {"rsum": 1.0})
    for path in tmp_path.iterdir():
        if path.suffix == ".safetensors":
            header = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + header])
        else:
            assert path.name in ("log.jsonl", ".lock")
