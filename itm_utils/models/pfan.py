# Generated from notebooks/04_pfan.ipynb by `itm export`: edit the notebook, not this file.

"""PFAN: regions that know where they are, on top of SCAN."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from itm_lab.parity.comparison import Table, batches, load_public
from torch import Tensor, nn

from itm_utils.errors import input_error
from itm_utils.matcher import ImageBatch, Images
from itm_utils.models.scan import (
    CrossAttention,
    EPS,
    attend,
    by_item,
    check_choices,
    cosine_from_gram,
    from_public_options,
    pool,
    region_layer,
)


# cell overlaps
def in_blocks(boxes: Tensor, sizes: Tensor, grid: int) -> tuple[Tensor, Tensor]:
    """Both corners (i, r, 2) of boxes (i, r, 4), counted in blocks instead of pixels."""
    scale = (grid / sizes.to(boxes.dtype))[:, None]  # (i, 1, 2), blocks a pixel
    return (
        (boxes[..., :2] * scale).clamp(0, grid),
        (boxes[..., 2:] * scale).clamp(0, grid),
    )


def overlaps(start: Tensor, end: Tensor, grid: int) -> Tensor:
    """Part of each block that a box covers: (i, r, grid * grid), column by column."""
    edges = torch.arange(grid, device=start.device, dtype=start.dtype)
    inside = torch.minimum(end[..., None], edges + 1) - torch.maximum(
        start[..., None], edges
    )
    across, down = inside.clamp_min(0).unbind(dim=-2)  # (i, r, grid) each
    return (across[..., :, None] * down[..., None, :]).flatten(-2)


# cell to-blocks
TOP = 15  # blocks that a region may have, as in the public files


def to_blocks(
    boxes: Tensor, sizes: Tensor, grid: int = 16, top: int = TOP
) -> tuple[Tensor, Tensor]:
    """The blocks that each box covers most: their numbers and shares, (i, r, top) each.

    boxes: (i, r, 4) x1 y1 x2 y2 in pixels. sizes: (i, 2) width and height in pixels.
    Empty places hold the number grid * grid and the share 0.
    """
    start, end = in_blocks(boxes, sizes, grid)
    area = overlaps(start, end, grid)
    number = torch.arange(grid * grid, device=boxes.device)
    middle = torch.stack([number // grid, number % grid], dim=-1) + 0.5
    away = ((start + end)[..., None, :] / 2 - middle).square().sum(dim=-1)
    # One whole number decides: most area first, then nearest to the box's middle.
    order = ((area * 2**24).long() * 2**22 - (away * 2**8).long()) * grid**2 - number
    chosen = order.topk(min(top, grid * grid), dim=-1).indices
    kept = area.gather(-1, chosen)
    blocks = torch.where(kept > 0, chosen, grid * grid)
    return blocks, kept / kept.sum(dim=-1, keepdim=True).clamp_min(EPS)


# cell block-weights
POSITIONS = ("focused", "area", "public", "none")


def block_weights(fit: Tensor, share: Tensor, position: str) -> Tensor:
    """What each block of a region counts, (i, r, k), from its fit and its share (i, r, k)."""
    if position == "area":  # no attention
        return share
    if position == "public":  # two softmaxes, and empty places take part in both
        return torch.softmax(share * torch.softmax(fit, dim=-1), dim=-1)
    weights = share * fit.exp()
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(EPS)


def position_vectors(
    asked: Tensor, table: Tensor, blocks: Tensor, share: Tensor, position: str
) -> Tensor:
    """Position vectors (i, r, p). asked: (i, r, p) what each region asks the blocks.

    table: (grid * grid + 1, p), the last row for empty places.
    """
    fit = torch.tanh((asked @ table.T).gather(-1, blocks))
    weights = block_weights(fit, share.to(fit.dtype), position)
    empty = weights.new_zeros(*blocks.shape[:-1], len(table))
    return empty.scatter_add(-1, blocks, weights) @ table.to(weights.dtype)


# cell pfan-score
def pfan_score(
    affinity: Tensor,
    gram: Tensor,
    query_length: Tensor,
    shapes: list[tuple[int, int]],
    first_norm: str,
    temperature: float,
    pooling: str,
    lse: float,
    bonus: float,
) -> Tensor:
    """SCAN's score (m, n), and ``bonus`` times the pooled largest weight of every query."""
    weights = attend(affinity, shapes, first_norm, temperature)
    relevance = cosine_from_gram(affinity, weights, gram, query_length)

    def pooled(values: Tensor) -> Tensor:
        parts = by_item(values, shapes)
        return torch.cat([pool(part, pooling, lse) for part in parts], dim=-1)

    scores = pooled(relevance)
    return scores + bonus * pooled(weights.amax(dim=1)) if bonus else scores


# cell pfan-by-loop
def pfan_by_loop(
    images, texts, direction, first_norm, temperature, pooling, lse, bonus
):
    """Scores (i, c), one caption at a time, every attended vector built; no region masks."""
    columns = []
    for words, mask in zip(texts.local, texts.mask, strict=True):
        repeated = words[mask].expand(len(images), -1, -1)  # (i, w, d)
        keys, queries = images.local, repeated
        if direction == "i2t":
            keys, queries = queries, keys
        affinity = keys @ queries.mT  # (i, k, q)
        weights = attend(affinity, [(queries.shape[1], 1)], first_norm, temperature)
        attended = weights.mT @ keys  # (i, q, d)
        relevance = nn.functional.cosine_similarity(queries, attended, dim=-1)
        score = pool(relevance[..., None], pooling, lse)
        largest = pool(weights.amax(dim=1)[..., None], pooling, lse)
        columns.append(score + bonus * largest)
    return torch.cat(columns, dim=1)


# cell read-blocks
def blocks_of(batch: ImageBatch, grid: int) -> tuple[Tensor, Tensor]:
    """Block numbers and shares of a batch, from pixel boxes or from a public block file."""
    expected = f"4 pixel coordinates a region, or {TOP} block numbers and {TOP} shares"
    if batch.boxes is None:
        raise input_error("boxes", "none in this dataset", expected)
    columns = batch.boxes.shape[-1]
    if columns == 4:
        if batch.sizes is None:
            raise input_error(
                "sizes", "none in this dataset", "width and height of pictures"
            )
        return to_blocks(batch.boxes, batch.sizes, grid)
    if columns != 2 * TOP:
        raise input_error("boxes", f"{columns} numbers a region", expected)
    blocks, share = batch.boxes[..., :TOP].long(), batch.boxes[..., TOP:]
    if not blocks.is_meta and int(blocks.max()) > grid * grid:
        most = f"at most {grid * grid}, for a grid of {grid} by {grid}"
        raise input_error("boxes", f"the block number {int(blocks.max())}", most)
    return blocks, share


# cell placed-regions
class PlacedRegions(CrossAttention):
    """SCAN's encoders, with a position vector beside the features of every region."""

    def __init__(
        self,
        vocabulary_size: int,
        image_dim: int,
        position: str = "focused",
        position_dim: int = 200,
        grid: int = 16,
        **more: Any,
    ) -> None:
        if position not in POSITIONS:
            raise input_error(
                "position", repr(position), f"one of {', '.join(POSITIONS)}"
            )
        own = {"position": position, "position_dim": position_dim, "grid": grid}
        super().__init__(vocabulary_size, image_dim, **more, **own)
        self.position, self.grid = position, grid
        if position == "none":
            return
        self.block_table = nn.Embedding(grid * grid + 1, position_dim)
        self.ask = nn.Linear(image_dim, position_dim)
        width, weight_norm = self.config["width"], self.config["weight_norm"]
        self.region_proj = region_layer(image_dim + position_dim, width, weight_norm)

    def positions(self, batch: ImageBatch) -> Tensor:
        """Position vectors (i, r, p) of the regions."""
        blocks, share = blocks_of(batch, self.grid)
        asked, table = self.ask(batch.regions), self.block_table.weight
        return position_vectors(asked, table, blocks, share, self.position)

    def encode_images(self, batch: ImageBatch) -> Images:
        if self.position != "none":
            where = self.positions(batch).to(batch.regions.dtype)
            batch = replace(batch, regions=torch.cat([batch.regions, where], dim=-1))
        return super().encode_images(batch)


# cell pfan-class
class PFAN(PlacedRegions):
    """SCAN whose regions know their places. sizes: vocabulary_size and image_dim."""

    PUBLIC_NAMES: ClassVar = {
        "img_enc.fc": "region_proj",
        "img_enc.fc_att": "ask",
        "img_enc.position_embedding": "block_table",
        "txt_enc.embed": "word_embedding",
        "txt_enc.rnn": "gru",
    }

    def __init__(
        self,
        *sizes: int,
        direction: str = "t2i",
        first_norm: str = "clipped_l2norm",
        pooling: str = "Mean",
        temperature: float = 9.0,
        lse: float = 6.0,
        bonus: float = 0.5,
        **more: Any,
    ) -> None:
        chosen = check_choices(direction, first_norm, pooling)
        chosen |= {"temperature": temperature, "lse": lse, "bonus": bonus}
        super().__init__(*sizes, **more, **chosen)
        self.direction = chosen.pop("direction")
        self.pair_score = partial(pfan_score, **chosen)
        self.look = partial(attend, first_norm=first_norm, temperature=temperature)

    @classmethod
    def from_public(cls, state_dict: Mapping, options: Mapping) -> Self:
        return load_public(cls(**public_config(options)), state_dict, cls.PUBLIC_NAMES)


# cell build
PUBLIC_BONUS = {"t2i": 0.5, "i2t": 0.0}


def public_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our keywords for the options of the public command line, public switches on."""
    needed = ("split_size", "position_embed_size")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "those of PFAN")
    return from_public_options(options) | {
        "bonus": PUBLIC_BONUS[options["cross_attn"]],
        "position": "public",
        "position_dim": options["position_embed_size"],
        "grid": options["split_size"],
    }


def build(parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int) -> PFAN:
    """The model of a run, from the parameters of the chapter."""
    names = ("width", "word_dim", "direction", "first_norm", "pooling", "temperature")
    names += ("lse", "bonus", "position", "position_dim", "grid")
    chosen = {name: parameters[name] for name in names}
    return PFAN(vocabulary_size, image_dim, **chosen)


# cell public-values
def public_values(model: PFAN, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Our values for what a golden case of the public code holds under ``mid.*``."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    blocks, share = blocks_of(image_batch, model.grid)
    fit = model.ask(image_batch.regions) @ model.block_table.weight.T
    fit = torch.tanh(fit.gather(-1, blocks))
    values = {
        "mid.pos_attention": torch.softmax(fit, dim=-1),
        "mid.pos_weight": block_weights(fit, share, "public"),
        "mid.pos_feature": model.positions(image_batch),
        "mid.img_emb": images.local,
        "mid.words": texts.local,
    }
    return {name: value for name, value in values.items() if name in arrays}


def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """Compare a case about boxes and blocks; others, which hold weights, are left alone."""
    if "out.block_index" not in arrays:
        return False
    grid, top = about["split_size"], about["topn"]
    boxes = torch.from_numpy(arrays["in.boxes_norm_xyxy"])[None]
    sizes = torch.ones(1, 2)
    area = overlaps(*in_blocks(boxes, sizes, grid), grid)[0] / grid**2
    table.add(
        "values", "mid.block_overlap_area", area, arrays["mid.block_overlap_area"]
    )
    (ours,), (share,) = to_blocks(boxes, sizes, grid, top)
    theirs = torch.from_numpy(arrays["out.block_index"])
    weight = torch.from_numpy(arrays["out.block_weight"])
    in_order = weight.sort(dim=-1, descending=True).values
    table.add("values", "out.block_weight", share, in_order)
    # Block by block, where the public choice is not one among equals.
    clear = torch.from_numpy(arrays["out.selection_is_tied"]) == 0
    none = torch.zeros(len(theirs), grid * grid + 1)
    dense = none.scatter_add(1, ours, share), none.scatter_add(1, theirs, weight)
    table.add("values", "out.block_index", dense[0][clear], dense[1][clear])
    return True
