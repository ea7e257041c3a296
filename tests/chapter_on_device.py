"""Run a whole chapter in this process with its models on the second device: what breaks on a GPU breaks here.

Training is one step on the device, after which the model stays there, as after a training on a GPU.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from notebook_cells import cells_of
from second_device import DEVICE

import itm_utils.training
from itm_lab.records import chapter
from itm_lab.records.parameters import declared_parameters
from itm_utils.data.batches import PairDataset
from itm_utils.matcher import Matcher
from itm_utils.training import TrainConfig, TrainResult


def one_step(
    model: Matcher,
    objective: Callable,
    data: PairDataset,
    config: TrainConfig,
    folder: Path,
    validate: Callable[[Matcher], dict[str, float]] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> TrainResult:
    """In place of ``train``: the gradients of one batch, on the second device."""
    model.to(DEVICE)
    loss, _ = objective(model, data[np.arange(8)].to(DEVICE, non_blocking=True))
    loss.backward()
    metrics = validate(model) if validate else {}
    log = [{"step": step, "loss": 1.0} for step in range(1, 40)]
    log += [{"step": 39} | {f"val_{name}": value for name, value in metrics.items()}] if metrics else []
    return TrainResult(log, {"step": 39} | metrics if metrics else {}, 0.0, model)


def run_on_device(notebook: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """The names after all code cells of a chapter. changes: parameters."""
    names: dict[str, Any] = {}
    monkeypatch.setattr(itm_utils.training, "train", one_step)
    monkeypatch.setattr(chapter, "train", one_step)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    monkeypatch.setattr("itm_lab.records.chapter.start_chapter", lambda name: chapter.Chapter.of_cells(name, [], names))
    for cell, source in cells_of(notebook, "code").items():
        source = "\n".join("" if line.startswith("%") else line for line in source.split("\n"))
        place = f"{notebook}, cell {cell}"
        linecache.cache[place] = (len(source), None, source.splitlines(True), place)  # chapters show their own source
        exec(compile(source, place, "exec", optimize=1), names)  # without what they assert of a trained model
        if declared := declared_parameters(source):
            assert changes.keys() <= declared.keys()
            names |= changes | {"run_dir": str(folder)}
    return names
