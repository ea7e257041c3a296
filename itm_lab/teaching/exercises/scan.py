"""Exercises of chapter 02."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise


def hard_attention(regions, words, reduce=max, over="regions"):
    """One pair, one word after the other."""
    scores = torch.zeros(len(regions), len(words))
    for i, image in enumerate(regions):
        for c, caption in enumerate(words):
            queries, keys = (caption, image) if over == "regions" else (image, caption)
            scores[i, c] = sum(reduce(float(q @ k) for k in keys) for q in queries) / len(queries)
    return scores


def hard_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one region, one word", (draw.unit(1, 1, 4), draw.unit(1, 1, 4)), "their inner product")
    yield Case("one word, three regions", (draw.unit(2, 3, 4), draw.unit(3, 1, 4)), "the best region of the word")
    yield Case("three words, one region", (draw.unit(2, 1, 4), draw.unit(3, 3, 4)), "the mean over the words")
    yield Case(
        "five regions, six words",
        (draw.unit(3, 5, 8), draw.unit(4, 6, 8)),
        "the best region of each word, then the mean",
    )
    yield Case(
        "all cosines negative", (draw.uniform(2, 3, 4), -draw.uniform(2, 2, 4)), "a best region may be worse than 0"
    )


HARD = Exercise(
    "ex-scan-hard",
    hard_attention,
    hard_cases,
    {
        "these are regions attending to words: take the best region of each word": lambda v, e: hard_attention(
            v, e, over="words"
        ),
        "the worst region of each word": lambda v, e: hard_attention(v, e, min),
        "that adds the words up; Mean pooling divides by their number": lambda v, e: hard_attention(v, e) * e.shape[1],
        "rows are images, columns captions": lambda v, e: hard_attention(v, e).T,
        "that is the best pair of all; every word has a best region": lambda v, e: torch.einsum(
            "ird,cwd->icrw", v, e
        ).amax((2, 3)),
    },
    shape="(i, c)",
)


def observe_distance(answer, keys, queries):
    """Hand an answer what a kernel has: affinities, weights, the Gram matrix and norms."""
    affinity = keys @ queries.T
    weights = torch.softmax(affinity, dim=1)
    return answer(affinity, weights, keys @ keys.mT, queries.norm(dim=-1))


def distance(affinity, weights, gram, query_norm):
    m, k, x = affinity.shape
    result = torch.zeros(m, x)
    for i in range(m):
        for q in range(x):
            w = weights[i, :, q]
            square = sum(float(w[a] * w[b] * gram[i, a, b]) for a in range(k) for b in range(k))
            result[i, q] = float(query_norm[q]) ** 2 - 2 * float(w @ affinity[i, :, q]) + square
    return result


def part_of_distance(norm=1.0, dot=1.0, square=1.0):
    def answer(affinity, weights, gram, query_norm):
        inner, own = (weights * affinity).sum(dim=1), (weights * (gram @ weights)).sum(dim=1)
        return norm * query_norm.square() - dot * 2 * inner + square * own

    return answer


def distance_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one key", (draw.normal(1, 1, 3), draw.normal(1, 3)), "with one key the attended vector is that key")
    yield Case("one query, five keys", (draw.normal(1, 5, 8), draw.normal(1, 8)))
    yield Case("two images, three queries", (draw.normal(2, 5, 8), draw.normal(3, 8)), "every image, every query")
    yield Case("longer queries", (draw.normal(2, 4, 6), 3 * draw.normal(5, 6)), "the norm of the query counts, squared")


DISTANCE = Exercise(
    "ex-scan-distance",
    distance,
    distance_cases,
    {
        "that is the distance; leave it squared": lambda a, w, g, n: distance(a, w, g, n).clamp_min(0).sqrt(),
        "one term is missing: the norm of the query": part_of_distance(norm=0),
        "one term is missing: the norm of the attended vector": part_of_distance(square=0),
        "one term is missing: twice the inner product": part_of_distance(dot=0),
        "the inner product counts twice": part_of_distance(dot=0.5),
        "the sign of the inner product is wrong": part_of_distance(dot=-1),
        "that is the cosine": lambda a, w, g, n: (w * a).sum(1) / ((w * (g @ w)).sum(1).sqrt() * n),
    },
    shape="(m, x)",
    observe=observe_distance,
)


def pooled(entries, sharpness):
    """LogSumExp, with the largest entry taken out of the sum."""
    largest = max(entries)
    return largest + math.log(sum(math.exp(sharpness * (entry - largest)) for entry in entries)) / sharpness


def pool(relevance, mask, sharpness):
    """LogSumExp of the real entries of each row."""
    rows = []
    for row, real in zip(relevance.tolist(), mask.tolist(), strict=True):
        rows.append(pooled([r for r, here in zip(row, real, strict=True) if here], sharpness))
    return torch.tensor(rows)


def pool_cases(draw: Draw) -> Iterator[Case]:
    whole = torch.ones(3, 4, dtype=torch.bool)
    yield Case(
        "one entry", (draw.uniform(2, 1), torch.ones(2, 1, dtype=torch.bool), 6.0), "one entry is pooled to itself"
    )
    yield Case("no padding", (draw.uniform(3, 4), whole, 6.0), "divide by the sharpness after the logarithm")
    counts = torch.tensor([1, 2, 4])
    mask = torch.arange(4) < counts[:, None]
    yield Case("padding", (draw.uniform(3, 4) * mask, mask, 6.0), "a padded 0 adds exp(0) = 1 to the sum")
    yield Case("negative relevance", (-draw.uniform(3, 4) * mask, mask, 2.0), "a relevance may be negative")
    yield Case(
        "a very large sharpness", (draw.uniform(3, 4) * mask, mask, 500.0), "the exponentials overflow: use logsumexp"
    )


POOLING = Exercise(
    "ex-scan-pooling",
    pool,
    pool_cases,
    {
        "padding takes part": lambda r, m, s: torch.logsumexp(s * r, dim=1) / s,
        "that is the mean": lambda r, m, s: (r * m).sum(1) / m.sum(1),
        "that is the maximum; LogSumExp is a little more": lambda r, m, s: r.masked_fill(~m, -torch.inf).amax(1),
        "divide by the sharpness in the end": lambda r, m, s: torch.logsumexp(
            (s * r).masked_fill(~m, -torch.inf), dim=1
        ),
        "the sharpness is not used": lambda r, m, s: torch.logsumexp(r.masked_fill(~m, -torch.inf), dim=1),
        "that is the log of a mean; LogSumExp does not divide by the number of entries": lambda r, m, s: (
            (torch.logsumexp((s * r).masked_fill(~m, -torch.inf), dim=1) - m.sum(1).log()) / s
        ),
    },
    shape="(n,)",
)

EXERCISES = (HARD, POOLING, DISTANCE)
