"""Exercises of chapter 11."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_utils.matcher import Attention
from itm_utils.models.ccr_ccs import attended_features, ccr_values, cosine_similarity

SAMPLES = 200


def observe_swaps(answer, mask, phrase):
    """All swaps of many samples, row by row; each row with how often its most frequent query came."""
    found = []
    for _ in range(SAMPLES):
        sampled = answer(mask.clone(), phrase.clone())
        if sampled is None:
            return None
        sampled = torch.as_tensor(sampled)
        if tuple(sampled.shape) != (len(mask), 2):
            return {"shape": list(sampled.shape)}
        found.append(sampled.tolist())
    return {str(row): {(int(s[row][0]), int(s[row][1])) for s in found} for row in range(len(mask))}


def swaps_of(mask, phrase):
    """Every swap that is allowed."""
    real = [n for n, here in enumerate(mask.tolist()) if here]
    own = phrase.tolist()
    swaps = {(a, b) for a, b in permutations(real, 2) if own[a] != own[b] or own[a] < 0}
    lonely = [a for a in real if not any(first == a for first, _ in swaps)]
    return swaps | {(a, -1) for a in lonely} | (set() if real else {(-1, -1)})


def judge_swaps(inputs, found):
    mask, phrase = inputs
    if "shape" in found:
        return f"shape {tuple(found['shape'])}, it should be (b, 2) = {(len(mask), 2)}"
    for row in range(len(mask)):
        wanted, seen, own = swaps_of(mask[row], phrase[row]), found[str(row)], phrase[row].tolist()
        for a, b in sorted(seen - wanted):
            if (b == -1 or a == -1) and (a == -1 or mask[row][a]):
                return f"caption {row}: -1 was sampled, though there is a word to swap with"
            if not (0 <= a < len(own) and 0 <= b < len(own)) and b != -1:
                return f"caption {row}: ({a}, {b}) are no positions"
            if not mask[row][a] or (b >= 0 and not mask[row][b]):
                return f"caption {row}: the mask excludes one of the positions {a} and {b}"
            if a == b:
                return f"caption {row}: word {a} is swapped with itself"
            if not any(first == a and second >= 0 for first, second in wanted):
                return f"caption {row}: word {a} has nothing to swap with: -1"
            return f"caption {row}: words {a} and {b} belong to the same phrase"
        if missing := wanted - seen:
            return f"caption {row}: never sampled: {sorted(missing)[:4]}; every allowed swap may come"
    return ""


def sample_other_phrase(mask, phrase):
    """Row by row: a query, then one of the words it may be swapped with."""
    rows = []
    for real, own in zip(mask.tolist(), phrase.tolist(), strict=True):
        places = [n for n, here in enumerate(real) if here]
        if not places:
            rows.append([-1, -1])
            continue
        query = places[int(torch.randint(len(places), ()))]
        others = [n for n in places if n != query and (own[n] != own[query] or own[query] < 0)]
        rows.append([query, others[int(torch.randint(len(others), ()))] if others else -1])
    return torch.tensor(rows)


def swap_cases(draw: Draw) -> Iterator[Case]:
    def row(mask: str, phrase: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([[m == "x" for m in mask]]), torch.tensor([phrase])

    yield Case("three phrases of one word", row("xxx", [0, 1, 2]), "any two words may be swapped")
    yield Case("start and end are no words", row(".xx.", [-1, 0, 1, -1]), "the mask says which positions are words")
    yield Case("a phrase of two words", row(".xxx.", [-1, 0, 0, 1, -1]), "words of one phrase are not swapped")
    yield Case(
        "words outside every phrase",
        row("xxxx", [0, 0, -1, -1]),
        "a word outside is a stranger to all, other such words included",
    )
    yield Case("one phrase alone", row(".xx..", [-1, 0, 0, -1, -1]), "there is nothing to swap with: -1")
    yield Case("one word", row(".x.", [-1, -1, -1]), "there is nothing to swap with: -1")
    first, second = row("xxxxx", [3, 3, -1, 1, 1]), row("x.x.x", [0, 0, 0, 1, 1])
    both = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    yield Case("two captions", both, "every caption has its own mask and phrases")


STRANGERS = Exercise("ex-ccr-strangers", sample_other_phrase, swap_cases, observe=observe_swaps, judge=judge_swaps)


def mean_cases(draw: Draw) -> Iterator[Case]:
    def attention(counts: list[int], keys: int, queries: int = 2, width: int = 4) -> Attention:
        mask = torch.arange(keys) < torch.tensor(counts)[:, None]
        weights = draw.weights(len(counts), queries, keys, dim=-1, mask=mask[:, None])
        real = torch.ones(len(counts), queries, dtype=torch.bool)
        given = draw.normal(len(counts), queries, width), draw.normal(len(counts), keys, width)
        return Attention(weights, *given, real, mask)

    yield Case(
        "no padding, a margin that is never reached",
        (attention([5, 5], 5), 3.0),
        "positive and negative cosine, and the margin",
    )
    yield Case("no padding, margin 0.7", (attention([4, 4, 4], 4), 0.7), "below 0 the hinge is 0")
    yield Case("no margin", (attention([6] * 8, 6), 0.0), "below 0 the hinge is 0")
    yield Case("padding", (attention([2, 5, 3], 5), 0.7), "which keys count in the mean, and what is n?")
    yield Case("one key", (attention([1, 4], 4), 0.7), "where there is one key the hinge is 0")


def mean_hinge(attention, margin, bend=True, single=True, minus=True, masked=True):
    real = attention.key_mask[..., None] if masked else torch.ones_like(attention.key_mask[..., None])
    n = real.sum(dim=1, keepdim=True)
    attended = attended_features(attention)
    total = (attention.keys * real).sum(dim=1, keepdim=True)
    rest = (total - attended if minus else total) / (n - 1).clamp_min(1)
    cost = margin - cosine_similarity(attention.queries, attended) + cosine_similarity(attention.queries, rest)
    cost = cost.relu() if bend else cost
    return cost * (n[..., 0] > 1) if single else cost


def swapped_signs(attention, margin):
    high = mean_hinge(attention, 0.0, bend=False)
    return (margin - high).relu() * (attention.key_mask.sum(1, keepdim=True) > 1)


MEAN = Exercise(
    "ex-ccr-mean",
    ccr_values,
    mean_cases,
    {
        "the hinge is missing: below 0 it is 0": lambda a, m: mean_hinge(a, m, bend=False),
        "where there is one key the hinge is 0": lambda a, m: mean_hinge(a, m, single=False),
        "what was attended to is not taken out of the mean": lambda a, m: mean_hinge(a, m, minus=False),
        "padding counts in the mean": lambda a, m: mean_hinge(a, m, masked=False),
        "the two cosines are exchanged": swapped_signs,
        "the margin is not used": lambda a, m: mean_hinge(a, 0.0),
    },
    shape="(b, q)",
)


def attention_f1(weights, relevant, threshold):
    """Query by query."""
    values = []
    for row, wanted in zip(weights.tolist(), relevant.tolist(), strict=True):
        attended = {n for n, weight in enumerate(row) if weight > threshold}
        right = {n for n, here in enumerate(wanted) if here}
        both = len(attended & right)
        precision = both / len(attended) if attended else 0.0
        recall = both / len(right) if right else 0.0
        values.append(2 * precision * recall / (precision + recall) if both else 0.0)
    return sum(values) / len(values)


def rates(weights, relevant, threshold):
    attended = weights > threshold
    both = (attended & relevant).sum(1).double()
    return both / attended.sum(1).clamp(min=1), both / relevant.sum(1).clamp(min=1)


def f1_cases(draw: Draw) -> Iterator[Case]:
    def queries(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw.weights(n, k, dim=1), draw.uniform(n, k) > 0.6

    sure = torch.tensor([[1.0, 0, 0]]), torch.tensor([[True, False, False]])
    yield Case("all on the right region", (*sure, 0.1), "precision and recall are 1")
    yield Case(
        "half of the right regions",
        (torch.tensor([[0.9, 0.1, 0.0]]), torch.tensor([[True, True, False]]), 0.5),
        "the harmonic mean of 1 and 1/2",
    )
    yield Case(
        "a weight on the threshold",
        (torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[True, True, False]]), 0.25),
        "attended means more than the threshold",
    )
    yield Case(
        "nothing is attended to",
        (torch.full((2, 4), 0.25), torch.eye(4)[:2] > 0, 0.5),
        "0 divided by 0: such a query counts 0",
    )
    yield Case("nothing is relevant", (torch.eye(3), torch.eye(3) > 2, 0.5), "such a query counts 0")
    neither = torch.full((2, 4), 0.25), torch.zeros(2, 4, dtype=torch.bool)
    yield Case(
        "nothing is attended to and nothing is relevant", (*neither, 0.5), "0 divided by 0: such a query counts 0"
    )
    yield Case("twenty queries", (*queries(20, 6), 0.15), "F1 of each query, then their mean")
    yield Case("another threshold", (*queries(20, 6), 0.3), "use the threshold that is given")


def pooled_f1(weights, relevant, threshold):
    attended = weights > threshold
    return float(2 * (attended & relevant).sum() / max(int(attended.sum() + relevant.sum()), 1))


def f1_of_means(weights, relevant, threshold):
    precision, recall = (part.mean() for part in rates(weights, relevant, threshold))
    return float(2 * precision * recall / (precision + recall).clamp(min=1e-12))


F1 = Exercise(
    "ex-ccr-f1",
    attention_f1,
    f1_cases,
    {
        "that is the precision": lambda w, r, t: float(rates(w, r, t)[0].mean()),
        "that is the recall": lambda w, r, t: float(rates(w, r, t)[1].mean()),
        "that is the arithmetic mean of precision and recall": lambda w, r, t: float(
            torch.stack(rates(w, r, t)).mean()
        ),
        "all queries are counted together: F1 of each query, then their mean": pooled_f1,
        "that is F1 of the mean precision and recall: F1 of each query first": f1_of_means,
        "a weight on the threshold is not attended": lambda w, r, t: attention_f1(w, r, t - 1e-6),
        "the threshold is not used": lambda w, r, t: attention_f1(w, r, 0.0),
    },
)


def expected_best(values, n):
    """Sum over which of the sorted values is the largest of n draws."""
    ordered = sorted(values.tolist() if hasattr(values, "tolist") else values)
    m = len(ordered)
    return sum(value * ((rank / m) ** n - ((rank - 1) / m) ** n) for rank, value in enumerate(ordered, start=1))


def best_without_replacement(values, n):
    ordered, total, chance = sorted(values.tolist(), reverse=True), 0.0, 1.0
    m = len(ordered)
    for place, value in enumerate(ordered):
        here = min(1.0, n / (m - place))
        total, chance = total + value * chance * here, chance * (1 - here)
    return total


def best_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one draw", (draw.normal(5).double(), 1), "the best of one is the mean")
    yield Case("runs that are all alike", (torch.full((4,), 30.0).double(), 36), "nothing is gained by choosing")
    yield Case("two draws of two runs", (torch.tensor([10.0, 20.0]).double(), 2), "a run may be drawn twice")
    yield Case(
        "the best of 36", (40 + draw.normal(6).double(), 36), "with 36 draws nearly the largest value, never more"
    )
    yield Case(
        "the best of three", (40 + 3 * draw.normal(9).double(), 3), "how likely is each value to be the largest?"
    )


BEST = Exercise(
    "ex-ccr-best",
    expected_best,
    best_cases,
    {
        "that is the largest value; the best of n draws is not always it": lambda v, n: float(v.max()),
        "that is the mean: n is not used": lambda v, n: float(v.mean()),
        "runs are drawn with replacement": best_without_replacement,
        "the smallest of n draws; the largest is asked for": lambda v, n: -expected_best(-v, n),
        "that is the mean of the n largest": lambda v, n: float(v.sort(descending=True).values[:n].mean()),
        "one draw too many": lambda v, n: expected_best(v, n + 1),
        "the median": lambda v, n: float(v.median()),
    },
    tolerance=1e-5,
)

EXERCISES = (F1, MEAN, BEST, STRANGERS)
