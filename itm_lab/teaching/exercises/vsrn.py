"""Exercises of chapter 05."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise


def caption_cost(logits, words, per_token=False):
    """Token by token."""
    costs, tokens = [], 0
    for steps, targets in zip(logits.tolist(), words.tolist(), strict=True):
        cost = 0.0
        for numbers, target in zip(steps, targets, strict=True):
            if target != 0:
                cost += (
                    max(numbers)
                    + math.log(sum(math.exp(number - max(numbers)) for number in numbers))
                    - numbers[target]
                )
                tokens += 1
        costs.append(cost)
    return sum(costs) / (tokens if per_token else len(costs))


def cost_cases(draw: Draw) -> Iterator[Case]:
    def captions(lengths: list[int], size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(1, size, (len(lengths), max(lengths)), generator=draw.generator)
        words = words * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
        return 2 * draw.normal(len(lengths), max(lengths), size), words

    flat = torch.zeros(1, 1, 100)
    yield Case("a decoder that knows nothing", (flat, torch.tensor([[7]])), "one token of a hundred costs log 100")
    yield Case("one caption of three tokens", captions([3]), "add the costs of its tokens")
    yield Case("two captions of equal length", captions([4, 4]), "the mean over the captions")
    yield Case("padding", captions([2, 5, 1]), "padding, word 0, costs nothing")
    logits, words = captions([3, 2])
    yield Case("large logits", (100 * logits, words), "the exponentials overflow: use log_softmax")


def log_probabilities(logits, words):
    return logits.log_softmax(-1).gather(-1, words[..., None])[..., 0]


COST = Exercise(
    "ex-vsrn-cost",
    caption_cost,
    cost_cases,
    {
        "padding is paid for": lambda z, w: float(-log_probabilities(z, w).sum() / len(w)),
        "that is per token; add up a caption's tokens and average over captions": lambda z, w: caption_cost(
            z, w, per_token=True
        ),
        "the sign is wrong: a cost is a negative log-likelihood": lambda z, w: -caption_cost(z, w),
        "that is the sum over captions; take their mean": lambda z, w: caption_cost(z, w) * len(w),
        "the logarithm of base 2": lambda z, w: caption_cost(z, w) / math.log(2),
        "logits are not log-probabilities: log_softmax is missing": lambda z, w: float(
            -(z.gather(-1, w[..., None])[..., 0] * (w > 0)).sum() / len(w)
        ),
    },
)


def attended_relations(queries, keys, mask):
    """Region by region, over the real ones."""
    images, regions, _ = queries.shape
    result = torch.zeros(images, regions, regions)
    for i in range(images):
        real = [k for k in range(regions) if mask[i, k]]
        for r in range(regions):
            numbers = {k: math.exp(float(queries[i, r] @ keys[i, k])) for k in real}
            for k in real:
                result[i, r, k] = numbers[k] / sum(numbers.values())
    return result


def attended_cases(draw: Draw) -> Iterator[Case]:
    whole = torch.ones(1, 4, dtype=torch.bool)
    yield Case("no padding", (draw.normal(1, 4, 3), draw.normal(1, 4, 3), whole), "a softmax along each row")
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    yield Case("padding", (draw.normal(2, 4, 3), draw.normal(2, 4, 3), mask), "mask before the softmax, not after it")
    one = torch.tensor([[True, False, False]])
    yield Case("one real region", (draw.normal(1, 3, 2), draw.normal(1, 3, 2), one), "it gets everything")
    gap = torch.tensor([[True, False, True, False, True]])
    yield Case(
        "padding in between", (draw.normal(1, 5, 6), draw.normal(1, 5, 6), gap), "the mask says which regions are real"
    )


def observe_real_rows(answer, queries, keys, mask):
    """What real regions take; a padded row may hold anything."""
    value = answer(queries, keys, mask)
    if isinstance(value, torch.Tensor) and value.shape == (*mask.shape, mask.shape[1]):
        value = value.masked_fill(~mask[..., None], 0)
    return value


def logits_of(queries, keys):
    return torch.einsum("iqd,ikd->iqk", queries, keys)


ATTENDED = Exercise(
    "ex-vsrn-attention",
    attended_relations,
    attended_cases,
    {
        "padding gets weight": lambda q, k, m: logits_of(q, k).softmax(2),
        "columns sum to one: a row is what one region takes from all others": lambda q, k, m: (
            logits_of(q, k).masked_fill(~m[:, :, None], -torch.inf).softmax(1)
        ),
        "rows do not sum to one: mask before the softmax, not after it": lambda q, k, m: (
            logits_of(q, k).softmax(2) * m[:, None]
        ),
        "queries and keys are exchanged": lambda q, k, m: attended_relations(k, q, m),
        "nothing divides the logits here by the root of the width": lambda q, k, m: attended_relations(
            q / q.shape[-1] ** 0.5, k, m
        ),
        "this divides by the number of regions, as the paper does; take a softmax": lambda q, k, m: (
            logits_of(q, k) * m[:, None] / m.sum(1)[:, None, None]
        ),
    },
    shape="(i, r, r)",
    observe=observe_real_rows,
)


def scaled_along(axis):
    return lambda x: x / x.norm(dim=axis, keepdim=True)


NORMS = {
    "along the width": scaled_along(2),
    "along the regions": scaled_along(1),
    "along the batch": scaled_along(0),
    "nothing at all": lambda x: x,
    "whole images": scaled_along((1, 2)),
    "the sum along the width is one": lambda x: x / x.sum(dim=2, keepdim=True),
    "half the unit norm along the regions": lambda x: x / x.norm(dim=1, keepdim=True) / 2,
    "along the batch, and some values become 0": lambda x: scaled_along(0)(x.relu() + 1e-3),
}
AXES = {
    "along the width": 2,
    "along the regions": 1,
    "along the batch": 0,
    "along the batch, and some values become 0": 0,
}


def observe_axis(answer, name):
    return answer(NORMS[name])


def which_axis(norm):
    """Look at every vector of every axis."""
    scaled = norm(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)))
    for axis in range(3):
        if all(
            abs(float(vector.norm()) - 1) < 1e-4 for vector in scaled.movedim(axis, -1).reshape(-1, scaled.shape[axis])
        ):
            return axis
    return None


def axis_cases(draw: Draw) -> Iterator[Case]:
    for name in NORMS:
        right = AXES.get(name)
        yield Case(
            f"a function that scales {name}",
            (name,),
            f"there {'no axis fits' if right is None else f'axis {right} has unit norms'}",
        )


AXIS = Exercise("ex-vsrn-axis", which_axis, axis_cases, observe=observe_axis)

EXERCISES = (COST, ATTENDED, AXIS)
