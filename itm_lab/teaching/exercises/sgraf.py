"""Exercises of chapter 07."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from itm_lab.teaching.checks import Case, Draw, Exercise


def gated_mean(nodes, logits, mask, gate=None, unit=True):
    """Pair by pair, node by node."""
    rows = []
    for vectors, numbers, real in zip(nodes, logits.tolist(), mask.tolist(), strict=True):
        gates = [
            (1 / (1 + math.exp(-z)) if gate is None else gate(z)) * here for z, here in zip(numbers, real, strict=True)
        ]
        mean = torch.stack([g * v for g, v in zip(gates, vectors, strict=True)]).sum(0) / sum(gates)
        rows.append(mean / mean.norm() if unit else mean)
    return torch.stack(rows)


def gate_cases(draw: Draw) -> Iterator[Case]:
    whole = torch.ones(2, 3, dtype=torch.bool)
    yield Case(
        "one node",
        (draw.normal(2, 1, 4), draw.normal(2, 1), torch.ones(2, 1, dtype=torch.bool)),
        "one node is normalised, whatever its gate",
    )
    yield Case("equal gates", (draw.normal(2, 3, 4), torch.zeros(2, 3), whole), "the plain mean, normalised")
    yield Case("different gates", (draw.normal(2, 3, 4), 2 * draw.normal(2, 3), whole), "a sigmoid for each node")
    mask = torch.arange(5) < torch.tensor([2, 5, 1])[:, None]
    yield Case("padding", (draw.normal(3, 5, 6), 2 * draw.normal(3, 5), mask), "padded nodes have no gate")


GATE = Exercise(
    "ex-sgraf-gate",
    gated_mean,
    gate_cases,
    {
        "padded nodes take part": lambda n, z, m: gated_mean(n, z, torch.ones_like(m)),
        "that is a softmax; each node has a sigmoid of its own": lambda n, z, m: gated_mean(n, z, m, math.exp),
        "the result is to have unit norm": lambda n, z, m: gated_mean(n, z, m, unit=False),
        "the gates are not used": lambda n, z, m: gated_mean(n, z, m, lambda z: 1.0),
        "the gates are upside down": lambda n, z, m: gated_mean(n, -z, m),
        "the nodes are normalised before the mean; normalise the mean": lambda n, z, m: gated_mean(
            nn.functional.normalize(n, dim=-1), z, m, unit=False
        ),
    },
    shape="(p, d)",
)


def reading(width):
    """From the formula: |x - y|^2 = 2 - 2 cos."""
    layer = nn.Linear(width, 2)
    with torch.no_grad():
        for column in range(width):
            layer.weight[0, column], layer.weight[1, column] = -0.5, 0.5
        layer.bias[0], layer.bias[1] = 1.0, 0.0
    return layer


def affine(weight, bias, width):
    layer = nn.Linear(width, 2)
    with torch.no_grad():
        layer.weight[:] = torch.tensor(weight)[:, None]
        layer.bias[:] = torch.tensor(bias)
    return layer


def observe_reading(answer, x, y):
    """What the layer makes of squared differences, number by number."""
    layer = answer(x.shape[1])
    if layer is None:
        return None
    if tuple(layer.weight.shape) != (2, x.shape[1]):
        raise ValueError(f"weights of shape {tuple(layer.weight.shape)}, they should be {(2, x.shape[1])}")
    with torch.no_grad():
        cosine, half = layer((x - y).square()).T
    return {"the cosine": cosine, "half the squared distance": half}


def reading_cases(draw: Draw) -> Iterator[Case]:
    one = draw.unit(1, 4)
    yield Case("equal vectors", (one, one.clone()), "their cosine is 1, their distance 0")
    yield Case("opposite vectors", (one, -one), "their cosine is -1, half the squared distance 2")
    yield Case("width 7", (draw.unit(5, 7), draw.unit(5, 7)), "for unit vectors |x - y|^2 = 2 - 2 cos")
    yield Case("width 3", (draw.unit(5, 3), draw.unit(5, 3)), "the width is an argument")


READING = Exercise(
    "ex-sgraf-cosine",
    reading,
    reading_cases,
    {
        "the two rows are exchanged: the cosine comes first": lambda w: affine([0.5, -0.5], [0.0, 1.0], w),
        "the cosine lacks its constant: equal vectors should give 1": lambda w: affine([-0.5, 0.5], [0.0, 0.0], w),
        "the second is the whole squared distance; take half of it": lambda w: affine([-0.5, 1.0], [1.0, 0.0], w),
        "the cosine falls by half of the squared distance, not by all of it": lambda w: affine(
            [-1.0, 0.5], [1.0, 0.0], w
        ),
        "the cosine falls with the distance: its weights are negative": lambda w: affine([0.5, 0.5], [1.0, 0.0], w),
        "the weights are divided by the width: the distance is a sum, not a mean": lambda w: affine(
            [-0.5 / w, 0.5 / w], [1.0, 0.0], w
        ),
    },
    observe=observe_reading,
)


def influence(rounds):
    """Mark every node, and see which marks arrive."""
    k = len(rounds[0])
    shares = []
    for origin in range(k):
        heard = [1.0 if node == origin else 0.0 for node in range(k)]
        for edges in rounds:
            heard = [sum(float(edges[a, b]) * heard[b] for b in range(k)) for a in range(k)]
        shares.append(heard[0])
    return torch.tensor(shares)


def product(rounds):
    total = torch.eye(len(rounds[0]))
    for edges in rounds:
        total = edges @ total
    return total


def influence_cases(draw: Draw) -> Iterator[Case]:
    def rounds(number: int, nodes: int) -> tuple[list[torch.Tensor]]:
        return ([draw.weights(nodes, nodes, dim=1) for _ in range(number)],)

    yield Case("one round", rounds(1, 4), "row 0 says how the first node listens")
    yield Case(
        "a round in which all listen to themselves",
        ([draw.weights(3, 3, dim=1), torch.eye(3)],),
        "the identity changes nothing",
    )
    yield Case("two rounds", rounds(2, 4), "what its neighbours heard before counts, too")
    yield Case("three rounds", rounds(3, 5), "the first node asks in the last round")


INFLUENCE = Exercise(
    "ex-sgraf-influence",
    influence,
    influence_cases,
    {
        "wrong order: the first node asks in the last round": lambda r: product(r[::-1])[0],
        "that is where the first node went, not what it heard: a row, not a column": lambda r: product(r)[:, 0],
        "the last round alone: what its neighbours heard before is missing": lambda r: r[-1][0],
        "the first round alone": lambda r: r[0][0],
        "that is the mean over the rounds; they follow one another": lambda r: torch.stack(r).mean(0)[0],
        "the mean over all nodes; the first node alone is read": lambda r: product(r).mean(0),
        "the matrices are multiplied number by number": lambda r: torch.stack(r).prod(0)[0],
    },
    shape="(k,)",
    tolerance=1e-5,
)

EXERCISES = (READING, GATE, INFLUENCE)
