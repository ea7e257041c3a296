"""The settings of a training run, and the learning rate they give at any moment."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from itm_utils.errors import input_error

SCHEDULES = ("constant", "step", "cosine")
DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("fp32", "bf16")
# Settings that are numbers, their type and the least value that makes sense.
NUMBERS = (
    (("epochs", "batch_size", "decay_every", "cycle_growth", "checkpoint_every"), int, 1),
    (("validate_every", "seed", "num_workers"), int, 0),
    (("learning_rate",), (int, float), 1e-12),
    (("decay", "clip_norm"), (int, float), 0),
)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run besides model, objective and data. Plain values: papermill can set them."""

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 2e-4
    schedule: str = "step"  # constant, step, or cosine with warm restarts
    decay_every: int = 15  # step: epochs between drops; cosine: epochs of the first cycle
    decay: float = 0.1  # step: factor of a drop; cosine: lowest rate as a part of the first
    cycle_growth: int = 1  # cosine: each cycle is this many times as long as the one before
    clip_norm: float = 2.0  # total gradient norm; 0 for no clipping
    validate_every: int = 0  # steps; 0 for the end of every epoch
    checkpoint_every: int = 500  # steps
    select: str = "rsum"  # the validation metric that chooses the best weights
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    compiled: bool = False  # scores through torch.compile; the first steps take minutes, and a C++ compiler is needed
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("schedule", SCHEDULES), ("device", DEVICES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise input_error(name, repr(getattr(self, name)), f"one of {', '.join(choices)}")
        for names, kind, least in NUMBERS:
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
                    what = "a whole number" if kind is int else "a number"
                    raise input_error(name, repr(value), f"{what} from {least:g} up")
        available = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
        if self.device in available and not available[self.device]():
            raise input_error("device", repr(self.device), "a device this machine has", "Use device='auto' or 'cpu'.")


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
