"""How long a training step takes, for a receipt."""

from __future__ import annotations

import time
from copy import copy, deepcopy
from itertools import islice

import torch

from itm_utils.data.batches import PairDataset, pair_loader
from itm_utils.matcher import Matcher
from itm_utils.training import Objective


def step_seconds(
    objective: Objective,
    model: Matcher,
    pairs: PairDataset,
    batch_size: int,
    seed: int,
    batches: int = 5,
    times: int = 5,
) -> float:
    """Seconds of one step, forward and back, mean over a few batches; processor time on a CPU.

    Each batch is taken several times, and the shortest counts: longer times are disturbances. Logs of conflicts are off.
    """
    where, taken = next(model.parameters()).device, []
    clock = time.process_time if where.type == "cpu" else time.perf_counter
    stepped, timed = deepcopy(model).train(), copy(objective)
    if hasattr(timed, "conflicts_every"):
        timed.conflicts_every = 0
    for batch in islice(pair_loader(pairs, batch_size, seed), batches):
        moved, tries = batch.to(where), []
        for _ in range(times):
            began = clock()
            timed(stepped, moved)[0].backward()
            if where.type == "cuda":
                torch.cuda.synchronize()
            tries.append(clock() - began)
        taken.append(min(tries))
    return sum(taken) / len(taken)
