"""Exercises of chapter 04."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_utils.models.pfan import block_weights, top_blocks


def block_of(x, y, width, height, grid):
    """Point by point."""
    numbers = []
    for px, py in zip(x.tolist(), y.tolist(), strict=True):
        column = min(math.floor(px / width * grid), grid - 1)
        row = min(math.floor(py / height * grid), grid - 1)
        numbers.append(column * grid + row)
    return torch.tensor(numbers)


def block_cases(draw: Draw) -> Iterator[Case]:
    def points(n: int, width: float, height: float) -> tuple[torch.Tensor, torch.Tensor]:
        # away from the borders of blocks: rounding decides nothing
        return (draw.uniform(n) * 0.98 + 0.01) * width, (draw.uniform(n) * 0.98 + 0.01) * height

    yield Case("the upper left corner", (torch.zeros(1), torch.zeros(1), 8, 8, 4), "it lies in block 0")
    yield Case(
        "a point of the first column", (torch.tensor([0.5]), torch.tensor([5.0]), 8, 8, 4), "column times grid plus row"
    )
    yield Case("points of a square image", (*points(9, 8, 8), 8, 8, 4), "column times grid plus row")
    yield Case(
        "points of a wide image", (*points(9, 640, 100), 640, 100, 4), "x goes with the width, y with the height"
    )
    yield Case("a grid of sixteen", (*points(9, 500, 375), 500, 375, 16), "use the grid that is given")
    edge = torch.tensor([640.0, 640.0, 10.0]), torch.tensor([100.0, 10.0, 100.0])
    yield Case("points on the right and lower edge", (*edge, 640, 100, 4), "they belong to the last block")


def grid_place(x, y, width, height, grid):
    return (x / width * grid).floor().clamp(max=grid - 1), (y / height * grid).floor().clamp(max=grid - 1)


def by_rows(x, y, width, height, grid):
    column, row = grid_place(x, y, width, height, grid)
    return row * grid + column


BLOCK = Exercise(
    "ex-pfan-block",
    block_of,
    block_cases,
    {
        "that numbers row by row; here a number is column times grid plus row": by_rows,
        "width and height are exchanged": lambda x, y, w, h, g: block_of(x, y, h, w, g),
        "this rounds; a block begins at its left and upper edge": lambda x, y, w, h, g: (
            (x / w * g).round().clamp(max=g - 1) * g + (y / h * g).round().clamp(max=g - 1)
        ),
        "a point on the right or lower edge belongs to the last block, not to one beyond it": lambda x, y, w, h, g: (
            (x / w * g).floor() * g + (y / h * g).floor()
        ),
        "a block number is a whole number: round down": lambda x, y, w, h, g: x / w * g * g + y / h * g,
    },
    shape="(n,)",
)


def centre(blocks, share, grid, middle=0.5, weighted=True):
    """Region by region, block by block."""
    places = []
    for numbers, parts in zip(blocks.tolist(), share.tolist(), strict=True):
        x = y = total = 0.0
        for number, part in zip(numbers, parts, strict=True):
            if part > 0:
                voice = part if weighted else 1.0
                x += voice * (number // grid + middle) / grid
                y += voice * (number % grid + middle) / grid
                total += voice
        places.append([x / total, y / total])
    return torch.tensor(places)


def centre_cases(draw: Draw) -> Iterator[Case]:
    def boxed(n: int, grid: int, top: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        start = draw.uniform(1, n, 2) * 5
        box = torch.cat([start, start + 1 + draw.uniform(1, n, 2) * 2], dim=-1)
        blocks, share = top_blocks(box, torch.tensor([[8.0, 8.0]]), grid=grid, top=top)
        return blocks[0], share[0], grid

    yield Case(
        "one block",
        (torch.tensor([[5]]), torch.tensor([[1.0]]), 4),
        "a block stands for its middle, in parts of the image",
    )
    yield Case(
        "a block off the diagonal",
        (torch.tensor([[3]]), torch.tensor([[1.0]]), 4),
        "a number is column times grid plus row",
    )
    uneven = torch.tensor([[0, 15]]), torch.tensor([[0.75, 0.25]]), 4
    yield Case("two blocks of different share", uneven, "a block counts with its share")
    empty = torch.tensor([[9, 16, 16]]), torch.tensor([[1.0, 0.0, 0.0]]), 4
    yield Case("empty places", empty, "an empty place has share 0 and must not count")
    yield Case("boxes of a small image", boxed(3, 4, 15), "the sum of the shares is one")
    yield Case("another grid", boxed(4, 8, 40), "use the grid that is given")


CENTRE = Exercise(
    "ex-pfan-centre",
    centre,
    centre_cases,
    {
        "x and y are exchanged: a number is column times grid plus row": lambda b, s, g: centre(b, s, g).flip(1),
        "these are the corners of the blocks: take their middles": lambda b, s, g: centre(b, s, g, middle=0),
        "these are blocks: divide by their number to get parts of the image": lambda b, s, g: centre(b, s, g) * g,
        "each block counts alike here: weigh it with its share": lambda b, s, g: centre(b, s, g, weighted=False),
        "empty places count: their share is 0": lambda b, s, g: (
            torch.stack([b // g + 0.5, b % g + 0.5], -1).mean(1) / g
        ),
    },
    shape="(r, 2), x and y of each region",
)


def masked_public(logits, share, first=True, second=True):
    """Region by region; each softmax over the real blocks, unless told otherwise."""
    result = torch.zeros_like(logits)
    for r in range(len(logits)):
        real = [k for k in range(logits.shape[1]) if share[r, k] > 0]
        places = real if first else range(logits.shape[1])
        total = sum(math.exp(logits[r, k]) for k in places)
        attention = [math.exp(logits[r, k]) / total for k in range(logits.shape[1])]
        places = real if second else range(logits.shape[1])
        total = sum(math.exp(share[r, k] * attention[k]) for k in places)
        for k in places:
            result[r, k] = math.exp(share[r, k] * attention[k]) / total
    return result


def masked_cases(draw: Draw) -> Iterator[Case]:
    def logits(*shape: int) -> torch.Tensor:
        return torch.tanh(2 * draw.normal(*shape))

    full = draw.weights(2, 5, dim=1)
    yield Case("no empty slots", (logits(2, 5), full), "regions without empty slots keep their public weights")
    parts = torch.tensor([[0.7, 0.3, 0, 0, 0], [0.2] * 5])
    yield Case("three empty slots", (logits(2, 5), parts), "an empty slot gets no weight in either softmax")
    yield Case("one real block", (logits(1, 4), torch.tensor([[1.0, 0, 0, 0]])), "one block gets everything")
    gaps = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    yield Case("an empty slot in between", (logits(1, 4), gaps), "share 0 marks an empty slot, wherever it stands")


MASKED = Exercise(
    "ex-pfan-masked",
    masked_public,
    masked_cases,
    {
        "this is the public code: empty slots still take part": lambda z, s: block_weights(z, s, "public"),
        "the second softmax is right; the first still sees the empty slots": lambda z, s: masked_public(
            z, s, first=False
        ),
        "the first softmax is right; the second still sees the empty slots": lambda z, s: masked_public(
            z, s, second=False
        ),
        "the weights of a region are to sum to one: mask before the softmax, not after it": lambda z, s: (
            block_weights(z, s, "public") * (s > 0)
        ),
        "that is focused, with one softmax": lambda z, s: block_weights(z, s, "focused"),
        "the second softmax is missing": lambda z, s: z.masked_fill(s == 0, -torch.inf).softmax(-1),
    },
    shape="(r, k)",
    tolerance=1e-5,
)

EXERCISES = (BLOCK, CENTRE, MASKED)
