"""Exercises of chapter 06."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from itm_lab.teaching.checks import Case, Draw, Exercise


def feed_forward(x, inner, inner_bias, outer, outer_bias, residual=1.0, norm=True, bend=True):
    """Vector by vector; the mean and the spread by hand."""
    rows = []
    for vector in x:
        hidden = vector @ inner + inner_bias
        changed = (hidden.clamp(min=0) if bend else hidden) @ outer + outer_bias + residual * vector
        if norm:
            spread = ((changed - changed.mean()) ** 2).mean()
            changed = (changed - changed.mean()) / (spread + 1e-5).sqrt()
        rows.append(changed)
    return torch.stack(rows)


def ffn_cases(draw: Draw) -> Iterator[Case]:
    def layer(k: int, d: int, f: int) -> tuple[torch.Tensor, ...]:
        return draw.normal(k, d), draw.normal(d, f), draw.normal(f), draw.normal(f, d), draw.normal(d)

    x, inner, inner_bias, outer, outer_bias = layer(1, 4, 6)
    zero = (x, inner, inner_bias * 0, torch.zeros(6, 4), outer_bias * 0)
    yield Case("a layer that does nothing", zero, "what is left is the normalised input")
    yield Case("one vector", (x, inner, inner_bias, outer, outer_bias), "ReLU stands between the two maps")
    yield Case("five vectors", layer(5, 4, 6), "every vector is normalised by itself")
    yield Case("a wide layer", layer(3, 8, 32), "the input is added before the norm")


FFN = Exercise(
    "ex-saem-ffn",
    feed_forward,
    ffn_cases,
    {
        "the residual connection is missing: add the input": lambda *g: feed_forward(*g, residual=0.0),
        "the layer norm is missing": lambda *g: feed_forward(*g, norm=False),
        "the ReLU between the two maps is missing": lambda *g: feed_forward(*g, bend=False),
        "the norm comes first here (pre-norm); the chapter's layers are post-norm": lambda x, *g: (
            x + feed_forward(nn.functional.layer_norm(x, x.shape[-1:]), *g, residual=0.0, norm=False)
        ),
        "the input is added after the norm; add it before": lambda x, *g: x + feed_forward(x, *g, residual=0.0),
    },
    shape="(k, d)",
)


def attention(part, scale, dim=-1):
    return torch.softmax(part @ part.T / scale, dim=dim) @ part


def one_head(part):
    """Query by query."""
    rows = []
    for query in part:
        numbers = [math.exp(float(query @ key) / len(query) ** 0.5) for key in part]
        rows.append(sum(number * value for number, value in zip(numbers, part, strict=True)) / sum(numbers))
    return torch.stack(rows)


def two_heads(x):
    half = x.shape[1] // 2
    return torch.cat([one_head(x[:, :half]), one_head(x[:, half:])], dim=1)


def halves(x, rule):
    half = x.shape[1] // 2
    return torch.cat([rule(x[:, :half]), rule(x[:, half:])], dim=1)


def head_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one vector", (draw.normal(1, 4),), "it attends to itself alone")
    yield Case("three vectors of width two", (draw.normal(3, 2),), "the width of a head is 1")
    yield Case("five vectors of width eight", (draw.normal(5, 8),), "the width of a head is 4, so divide by 2")
    yield Case(
        "four vectors of width eighteen", (0.5 * draw.normal(4, 18),), "the width of a head is 9, so divide by 3"
    )


HEADS = Exercise(
    "ex-saem-heads",
    two_heads,
    head_cases,
    {
        "divide by the root of a head's width, not of the whole": lambda x: halves(
            x, lambda p: attention(p, x.shape[1] ** 0.5)
        ),
        "the logits are not divided by the root of the width": lambda x: halves(x, lambda p: attention(p, 1.0)),
        "each query's weights must sum to one: another axis for the softmax": lambda x: halves(
            x, lambda p: attention(p, p.shape[1] ** 0.5, dim=0)
        ),
        "that is one head: split the vectors into halves first": lambda x: attention(x, x.shape[1] ** 0.5),
        "the two heads are exchanged": lambda x: two_heads(x.roll(x.shape[1] // 2, 1)),
        "the softmax is missing": lambda x: halves(x, lambda p: p @ p.T / p.shape[1] ** 0.5 @ p),
        "head 0 has the first half of the numbers, not every second one": lambda x: torch.stack(
            [one_head(x[:, ::2]), one_head(x[:, 1::2])], -1
        ).flatten(1),
    },
    shape="(k, d)",
    tolerance=1e-5,
)


def slow_angular(images, texts, degrees, sides=(0, 1), own=False, soft=True, pick=max):
    """One anchor and one negative at a time."""
    square, total = math.tan(math.radians(degrees)) ** 2, 0.0
    for side in sides:
        anchors, positives = (images, texts) if side == 0 else (texts, images)
        for b, (a, p) in enumerate(zip(anchors, positives, strict=True)):
            others = [n for k, n in enumerate(positives) if own or k != b]
            cost = pick([float(4 * square * (a + p) @ n - 2 * (1 + square) * a @ p) for n in others])
            total += math.log1p(math.exp(cost)) if soft else max(cost, 0.0)
    return total


def angular_cases(draw: Draw) -> Iterator[Case]:
    yield Case("45 degrees, two pairs", (draw.unit(2, 3), draw.unit(2, 3), 45.0), "at 45 degrees it is angular_loss")
    yield Case("45 degrees, six pairs", (draw.unit(6, 5), draw.unit(6, 5), 45.0), "at 45 degrees it is angular_loss")
    yield Case("36 degrees", (draw.unit(6, 5), draw.unit(6, 5), 36.0), "both factors hold the squared tangent")
    yield Case("20 degrees", (draw.unit(5, 4), draw.unit(5, 4), 20.0), "both factors hold the squared tangent")
    same = draw.unit(4, 5)
    yield Case("captions that equal their images", (same, same.clone(), 40.0), "a positive is no negative of its own")


ANGLE = Exercise(
    "ex-saem-angle",
    slow_angular,
    angular_cases,
    {
        "only the images are anchors here": lambda i, t, d: slow_angular(i, t, d, (0,)),
        "only the captions are anchors here": lambda i, t, d: slow_angular(i, t, d, (1,)),
        "a caption is no negative of its own image": lambda i, t, d: slow_angular(i, t, d, own=True),
        "degrees are not radians": lambda i, t, d: slow_angular(i, t, math.degrees(d)),
        "that is a hinge; the loss is softplus, log(1 + exp(cost))": lambda i, t, d: slow_angular(i, t, d, soft=False),
        "the angle is not used": lambda i, t, d: slow_angular(i, t, 45.0),
        "that is the mean; the loss is the sum": lambda i, t, d: slow_angular(i, t, d) / len(i),
        "the easiest negative; take the hardest": lambda i, t, d: slow_angular(i, t, d, pick=min),
        "that adds up all costs before the logarithm; take the hardest": lambda i, t, d: slow_angular(
            i, t, d, pick=sum
        ),
        "tan, not its square": lambda i, t, d: slow_angular(
            i, t, math.degrees(math.atan(math.tan(math.radians(d)) ** 0.5))
        ),
    },
)

EXERCISES = (FFN, HEADS, ANGLE)
