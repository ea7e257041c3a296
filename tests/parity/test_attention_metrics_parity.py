"""Attention precision, recall and F1 against a second implementation of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.parity.reference_cases import run_case, run_folder

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "attention_metrics"


def test_reference_cases_are_matched() -> None:
    rows = list(run_folder(GOLDEN))
    assert len(rows) == 2
    for row in rows:
        # 12 numbers or curves for each of four overlaps; per phrase for one of them; kept and dropped stand once
        assert (row.difference, row.compared) == (0, 4 * (12 + 2) + 2)


@pytest.mark.parametrize("key", ["out.iou0.3.max.AP", "out.iou0.6.meanword.AF", "out.iou0.4.max.per_phrase"])
def test_one_changed_number_is_noticed(tmp_path: Path, key: str) -> None:
    arrays = dict(np.load(GOLDEN / "given_12.npz"))
    arrays[key].flat[3] += 1e-6
    np.savez(tmp_path / "case.npz", **arrays)
    (tmp_path / "case.json").write_text((GOLDEN / "given_12.json").read_text())
    (row,) = run_case(tmp_path / "case.npz")
    assert (row.ok, row.worst) == (False, key)
    assert CliRunner().invoke(app, ["parity", str(tmp_path)]).exit_code == 1


def test_a_dropped_phrase_is_compared(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "given_36.npz"))
    about = json.loads((GOLDEN / "given_36.json").read_text())
    about["options"]["T_IoU"] = [0.6]
    arrays["out.iou0.6.dropped"] += 1
    np.savez(tmp_path / "case.npz", **arrays)
    (tmp_path / "case.json").write_text(json.dumps(about))
    (row,) = run_case(tmp_path / "case.npz")
    assert row.worst == "out.iou0.6.dropped"
