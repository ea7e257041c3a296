# Generated from notebooks/07_sgraf.ipynb by `itm export`: edit the notebook, not this file.

"""What notebooks/07_sgraf.ipynb exports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.matcher import Attention, ImageBatch, Images, Scores, TextBatch, Texts
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.scan import (
    EPS,
    RegionsAndWords,
    TILE,
    TINY,
    attend,
    encode_words,
    full_precision,
    l2_normalize_eps,
    pack,
    pack_pairs,
    pair_attention,
    region_layer,
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
class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch norm over the real rows only: any number of them, in any order.

    A single row has no variance: it is normalised by the running statistics.
    """

    def normalize_rows(self, x: Tensor) -> Tensor:
        """Normalise rows (n, d), all of them real."""
        if not self.training or len(x) > 1:
            return super().forward(x)
        running = self.running_mean, self.running_var
        return nn.functional.batch_norm(
            x, *running, self.weight, self.bias, eps=self.eps
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalise x (n, k, d) where the mask (n, k) is True; zeros elsewhere."""
        if mask.is_meta or bool(mask.all()):
            return self.normalize_rows(x.flatten(0, 1)).view_as(x)
        rows = self.normalize_rows(x[mask])
        return x.new_zeros(x.shape, dtype=rows.dtype).masked_scatter(
            mask[..., None], rows
        )


class SlotBatchNorm(nn.BatchNorm1d):
    """Batch norm of the public code: its channels are the slots of the region list."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Normalise x (n, k, d), where k must be the number of slots."""
        if x.shape[1] != self.num_features or not (mask.is_meta or bool(mask.all())):
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

    def weights(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attention weights (n, k) over the real entries of x (n, k, d)."""
        local, mean = self.local_proj(x), self.mean_proj(masked_mean(x, mask))
        if self.local_norm is not None and self.mean_norm is not None:
            local = self.local_norm(local, mask)
            mean = self.mean_norm.normalize_rows(mean)
        local, mean = self.dropout(local.tanh()), self.dropout(mean.tanh())
        logits = self.logit_proj(local * mean[:, None])[..., 0]
        return logits.masked_fill(~mask, -torch.inf).softmax(dim=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """L2-normalised vectors (n, d) of x (n, k, d) with mask (n, k)."""
        return l2_normalize_eps((self.weights(x, mask)[:, None] @ x)[:, 0])


# cell gate-norm
class GateBatchNorm(MaskedBatchNorm):
    """Batch norm of one gate per node.

    per_caption: use the statistics of each caption alone, and update the running ones
    once per caption in their order, as a loop over captions does.
    """

    momentum: float  # not None, nor are the running statistics
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, per_caption: bool) -> None:
        super().__init__(1)
        self.per_caption = per_caption

    def forward(self, gates: list[Tensor], captions: list[Tensor]) -> list[Tensor]:
        """Normalise gates (m, n, k), given the indices (n,) of their captions."""
        if self.training and self.per_caption:
            self.update_running_stats(gates, captions)
            var = [g.var(dim=(0, 2), correction=0, keepdim=True) for g in gates]
            mean = [g.mean(dim=(0, 2), keepdim=True) for g in gates]
            parts = zip(gates, mean, var, strict=True)
            normal = [(g - m) * (v + self.eps).rsqrt() for g, m, v in parts]
            return [self.weight * part + self.bias for part in normal]
        flat = torch.cat([g.flatten() for g in gates])[:, None]
        parts = self.normalize_rows(flat)[:, 0].split([g.numel() for g in gates])
        return [part.view_as(g) for part, g in zip(parts, gates, strict=True)]

    @torch.no_grad()
    def update_running_stats(self, gates: list[Tensor], captions: list[Tensor]) -> None:
        """Update the running statistics as if one caption came after the other."""
        order = torch.cat(captions).argsort()
        decay = (1 - self.momentum) ** torch.arange(len(order), device=order.device)
        for running, statistic in (
            (self.running_mean, lambda g: g.mean(dim=(0, 2))),
            (self.running_var, lambda g: g.var(dim=(0, 2))),
        ):
            per_caption = torch.cat([statistic(g) for g in gates])[order]
            new = self.momentum * (decay.flip(0) * per_caption).sum()
            running.mul_((1 - self.momentum) ** len(order)).add_(new)
        self.num_batches_tracked += len(order)


# cell saf
class NodeBatch(NamedTuple):
    """Similarity nodes of all pairs of some images with captions of equal length."""

    images: Tensor  # (m,) indices of the images
    captions: Tensor  # (n,) indices of the captions
    nodes: Tensor  # (m, n, 1 + w, s): the global node, then one per word


class SAF(nn.Module):
    """Similarity attention filtration: the gated mean of the nodes of a pair."""

    def __init__(self, sim_dim: int, per_caption: bool) -> None:
        super().__init__()
        self.gate = xavier_linear(sim_dim, 1)
        self.norm = GateBatchNorm(per_caption)

    def weights(self, batches: list[NodeBatch]) -> list[Tensor]:
        """Node weights (m, n, k) of each batch; they sum to one over the nodes."""
        gates = [self.gate(batch.nodes)[..., 0] for batch in batches]
        gates = self.norm(gates, [batch.captions for batch in batches])
        gates = [gate.sigmoid() for gate in gates]
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
        query, key = self.q_proj, self.k_proj
        matrix = query.weight.T @ key.weight
        u, v = query.bias @ key.weight, key.bias @ query.weight
        return matrix, u, v, query.bias @ key.bias

    def edges(
        self, queries: Tensor, nodes: Tensor, fused: tuple[Tensor, ...]
    ) -> Tensor:
        """Edge weights (..., q, k) of query nodes over nodes; rows sum to one."""
        matrix, u, v, t = fused
        constant = queries @ v + t  # per query: the softmax is invariant to it
        logits = (queries @ matrix + u) @ nodes.mT + constant[..., None]
        return logits.softmax(dim=-1)

    def forward(
        self, queries: Tensor, nodes: Tensor, fused: tuple[Tensor, ...]
    ) -> Tensor:
        """Updated query nodes (..., q, s), from queries and nodes (..., k, s)."""
        return self.out_proj(self.edges(queries, nodes, fused) @ nodes).relu()


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
                nodes = step(queries, nodes, fused[number - 1])
            yield batch, nodes[..., 0, :]


# cell differences
FIRST_NORM = "clipped_l2norm"  # of chapter 02, the only one that SGRAF uses


def unit_norm_attention(
    regions: Tensor, words: Tensor, shapes: list[tuple[int, int]], temperature: float
) -> Tensor:
    """Attention weights (m, r, x), scaled so that attended features have unit norm.

    regions: (m, r, d). words: (x, d) or (m, x, d), in the order of ``attend``.
    """
    weights = attend(regions @ words.mT, shapes, FIRST_NORM, temperature)
    gram = regions @ regions.mT
    square = (weights * (gram @ weights)).sum(dim=1, keepdim=True)
    return weights / (square.clamp_min(TINY).sqrt() + EPS)


def chunk_size(elements: int, items: int, device: torch.device) -> int:
    """How many items of so many elements fit into the cache, at least one."""
    return max(1, min(items, TILE.get(device.type, 2**26) // elements))


def local_similarity(
    regions: Tensor, words: Tensor, weights: Tensor, proj: nn.Linear
) -> Tensor:
    """Similarity vectors (m, x, s) of words with their attended features.

    regions: (m, r, d). words: (x, d) or (m, x, d). weights: (m, r, x).
    """
    words = words.expand(len(regions), -1, -1)
    size = chunk_size(words[0].numel(), len(words), words.device)
    chunks, vectors = (side.split(size) for side in (regions, words, weights)), []
    for keys, queries, w in zip(*chunks, strict=True):
        difference = torch.baddbmm(queries, w.mT, keys, beta=-1)  # attended - query
        # in place where no gradient needs the differences
        inplace = not torch.is_grad_enabled()
        squared = difference.square_() if inplace else difference.square()
        vectors.append(l2_normalize_eps(proj(squared)))
    return torch.cat(vectors)


# cell parts
class PackedCaptions(NamedTuple):
    """The words of some captions in one tensor, in the order of ``attend``."""

    captions: list[Tensor]  # (n,) per caption length: indices of the captions
    words: Tensor  # (x, d): all first words of a length, then all second ones, …
    shapes: list[tuple[int, int]]  # (w, n) per caption length


def pack_captions(texts: Texts, captions: Tensor) -> PackedCaptions:
    """Pack the given captions without padding."""
    groups = pack(texts[captions])
    words = [group.vectors.transpose(0, 1).flatten(0, 1) for group in groups]
    shapes = [(w, n) for n, w in (group.positions.shape for group in groups)]
    index = [captions[group.index] for group in groups]
    return PackedCaptions(index, torch.cat(words), shapes)


def split_by_length(vectors: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Split word vectors (m, x, s) into (m, n, w, s) per shape (w, n)."""
    parts = zip(vectors.split([w * n for w, n in shapes], dim=1), shapes, strict=True)
    return [part.unflatten(1, shape).transpose(1, 2) for part, shape in parts]


def pair_blocks(
    images: Images, texts: Texts, sim_dim: int, at_once: bool
) -> Iterator[tuple[Tensor, Tensor, PackedCaptions]]:
    """Yield blocks of all pairs: image indices (m,), regions (m, r, d), captions."""
    rows, by_length = pack(images), texts.mask.sum(dim=1).argsort(stable=True)
    device = texts.local.device
    columns = chunk_size(texts.local[0].numel(), len(texts), device)
    for part in by_length.split(len(texts) if at_once else columns):
        packed = pack_captions(texts, part)
        for group in rows:
            size = len(group.index)
            if not at_once:
                size = chunk_size(len(packed.words) * sim_dim, size, device)
            split = group.index.split(size), group.vectors.split(size)
            for index, regions in zip(*split, strict=True):
                yield index, regions, packed


# cell pair-nodes
class SimilarityEncoder(nn.Module):
    """Similarity nodes of pairs: a global one, and one per word."""

    def __init__(self, width: int, sim_dim: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.local_proj = xavier_linear(width, sim_dim)
        self.global_proj = xavier_linear(width, sim_dim)

    def local_nodes(self, regions: Tensor, words: Tensor, shapes: list) -> Tensor:
        """Similarity vectors (m, x, s) of words with their attended features."""
        weights = unit_norm_attention(regions, words, shapes, self.temperature)
        return local_similarity(regions, words, weights, self.local_proj)

    def forward(self, images: Images, texts: Texts) -> Iterator[NodeBatch]:
        """Yield the nodes of all pairs, block by block; in training all at once."""
        sim_dim = self.local_proj.out_features
        for index, regions, packed in pair_blocks(
            images, texts, sim_dim, self.training
        ):
            captions, words, shapes = packed
            local = split_by_length(self.local_nodes(regions, words, shapes), shapes)
            pooled = images.pooled[index][:, None], texts.pooled[torch.cat(captions)]
            whole = similarity_vector(*pooled, self.global_proj)[:, :, None]
            whole = whole.split([n for _, n in shapes], dim=1)
            for caption, *nodes in zip(captions, whole, local, strict=True):
                yield NodeBatch(index, caption, torch.cat(nodes, dim=2))

    def pairs(self, images: Images, texts: Texts) -> Iterator[NodeBatch]:
        """Yield the nodes of image b with caption b; captions index the pairs."""
        for group, other in pack_pairs(images, texts):
            index, shapes = group.index, [(other.vectors.shape[1], 1)]
            local = self.local_nodes(group.vectors, other.vectors, shapes)
            pooled = images.pooled[index], texts.pooled[index]
            whole = similarity_vector(*pooled, self.global_proj)[:, None]
            yield NodeBatch(index[:1], index, torch.cat([whole, local], dim=1)[None])


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
        pooled = self.image_pool(images.local, images.mask)
        images.pooled = pooled.to(images.local.dtype)
        return images

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = self.word_dropout(self.word_embedding(batch.words))
        words = encode_words(self.gru, words, batch.lengths)
        words = words.to(self.word_embedding.weight.dtype)  # not the autocast one
        words = l2_normalize_eps(words) if self.text_norm else words
        pooled = self.text_pool(words, batch.mask).to(words.dtype)
        return Texts(local=words, mask=batch.mask, pooled=pooled)

    def score(self, images: Images, texts: Texts) -> Scores:
        values, places = [], []
        with full_precision(images.local):
            for batch, vector in self.head(self.similarity(images, texts)):
                values.append(self.score_proj(vector).sigmoid().flatten())
                place = batch.images[:, None] * len(texts) + batch.captions
                places.append(place.flatten())
        order = torch.cat(places).argsort()
        return Scores.same(torch.cat(values)[order].view(len(images), len(texts)))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        with full_precision(images.local):
            found = list(self.head(self.similarity.pairs(images, texts)))
            values = [self.score_proj(vector).sigmoid()[0, :, 0] for _, vector in found]
        order = torch.cat([batch.captions for batch, _ in found]).argsort()
        return Scores.same(torch.cat(values)[order])

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """Cross-attention of words over regions, below the similarity vectors."""
        temperature = self.similarity.temperature
        weights = partial(attend, first_norm=FIRST_NORM, temperature=temperature)
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


def score_by_loop(model: SGRAF, images: Images, texts: Texts) -> Tensor:
    """Reference scores (i, c), one caption at a time; all regions must be real."""
    similarity, head = model.similarity, model.head
    columns = []
    for words, mask, pooled in zip(texts.local, texts.mask, texts.pooled, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        affinity = keys @ queries.mT  # (i, k, q)
        shapes = [(queries.shape[1], 1)]
        weights = attend(affinity, shapes, FIRST_NORM, similarity.temperature)
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
