"""Two processes are one: losses, gradients, scores, lists and token states; and what happens when one of them dies."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_processes import (
    CASES,
    DRAWING,
    OBJECTIVES,
    Case,
    built,
    finished,
    fits,
    results,
    scorer,
    together,
    whole_batch,
)

from itm_utils import distributed, mining, scoring
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.distributed import GatheredMatcher, share
from itm_utils.matcher import length_mask
from itm_utils.training.checkpoints import read_checkpoint

WAIT = 60  # seconds in which processes that lost another must have ended: far below the half hour that gloo waits


@pytest.fixture(scope="module")
def pair_losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every matcher with every objective, trained for one step by two processes."""
    out = tmp_path_factory.mktemp("losses")
    finished(together("losses", out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_loss_and_gradients_are_those_of_one_process(number: int, objective: str, pair_losses: Path) -> None:
    case: Case = CASES[number]
    if not fits(case, objective):
        assert not (pair_losses / f"{number} {objective}.safetensors").exists()
        return
    model = built(case)
    torch.manual_seed(7)
    # Where an objective draws random numbers, those of the whole batch follow those of the parts, which one process skips.
    given = GatheredMatcher(model) if objective in DRAWING else model
    expected = results(model, OBJECTIVES[objective]()(given, whole_batch(case))[0])
    found = load_file(pair_losses / f"{number} {objective}.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max()))
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6 * scale), name


@pytest.mark.parametrize("count, of", [(7, 2), (128, 3), (2, 2), (5, 4), (0, 2)])
def test_shares_are_all_rows_once_in_their_order(count: int, of: int) -> None:
    parts = [list(range(count))[share(count, number, of)] for number in range(of)]
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_is_left_alone() -> None:
    batch = whole_batch(CASES[0])
    model = built(CASES[0])
    assert distributed.gathered(model) is model
    joined = distributed.gather(batch, keep_features=True)
    assert joined.images.regions.data_ptr() == batch.images.regions.data_ptr()
    assert distributed.agreed(5) == 5 and distributed.own_share(9) == slice(0, 9)


@pytest.mark.slow
def test_a_gather_joins_ragged_parts_and_leaves_features_where_they_are(tmp_path: Path) -> None:
    finished(together("gathering", tmp_path))
    batch = whole_batch(CASES[0])
    for number in range(2):
        found = load_file(tmp_path / f"gathered {number}.safetensors")
        assert torch.equal(found["ids"], batch.images.ids) and torch.equal(found["words"], batch.texts.words)
        assert torch.equal(found["lengths"], batch.texts.lengths) and torch.equal(found["mask"], batch.images.mask)
        assert torch.equal(found["first"], batch.offline.first.texts.words)
        assert torch.equal(found["local"], batch.images.regions * length_mask(batch.images.lengths, 6)[..., None])
        assert torch.equal(found["own"], batch.images.regions[share(7, number, 2)]) and bool(found["others"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_scores_lists_and_token_states_are_the_same_bits(
    count: int, toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "one"))
    monkeypatch.setattr(scoring, "BATCH", 16)
    split = open_split(toy_root, "train")
    vocabulary = Vocabulary.load(toy_root / "toy_vocab.json")
    texts, model = WordCaptions(split, vocabulary), scorer(len(vocabulary), split.feature_dim)
    scores = scoring.score_split(model, split, texts)
    lists = mining.mine(model, split, texts, tmp_path / "alone", 5, 3)
    states = bert_captions(split, batch_size=32)
    finished(together("scoring", tmp_path, toy_root, count=count, ITM_CACHE=str(tmp_path / "several")))
    for number in range(count):
        found = load_file(tmp_path / f"scores {number}.safetensors")
        assert torch.equal(found["i2t"], scores.i2t)
        assert (found["texts"].numpy() == lists.texts).all() and (found["images"].numpy() == lists.images).all()
        assert (found["states"].numpy() == states.states).all() and (found["starts"].numpy() == states.starts).all()
    for name in ("texts", "images"):
        assert (tmp_path / f"lists/{name}.npy").read_bytes() == (tmp_path / f"alone/{name}.npy").read_bytes()
    assert sorted(path.name for path in (tmp_path / "several").glob("bert-*")) == [
        states.folder.name,
        f"{states.folder.name}.lock",
    ]


# ---------------------------------------------------------------- whole trainings


def launched(count: int, *arguments: object) -> list[subprocess.Popen]:
    """The training of killed_run.py in so many processes, without a launcher that would end the others."""
    return together("run", Path(), *arguments, count=count)


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses_of(folder: Path) -> list[float]:
    return [record["loss"] for record in log_of(folder) if "loss" in record]


@pytest.fixture(scope="module")
def alone(toy_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process without dropout."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    finished(launched(1, toy_root, folder, "quiet"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_training_is_that_of_one_process(count: int, alone: Path, toy_root: Path, tmp_path: Path) -> None:
    """32 captions a batch are shared by three, too."""
    finished(launched(count, toy_root, tmp_path / "run", "quiet"))
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(alone), abs=1e-5)
    recalls = [[record.get("val_rsum") for record in log_of(folder)] for folder in (tmp_path / "run", alone)]
    assert recalls[0] == recalls[1]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(path.name for path in alone.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("going_on", [1, 2, 3])
def test_one_process_killed_ends_the_others_and_the_run_goes_on(
    going_on: int, alone: Path, toy_root: Path, tmp_path: Path
) -> None:
    running = launched(2, toy_root, tmp_path / "run", "quiet", 10, 1)  # the second process dies in its eleventh step
    said = [process.communicate(timeout=WAIT)[0] for process in running]
    assert [process.returncode for process in running] == [1, -signal.SIGKILL]
    assert "found that another process has ended, at step 10, expected all 2 to go on" in said[0].splitlines()[-1]
    assert read_checkpoint(max((tmp_path / "run").glob("step-*.safetensors"))).info["step"] == 8
    finished(launched(going_on, toy_root, tmp_path / "run", "quiet"))
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(alone), abs=1e-5)


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(toy_root: Path, tmp_path: Path) -> None:
    finished(launched(2, toy_root, tmp_path / "whole", "noisy"))
    running = launched(2, toy_root, tmp_path / "cut", "noisy", 10, 0)
    for process in running:
        process.communicate(timeout=WAIT)
    finished(launched(2, toy_root, tmp_path / "cut", "noisy"))
    one, other = (max((tmp_path / name).glob("step-*.safetensors")) for name in ("whole", "cut"))
    found, expected = read_checkpoint(other).tensors, read_checkpoint(one).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name.startswith("model."))
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_fewer_rows_than_two_for_each_process_are_refused(toy_root: Path, tmp_path: Path) -> None:
    running = together("few", tmp_path, toy_root, count=2)
    said = [process.communicate(timeout=WAIT)[0] for process in running]
    assert all("batch_size: found 3, expected at least 4, 2 rows for each of 2 processes" in one for one in said)
    assert not list(tmp_path.rglob("step-*"))
