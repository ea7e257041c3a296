"""Answers to the exercises of chapter 05."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong
from torch import nn

COST, ATTENDED, AXIS = "ex-vsrn-cost", "ex-vsrn-attention", "ex-vsrn-axis"


@right(COST)
def gathered(logits, words):
    logp = logits.log_softmax(-1).gather(-1, words[..., None])[..., 0]
    return -(logp * (words != 0)).sum() / len(words)


@right(COST)
def library(logits, words):
    cost = nn.functional.cross_entropy(logits.mT, words, ignore_index=0, reduction="none")
    return cost.sum(1).mean().double()


@right(COST)
def numpy_cost(logits, words):
    z, w = logits.numpy().astype(np.float64), words.numpy()
    logp = z - z.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    return float(-(np.take_along_axis(logp, w[..., None], -1)[..., 0] * (w > 0)).sum() / len(w))


wrong(COST, "padding")(lambda z, w: -z.log_softmax(-1).gather(-1, w[..., None]).sum() / len(w))
wrong(COST, "per token")(lambda z, w: nn.functional.cross_entropy(z.flatten(0, 1), w.flatten(), ignore_index=0))
wrong(COST, "sign")(lambda z, w: -gathered(z, w))
wrong(COST, "sum over captions|times as large")(lambda z, w: gathered(z, w) * len(w))
wrong(COST, "log_softmax is missing|not log-prob|you say")(
    lambda z, w: -(z.gather(-1, w[..., None])[..., 0] * (w > 0)).sum() / len(w)
)
wrong(COST, "log_softmax|NaN|you say inf")(
    lambda z, w: (
        -((z.exp() / z.exp().sum(-1, keepdim=True)).log().gather(-1, w[..., None])[..., 0] * (w > 0)).sum() / len(w)
    )
)
wrong(COST, "shape")(lambda z, w: nn.functional.cross_entropy(z.mT, w, ignore_index=0, reduction="none").sum(1))
wrong(COST, "nothing returned")(lambda z, w: None)
wrong(COST, "base 2|times as large")(lambda z, w: gathered(z, w) / np.log(2))
wrong(COST, "you say")(lambda z, w: -(z.softmax(-1).gather(-1, w[..., None])[..., 0] * (w > 0)).sum() / len(w))
wrong(COST, "stops with")(lambda z, w: nn.functional.cross_entropy(z, w))


@right(ATTENDED)
def softmaxed(queries, keys, mask):
    return (queries @ keys.mT).masked_fill(~mask[:, None, :], -torch.inf).softmax(dim=2)


@right(ATTENDED)
def exponentials(queries, keys, mask):
    weights = torch.einsum("iqd,ikd->iqk", queries, keys).double().exp_() * mask[:, None]
    return weights.div_(weights.sum(-1, keepdim=True))


@right(ATTENDED)
def padded_rows_are_zero(queries, keys, mask):
    logits = (queries @ keys.mT).masked_fill(~mask[:, None, :], -1e30)
    return (logits.softmax(-1) * mask[:, :, None]).numpy()


wrong(ATTENDED, "padding gets weight")(lambda q, k, m: (q @ k.mT).softmax(-1))
wrong(ATTENDED, "columns sum to one|exchanged")(
    lambda q, k, m: (q @ k.mT).masked_fill(~m[:, :, None], -torch.inf).softmax(1)
)
wrong(ATTENDED, "mask before the softmax")(lambda q, k, m: (q @ k.mT).softmax(-1) * m[:, None])
wrong(ATTENDED, "queries and keys")(lambda q, k, m: softmaxed(k, q, m))
wrong(ATTENDED, "root of the width")(lambda q, k, m: softmaxed(q / q.shape[-1] ** 0.5, k, m))
wrong(ATTENDED, "number of regions|paper|you say")(lambda q, k, m: (q @ k.mT) * m[:, None] / m.sum(1)[:, None, None])
wrong(ATTENDED, "shape")(lambda q, k, m: softmaxed(q, k, m) @ k)
wrong(ATTENDED, "you say|padding")(lambda q, k, m: ((q @ k.mT) * m[:, None]).softmax(-1))
wrong(ATTENDED, "nothing returned")(lambda q, k, m: None)
wrong(ATTENDED, "stops with RuntimeError")(lambda q, k, m: (q @ k).softmax(-1))
wrong(ATTENDED, "you say|exchanged")(lambda q, k, m: softmaxed(q, k, m).mT)


@right(AXIS)
def tries(norm):
    scaled = norm(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1)))
    for axis in range(3):
        lengths = scaled.norm(dim=axis)
        if torch.allclose(lengths, torch.ones_like(lengths), atol=1e-4):
            return axis


@right(AXIS)
def squares(norm):
    scaled = norm(torch.rand(3, 7, 5) + 0.1).numpy() ** 2
    found = [axis for axis in (0, 1, 2) if np.allclose(scaled.sum(axis=axis), 1, atol=1e-3)]
    return found[0] if found else None


@right(AXIS)
def worst(norm):
    x = norm(torch.randn(4, 5, 6))
    deviation = torch.stack([(x.norm(dim=a) - 1).abs().max() for a in range(3)])
    return int(deviation.argmin()) if deviation.min() < 1e-3 else None


wrong(AXIS, "along the regions")(lambda norm: 2)
wrong(AXIS, "along the width|you say")(lambda norm: 1)
wrong(AXIS, "nothing returned")(lambda norm: None)
wrong(AXIS, "nothing at all|you say 2|you say")(
    lambda norm: int(
        torch.stack([(norm(torch.randn(4, 5, 6)).norm(dim=a) - 1).abs().mean() for a in range(3)]).argmin()
    )
)
wrong(AXIS, "you say True|a number|you say False")(lambda norm: tries(norm) == 2)
wrong(AXIS, "you say|nothing")(lambda norm: None if tries(norm) is None else tries(norm) - 3)


@wrong(AXIS, "it is None|you say")
def first_vector_only(norm):
    x = norm(torch.ones(4, 5, 6))
    for axis, size in ((2, 6), (1, 5), (0, 4)):
        if abs(float(x.max()) - size**-0.5) < 1e-3:
            return axis
    return 0


@wrong(AXIS, "nothing is returned")
def uses_sums(norm):
    x = norm(torch.rand(4, 5, 6) + 0.1)
    for axis in range(3):
        if torch.allclose(x.sum(dim=axis), torch.ones_like(x.sum(dim=axis)), atol=1e-3):
            return axis


@wrong(AXIS, "stops with AttributeError")
def wrong_input(norm):
    return norm([1, 2, 3]).norm()


@wrong(AXIS, "along the batch|you say")
def forgets_the_batch(norm):
    found = tries(norm)
    return found if found else None


@wrong(AXIS, "half the unit norm|it is None")
def only_even(norm):
    x = norm(torch.randn(4, 5, 6))
    for axis in (2, 1, 0):
        if x.norm(dim=axis).std() < 1e-3:
            return axis
