"""What chapter 10 measures beside recalls: how hard negatives are, cross ranks, score gaps, speed of learning, seconds of a step."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_utils.data.batches import PairDataset, pair_loader
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher, PairBatch, Scores
from itm_utils.metrics.retrieval import retrieval_ranks, score_matrix
from itm_utils.models.aoq import AnchorScores, LossConfig, OfflineScores, gather_scores
from itm_utils.training import Objective

FAR = 200 / 25_000  # of all captions: a positive pair with a cross rank beyond this is far
DIRECTIONS = ("i2t", "t2i")
STEPS, TURNS = 4, 3  # steps in a row of each loss, and how often each has its turn


# ---------------------------------------------------------------------------------------------- hard negatives


def online_ranks(scores: np.ndarray, negative: np.ndarray, batch: int, seed: int = 0, repeats: int = 1) -> np.ndarray:
    """(a * repeats,): rank, from 1, of the hardest of ``batch - 1`` random negatives.

    scores: (a, n) of anchors with candidates. negative: (a, n), True at negatives. repeats: random batches per anchor.
    """
    generator = np.random.default_rng(seed)
    ranks = []
    for row, allowed in zip(scores, negative, strict=True):
        row = row[allowed]
        for _ in range(repeats):
            drawn = generator.choice(len(row), min(batch - 1, len(row)), replace=False)
            ranks.append(1 + np.count_nonzero(row > row[drawn].max()))
    return np.array(ranks)


def false_shares(lists: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(h,): share of false negatives at each rank of the lists.

    lists: (n, h) candidates, hardest first. truth: (n, m), True where candidates match.
    """
    return np.take_along_axis(truth, lists.astype(np.int64), axis=1).mean(axis=0)


# ---------------------------------------------------------------------------------------------- cross ranks


def cross_ranks(scores: Scores, owner: np.ndarray) -> np.ndarray:
    """(c,): rank, from 1, of each positive pair in the worse of its two directions.

    Among captions of other images and among other images; the second rank is stretched to the range of the first. Ties
    count against the pair.
    """
    i2t, owner = score_matrix(scores.i2t, "i2t"), np.asarray(owner)
    among_images = retrieval_ranks(scores, owner).t2i + 1
    among_captions = np.empty(len(owner))
    for image, row in enumerate(i2t):
        own = owner == image
        before = ~(row[None, ~own] < row[own][:, None])
        among_captions[own] = 1 + np.count_nonzero(before, axis=1)
    each = len(owner) / len(i2t)  # captions per image: five
    return np.maximum(each * among_images - (each - 1), among_captions)


def cross_shares(scores: Scores, owner: np.ndarray) -> dict[str, float]:
    """Percent of positive pairs with cross rank 1, and of those that are far."""
    ranks = cross_ranks(scores, owner)
    first, far = ranks == 1, ranks > FAR * len(owner)
    names = ("cross_rank_first_share", "cross_rank_far_share")
    return dict(zip(names, (100 * float(x.mean()) for x in (first, far)), strict=True))


# ---------------------------------------------------------------------------------------------- score gaps


def held_out_anchors(
    scores: Scores, miner: Scores, owner: Tensor, batch: int, kept: tuple[int, int]
) -> tuple[AnchorScores, AnchorScores]:
    """Image anchors and caption anchors of random batches of a held-out split, joined.

    miner: scores of the model that mines. kept: lengths of the lists of captions and of images. The draws do not depend
    on the scores.
    """
    generator = torch.Generator().manual_seed(0)
    own = owner[None, :] == torch.arange(len(scores.i2t))[:, None]  # (i, c)
    captions = miner.i2t.masked_fill(own, -math.inf).topk(kept[0], dim=1).indices
    images = miner.t2i.masked_fill(own, -math.inf).topk(kept[1], dim=0).indices.T
    parts = []
    for some in torch.randperm(len(owner), generator=generator).split(batch):
        if len(some) < batch:
            break
        of = owner[some]
        square = Scores(scores.i2t[of][:, some], scores.t2i[of][:, some])
        a, b = (torch.randint(n, (batch,), generator=generator) for n in kept)
        offline = OfflineScores(scores.i2t[of, captions[of, a]], scores.t2i[images[some, b], some])
        parts.append(gather_scores(square, of[:, None] == of, offline, LossConfig("OffTri")))
    of_images, of_captions = (
        AnchorScores(*map(torch.cat, zip(*side, strict=True))) for side in zip(*parts, strict=True)
    )
    return of_images, of_captions


def mean_positive_score(scores: Scores, owner: Tensor) -> float:
    """Mean score of the positive pairs of a split, both directions together."""
    each = torch.arange(len(owner))
    both = torch.stack([scores.i2t[owner, each], scores.t2i[owner, each]])
    return both.double().mean().item()


def score_gaps(anchors: tuple[AnchorScores, AnchorScores]) -> dict[str, float]:
    """Gaps between the three classes of pairs; percent of anchors out of order."""
    positive, online, offline, _ = map(torch.cat, zip(*anchors, strict=True))
    disordered = (positive <= offline) | (offline <= online)
    return {  # names of the receipts
        "gap_positive_offline": (positive - offline).mean().item(),
        "gap_offline_online": (offline - online).mean().item(),
        "order_violations": 100 * disordered.float().mean().item(),
        "mean_listed_score": offline.mean().item(),
    }


# ---------------------------------------------------------------------------------------------- speed of learning

Curves = Mapping[str, Sequence[float]]  # direction → R@1 on dev after each epoch


def dev_curves(log: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Direction → R@1 on dev after each epoch."""
    ends = [record for record in log if "val_rsum" in record]
    return {way: [record[f"val_{way}_r1"] for record in ends] for way in DIRECTIONS}


def epochs_to(curve: Sequence[float], goal: float, other: int = 0) -> int:
    """Epochs until a curve reaches a value.

    If it never does: one more than it has, or than the ``other`` epochs of the run it is compared with, whichever is
    more, so that a miss is never the shorter run.
    """
    reached = (epoch for epoch, value in enumerate(curve, start=1) if value >= goal)
    return next(reached, max(len(curve), other) + 1)


def online_curves(folder: str | Path) -> dict[str, list[float]]:
    """The curves of a finished run with the online loss."""
    path = Path(folder) / "final" / "log.jsonl"
    if not path.is_file():
        hint = "Run the online variant of this seed first, or leave online_run empty."
        raise input_error(path, "no such file", "the log of the online run", hint)
    lines = path.read_text(encoding="utf-8").splitlines()
    return dev_curves([json.loads(line) for line in lines])


def curve_numbers(curves: Curves, rival: Curves | None = None) -> dict[str, float]:
    """The curves of a run as numbers of its receipt.

    rival: those of the run with the online loss, whose best epoch is the goal.
    """
    found: dict[str, float] = {}
    for way, curve in curves.items():
        found |= {f"dev_{way}_r1_epoch_{epoch:02}": value for epoch, value in enumerate(curve, start=1)}
        found[f"best_dev_{way}_r1"] = max(curve)
        found[f"epochs_to_best_{way}"] = epochs_to(curve, max(curve))
        if rival is not None:
            goal, length = max(rival[way]), len(rival[way])
            found[f"epochs_to_online_best_{way}"] = epochs_to(curve, goal, length)
    return found


# ---------------------------------------------------------------------------------------------- seconds of a step


def seconds_of_steps(
    model: Matcher,
    objectives: Mapping[str, Objective],
    sources: Mapping[str, PairDataset],
    batch_size: int,
    **loader: Any,
) -> dict[str, list[float]]:
    """Seconds of a training step with each objective, one mean for each of its turns; the model is changed.

    A step is reading a batch, the loss, its gradients and the update. The objectives take turns, each with a loader of
    its own that may read ahead, so that whatever else the machine does meanwhile disturbs none of them.

    sources: what each objective reads. loader: ``seed`` and ``workers`` of the loaders.
    """
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-6)
    seconds: dict[str, list[float]] = {name: [] for name in objectives}
    for name, objective in itertools.chain.from_iterable(itertools.repeat(list(objectives.items()), TURNS)):
        seconds[name].append(_turn(model, objective, optimizer, sources[name], batch_size, **loader))
    return seconds


def step_ratios(seconds: Mapping[str, Sequence[float]], to: str = "online") -> dict[str, float]:
    """Seconds of a step over those of one objective in the same turn, the median of the turns."""
    return {name: float(np.median(np.array(took) / seconds[to])) for name, took in seconds.items()}


def _turn(
    model: Matcher, objective: Objective, optimizer: torch.optim.Optimizer, source: PairDataset, batch_size: int,
    seed: int = 0, workers: int = 0,
) -> float:  # fmt: skip
    """Mean seconds of a few steps in a row. On a CPU only the time that this process gets counts."""
    place = next(model.parameters()).device
    clock = time.process_time if place.type == "cpu" else time.perf_counter
    batches = itertools.islice(pair_loader(source, batch_size, seed, workers, place.type == "cuda"), STEPS + 1)
    _step(model, objective, optimizer, next(batches).to(place)).item()  # not counted
    began = clock()
    losses = [_step(model, objective, optimizer, batch.to(place, non_blocking=True)) for batch in batches]
    if not losses:
        return math.nan  # the data has one batch
    losses[-1].item()  # a GPU is done only when it says so
    return (clock() - began) / len(losses)


def _step(model: Matcher, objective: Objective, optimizer: torch.optim.Optimizer, batch: PairBatch) -> Tensor:
    loss, _ = objective(model, batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    return loss.detach()
