"""Answers to the exercises of chapter 04."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong

from itm_utils.models.pfan import block_weights

BLOCK, CENTRE, MASKED = "ex-pfan-block", "ex-pfan-centre", "ex-pfan-masked"


@right(BLOCK)
def floored(x, y, width, height, grid):
    column = (x / width * grid).floor().clamp(max=grid - 1)
    row = (y / height * grid).floor().clamp(max=grid - 1)
    return (column * grid + row).long()


@right(BLOCK)
def python(x, y, width, height, grid):
    return [
        min(int(a * grid / width), grid - 1) * grid + min(int(b * grid / height), grid - 1)
        for a, b in zip(x, y, strict=True)
    ]


@right(BLOCK)
def numpy(x, y, width, height, grid):
    column, row = (np.minimum(np.asarray(v) * grid // n, grid - 1) for v, n in ((x, width), (y, height)))
    return column * grid + row


wrong(BLOCK, "row by row|column times grid")(lambda x, y, w, h, g: floored(y, x, h, w, g))
wrong(BLOCK, "width and height|x goes with|wide image")(lambda x, y, w, h, g: floored(x, y, h, w, g))
wrong(BLOCK, "rounds|upper edge|you say")(
    lambda x, y, w, h, g: (x / w * g).round().clamp(max=g - 1) * g + (y / h * g).round().clamp(max=g - 1)
)
wrong(BLOCK, "last block")(lambda x, y, w, h, g: (x / w * g).floor() * g + (y / h * g).floor())
wrong(BLOCK, "whole number|you say")(lambda x, y, w, h, g: x / w * g * g + y / h * g)
wrong(BLOCK, "grid")(lambda x, y, w, h, g: floored(x, y, w, h, 4))
wrong(BLOCK, "shape|values")(lambda x, y, w, h, g: torch.stack([x // (w / g), y // (h / g)], -1))
wrong(BLOCK, "nothing returned")(lambda x, y, w, h, g: None)
wrong(BLOCK, "1 too large|too large|you say 1, it is 0")(lambda x, y, w, h, g: floored(x, y, w, h, g) + 1)
wrong(BLOCK, "stops with AttributeError")(lambda x, y, w, h, g: x.int().floor_divide(w).to_block())
wrong(BLOCK, "column times grid|you say")(lambda x, y, w, h, g: (x / w * g).floor() + (y / h * g).floor())


@right(CENTRE)
def weighted(blocks, share, grid):
    middles = torch.stack([blocks // grid, blocks % grid], dim=-1) + 0.5
    return (share[..., None] * middles).sum(dim=-2) / grid


@right(CENTRE)
def loops(blocks, share, grid):
    return [
        [
            sum(s * (b // grid + 0.5) / grid for b, s in zip(bs, ss, strict=True)),
            sum(s * (b % grid + 0.5) / grid for b, s in zip(bs, ss, strict=True)),
        ]
        for bs, ss in zip(blocks.tolist(), share.tolist(), strict=True)
    ]


@right(CENTRE)
def doubles(blocks, share, grid):
    b, s = blocks.numpy(), share.numpy().astype(np.float64)
    x, y = ((b // grid + 0.5) * s).sum(1) / s.sum(1), ((b % grid + 0.5) * s).sum(1) / s.sum(1)
    return np.stack([x, y], axis=1) / grid


wrong(CENTRE, "x and y are exchanged")(lambda b, s, g: weighted(b, s, g).flip(1))
wrong(CENTRE, "corners")(lambda b, s, g: weighted(b, s, g) - 0.5 / g)
wrong(CENTRE, "these are blocks|4 times")(lambda b, s, g: weighted(b, s, g) * g)
wrong(CENTRE, "share")(lambda b, s, g: weighted(b, (s > 0) / (s > 0).sum(1, keepdim=True), g))
wrong(CENTRE, "empty places|share")(lambda b, s, g: (torch.stack([b // g, b % g], -1) + 0.5).mean(1) / g)
wrong(CENTRE, "shape")(lambda b, s, g: weighted(b, s, g).T.reshape(2, -1, 1))
wrong(CENTRE, "grid")(lambda b, s, g: weighted(b, s, 4))
wrong(CENTRE, "nothing returned")(lambda b, s, g: None)
wrong(CENTRE, "you say")(lambda b, s, g: torch.stack([b[:, 0] // g + 0.5, b[:, 0] % g + 0.5], -1) / g)
wrong(CENTRE, "shape")(lambda b, s, g: (s * torch.stack([b // g, b % g, b], -1)).sum(1))
wrong(CENTRE, "share|you say")(
    lambda b, s, g: (s[..., None].softmax(1) * (torch.stack([b // g, b % g], -1) + 0.5)).sum(1) / g
)


@right(MASKED)
def fills(logits, share):
    empty = share == 0
    attention = logits.masked_fill(empty, -torch.inf).softmax(-1)
    return (share * attention).masked_fill(empty, -torch.inf).softmax(-1)


@right(MASKED)
def exponentials(logits, share):
    real = (share > 0).double()
    attention = logits.exp() * real
    attention = attention / attention.sum(-1, keepdim=True)
    weights = (share * attention).exp() * real
    return weights / weights.sum(-1, keepdim=True)


@right(MASKED)
def rows(logits, share):
    result = torch.zeros_like(logits)
    for r in range(len(logits)):
        real = share[r] > 0
        result[r, real] = (share[r, real] * logits[r, real].softmax(0)).softmax(0)
    return result.numpy()


wrong(MASKED, "public code")(lambda z, s: block_weights(z, s, "public"))
wrong(MASKED, "first still sees")(lambda z, s: (s * z.softmax(-1)).masked_fill(s == 0, -torch.inf).softmax(-1))
wrong(MASKED, "second still sees|public|empty")(
    lambda z, s: (s * z.masked_fill(s == 0, -torch.inf).softmax(-1)).softmax(-1)
)
wrong(MASKED, "mask before the softmax")(lambda z, s: block_weights(z, s, "public") * (s > 0))
wrong(MASKED, "focused|you say")(lambda z, s: block_weights(z, s, "focused"))
wrong(MASKED, "public weights")(lambda z, s: (s * (z.masked_fill(s == 0, -torch.inf))).softmax(-1))
wrong(MASKED, "second softmax is missing|you say")(lambda z, s: z.masked_fill(s == 0, -torch.inf).softmax(-1))
wrong(MASKED, "shape|you say")(lambda z, s: fills(z, s).sum(1))
wrong(MASKED, "nothing returned")(lambda z, s: None)
wrong(MASKED, "you say")(lambda z, s: s * fills(z, s))
wrong(MASKED, "wherever it stands|in between")(
    lambda z, s: fills(z, torch.where(torch.arange(s.shape[1]) < (s > 0).sum(1, keepdim=True), s + 1e-9, s * 0))
)
