"""A training run for test_training.py to kill: dropout, validation and frequent checkpoints, on toy data.

usage: python killed_run.py DATA RUN_DIR [STEP_TO_DIE_AT]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import ImageBatch, Images
from itm_utils.metrics.retrieval import evaluate
from itm_utils.models.keeping_score import InBatchSoftmax, MeanPool
from itm_utils.scoring import score_split
from itm_utils.training.loop import TrainConfig, train


class NoisyMeanPool(MeanPool):
    """Dropout draws from the global generator: a resumed run must draw the same noise."""

    def encode_images(self, batch: ImageBatch) -> Images:
        noisy = nn.functional.dropout(batch.regions, 0.3, training=self.training)
        return super().encode_images(ImageBatch(noisy, batch.mask, batch.ids))


class Mortal(InBatchSoftmax):
    """Kills its process, without warning, when it is called for the given step."""

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self._calls_left = step

    def __call__(self, model, batch):
        if self._calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._calls_left is not None:
            self._calls_left -= 1
        return super().__call__(model, batch)


def main(data: str, run_dir: str, calls: int | None) -> None:
    torch.set_num_threads(1)
    root = Path(data)
    split, dev = open_split(root, "train"), open_split(root, "dev")
    vocabulary = Vocabulary.load(root / "toy_vocab.json")
    dev_texts = WordCaptions(dev, vocabulary)
    torch.manual_seed(5)
    model = NoisyMeanPool(len(vocabulary), split.feature_dim, 8)
    config = TrainConfig(
        epochs=4, batch_size=32, learning_rate=0.01, schedule="cosine", decay_every=2, validate_every=5,
        checkpoint_every=4, device="cpu",
    )  # fmt: skip
    train(
        model,
        Mortal(calls),
        PairDataset(split, WordCaptions(split, vocabulary)),
        config,
        run_dir,
        validate=lambda m: evaluate(score_split(m, dev, dev_texts), dev.owner).as_dict(),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
