"""Answers to the exercises of chapter 10."""

from __future__ import annotations

import math

import numpy as np
import torch
from bank import right, wrong

BUDGET, WEIGHT, DIFFERENCE, MERGE = "ex-aoq-budget", "ex-aoq-weight", "ex-aoq-difference", "ex-aoq-merge"


@right(BUDGET)
def ceiling(stages, images):
    return math.ceil(sum(epochs * shown for epochs, shown in stages) / images)


@right(BUDGET)
def whole_numbers(stages, images):
    seen = 0
    for epochs, shown in stages:
        seen += epochs * shown
    return -(-seen // images)


@right(BUDGET)
def numpy_budget(stages, images):
    table = np.array(stages, dtype=float).reshape(-1, 2)
    return np.ceil(table.prod(axis=1).sum() / images)


wrong(BUDGET, "preparation is training|stages before|stops with")(lambda s, n: math.ceil(s[-1][0] * s[-1][1] / n))
wrong(BUDGET, "part of an epoch|half")(lambda s, n: sum(e for e, _ in s))
wrong(BUDGET, "round up")(lambda s, n: sum(e * k for e, k in s) // n)
wrong(BUDGET, "round up|whole")(lambda s, n: sum(e * k for e, k in s) / n)
wrong(BUDGET, "not each stage|you say")(lambda s, n: sum(math.ceil(e * k / n) for e, k in s))
wrong(BUDGET, "divide by the size|times as large")(lambda s, n: sum(e * k for e, k in s))
wrong(BUDGET, "stops with|longest")(lambda s, n: math.ceil(max(e * k for e, k in s) / n))
wrong(BUDGET, "nothing returned")(lambda s, n: None)
wrong(BUDGET, "nothing was seen|no training")(lambda s, n: max(1, ceiling(s, n)))
wrong(BUDGET, "you say")(lambda s, n: ceiling(s, n) + 1)
wrong(BUDGET, "stops with")(lambda s, n: math.ceil(s["epochs"] / n))


@right(WEIGHT)
def exponential(offline, online, alpha, beta):
    return beta * torch.exp(-(offline - online) / (alpha * beta))


@right(WEIGHT)
def sigmoid(offline, online, alpha, beta):
    return 2 * beta * torch.sigmoid(-2 * (offline - online) / (alpha * beta))


@right(WEIGHT)
def softplus(offline, online, alpha, beta):
    start = math.log(2)
    gap = (offline - online) * 2 * start / (alpha * beta)
    return beta * torch.nn.functional.softplus(-gap) / start


@right(WEIGHT)
def hyperbolic(offline, online, alpha, beta):
    gap = (offline - online) / (alpha * beta)
    return beta * (torch.sqrt(1 + gap**2) - gap)


wrong(WEIGHT, "not positive everywhere")(lambda off, on, a, b: b - (off - on) / a)
wrong(WEIGHT, "online is not used|only the gap|alike")(lambda off, on, a, b: b * torch.exp(-off / (a * b)))
wrong(WEIGHT, "derivative")(lambda off, on, a, b: b * torch.exp(-(off - on) / a))
wrong(WEIGHT, "beta")(lambda off, on, a, b: torch.exp(-(off - on) / a))
wrong(WEIGHT, "derivative|fall")(lambda off, on, a, b: b * torch.exp((off - on) / (a * b)))
wrong(WEIGHT, "positive everywhere|fall everywhere")(lambda off, on, a, b: (b - (off - on) / a).clamp(min=0))
wrong(WEIGHT, "fall everywhere")(lambda off, on, a, b: (b - (off - on) / a).clamp(min=1e-3))
wrong(WEIGHT, "derivative|beta")(lambda off, on, a, b: exponential(off, on, 0.3, 1.5))
wrong(WEIGHT, "shape")(lambda off, on, a, b: exponential(off, on, a, b).mean())
wrong(WEIGHT, "nothing returned")(lambda off, on, a, b: None)
wrong(WEIGHT, "online is not used|only the gap")(lambda off, on, a, b: exponential(off, on.detach(), a, b))
wrong(WEIGHT, "derivative|stops with|gradient")(lambda off, on, a, b: exponential(off.detach(), on.detach(), a, b))
wrong(WEIGHT, "derivative")(lambda off, on, a, b: torch.full_like(off, b) + 0 * off * on)


@right(MERGE)
def concatenated(best, where, scores, start, count):
    columns = torch.arange(start, start + scores.shape[1]).expand(len(scores), -1)
    together, names = torch.cat([best, scores], 1), torch.cat([where, columns], 1)
    chosen = together.topk(min(count, together.shape[1]), dim=1)
    return chosen.values, names.gather(1, chosen.indices)


@right(MERGE)
def by_sort(best, where, scores, start, count):
    together = np.concatenate([best.numpy(), scores.numpy()], axis=1)
    names = np.concatenate([where.numpy(), np.tile(np.arange(scores.shape[1]) + start, (len(scores), 1))], axis=1)
    order = np.argsort(-together, axis=1)[:, :count]
    return np.take_along_axis(together, order, 1), np.take_along_axis(names, order, 1)


@right(MERGE)
def by_rows(best, where, scores, start, count):
    values, columns = [], []
    for b, w, s in zip(best, where, scores, strict=True):
        found = sorted(
            zip([*b.tolist(), *s.tolist()], [*w.tolist(), *range(start, start + len(s))], strict=True), reverse=True
        )
        values.append([v for v, _ in found[:count]])
        columns.append([c for _, c in found[:count]])
    return [torch.tensor(values), torch.tensor(columns)]


def merged(best, where, scores, names, count, largest=True):
    together, all_names = torch.cat([best, scores], 1), torch.cat([where, names], 1)
    chosen = together.topk(min(count, together.shape[1]), dim=1, largest=largest)
    return chosen.values, all_names.gather(1, chosen.indices)


def names_of(scores, start):
    return torch.arange(start, start + scores.shape[1]).expand(len(scores), -1)


wrong(MERGE, "add start")(lambda b, w, s, t, n: merged(b, w, s, names_of(s, 0), n))
wrong(MERGE, "lowest")(lambda b, w, s, t, n: merged(b, w, s, names_of(s, t), n, largest=False))
wrong(MERGE, "lost")(lambda b, w, s, t, n: merged(b[:, :0], w[:, :0], s, names_of(s, t), n))
wrong(MERGE, "stops with RuntimeError")(
    lambda b, w, s, t, n: (
        torch.cat([b, s], 1).topk(n, 1).values,
        torch.cat([w, names_of(s, t)], 1).gather(1, torch.cat([b, s], 1).topk(n, 1).indices),
    )
)
wrong(MERGE, "in order|best first|you say")(
    lambda b, w, s, t, n: tuple(x.flip(1) for x in merged(b, w, s, names_of(s, t), n))
)
wrong(MERGE, "shape|their columns|you say")(lambda b, w, s, t, n: merged(b, w, s, names_of(s, t), n + 1))
wrong(MERGE, "nothing returned")(lambda b, w, s, t, n: None)
wrong(MERGE, "stops with")(lambda b, w, s, t, n: merged(b, w, s, names_of(s, t), n)[0])
wrong(MERGE, "columns|you say")(
    lambda b, w, s, t, n: (lambda c: (c.values, c.indices))(
        torch.cat([b, s], 1).topk(min(n, b.shape[1] + s.shape[1]), 1)
    )
)
wrong(MERGE, "negative|highest|you say")(lambda b, w, s, t, n: merged(b, w, s.clamp(min=0), names_of(s, t), n))
wrong(MERGE, "columns|you say")(lambda b, w, s, t, n: merged(b, w, s, names_of(s, t + 1), n))


@right(DIFFERENCE)
def shifted(f, x, step):
    eye = torch.eye(len(x), dtype=x.dtype) * step
    return torch.stack([(f(x + row) - f(x - row)) / (2 * step) for row in eye])


@right(DIFFERENCE)
def there_and_back(f, x, step):
    values = []
    for n in range(len(x)):
        x[n] += step
        up = f(x).item()
        x[n] -= 2 * step
        values.append((up - f(x).item()) / step / 2)
        x[n] += step
    return values


@right(DIFFERENCE)
def numpy_difference(f, x, step):
    result = np.zeros(len(x))
    for n in range(len(x)):
        shift = torch.zeros_like(x)
        shift[n] = step
        result[n] = float(f(x + shift) - f(x - shift)) / (2 * step)
    return result


def rows_of(x, step):
    return torch.eye(len(x), dtype=x.dtype) * step


wrong(DIFFERENCE, "one side")(lambda f, x, s: torch.stack([(f(x + r) - f(x)) / s for r in rows_of(x, s)]))
wrong(DIFFERENCE, "twice the step|2 times")(
    lambda f, x, s: torch.stack([(f(x + r) - f(x - r)) / s for r in rows_of(x, s)])
)
wrong(DIFFERENCE, "divide by the step|times as large")(
    lambda f, x, s: torch.stack([f(x + r) - f(x - r) for r in rows_of(x, s)])
)
wrong(DIFFERENCE, "sign")(lambda f, x, s: -shifted(f, x, s))
wrong(DIFFERENCE, "all entries move|one entry")(lambda f, x, s: ((f(x + s) - f(x - s)) / (2 * s)).expand(len(x)))
wrong(DIFFERENCE, "shape")(lambda f, x, s: (f(x + s) - f(x - s)) / (2 * s))
wrong(DIFFERENCE, "step")(lambda f, x, s: shifted(f, x, 1e-3))
wrong(DIFFERENCE, "step|you say")(lambda f, x, s: torch.autograd.grad(f(x.requires_grad_()), x)[0])
wrong(DIFFERENCE, "nothing returned")(lambda f, x, s: None)
wrong(DIFFERENCE, "one side|you say")(lambda f, x, s: torch.stack([(f(x) - f(x - r)) / s for r in rows_of(x, s)]))
wrong(DIFFERENCE, "all of yours are 0|you say")(lambda f, x, s: shifted(lambda z: f(x), x, s))
