"""Answers to the exercises of chapter 07."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong
from torch import nn

READING, GATE, INFLUENCE = "ex-sgraf-cosine", "ex-sgraf-gate", "ex-sgraf-influence"


def affine(weight, bias, width):
    layer = nn.Linear(width, 2)
    with torch.no_grad():
        layer.weight[:] = torch.tensor(weight)[:, None]
        if bias is not None:
            layer.bias[:] = torch.tensor(bias)
    return layer


@right(READING)
def by_rows(width):
    layer = nn.Linear(width, 2)
    with torch.no_grad():
        layer.weight[0], layer.weight[1] = -0.5, 0.5
        layer.bias[0], layer.bias[1] = 1.0, 0.0
    return layer


@right(READING)
def by_data(width):
    layer = nn.Linear(width, 2)
    layer.weight.data = torch.tensor([-0.5, 0.5])[:, None].repeat(1, width)
    layer.bias.data = torch.tensor([1.0, 0.0])
    return layer


@right(READING)
def by_init(width):
    layer = nn.Linear(width, 2)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    layer.weight.data[0].neg_()
    layer.bias.data[0] += 1
    return layer


wrong(READING, "rows are exchanged")(lambda w: affine([0.5, -0.5], [0.0, 1.0], w))
wrong(READING, "lacks its constant")(lambda w: affine([-0.5, 0.5], [0.0, 0.0], w))
wrong(READING, "whole squared distance")(lambda w: affine([-0.5, 1.0], [1.0, 0.0], w))
wrong(READING, "by half")(lambda w: affine([-1.0, 0.5], [1.0, 0.0], w))
wrong(READING, "the cosine|you say")(lambda w: affine([-0.5, 0.5], None, w))
wrong(READING, "falls with the distance|negative")(lambda w: affine([0.5, 0.5], [1.0, 0.0], w))
wrong(READING, "shape")(lambda w: nn.Linear(2, w))
wrong(READING, "nothing returned")(lambda w: None)
wrong(READING, "width is an argument|stops with|shape")(lambda w: affine([-0.5, 0.5], [1.0, 0.0], 4))
wrong(READING, "divided by the width|you say")(lambda w: affine([-0.5 / w, 0.5 / w], [1.0, 0.0], w))
wrong(READING, "stops with AttributeError")(lambda w: torch.zeros(2, w))


@right(GATE)
def sigmoids(nodes, logits, mask):
    gate = (logits.sigmoid() * mask)[..., None]
    return nn.functional.normalize((gate * nodes).sum(1) / gate.sum(1), dim=-1)


@right(GATE)
def without_division(nodes, logits, mask):
    nodes *= logits.sigmoid().masked_fill(~mask, 0)[..., None]
    total = nodes.sum(dim=1)
    return total / total.norm(dim=-1, keepdim=True)


@right(GATE)
def with_numpy(nodes, logits, mask):
    gate = np.where(mask, 1 / (1 + np.exp(-logits.numpy())), 0)
    total = np.einsum("pk,pkd->pd", gate, nodes.numpy())
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def gated(nodes, gate, norm=True):
    mean = (gate[..., None] * nodes).sum(1) / gate.sum(1, keepdim=True)
    return nn.functional.normalize(mean, dim=-1) if norm else mean


wrong(GATE, "padded nodes")(lambda n, z, m: gated(n, z.sigmoid()))
wrong(GATE, "softmax")(lambda n, z, m: gated(n, z.masked_fill(~m, -torch.inf).softmax(1)))
wrong(GATE, "unit norm|normalised")(lambda n, z, m: gated(n, z.sigmoid() * m, norm=False))
wrong(GATE, "gates are not used")(lambda n, z, m: gated(n, m.float()))
wrong(GATE, "upside down")(lambda n, z, m: gated(n, (1 - z.sigmoid()) * m))
wrong(GATE, "normalise the mean|normalised before|you say")(
    lambda n, z, m: gated(nn.functional.normalize(n, dim=-1), z.sigmoid() * m, norm=False)
)
wrong(GATE, "shape|stops with")(lambda n, z, m: nn.functional.normalize((z.sigmoid() * m)[..., None] * n, dim=-1))
wrong(GATE, "you say|padded nodes")(lambda n, z, m: gated(n, (z * m).sigmoid()))
wrong(GATE, "you say|NaN")(lambda n, z, m: gated(n, z * m))
wrong(GATE, "nothing returned")(lambda n, z, m: None)
wrong(GATE, "NaN")(lambda n, z, m: gated(n, torch.tanh(z) * m))


@right(INFLUENCE)
def backwards(rounds):
    heard = torch.eye(len(rounds[0]))[0]
    for edges in reversed(rounds):
        heard = heard @ edges
    return heard


@right(INFLUENCE)
def forwards(rounds):
    nodes = torch.eye(len(rounds[0])).double()
    for edges in rounds:
        nodes = edges.double() @ nodes
    return nodes[0]


@right(INFLUENCE)
def numpy_product(rounds):
    total = rounds[-1].numpy()
    for edges in rounds[-2::-1]:
        total = total @ edges.numpy()
    return total[0].tolist()


def product(rounds):
    total = torch.eye(len(rounds[0]))
    for edges in rounds:
        total = edges @ total
    return total


wrong(INFLUENCE, "wrong order")(lambda r: product(r[::-1])[0])
wrong(INFLUENCE, "row, not a column")(lambda r: product(r)[:, 0])
wrong(INFLUENCE, "last round alone")(lambda r: r[-1][0])
wrong(INFLUENCE, "first round alone")(lambda r: r[0][0])
wrong(INFLUENCE, "mean over the rounds")(lambda r: sum(r)[0] / len(r))
wrong(INFLUENCE, "shape")(lambda r: product(r))
wrong(INFLUENCE, "first node alone|mean over all")(lambda r: product(r).mean(0))
wrong(INFLUENCE, "number by number|all of yours are|you say")(lambda r: torch.stack(r).prod(0)[0])
wrong(INFLUENCE, "nothing returned")(lambda r: None)
wrong(INFLUENCE, "stops with AttributeError")(lambda r: r.flip(0))
wrong(INFLUENCE, "you say")(lambda r: product(r)[-1])
