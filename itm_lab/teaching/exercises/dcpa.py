"""Exercises of chapter 09."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_lab.teaching.exercises.vsepp import costs_of, different
from itm_utils.matcher import Scores


def share_mean(values, mask, share, rounding=math.ceil, least=1, masked=True, best=True):
    """Row by row."""
    rows = []
    for row, real in zip(values.tolist(), mask.tolist(), strict=True):
        entries = sorted([v for v, here in zip(row, real, strict=True) if here or not masked], reverse=best)
        count = max(least, rounding(round(share * len(entries), 9)))
        rows.append(sum(entries[:count]) / count)
    return torch.tensor(rows)


def half_of_width(values, mask, share):
    count = max(1, math.ceil(share * values.shape[1]))
    kept = values.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True).values[:, :count]
    return kept.masked_fill(kept.isinf(), 0).sum(1) / kept.isfinite().sum(1)


def share_cases(draw: Draw) -> Iterator[Case]:
    def rows(counts: list[int], width: int, padding: float = 9.0) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.arange(width) < torch.tensor(counts)[:, None]
        return torch.where(mask, draw.normal(len(counts), width), torch.tensor(padding)), mask

    yield Case("half of four", (*rows([4, 4], 4), 0.5), "the mean of the two largest")
    yield Case("the whole of four", (*rows([4], 4), 1.0), "with share 1 it is the mean of all")
    yield Case(
        "half of two, beside padding", (*rows([2, 4], 4), 0.5), "half of two is one: count the entries of each row"
    )
    yield Case("padding larger than all entries", (*rows([3, 1, 2], 6, 50.0), 0.7), "padding was counted")
    yield Case("a third of five", (*rows([5, 5], 5), 1 / 3), "a third of five is rounded up to two")
    yield Case("a tenth of three", (*rows([3, 2], 3), 0.1), "at least one entry counts")
    yield Case("padding smaller than all entries", (*rows([3, 2, 4], 4, -50.0), 1.0), "padding was counted")
    wide = rows([1, 5, 7, 16, 12], 16, 0.0)
    negative = torch.where(wide[1], wide[0] - 4, wide[0]), wide[1]
    yield Case("entries below 0 beside padding of 0", (*negative, 0.6), "padding of 0 is larger than a negative entry")


SHARE = Exercise(
    "ex-dcpa-few",
    share_mean,
    share_cases,
    {
        "padding was counted": lambda v, m, s: share_mean(v, m, s, masked=False),
        "count the entries of each row, not the width": half_of_width,
        "the number is rounded down; round it up": lambda v, m, s: share_mean(v, m, s, math.floor),
        "the number is rounded to the nearest; round it up": lambda v, m, s: share_mean(v, m, s, round),
        "the smallest entries; take the largest": lambda v, m, s: share_mean(v, m, s, best=False),
        "the share is not used: that is half": lambda v, m, s: share_mean(v, m, 0.5),
        "the share is not used: that is the mean of all": lambda v, m, s: share_mean(v, m, 1.0),
        "one entry too many": lambda v, m, s: share_mean(v, m, s, lambda x: math.floor(x) + 1),
    },
    shape="(n,)",
)


def two_lines(i2t, t2i, margin):
    return sum(map(max, costs_of(Scores(i2t=i2t, t2i=t2i), margin, different)))


def line_cases(draw: Draw) -> Iterator[Case]:
    one = draw.uniform(4, 4)
    yield Case("one matrix for both", (one, one.clone(), 0.2), "the hardest negative of each row, and of each column")
    yield Case(
        "a matrix for each direction",
        (draw.uniform(5, 5), draw.uniform(5, 5), 0.2),
        "each line has a matrix of its own",
    )
    yield Case("another margin", (draw.uniform(5, 5), draw.uniform(5, 5), 0.7), "use the margin that is given")
    easy = 3 * torch.eye(4)
    yield Case("no violation in t2i", (draw.uniform(4, 4), easy, 0.2), "a cost below 0 counts 0")
    yield Case("no violation in i2t", (easy, draw.uniform(4, 4), 0.2), "a cost below 0 counts 0")


LINES = Exercise(
    "ex-dcpa-lines",
    two_lines,
    line_cases,
    {
        "both lines read i2t: each line has a matrix of its own": lambda i, t, m: two_lines(i, i, m),
        "both lines read t2i: each line has a matrix of its own": lambda i, t, m: two_lines(t, t, m),
        "the matrices are exchanged: captions are ranked along a row of i2t": lambda i, t, m: two_lines(t, i, m),
        "both lines run along rows: images are ranked down a column of t2i": lambda i, t, m: two_lines(i, t.T, m),
        "the positive pair is no negative": lambda i, t, m: sum(map(max, costs_of(Scores(i, t), m, lambda b, n: True))),
        "that is the sum over all negatives; take the hardest": lambda i, t, m: sum(
            map(sum, costs_of(Scores(i, t), m, different))
        ),
        "that is the mean; equation 15 is a sum over the batch": lambda i, t, m: two_lines(i, t, m) / len(i),
    },
)


def recall_of(scores, axis=0):
    """R@1, column by column (captions) or row by row."""
    table = scores.double().tolist() if axis == 0 else scores.T.double().tolist()
    n = len(table)
    hits = sum(max(range(n), key=lambda image: table[image][caption]) == caption for caption in range(n))
    return 100 * hits / n


def control_gain(full, first, second):
    return recall_of(full) - recall_of((first.double() + second.double()) / 2)


def control_cases(draw: Draw) -> Iterator[Case]:
    perfect = torch.eye(4)
    yield Case("three perfect models", (perfect, perfect.clone(), perfect.clone()), "nothing is gained")
    first = torch.tensor([[0.6, 0.7], [0.0, 0.6]])
    second = torch.tensor([[0.9, 0.0], [0.0, 0.9]])
    yield Case("an ensemble that repairs one model", (torch.eye(2), first, second), "average the scores, then rank")
    for n in (6, 10, 25):
        tables = [draw.normal(n, n) + 1.5 * torch.eye(n) for _ in range(3)]
        yield Case(f"{n} pairs", tuple(tables), "for each caption the best image, down a column; in percentage points")


CONTROL = Exercise(
    "ex-dcpa-control",
    control_gain,
    control_cases,
    {
        "that compares with one stage one: the control is the mean of two": lambda f, a, b: recall_of(f) - recall_of(a),
        "that averages two recalls: average the scores, then rank": lambda f, a, b: (
            recall_of(f) - (recall_of(a) + recall_of(b)) / 2
        ),
        "that compares with the better of the two: average their scores": lambda f, a, b: (
            recall_of(f) - max(recall_of(a), recall_of(b))
        ),
        "that ranks captions for images; rank images for each caption": lambda f, a, b: (
            recall_of(f, 1) - recall_of(a + b, 1)
        ),
        "the sign is wrong: the full model minus its control": lambda f, a, b: -control_gain(f, a, b),
        "in percentage points": lambda f, a, b: control_gain(f, a, b) / 100,
        "that is the recall of the full model alone": lambda f, a, b: recall_of(f),
    },
    tolerance=1e-5,
)


def decode(queries, context, mask, scale=True, residual=True, norm=True, masked=True):
    """Query by query: attend to the real context, add the query, normalise."""
    b, q, d = queries.shape
    result = torch.zeros(b, q, d)
    for n in range(b):
        real = [k for k in range(context.shape[1]) if mask[n, k] or not masked]
        for position in range(q):
            logits = [float(queries[n, position] @ context[n, k]) / (d**0.5 if scale else 1) for k in real]
            largest = max(logits)
            weights = [math.exp(z - largest) for z in logits]
            found = torch.stack([w * context[n, k] for w, k in zip(weights, real, strict=True)]).sum(0) / sum(weights)
            total = queries[n, position] + found if residual else found
            result[n, position] = nn.functional.layer_norm(total, (d,)) if norm else total
    return result


def decode_cases(draw: Draw) -> Iterator[Case]:
    yield Case(
        "one query, one key",
        (draw.normal(1, 1, 4), draw.normal(1, 1, 4), torch.ones(1, 1, dtype=torch.bool)),
        "query plus key, normalised",
    )
    whole = torch.ones(2, 5, dtype=torch.bool)
    yield Case(
        "no padding", (draw.normal(2, 3, 8), draw.normal(2, 5, 8), whole), "logits are divided by the root of the width"
    )
    mask = torch.arange(5) < torch.tensor([2, 5, 1])[:, None]
    yield Case("padding", (draw.normal(3, 4, 8), draw.normal(3, 5, 8), mask), "padding gets no weight")
    yield Case(
        "long vectors", (9 * draw.normal(2, 2, 6), draw.normal(2, 5, 6), mask[:2]), "the query is added before the norm"
    )


DECODE = Exercise(
    "ex-dcpa-decoder",
    decode,
    decode_cases,
    {
        "padding takes part": lambda q, c, m: decode(q, c, m, masked=False),
        "the logits are not divided by the root of the width": lambda q, c, m: decode(q, c, m, scale=False),
        "the residual connection is missing: add the queries": lambda q, c, m: decode(q, c, m, residual=False),
        "the layer norm is missing": lambda q, c, m: decode(q, c, m, norm=False),
        "the queries are added after the norm; add them before": lambda q, c, m: q + decode(q, c, m, residual=False),
        "that is self-attention: keys and values come from the context": lambda q, c, m: decode(
            q, q, torch.ones(q.shape[:2], dtype=torch.bool)
        ),
        "unit norm is not a layer norm: subtract the mean, divide by the standard deviation": lambda q, c, m: (
            nn.functional.normalize(decode(q, c, m, norm=False), dim=-1)
        ),
    },
    shape="(b, q, d)",
)

EXERCISES = (LINES, CONTROL, SHARE, DECODE)
