"""A small MMCA: sizes, and weights under the names of the reference cases."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WIDTH, HEADS, IMAGE_DIM, TOKEN_DIM, ALPHA = 8, 2, 7, 6, 0.3


def public_weights(feed_forward: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    """Weights under the names of the reference cases; no bias is zero and no norm is plain."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"region_fc": (WIDTH, IMAGE_DIM), "text_fc": (WIDTH, TOKEN_DIM)}
    for cnn, width in (("text_cnn0", TOKEN_DIM), ("text_cnn1", WIDTH)):
        shapes |= {f"{cnn}.conv{window}": (WIDTH, width, window) for window in (1, 2, 3)}
        shapes[f"{cnn}.fc"] = (WIDTH, 3 * WIDTH)
    for unit in ("self_unit", "cross_unit"):
        shapes |= {f"{unit}.{name}": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{unit}.ffn1": (feed_forward, WIDTH), f"{unit}.ffn2": (WIDTH, feed_forward)}
        shapes |= {f"{unit}.norm1": (WIDTH,), f"{unit}.norm2": (WIDTH,)}
    weights = {}
    for name, shape in shapes.items():
        scale = 0.5 if len(shape) == 1 else 1.2 / math.sqrt(math.prod(shape[1:]))
        weights[f"{name}.weight"] = scale * torch.randn(shape, generator=draw) + (len(shape) == 1)
        weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=draw)
    return weights
