"""Exercises of chapter 10."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise


def soft_weight(offline, online, alpha, beta):
    """One of many right answers."""
    return torch.stack([beta * torch.exp((b - a) / (alpha * beta)) for a, b in zip(offline, online, strict=True)])


def observe_weight(answer, offline, online, alpha, beta):
    """The weight, and its derivative by both scores."""
    offline, online = offline.clone().requires_grad_(), online.clone().requires_grad_()
    with torch.enable_grad():
        value = answer(offline, online, alpha, beta)
        if value is None:
            return None
        if not isinstance(value, torch.Tensor) or value.shape != offline.shape:
            return {"shape": list(getattr(value, "shape", ()))}
        parts = torch.autograd.grad(value.sum(), (offline, online), allow_unused=True)
    zero = torch.zeros_like(offline)
    return {
        "weight": value,
        "by offline": zero if parts[0] is None else parts[0],
        "by online": zero if parts[1] is None else parts[1],
    }


def judge_weight(inputs, found):
    """What is wrong with a weight: at equal scores, in sign, in its course."""
    offline, online, alpha, beta = (x.double().numpy() if isinstance(x, torch.Tensor) else x for x in inputs)
    if "shape" in found:
        return f"the weight is to be a tensor of shape {offline.shape}, with a gradient; you return shape {tuple(found['shape'])}"
    weight, by_offline, by_online, gap = found["weight"], found["by offline"], found["by online"], offline - online
    level = abs(gap) < 1e-9
    if not (weight == weight).all():
        return "there is a NaN"
    if (abs(weight[level] - beta) > 1e-4 * beta).any():
        return f"where both score alike you say {weight[level][0]:.4g}, it should be beta = {beta:.4g}"
    if (weight <= 0).any():
        worst = int(weight.argmin())
        return f"not positive everywhere: {weight[worst]:.4g} where the offline pair is {gap[worst]:.3g} above the online one"
    if (abs(by_offline[level] + 1 / alpha) > 1e-3 / alpha).any():
        return f"where both score alike the derivative is {by_offline[level][0]:.4g}, it should be -1 / alpha = {-1 / alpha:.4g}"
    if (by_offline >= 0).any():
        return "it should fall everywhere as the offline pair rises"
    if (abs(by_online + by_offline) > 1e-3 * abs(by_offline) + 1e-9).any():
        return "only the gap between offline and online should count: online is not used as offline is"
    return ""


def weight_cases(draw: Draw) -> Iterator[Case]:
    gaps = torch.tensor([-0.3, 0.0, 0.45, 1.2], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    yield Case("online scores of 0", (gaps, zero, 0.3, 1.5))
    yield Case("another alpha and beta", (gaps, zero, 0.7, 0.8), "use alpha and beta as they are given")
    for _ in range(3):
        online = draw.normal(6).double() / 4
        gap = torch.cat([torch.zeros(1).double(), draw.normal(5).double() / 3])
        alpha, beta = 0.2 + draw.integer(1, 9) / 10, 0.5 + draw.integer(1, 20) / 10
        yield Case("online scores of all kinds", (online + gap, online, alpha, beta), "only the gap counts")


WEIGHT = Exercise("ex-aoq-weight", soft_weight, weight_cases, shape="(b,)", observe=observe_weight, judge=judge_weight)


def merge(best, where, scores, start, count):
    """Row by row, with Python's sort."""
    values, columns = [], []
    for b, w, s in zip(best.tolist(), where.tolist(), scores.tolist(), strict=True):
        found = sorted([*zip(b, w, strict=True), *((score, start + n) for n, score in enumerate(s))], reverse=True)[
            :count
        ]
        values.append([value for value, _ in found])
        columns.append([float(column) for _, column in found])
    return torch.tensor(values), torch.tensor(columns)


def observe_merge(answer, everything, block, count):
    """Hand an answer all blocks of a matrix, one after the other."""
    n = len(everything)
    best, where = torch.empty(n, 0), torch.empty(n, 0, dtype=torch.long)
    for start in range(0, everything.shape[1], block):
        found = answer(best, where, everything[:, start : start + block], start, count)
        if found is None:
            return None
        best, where = found
        best, where = torch.as_tensor(best, dtype=torch.float32), torch.as_tensor(where).long()
    return {"highest scores": best, "their columns": where}


def merge_cases(draw: Draw) -> Iterator[Case]:
    def distinct(n: int, m: int) -> torch.Tensor:
        return torch.stack([draw.order(m) for _ in range(n)]).float() / m

    yield Case("one block", (distinct(3, 6), 6, 2), "the best two, best first")
    yield Case("two blocks", (distinct(3, 8), 4, 3), "the columns of a block begin at start")
    yield Case("fewer scores than asked for", (distinct(2, 3), 3, 5), "there are not always count of them")
    yield Case("blocks smaller than count", (distinct(4, 10), 2, 5), "keep what there is until there are count")
    yield Case("fifty columns in blocks of eight", (distinct(6, 50), 8, 5), "the last block is shorter")
    yield Case("negative scores", (distinct(3, 9) - 2, 4, 3), "scores may be negative")


def merge_of(columns=True, largest=True, keep=True, ordered=True):
    def answer(best, where, scores, start, count):
        names = (torch.arange(scores.shape[1]) + (start if columns else 0)).expand(len(scores), -1)
        if keep:
            scores, names = torch.cat([best, scores], 1), torch.cat([where, names], 1)
        top = scores.topk(min(count, scores.shape[1]), dim=1, largest=largest).indices
        top = top if ordered else top.sort(1).values
        return scores.gather(1, top), names.gather(1, top)

    return answer


MERGE = Exercise(
    "ex-aoq-merge",
    merge,
    merge_cases,
    {
        "the columns count from the block's start; add start": merge_of(columns=False),
        "the lowest scores; keep the highest": merge_of(largest=False),
        "what was best before is lost": merge_of(keep=False),
        "best first: they are not in order": merge_of(ordered=False),
    },
    shape="the scores (n, count) and their columns",
    observe=observe_merge,
)

FUNCTIONS = {
    "a sum of squares": lambda x: (x**2).sum(),
    "a product of neighbours": lambda x: (x[1:] * x[:-1]).sum(),
    "a sine": lambda x: (3 * x).sin().sum(),
    "a linear function": lambda x: (torch.arange(1, len(x) + 1, dtype=x.dtype) * x).sum(),
}


def finite_difference(f, x, step):
    """Entry by entry, in Python."""
    values = []
    for n in range(len(x)):
        up, down = x.clone(), x.clone()
        up[n] += step
        down[n] -= step
        values.append((float(f(up)) - float(f(down))) / (2 * step))
    return torch.tensor(values)


def observe_difference(answer, name, x, step):
    return answer(FUNCTIONS[name], x, step)


def one_sided(f, x, step):
    base = float(f(x))
    shift = torch.eye(len(x), dtype=x.dtype) * step
    return torch.stack([(f(x + row) - base) / step for row in shift])


def difference_cases(draw: Draw) -> Iterator[Case]:
    yield Case(
        "a linear function", ("a linear function", draw.normal(3).double(), 0.1), "its derivative is exact at any step"
    )
    yield Case("a sum of squares", ("a sum of squares", draw.normal(4).double(), 0.2), "take a step to both sides")
    yield Case(
        "a product of neighbours",
        ("a product of neighbours", draw.normal(5).double(), 0.1),
        "one entry moves at a time",
    )
    yield Case("a sine", ("a sine", draw.normal(4).double(), 0.3), "use the step that is given")


DIFFERENCE = Exercise(
    "ex-aoq-difference",
    finite_difference,
    difference_cases,
    {
        "that is a step to one side; take one to both": one_sided,
        "both sides are two steps apart: divide by twice the step": lambda f, x, s: 2 * finite_difference(f, x, s),
        "divide by the step": lambda f, x, s: 2 * s * finite_difference(f, x, s),
        "the sign is wrong": lambda f, x, s: -finite_difference(f, x, s),
        "all entries move at once": lambda f, x, s: ((f(x + s) - f(x - s)) / (2 * s)).expand(len(x)),
        "the step is not used": lambda f, x, s: finite_difference(f, x, 1e-4),
    },
    shape="(b,)",
    observe=observe_difference,
    tolerance=1e-6,
)


def fair_epochs(stages, images):
    """How many epochs of the whole training set show as many images."""
    return math.ceil(round(sum(epochs * shown for epochs, shown in stages) / images, 9))


def budget_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one stage over everything", ([(20, 1000)], 1000), "20 epochs are 20 epochs")
    yield Case(
        "30 epochs of preparation and 20 of the method",
        ([(30, 1000), (20, 1000)], 1000),
        "preparation is training, too",
    )
    yield Case(
        "preparation on half of the images",
        ([(30, 500), (20, 1000)], 1000),
        "an epoch over half the images is half an epoch",
    )
    yield Case(
        "what does not come out even", ([(3, 500), (20, 1000)], 1000), "round up: the baseline must not see less"
    )
    yield Case(
        "three stages", ([(draw.integer(1, 9), draw.integer(100, 900)) for _ in range(3)], 777), "add up all stages"
    )
    yield Case("no training at all", ([], 1000), "nothing was seen")


BUDGET = Exercise(
    "ex-aoq-budget",
    fair_epochs,
    budget_cases,
    {
        "preparation is training, too: the stages before the last are missing": lambda s, n: math.ceil(
            s[-1][0] * s[-1][1] / n
        ),
        "an epoch over part of the images is part of an epoch": lambda s, n: sum(e for e, _ in s),
        "round up: the baseline must not see less": lambda s, n: math.floor(sum(e * k for e, k in s) / n),
        "a number of epochs is whole: round up": lambda s, n: sum(e * k for e, k in s) / n,
        "round the sum of all stages, not each stage": lambda s, n: sum(math.ceil(e * k / n) for e, k in s),
        "these are images seen; divide by the size of the training set": lambda s, n: sum(e * k for e, k in s),
        "the longest stage alone": lambda s, n: math.ceil(max(e * k for e, k in s) / n),
        "rounded to the nearest; round up": lambda s, n: round(sum(e * k for e, k in s) / n),
    },
    tolerance=1e-9,
)

EXERCISES = (BUDGET, WEIGHT, DIFFERENCE, MERGE)
