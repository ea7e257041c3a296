# Generated from notebooks/04_pfan.ipynb by `itm export`: edit the notebook, not this file.

"""PFAN: position focused attention, SCAN with a position vector for every region."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.fast_attention import (
    EPS,
    PairMask,
    Shapes,
    cosine_from_gram,
    table_products,
    table_sums,
)
from itm_utils.matcher import ImageBatch, Images
from itm_utils.models.scan import (
    CrossAttention,
    attend,
    check_choices,
    pool,
    pool_queries,
    region_layer,
    scan_attention,
)
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import Stage, train_config


# cell overlaps
def grid_corners(boxes: Tensor, sizes: Tensor, grid: int) -> tuple[Tensor, Tensor]:
    """Both corners (i, r, 2) of pixel boxes (i, r, 4), in units of blocks."""
    scale = (grid / sizes.to(boxes.dtype))[:, None]  # (i, 1, 2), blocks per pixel
    return (
        (boxes[..., :2] * scale).clamp(0, grid),
        (boxes[..., 2:] * scale).clamp(0, grid),
    )


def block_overlaps(start: Tensor, end: Tensor, grid: int) -> Tensor:
    """Covered fraction of each block: (i, r, grid * grid), column by column."""
    edges = torch.arange(grid, device=start.device, dtype=start.dtype)
    inside = torch.minimum(end[..., None], edges + 1) - torch.maximum(
        start[..., None], edges
    )
    across, down = inside.clamp_min(0).unbind(dim=-2)  # (i, r, grid) each
    return (across[..., :, None] * down[..., None, :]).flatten(-2)


# cell to-blocks
MAX_BLOCKS = 15  # per region, as in the public files


def top_blocks(
    boxes: Tensor, sizes: Tensor, grid: int = 16, top: int = MAX_BLOCKS
) -> tuple[Tensor, Tensor]:
    """Indices and shares of the blocks that each box covers most, (i, r, top) each.

    boxes: (i, r, 4) x1 y1 x2 y2 in pixels. sizes: (i, 2) width and height in pixels.
    Empty slots hold the index grid * grid and the share 0.
    """
    start, end = grid_corners(boxes, sizes, grid)
    area = block_overlaps(start, end, grid)
    index = torch.arange(grid * grid, device=boxes.device)
    centre = torch.stack([index // grid, index % grid], dim=-1) + 0.5
    distance = ((start + end)[..., None, :] / 2 - centre).square().sum(dim=-1)
    # One integer key: largest area first, then nearest to the centre of the box.
    order = (area * 2**24).long() * 2**22 - (distance * 2**8).long()
    chosen = (order * grid**2 - index).topk(min(top, grid * grid), dim=-1).indices
    kept = area.gather(-1, chosen)
    blocks = torch.where(kept > 0, chosen, grid * grid)
    return blocks, kept / kept.sum(dim=-1, keepdim=True).clamp_min(EPS)


# cell block-weights
POSITIONS = ("focused", "area", "public", "none")


def block_logits(queries: Tensor, table: Tensor, blocks: Tensor) -> Tensor:
    """Attention logits (i, r, k) of each region for its own blocks, within -1 and 1."""
    return torch.tanh(table_products(queries, table, blocks))


def block_weights(logits: Tensor, share: Tensor, position: str) -> Tensor:
    """Weights (i, r, k) of each region's blocks, from logits and shares (i, r, k)."""
    if position == "area":  # no attention
        return share
    if position == "public":  # two softmaxes, both over empty slots as well
        return torch.softmax(share * torch.softmax(logits, dim=-1), dim=-1)
    weights = share * logits.exp()
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(EPS)


def position_vectors(
    queries: Tensor, table: Tensor, blocks: Tensor, share: Tensor, position: str
) -> Tensor:
    """Position vectors (i, r, p): weighted sums of block embeddings.

    queries: (i, r, p). table: (grid * grid + 1, p), the last row for empty slots.
    """
    logits = block_logits(queries, table, blocks)
    weights = block_weights(logits, share.to(logits.dtype), position)
    return table_sums(weights, table, blocks)


# cell pfan-score
def pfan_score(
    affinity: Tensor,
    gram: Tensor,
    query_norm: Tensor,
    shapes: Shapes,
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
    bonus: float,
    mask: PairMask | None = None,
) -> Tensor:
    """SCAN's score (m, n) plus ``bonus`` times the pooled largest weight per query."""
    weights = scan_attention(affinity, shapes, first_norm, temperature, mask)
    relevance = cosine_from_gram(affinity, weights, gram, query_norm)
    scores = pool_queries(relevance, shapes, pooling, lse, mask)
    if not bonus:
        return scores
    largest = weights.amax(dim=1)
    return scores + bonus * pool_queries(largest, shapes, pooling, lse, mask)


# cell pfan-by-loop
def score_by_loop(
    images, texts, direction, first_norm, temperature, pooling, lse, bonus
):
    """Reference scores (i, c), one caption at a time; all regions must be real."""
    columns = []
    for words, mask in zip(texts.local, texts.mask, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        if direction == "i2t":
            keys, queries = queries, keys
        affinity = keys @ queries.mT  # (i, k, q)
        weights = attend(affinity, first_norm, temperature)
        attended = weights.mT @ keys  # (i, q, d)
        relevance = nn.functional.cosine_similarity(queries, attended, dim=-1)
        score = pool(relevance, pooling, lse)
        largest = pool(weights.amax(dim=1), pooling, lse)
        columns.append(score + bonus * largest)
    return torch.stack(columns, dim=1)


# cell read-blocks
def read_blocks(batch: ImageBatch, grid: int) -> tuple[Tensor, Tensor]:
    """Block indices and shares of a batch, from pixel boxes or a public block file."""
    top = MAX_BLOCKS
    expected = f"4 coordinates per region, or {top} block indices and {top} shares"
    if batch.boxes is None:
        raise input_error("boxes", "none in this dataset", expected)
    columns = batch.boxes.shape[-1]
    if columns == 4:
        if batch.sizes is None:
            wanted = "width and height of images"
            raise input_error("sizes", "none in this dataset", wanted)
        return top_blocks(batch.boxes, batch.sizes, grid)
    if columns != 2 * top:
        raise input_error("boxes", f"{columns} numbers per region", expected)
    blocks, share = batch.boxes[..., :top].long(), batch.boxes[..., top:]
    # values are read where they lie on the CPU: elsewhere a step would have to wait
    if blocks.device.type == "cpu" and int(blocks.max()) > grid * grid:
        wanted = f"at most {grid * grid}, for a grid of {grid} by {grid}"
        raise input_error("boxes", f"the block index {int(blocks.max())}", wanted)
    return blocks, share


# cell placed-regions
class PositionEncoder(nn.Module):
    """Position vectors of regions: attention over the embeddings of their blocks."""

    def __init__(
        self, image_dim: int, position_dim: int, grid: int, position: str
    ) -> None:
        super().__init__()
        self.grid, self.position = grid, position
        self.block_embedding = nn.Embedding(grid * grid + 1, position_dim)
        self.query_proj = nn.Linear(image_dim, position_dim)

    def logits(self, regions: Tensor, blocks: Tensor) -> Tensor:
        """Attention logits (i, r, k) of regions (i, r, d) for their blocks (i, r, k)."""
        return block_logits(
            self.query_proj(regions), self.block_embedding.weight, blocks
        )

    def forward(self, batch: ImageBatch) -> Tensor:
        """Position vectors (i, r, p)."""
        blocks, share = read_blocks(batch, self.grid)
        queries, table = self.query_proj(batch.regions), self.block_embedding.weight
        return position_vectors(queries, table, blocks, share, self.position)


# cell pfan-class
class PFAN(CrossAttention):
    """Position focused attention network: SCAN on regions with position vectors."""

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        width: int = 1024,
        direction: str = "t2i",
        first_norm: str = "clipped_l2norm",
        pooling: str = "Mean",
        temperature: float = 9.0,
        lse: float = 6.0,
        bonus: float = 0.5,
        position: str = "focused",
        position_dim: int = 200,
        grid: int = 16,
        weight_norm: bool = False,
        **encoders: Any,
    ) -> None:
        check_choices(direction, first_norm, pooling)
        if position not in POSITIONS:
            allowed = f"one of {', '.join(POSITIONS)}"
            raise input_error("position", repr(position), allowed)
        encoders |= {"width": width, "weight_norm": weight_norm}
        super().__init__(vocabulary_size, image_dim, **encoders)
        attention = {"first_norm": first_norm, "temperature": temperature}
        pooled = {"pooling": pooling, "lse": lse, "bonus": bonus}
        self.direction = direction
        self.attend = partial(scan_attention, **attention)
        self.pair_score = partial(pfan_score, **attention, **pooled)
        self.position_encoder = None
        if position != "none":
            args = image_dim, position_dim, grid, position
            self.position_encoder = PositionEncoder(*args)
            region_dim = image_dim + position_dim
            self.region_proj = region_layer(region_dim, width, weight_norm)

    def encode_images(self, batch: ImageBatch) -> Images:
        if self.position_encoder is not None:
            positions = self.position_encoder(batch).to(batch.regions.dtype)
            regions = torch.cat([batch.regions, positions], dim=-1)
            batch = replace(batch, regions=regions)
        return super().encode_images(batch)


# cell build
def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> PFAN:
    """Build the model that the parameters of this chapter describe."""
    names = ("width", "word_dim", "direction", "first_norm", "pooling", "temperature")
    names += ("lse", "bonus", "position", "position_dim", "grid")
    chosen = {name: parameters[name] for name in names}
    return PFAN(vocabulary_size, image_dim, **chosen)


def stages(parameters: Mapping[str, Any], model: PFAN) -> list[Stage]:
    """List the one training of this chapter: hinge loss, hardest negatives."""
    margin, warmup = parameters["margin"], parameters["warmup_epochs"]
    objective = HingeTriplet(margin=margin, hardest=True, warmup_epochs=warmup)
    return [Stage("train", model, objective, train_config(parameters))]
