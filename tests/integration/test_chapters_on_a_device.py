"""Chapters on a device that is not the CPU: what only trains, and DCPA's explanations (`tests/second_device.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chapter_on_device import run_on_device
from notebook_cells import NOTEBOOKS, cells_of
from second_device import DEVICE

from itm_lab.records.parameters import declared_parameters
from itm_utils.matcher import Matcher

CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
FEW = {"epochs": 1, "inter_epochs": 1, "train_fraction": 0.1}


def cheap(notebook: str) -> dict[str, Any]:
    """Those of FEW that a chapter has as parameters."""
    declared = next(found for source in cells_of(notebook, "code").values() if (found := declared_parameters(source)))
    return {name: value for name, value in FEW.items() if name in declared}


@pytest.mark.slow
@pytest.mark.parametrize("notebook", CHAPTERS)
def test_every_chapter_that_only_trains(notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells with ``teach: false``; the trained model stays on the device, so that a CPU tensor beside it fails."""
    names = run_on_device(notebook, tmp_path, monkeypatch, teach=False, **cheap(notebook))
    model = names.get("model")
    if notebook != "clinic":  # it trains nothing
        assert isinstance(model, Matcher)
        assert {parameter.device for parameter in model.parameters()} == {DEVICE}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"teach": True}, {"teach": False, "training": "joint"}], ids=str)
def test_dcpa(changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages, their measures and the paper's figures; nothing of the model is on the CPU at the end."""
    names = run_on_device("09_dcpa", tmp_path, monkeypatch, **FEW, **changes)
    assert {parameter.device for parameter in names["model"].parameters()} == {DEVICE}
    assert {"module_overlap", "entity_recall_union", "attention_cosine_within_phrase"} <= names["more"].keys()
