"""Receipts: written once, read back, and refused when they cannot be true."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from itm_lab.records.receipts import (
    LARGEST_RANKS,
    check_receipt,
    make_receipt,
    read_evidence,
    read_receipt,
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
