"""Exercises of chapter 08."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise


def observe_three(answer, logits, values):
    """Hand an answer what each side has by itself."""
    logsumexp = torch.stack([z.logsumexp(dim=1) for z in logits])
    attended = torch.stack([z.softmax(dim=1) @ v for z, v in zip(logits, values, strict=True)])
    return answer(logsumexp, attended)


def three_sides(logsumexp, attended):
    """Query by query: a side weighs exp of its log-sum-exp."""
    rows = []
    for q in range(logsumexp.shape[1]):
        sizes = (logsumexp[:, q].double() - logsumexp[:, q].max()).exp()
        rows.append(sum(size * side[q].double() for size, side in zip(sizes, attended, strict=True)) / sizes.sum())
    return torch.stack(rows)


def three_cases(draw: Draw) -> Iterator[Case]:
    def sides(queries: int, keys: tuple[int, ...], scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return [scale * draw.normal(queries, k) for k in keys], [draw.normal(k, 3) for k in keys]

    yield Case("equal logits, sides of equal size", sides(2, (3, 3, 3), 0.0), "the plain mean")
    yield Case(
        "equal logits, sides of 1, 2 and 6 keys", sides(2, (1, 2, 6), 0.0), "a side weighs as many keys as it has"
    )
    yield Case("any logits", sides(5, (4, 7, 2), 2.0), "the side with the larger log-sum-exp weighs more")
    yield Case("as many queries as sides", sides(3, (4, 4, 4), 2.0), "the softmax runs over the sides, axis 0")
    yield Case("very large logits", sides(3, (4, 4, 4), 200.0), "exp overflows: use a softmax")


THREE = Exercise(
    "ex-mmca-three",
    three_sides,
    three_cases,
    {
        "a plain mean: the side with the larger log-sum-exp should weigh more": lambda z, a: a.mean(dim=0),
        "the log-sum-exp weighs here as it is: take exp, or a softmax": lambda z, a: (
            (z / z.sum(0))[..., None] * a
        ).sum(0),
        "the softmax runs over the queries; it should run over the sides": lambda z, a: (
            z.softmax(dim=1)[..., None] * a
        ).sum(0),
        "the weights do not sum to one": lambda z, a: (z.exp()[..., None] * a).sum(0),
        "the strongest side takes all; it should take its share": lambda z, a: a[z.argmax(0), torch.arange(z.shape[1])],
        "a sigmoid is the gate of two sides; of three it is a softmax": lambda z, a: (z.sigmoid()[..., None] * a).sum(
            0
        ),
        "the smaller log-sum-exp weighs more here": lambda z, a: ((-z).softmax(0)[..., None] * a).sum(0),
    },
    shape="(q, d)",
    observe=observe_three,
)


def seconds(images, shortlist, per_second, first, pair):
    return (images * first + shortlist * pair[1]) / per_second


def second_cases(draw: Draw) -> Iterator[Case]:
    yield Case(
        "no shortlist", (1000, 0, 1e6, 256, (900, 700)), "the first score is not free: it is computed for every image"
    )
    yield Case(
        "a shortlist of all",
        (100, 100, 1e6, 256, (900, 700)),
        "both scores are computed for every image of the shortlist",
    )
    for _ in range(4):
        anew = draw.integer(5_000_000, 9_000_000)
        pair = (anew, anew - draw.integer(1_000_000, 4_000_000))
        images, shortlist = draw.integer(10_000, 2_000_000), draw.integer(50, 900)
        inputs = (images, shortlist, 10.0 ** draw.integer(8, 12), draw.integer(100, 900), pair)
        yield Case(
            f"{images:,} images, a shortlist of {shortlist}", inputs, "first score for all, second for the shortlist"
        )


SECONDS = Exercise(
    "ex-mmca-cost",
    seconds,
    second_cases,
    {
        "the shortlist's images were prepared long ago: use the second number": lambda i, s, p, f, pair: (
            (i * f + s * pair[0]) / p
        ),
        "the first score is not free: every image costs it": lambda i, s, p, f, pair: s * pair[1] / p,
        "the second score is computed for the shortlist alone": lambda i, s, p, f, pair: (i * f + i * pair[1]) / p,
        "the images of the shortlist have a first score, too": lambda i, s, p, f, pair: ((i - s) * f + s * pair[1]) / p,
        "these are multiplications; divide by how many there are in a second": lambda i, s, p, f, pair: (
            i * f + s * pair[1]
        ),
        "both numbers of a pair are added; the first holds the second": lambda i, s, p, f, pair: (
            (i * f + s * sum(pair)) / p
        ),
        "the shortlist's pairs are missing": lambda i, s, p, f, pair: i * f / p,
    },
    tolerance=1e-6,
)


def observe_selection(answer, weight, x, y, margin):
    """The loss, its gradient, and how many pairs were scored with gradients."""
    parameter, scored = weight.clone().requires_grad_(), []

    def score(images, captions):
        if torch.is_grad_enabled():
            scored.append(len(images))
        return ((images @ parameter) * captions).sum(dim=-1)

    with torch.enable_grad():
        loss = answer(score, x, y, margin)
        if loss is None:
            return None
        gradient = torch.autograd.grad(loss, parameter)[0]
    return {
        "the loss": loss,
        "its gradient": gradient,
        "pairs scored with gradients": max(sum(scored), 3 * len(x)),
    }


def select_pairs(score, x, y):
    """Numbers of the hardest caption of each image and of the hardest image of each caption, pair by pair."""
    with torch.no_grad():
        all_pairs = torch.stack([torch.stack([score(x[[i]], y[[c]])[0] for c in range(len(y))]) for i in range(len(x))])
    all_pairs.fill_diagonal_(-torch.inf)
    return all_pairs.argmax(dim=1), all_pairs.argmax(dim=0)


def hardest_hinge(score, x, y, margin):
    captions, images = select_pairs(score, x, y)
    own = score(x, y)
    first = (margin + score(x, y[captions]) - own).clamp(min=0)
    second = (margin + score(x[images], y) - own).clamp(min=0)
    return first.sum() + second.sum()


def all_with_gradients(score, x, y, margin):
    n = len(x)
    table = score(x.repeat_interleave(n, 0), y.repeat(n, 1)).view(n, n)
    costs = (margin + table - table.diagonal()[:, None]).clamp(min=0).fill_diagonal_(0)
    others = (margin + table - table.diagonal()[None]).clamp(min=0).fill_diagonal_(0)
    return costs.amax(1).sum() + others.amax(0).sum()


def one_direction(score, x, y, margin):
    captions, _ = select_pairs(score, x, y)
    return (margin + score(x, y[captions]) - score(x, y)).clamp(min=0).sum()


def selected_without_own(score, x, y, margin):
    captions, images = select_pairs(score, x, y)
    with torch.no_grad():
        own = score(x, y)
    costs = margin + score(x, y[captions]) - own, margin + score(x[images], y) - own
    return sum(cost.clamp(min=0).sum() for cost in costs)


def selection_cases(draw: Draw) -> Iterator[Case]:
    yield Case("two pairs", (draw.normal(3, 3), draw.unit(2, 3), draw.unit(2, 3), 1.0), "each query has one negative")
    yield Case(
        "five pairs",
        (draw.normal(4, 4), draw.unit(5, 4), draw.unit(5, 4), 0.5),
        "the hardest negative of each query, both ways",
    )
    yield Case(
        "nine pairs",
        (draw.normal(4, 4), draw.unit(9, 4), draw.unit(9, 4), 0.2),
        "nine positive and twice nine selected pairs need gradients",
    )


SELECTION = Exercise(
    "ex-mmca-selection",
    hardest_hinge,
    selection_cases,
    {
        "all pairs were scored with gradients: select within torch.no_grad()": all_with_gradients,
        "only images look for captions; captions look for images, too": one_direction,
        "the positive scores have no gradient: score them outside torch.no_grad()": selected_without_own,
    },
    observe=observe_selection,
)

EXERCISES = (SECONDS, THREE, SELECTION)
