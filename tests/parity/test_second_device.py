"""Every reference case once more with models and inputs on another device than the CPU: what ``itm doctor --gpu`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from second_device import DEVICE

from itm_lab.parity.comparison import comparing_on
from itm_lab.parity.reference_cases import run_case

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# Ranks and recalls of a stored matrix: no model computes there.
CASES = sorted(path for path in GOLDEN.rglob("*.npz") if path.parent.name != "eval")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_reference_case_on_a_second_device(case: Path) -> None:
    with comparing_on(str(DEVICE)):
        beyond = [str(row) for row in run_case(case) if not row.ok]
    assert not beyond
