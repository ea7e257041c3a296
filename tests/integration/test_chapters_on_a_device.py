"""Chapters on a device that is not the CPU: what explains and what only trains (`tests/second_device.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from chapter_on_device import run_on_device
from second_device import DEVICE

FEW = {"epochs": 1, "inter_epochs": 1, "train_fraction": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"teach": True}, {"teach": False, "training": "joint"}], ids=str)
def test_dcpa(changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages, their measures and the paper's figures; nothing of the model is on the CPU at the end."""
    names = run_on_device("09_dcpa", tmp_path, monkeypatch, **FEW, **changes)
    assert {parameter.device for parameter in names["model"].parameters()} == {DEVICE}
    assert {"module_overlap", "entity_recall_union", "attention_cosine_within_phrase"} <= names["more"].keys()
