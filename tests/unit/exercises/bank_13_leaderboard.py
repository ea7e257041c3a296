"""Answers to the exercises of chapter 13."""

from __future__ import annotations

import math
import statistics

import numpy as np
import torch
from bank import right, wrong
from torch.nn import functional

PAIRED, FRONT, SIGMOID = "ex-board-paired", "ex-board-front", "ex-board-sigmoid"


@right(PAIRED)
def with_numpy(a, b):
    return (a - b).std(ddof=1) / len(a) ** 0.5, np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / len(a))


@right(PAIRED)
def with_torch(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.stack([(a - b).std() / math.sqrt(len(a)), ((a.var() + b.var()) / len(a)).sqrt()])


@right(PAIRED)
def with_statistics(a, b):
    a, b = a.tolist(), b.tolist()
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    both = statistics.variance(a) + statistics.variance(b)
    return statistics.stdev(gaps) / len(a) ** 0.5, math.sqrt(both / len(b))


def errors(a, b, ddof=1):
    size = len(a)
    return (a - b).std(ddof=ddof) / size**0.5, ((a.var(ddof=ddof) + b.var(ddof=ddof)) / size) ** 0.5


wrong(PAIRED, "other order")(lambda a, b: errors(a, b)[::-1])
wrong(PAIRED, "s - 1")(lambda a, b: errors(a, b, 0))
wrong(PAIRED, "standard deviations?")(lambda a, b: tuple(len(a) ** 0.5 * e for e in errors(a, b)))
wrong(PAIRED, "variances?")(lambda a, b: tuple(e * e for e in errors(a, b)))
wrong(PAIRED, "add the variances")(lambda a, b: (errors(a, b)[0], (a.std(ddof=1) + b.std(ddof=1)) / len(a) ** 0.5))
wrong(PAIRED, "one pool")(lambda a, b: (errors(a, b)[0], np.concatenate([a, b]).std(ddof=1) / (2 * len(a)) ** 0.5))
wrong(PAIRED, "same number twice|unpaired")(lambda a, b: (errors(a, b)[0],) * 2)
wrong(PAIRED, "one value")(lambda a, b: errors(a, b)[0])
wrong(PAIRED, "mean difference")(lambda a, b: ((a - b).mean(), errors(a, b)[1]))
wrong(PAIRED, "divided by s|root of s")(lambda a, b: tuple(e / len(a) ** 0.5 for e in errors(a, b)))
wrong(PAIRED, "nothing returned")(lambda a, b: None)


@right(FRONT)
def in_order(prices, values):
    kept, best = [], -math.inf
    for n in sorted(range(len(prices)), key=lambda n: (prices[n], -values[n], n)):
        if values[n] > best:
            kept, best = [*kept, n], values[n]
    return kept


@right(FRONT)
def by_definition(prices, values):
    def beaten(n):
        own = prices[n], -values[n], n
        others = [(prices[m], -values[m], m) for m in range(len(prices))]
        return any(p <= own[0] and v <= own[1] and (p, v, m) < own for p, v, m in others)

    return np.array(sorted((n for n in range(len(prices)) if not beaten(n)), key=lambda n: prices[n]))


@right(FRONT)
def with_running_maximum(prices, values):
    order = np.lexsort((np.arange(len(prices)), -np.asarray(values), prices))
    ordered = np.asarray(values)[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(ordered)[:-1]])
    return [int(n) for n in order[ordered > before]]


def swept(prices, values, key, better):
    kept, best = [], -math.inf
    for n in sorted(range(len(prices)), key=key):
        if better(values[n], best):
            kept, best = [*kept, n], max(best, values[n])
    return kept


wrong(FRONT, "cheap ones first")(lambda p, v: sorted(in_order(p, v), key=lambda n: (-p[n], n)))
wrong(FRONT, "cheap ones first|by their numbers")(lambda p, v: sorted(in_order(p, v)))
wrong(FRONT, "equals? counts as beaten|equal")(
    lambda p, v: swept(p, v, lambda n: (p[n], -v[n], n), lambda value, best: value >= best)
)
wrong(FRONT, "same price")(lambda p, v: swept(p, v, lambda n: (p[n], n), lambda value, best: value > best))
wrong(FRONT, "best value alone")(lambda p, v: [max(range(len(p)), key=lambda n: (v[n], -p[n], -n))])
wrong(FRONT, "prices")(lambda p, v: [p[n] for n in in_order(p, v)])
wrong(FRONT, "values, not")(lambda p, v: [v[n] for n in in_order(p, v)])
wrong(FRONT, "nothing left out|all models")(lambda p, v: sorted(range(len(p)), key=lambda n: (p[n], n)))
wrong(FRONT, "a high price")(lambda p, v: swept(p, v, lambda n: (-p[n], -v[n], n), lambda value, best: value > best))
wrong(FRONT, "first of two|keep the first")(
    lambda p, v: swept(p, v, lambda n: (p[n], -v[n], -n), lambda value, best: value > best)
)
wrong(FRONT, "nothing returned")(lambda p, v: None)


@right(SIGMOID)
def all_at_once(scores, images, scale, bias):
    same = images[:, None] == images[None]
    weights = torch.where(same, 1 / same.sum(1, keepdim=True), 1.0)
    logits = (scale * scores + bias) * torch.where(same, 1.0, -1.0)
    return -(weights * functional.logsigmoid(logits)).sum() / len(scores)


@right(SIGMOID)
def by_softplus(scores, images, scale, bias):
    positive = (images.unsqueeze(0) == images.unsqueeze(1)).double()
    z = scale * scores.double() + bias
    return (
        (functional.softplus(-z) * positive / positive.sum(0) + functional.softplus(z) * (1 - positive)).sum()
    ) / len(z)


@right(SIGMOID)
def by_library(scores, images, scale, bias):
    same = (images[:, None] == images).float()
    weight = same / same.sum(1, keepdim=True) + 1 - same
    loss = functional.binary_cross_entropy_with_logits(scale * scores + bias, same, weight=weight, reduction="sum")
    return loss.item() / len(images)


def total(scores, same, scale, bias, share=True):
    z = scale * scores + bias
    terms = functional.softplus(torch.where(same, -z, z))
    return (terms / torch.where(same, same.sum(1, keepdim=True), 1)).sum() if share else terms.sum()


def same_image(images):
    return images[:, None] == images[None]


wrong(SIGMOID, "diagonal")(lambda s, i, k, b: total(s, torch.eye(len(s), dtype=torch.bool), k, b) / len(s))
wrong(SIGMOID, "share of their row|together")(lambda s, i, k, b: total(s, same_image(i), k, b, share=False) / len(s))
wrong(SIGMOID, "divided by the number of pairs|times as large")(lambda s, i, k, b: total(s, same_image(i), k, b))
wrong(SIGMOID, "all scores|mean over")(lambda s, i, k, b: total(s, same_image(i), k, b) / len(s) ** 2)
wrong(SIGMOID, "signs? of the pairs|exchanged")(lambda s, i, k, b: total(-s, same_image(i), k, -b) / len(s))
wrong(SIGMOID, "bias is added|bias is missing")(lambda s, i, k, b: total(s, same_image(i), k, 0.0) / len(s))
wrong(SIGMOID, "after the scale")(lambda s, i, k, b: total(s + b, same_image(i), k, 0.0) / len(s))
wrong(SIGMOID, "sign is wrong")(lambda s, i, k, b: -total(s, same_image(i), k, b) / len(s))
wrong(SIGMOID, "negatives are missing")(
    lambda s, i, k, b: (
        (functional.softplus(-(k * s + b)) * same_image(i) / same_image(i).sum(1, keepdim=True)).sum() / len(s)
    )
)
wrong(SIGMOID, "finite|inf|overflow")(
    lambda s, i, k, b: (
        -(
            torch.where(same_image(i), k * s + b, -k * s - b).sigmoid().log()
            / torch.where(same_image(i), same_image(i).sum(1, keepdim=True), 1)
        ).sum()
        / len(s)
    )
)
wrong(SIGMOID, "sigmoid for each pair|softmax")(
    lambda s, i, k, b: functional.cross_entropy(k * s + b, torch.arange(len(s)))
)
wrong(SIGMOID, "nothing returned")(lambda s, i, k, b: None)
