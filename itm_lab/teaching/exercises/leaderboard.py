"""Exercises of chapter 13."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional

from itm_lab.teaching.checks import Case, Draw, Exercise


def variance(numbers, below):
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / below


def two_errors(a, b, less=1):
    """By the definition of the variance, run by run."""
    size = len(a)
    paired = math.sqrt(variance([x - y for x, y in zip(a, b, strict=True)], size - less) / size)
    return paired, math.sqrt((variance(list(a), size - less) + variance(list(b), size - less)) / size)


def pooled(a, b):
    both = [*a, *b]
    return two_errors(a, b)[0], math.sqrt(variance(both, len(both) - 1) / len(both))


def standard_deviations_added(a, b):
    size = len(a)
    total = sum(math.sqrt(variance(list(one), size - 1)) for one in (a, b))
    return two_errors(a, b)[0], total / math.sqrt(size)


def paired_cases(draw: Draw) -> Iterator[Case]:
    def runs(size: int, common: float) -> tuple[np.ndarray, np.ndarray]:
        shared, a, b = (draw.normal(size).double().numpy() for _ in range(3))
        return 300 + common * shared + a, 298 + common * shared + 2 * b

    yield Case("five seeds", runs(5, 4.0), "what the runs of a seed share cancels in their difference")
    yield Case("two seeds", runs(2, 4.0), "with two seeds s - 1 is 1")
    yield Case("nothing in common", runs(9, 0.0), "the two errors are of like size")
    shifted = runs(4, 2.0)[0]
    yield Case("one is the other, shifted", (shifted, shifted - 3.0), "the differences do not scatter at all")


PAIRED = Exercise(
    "ex-board-paired",
    two_errors,
    paired_cases,
    {
        "right numbers in the other order: paired first": lambda a, b: two_errors(a, b)[::-1],
        "the variance is to be divided by s - 1": lambda a, b: two_errors(a, b, 0),
        "these are standard deviations: divide by the root of s": lambda a, b: tuple(
            math.sqrt(len(a)) * error for error in two_errors(a, b)
        ),
        "these are variances: take the root": lambda a, b: tuple(error**2 for error in two_errors(a, b)),
        "divided by s; divide the standard deviation by the root of s": lambda a, b: tuple(
            error / math.sqrt(len(a)) for error in two_errors(a, b)
        ),
        "unpaired: add the variances, not the standard deviations": standard_deviations_added,
        "unpaired: the runs of both variants are one pool; each has a mean of its own": pooled,
        "the same number twice: unpaired adds the two variances": lambda a, b: (two_errors(a, b)[0],) * 2,
        "paired: that is the mean difference, not its standard error": lambda a, b: (
            float((a - b).mean()),
            two_errors(a, b)[1],
        ),
    },
    shape="(paired, unpaired)",
)


def front(prices, values):
    """Ask of every model whether another one beats it."""
    kept = []
    for n in range(len(prices)):
        for m in range(len(prices)):
            at_least = prices[m] <= prices[n] and values[m] >= values[n]
            if m != n and at_least and ((prices[m], values[m]) != (prices[n], values[n]) or m < n):
                break
        else:
            kept.append(n)
    return sorted(kept, key=lambda n: prices[n])


def swept(prices, values, key, equals=False):
    """Models from one end on, kept while they beat (or equal) the best so far."""
    kept, best = [], -math.inf
    for n in sorted(range(len(prices)), key=lambda n: key(prices[n], values[n], n)):
        if values[n] > best or (equals and values[n] == best):
            kept.append(n)
            best = values[n]
    return kept


def front_cases(draw: Draw) -> Iterator[Case]:
    def drawn(number: int, most: int) -> tuple[list[int], list[int]]:
        return [draw.integer(1, most) for _ in range(number)], [draw.integer(1, most) for _ in range(number)]

    yield Case("three models", ([30, 10, 20], [6, 5, 4]), "model 2 costs more than model 1 and is worse")
    yield Case("a value that comes twice", ([1, 2, 3], [5, 5, 7]), "the cheaper of two equal models beats the other")
    yield Case("a price that comes twice", ([2, 1, 1, 2], [8, 3, 4, 9]), "only the better one of a price stays")
    yield Case("the same model twice", ([2, 1, 1], [5, 5, 5]), "keep the first of two that are equal in both")
    yield Case("one model", ([3], [1]), "nobody beats it")
    for _ in range(4):
        yield Case("eight models", drawn(8, 6), "a model stays if nobody cheaper or as expensive equals or beats it")
    yield Case("twenty models", drawn(20, 40), "a model stays if nobody cheaper or as expensive equals or beats it")


FRONT = Exercise(
    "ex-board-front",
    front,
    front_cases,
    {
        "the right models; list the cheap ones first": lambda p, v: front(p, v)[::-1],
        "the right models by their numbers; list the cheap ones first": lambda p, v: sorted(front(p, v)),
        "a value that a cheaper model equals counts as beaten": lambda p, v: swept(
            p, v, lambda price, value, n: (price, -value, n), equals=True
        ),
        "of models with the same price only the best stays": lambda p, v: swept(
            p, v, lambda price, value, n: (price, n)
        ),
        "keep the first of two equal models": lambda p, v: swept(p, v, lambda price, value, n: (price, -value, -n)),
        "that is the best value alone; cheaper models may stay, too": lambda p, v: front(p, v)[-1:],
        "a high price is no merit: begin with the cheap ones": lambda p, v: swept(
            p, v, lambda price, value, n: (-price, -value, n)
        ),
        "those are prices, not the numbers of the models": lambda p, v: [p[n] for n in front(p, v)],
        "those are values, not the numbers of the models": lambda p, v: [v[n] for n in front(p, v)],
        "these are all models, ordered: leave out the beaten ones": lambda p, v: sorted(
            range(len(p)), key=lambda n: (p[n], n)
        ),
    },
    shape="numbers of the models on the front, cheap ones first",
)


def sigmoid_loss(scores, images, scale, bias, shares=True, sign=1.0):
    """Pair by pair, in double precision."""
    total, size = 0.0, len(scores)
    for i in range(size):
        same = [int(images[c]) == int(images[i]) for c in range(size)]
        for c in range(size):
            z = sign * (scale * float(scores[i, c]) + bias)
            if same[c]:
                total += softplus(-z) / (sum(same) if shares else 1)
            else:
                total += softplus(z)
    return total / size


def softplus(z):
    """log(1 + exp z), of any size."""
    return max(z, 0.0) + math.log1p(math.exp(-abs(z)))


def diagonal_loss(scores, images, scale, bias):
    return sigmoid_loss(scores, range(len(scores)), scale, bias)


def positives_only(scores, images, scale, bias):
    same = images[:, None] == images[None]
    terms = functional.softplus(-(scale * scores + bias)) * same / same.sum(dim=1, keepdim=True)
    return terms.sum() / len(scores)


def softmax_loss(scores, images, scale, bias):
    return functional.cross_entropy(scale * scores + bias, torch.arange(len(scores)))


def sigmoid_cases(draw: Draw) -> Iterator[Case]:
    def batch(*images: int, scale: float = 10.0, bias: float = -5.0) -> tuple[object, ...]:
        return draw.uniform(len(images), len(images)), torch.tensor(images), scale, bias

    yield Case("one pair", batch(4), "the log loss of a positive: log(1 + exp(-z))")
    yield Case("images that all differ", batch(3, 0, 7), "the positives stand on the diagonal")
    yield Case("two captions of one image", batch(5, 2, 5), "a caption of the same image is no negative")
    yield Case("several captions of two images", batch(1, 6, 1, 6, 6, 0), "scale 10, bias -5")
    yield Case("another scale", batch(1, 2, 1, 3, scale=4.0, bias=-1.0), "scale and bias are arguments")
    yield Case(
        "large logits",
        batch(1, 2, 1, scale=400.0, bias=-300.0),
        "a sigmoid of a very negative number is 0 and its logarithm not finite; use logsigmoid",
    )


SIGMOID = Exercise(
    "ex-board-sigmoid",
    sigmoid_loss,
    sigmoid_cases,
    {
        "the positives are not the diagonal alone: a caption of the same image is one, too": diagonal_loss,
        "the positives of an image weigh as much as one together: divide each by their number": lambda *s: sigmoid_loss(
            *s, shares=False
        ),
        "the sum is to be divided by the number of pairs in the batch": lambda *s: sigmoid_loss(*s) * len(s[0]),
        "that is a mean over all scores; divide by the number of pairs in the batch": lambda *s: (
            sigmoid_loss(*s) / len(s[0])
        ),
        "the signs of the pairs are exchanged: the score of a positive is to be large": lambda *s: sigmoid_loss(
            *s, sign=-1.0
        ),
        "the bias is missing": lambda s, i, scale, bias: sigmoid_loss(s, i, scale, 0.0),
        "the bias is added after the scale": lambda s, i, scale, bias: sigmoid_loss(s, i, scale, scale * bias),
        "the negatives are missing": positives_only,
        "each pair has a sigmoid of its own; a softmax compares the captions of a row": softmax_loss,
    },
)

EXERCISES = (PAIRED, FRONT, SIGMOID)
