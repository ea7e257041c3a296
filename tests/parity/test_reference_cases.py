"""Golden cases: the command that compares, and that it can fail. (`make test` runs every case through it.)"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.parity.adapters import scan
from itm_lab.parity.comparison import Difference
from itm_lab.parity.published import evaluate_published, read_published
from itm_lab.parity.reference_cases import run_case, run_folder
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.metrics.retrieval import evaluate

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def copy_case(target: Path, change=lambda arrays, about: None) -> Path:
    """One public case, changed."""
    arrays = dict(np.load(GOLDEN / "eval" / "given_sims_n20.npz"))
    about = json.loads((GOLDEN / "eval" / "given_sims_n20.json").read_text())
    change(arrays, about)
    np.savez(target / "case.npz", **arrays)
    (target / "case.json").write_text(json.dumps(about))
    return target / "case.npz"


@pytest.mark.slow
def test_the_public_metrics_are_matched_exactly() -> None:
    rows = list(run_folder(GOLDEN / "eval"))
    assert len(rows) == len(list((GOLDEN / "eval").glob("*.npz")))
    assert all(row.ok and row.difference == 0 for row in rows)


def test_one_changed_number_is_noticed(tmp_path: Path) -> None:
    def change(arrays, about) -> None:
        arrays["out.t2i"] = arrays["out.t2i"] + np.float32(0.01)

    (row,) = run_case(copy_case(tmp_path, change))
    assert not row.ok
    assert row.worst == "t2i"
    result = CliRunner().invoke(app, ["parity", str(tmp_path)])
    assert result.exit_code == 1
    assert "BEYOND at t2i" in result.output


def test_nan_is_beyond_every_tolerance() -> None:
    assert not Difference("case", "values", float("nan"), 1, "x").ok


def test_an_unknown_model_is_named_and_fails(tmp_path: Path) -> None:
    def change(arrays, about) -> None:
        about["model"] = "clip"

    copy_case(tmp_path, change)
    result = CliRunner().invoke(app, ["parity", str(tmp_path)])
    assert result.exit_code == 2
    assert "model 'clip'" in result.output


def test_folders_and_cases_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ItmError, match=r"no \.npz file"):
        list(run_folder(tmp_path))
    path = copy_case(tmp_path)
    path.with_suffix(".json").unlink()
    with pytest.raises(ItmError, match=r"case\.json"):
        run_case(path)


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint as the public training scripts save it, with a dataset and vocabulary that fit."""
    about = json.loads((GOLDEN / "scan" / "given_t2i_lse_f30k.json").read_text())
    arrays = np.load(GOLDEN / "scan" / "given_t2i_lse_f30k.npz")
    options = about["options"]
    data = write_toy_dataset(tmp_path / "data", {"test": 6}, width=options["img_dim"])
    words = Vocabulary.load(data / "toy_vocab.json").word2idx
    padded = words | {f"word{n}": n for n in range(len(words), options["vocab_size"])}
    Vocabulary(padded).save(data / "vocab.json")
    weights = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("w.")}
    images = {f"module.{name[8:]}": tensor for name, tensor in weights.items() if name.startswith("img_enc.")}
    texts = {name[8:]: tensor for name, tensor in weights.items() if name.startswith("txt_enc.")}
    parts = [images, texts]  # the image side as saved after training on several GPUs
    path = tmp_path / "model_best.pth.tar"
    torch.save({"epoch": 3, "model": parts, "opt": argparse.Namespace(**options), "best_rsum": 1.0}, path)
    return path, data, data / "vocab.json"


def test_a_published_checkpoint_is_evaluated(published) -> None:
    path, data, vocabulary = published
    result = evaluate_published(path, "scan", data, vocabulary, "test")
    model = scan.load(*read_published(path))
    split = open_split(data, "test")
    batch = PairDataset(split, WordCaptions(split, Vocabulary.load(vocabulary)))[list(range(split.n_captions))]
    scores = model.score(model.encode_images(batch.images[::5]), model.encode_texts(batch.texts))
    assert result == evaluate(scores, split.owner)
    command = ["eval", "--public", path, "--model", "scan", "--data", data, "--vocabulary", vocabulary]
    shown = CliRunner().invoke(app, [str(part) for part in command])
    assert shown.exit_code == 0, shown.output
    assert "single model, all 6: rsum" in shown.output


def test_a_vocabulary_of_another_size_is_refused(published) -> None:
    path, data, _ = published
    with pytest.raises(ItmError, match="50, as model_best"):
        evaluate_published(path, "scan", data, data / "toy_vocab.json", "test")


class Surprise:
    """Pickles to a call."""

    def __reduce__(self):
        return print, ("code in a checkpoint was run",)


def test_other_features_and_other_parts_are_refused(published, tmp_path: Path) -> None:
    path, _, vocabulary = published
    narrow = write_toy_dataset(tmp_path / "narrow", {"test": 6}, width=8)
    with pytest.raises(ItmError, match=r"test_ims\.npy: found features of width 8"):
        evaluate_published(path, "scan", narrow, vocabulary, "test")
    for number, model in enumerate(([{}] * 4, {"img_enc.fc.weight": torch.ones(1)})):
        torch.save({"model": model, "opt": argparse.Namespace()}, tmp_path / f"{number}.pth.tar")
        with pytest.raises(ItmError, match="2 or 3 state dictionaries"):
            read_published(tmp_path / f"{number}.pth.tar")


@pytest.mark.parametrize("content", [{"model": [], "opt": Surprise()}, {"state": 1}, [1, 2]])
def test_files_that_do_not_load_safely_are_refused(tmp_path: Path, content, capsys) -> None:
    path = tmp_path / "bad.pth.tar"
    torch.save(content, path)
    with pytest.raises(ItmError, match=r"bad\.pth\.tar: found nothing that loads safely"):
        read_published(path)
    assert "was run" not in capsys.readouterr().out


ODD = {
    "a part that is none": {"model": [1, {}], "opt": argparse.Namespace()},
    "a weight that is none": {"model": [{"fc.weight": 3}, {}], "opt": argparse.Namespace()},
    "a name that is none": {"model": [{7: torch.ones(1)}, {}], "opt": argparse.Namespace()},
    "options that are none": {"model": [{}, {}], "opt": 5},
    "no options": {"model": [{}, {}], "opt": argparse.Namespace()},
    "options of another kind": {"model": [{}, {}], "opt": argparse.Namespace(embed_size="wide", img_dim=32)},
}


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_an_odd_checkpoint_is_one_clear_error(content: dict, published, tmp_path: Path) -> None:
    _, data, vocabulary = published
    torch.save(content, tmp_path / "odd.pth.tar")
    command = ["eval", "--public", tmp_path / "odd.pth.tar", "--model", "scan", "--data", data]
    shown = CliRunner().invoke(app, [str(part) for part in (*command, "--vocabulary", vocabulary)])
    assert shown.exit_code == 2 and isinstance(shown.exception, SystemExit), shown.output
    assert shown.output.startswith("itm: ") and shown.output.count("\n") == 1


@pytest.mark.parametrize("damage", ["function", "half"])
def test_nobody_is_advised_to_load_unsafely(damage: str, published, tmp_path: Path) -> None:
    path = tmp_path / "bad.pth.tar"
    torch.save({"model": [print], "opt": 1}, path)
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ItmError) as caught:
        read_published(path)
    assert "weights_only" not in str(caught.value) and "succeed" not in str(caught.value)


def test_a_text_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "bad.pth.tar"
    for content in ("<html>404</html>", ""):
        path.write_text(content)
        with pytest.raises(ItmError, match="loads safely"):
            read_published(path)
    with pytest.raises(ItmError, match="no such file"):
        read_published(tmp_path / "none.pth.tar")
