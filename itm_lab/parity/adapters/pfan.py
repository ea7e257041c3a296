"""PFAN as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from itm_lab.parity.adapters import scan
from itm_lab.parity.comparison import Arrays, Table, batches, load_public, to_device
from itm_utils.errors import input_error
from itm_utils.models.pfan import PFAN, block_overlaps, block_weights, grid_corners, read_blocks, top_blocks

NAMES = {
    "img_enc.fc": "region_proj",
    "img_enc.fc_att": "position_encoder.query_proj",
    "img_enc.position_embedding": "position_encoder.block_embedding",
    "txt_enc.embed": "word_embedding",
    "txt_enc.rnn": "gru",
}
BONUS = {"t2i": 0.5, "i2t": 0.0}  # of the largest attention weights, fixed in the public code


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> PFAN:
    """Our PFAN with public weights, public switches on."""
    return load_public(PFAN(**config(options)), state_dict, NAMES)


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    needed = ("split_size", "position_embed_size")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "those of PFAN")
    return scan.config(options) | {
        "bonus": BONUS[options["cross_attn"]],
        "position": "public",
        "position_dim": options["position_embed_size"],
        "grid": options["split_size"],
    }


def values(model: PFAN, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    image_batch, text_batch = batches(arrays)
    encoder = model.position_encoder
    assert encoder is not None  # public checkpoints have one
    blocks, share = read_blocks(image_batch, encoder.grid)
    logits = encoder.logits(image_batch.regions, blocks)
    found = {
        "mid.pos_attention": torch.softmax(logits, dim=-1),
        "mid.pos_weight": block_weights(logits, share, "public"),
        "mid.pos_feature": encoder(image_batch),
        "mid.img_emb": model.encode_images(image_batch).local,
        "mid.words": model.encode_texts(text_batch).local,
    }
    return {name: value for name, value in found.items() if name in arrays}


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """Compare a case about boxes and blocks; others, which hold weights, are left alone."""
    if "out.block_index" not in arrays:
        return False
    grid, top = about["split_size"], about["topn"]
    boxes = to_device(arrays["in.boxes_norm_xyxy"])[None]
    sizes = torch.ones(1, 2, device=boxes.device)
    area = block_overlaps(*grid_corners(boxes, sizes, grid), grid)[0] / grid**2
    table.add("values", "mid.block_overlap_area", area, arrays["mid.block_overlap_area"])
    (ours,), (share,) = top_blocks(boxes, sizes, grid, top)
    theirs = to_device(arrays["out.block_index"])
    weight = to_device(arrays["out.block_weight"])
    in_order = weight.sort(dim=-1, descending=True).values
    table.add("values", "out.block_weight", share, in_order)
    # Block by block, where the public choice is not one among equals.
    clear = to_device(arrays["out.selection_is_tied"]) == 0
    zeros = torch.zeros(len(theirs), grid * grid + 1, device=boxes.device)
    dense = zeros.scatter_add(1, ours, share), zeros.scatter_add(1, theirs, weight)
    table.add("values", "out.block_index", dense[0][clear], dense[1][clear])
    return True
