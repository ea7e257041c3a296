"""Exercises of chapter 03."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_utils.models.bfan import TIE_TOLERANCE, focal_threshold


def refocus(weights, keep):
    """Query by query."""
    result = torch.zeros_like(weights)
    for m, x in ((m, x) for m in range(weights.shape[0]) for x in range(weights.shape[2])):
        kept = [k for k in range(weights.shape[1]) if keep[m, k, x]]
        total = sum(float(weights[m, k, x]) for k in kept)
        for k in kept:
            result[m, k, x] = weights[m, k, x] / total if total else 0.0
    return result


def refocus_cases(draw: Draw) -> Iterator[Case]:
    weights = draw.weights(2, 5, 3, dim=1)
    yield Case(
        "everything is kept",
        (weights, torch.ones_like(weights, dtype=torch.bool)),
        "nothing changes: the weights sum to one already",
    )
    keep = weights >= weights.mean(dim=1, keepdim=True)
    yield Case("keys above the mean are kept", (weights, keep), "dropped keys get 0, the others share the whole")
    one = torch.zeros_like(keep)
    one[:, 1] = True
    yield Case("one key is kept", (weights, one), "it gets everything")
    none = keep.clone()
    none[0, :, 2] = False
    yield Case("a query that keeps nothing", (weights, none), "0 divided by 0: its weights are to be 0")
    more = draw.weights(3, 6, 4, dim=1)
    yield Case("any keys", (more, draw.uniform(3, 6, 4) > 0.5), "the sum runs over the keys, axis 1")


REFOCUS = Exercise(
    "ex-bfan-refocus",
    refocus,
    refocus_cases,
    {
        "the kept weights are to sum to one again": lambda w, k: w * k,
        "the sum runs over the keys, axis 1": lambda w, k: w * k / (w * k).sum(dim=2, keepdim=True).clamp_min(1e-12),
        "dropped keys keep a weight": lambda w, k: torch.softmax(w * k, dim=1),
        "that spreads the weight evenly over the kept keys": lambda w, k: (
            k / k.sum(1, keepdim=True).clamp_min(1).float()
        ),
        "the dropped keys were kept": lambda w, k: refocus(w, ~k),
    },
    shape="(m, k, x)",
)


def threshold_by_weight(weights):
    """The mean of the weights, each counted by itself, query by query."""
    result = torch.zeros(weights.shape[0], 1, weights.shape[2])
    for m in range(weights.shape[0]):
        for x in range(weights.shape[2]):
            column = weights[m, :, x].tolist()
            result[m, 0, x] = sum(w * w for w in column) / sum(column)
    return result


def threshold_cases(draw: Draw) -> Iterator[Case]:
    yield Case("even weights", (torch.full((1, 4, 2), 0.25),), "all weights alike: the threshold is that weight")
    one = torch.zeros(1, 3, 1)
    one[0, 1] = 1
    yield Case("one key has everything", (one,), "the threshold is 1")
    yield Case("a single key", (torch.ones(2, 1, 2),))
    yield Case(
        "three images, seven keys, five queries",
        (draw.weights(3, 7, 5, dim=1),),
        "the sum of the weights, each times itself",
    )
    yield Case("as many keys as queries", (draw.weights(2, 4, 4, dim=1),), "the sum runs over the keys, axis 1")


BAR = Exercise(
    "ex-bfan-bar",
    threshold_by_weight,
    threshold_cases,
    {
        "that is the threshold of equal": lambda w: focal_threshold(w, "equal"),
        "that is the threshold of prob": lambda w: focal_threshold(w, "prob"),
        "a mean of squares: divide by the sum of the weights, not by their number": lambda w: w.square().mean(
            1, keepdim=True
        ),
        "the square root of the sum of squares": lambda w: w.square().sum(1, keepdim=True).sqrt(),
        "that is the largest weight": lambda w: w.amax(1, keepdim=True),
    },
    shape="(m, 1, x)",
)


def keep_with_padding(weights, mask):
    """Query by query, over the real keys alone."""
    keep = torch.zeros_like(weights, dtype=torch.bool)
    for m in range(weights.shape[0]):
        real = [k for k in range(weights.shape[1]) if mask[m, k]]
        for x in range(weights.shape[2]):
            mean = sum(float(weights[m, k, x]) for k in real) / len(real)
            for k in real:
                keep[m, k, x] = float(weights[m, k, x]) >= (1 - TIE_TOLERANCE) * mean
    return keep


def padding_cases(draw: Draw) -> Iterator[Case]:
    def padded(counts: list[int], keys: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.arange(keys) < torch.tensor(counts)[:, None]
        return draw.weights(len(counts), keys, queries, dim=1, mask=mask[..., None]), mask

    yield Case("no padding", padded([6, 6], 6, 10), "weights of at least the mean stay")
    yield Case(
        "padding", padded([3, 2, 4], 6, 20), "padding still counts in the mean: divide by the number of real keys"
    )
    yield Case("one real key", padded([1, 6], 6, 3), "a single key is on its own mean and stays")
    even = torch.zeros(1, 6, 2)
    even[0, :3] = 1 / 3
    yield Case("even weights", (even, torch.arange(6)[None] < 3), "a key on the mean stays, a padded key never does")
    near = torch.tensor([[[0.5 - 1e-6], [0.5 + 1e-6], [0.0]]])
    yield Case(
        "weights a rounding below the mean", (near, torch.tensor([[True, True, False]])), "allow for TIE_TOLERANCE"
    )
    mask = torch.tensor([[False, True, True, False, True]])
    yield Case(
        "padding in between",
        (draw.weights(1, 5, 8, dim=1, mask=mask[..., None]), mask),
        "the mask says which keys are real",
    )


PADDING = Exercise(
    "ex-bfan-padding",
    keep_with_padding,
    padding_cases,
    {
        "padding still counts in the mean: divide by the number of real keys": lambda w, m: (
            (w >= (1 - TIE_TOLERANCE) * w.mean(1, keepdim=True)) & m[..., None]
        ),
        "a padded key stays": lambda w, m: keep_with_padding(w, m) | ~m[..., None],
        "a key on the threshold must stay: allow for TIE_TOLERANCE": lambda w, m: (
            (w > w.sum(1, keepdim=True) / m[..., None].sum(1, keepdim=True)) & m[..., None]
        ),
    },
    shape="(m, k, x)",
)

EXERCISES = (REFOCUS, BAR, PADDING)
