"""From the scores of a run to its receipt, and score matrices on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from itm_lab.data.registry import coco_protocol
from itm_lab.records.bootstrap import bootstrap_intervals
from itm_lab.records.receipts import Evidence, make_receipt, write_receipt
from itm_utils.errors import ItmError, input_error
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import (
    Ranks,
    Retrieval,
    fold_ranks,
    summarise_folds,
)
from itm_utils.training.checkpoints import read_checkpoint, write_checkpoint


def save_scores(scores: Scores, owner: np.ndarray, folder: Path, more: Mapping[str, float], **about: Any) -> Retrieval:
    """Write the receipt of scores and print its line; on COCO's ``testall`` first the papers' 1K, then their 5K.

    owner: (c,) image of each caption. about: what :func:`itm_lab.records.receipts.make_receipt` wants to know of the run.
    """
    split = about["dataset"]["split"]
    for folds in (5, 1) if split == "testall" else (1,):
        evidence = Evidence.of(fold_ranks(scores, owner, folds), owner)
        ranks = Ranks(evidence.i2t, evidence.t2i)
        result = summarise_folds(ranks, owner, folds, scores.models)
        if split == "testall" and len(scores.i2t) == 5000:
            result = coco_protocol(result, split)
        spread = bootstrap_intervals(ranks, owner)
        measured = {"metrics": result.as_dict() | dict(more), "intervals": spread, "evidence": evidence}
        receipt = make_receipt(**about, **measured, models=result.models, protocol=result.protocol)
        path = write_receipt(receipt, folder, evidence)
        low, high = spread["rsum"]
        print(f"{result.label}: rsum {result.rsum:.1f} [{low:.1f}, {high:.1f}], receipt {path.name}")
    return result


def write_scores(path: Path, scores: Scores) -> None:
    """The score matrices of a run, for ensembles: one where both directions share it."""
    matrices = {"i2t": scores.i2t} | ({"t2i": scores.t2i} if scores.decoupled else {})
    write_checkpoint(path, matrices, {})


def read_scores(path: Path) -> Scores:
    """What :func:`write_scores` wrote."""
    hint = "`itm run` of the same experiment computes them again from its checkpoint."
    if not path.is_file():
        raise input_error(path, "no such file", "the scores of a finished run", hint)
    try:
        with safe_open(path, framework="pt") as file:
            older = "format" not in (file.metadata() or {})  # without digests
        matrices = load_file(path) if older else read_checkpoint(path).tensors
    except (SafetensorError, ItmError) as error:
        raise input_error(path, f"a damaged file ({error})", "the scores of a finished run", hint) from error
    if "i2t" not in matrices:
        raise input_error(path, f"only {', '.join(matrices) or 'nothing'}", "i2t among the scores of a finished run")
    return Scores(i2t=matrices["i2t"], t2i=matrices.get("t2i", matrices["i2t"]))
