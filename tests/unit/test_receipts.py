"""Receipts: written once, read back, and refused when they cannot be true."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checked_receipts import SCHEMA_3_RUN

from itm_lab.experiments.runner import known_receipt
from itm_lab.records.checkout import Code
from itm_lab.records.receipts import (
    LARGEST_RANKS,
    check_receipt,
    counts_as_evidence,
    is_old_protocol,
    make_receipt,
    read_evidence,
    read_receipt,
    seal_of,
    write_receipt,
)
from itm_utils.errors import ItmError


def receipt(rsum: float = 300.0, **change) -> dict:
    arguments = {
        "chapter": "02_scan",
        "variant": "t2i avg",
        "seed": 3,
        "dataset": {"name": "scenes", "split": "test", "fingerprint": "abc0" * 16},
        "parameters": {"epochs": 2},
        "metrics": {"rsum": rsum, "i2t_r1": 30.0},
        "intervals": {"rsum": (290.0, 310.0)},
        "seconds": 1.5,
        "device": "cpu",
    }
    return make_receipt(**(arguments | change))


def test_round_trip(tmp_path: Path) -> None:
    path = write_receipt(receipt(), tmp_path)
    assert path.relative_to(tmp_path).as_posix() == "02_scan/t2i-avg_scenes_s3.json"
    content = read_receipt(path)
    assert content["metrics"]["rsum"] == {"value": 300.0, "low": 290.0, "high": 310.0}
    assert content["models"] == 1
    assert content["run"]["versions"]["torch"] != "not installed"


def test_a_plan_reads_a_receipt_once_until_its_file_changes(tmp_path: Path) -> None:
    path = write_receipt(receipt(), tmp_path)
    known = known_receipt(path)
    assert known_receipt(path) is known and known == read_receipt(path)
    path.write_text(path.read_text(encoding="utf-8").replace('"seconds": 1.5', '"seconds": 12.5'), encoding="utf-8")
    with pytest.raises(ItmError, match="a seal that does not fit"):
        known_receipt(path)


def test_curves_are_lists_of_numbers_and_only_there_if_given(tmp_path: Path) -> None:
    curves = {"attention": {"threshold": [0.0, 0.1], "recall_iou_04": [100, 62.5]}}
    assert read_receipt(write_receipt(receipt(curves=curves), tmp_path))["curves"] == curves
    assert "curves" not in receipt()
    for wrong in ({"attention": [1.0]}, {"attention": {"recall": ["high"]}}):
        with pytest.raises(ItmError, match=r"curves\.attention"):
            receipt(curves=wrong)


def test_the_same_result_may_be_written_again_another_may_not(tmp_path: Path) -> None:
    path = write_receipt(receipt(parameters={"cutoffs": (1, 5)}), tmp_path)
    write_receipt(receipt(parameters={"cutoffs": (1, 5)}), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ItmError, match="a receipt with other metrics"):
        write_receipt(receipt(rsum=301.0, parameters={"cutoffs": (1, 5)}), tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chapter": "scan"}, "chapter"),
        ({"seed": -1}, "seed"),
        ({"models": 0}, "models"),
        ({"dataset": {"name": "scenes"}}, "dataset"),
        ({"metrics": {}}, "metrics"),
        ({"rsum": 320.0}, "an interval around its value"),
        ({"rsum": float("nan")}, "JSON cannot hold"),
        ({"rsum": float("inf")}, "JSON cannot hold"),
        ({"parameters": {"folder": Path("x")}}, "JSON cannot hold"),
    ],
)
def test_receipts_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        receipt(**change)


def test_files_that_are_no_receipt(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ItmError, match="no such file"):
        read_receipt(path)
    path.write_text("{")
    with pytest.raises(ItmError, match="no JSON"):
        read_receipt(path)
    path.write_text(json.dumps(receipt() | {"extra": 1}))
    with pytest.raises(ItmError, match=r"r\.json.*extra"):
        read_receipt(path)


def test_ranks_that_unpack_to_too_much_are_refused(tmp_path: Path) -> None:
    """A hundred kilobytes of zeros on disk."""
    zeros = np.zeros(LARGEST_RANKS // 8, dtype=np.int64)
    np.savez_compressed(tmp_path / "r.npz", i2t=zeros, t2i=zeros[:10], owner=zeros[:10])
    with pytest.raises(ItmError, match=r"r\.npz: found no ranks \(67,.+ bytes when unpacked, more than 67,108,864\)"):
        read_evidence(tmp_path / "r.json")


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "02_scan").write_text("a file in the way")
    with pytest.raises(ItmError, match="cannot be written"):
        write_receipt(receipt(), tmp_path)


def test_a_metric_that_is_no_number_is_refused() -> None:
    broken = receipt()
    broken["metrics"]["i2t_r1"]["value"] = None
    with pytest.raises(ItmError, match="i2t_r1"):
        check_receipt(broken, "here")


# ---------------------------------------------------------------------------------------------- schema 4


def sealed(content: dict) -> dict:
    return content | {"seal": seal_of(content)}


STAGE = {
    "name": "final", "shared": False, "epochs": 2, "batch_size": 32, "captions_seen": 640, "steps": 20, "seconds": 1.5,
    "learning_rate": 0.001, "final_loss": 3.5, "dev": [[320, 100.0], [640, 200.5]],
}  # fmt: skip
TRAINING = {"captions_seen": 640, "train_images": 64, "stages": [STAGE]}
SEARCH = {"grid": {"lr": [1, 2]}, "runs": 4, "seeds": 2, "record": "02_scan/choices/x.json", "digest": "a" * 64}


def set_metric(name: str, value: float):
    return lambda content: content["metrics"].update({name: {"value": value}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_metric("i2t_r1", -0.1), "less than the minimum of 0"),
        (set_metric("dev_t2i_r1_epoch_03", 100.1), "greater than the maximum of 100"),
        (set_metric("att_f1_iou_06", 101), "greater than the maximum of 100"),
        (set_metric("rsum", 600.5), "greater than the maximum of 600"),
        (set_metric("inter_rsum", -1), "less than the minimum of 0"),
        (set_metric("i2t_median_rank", 0), "less than the minimum of 1"),
        (set_metric("t2i_mean_rank", 0.5), "less than the minimum of 1"),
        (set_metric("image_cosine", 1.5), "greater than the maximum"),
        (set_metric("anything", float("inf")), "metrics.anything.value = inf"),
        (lambda content: content.update(curves={"a": {"b": [0.0, float("nan")]}}), "curves.a.b.1 = nan"),
        (lambda content: content.update(ranks="xyz"), "'xyz' does not match"),
        (lambda content: content.update(rules={"VSEPP-01": "new"}), "'new' does not match"),
        (lambda content: content["dataset"].update(fingerprint="F" * 64), "does not match"),
        (lambda content: content["run"].update(finished="2025-12-31T23:59:59+00:00"), "does not match"),
        (lambda content: content["run"].update(finished="2026-13-01T00:00:00+00:00"), "does not match"),
        (lambda content: content["run"].update(commit="abc"), "'abc' does not match"),
        (lambda content: content["run"].update(clean="yes"), "is not of type"),
        (lambda content: content["run"].pop("clean"), "'clean' is a required property"),
        (lambda content: content["inputs"].update(train="all of it"), "does not match"),
        *((lambda content, name=name: content.pop(name), f"'{name}' is a required") for name in ("inputs", "training", "search")),
        (lambda content: content["training"].update(captions_seen=-1), "less than the minimum"),
        (lambda content: content["training"].update(stages=[]), "should be non-empty|is too short"),
        (lambda content: content["training"]["stages"][0].update(dev=[[1, 601.0]]), "greater than the maximum of 600"),
        (lambda content: content["training"]["stages"][0].pop("steps"), "'steps' is a required"),
        (lambda content: content["training"]["stages"][0].update(seconds=float("inf")), "seconds = inf"),
        (lambda content: content["search"][0].update(record="../../x.json"), "does not match"),
        (lambda content: content["search"][0].update(runs=0), "less than the minimum"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_bounded_by_the_schema(change, message: str) -> None:
    content = json.loads(json.dumps(receipt(training=TRAINING, search=[SEARCH], inputs={"train": "b" * 64})))
    check_receipt(content, "here")
    change(content)
    with pytest.raises(ItmError, match=message):
        check_receipt(sealed(content), "here")


def test_what_the_schema_cannot_see_of_old_receipts_still_stands(tmp_path: Path) -> None:
    """Schemas 2 and 3 are read as they are, and known as the old protocol."""
    new = receipt(code=Code("c" * 40, True))
    old = {name: value for name, value in new.items() if name not in ("inputs", "training", "search")} | {"schema": 3}
    old["run"] = {name: value for name, value in new["run"].items() if name in SCHEMA_3_RUN} | {
        "commit": "c" * 40 + "+"
    }
    older = {("arm" if name == "variant" else name): value for name, value in old.items()} | {"schema": 2}
    assert not is_old_protocol(new)
    for number, content in enumerate((old, older)):
        (tmp_path / f"{number}.json").write_text(json.dumps(sealed(content)))
        assert is_old_protocol(found := read_receipt(tmp_path / f"{number}.json")) and found["variant"] == "t2i avg"
        assert counts_as_evidence(found) == ""  # it never said what is asked today
    half = {name: value for name, value in old.items()} | {"schema": 4}
    with pytest.raises(ItmError, match="is a required property"):
        check_receipt(sealed(half), "here")


def test_a_new_receipt_replaces_one_of_the_old_protocol(tmp_path: Path) -> None:
    path = write_receipt(receipt(), tmp_path)
    old = {n: v for n, v in json.loads(path.read_text()).items() if n not in ("inputs", "training", "search")}
    old["run"] = {name: value for name, value in old["run"].items() if name in SCHEMA_3_RUN}
    old["metrics"]["rsum"] = {"value": 12.0}
    path.write_text(json.dumps(sealed(old | {"schema": 3})))
    assert read_receipt(path)["metrics"]["rsum"]["value"] == 12.0
    write_receipt(receipt(), tmp_path)
    assert read_receipt(path)["metrics"]["rsum"]["value"] == 300.0


def test_seconds_may_differ_and_the_course_of_training_may_not(tmp_path: Path) -> None:
    write_receipt(receipt(training=TRAINING), tmp_path)
    write_receipt(receipt(training=TRAINING | {"stages": [STAGE | {"seconds": 9.0}]}), tmp_path)
    with pytest.raises(ItmError, match="a receipt with other training"):
        write_receipt(receipt(training=TRAINING | {"stages": [STAGE | {"final_loss": 3.4}]}), tmp_path)
    with pytest.raises(ItmError, match="a receipt with other inputs"):
        write_receipt(receipt(training=TRAINING, inputs={"train": "b" * 64}), tmp_path)


@pytest.mark.parametrize(("clean", "reason"), [(True, ""), (False, "uncommitted changes"), (None, "nobody knows")])
def test_only_clean_runs_count_as_evidence(clean: bool | None, reason: str) -> None:
    found = counts_as_evidence(receipt(code=Code("c" * 40 if clean is not None else None, clean)))
    assert reason in found and bool(found) == bool(reason)
