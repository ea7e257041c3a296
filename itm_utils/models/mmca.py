# Generated from notebooks/08_mmca.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/08_mmca.ipynb exports."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    additive_mask,
    attend_all_pairs,
    attend_pairs,
    hardest_negatives,
    max_over_windows,
    merge_softmaxes,
    score_selected,
)
from itm_utils.matcher import (
    ABSENT,
    Attention,
    Encoded,
    ImageBatch,
    Images,
    Matcher,
    PairBatch,
    Scores,
    TextBatch,
    Texts,
)
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.saem import TextCNN, TransformerLayer
from itm_utils.models.scan import encode_words
from itm_utils.models.vsepp import l2_normalize
from itm_utils.scoring import block_shape, score_all, trim
from itm_utils.training import Stage, train_config


# cell concatenation
def apply_to_concatenation(
    layer: TransformerLayer,
    regions: Tensor,
    words: Tensor,
    region_mask: Tensor,
    word_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Regions (b, r, d) and words (b, w, d) of given pairs after a layer over both."""
    joint = torch.cat([regions, words], dim=1)
    mask = torch.cat([region_mask, word_mask], dim=1)
    joint, _ = layer(joint, mask)
    return joint[:, : regions.shape[1]], joint[:, regions.shape[1] :]


# cell cross-modal-layer
BLOCKS = ("all", "self", "cross")


class CrossModalTransformerLayer(TransformerLayer):
    """Transformer layer over [regions; words], with self-attention once per item.

    blocks: the attention blocks that are not masked. Attention weights have no dropout.
    """

    def __init__(
        self, width: int, heads: int, feed_forward: int, dropout: float, blocks: str
    ) -> None:
        super().__init__(width, heads, feed_forward, dropout, "relu", eps=1e-5)
        self.activation = torch.relu_  # in place: nothing else reads its input
        self.blocks = blocks

    def prepare(self, vectors: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Projections (n, k, h, e) and self-attention of items (n, k, d)."""
        split = (self.attention.heads, -1)
        query = self.attention.q_proj(vectors).unflatten(-1, split)
        key = self.attention.k_proj(vectors).unflatten(-1, split)
        value = self.attention.v_proj(vectors).unflatten(-1, split)
        query = query / math.sqrt(query.shape[-1])
        attended, logsumexp = attend_pairs(query, key, value, mask)
        projected = {"query": query, "key": key, "value": value}
        return projected | {"self_attended": attended, "self_logsumexp": logsumexp}

    def merge_blocks(
        self, own: dict[str, Tensor], attended: Tensor, logsumexp: Tensor
    ) -> Tensor:
        """One softmax over both modalities, from self- and cross-attention apart.

        own: what ``prepare`` returned. attended, logsumexp: of the cross-attention.
        """
        if self.blocks == "cross":
            return attended
        if self.blocks == "self":
            return own["self_attended"].expand_as(attended)
        self_attention = own["self_attended"], own["self_logsumexp"]
        return merge_softmaxes(*self_attention, attended, logsumexp)

    def attention_output(self, vectors: Tensor, attended: Tensor) -> Tensor:
        """Output projection and feed-forward of (…, k, d) and attended (…, k, h, e)."""
        out_proj, attended = self.attention.out_proj, attended.flatten(-2)
        vectors = self.attn_norm(self.add_residual(vectors, out_proj, attended))
        return self.feed_forward(vectors)


# cell apply-to-pairs
def apply_to_pairs(
    layer: CrossModalTransformerLayer, one: Encoded, other: Encoded
) -> Tensor:
    """Vectors of ``one`` (b, k, d) after the layer over given pairs [one; other]."""
    own, keys = one.extra_local, other.extra_local
    args = own["query"], keys["key"], keys["value"], other.mask
    attended, logsumexp = attend_pairs(*args)
    attended = layer.merge_blocks(own, attended, logsumexp)
    return layer.attention_output(one.local, attended)


def apply_to_all_pairs(
    layer: CrossModalTransformerLayer, one: Encoded, other: Encoded
) -> Tensor:
    """Vectors of ``one`` (m, n, k, d) after the layer over all pairs [one; other]."""
    own, keys = one.extra_local, other.extra_local
    args = own["query"], keys["key"], keys["value"], other.mask
    attended, logsumexp = attend_all_pairs(*args)
    own = {name: tensor[:, None] for name, tensor in own.items()}
    attended = layer.merge_blocks(own, attended, logsumexp)
    return layer.attention_output(one.local[:, None], attended)


# cell pair-cnn
class PairTextCNN(TextCNN):
    """SAEM's text CNN for many short rows: one matrix product for all taps of all filters."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens (b, w, d) with mask (b, w) to (b, 3 * channels)."""
        lengths = mask.sum(dim=1, keepdim=True)  # (b, 1)
        tokens = torch.where(mask[..., None], tokens, 0)
        missing = self.padding(tokens.shape[1], len(self.convs))
        tokens = nn.functional.pad(tokens, (0, 0, 0, missing))
        weights = [cast(Tensor, conv.weight) for conv in self.convs]
        biases = [cast(Tensor, conv.bias) for conv in self.convs]
        windows = range(1, len(weights) + 1)
        inside = [self.positions(lengths, window) for window in windows]
        return max_over_windows(tokens, weights, biases, inside)


# cell token-encoder
TEXT_BACKBONES = ("bert", "gru")


class TokenEncoder(nn.Module):
    """One state per token: cached states of a frozen text encoder, or of a trained GRU.

    token_dim: dimension of a state. vocabulary_size, word_dim: for the GRU alone.
    """

    def __init__(
        self, text_backbone: str, vocabulary_size: int, word_dim: int, token_dim: int
    ) -> None:
        super().__init__()
        if text_backbone not in TEXT_BACKBONES:
            expected = f"one of {', '.join(TEXT_BACKBONES)}"
            raise input_error("text_backbone", repr(text_backbone), expected)
        self.gru = None
        if text_backbone == "gru":
            self.word_embedding = nn.Embedding(vocabulary_size, word_dim)
            nn.init.uniform_(self.word_embedding.weight, -0.1, 0.1)
            self.gru = nn.GRU(word_dim, token_dim, bidirectional=True, batch_first=True)

    def forward(self, batch: TextBatch) -> Tensor:
        """States (c, w, token_dim)."""
        if self.gru is not None:
            if batch.words is None:
                raise input_error("captions", "states of a text encoder", "word ids")
            return encode_words(
                self.gru, self.word_embedding(batch.words), batch.lengths
            )
        if batch.features is None:
            hint = "Open the captions with itm_lab.data.opening.token_states."
            raise input_error("captions", "word ids", "states of a text encoder", hint)
        return batch.features


# cell self-attention-module
class SelfAttentionModule(nn.Module):
    """Intra-modality encoders (Sec. 3.3): one vector per image, i0, and per caption, c0."""

    def __init__(
        self,
        image_dim: int,
        token_dim: int,
        width: int,
        heads: int,
        feed_forward: int,
        channels: int,
        full_windows: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.region_proj = nn.Linear(image_dim, width)
        self.transformer = TransformerLayer(
            width, heads, feed_forward, dropout, "relu", eps=1e-5
        )
        self.text_cnn = TextCNN(token_dim, channels, full_windows)
        self.text_proj = nn.Linear(3 * channels, width)
        self.dropout = nn.Dropout(dropout)

    def encode_images(self, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Projected regions (i, r, d), and i0 (i, d), of features (i, r, image_dim)."""
        regions = self.region_proj(features)
        attended, _ = self.transformer(regions, mask)
        return regions, l2_normalize(masked_mean(attended, mask))

    def encode_texts(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """c0 (c, d) of token states (c, w, token_dim)."""
        pooled = self.dropout(self.text_cnn(tokens, mask))
        return l2_normalize(self.text_proj(pooled))


# cell cross-attention-module
class CrossAttentionModule(nn.Module):
    """One layer over [regions; words] (Sec. 3.4): vectors i1 and c1 of a pair.

    blocks: the attention blocks that are not masked, all, self or cross.
    """

    def __init__(
        self,
        token_dim: int,
        width: int,
        heads: int,
        feed_forward: int,
        channels: int,
        full_windows: bool,
        dropout: float,
        blocks: str,
    ) -> None:
        super().__init__()
        self.token_proj = nn.Linear(token_dim, width)
        self.transformer = CrossModalTransformerLayer(
            width, heads, feed_forward, dropout, blocks
        )
        self.text_cnn = PairTextCNN(width, channels, full_windows)
        self.text_proj = nn.Linear(3 * channels, width)
        self.dropout = nn.Dropout(dropout)

    def image_vector(self, regions: Tensor, mask: Tensor) -> Tensor:
        """i1 (b, d) of regions (b, r, d) after the layer."""
        total = mask.to(regions.dtype)[:, None] @ regions  # a unit vector has no scale
        return l2_normalize(total[:, 0])

    def caption_vector(self, words: Tensor, mask: Tensor) -> Tensor:
        """c1 (b, d) of words (b, w, d) after the layer."""
        return l2_normalize(self.text_proj(self.dropout(self.text_cnn(words, mask))))

    def encode_pairs(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """i1 and c1 of given pairs: (b, d) each."""
        regions = apply_to_pairs(self.transformer, images, texts)
        words = apply_to_pairs(self.transformer, texts, images)
        i1 = self.image_vector(regions, images.mask)
        return i1, self.caption_vector(words, texts.mask)

    def encode_all_pairs(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """i1 and c1 of all pairs: (i, c, d) each."""
        regions = apply_to_all_pairs(self.transformer, images, texts)  # (i, c, r, d)
        words = apply_to_all_pairs(self.transformer, texts, images)  # (c, i, w, d)
        region_mask = images.mask[:, None].expand(regions.shape[:3]).flatten(0, 1)
        word_mask = texts.mask[:, None].expand(words.shape[:3]).flatten(0, 1)
        i1 = self.image_vector(regions.flatten(0, 1), region_mask)
        c1 = self.caption_vector(words.flatten(0, 1), word_mask)
        i1, c1 = i1.unflatten(0, regions.shape[:2]), c1.unflatten(0, words.shape[:2])
        return i1, c1.transpose(0, 1)

    def encode_items(self, images: Images, texts: Texts) -> tuple[Tensor, Tensor]:
        """i1 (i, d) and c1 (c, d) where cross blocks are masked: the same in every pair."""
        regions, words = (
            self.transformer.attention_output(side.local, side.extra_local["self_attended"])
            for side in (images, texts)
        )
        i1 = self.image_vector(regions, images.mask)
        return i1, self.caption_vector(words, texts.mask)

    def joint_log_attention(self, images: Images, texts: Texts) -> Tensor:
        """Log-softmax of given pairs over [regions; words]: (b, h, r + w, r + w)."""
        query, key = (
            torch.cat([images.extra_local[name], texts.extra_local[name]], dim=1)
            for name in ("query", "key")
        )
        logits = torch.einsum("bqhe,bkhe->bhqk", query, key)
        mask = torch.cat([images.mask, texts.mask], dim=1)
        positions = torch.arange(mask.shape[1], device=mask.device)
        is_region = positions < images.mask.shape[1]
        same = is_region[:, None] == is_region
        unmasked = {"all": torch.ones_like(same), "self": same, "cross": ~same}
        visible = unmasked[self.transformer.blocks] & mask[:, None, None]
        return (logits + additive_mask(visible, logits)).log_softmax(dim=-1)

    def joint_attention(self, images: Images, texts: Texts) -> Tensor:
        """All four blocks of attention weights: (b, h, r + w, r + w)."""
        return self.joint_log_attention(images, texts).exp()


# cell mmca
PARTS = ("both", "first", "cross")


class MMCA(Matcher):
    """Multi-modality cross attention (Wei et al., 2020).

    heads: 16 in the paper, whatever the width (M23); 0 for heads of width 16.
    feed_forward: inner width of both layers; 0 for ``width``. channels, full_windows: of
    both text CNNs. cross_weight: α. parts: which scores count. blocks: which are not
    masked. one_vector: the mean of the regions replaces them. text_backbone: bert or
    gru; vocabulary_size and word_dim belong to gru.
    """

    compiles = ("score_tile", "score_pairs")  # ``score`` itself only loops over tiles

    def __init__(
        self,
        image_dim: int,
        token_dim: int = 768,
        width: int = 256,
        heads: int = 16,
        feed_forward: int = 0,
        channels: int = 256,
        full_windows: bool = True,
        dropout: float = 0.0,
        cross_weight: float = 0.2,
        parts: str = "both",
        blocks: str = "all",
        one_vector: bool = False,
        text_backbone: str = "bert",
        vocabulary_size: int = 0,
        word_dim: int = 300,
    ) -> None:
        super().__init__()
        for name, value, known in (("parts", parts, PARTS), ("blocks", blocks, BLOCKS)):
            if value not in known:
                raise input_error(name, repr(value), f"one of {', '.join(known)}")
        self.cross_weight, self.parts, self.one_vector = cross_weight, parts, one_vector
        words = (text_backbone, vocabulary_size, word_dim)
        self.token_encoder = TokenEncoder(*words, token_dim)
        sizes = (width, heads or max(1, width // 16), feed_forward or width)
        sizes = (*sizes, channels, full_windows, dropout)
        self.self_attention = SelfAttentionModule(image_dim, token_dim, *sizes)
        self.cross_attention = CrossAttentionModule(token_dim, *sizes, blocks)

    @property
    def uses_cross_score(self) -> bool:
        """Whether the second score counts at all."""
        return self.parts == "cross" or (
            self.parts == "both" and self.cross_weight != 0
        )

    def encode_images(self, batch: ImageBatch) -> Images:
        """Projected regions, i0, and what the cross-attention module needs per image."""
        features, mask = batch.regions, batch.mask
        if self.one_vector:
            features = masked_mean(features, mask)[:, None]
            mask = mask.any(dim=1, keepdim=True)
        regions, i0 = self.self_attention.encode_images(features, mask)
        layer = self.cross_attention.transformer
        prepared = layer.prepare(regions, mask) if self.uses_cross_score else {}
        lengths = ABSENT if self.one_vector else batch.lengths
        return Images(regions, mask, i0, extra_local=prepared, lengths=lengths)

    def encode_texts(self, batch: TextBatch) -> Texts:
        """Projected tokens, c0, and what the cross-attention module needs per caption."""
        tokens, mask = self.token_encoder(batch), batch.mask
        c0 = self.self_attention.encode_texts(tokens, mask)
        words, layer = (
            self.cross_attention.token_proj(tokens),
            self.cross_attention.transformer,
        )
        prepared = layer.prepare(words, mask) if self.uses_cross_score else {}
        return Texts(words, mask, c0, extra_local=prepared, lengths=batch.lengths)

    def score_tile(self, images: Images, texts: Texts) -> Tensor:
        """The second score of all pairs (i, c), at once."""
        i1, c1 = self.cross_attention.encode_all_pairs(images, texts)
        return torch.einsum("icd,icd->ic", i1, c1)

    def cross_scores(self, images: Images, texts: Texts) -> Tensor:
        """The second score of all pairs (i, c), on a CPU tile by tile."""
        if self.cross_attention.transformer.blocks == "self":
            i1, c1 = self.cross_attention.encode_items(images, texts)
            return i1 @ c1.T
        rows, columns = len(images), len(texts)
        if images.local.device.type == "cpu":
            rows, columns = block_shape(self, images, texts, TILE)

        def tile(i: int, c: int) -> Tensor:
            return self.score_tile(images[i : i + rows], trim(texts[c : c + columns]))

        starts = range(0, len(texts), columns)
        bands = [[tile(i, c) for c in starts] for i in range(0, len(images), rows)]
        return torch.cat([torch.cat(band, dim=1) for band in bands])

    def combine_scores(self, first: Tensor, cross: Tensor) -> Scores:
        """First score plus weighted cross score; the cross score alone if only that counts."""
        both = first + self.cross_weight * cross
        return Scores.same(cross if self.parts == "cross" else both)

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        """Working memory of ``score`` per pair."""
        if not self.uses_cross_score:
            return 4  # one number; the rest is a matrix product
        r, width = images.local.shape[1:]
        w, heads = texts.local.shape[1], self.cross_attention.transformer.attention.heads
        channels = self.cross_attention.text_proj.in_features // 3
        numbers = (r + w) * width + w * channels + heads * r * w  # sides, taps, logits
        return 6 * 4 * numbers  # an estimate: six of each alive at once, 4 bytes

    def score(self, images: Images, texts: Texts) -> Scores:
        """All pairs: (i, c)."""
        first = images.pooled @ texts.pooled.T
        if not self.uses_cross_score:
            return Scores.same(first)
        return self.combine_scores(first, self.cross_scores(images, texts))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        """Given pairs: (b,)."""
        first = (images.pooled * texts.pooled).sum(dim=-1)
        if not self.uses_cross_score:
            return Scores.same(first)
        i1, c1 = self.cross_attention.encode_pairs(images, texts)
        return self.combine_scores(first, (i1 * c1).sum(dim=-1))

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """The two cross blocks of given pairs, summed over heads, rows scaled to sum 1."""
        if not self.uses_cross_score or self.cross_attention.transformer.blocks == "self":
            return {}
        logs = self.cross_attention.joint_log_attention(images, texts)
        r, lowest = images.mask.shape[1], torch.finfo(logs.dtype).min / 2

        def weights(block: Tensor, key_mask: Tensor) -> Tensor:
            # a large negative number at padding: minus infinity would have a NaN gradient
            block = block.masked_fill(~key_mask[:, None, None], lowest)
            return block.logsumexp(dim=1).softmax(dim=-1)

        t2i = weights(logs[:, :, r:, :r], images.mask)
        i2t = weights(logs[:, :, :r, r:], texts.mask)
        return {
            "t2i": Attention(t2i, texts.local, images.local, texts.mask, images.mask),
            "i2t": Attention(i2t, images.local, texts.local, images.mask, texts.mask),
        }


# cell mmca-scores
TILE = 2**26  # bytes of pairs scored at once on a CPU


# cell select-negatives
def select_hardest(
    model: Matcher,
    images: Images,
    texts: Texts,
    budget: int,
    positive: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Hardest negative caption per image and image per caption: (b, 1) each.

    positive: what is no negative, (b, b); by default image b with caption b only.
    """
    device = next(model.parameters()).device
    scores = score_all(model, images, texts, budget, progress=False, device=device)
    if positive is None:
        positive = torch.eye(len(images), dtype=torch.bool, device=device)
    return hardest_negatives(scores, positive)


def positive_pairs(batch: PairBatch, by_image: bool) -> Tensor:
    """(b, b) True where image and caption match.

    by_image: a caption matches wherever its image stands; else only in its own pair.
    """
    ids = batch.images.ids
    ids = ids if by_image else torch.arange(len(ids), device=ids.device)
    return ids[:, None] == ids


def sample_negatives(positive: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each pair ``count`` negative captions and images, none twice: (b, count) each.

    positive: what is no negative, (b, b); those come last where a pair has fewer
    negatives. Drawn on the CPU, so that a seed means the same on every device.
    """
    priority = torch.rand(2, *positive.shape).to(positive.device, non_blocking=True)
    captions, images = priority.masked_fill(positive, -1).topk(count, dim=2).indices
    return captions, images


# cell hinges
def hinge_weights(positive: Tensor, count: int, hardest: bool, like: Tensor) -> Tensor:
    """What each of ``count`` selected negatives counts: (b, count), of the type of ``like``.

    The hardest count once; others together as all negatives of their pair. Where there
    are fewer than ``count``, the rest counts nothing.
    """
    total = (~positive).sum(dim=1, keepdim=True)  # (b, 1)
    used = total.clamp(max=count)
    there = torch.arange(count, device=positive.device) < used
    each = 1.0 if hardest else total.to(like) / used.clamp(min=1)
    return there.to(like) * each


def selected_hinges(
    model: Matcher,
    images: Images,
    texts: Texts,
    negatives: tuple[Tensor, Tensor],
    margin: float,
    budget: int,
) -> Tensor:
    """Hinges (b, n) of a batch with its selected negatives, both directions summed.

    negatives: captions for the images and images for the captions, (b, n) each.
    """
    captions, negative_images = negatives
    pairs, count = captions.shape
    positive = torch.arange(pairs, device=captions.device)
    anchor = positive[:, None].expand(pairs, count).flatten()
    rows = torch.cat([positive, anchor, negative_images.flatten()])
    columns = torch.cat([positive, captions.flatten(), anchor])
    scores = score_selected(model, images, texts, rows, columns, budget)
    sizes = [pairs, pairs * count, pairs * count]
    positive_i2t, negative_i2t, _ = scores.i2t.split(sizes)
    positive_t2i, _, negative_t2i = scores.t2i.split(sizes)
    i2t = margin + negative_i2t.view(pairs, count) - positive_i2t[:, None]
    t2i = margin + negative_t2i.view(pairs, count) - positive_t2i[:, None]
    return i2t.relu() + t2i.relu()


# cell triplet-loss
class HardNegativeTripletLoss:
    """Hinge loss for models with expensive pairs: select without gradients, then score with.

    warmup_epochs: epochs over random negatives before the hardest take over. negatives:
    random negative captions and images per pair; 0 for all. by_image: other captions of
    the same image are no negatives. budget: in bytes.
    """

    def __init__(
        self,
        margin: float = 0.2,
        hardest: bool = True,
        warmup_epochs: int = 0,
        negatives: int = 4,
        budget: int = 2**26,
        by_image: bool = False,
    ) -> None:
        self.margin, self.hardest, self.warmup_epochs = margin, hardest, warmup_epochs
        self.negatives, self.budget, self.by_image = negatives, budget, by_image
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0."""
        self.hardest_now = self.hardest and epoch >= self.warmup_epochs

    def select(
        self, model: Matcher, images: Images, texts: Texts, positive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Indices of negative captions and negative images: (b, n) each."""
        most = len(images) - 1  # a batch of one pair has no negative
        if self.hardest_now and most:
            return select_hardest(model, images, texts, self.budget, positive)
        return sample_negatives(positive, min(self.negatives or most, most))

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        images = model.encode_images(batch.images)
        texts = model.encode_texts(batch.texts)
        positive = positive_pairs(batch, self.by_image)
        selected = self.select(model, images, texts, positive)
        hinges = selected_hinges(
            model, images, texts, selected, self.margin, self.budget
        )
        count = selected[0].shape[1]
        weights = hinge_weights(positive, count, self.hardest_now, hinges)
        extra = model.extra_losses(images, texts, batch)
        loss = (weights * hinges).sum() + sum(extra.values())
        return loss, {"hardest": float(self.hardest_now)}


# cell stages
SIZES = ("token_dim", "width", "heads", "channels", "dropout", "cross_weight")
SWITCHES = ("full_windows", "parts", "blocks", "one_vector", "text_backbone")


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> MMCA:
    """The model that the chapter's parameters describe."""
    given = {name: parameters[name] for name in (*SIZES, *SWITCHES, "word_dim")}
    words = vocabulary_size if parameters["text_backbone"] == "gru" else 0
    return MMCA(image_dim, **given, vocabulary_size=words)


def stages(parameters: Mapping[str, Any], model: MMCA) -> list[Stage]:
    """The one training of a run: the hinge loss with negatives by the full score."""
    names = ("margin", "hardest", "warmup_epochs", "negatives", "by_image")
    objective = HardNegativeTripletLoss(
        **{name: parameters[name] for name in names},
        budget=parameters["budget_mb"] * 2**20,
    )
    return [Stage("mmca", model, objective, train_config(parameters))]
