"""The trainings of a run: most chapters have one, DCPA two stages, AOQ a miner before the final model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from itm_utils.matcher import Matcher
from itm_utils.training.loop import Objective
from itm_utils.training.schedule import TrainConfig


@dataclass(frozen=True)
class Stage:
    """One training of a run; every chapter exports ``stages(parameters, model)``, which lists them in order.

    name: of its folder below the run's. model: what is trained. objective: its loss. config: how long and how.
    ranker: what is scored on dev while it is trained, where that is not ``model`` alone. mines: whether offline
    negatives are mined with it afterwards.
    """

    name: str
    model: Matcher
    objective: Objective
    config: TrainConfig
    ranker: Matcher | None = None
    mines: bool = False

    @property
    def validated(self) -> Matcher:
        """The matcher whose recalls on dev choose the best weights."""
        return self.ranker if self.ranker is not None else self.model


def train_config(parameters: Mapping[str, Any], **changes: Any) -> TrainConfig:
    """The settings that a chapter's parameters describe; ``changes`` are those of one stage.

    ``schedule="lab"``: one cosine over the whole training. Else the learning rate drops in steps, every ``decay_every``
    epochs, half way through if the chapter does not say.
    """
    names = ("epochs", "batch_size", "learning_rate", "seed", "device", "precision", "num_workers")
    optional = ("clip_norm", "validate_every", "compiled")
    given = {name: parameters[name] for name in names}
    given |= {name: parameters[name] for name in optional if name in parameters}
    given |= {name: value for name, value in changes.items() if name not in ("schedule", "decay_every")}
    epochs = given["epochs"]
    if parameters["schedule"] == "lab":
        decay = {"schedule": "cosine", "decay_every": epochs}
    else:
        every = changes.get("decay_every", parameters.get("decay_every", max(1, epochs // 2)))
        decay = {"schedule": changes.get("schedule", "step"), "decay_every": every}
    return replace(TrainConfig(**given), **decay)
