"""CCR and CCS against a second implementation of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_lab.parity.reference_cases import run_case
from itm_utils.models import ccr_ccs

CASES = sorted((Path(__file__).resolve().parents[1] / "golden" / "ccr_ccs").glob("*.npz"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_reference_cases(path: Path) -> None:
    rows = run_case(path)
    assert {row.kind for row in rows} == {"values", "losses", "gradients", "metrics"}
    assert all(row.ok for row in rows), "\n".join(map(str, rows))


def test_there_are_reference_cases_and_they_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.stem for path in CASES} == {"given_scan", "given_scan_skips", "given_weights"}
    plain = ccr_ccs.reversed_weights
    monkeypatch.setattr(ccr_ccs, "reversed_weights", lambda weights, mask: plain(weights * 1.001, mask))
    assert not all(row.ok for path in CASES for row in run_case(path))
