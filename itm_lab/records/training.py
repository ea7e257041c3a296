"""What a receipt says of the trainings behind it: how much every stage saw, how it went on dev, and what chose its settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from itm_lab.records.collapse import final_loss
from itm_utils.digests import file_digest
from itm_utils.errors import input_error
from itm_utils.files import read_text
from itm_utils.training import Stage, TrainResult

SEARCH_RECORD = (
    "ITM_SEARCH_RECORD"  # environment: the records of the searches that chose a run's settings; `itm run` sets it
)


@dataclass(frozen=True)
class Trained:
    """A stage and what its training gave. shared: in a folder that other runs use as well."""

    stage: Stage
    result: TrainResult
    shared: bool = False

    @property
    def record(self) -> dict[str, Any]:
        """The stage as a receipt has it."""
        config, log, batch = self.stage.config, self.result.log, self.result.captions_a_step
        steps = max((entry["step"] for entry in log), default=0)
        return {
            "name": self.stage.name,
            "shared": self.shared,
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "captions_seen": steps * batch,
            "steps": steps,
            "seconds": round(self.result.seconds, 3),
            "learning_rate": config.learning_rate,
            "final_loss": final_loss(log),
            "dev": [[entry["step"] * batch, entry["val_rsum"]] for entry in log if "val_rsum" in entry],
        }


def training_record(train_images: int, stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The ``training`` of a receipt; None where nothing was trained."""
    seen = sum(stage["captions_seen"] for stage in stages)
    return {"captions_seen": seen, "train_images": train_images, "stages": list(stages)} if stages else None


def joint_training(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The ``training`` of an ensemble: the stages of all members; None unless every member recorded its own."""
    members = [(receipt, receipt["training"]) for receipt in receipts if receipt.get("training")]
    if len(members) < len(receipts):
        return None
    stages = [
        stage | {"name": f"{receipt['variant']}, seed {receipt['seed']}: {stage['name']}"}
        for receipt, training in members
        for stage in training["stages"]
    ]
    return training_record(max(training["train_images"] for _, training in members), stages)


def search_records(paths: str | None = None) -> list[dict[str, Any]]:
    """The ``search`` of a receipt: what the records say that `itm run` names, in the order of the searches."""
    named = paths if paths is not None else os.environ.get(SEARCH_RECORD, "")
    return [search_record(Path(path)) for path in named.split(os.pathsep) if path]


def search_record(where: Path) -> dict[str, Any]:
    """One search of a receipt: what its record says, and the digest of the record."""
    form = "the record of a search, as `itm run` wrote it"
    try:
        record = json.loads(read_text(where, form))
        select, runs = record["select"], len(record["runs"])
        tried = grid_of(record["runs"]) if "grid" in select else select["settings"]
        planned = combinations(select) * select["seeds"]
        found = {"grid": tried, "runs": runs, "planned": planned, "seeds": select["seeds"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise
        raise input_error(where, f"no record of a choice ({error!r})", form) from None
    return found | {"record": "/".join(where.parts[-3:]), "digest": file_digest(where)}


def combinations(select: Mapping[str, Any]) -> int:
    """How many settings a search tries as its file has it, without further values of a ladder."""
    return math.prod(map(len, select["grid"].values())) if "grid" in select else len(select["settings"])


def grid_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Setting → the values that runs tried, further ones of a ladder included."""
    return {name: sorted({run["setting"][name] for run in runs}) for name in runs[0]["setting"]}
