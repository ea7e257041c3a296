"""Run reference cases through our models: do they compute what the public implementations compute?"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_lab.parity.adapters import adapter_for
from itm_lab.parity.comparison import (
    Arrays,
    Difference,
    Table,
    all_scores,
    batches,
    compare_metrics,
    our_name,
    to_device,
)
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher, Scores
from itm_utils.metrics.retrieval import ensemble

Names = Mapping[str, str]  # public name prefixes → ours


def run_folder(folder: str | Path) -> Iterator[Difference]:
    """Every case below ``folder``, in order of its path."""
    folder = Path(folder)
    cases = sorted(folder.rglob("*.npz"))
    if not cases:
        raise input_error(folder, "no .npz file", "reference cases")
    for path in cases:
        yield from run_case(path)


def run_case(path: str | Path) -> list[Difference]:
    """One case: the differences by kind of quantity."""
    path = Path(path)
    description = path.with_suffix(".json")
    if not description.is_file():
        raise input_error(description, "no such file", f"the options of {path.name}")
    about = json.loads(description.read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    name = model_name(about, path)
    table = Table(f"{name}/{path.stem}")
    if name == "eval" or ("model" not in about and "in.sims" in arrays):
        compare_metrics(table, arrays)
    else:
        _compare_model(table, adapter_for(name, path), about, arrays)
    if not table.found:
        raise input_error(path, "nothing to compare", "out.* arrays")
    return table.rows()


def model_name(about: Mapping[str, Any], path: Path) -> str:
    """The module of a case: ``"PFAN (public variant)"`` means pfan; where no model is named, the folder tells."""
    return re.split(r"[^a-z0-9_]", (about.get("model") or path.parent.name).lower())[0]


def _one_name_each(arrays: Arrays, about: Mapping[str, Any]) -> Arrays:
    """Cases of some models call the paired captions ``in.pair_cap`` and keep the margin among their options."""
    known = dict(arrays)
    if "in.pair_cap" in known:
        known.setdefault("in.loss_caption_index", known["in.pair_cap"])
    if "margin" in about.get("options", {}):
        known.setdefault("in.margin", np.array(about["options"]["margin"], np.float32))
    if "probe_cap" in about.get("case", {}):  # the caption whose mid.probe_* values are stored
        known.setdefault("in.probe_cap", np.array(about["case"]["probe_cap"], np.int64))
    return known


def _compare_model(table: Table, adapter: ModuleType, about: dict, arrays: Arrays) -> None:
    if hasattr(adapter, "compare_case") and adapter.compare_case(table, about, arrays):
        return
    arrays = _one_name_each(arrays, about)

    def build(options: Mapping[str, Any], prefix: str = "w.") -> Matcher:
        weights = {k.removeprefix(prefix): to_device(a) for k, a in arrays.items() if k.startswith(prefix)}
        return adapter.load(weights, options).eval()

    members = [name.removeprefix("options_") for name in about if name.startswith("options_")]
    if members:
        models = {name: build(about[f"options_{name}"], f"w.{name}.") for name in members}
        _compare_ensemble(table, models, arrays)
        return

    if "combos" in about:
        for combination, settings in about["combos"].items():
            options = about["options"] | _grid_options(combination, settings)
            _compare_scores(table, build(options), adapter.NAMES, arrays, f".{combination}")
        return
    model = build(about["options"])
    if hasattr(adapter, "values"):
        for name, value in adapter.values(model, arrays).items():
            table.add("values", name, value, arrays[name])
    if "out.step_losses" in arrays:
        _compare_steps(table, model, adapter.NAMES, about["options"], arrays)
    else:
        _compare_scores(table, model, adapter.NAMES, arrays, "")
    if "out.train.sims_pairs" in arrays:
        _compare_training_mode(table, model, adapter.NAMES, arrays)


def _grid_options(combination: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """``"t2i.Mean.softmax"`` and its temperatures as public options."""
    direction, pooling, norm = combination.split(".")
    chosen = {"cross_attn": direction, "agg_func": pooling, "raw_feature_norm": norm}
    return chosen | {name: value for name, value in settings.items() if name.startswith("lambda_")}


def _paired(scores: Scores, arrays: Arrays) -> Scores:
    """The square matrix of the loss: image n with caption ``in.loss_caption_index[n]``."""
    index = torch.from_numpy(arrays["in.loss_caption_index"])
    return Scores(i2t=scores.i2t[:, index], t2i=scores.t2i[:, index])


def _hinge() -> Callable[..., Tensor]:
    return importlib.import_module("itm_utils.models.vsepp").hinge_loss


def _compare_scores(table: Table, model: Matcher, names: Names, arrays: Arrays, suffix: str) -> None:
    scores = all_scores(model, arrays)
    margin = float(arrays["in.margin"])
    table.add("values", f"out.sims{suffix}", scores.i2t, arrays[f"out.sims{suffix}"])
    pairs = _paired(scores, arrays)
    losses = {"hard": _hinge()(pairs, margin, hardest=True), "sum": _hinge()(pairs, margin, hardest=False)}
    for name, loss in losses.items():
        key = f"out.loss_{name}{suffix}"
        table.add("losses", key, loss, arrays[key], relative=True)
    model.zero_grad()
    losses["hard"].backward()
    parameters = dict(model.named_parameters())
    for key in arrays:
        if key.startswith("out.grad.") and key.endswith(suffix):
            public = key.removeprefix("out.grad.").removesuffix(suffix) if suffix else key.removeprefix("out.grad.")
            gradient = parameters[our_name(names, public)].grad
            table.add("gradients", key, gradient, arrays[key], relative=True)


def _compare_ensemble(table: Table, models: Mapping[str, Matcher], arrays: Arrays) -> None:
    """Members with weights and options of their own, and the mean of their scores."""
    parts = {name: all_scores(model, arrays) for name, model in models.items()}
    for name, scores in parts.items():
        table.add("values", f"out.sims_{name}", scores.i2t, arrays[f"out.sims_{name}"])
    table.add("values", "out.sims", ensemble(list(parts.values())).i2t, arrays["out.sims"])


def _compare_training_mode(table: Table, model: Matcher, names: Names, arrays: Arrays) -> None:
    """One forward and backward pass of the paired batch with the statistics of the batch; what it leaves behind."""
    images, texts = batches(arrays)
    model.train()
    scores = model.score(
        model.encode_images(images), model.encode_texts(texts[torch.from_numpy(arrays["in.loss_caption_index"])])
    )
    table.add("values", "out.train.sims_pairs", scores.i2t, arrays["out.train.sims_pairs"])
    losses = {name: _hinge()(scores, float(arrays["in.margin"]), name == "hard") for name in ("hard", "sum")}
    for name, loss in losses.items():
        table.add("losses", f"out.train.loss_{name}", loss, arrays[f"out.train.loss_{name}"], relative=True)
    model.zero_grad()
    losses["hard"].backward()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for key in arrays:
        public = key.split(".", 3)[-1]
        if key.startswith("out.train.grad."):
            gradient = parameters[our_name(names, public)].grad
            table.add("gradients", key, gradient, arrays[key], relative=True)
        elif key.startswith("out.train.buffer."):
            table.add("values", key, buffers[our_name(names, public)], arrays[key])


def _compare_steps(table: Table, model: Matcher, names: Names, options: Mapping[str, Any], arrays: Arrays) -> None:
    """Five steps of Adam with clipping on one batch, as the public training step does."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=options["learning_rate"])
    losses, norms = [], []
    for _ in range(len(arrays["out.step_losses"])):
        pairs = _paired(all_scores(model, arrays), arrays)
        loss = _hinge()(pairs, float(arrays["in.margin"]), hardest=options["max_violation"])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), options["grad_clip"]).item())
        optimizer.step()
        losses.append(loss.item())
    table.add("after five steps", "out.step_losses", losses, arrays["out.step_losses"], relative=True)
    table.add("after five steps", "out.step_grad_norms", norms, arrays["out.step_grad_norms"], relative=True)
    parameters = dict(model.named_parameters())
    for key in arrays:
        if key.startswith("out.after."):
            ours = parameters[our_name(names, key.removeprefix("out.after."))]
            table.add("after five steps", key, ours, arrays[key], relative=True)
