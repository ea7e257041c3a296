"""RoI-align with one bin per box: the mean of a feature map over a box, read between its places."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLES = 16  # per side of a box


def pool_boxes(features: Tensor, boxes: Tensor, samples: int = SAMPLES) -> Tensor:
    """(i, r, d) means of maps (i, d, h, w) over boxes (i, r, 4) x1 y1 x2 y2 in shares of the sides.

    A mean of bilinear samples on a regular grid is a product of weights along both axes: one matrix product per image.
    """
    down = axis_weights(boxes[..., 1], boxes[..., 3], features.shape[2], samples)  # (i, r, h)
    across = axis_weights(boxes[..., 0], boxes[..., 2], features.shape[3], samples)  # (i, r, w)
    weights = down[..., :, None] * across[..., None, :]
    return weights.flatten(2) @ features.flatten(2).mT


def axis_weights(start: Tensor, end: Tensor, length: int, samples: int) -> Tensor:
    """(…, length) weight of each place of an axis in the mean of samples between start and end (…), in shares of it.

    Place p lies at (p + 0.5) / length; what lies beyond the outermost places is read at them.
    """
    steps = (torch.arange(samples, device=start.device, dtype=start.dtype) + 0.5) / samples
    at = ((start[..., None] + (end - start)[..., None] * steps) * length - 0.5).clamp(0, length - 1)
    places = torch.arange(length, device=start.device, dtype=start.dtype)
    return (1 - (at[..., None] - places).abs()).clamp(min=0).mean(dim=-2)
