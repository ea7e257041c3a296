"""Exercises of chapter 12."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from itm_lab.teaching.checks import Case, Draw, Exercise


def padded_share(lengths, size):
    """Slot by slot."""
    numbers, padding, slots = lengths.tolist(), 0, 0
    for number, length in enumerate(numbers):
        start = number // size * size
        longest = max(numbers[start : start + size])
        slots += longest
        padding += longest - length
    return padding / slots


def slots_and_words(lengths, size):
    blocks = lengths.split(size)
    return [(len(block) * int(block.max()), int(block.sum())) for block in blocks]


def share_of(counted):
    return 1 - sum(words for _, words in counted) / sum(slots for slots, _ in counted)


def padding_cases(draw: Draw) -> Iterator[Case]:
    def lengths(number: int) -> torch.Tensor:
        return torch.tensor([draw.integer(3, 18) for _ in range(number)])

    yield Case("one block", (torch.tensor([draw.integer(3, 9), 12, 10]), 3), "all are padded to the longest")
    yield Case("captions of one length", (torch.full((6,), 7), 2), "nothing is padded")
    yield Case(
        "two blocks", (torch.tensor([4, draw.integer(5, 9), 15, 18]), 2), "each has a longest caption of its own"
    )
    yield Case("a smaller last block", (lengths(11), 4), "the last block has fewer captions")
    yield Case("blocks of one caption", (lengths(5), 1), "nothing is padded")
    yield Case("many blocks", (lengths(50), 8), "in the order given")


PADDING = Exercise(
    "ex-fast-padding",
    padded_share,
    padding_cases,
    {
        "that is the share of slots that holds words": lambda n, size: 1 - padded_share(n, size),
        "divide the padding by all slots; that is padding by the words": lambda n, size: (
            padded_share(n, size) / (1 - padded_share(n, size))
        ),
        "that is the number of padded slots; divide by all slots": lambda n, size: sum(
            slots - words for slots, words in slots_and_words(n, size)
        ),
        "all captions are padded as one block": lambda n, size: padded_share(n, len(n)),
        "the captions are sorted first; the blocks are those of the order given": lambda n, size: padded_share(
            n.sort().values, size
        ),
        "the last block has fewer captions than the others": lambda n, size: (
            1 - sum(n.tolist()) / sum(size * int(block.max()) for block in n.split(size))
        ),
        "that is the mean of the blocks' shares; count the slots of all blocks": lambda n, size: (
            sum(share_of([one]) for one in slots_and_words(n, size)) / len(n.split(size))
        ),
        "`size` is the number of captions in a block, not the number of blocks": lambda n, size: share_of(
            [(len(block) * int(block.max()), int(block.sum())) for block in n.chunk(size)]
        ),
        "the last block is left out": lambda n, size: padded_share(n[: len(n) // size * size], size),
    },
)


def distance(affinity, weights, gram, query_norm):
    """Sum by sum."""
    found = torch.zeros(affinity.shape[0], affinity.shape[2])
    for m in range(found.shape[0]):
        for x in range(found.shape[1]):
            keys = range(affinity.shape[1])
            dot = sum(weights[m, k, x] * affinity[m, k, x] for k in keys)
            square = sum(weights[m, k, x] * weights[m, j, x] * gram[m, k, j] for k in keys for j in keys)
            found[m, x] = query_norm[x] ** 2 - 2 * dot + square
    return found


def three_terms(affinity, weights, gram, query_norm):
    """|q|^2, q·a, |a|^2: each (m, x), of the first one (x,)."""
    return query_norm.square(), (weights * affinity).sum(1), (weights * (gram @ weights)).sum(1)


def distance_cases(draw: Draw) -> Iterator[Case]:
    def sides(m: int, k: int, x: int, d: int) -> tuple[torch.Tensor, ...]:
        keys, queries = draw.normal(m, k, d), 2 * draw.normal(x, d)
        return keys @ queries.T, draw.weights(m, k, x, dim=1), keys @ keys.mT, queries.norm(dim=-1)

    yield Case("one key", sides(1, 1, 2, 4), "the attended vector is the key: |q|^2 - 2 q·k + |k|^2")
    yield Case("two keys", sides(1, 2, 1, 4), "the norm needs the inner products of the keys with each other")
    yield Case("several items", sides(3, 5, 4, 8), "m items, x queries")


DISTANCE = Exercise(
    "ex-fast-distance",
    distance,
    distance_cases,
    {
        "that is the distance; leave it squared": lambda *s: distance(*s).clamp(min=0).sqrt(),
        "the norm of the query is missing": lambda *s: distance(*s) - three_terms(*s)[0],
        "the norm of the attended vector is missing": lambda *s: distance(*s) - three_terms(*s)[2],
        "the inner product is missing": lambda *s: distance(*s) + 2 * three_terms(*s)[1],
        "the inner product counts twice": lambda *s: distance(*s) + three_terms(*s)[1],
        "the inner product is subtracted, not added": lambda *s: distance(*s) + 4 * three_terms(*s)[1],
        "the norm of the query is to be squared": lambda a, w, g, q: distance(a, w, g, q) - q.square() + q,
        "that is the cosine": lambda *s: three_terms(*s)[1] / (three_terms(*s)[0] * three_terms(*s)[2]).sqrt(),
        "the Gram matrix counts beyond its diagonal": lambda a, w, g, q: distance(
            a, w, torch.diag_embed(g.diagonal(dim1=1, dim2=2)), q
        ),
    },
    shape="(m, x)",
)


def attend(queries, keys, values, size):
    """Key by key, in double precision; the largest logit is taken off first."""
    rows = []
    for query in queries.double():
        logits = [float(query @ key) / math.sqrt(len(query)) for key in keys.double()]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        row = sum(weight * value for weight, value in zip(weights, values.double(), strict=True))
        rows.append(row / sum(weights))
    return torch.stack(rows)


class LargestTensor(TorchDispatchMode):
    """Notes whether an operation gives a tensor with an axis for all queries and one for all keys."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        self.axes, self.seen = {queries, keys}, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.seen |= isinstance(leaf, torch.Tensor) and set(leaf.shape) >= self.axes
        return result


def observe_blocks(answer, queries, keys, values, size):
    """The attended values, and whether all logits were held at once; in blocks of one key, their number is that of the keys."""
    with LargestTensor(len(queries), len(keys)) as watch:
        found = answer(queries, keys, values, size)
    if found is None:
        return None
    return {"attended values": found, "more than `size` columns of logits": watch.seen and len(keys) > size > 1}


def whole(queries, keys, values, size):
    return (queries @ keys.T / math.sqrt(queries.shape[1])).softmax(dim=1) @ values


def each_block(queries, keys, values, size, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attended values (b, q, d) and log-sum-exps (b, q) of each block by itself."""
    parts, numbers = [], []
    for some, theirs in zip(keys.split(size), values.split(size), strict=True):
        logits = queries @ some.T / (scale or math.sqrt(queries.shape[1]))
        parts.append(logits.softmax(dim=1) @ theirs)
        numbers.append(logits.logsumexp(dim=1))
    return torch.stack(parts), torch.stack(numbers)


def weighed(parts, numbers):
    return (numbers.softmax(dim=0)[..., None] * parts).sum(dim=0)


def merged_by(parts: torch.Tensor, numbers: torch.Tensor, so_far: Sequence[torch.Tensor]) -> torch.Tensor:
    """Blocks merged one after the other, with log-sum-exps of those before that may be wrong."""
    total = parts[0]
    for part, number, before in zip(parts[1:], numbers[1:], so_far, strict=False):
        total = torch.lerp(total, part, torch.sigmoid(number - before)[:, None])
    return total


def last_logsumexp(queries, keys, values, size):
    parts, numbers = each_block(queries, keys, values, size)
    return merged_by(parts, numbers, numbers)


def added_logsumexp(queries, keys, values, size):
    parts, numbers = each_block(queries, keys, values, size)
    return merged_by(parts, numbers, numbers.cumsum(dim=0))


def blocks_cases(draw: Draw) -> Iterator[Case]:
    def three(q: int, k: int, d: int, scale: float = 2.0) -> tuple[torch.Tensor, ...]:
        return scale * draw.normal(q, d), draw.normal(k, d), draw.normal(k, d)

    yield Case("one block", (*three(3, 4, 6), 4), "a single block is plain attention")
    yield Case("two blocks", (*three(3, 8, 6), 4), "merge the blocks by their log-sum-exps")
    yield Case("a smaller last block", (*three(5, 11, 16), 4), "the last block has fewer keys")
    yield Case("blocks of one key", (*three(2, 5, 3), 1), "each block has a single weight, 1")
    yield Case(
        "large logits", (*three(3, 9, 4, 200.0), 4), "an exponential overflows unless the largest logit is taken off"
    )


BLOCKS = Exercise(
    "ex-fast-blocks",
    attend,
    blocks_cases,
    {
        "the logits are not scaled by 1 / sqrt(d)": lambda *s: weighed(*each_block(*s, scale=1.0)),
        "the logits are divided by d, not by its square root": lambda q, k, v, size: weighed(
            *each_block(q, k, v, size, scale=q.shape[1])
        ),
        "a whole row of logits is built; go through the keys block by block": whole,
        "a plain mean of the blocks; merge by their log-sum-exps": lambda *s: each_block(*s)[0].mean(dim=0),
        "that is the sum of the blocks; their shares sum to one": lambda *s: each_block(*s)[0].sum(dim=0),
        "that is the last block alone": lambda *s: each_block(*s)[0][-1],
        "that is the first block alone": lambda *s: each_block(*s)[0][0],
        "keep the log-sum-exp of all keys so far, not that of the last block": last_logsumexp,
        "log-sum-exps of two groups are not added; use torch.logaddexp": added_logsumexp,
    },
    observe=observe_blocks,
    shape="(q, d)",
)

EXERCISES = (PADDING, DISTANCE, BLOCKS)
