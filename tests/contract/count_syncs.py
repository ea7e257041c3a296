"""Count where a GPU's host would wait: in one training step, and in one block of scoring, of any model of the book."""

from __future__ import annotations

import torch
from contract_cases import Case, made, pair_batch
from second_device import DEVICE, Sync, counting

from itm_utils.errors import ItmError
from itm_utils.scoring import score_all

CLIP = 2.0


def step_syncs(case: Case, objective: type) -> list[Sync] | None:
    """Waits of a second training step (the first fills the optimizer's state); None if the two do not fit.

    The step is that of the training loop: forward, backward, clip, update. Its batch is on the device already, as a
    loader puts it there while the step before runs.
    """
    model, batch, objective = case.build().train().to(DEVICE), pair_batch().to(DEVICE), made(objective)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        loss, _ = objective(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    try:
        step()
    except ItmError:  # an objective that asks for attention says so where there is none
        return None
    with counting() as syncs:
        step()
    return syncs


def scoring_syncs(case: Case) -> list[Sync]:
    """Waits of scoring encoded images and captions into a table on the device."""
    model, batch = case.build().to(DEVICE), pair_batch().to(DEVICE)
    with torch.inference_mode():
        images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    with counting() as syncs:
        score_all(model, images, texts, progress=False, device=DEVICE)
    return syncs
