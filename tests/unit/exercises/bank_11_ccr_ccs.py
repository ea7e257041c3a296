"""Answers to the exercises of chapter 11."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from bank import right, wrong

from itm_utils.models.ccr_ccs import (
    attended_features,
    ccr_values,
    cosine_similarity,
    reversed_weights,
    sample_two_queries,
)

F1, MEAN, BEST, STRANGERS = "ex-ccr-f1", "ex-ccr-mean", "ex-ccr-best", "ex-ccr-strangers"


@right(F1)
def tables(weights, relevant, threshold):
    attended = weights > threshold
    both = (attended & relevant).sum(1)
    return (2 * both / (attended.sum(1) + relevant.sum(1)).clamp(min=1)).mean()


@right(F1)
def python(weights, relevant, threshold):
    values = []
    for row, wanted in zip(weights.tolist(), relevant.tolist(), strict=True):
        hits = sum(w > threshold and r for w, r in zip(row, wanted, strict=True))
        attended, right_ones = sum(w > threshold for w in row), sum(wanted)
        values.append(2 * hits / (attended + right_ones) if hits else 0)
    return sum(values) / len(values)


@right(F1)
def numpy_f1(weights, relevant, threshold):
    a, r = weights.numpy() > threshold, relevant.numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        p, c = (a & r).sum(1) / a.sum(1), (a & r).sum(1) / r.sum(1)
        return np.nan_to_num(2 * p * c / (p + c)).mean()


def both_rates(w, r, t):
    a = w > t
    hits = (a & r).sum(1).double()
    return hits / a.sum(1).clamp(min=1), hits / r.sum(1).clamp(min=1)


wrong(F1, "precision")(lambda w, r, t: both_rates(w, r, t)[0].mean())
wrong(F1, "recall|harmonic")(lambda w, r, t: both_rates(w, r, t)[1].mean())
wrong(F1, "arithmetic|harmonic")(lambda w, r, t: sum(both_rates(w, r, t)).mean() / 2)
wrong(F1, "counted together|F1 of each")(
    lambda w, r, t: 2 * ((w > t) & r).sum() / ((w > t).sum() + r.sum()).clamp(min=1)
)
wrong(F1, "mean precision and recall|F1 of each")(
    lambda w, r, t: (lambda p, c: 2 * p * c / (p + c).clamp(min=1e-9))(*(x.mean() for x in both_rates(w, r, t)))
)
wrong(F1, "NaN")(lambda w, r, t: (lambda p, c: (2 * p * c / (p + c)).mean())(*both_rates(w, r, t)))
wrong(F1, "on the threshold|more than")(
    lambda w, r, t: (2 * ((w >= t) & r).sum(1) / ((w >= t).sum(1) + r.sum(1)).clamp(min=1)).mean()
)
wrong(F1, "threshold")(lambda w, r, t: tables(w, r, 0.1))
wrong(F1, "shape")(lambda w, r, t: 2 * ((w > t) & r).sum(1) / ((w > t).sum(1) + r.sum(1)).clamp(min=1))
wrong(F1, "nothing returned")(lambda w, r, t: None)
wrong(F1, "you say")(lambda w, r, t: ((w > t) == r).double().mean())
wrong(F1, "times as large")(lambda w, r, t: tables(w, r, t) / 2)


@right(MEAN)
def from_total(attention, margin):
    real = attention.key_mask[..., None]
    n = real.sum(dim=1, keepdim=True)
    attended = attended_features(attention)
    rest = ((attention.keys * real).sum(dim=1, keepdim=True) - attended) / (n - 1).clamp_min(1)
    cost = margin - cosine_similarity(attention.queries, attended) + cosine_similarity(attention.queries, rest)
    return cost.relu() * (n[..., 0] > 1)


@right(MEAN)
def unscaled(attention, margin):
    attention.keys[~attention.key_mask] = 0
    attended = attention.weights @ attention.keys
    rest = attention.keys.sum(1, keepdim=True) - attended  # a cosine does not see the factor 1 / (n - 1)
    cost = cosine_similarity(attention.queries, rest) - cosine_similarity(attention.queries, attended) + margin
    return torch.where(attention.key_mask.sum(1, keepdim=True) > 1, cost.clamp(min=0), 0.0).double()


@right(MEAN)
def pair_by_pair(attention, margin):
    values = np.zeros(attention.queries.shape[:2])
    for b, mask in enumerate(attention.key_mask):
        keys = attention.keys[b, mask]
        if len(keys) < 2:
            continue
        for q, query in enumerate(attention.queries[b]):
            found = attention.weights[b, q, mask] @ keys
            rest = (keys.sum(0) - found) / (len(keys) - 1)
            values[b, q] = max(0.0, float(margin - cosine_similarity(query, found) + cosine_similarity(query, rest)))
    return values


def hinge(attention, rest, margin, bend=True):
    cost = (
        margin
        - cosine_similarity(attention.queries, attended_features(attention))
        + cosine_similarity(attention.queries, rest)
    )
    return cost.relu() if bend else cost


def total(attention):
    return (attention.keys * attention.key_mask[..., None]).sum(1, keepdim=True)


def several(attention):
    return attention.key_mask.sum(1, keepdim=True) > 1


wrong(MEAN, "hinge is missing|below 0")(
    lambda a, m: hinge(a, total(a) - attended_features(a), m, bend=False) * several(a)
)
wrong(MEAN, "one key")(lambda a, m: hinge(a, total(a) - attended_features(a), m))
wrong(MEAN, "not taken out")(lambda a, m: hinge(a, total(a).expand_as(a.queries), m) * several(a))
wrong(MEAN, "padding|what is n")(
    lambda a, m: hinge(a, a.keys.sum(1, keepdim=True) - attended_features(a), m) * several(a)
)
wrong(MEAN, "padding|what is n|you say")(
    lambda a, m: hinge(a, a.keys.mean(1, keepdim=True) - attended_features(a) / a.keys.shape[1], m) * several(a)
)
wrong(MEAN, "margin")(lambda a, m: ccr_values(a, 0.0))
wrong(MEAN, "cosines are exchanged|you say")(
    lambda a, m: (2 * m - hinge(a, total(a) - attended_features(a), m, bend=False)).relu() * several(a)
)
wrong(MEAN, "shape")(lambda a, m: from_total(a, m).mean(1))
wrong(MEAN, "nothing returned")(lambda a, m: None)
wrong(MEAN, "you say")(lambda a, m: from_total(a, m) * 2)
wrong(MEAN, "stops with AttributeError")(lambda a, m: a.regions)
wrong(MEAN, "you say|padding")(
    lambda a, m: hinge(a, reversed_weights(a.weights, torch.ones_like(a.key_mask)) @ a.keys, m) * several(a)
)


@right(BEST)
def order_statistics(values, n):
    ordered = values.sort().values
    ranks = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return (ordered * (ranks[1:] ** n - ranks[:-1] ** n)).sum()


@right(BEST)
def by_distribution(values, n):
    ordered = sorted(values.tolist())
    total = ordered[0]
    for rank in range(1, len(ordered)):
        total += (ordered[rank] - ordered[rank - 1]) * (1 - (rank / len(ordered)) ** n)
    return total


@right(BEST)
def numpy_best(values, n):
    chance = np.diff((np.arange(len(values) + 1) / len(values)) ** n)
    return np.float32(np.dot(np.sort(values.numpy()), chance))


wrong(BEST, "largest value|best of one is the mean|you say")(lambda v, n: v.max())
wrong(BEST, "n is not used|mean")(lambda v, n: v.mean())
wrong(BEST, "smallest|you say")(lambda v, n: -order_statistics(-v, n))
wrong(BEST, "one draw too many|you say")(lambda v, n: order_statistics(v, n + 1))
wrong(BEST, "with replacement|drawn twice|stops with")(
    lambda v, n: float(np.mean([max(c) for c in itertools.combinations(v.tolist(), min(n, len(v)))]))
)
wrong(BEST, "you say")(lambda v, n: v.mean() + v.std() * np.sqrt(2 * np.log(n)))
wrong(BEST, "nothing returned")(lambda v, n: None)
wrong(BEST, "shape")(lambda v, n: v * n)
wrong(BEST, "n largest|you say")(lambda v, n: v.sort(descending=True).values[:n].mean())
wrong(BEST, "median|you say")(lambda v, n: v.median())
wrong(BEST, "you say|largest")(lambda v, n: order_statistics(v, n) / n)


@right(STRANGERS)
def by_the_book(mask, phrase):
    query = sample_two_queries(mask)[:, :1]
    own = phrase.gather(1, query.clamp_min(0))
    other = mask & ((phrase != own) | (phrase < 0))
    other = other.scatter(1, query.clamp_min(0), False)
    return torch.cat([query, sample_two_queries(other)[:, :1]], dim=1)


@right(STRANGERS)
def by_choice(mask, phrase):
    pairs = []
    for m, p in zip(mask.numpy(), phrase.numpy(), strict=True):
        places = np.flatnonzero(m)
        query = places[int(torch.randint(len(places), ()))] if len(places) else -1
        others = [n for n in places if n != query and (p[n] == -1 or p[n] != p[query])]
        pairs.append((query, others[int(torch.randint(len(others), ()))] if others else -1))
    return np.array(pairs)


@right(STRANGERS)
def by_multinomial(mask, phrase):
    rows = []
    for m, p in zip(mask, phrase, strict=True):
        query = int(torch.multinomial(m.float(), 1))
        allowed = m & ((p != p[query]) | (p < 0))
        allowed[query] = False
        rows.append([query, int(torch.multinomial(allowed.float(), 1)) if allowed.any() else -1])
    return torch.tensor(rows)


def sampled(mask, phrase, allow):
    rows = []
    for m, p in zip(mask.tolist(), phrase.tolist(), strict=True):
        places = [n for n, here in enumerate(m) if here]
        query = places[int(torch.randint(len(places), ()))]
        others = [n for n in range(len(m)) if allow(query, n, p, m)]
        rows.append([query, others[int(torch.randint(len(others), ()))] if others else -1])
    return torch.tensor(rows)


wrong(STRANGERS, "same phrase")(lambda m, p: sample_two_queries(m))
wrong(STRANGERS, "swapped with itself|nothing to swap")(
    lambda m, p: sampled(m, p, lambda q, n, p, m: m[n] and (p[n] != p[q] or p[q] < 0))
)
wrong(STRANGERS, "never sampled|-1")(lambda m, p: sampled(m, p, lambda q, n, p, m: m[n] and n != q and p[n] != p[q]))
wrong(STRANGERS, "mask excludes")(lambda m, p: sampled(m, p, lambda q, n, p, m: n != q and (p[n] != p[q] or p[q] < 0)))
wrong(STRANGERS, "never sampled|-1 was sampled|there is a word")(
    lambda m, p: sampled(m, p, lambda q, n, p, m: m[n] and n != q and p[n] != p[q] and p[n] >= 0)
)
wrong(STRANGERS, "shape")(lambda m, p: by_multinomial(m, p)[:, 0])
wrong(STRANGERS, "nothing returned")(lambda m, p: None)
wrong(STRANGERS, "stops with")(lambda m, p: torch.multinomial(m.float(), 99))


@wrong(STRANGERS, "never sampled")
def always_the_first_stranger(mask, phrase):
    pairs = by_multinomial(mask, phrase)
    for pair, m, p in zip(pairs, mask, phrase, strict=True):
        query = int(pair[0])
        others = [n for n in torch.where(m)[0].tolist() if n != query and (p[n] != p[query] or p[query] < 0)]
        pair[1] = others[0] if others else -1
    return pairs


@wrong(STRANGERS, "never sampled|-1 was sampled")
def only_later_words(mask, phrase):
    return sampled(mask, phrase, lambda q, n, p, m: m[n] and n > q and (p[n] != p[q] or p[q] < 0))


wrong(STRANGERS, "same phrase|swapped with itself|-1")(lambda m, p: sampled(m, p, lambda q, n, p, m: m[n] and n != q))
wrong(STRANGERS, "no positions|-1|itself|same phrase|nothing to swap")(lambda m, p: by_multinomial(m, p).clamp(min=0))
