"""The training loop, its settings, its stages and its checkpoints."""

from itm_utils.training.loop import Objective, TrainResult, train
from itm_utils.training.schedule import TrainConfig
from itm_utils.training.stages import Stage, train_config

__all__ = ["Objective", "Stage", "TrainConfig", "TrainResult", "train", "train_config"]
