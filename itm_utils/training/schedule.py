"""The settings of a training run, and the learning rate they give at any moment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_type_hints

import torch

from itm_utils.errors import input_error
from itm_utils.validation import Count, CountOrZero, NotNegative, Positive, settings_model, validated


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run besides model, objective and data. Plain values: papermill can set them."""

    epochs: Count = 30
    batch_size: Count = 128
    learning_rate: Positive = 2e-4
    schedule: Literal["constant", "step", "cosine"] = "step"  # constant, step, or cosine with warm restarts
    decay_every: Count = 15  # step: epochs between drops; cosine: epochs of the first cycle
    decay: NotNegative = 0.1  # step: factor of a drop; cosine: lowest rate as a part of the first
    cycle_growth: Count = 1  # cosine: each cycle is this many times as long as the one before
    clip_norm: NotNegative = 2.0  # total gradient norm; 0 for no clipping
    validate_every: CountOrZero = 0  # steps; 0 for the end of every epoch
    checkpoint_every: Count = 500  # steps
    select: str = "rsum"  # the validation metric that chooses the best weights
    seed: CountOrZero = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: bool = False  # scores through torch.compile; the first steps take minutes, and a C++ compiler is needed
    num_workers: CountOrZero = 0

    def __post_init__(self) -> None:
        validated(TrainSettings, vars(self))
        available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
        if self.device in available and not available[self.device]():
            raise input_error("device", repr(self.device), "a device this machine has", "Use device='auto' or 'cpu'.")


# The types and limits of the settings: of a configuration, and of the parameters of a chapter that have their names.
TRAIN_TYPES = get_type_hints(TrainConfig, include_extras=True)
TrainSettings = settings_model("TrainSettings", {name: (kind, ...) for name, kind in TRAIN_TYPES.items()})


def lr_multiplier(config: TrainConfig, epoch: float) -> float:
    """Learning rate at a (fractional) epoch, as a part of the first. A pure function: nothing to save or restore."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return config.decay ** (int(epoch) // config.decay_every)
    length = config.decay_every
    while epoch >= length:
        epoch -= length
        length *= config.cycle_growth
    return config.decay + (1 - config.decay) * (1 + math.cos(math.pi * epoch / length)) / 2
