# Generated from notebooks/06_saem.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/06_saem.ipynb exports."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    TextBatch,
    Texts,
    length_mask,
)
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.vsepp import GlobalEmbeddingMixin, HingeTriplet, l2_normalize
from itm_utils.training import Stage, train_config


# cell multi-head
class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with several heads."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise input_error(
                "heads", str(heads), f"a number that divides the width {width}"
            )
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, vectors: Tensor) -> Tensor:
        """(b, k, d) to (b, h, k, d/h)"""
        return vectors.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self, queries: Tensor, context: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries (b, q, d) to context (b, k, d).

        mask: (b, k), True at real keys. Returns attended features (b, q, d) and weights
        (b, h, q, k).
        """
        q = self.split_heads(self.q_proj(queries))
        k = self.split_heads(self.k_proj(context))
        v = self.split_heads(self.v_proj(context))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        lowest = torch.finfo(logits.dtype).min
        weights = logits.masked_fill(~mask[:, None, None, :], lowest).softmax(dim=-1)
        attended = self.dropout(weights) @ v  # (b, h, q, d/h)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), weights


# cell transformer-layer
class TransformerLayer(nn.Module):
    """Post-norm Transformer encoder layer: self-attention, then feed-forward."""

    def __init__(
        self,
        width: int,
        heads: int,
        feed_forward: int,
        dropout: float = 0.1,
        activation: str = "gelu",
        eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads, dropout)
        self.linear1 = nn.Linear(width, feed_forward)
        self.linear2 = nn.Linear(feed_forward, width)
        self.attn_norm = nn.LayerNorm(width, eps=eps)
        self.ffn_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.activation = {"gelu": nn.functional.gelu, "relu": torch.relu}[activation]

    def forward(self, vectors: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(b, k, d) and mask (b, k) to new vectors (b, k, d) and weights (b, h, k, k)."""
        attended, weights = self.attention(vectors, vectors, mask)
        return self.ffn(vectors, attended), weights

    def ffn(self, vectors: Tensor, attended: Tensor) -> Tensor:
        """Residual connection and norm, then the feed-forward sublayer: all (…, k, d)."""
        return self.feed_forward(self.attn_norm(vectors + self.dropout(attended)))

    def feed_forward(self, vectors: Tensor) -> Tensor:
        """The feed-forward sublayer: (…, k, d) to (…, k, d)."""
        inner = self.activation(self.linear1(vectors))
        return self.ffn_norm(self.add_residual(vectors, self.linear2, inner))

    def add_residual(self, vectors: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
        """Vectors plus the output of a linear layer, with dropout.

        Without gradients the product is added in place, which reads memory less often.
        """
        half = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if self.training or torch.is_grad_enabled() or half:
            return vectors + self.dropout(linear(x))
        total = (vectors + linear.bias).expand(*x.shape[:-1], -1).contiguous()
        total.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.T)
        return total


# cell text-cnn
WINDOWS = (1, 2, 3)  # tokens per filter


class TextCNN(nn.Module):
    """Convolutions over the tokens, each followed by max pooling over the caption.

    full_windows: a window counts if it holds real tokens only, and a caption shorter than
    the window is padded with zeros; else one starts at every token, zeros after the last.
    """

    def __init__(
        self, token_dim: int, channels: int, full_windows: bool = True
    ) -> None:
        super().__init__()
        self.full_windows = full_windows
        self.convs = nn.ModuleList(
            nn.Conv1d(token_dim, channels, window) for window in WINDOWS
        )

    def padding(self, width: int, window: int) -> int:
        """Zeros behind ``width`` tokens, so that there is a window at every position."""
        return max(0, window - width) if self.full_windows else window - 1

    def positions(self, lengths: Tensor, window: int) -> Tensor:
        """Number of windows that count in captions of the given lengths."""
        if not self.full_windows:
            return lengths
        return (lengths - window + 1).clamp(min=1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, d) with mask (c, w) to (c, 3 * channels)."""
        lengths = mask.sum(dim=1)
        tokens = torch.where(mask[..., None], tokens, 0).mT  # (c, d, w)
        pooled = []
        for conv, window in zip(self.convs, WINDOWS, strict=True):
            missing = self.padding(tokens.shape[2], window)
            response = conv(nn.functional.pad(tokens, (0, missing))).relu()
            valid = length_mask(self.positions(lengths, window), response.shape[2])
            # no response is negative, so zero can stand for a window that does not count
            pooled.append((response * valid[:, None, :]).amax(dim=2))
        return torch.cat(pooled, dim=1)


# cell two-sides
class ImageEncoder(nn.Module):
    """Linear projection of the regions, then self-attention among them."""

    def __init__(
        self,
        image_dim: int,
        width: int,
        layers: int,
        heads: int,
        feed_forward: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.region_proj = nn.Linear(image_dim, width)
        sizes = (width, heads, feed_forward, dropout)
        self.layers = nn.ModuleList(TransformerLayer(*sizes) for _ in range(layers))

    def forward(self, batch: ImageBatch) -> tuple[Tensor, list[Tensor]]:
        """Regions (i, r, d), and each layer's attention weights (i, h, r, r)."""
        regions, weights = self.region_proj(batch.regions), []
        for layer in self.layers:
            regions, layer_weights = layer(regions, batch.mask)
            weights.append(layer_weights)
        return regions, weights


class TextEncoder(nn.Module):
    """Text CNN over frozen token states, then a linear projection."""

    def __init__(
        self, token_dim: int, channels: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.cnn = TextCNN(token_dim, channels)
        self.proj = nn.Linear(len(WINDOWS) * channels, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens (c, w, token_dim) with mask (c, w) to (c, d)."""
        return self.proj(self.dropout(self.cnn(tokens, mask)))


# cell saem-class
class SAEM(GlobalEmbeddingMixin, Matcher):
    """Self-attention over regions; frozen BERT and a text CNN over words; one vector each.

    vocabulary_size: not used, because captions come as token states of width token_dim.
    heads: 0 for one per 16 units of width. public_padding: padding takes part in the text
    CNN, as in the public code.
    """

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 256,
        token_dim: int = 768,
        layers: int = 1,
        heads: int = 0,
        feed_forward: int = 2048,
        channels: int = 512,
        dropout: float = 0.1,
        angular_weight: float = 0.5,
        weight_penalty: float = 0.01,
        public_padding: bool = False,
    ) -> None:
        super().__init__()
        self.angular_weight, self.weight_penalty = angular_weight, weight_penalty
        self.public_padding = public_padding
        heads = heads or max(1, width // 16)  # as published: 16 heads of 16
        sizes = (image_dim, width, layers, heads, feed_forward, dropout)
        self.image_encoder = ImageEncoder(*sizes)
        self.text_encoder = TextEncoder(token_dim, channels, width, dropout)
        self.set_epoch(0)

    def encode_images(self, batch: ImageBatch) -> Images:
        regions, _ = self.image_encoder(batch)
        return Images(pooled=l2_normalize(masked_mean(regions, batch.mask)))

    def encode_texts(self, batch: TextBatch) -> Texts:
        if batch.features is None:
            hint = "Open the captions with itm_utils.data.text_encoder.bert_captions."
            raise input_error("captions", "word ids", "states of a text encoder", hint)
        mask = torch.ones_like(batch.mask) if self.public_padding else batch.mask
        return Texts(pooled=l2_normalize(self.text_encoder(batch.features, mask)))

    def set_epoch(self, epoch: int) -> None:
        """Decay the angular weight: a tenth every 5 epochs, nothing from epoch 21 on."""
        decay = 0.1 ** (epoch // 5) if epoch < 21 else 0.0
        self.angular_now = self.angular_weight * decay

    def extra_losses(
        self, images: Images, texts: Texts, batch: PairBatch
    ) -> dict[str, Tensor]:
        """The decaying angular loss, and a penalty on the image encoder's matrices."""
        losses = {}
        if self.angular_now:
            angular = angular_loss(images.pooled, texts.pooled)
            losses["angular"] = self.angular_now * angular
        if self.weight_penalty:
            losses["weight_penalty"] = self.weight_penalty * matrix_norms(
                self.image_encoder
            )
        return losses


# cell angular-loss
def angular_costs(anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """4 (a + p) n - 4 a p of every anchor with every negative: (b, n), positives -inf.

    All are (b, d); anchor b, positive b and negative b belong together.
    """
    positive = (anchors * positives).sum(dim=1, keepdim=True)  # (b, 1)
    costs = 4 * (anchors + positives) @ negatives.T - 4 * positive
    same = torch.eye(len(costs), dtype=torch.bool, device=costs.device)
    return costs.masked_fill(same, -math.inf)


def angular_loss(images: Tensor, texts: Tensor, soft: bool = False) -> Tensor:
    """Angular loss of matched unit vectors (b, d) at 45 degrees, in both directions.

    The hardest negative of every anchor, summed; soft: all of them, averaged.
    """
    loss = images.new_zeros(())
    for anchors, positives in ((images, texts), (texts, images)):
        costs = angular_costs(anchors, positives, positives)
        if soft:
            one = costs.new_zeros(len(costs), 1)  # exp(0)
            loss = loss + torch.cat([one, costs], dim=1).logsumexp(dim=1).mean()
        else:
            loss = loss + nn.functional.softplus(costs.amax(dim=1)).sum()
    return loss


# cell own-terms
def matrix_norms(module: nn.Module) -> Tensor:
    """Sum of the Frobenius norms of a module's weight matrices."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    norms = [torch.linalg.vector_norm(matrix) for matrix in matrices]
    return torch.stack(norms).sum()


# cell build
SIZES = ("width", "token_dim", "layers", "feed_forward", "channels", "dropout")
SWITCHES = ("angular_weight", "weight_penalty", "public_padding")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> SAEM:
    """The model that the chapter's parameters describe."""
    options = {name: parameters[name] for name in (*SIZES, *SWITCHES)}
    return SAEM(vocabulary_size, image_dim, **options)


def stages(parameters: Mapping[str, Any], model: SAEM) -> list[Stage]:
    """One training, with the triplet loss and the two terms of the model."""
    objective = HingeTriplet(
        parameters["margin"], warmup_epochs=parameters["warmup_epochs"]
    )
    return [Stage("train", model, objective, train_config(parameters))]
