"""Exercises of chapter 01."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_utils.matcher import Scores


def costs_of(scores, margin, allowed):
    """Hinge costs of every query by a loop: of each image, then of each caption. allowed: whether (b, n) is a negative."""
    b = len(scores.i2t)
    for query in range(b):
        own = scores.i2t[query, query]
        yield [max(0.0, float(margin + scores.i2t[query, n] - own)) for n in range(b) if allowed(query, n)]
    for query in range(b):
        own = scores.t2i[query, query]
        yield [max(0.0, float(margin + scores.t2i[n, query] - own)) for n in range(b) if allowed(query, n)]


def hinge_without_repeats(scores, margin, image_ids):
    ids = image_ids.tolist()
    return sum(max(costs, default=0.0) for costs in costs_of(scores, margin, lambda b, n: ids[b] != ids[n]))


def swapped(scores):
    return Scores(i2t=scores.t2i, t2i=scores.i2t)


def different(b, n):
    return b != n


def scores_of(draw: Draw, b: int) -> Scores:
    return Scores(i2t=draw.uniform(b, b), t2i=draw.uniform(b, b))


def repeat_cases(draw: Draw) -> Iterator[Case]:
    three = Scores.same(draw.uniform(3, 3))
    yield Case(
        "three different images", (three, 0.2, torch.tensor([0, 1, 2])), "the plain loss over the hardest negatives"
    )
    yield Case("another margin", (three, 0.6, torch.tensor([0, 1, 2])), "use the margin that is given")
    yield Case(
        "pairs 0 and 1 share an image", (three, 0.4, torch.tensor([5, 5, 2])), "equal image ids are no negatives"
    )
    yield Case(
        "pairs 0 and 2 share an image", (three, 0.4, torch.tensor([7, 1, 7])), "they need not stand side by side"
    )
    yield Case("one image three times", (three, 0.2, torch.tensor([1, 1, 1])), "without negatives the loss is 0")
    yield Case(
        "a matrix for each direction",
        (scores_of(draw, 4), 0.3, torch.arange(4)),
        "rows of i2t for images, columns of t2i for captions",
    )
    yield Case(
        "five pairs of two images",
        (scores_of(draw, 5), 0.3, torch.tensor([4, 9, 4, 9, 4])),
        "equal image ids are no negatives, in both directions",
    )
    far = Scores.same(2 * torch.eye(3) - 1)
    yield Case("no violation", (far, 0.2, torch.arange(3)), "a cost below 0 counts 0")


REPEATS = Exercise(
    "ex-vsepp-repeats",
    hinge_without_repeats,
    repeat_cases,
    {
        "repeats still count as negatives": lambda s, m, ids: sum(map(max, costs_of(s, m, different))),
        "the two matrices are exchanged: images rank captions along rows of i2t": lambda s, m, ids: (
            hinge_without_repeats(swapped(s), m, ids)
        ),
        "t2i is not used: captions rank images down its columns": lambda s, m, ids: hinge_without_repeats(
            Scores.same(s.i2t), m, ids
        ),
        "i2t is not used: images rank captions along its rows": lambda s, m, ids: hinge_without_repeats(
            Scores.same(s.t2i), m, ids
        ),
        "that is the sum over all negatives; take the hardest of each query": lambda s, m, ids: sum(
            map(sum, costs_of(s, m, lambda b, n: bool(ids[b] != ids[n])))
        ),
    },
)


def hinge_top(scores, margin, k):
    return sum(sum(sorted(costs, reverse=True)[:k]) for costs in costs_of(scores, margin, different))


def top_cases(draw: Draw) -> Iterator[Case]:
    yield Case(
        "k = 1, the hardest",
        (Scores.same(draw.uniform(5, 5)), 0.2, 1),
        "one negative of each query, in both directions",
    )
    noise = scores_of(draw, 7)
    yield Case("k = 6, all negatives", (noise, 0.2, 6), "all negatives of each query; the positive is none")
    yield Case(
        "k = 1, a matrix for each direction", (noise, 0.2, 1), "rows of i2t for images, columns of t2i for captions"
    )
    yield Case("k = 3", (noise, 0.2, 3), "the three largest costs of each query")
    yield Case("k = 2, another margin", (noise, 0.7, 2), "use the margin that is given")
    yield Case("no violation", (Scores.same(2 * torch.eye(4) - 1), 0.2, 2), "a cost below 0 counts 0")


TOP_K = Exercise(
    "ex-vsepp-top-k",
    hinge_top,
    top_cases,
    {
        "k is not used": lambda s, m, k: hinge_top(s, m, 1),
        "this adds up all negatives, whatever k is": lambda s, m, k: hinge_top(s, m, len(s.i2t)),
        "the positive pair is no negative of its own: its cost is the margin itself": lambda s, m, k: sum(
            sum(sorted(costs, reverse=True)[:k]) for costs in costs_of(s, m, lambda b, n: True)
        ),
        "the two matrices are exchanged": lambda s, m, k: hinge_top(swapped(s), m, k),
        "the mean of the k largest; add them up": lambda s, m, k: hinge_top(s, m, k) / k,
        "only one direction is there": lambda s, m, k: sum(
            sum(sorted(c, reverse=True)[:k]) for n, c in enumerate(costs_of(s, m, different)) if n < len(s.i2t)
        ),
    },
)


def mean_cosine(vectors):
    n = len(vectors)
    values = [float((vectors[a] * vectors[b]).sum()) for a in range(n) for b in range(n) if a != b]
    return sum(values) / len(values)


def collapse_cases(draw: Draw) -> Iterator[Case]:
    yield Case("two vectors at right angles", (torch.eye(2),), "their cosine is 0")
    yield Case("the same vector four times", (draw.unit(1, 5).expand(4, 5).clone(),), "a collapse: every cosine is 1")
    yield Case("two opposite vectors", (torch.tensor([[1.0, 0], [-1, 0]]),), "a vector is not paired with itself")
    for n in (3, 6, 40):
        yield Case(f"{n} vectors", (draw.unit(n, 8),), "the mean over n (n - 1) pairs of different vectors")


COLLAPSE = Exercise(
    "ex-vsepp-collapse",
    mean_cosine,
    collapse_cases,
    {
        "pairs of a vector with itself count here": lambda v: float((v @ v.T).mean()),
        "that is the mean of the absolute cosines": lambda v: (
            float((v @ v.T).abs().sum() - len(v)) / (len(v) * (len(v) - 1))
        ),
        "there are n (n - 1) pairs of different vectors, not n squared": lambda v: (
            float((v @ v.T).sum() - len(v)) / len(v) ** 2
        ),
    },
)

EXERCISES = (COLLAPSE, REPEATS, TOP_K)
