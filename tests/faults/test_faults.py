"""A few faults and damaged inputs of the campaign; `make faults` strikes more than two hundred times."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from campaign import Struck
from damaged_inputs import CLEAR, READERS, TRACEBACK, WAYS, read_damaged
from striking import LOST
from workloads import WORKLOADS

QUICK = ("mining", "building Scenes", "converting features")


@pytest.mark.parametrize("kind", ["SIGKILL", "full disk", "death in a write", "flipped bit"])
@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_lost(name: str, kind: str, tmp_path: Path) -> None:
    found = list(Struck(WORKLOADS[name], tmp_path).faults(kind, 2))
    assert found and not [outcome.said for outcome in found if outcome.kind == LOST]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_accepted_or_one_clear_line(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.read(reader.write(tmp_path))  # whole, it is accepted
    outcomes = [read_damaged(reader, tmp_path, Random(f"{name} {way}"), way) for way in range(WAYS)]
    assert TRACEBACK not in outcomes and CLEAR in outcomes
