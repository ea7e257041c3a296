# Generated from notebooks/00_keeping_score.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/00_keeping_score.ipynb exports."""

import torch
from torch import Tensor, nn

from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)


# cell masked-mean
def masked_mean(vectors: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions that the mask selects: (n, d).

    vectors: (n, k, d). mask: (n, k), True at real positions, False at padding.
    """
    weight = mask.unsqueeze(-1).to(vectors.dtype)
    return (vectors * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


# cell mean-pool
class MeanPool(Matcher):
    """Cosine of the mean projected region and the mean word embedding."""

    def __init__(self, vocabulary_size: int, image_dim: int, width: int = 64) -> None:
        super().__init__()
        self.region_proj = nn.Linear(image_dim, width)
        self.word_embedding = nn.Embedding(vocabulary_size, width)

    def encode_images(self, batch: ImageBatch) -> Images:
        mean = masked_mean(self.region_proj(batch.regions), batch.mask)  # (i, d)
        return Images(pooled=nn.functional.normalize(mean, dim=-1))

    def encode_texts(self, batch: TextBatch) -> Texts:
        mean = masked_mean(self.word_embedding(batch.words), batch.mask)  # (c, d)
        return Texts(pooled=nn.functional.normalize(mean, dim=-1))

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(images.pooled @ texts.pooled.T)  # (i, c)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        return Scores.same((images.pooled * texts.pooled).sum(dim=-1))  # (b,)


# cell in-batch-softmax
class InBatchSoftmax:
    """Cross-entropy of the positive within the batch, in both directions."""

    def __init__(self, temperature: float = 0.07) -> None:
        self.temperature = temperature

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        images = model.encode_images(batch.images)
        texts = model.encode_texts(batch.texts)
        scores = model.score(images, texts)
        positive = torch.arange(len(batch), device=scores.i2t.device)
        loss = nn.functional.cross_entropy(scores.i2t / self.temperature, positive)
        loss = loss + nn.functional.cross_entropy(
            scores.t2i.T / self.temperature, positive
        )
        extra = model.extra_losses(images, texts, batch)
        return loss + sum(extra.values()), {}
