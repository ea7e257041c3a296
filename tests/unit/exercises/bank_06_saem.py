"""Answers to the exercises of chapter 06."""

from __future__ import annotations

import math

import numpy as np
import torch
from bank import right, wrong
from torch import nn

from itm_utils.models.saem import angular_loss

FFN, HEADS, ANGLE = "ex-saem-ffn", "ex-saem-heads", "ex-saem-angle"


@right(FFN)
def functional(x, inner, inner_bias, outer, outer_bias):
    hidden = nn.functional.relu(x @ inner + inner_bias)
    return nn.functional.layer_norm(x + hidden @ outer + outer_bias, x.shape[-1:])


@right(FFN)
def in_place(x, inner, inner_bias, outer, outer_bias):
    x += torch.clamp(x @ inner + inner_bias, min=0) @ outer + outer_bias
    x -= x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@right(FFN)
def with_numpy(x, inner, inner_bias, outer, outer_bias):
    x, a, b, c, d = (t.numpy() for t in (x, inner, inner_bias, outer, outer_bias))
    z = x + np.maximum(x @ a + b, 0) @ c + d
    return (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)


def sublayer(x, a, b, c, d):
    return (x @ a + b).relu() @ c + d


def norm(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


wrong(FFN, "residual|input|NaN|all of yours are 0")(lambda x, *g: norm(sublayer(x, *g)))
wrong(FFN, "layer norm is missing")(lambda x, *g: x + sublayer(x, *g))
wrong(FFN, "ReLU")(lambda x, a, b, c, d: norm(x + (x @ a + b) @ c + d))
wrong(FFN, "pre-norm|normalised input")(lambda x, *g: x + sublayer(norm(x), *g))
wrong(FFN, "added after|normalised input|add it before")(lambda x, *g: x + norm(sublayer(x, *g)))
wrong(FFN, "you say")(lambda x, a, b, c, d: norm(x + (x @ a).relu() @ c + d))
wrong(FFN, "by itself|normalised|you say")(
    lambda x, *g: (lambda z: (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt())(x + sublayer(x, *g))
)
wrong(FFN, "stops with RuntimeError")(lambda x, a, b, c, d: norm(x + (x @ c).relu() @ a))
wrong(FFN, "nothing returned")(lambda x, *g: None)
wrong(FFN, "you say|normalised")(lambda x, *g: nn.functional.normalize(x + sublayer(x, *g), dim=-1))
wrong(FFN, "you say")(lambda x, a, b, c, d: norm(x + nn.functional.gelu(x @ a + b) @ c + d))


@right(HEADS)
def chunks(x):
    heads = []
    for part in x.chunk(2, dim=1):
        heads.append(torch.softmax(part @ part.T / part.shape[1] ** 0.5, dim=-1) @ part)
    return torch.cat(heads, dim=1)


@right(HEADS)
def library(x):
    parts = x.view(len(x), 2, -1).transpose(0, 1)[None]
    return nn.functional.scaled_dot_product_attention(parts, parts, parts)[0].transpose(0, 1).reshape(x.shape)


@right(HEADS)
def heads_with_numpy(x):
    k, d = x.shape
    parts = x.numpy().astype(np.float64).reshape(k, 2, d // 2)
    logits = np.einsum("qhd,khd->hqk", parts, parts) / math.sqrt(d / 2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, parts).reshape(k, d)


def heads(x, rule):
    return torch.cat([rule(part) for part in x.chunk(2, dim=1)], dim=1)


def attend(p, scale, dim=-1):
    return torch.softmax(p @ p.T / scale, dim=dim) @ p


wrong(HEADS, "head's width|width of a head")(lambda x: heads(x, lambda p: attend(p, x.shape[1] ** 0.5)))
wrong(HEADS, "not divided|width of a head")(lambda x: heads(x, lambda p: attend(p, 1)))
wrong(HEADS, "another axis")(lambda x: heads(x, lambda p: attend(p, p.shape[1] ** 0.5, 0)))
wrong(HEADS, "one head")(lambda x: attend(x, x.shape[1] ** 0.5))
wrong(HEADS, "heads are exchanged")(lambda x: chunks(x).roll(x.shape[1] // 2, 1))
wrong(HEADS, "second one|you say")(
    lambda x: torch.stack([attend(x[:, s::2], (x.shape[1] / 2) ** 0.5) for s in (0, 1)], -1).flatten(1)
)
wrong(HEADS, "shape")(lambda x: torch.cat([attend(p, p.shape[1] ** 0.5) for p in x.chunk(2, dim=1)], dim=0))
wrong(HEADS, "softmax is missing|you say|itself")(lambda x: heads(x, lambda p: p @ p.T / p.shape[1] ** 0.5 @ p))
wrong(HEADS, "nothing returned")(lambda x: None)
wrong(HEADS, "divide by 3|divide by 2|width of a head")(
    lambda x: heads(x, lambda p: attend(p, 2.0 if p.shape[1] > 1 else 1.0))
)
wrong(HEADS, "shape")(lambda x: heads(x, lambda p: torch.softmax(p @ p.T, -1)))


@right(ANGLE)
def by_table(images, texts, degrees):
    square, loss = math.tan(math.radians(degrees)) ** 2, 0.0
    same = torch.eye(len(images), dtype=torch.bool)
    for a, p in ((images, texts), (texts, images)):
        costs = 4 * square * (a + p) @ p.T - 2 * (1 + square) * (a * p).sum(1, keepdim=True)
        loss = loss + nn.functional.softplus(costs.masked_fill(same, -torch.inf).amax(1)).sum()
    return loss


@right(ANGLE)
def by_log(images, texts, degrees):
    t = np.tan(np.deg2rad(degrees)) ** 2
    i, c = images.double().numpy(), texts.double().numpy()
    total = 0.0
    for a, p in ((i, c), (c, i)):
        costs = 4 * t * (a @ p.T + p @ p.T) - 2 * (1 + t) * (a * p).sum(1)[:, None]
        np.fill_diagonal(costs, -np.inf)
        total += np.log1p(np.exp(costs.max(1))).sum()
    return total


@right(ANGLE)
def by_loop(images, texts, degrees):
    t, costs = torch.tan(torch.deg2rad(torch.tensor(degrees))).square(), []
    for a, p in ((images, texts), (texts, images)):
        for b in range(len(a)):
            others = torch.cat([p[:b], p[b + 1 :]])
            costs.append((4 * t * others @ (a[b] + p[b]) - 2 * (1 + t) * a[b] @ p[b]).max())
    return nn.functional.softplus(torch.stack(costs)).sum().item()


def one_side(a, p, degrees, own=False, bend=nn.functional.softplus, pick="amax"):
    square = math.tan(math.radians(degrees)) ** 2
    costs = 4 * square * (a + p) @ p.T - 2 * (1 + square) * (a * p).sum(1, keepdim=True)
    if not own:
        costs = costs[~torch.eye(len(a), dtype=torch.bool)].view(len(a), -1)
    return bend(getattr(costs, pick)(1)).sum()


wrong(ANGLE, "only the images")(lambda i, t, d: one_side(i, t, d))
wrong(ANGLE, "only the captions")(lambda i, t, d: one_side(t, i, d))
wrong(ANGLE, "no negative of its own")(lambda i, t, d: one_side(i, t, d, own=True) + one_side(t, i, d, own=True))
wrong(ANGLE, "radians")(lambda i, t, d: by_table(i, t, math.degrees(d)))
wrong(ANGLE, "hinge")(lambda i, t, d: one_side(i, t, d, bend=torch.relu) + one_side(t, i, d, bend=torch.relu))
wrong(ANGLE, "angle is not used|squared tangent")(lambda i, t, d: angular_loss(i, t))
wrong(ANGLE, "mean|times as large")(lambda i, t, d: by_table(i, t, d) / len(i))
wrong(ANGLE, "easiest|you say")(lambda i, t, d: one_side(i, t, d, pick="amin") + one_side(t, i, d, pick="amin"))
wrong(ANGLE, "not its square|squared tangent|you say")(
    lambda i, t, d: by_table(i, t, math.degrees(math.atan(math.sqrt(math.tan(math.radians(d))))))
)
wrong(ANGLE, "nothing returned")(lambda i, t, d: None)
wrong(ANGLE, "all costs|you say")(lambda i, t, d: one_side(i, t, d, pick="sum") + one_side(t, i, d, pick="sum"))
