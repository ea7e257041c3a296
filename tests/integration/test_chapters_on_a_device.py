"""Chapters on a device that is not the CPU (`tests/second_device.py`): what only trains, and what MMCA and DCPA explain.

And chapters on a dataset that is not Scenes: their figures of images are drawn from any images with boxes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chapter_on_device import run_on_device
from notebook_cells import NOTEBOOKS, cells_of
from second_device import DEVICE
from toy_dataset import write_toy_dataset

from itm_lab.photos import panels, sheet
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
    if notebook not in ("12_scoring_fast", "clinic"):  # these train nothing
        assert isinstance(model, Matcher)
        assert {parameter.device for parameter in model.parameters()} == {DEVICE}


@pytest.mark.slow
def test_mmca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the chapter explains and draws; its pages' numbers are measured on the device."""
    names = run_on_device("08_mmca", tmp_path, monkeypatch, teach=True, **cheap("08_mmca"))
    assert {parameter.device for parameter in names["model"].parameters()} == {DEVICE}
    assert len(names["curve"]) == len(names["TEST_WEIGHTS"])


@pytest.mark.slow
@pytest.mark.parametrize("notebook", ["01_vsepp", "02_scan", "03_bfan", "05_vsrn", "06_saem", "08_mmca"])
def test_figures_of_a_dataset_that_is_not_scenes(
    notebook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that explains runs, and every figure with images shows some: Scenes is only where truth is known."""
    shown: list[int] = []

    def note(axes: Any, gallery: Any, image: int, boxes: bool = False) -> None:
        shown.append(image)
        show(axes, gallery, image, boxes)

    show = sheet.show
    for module in (sheet, panels):
        monkeypatch.setattr(module, "show", note)
    monkeypatch.setattr("chapter_on_device.DEVICE", torch.device("cpu"))
    data = write_toy_dataset(tmp_path / "toy", {"train": 140, "dev": 62, "test": 70})  # half of train is used
    changes = {"teach": True, "dataset": str(data), "evaluate_on": "test"} | cheap(notebook)
    run_on_device(notebook, tmp_path / "run", monkeypatch, **changes)
    assert len(shown) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"teach": True}, {"teach": False, "training": "joint"}], ids=str)
def test_dcpa(changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stages, their measures and the paper's figures; nothing of the model is on the CPU at the end."""
    names = run_on_device("09_dcpa", tmp_path, monkeypatch, **FEW, **changes)
    assert {parameter.device for parameter in names["model"].parameters()} == {DEVICE}
    assert {"module_overlap", "entity_recall_union", "attention_cosine_within_phrase"} <= names["more"].keys()
