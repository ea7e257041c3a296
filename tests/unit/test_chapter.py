"""What every chapter does around its model: parameters checked before anything runs, receipts at the end."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from toy_dataset import write_toy_dataset

from itm_lab.records.chapter import Chapter
from itm_lab.records.collapse import item_vectors, mean_cosine
from itm_lab.records.parameters import declared_parameters, parameters_model, settings_of
from itm_lab.records.receipts import read_receipt, variant_receipts
from itm_lab.records.scores import read_scores, write_scores
from itm_lab.records.training import joint_training, search_record
from itm_utils.data.phrases import Grounding, Phrase
from itm_utils.data.precomp import open_split
from itm_utils.digests import file_digest
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores, Texts
from itm_utils.metrics.retrieval import evaluate, evaluate_folds
from itm_utils.models.keeping_score import InBatchSoftmax, MeanPool
from itm_utils.models.vsepp import VSEPP
from itm_utils.scoring import encode_split, score_split
from itm_utils.training import Stage
from itm_utils.training.checkpoints import tensor_digest
from itm_utils.training.loop import TrainResult
from itm_utils.validation import validated

CELL = """variant: str = "toy"  # name
seed: int = 3  # seed
dataset: str = "scenes"  # data
evaluate_on: str = "test"  # split
schedule: str = "lab"  # schedule
epochs: int = 2  # epochs
batch_size: int = 4  # pairs
learning_rate: float = 0.1  # rate
teach: bool = True  # teach
device: str = "cpu"  # device
precision: str = "fp32"  # precision
num_workers: int = 0  # workers
run_dir: str = ""  # folder
"""


def started(*cells: str, **changes: object) -> Chapter:
    """A chapter whose kernel ran the cells of parameters and then these."""
    values = {name: default for name, (_, default) in declared_parameters(CELL).items()}
    return Chapter.of_cells("02_scan", ["%matplotlib inline", CELL, *cells], values | changes)


def test_parameters_come_from_the_cell_and_from_papermill() -> None:
    assert declared_parameters(CELL)["learning_rate"] == ("float", 0.1)
    assert declared_parameters("x = 1") == declared_parameters("%matplotlib inline") == {}
    run = started("# Parameters\nepochs = 5\n", epochs=5)
    assert run.parameters["epochs"] == 5
    assert run.config().epochs == 5
    assert run.config().schedule == "cosine"


@pytest.mark.parametrize(
    ("injected", "changes", "message"),
    [
        ("# Parameters\nepoch = 5\n", {"epoch": 5}, "Did you mean epochs"),
        ("# Parameters\nepochs = '5'\n", {"epochs": "5"}, "epochs = '5', expected a value of type int"),
        ("# Parameters\nepochs = 2.5\n", {"epochs": 2.5}, "a value of type int"),
        ("# Parameters\nteach = 1\n", {"teach": 1}, "a value of type bool"),
        ("# Parameters\nepochs = True\n", {"epochs": True}, "a value of type int"),
    ],
)
def test_a_wrong_parameter_stops_the_notebook_at_once(injected: str, changes: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        started(injected, **changes)


def test_a_whole_number_is_a_number_and_a_notebook_needs_parameters() -> None:
    assert validated(parameters_model("here", declared_parameters(CELL)), {"learning_rate": 1})["learning_rate"] == 1
    with pytest.raises(ItmError, match="no cell of parameters"):
        Chapter.of_cells("02_scan", ["x = 1"], {})


def test_without_a_history_of_cells_the_annotations_speak() -> None:
    values: dict[str, object] = {}
    exec(CELL, values)
    assert Chapter.of_cells("02_scan", [""], values).parameters["learning_rate"] == 0.1
    with pytest.raises(ItmError, match="a value of type int"):
        Chapter.of_cells("02_scan", [""], values | {"epochs": "2"})


def test_receipts_leave_out_what_changes_no_number() -> None:
    assert set(settings_of(started().parameters)) == {"schedule", "epochs", "batch_size", "learning_rate", "precision"}


@pytest.fixture
def toy_run(tmp_path: Path) -> Chapter:
    root = write_toy_dataset(tmp_path / "toy", {"train": 10, "dev": 5, "test": 10, "testall": 10})
    return started(dataset=str(root), run_dir=str(tmp_path / "run"))


def some_scores(run: Chapter) -> Scores:
    return Scores.same(torch.rand(10, 50, generator=torch.Generator().manual_seed(0)))


def test_a_run_ends_with_a_receipt_its_ranks_and_its_scores(toy_run: Chapter) -> None:
    data, result = toy_run.open(), TrainResult(log=[], best={"rsum": 12.0, "step": 4}, seconds=1.5)
    scores = some_scores(toy_run)
    kept = toy_run.save_result(scores, result, {"extra": 7.0})
    assert kept.rsum == evaluate(scores, data.test.owner).rsum
    (receipt,) = variant_receipts("02_scan", "toy", "toy", toy_run.folder)
    assert receipt["metrics"]["rsum"]["value"] == pytest.approx(kept.rsum)
    assert receipt["metrics"]["extra"]["value"] == 7.0 and receipt["metrics"]["dev_rsum"]["value"] == 12.0
    assert receipt["parameters"]["epochs"] == 2 and receipt["seed"] == 3
    assert torch.equal(read_scores(toy_run.folder / "scores.safetensors").i2t, scores.i2t)


def test_a_run_that_could_not_write_its_scores_is_not_finished(
    toy_run: Chapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt says that a run is finished: it comes last."""
    monkeypatch.setattr("itm_lab.records.chapter.write_scores", lambda path, scores: 1 / 0)
    toy_run.open()
    with pytest.raises(ZeroDivisionError):
        toy_run.save_result(some_scores(toy_run), TrainResult(log=[], best={}, seconds=1.0))
    assert not list(toy_run.folder.rglob("*.json"))


def test_a_receipt_shows_whether_the_model_has_collapsed(toy_run: Chapter) -> None:
    """Final loss, score spread, and the cosines of items, which are those of the loop over pairs."""
    data = toy_run.open()
    torch.manual_seed(0)
    model = VSEPP(len(data.vocabulary), data.train.feature_dim, width=8, word_dim=5)
    log = [{"step": step, "loss": float(step)} for step in range(200)] + [{"step": 199, "val_rsum": 3.0}]
    scores = score_split(model, data.test, data.test_texts)
    toy_run.save_result(scores, TrainResult(log, best={}, seconds=1.0, model=model))
    (receipt,) = variant_receipts("02_scan", "toy", "toy", toy_run.folder)
    found = {name: value["value"] for name, value in receipt["metrics"].items()}
    assert found["final_loss"] == sum(range(100, 200)) / 100
    assert found["score_spread"] == pytest.approx(float(scores.i2t.std()), rel=1e-6)
    firsts = torch.from_numpy(np.flatnonzero(np.diff(data.test.owner, prepend=-1)))
    images, texts = encode_split(model, data.test, data.test_texts)
    for name, vectors in (("image_cosine", images.pooled), ("caption_cosine", texts.pooled[firsts])):
        pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
        cosines = [float(torch.cosine_similarity(vectors[a], vectors[b], dim=0)) for a, b in pairs]
        assert found[name] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)


def test_items_that_are_all_alike_have_cosine_one_and_no_spread() -> None:
    alike = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).expand(7, 5)
    assert mean_cosine(alike) == pytest.approx(1) and math.isnan(mean_cosine(alike[:1]))
    assert mean_cosine(torch.eye(5)) == pytest.approx(0)
    local, mask = torch.randn(2, 3, 5), torch.tensor([[True, True, False], [True, False, False]])
    expected = torch.stack([local[0, :2].mean(dim=0), local[1, 0]])
    torch.testing.assert_close(item_vectors(Texts(local, mask)), expected)


def test_on_testall_there_is_a_receipt_for_each_protocol(toy_run: Chapter) -> None:
    toy_run.parameters["evaluate_on"] = "testall"
    data, scores = toy_run.open(), some_scores(toy_run)
    toy_run.save_result(scores, TrainResult(log=[], best={}, seconds=1.0))
    found = {r["protocol"]: r for r in map(read_receipt, sorted(toy_run.folder.rglob("*.json")))}
    assert set(found) == {"all 10", "5 folds of 2"}
    folds = evaluate_folds(scores, data.test.owner, 5)
    assert found["5 folds of 2"]["metrics"]["rsum"]["value"] == pytest.approx(folds.rsum)


def test_on_dev_the_receipt_goes_with_the_searches(toy_run: Chapter) -> None:
    toy_run.parameters["evaluate_on"] = "dev"
    toy_run.open()
    scores = Scores.same(torch.from_numpy(np.random.default_rng(0).random((5, 25), dtype=np.float32)))
    toy_run.save_result(scores, TrainResult(log=[], best={}, seconds=1.0))
    assert [path.parent.name for path in toy_run.folder.rglob("*.json")] == ["search"]
    assert not variant_receipts("02_scan", "toy", "toy", toy_run.folder)


def test_weights_are_chosen_on_the_first_images_of_dev(toy_run: Chapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the public code does: COCO's dev has 5,000 images, and 1,000 of them validate. What is judged is not cut."""
    monkeypatch.setattr("itm_lab.data.opening.VALIDATION_IMAGES", 3)
    toy_run.parameters["evaluate_on"] = "dev"
    data = toy_run.open()
    assert (data.dev.n_images, data.dev.n_captions, len(data.dev_texts.lengths)) == (3, 15, 15)
    assert data.test.n_images == 5
    torch.manual_seed(0)
    model = MeanPool(len(data.vocabulary), data.train.feature_dim, 8)
    first = evaluate(score_split(model, open_split(data.dev.root, "dev").first(3), data.dev_texts), data.dev.owner)
    found = data.validate(model)
    recalls = [found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5)]
    assert found == first.as_dict() | {"r1_r5": pytest.approx(sum(recalls))}


def test_two_matrices_stay_two(tmp_path: Path) -> None:
    scores = Scores(i2t=torch.rand(2, 4), t2i=torch.rand(2, 4))
    write_scores(tmp_path / "s.safetensors", scores)
    back = read_scores(tmp_path / "s.safetensors")
    assert torch.equal(back.t2i, scores.t2i) and back.decoupled
    with pytest.raises(ItmError, match="no such file"):
        read_scores(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0, 4, 30, 90])
def test_scores_that_were_cut_off_are_refused(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_scores(path, Scores.same(torch.rand(2, 4)))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        ItmError, match=r"s\.safetensors: found a damaged file .+, expected the scores of a finished run"
    ):
        read_scores(path)


def test_one_flipped_bit_of_the_scores_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_scores(path, Scores.same(torch.rand(2, 4)))
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(ItmError, match="i2t other than was written"):
        read_scores(path)


@pytest.mark.parametrize(("content", "found"), [({}, "nothing"), ({"t2i": torch.rand(2, 4)}, "t2i")])
def test_a_file_without_scores_is_refused(content: dict, found: str, tmp_path: Path) -> None:
    save_file(content, tmp_path / "s.safetensors")
    with pytest.raises(ItmError, match=f"s.safetensors: found only {found}, expected i2t"):
        read_scores(tmp_path / "s.safetensors")


@pytest.mark.parametrize(("split", "shape"), [("test", (10, 6, 12)), ("dev", (5, 6, 12)), ("test", (10, 5, 24))])
def test_splits_that_do_not_fit_together_are_refused_before_training(
    split: str, shape: tuple[int, ...], toy_run: Chapter
) -> None:
    path = Path(toy_run.parameters["dataset"]) / f"{split}_ims.npy"
    np.save(path, np.zeros(shape, dtype=np.float32))
    for other in ("boxes", "sizes"):
        path.with_name(f"{split}_{other}.npy").unlink()
    message = f"{split}_ims.npy: found images of shape {shape[1:]}, expected (6, 24), as in train."
    with pytest.raises(ItmError, match=re.escape(message)):
        toy_run.open()


def test_parameters_of_a_notebook_are_those_that_papermill_finds() -> None:
    """The cell is read without papermill, whose import alone takes half a second; papermill must see the same."""
    import ast

    from papermill import inspect_notebook

    from itm_lab.records.parameters import notebook_model

    root = Path(__file__).resolve().parents[2]
    notebooks = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    tagged = [path for path in notebooks if (root / "experiments" / f"{path.stem.partition('_')[2]}.yaml").is_file()]
    assert len(tagged) == 11
    for path in tagged:
        found = {name: ast.literal_eval(one["default"]) for name, one in inspect_notebook(str(path)).items()}
        assert {name: field.default for name, field in notebook_model(path).model_fields.items()} == found


# ---------------------------------------------------------------------------------------------- what a receipt says of the training


def a_stage(run: Chapter, name: str = "final", epochs: int = 2) -> Stage:
    data = run.data
    assert data is not None
    torch.manual_seed(0)
    model = MeanPool(len(data.vocabulary), data.train.feature_dim, 8)
    return Stage(name, model, InBatchSoftmax(), replace(run.config(), epochs=epochs))


def the_receipt(run: Chapter, result: TrainResult, **changes: object) -> dict:
    run.parameters |= changes
    run.save_result(some_scores(run), result)
    (receipt,) = variant_receipts("02_scan", "toy", "toy", run.folder)
    return receipt


def test_every_stage_is_recorded_with_what_it_saw_and_how_it_went(toy_run: Chapter) -> None:
    data = toy_run.open()
    first = toy_run.train(a_stage(toy_run, "first", 1), folder=toy_run.folder / "first", validate=False)
    last = toy_run.train(a_stage(toy_run))
    toy_run.train(a_stage(toy_run, "shown"), folder=toy_run.folder / "shown", counts=False)
    found = the_receipt(toy_run, last)
    steps = data.train.n_captions // 4
    one, two = found["training"]["stages"]
    assert found["training"]["train_images"] == 10 and found["training"]["captions_seen"] == 3 * steps * 4
    assert (one["name"], one["epochs"], one["steps"], one["captions_seen"], one["dev"]) == (
        "first",
        1,
        steps,
        4 * steps,
        [],
    )
    assert (two["name"], two["shared"], two["learning_rate"], two["batch_size"]) == ("final", False, 0.1, 4)
    rsums = [record["val_rsum"] for record in last.log if "val_rsum" in record]
    assert two["dev"] == [[4 * steps, rsums[0]], [8 * steps, rsums[1]]]
    assert one["final_loss"] == pytest.approx(np.mean([record["loss"] for record in first.log]))
    assert found["metrics"]["final_loss"]["value"] == two["final_loss"]


def test_a_stage_that_another_run_trained_counts_too(toy_run: Chapter, tmp_path: Path) -> None:
    toy_run.open()
    shared = tmp_path / "stage one"
    toy_run.train(a_stage(toy_run, "intra"), folder=shared)
    again = started(**toy_run.parameters)
    again.open()
    stage = a_stage(again, "intra")
    again.train(stage, folder=shared)  # nothing is left to train
    found = the_receipt(again, again.train(a_stage(again)))
    assert [(one["name"], one["shared"]) for one in found["training"]["stages"]] == [("intra", True), ("final", False)]
    steps = sum(one["steps"] for one in found["training"]["stages"])
    assert found["training"]["captions_seen"] == 4 * steps and steps == 4 * (50 // 4)
    assert found["inputs"]["stage_intra"] == tensor_digest(stage.model.state_dict())


def test_a_resumed_run_records_its_whole_training(toy_run: Chapter) -> None:
    toy_run.open()
    whole = toy_run.train(a_stage(toy_run))
    again = started(**toy_run.parameters)
    again.open()
    assert the_receipt(again, again.train(a_stage(again)))["training"]["stages"][0]["dev"] == [
        [4 * record["step"], record["val_rsum"]] for record in whole.log if "val_rsum" in record
    ]


def test_what_entered_the_run_is_recorded(toy_run: Chapter) -> None:
    data = toy_run.open()
    grounding = Grounding([[Phrase(0, 3, np.array([[0, 0, 5, 5]]))]])
    toy_run.uses("grounding", grounding)
    toy_run.uses("baseline", data.train.root / "dev_ids.txt")
    toy_run.uses("nothing", None)
    found = the_receipt(toy_run, TrainResult(log=[], best={}, seconds=1.0))
    assert found["dataset"]["fingerprint"] == data.test.identity()["fingerprint"]
    assert found["inputs"] == {
        "train": data.train.identity()["fingerprint"],
        "dev": data.dev.identity()["fingerprint"],
        "vocabulary": data.vocabulary.fingerprint,
        "grounding": grounding.fingerprint,
        "baseline": file_digest(data.train.root / "dev_ids.txt"),
    }
    assert found["training"] is None and found["search"] == []
    moved = Grounding([[Phrase(0, 3, np.array([[0, 0, 5, 6]]))]])
    assert moved.fingerprint != grounding.fingerprint != Grounding([[]]).fingerprint


@pytest.mark.parametrize("kind", ["train_ims", "dev_ims"])
def test_a_chapter_refuses_to_go_on_with_other_data(toy_run: Chapter, kind: str) -> None:
    toy_run.open()
    toy_run.train(a_stage(toy_run))
    path = Path(toy_run.parameters["dataset"]) / f"{kind}.npy"
    features = np.load(path)
    features[3] += 1
    np.save(path, features)
    toy_run.open()
    with pytest.raises(ItmError, match=r"found (dataset|dev) = "):
        toy_run.train(a_stage(toy_run))


def test_training_needs_data(toy_run: Chapter) -> None:
    toy_run.data = None
    with pytest.raises(ItmError, match="training without data"):
        toy_run.train(None)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------- what chose the settings


TRIED = [{"setting": {"learning_rate": rate}} for rate in (0.1, 0.2, 0.1, 0.2, 0.4, 0.4)]  # one value beyond the grid
RECORD = {"select": {"grid": {"learning_rate": [0.1, 0.2]}, "on": "dev", "seeds": 2}, "runs": TRIED, "chosen": {}}


def test_the_search_that_chose_the_settings_is_recorded(
    toy_run: Chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipts/02_scan/choices/scan_toy_x.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(RECORD))
    other = path.with_name("other.json")
    other.write_text(json.dumps({"select": {"settings": [{"alpha": 1}], "seeds": 3}, "runs": [{}] * 3}))
    monkeypatch.setenv("ITM_SEARCH_RECORD", os.pathsep.join(map(str, (path, other))))
    run = started(**toy_run.parameters)
    run.open()
    first, second = the_receipt(run, TrainResult(log=[], best={}, seconds=1.0))["search"]
    assert first == {
        "grid": {"learning_rate": [0.1, 0.2, 0.4]}, "runs": 6, "planned": 4, "seeds": 2,
        "record": "02_scan/choices/scan_toy_x.json", "digest": file_digest(path),
    }  # fmt: skip
    assert (second["grid"], second["runs"], second["seeds"]) == ([{"alpha": 1}], 3, 3)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"select": 3, "runs": []}', '{"select": {"grid": {}}, "runs": 2}']
)
def test_a_search_record_that_is_none_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "choice.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ItmError, match=r"choice\.json: found .*, expected the record of a search"):
        search_record(path)


def test_the_training_of_an_ensemble_is_that_of_its_members() -> None:
    def member(variant: str, seen: int) -> dict:
        stage = {"name": "final", "captions_seen": seen}
        return {
            "variant": variant,
            "seed": 3,
            "training": {"captions_seen": seen, "train_images": 7, "stages": [stage]},
        }

    found = joint_training([member("t2i", 10), member("i2t", 20)])
    assert found is not None and (found["captions_seen"], found["train_images"]) == (30, 7)
    assert [stage["name"] for stage in found["stages"]] == ["t2i, seed 3: final", "i2t, seed 3: final"]
    assert joint_training([member("t2i", 10), {"variant": "old", "seed": 3}]) is None
