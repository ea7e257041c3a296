"""AOQ against its public code and a second implementation of the same reading: every number of every reference case."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from itm_lab.parity.adapters import aoq
from itm_lab.parity.comparison import Table
from itm_lab.parity.reference_cases import run_folder

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("folder", ["aoq", "aoq_variants"])
def test_parity_with_the_public_code_and_a_second_reading(folder: str) -> None:
    rows = list(run_folder(GOLDEN / folder))
    assert len({row.case for row in rows}) == {"aoq": 10, "aoq_variants": 3}[folder]
    assert all(row.ok for row in rows), "\n".join(map(str, rows))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("aoq*/*.npz")), ids=lambda path: path.stem)
def test_every_number_of_a_case_is_compared(path: Path) -> None:
    arrays = dict(np.load(path))
    table = Table(path.stem)
    aoq.compare_case(table, json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), arrays)
    compared = {name for found in table.found.values() for _, name in found}
    assert {name for name in arrays if name.startswith(("mid.", "out."))} == compared
