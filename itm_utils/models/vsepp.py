# Generated from notebooks/01_vsepp.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/01_vsepp.ipynb exports."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from itm_utils.errors import input_error
from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)
from itm_utils.models.keeping_score import MeanPool, masked_mean
from itm_utils.training import Stage, train_config


# cell hinge-loss
def hinge_loss(
    scores: Scores, margin: float, hardest: bool, positive: Tensor | None = None
) -> Tensor:
    """Triplet ranking loss of a batch where image b matches caption b, summed.

    scores: (b, b), both directions. hardest: only the hardest negative of each query.
    positive: (b, b), True where image and caption match; the diagonal by default.
    """
    if scores.i2t.dim() != 2 or scores.i2t.shape[0] != scores.i2t.shape[1]:
        shape = tuple(scores.i2t.shape)
        raise input_error(
            "hinge_loss", f"scores of shape {shape}", "as many images as captions"
        )
    if positive is None:
        size, device = len(scores.i2t), scores.i2t.device
        positive = torch.eye(size, dtype=torch.bool, device=device)
    caption_costs = margin + scores.i2t - scores.i2t.diagonal()[:, None]
    image_costs = margin + scores.t2i - scores.t2i.diagonal()[None, :]
    caption_costs = caption_costs.clamp(min=0).masked_fill(positive, 0)
    image_costs = image_costs.clamp(min=0).masked_fill(positive, 0)
    if hardest:
        caption_costs = caption_costs.max(dim=1).values  # one negative per image
        image_costs = image_costs.max(dim=0).values  # one negative per caption
    return caption_costs.sum() + image_costs.sum()


# cell unit-length
def l2_normalize(vectors: Tensor) -> Tensor:
    """L2-normalise the last axis; a zero vector stays zero."""
    norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norm.masked_fill(norm == 0, 1)


# cell order-scores
ORDER_CHUNK = 2**24  # elements of the largest temporary: 64 MB in single precision


def order_scores(images: Tensor, captions: Tensor) -> Tensor:
    """Negative order violation of all pairs, -||relu(caption - image)||: (i, c)."""
    rows = max(1, ORDER_CHUNK // max(1, captions.numel()))
    parts = [
        -torch.linalg.vector_norm((captions[None] - some[:, None]).relu(), dim=-1)
        for some in images.split(rows)
    ]
    return torch.cat(parts)


# cell caption-reader
class GRUTextEncoder(nn.Module):
    """Word embeddings and a GRU; a caption is the state at its last word."""

    def __init__(
        self, vocabulary_size: int, word_dim: int, width: int, layers: int
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary_size, word_dim)
        self.gru = nn.GRU(word_dim, width, layers, batch_first=True)
        nn.init.uniform_(self.word_embedding.weight, -0.1, 0.1)

    def forward(self, batch: TextBatch) -> Tensor:
        """GRU state after the last word: (c, d)."""
        lengths, order = batch.lengths.sort(descending=True, stable=True)  # on the CPU
        words = batch.words[order.to(batch.words.device, non_blocking=True)]
        packed = pack_padded_sequence(words, lengths, batch_first=True)  # no padding
        inputs = PackedSequence(self.word_embedding(packed.data), packed.batch_sizes)
        last = self.gru(inputs)[1][-1]  # of the last layer, longest caption first
        return last[order.argsort().to(last.device, non_blocking=True)]


# cell one-vector-each
MEASURES = ("cosine", "order")


class GlobalEmbeddingMixin:
    """Scoring for matchers with one embedding per image and one per caption."""

    measure = "cosine"

    def score(self, images: Images, texts: Texts) -> Scores:
        if self.measure == "order":
            return Scores.same(order_scores(images.pooled, texts.pooled))
        return Scores.same(images.pooled @ texts.pooled.T)  # (i, c)

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        if self.measure == "order":
            violation = (texts.pooled - images.pooled).relu()
            return Scores.same(-torch.linalg.vector_norm(violation, dim=-1))
        return Scores.same((images.pooled * texts.pooled).sum(dim=-1))  # (b,)


# cell vsepp
class VSEPP(GlobalEmbeddingMixin, Matcher):
    """VSE++: linear projection of the mean region, GRU over the caption."""

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 1024,
        word_dim: int = 300,
        layers: int = 1,
        measure: str = "cosine",
        image_norm: bool = True,
        absolute: bool = False,
    ) -> None:
        super().__init__()
        if measure not in MEASURES:
            raise input_error("measure", repr(measure), f"one of {', '.join(MEASURES)}")
        self.measure, self.image_norm, self.absolute = measure, image_norm, absolute
        self.image_proj = nn.Linear(image_dim, width)
        self.text_encoder = GRUTextEncoder(vocabulary_size, word_dim, width, layers)
        nn.init.xavier_uniform_(self.image_proj.weight)
        nn.init.zeros_(self.image_proj.bias)

    def encode_images(self, batch: ImageBatch) -> Images:
        pooled = self.image_proj(masked_mean(batch.regions, batch.mask))  # (i, d)
        pooled = l2_normalize(pooled) if self.image_norm else pooled
        return Images(pooled=pooled.abs() if self.absolute else pooled)

    def encode_texts(self, batch: TextBatch) -> Texts:
        pooled = l2_normalize(self.text_encoder(batch))  # (c, d)
        return Texts(pooled=pooled.abs() if self.absolute else pooled)


# cell hinge-triplet
class HingeTriplet:
    """Hinge-based triplet ranking loss as an objective.

    hardest: the hardest negatives only. warmup_epochs: epochs over all negatives first.
    by_image: captions of one image are all positives of it; else only the pair itself.
    """

    def __init__(
        self,
        margin: float = 0.2,
        hardest: bool = True,
        warmup_epochs: int = 0,
        by_image: bool = False,
    ) -> None:
        self.margin, self.hardest, self.warmup_epochs = margin, hardest, warmup_epochs
        self.by_image = by_image
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called by the training loop at the start of each epoch, counted from 0."""
        self.hardest_now = self.hardest and epoch >= self.warmup_epochs

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        images = model.encode_images(batch.images)
        texts = model.encode_texts(batch.texts)
        ids = batch.images.ids
        positive = ids[:, None] == ids if self.by_image else None
        scores = model.score(images, texts)
        loss = hinge_loss(scores, self.margin, self.hardest_now, positive)
        extra = model.extra_losses(images, texts, batch)
        return loss + sum(extra.values()), {"hardest": float(self.hardest_now)}


# cell build
MODELS = ("VSE++", "mean-pool")


def build(parameters: Mapping, vocabulary_size: int, image_dim: int) -> Matcher:
    """Build the matcher that the chapter's parameters describe."""
    name, width = parameters["model_name"], parameters["width"]
    if name not in MODELS:
        raise input_error("model_name", repr(name), f"one of {', '.join(MODELS)}")
    if name == "mean-pool":
        return MeanPool(vocabulary_size, image_dim, width)
    names = ("word_dim", "measure", "image_norm", "absolute")
    options = {name: parameters[name] for name in names}
    return VSEPP(vocabulary_size, image_dim, width, **options)


# cell stages
def stages(parameters: Mapping, model: Matcher) -> list[Stage]:
    """The one training of a run: the triplet loss, with or without a warm-up."""
    names = ("margin", "hardest", "warmup_epochs")
    objective = HingeTriplet(**{name: parameters[name] for name in names})
    return [Stage("train", model, objective, train_config(parameters))]
