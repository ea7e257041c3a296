# Generated from notebooks/07_sgraf.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/07_sgraf.ipynb exports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    EPS,
    PairMask,
    Shapes,
    TINY,
    full_precision,
    fuse_projections,
    fused_logits,
    local_similarity,
    padded_pairs,
    pair_attention,
    pair_blocks,
    send,
    split_by_length,
)
from itm_utils.matcher import Attention, ImageBatch, Images, Scores, TextBatch, Texts
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.scan import (
    RegionsAndWords,
    attend,
    encode_words,
    l2_normalize_eps,
    region_layer,
    scan_attention,
)
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import Stage, train_config


# cell compare
def xavier_linear(inputs: int, outputs: int) -> nn.Linear:
    """Linear layer with the initialisation of the public code: Xavier, zero bias."""
    return region_layer(inputs, outputs, weight_norm=False)


def similarity_vector(x: Tensor, y: Tensor, proj: nn.Linear) -> Tensor:
    """L2-normalised similarity vectors (..., s) of vectors x and y (..., d)."""
    return l2_normalize_eps(proj((x - y).square()))


# cell norms
def masked_moments(
    x: Tensor, mask: Tensor | None, dims: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of the real entries of x over ``dims``.

    mask: True at real entries, broadcast to x; None if all are real.
    """
    real = x.new_ones((), dtype=torch.bool) if mask is None else mask
    real = real.expand_as(x)
    count = real.sum(dim=dims, keepdim=True)
    mean = x.masked_fill(~real, 0).sum(dim=dims, keepdim=True) / count
    square = (x - mean).masked_fill(~real, 0).square()
    return mean, square.sum(dim=dims, keepdim=True) / count, count


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm over the real rows only: any number of them, in any order.

    A single row has no variance: it is normalised by the running statistics.
    """

    momentum: float  # not None, nor are the running statistics
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def normalize_rows(self, x: Tensor) -> Tensor:
        """Normalise rows (n, d), all of them real."""
        if not self.training or len(x) > 1:
            return super().forward(x)
        running = self.running_mean, self.running_var
        return nn.functional.batch_norm(
            x, *running, self.weight, self.bias, eps=self.eps
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise x (n, k, d) where the mask (n, k) is True; zeros elsewhere.

        Without a mask all rows are real. With one, nothing waits for its device.
        """
        if mask is None or not self.training:
            rows = self.normalize_rows(x.flatten(0, 1)).view_as(x)
            return rows if mask is None else rows.masked_fill(~mask[..., None], 0)
        values = x.to(self.running_mean.dtype)  # sums are not for half precision
        mean, var, count = masked_moments(values, mask[..., None], (0, 1))
        single = count == 1
        mean = torch.where(single, self.running_mean, mean)
        unbiased = var * count / (count - 1).clamp_min(1)
        unbiased, var = (
            torch.where(single, self.running_var, v) for v in (unbiased, var)
        )
        # .data: a call whose backward pass is still to come kept them, and will not read
        with torch.no_grad():
            self.running_mean.data.lerp_(mean[0, 0], self.momentum)
            self.running_var.data.lerp_(unbiased[0, 0], self.momentum)
            self.num_batches_tracked += 1
        rows = (values - mean) * (var + self.eps).rsqrt() * self.weight + self.bias
        return rows.masked_fill(~mask[..., None], 0).to(x.dtype)


# cell slot-norm
class SlotBatchNorm(nn.BatchNorm1d):
    """Batch norm of the public code: its channels are the slots of the region list."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise x (n, k, d), where k must be the number of slots.

        A mask must be True everywhere, which is read from its device.
        """
        padded = mask is not None and not bool(mask.all())
        if padded or x.shape[1] != self.num_features:
            found = f"{x.shape[1]} regions, or fewer behind a mask"
            expected = f"exactly {self.num_features}, the number of region_slots"
            raise input_error("region_slots", found, expected)
        return super().forward(x)


# cell one-vector
class SelfAttentionPool(nn.Module):
    """Pool regions or words to one vector by attention, with their mean as the query.

    slots: None for no batch norm (captions), 0 for masked batch norms (images), else
    the number of regions for the batch norms of the public code.
    """

    def __init__(self, width: int, dropout: float, slots: int | None = None) -> None:
        super().__init__()
        self.local_proj = xavier_linear(width, width)
        self.mean_proj = xavier_linear(width, width)
        self.logit_proj = xavier_linear(width, 1)
        self.dropout = nn.Dropout(dropout)
        self.local_norm = self.mean_norm = None
        if slots is not None:
            self.local_norm = SlotBatchNorm(slots) if slots else MaskedBatchNorm(width)
            self.mean_norm = MaskedBatchNorm(width)

    def weights(self, x: Tensor, mask: Tensor, full: bool = False) -> Tensor:
        """Attention weights (n, k) over the real entries of x (n, k, d)."""
        local, mean = self.local_proj(x), self.mean_proj(masked_mean(x, mask))
        if self.local_norm is not None and self.mean_norm is not None:
            local = self.local_norm(local, None if full else mask)
            mean = self.mean_norm.normalize_rows(mean)
        local, mean = self.dropout(local.tanh()), self.dropout(mean.tanh())
        logits = self.logit_proj(local * mean[:, None])[..., 0]
        return logits.masked_fill(~mask, -torch.inf).softmax(dim=1)

    def forward(self, x: Tensor, mask: Tensor, full: bool = False) -> Tensor:
        """L2-normalised vectors (n, d) of x (n, k, d) with mask (n, k).

        full: known on the CPU that the mask is True everywhere.
        """
        return l2_normalize_eps((self.weights(x, mask, full)[:, None] @ x)[:, 0])


# cell node-batch
class NodeBatch(NamedTuple):
    """Similarity nodes of all pairs of some images with captions of equal length.

    Or of given pairs, as if of one image (m = 1), with a mask.
    """

    images: Tensor  # (m,) indices of the images, on the CPU
    captions: Tensor  # (n,) indices of the captions, on the CPU
    nodes: Tensor  # (m, n, 1 + w, s): the global node, then one per word
    mask: Tensor | None = None  # (n, 1 + w), False at padding; None without any


# cell differences
FIRST_NORM = "clipped_l2norm"  # of chapter 02, the only one that SGRAF uses


def unit_norm_attention(
    regions: Tensor,
    words: Tensor,
    shapes: Shapes,
    temperature: float,
    mask: PairMask | None = None,
) -> Tensor:
    """Attention weights (m, r, x), scaled so that attended features have unit norm.

    regions: (m, r, d). words: (x, d) or (m, x, d), in the order of ``scan_attention``.
    """
    affinity = regions @ words.mT
    weights = scan_attention(affinity, shapes, FIRST_NORM, temperature, mask)
    gram = regions @ regions.mT
    square = (weights * (gram @ weights)).sum(dim=1, keepdim=True)
    return weights / (square.clamp_min(TINY).sqrt() + EPS)


# cell pair-nodes
class SimilarityEncoder(nn.Module):
    """Similarity nodes of pairs: a global one, and one per word."""

    def __init__(self, width: int, sim_dim: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.local_proj = xavier_linear(width, sim_dim)
        self.global_proj = xavier_linear(width, sim_dim)

    def local_nodes(
        self, regions: Tensor, words: Tensor, shapes: list, mask: PairMask | None = None
    ) -> Tensor:
        """Similarity vectors (m, x, s) of words with their attended features."""
        weights = unit_norm_attention(regions, words, shapes, self.temperature, mask)
        return local_similarity(regions, words, weights, self.local_proj)

    def forward(self, images: Images, texts: Texts) -> Iterator[NodeBatch]:
        """Yield the nodes of all pairs, block by block; in training all at once."""
        sim_dim, device = self.local_proj.out_features, images.local.device
        blocks = pair_blocks(images, texts, sim_dim, self.training)
        for index, regions, captions, packed in blocks:
            shapes = [(w, n) for n, w in packed.shapes]
            local = self.local_nodes(regions, packed.vectors, shapes)
            pooled = (
                images.pooled[send(index, device)],
                texts.pooled[send(captions, device)],
            )
            whole = similarity_vector(pooled[0][:, None], pooled[1], self.global_proj)
            parts = (
                captions.split([n for n, _ in packed.shapes]),
                whole[:, :, None].split([n for n, _ in packed.shapes], dim=1),
                split_by_length(local, packed.shapes),
            )
            for caption, *nodes in zip(*parts, strict=True):
                yield NodeBatch(index, caption, torch.cat(nodes, dim=2))

    def pairs(self, images: Images, texts: Texts) -> NodeBatch:
        """Nodes of image b with caption b; captions index the pairs."""
        regions, words, mask = padded_pairs(images, texts)
        local = self.local_nodes(regions, words, [(words.shape[1], 1)], mask)
        whole = similarity_vector(images.pooled, texts.pooled, self.global_proj)
        nodes = torch.cat([whole[:, None], local], dim=1)[None]
        real = nn.functional.pad(texts.mask, (1, 0), value=True)  # the global node is
        index = torch.arange(len(whole))
        return NodeBatch(index[:1], index, nodes, real)


# cell gate-norm
class GateBatchNorm(MaskedBatchNorm):
    """Batch norm of one gate per node.

    per_caption: use the statistics of each caption alone, and update the running ones
    once per caption in their order, as a loop over captions does.
    """

    def __init__(self, per_caption: bool) -> None:
        super().__init__(1)
        self.per_caption = per_caption

    def forward(
        self, gates: list[Tensor], captions: list[Tensor], mask: Tensor | None = None
    ) -> list[Tensor]:
        """Normalise gates (m, n, k), given the indices (n,) of their captions.

        mask: (n, k), real nodes of the one tensor of gates of given pairs, m = 1.
        """
        if self.training and self.per_caption:
            moments = [masked_moments(g, mask, (0, 2)) for g in gates]
            self.update_running_stats(moments, torch.cat(captions))
            parts = zip(gates, moments, strict=True)
            normal = [(g - m) * (v + self.eps).rsqrt() for g, (m, v, _) in parts]
            return [self.weight * part + self.bias for part in normal]
        if mask is not None:
            return [super().forward(gates[0][0, ..., None], mask)[None, ..., 0]]
        flat = torch.cat([g.flatten() for g in gates])[:, None]
        parts = self.normalize_rows(flat)[:, 0].split([g.numel() for g in gates])
        return [part.view_as(g) for part, g in zip(parts, gates, strict=True)]

    @torch.no_grad()
    def update_running_stats(
        self, moments: list[tuple[Tensor, Tensor, Tensor]], captions: Tensor
    ) -> None:
        """Update the running statistics as if one caption came after the other."""
        mean, var, count = (
            torch.cat([m.flatten() for m in s]) for s in zip(*moments, strict=True)
        )
        last = len(captions) - 1 - captions.argsort().argsort()  # captions after each
        decay = send((1 - self.momentum) ** last.to(mean.dtype), mean.device)
        var = var * count / (count - 1)
        for running, values in ((self.running_mean, mean), (self.running_var, var)):
            new = self.momentum * (decay * values).sum()
            running.mul_((1 - self.momentum) ** len(captions)).add_(new)
        self.num_batches_tracked += len(captions)


# cell saf
class SAF(nn.Module):
    """Similarity attention filtration: the gated mean of the nodes of a pair."""

    def __init__(self, sim_dim: int, per_caption: bool) -> None:
        super().__init__()
        self.gate = xavier_linear(sim_dim, 1)
        self.norm = GateBatchNorm(per_caption)

    def weights(self, batches: list[NodeBatch]) -> list[Tensor]:
        """Node weights (m, n, k) of each batch; they sum to one over the nodes."""
        gates = [self.gate(batch.nodes)[..., 0] for batch in batches]
        mask = batches[0].mask
        gates = self.norm(gates, [batch.captions for batch in batches], mask)
        gates = [gate.sigmoid() for gate in gates]
        if mask is not None:
            gates = [gate.masked_fill(~mask, 0) for gate in gates]
        return [g / (g.sum(dim=-1, keepdim=True) + EPS) for g in gates]

    def forward(
        self, batches: Iterable[NodeBatch]
    ) -> Iterator[tuple[NodeBatch, Tensor]]:
        """Yield each batch with one vector per pair, (m, n, s).

        In training it needs all batches at once, because the batch norm does.
        """
        groups = [list(batches)] if self.training else ([b] for b in batches)
        for group in groups:
            for batch, weights in zip(group, self.weights(group), strict=True):
                yield (
                    batch,
                    l2_normalize_eps((weights[..., None, :] @ batch.nodes)[..., 0, :]),
                )


# cell graph-step
class GraphReasoningStep(nn.Module):
    """One step of graph reasoning: attention among nodes, linear layer, ReLU."""

    def __init__(self, sim_dim: int) -> None:
        super().__init__()
        self.q_proj = xavier_linear(sim_dim, sim_dim)
        self.k_proj = xavier_linear(sim_dim, sim_dim)
        self.out_proj = xavier_linear(sim_dim, sim_dim)

    def fused_projections(self) -> tuple[Tensor, ...]:
        """M, u, v, t such that q_proj(a) · k_proj(n) = a·Mn + u·n + v·a + t."""
        return fuse_projections(self.q_proj, self.k_proj)

    def edges(
        self,
        queries: Tensor,
        nodes: Tensor,
        fused: tuple[Tensor, ...],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Edge weights (..., q, k) of query nodes over nodes; rows sum to one.

        mask: (n, k), False at padded nodes, which get none; None without padding.
        """
        logits = fused_logits(queries, nodes, fused)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None], -torch.inf)
        return logits.softmax(dim=-1)

    def forward(
        self,
        queries: Tensor,
        nodes: Tensor,
        fused: tuple[Tensor, ...],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Updated query nodes (..., q, s), from queries and nodes (..., k, s)."""
        return self.out_proj(self.edges(queries, nodes, fused, mask) @ nodes).relu()


# cell sgr
class SGR(nn.Module):
    """Similarity graph reasoning: a few steps, then read the global node."""

    def __init__(self, sim_dim: int, steps: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GraphReasoningStep(sim_dim) for _ in range(steps))

    def forward(
        self, batches: Iterable[NodeBatch]
    ) -> Iterator[tuple[NodeBatch, Tensor]]:
        """Yield each batch with one vector per pair, (m, n, s)."""
        steps = cast(Sequence[GraphReasoningStep], self.steps)
        fused = [step.fused_projections() for step in steps]  # not per batch
        for batch in batches:
            nodes = batch.nodes
            for number, step in enumerate(steps, start=1):
                last = number == len(steps)
                queries = nodes[..., :1, :] if last else nodes  # only the first is read
                nodes = step(queries, nodes, fused[number - 1], batch.mask)
            yield batch, nodes[..., 0, :]


# cell sgraf-class
HEADS = ("SAF", "SGR")


class SGRAF(RegionsAndWords):
    """Similarity graph reasoning (SGR) or attention filtration (SAF).

    region_slots: 0, or the number of regions that every image has, to compute both
    batch norms as the public code does.
    """

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 1024,
        head: str = "SAF",
        steps: int = 3,
        sim_dim: int = 256,
        temperature: float = 9.0,
        dropout: float = 0.4,
        region_slots: int = 0,
        **encoders: Any,
    ) -> None:
        if head not in HEADS:
            raise input_error("head", repr(head), f"one of {', '.join(HEADS)}")
        super().__init__(vocabulary_size, image_dim, width, **encoders)
        self.word_dropout = nn.Dropout(dropout)
        self.image_pool = SelfAttentionPool(width, dropout, region_slots)
        self.text_pool = SelfAttentionPool(width, dropout)
        self.similarity = SimilarityEncoder(width, sim_dim, temperature)
        saf = head == "SAF"
        self.head = SAF(sim_dim, region_slots > 0) if saf else SGR(sim_dim, steps)
        self.score_proj = xavier_linear(sim_dim, 1)

    def encode_images(self, batch: ImageBatch) -> Images:
        images = super().encode_images(batch)
        known, width = images.lengths is not None, images.local.shape[1]
        full = known and bool((images.lengths == width).all())
        pooled = self.image_pool(images.local, images.mask, full)
        images.pooled = pooled.to(images.local.dtype)
        return images

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = self.word_dropout(self.word_embedding(batch.words))
        words = encode_words(self.gru, words, batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not the autocast one
        words = l2_normalize_eps(words) if self.text_norm else words
        pooled = self.text_pool(words, batch.mask).to(words.dtype)
        return Texts(words, batch.mask, pooled, lengths=batch.lengths)

    def score(self, images: Images, texts: Texts) -> Scores:
        values, places = [], []
        with full_precision(images.local):
            for batch, vector in self.head(self.similarity(images, texts)):
                values.append(self.score_proj(vector).sigmoid().flatten())
                place = batch.images[:, None] * len(texts) + batch.captions
                places.append(place.flatten())
        found, place = torch.cat(values), send(torch.cat(places), images.local.device)
        scores = torch.zeros_like(found).index_copy(0, place, found)
        return Scores.same(scores.view(len(images), len(texts)))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        with full_precision(images.local):
            ((_, vectors),) = self.head([self.similarity.pairs(images, texts)])
            return Scores.same(self.score_proj(vectors).sigmoid()[0, :, 0])

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """Cross-attention of words over regions, below the similarity vectors."""
        temperature = self.similarity.temperature
        weights = partial(scan_attention, first_norm=FIRST_NORM, temperature=temperature)
        return {"t2i": pair_attention(images, texts, weights)}

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        return 64  # a score, its place and their order; the rest stays within a block


# cell build
def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> SGRAF:
    """Build the model that the parameters of this chapter describe."""
    names = ("width", "word_dim", "head", "sim_dim", "steps", "temperature", "dropout")
    chosen = {name: parameters[name] for name in (*names, "region_slots")}
    return SGRAF(vocabulary_size, image_dim, **chosen)


def stages(parameters: Mapping[str, Any], model: SGRAF) -> list[Stage]:
    """List the one training of this chapter: hinge loss, hardest negatives."""
    margin, warmup = parameters["margin"], parameters["warmup_epochs"]
    objective = HingeTriplet(margin=margin, hardest=True, warmup_epochs=warmup)
    return [Stage("train", model, objective, train_config(parameters))]


# cell plain
def saf_by_definition(nodes: Tensor, saf: SAF) -> Tensor:
    """Reference of SAF in evaluation: nodes (i, k, s) to vectors (i, s)."""
    norm, gates = saf.norm, saf.gate(nodes)  # (i, k, 1)
    std = (norm.running_var + norm.eps).sqrt()
    gates = ((gates - norm.running_mean) / std * norm.weight + norm.bias).sigmoid()
    return l2_normalize_eps(
        (gates / (gates.sum(dim=1, keepdim=True) + EPS) * nodes).sum(dim=1)
    )


def sgr_by_definition(nodes: Tensor, sgr: SGR) -> Tensor:
    """Reference of SGR: every node (i, k, s) is updated in every step."""
    for step in cast(Sequence[GraphReasoningStep], sgr.steps):
        edges = (step.q_proj(nodes) @ step.k_proj(nodes).mT).softmax(dim=-1)
        nodes = step.out_proj(edges @ nodes).relu()  # edges (i, k, k)
    return nodes[:, 0]


# cell score-loop
def score_by_loop(model: SGRAF, images: Images, texts: Texts) -> Tensor:
    """Reference scores (i, c), one caption at a time; all regions must be real."""
    similarity, head = model.similarity, model.head
    columns = []
    for words, mask, pooled in zip(texts.local, texts.mask, texts.pooled, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        affinity = keys @ queries.mT  # (i, k, q)
        weights = attend(affinity, FIRST_NORM, similarity.temperature)
        attended = weights.mT @ keys  # (i, q, d)
        local = similarity_vector(
            l2_normalize_eps(attended), queries, similarity.local_proj
        )
        whole = similarity_vector(images.pooled, pooled, similarity.global_proj)
        nodes = torch.cat([whole[:, None], local], dim=1)  # (i, 1 + w, s)
        if isinstance(head, SAF):
            vector = saf_by_definition(nodes, head)
        else:
            vector = sgr_by_definition(nodes, head)
        columns.append(model.score_proj(vector).sigmoid())
    return torch.cat(columns, dim=1)
