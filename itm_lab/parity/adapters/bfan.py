"""BFAN as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from itm_lab.parity.adapters import scan
from itm_lab.parity.comparison import Arrays, load_public
from itm_utils.errors import input_error
from itm_utils.fast_attention import pair_attention
from itm_utils.matcher import Images, Texts
from itm_utils.models.bfan import BFAN
from itm_utils.models.scan import scan_attention

NAMES = scan.NAMES  # the encoders are SCAN's
# Options of SCAN that BFAN fixes.
FIXED = {
    "bi_gru": True,
    "cross_attn": "t2i",
    "raw_feature_norm": "clipped_l2norm",
    "agg_func": "Mean",
    "lambda_lse": 1.0,
}


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> BFAN:
    """Our BFAN with public weights."""
    return load_public(BFAN(**config(options)), state_dict, NAMES)


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    if "focal_type" not in options:
        raise input_error("public options", "no focal_type", "all options of BFAN")
    ours = scan.config({**options, **FIXED})
    for name in ("direction", "first_norm", "pooling", "lse"):
        del ours[name]
    return ours | {"focal": options["focal_type"], "ties": options.get("ties", "keep")}


def values(model: BFAN, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    images, texts, found = scan.encoder_values(model, arrays)
    if "mid.pair" in arrays:
        i, c = (slice(int(n), int(n) + 1) for n in arrays["mid.pair"])
        found |= pair_values(model, images[i], texts[c])
    return {name: value for name, value in found.items() if name in arrays}


def pair_values(model: BFAN, images: Images, texts: Texts) -> dict[str, Tensor]:
    """Every step of one pair by its public name; attention is (query, key)."""
    found = {}
    dense = partial(scan_attention, first_norm="clipped_l2norm", temperature=model.config["temperature"])
    sides = {"t2i": (images, texts), "i2t": (texts, images)}
    for direction, (keys, queries) in sides.items():
        attention = model.attention(images, texts)[direction]
        real = attention.query_mask[0]
        focal = attention.weights[0][real][:, attention.key_mask[0]]
        plain = pair_attention(keys, queries, dense).weights[0][real]
        attended = attention.weights[0][real] @ attention.keys[0]
        found[f"mid.pair_{direction}_attn"] = plain[:, attention.key_mask[0]]
        found[f"mid.pair_{direction}_mask"] = (focal > 0).float()
        found[f"mid.pair_{direction}_reattn"] = focal
        found[f"mid.pair_{direction}_context"] = attended
        found[f"mid.pair_{direction}_rowsim"] = torch.cosine_similarity(attention.queries[0][real], attended)
    return found
