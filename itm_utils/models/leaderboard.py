# Generated from notebooks/13_leaderboard.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/13_leaderboard.ipynb exports."""

import torch
from torch import Tensor

from itm_utils.matcher import Matcher, PairBatch


# cell sigmoid
class SigmoidLoss:
    """Log loss of each pair of a batch as a match or not, after Zhai et al. (2023); scale and bias are fixed."""

    def __init__(self, scale: float = 10.0, bias: float = -5.0) -> None:
        self.scale, self.bias = scale, bias

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        images, texts = (
            model.encode_images(batch.images),
            model.encode_texts(batch.texts),
        )
        scores = model.score(images, texts)
        sign = (
            2 * torch.eye(len(batch), device=scores.i2t.device) - 1
        )  # 1 for positives, else -1
        logits = self.scale * torch.stack([scores.i2t, scores.t2i]) + self.bias
        loss = -torch.nn.functional.logsigmoid(sign * logits).sum() / len(batch)
        return loss + sum(model.extra_losses(images, texts, batch).values()), {}
