"""A GPU's host never waits inside a training step, nor inside a block of scoring: what it waits for, the GPU idles for.

The second device of tests/second_device.py computes every model of the book for real, and counts the waits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import second_device
import torch
from accelerate import Accelerator
from contract_cases import CASES, DEFAULTS, OBJECTIVES, Case, made, pair_batch
from count_syncs import scoring_syncs, step_syncs
from second_device import DEVICE, Sync, counting
from small_models import small
from test_objectives import lacks_attention

from itm_utils.data.batches import PairDataset
from itm_utils.models.ccr_ccs import AttentionConstraintLoss
from itm_utils.models.keeping_score import MeanPool
from itm_utils.models.mmca import MMCA, HardNegativeTripletLoss
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import TrainConfig, loop

# Matchers and objectives that still wait. Whoever cleans one takes its name out: the last test fails until then.
NOT_YET: set[str] = set()
CONSTRAINED = ("SCAN", "BFAN", "PFAN", "SGRAF")  # the base models of chapter 11

every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda cls: cls.__name__)


def told(syncs: list[Sync]) -> str:
    return "\n".join(sorted({f"{sync.operation} at {sync.where}" for sync in syncs}))


@every_objective
@pytest.mark.parametrize("case", DEFAULTS, ids=str)
def test_a_training_step_never_waits(case: Case, objective: type) -> None:
    syncs = step_syncs(case, objective)
    if syncs is None or {case.matcher.__name__, objective.__name__} & NOT_YET:
        return
    assert not syncs, f"{len(syncs)} waits:\n{told(syncs)}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_variant_waits(case: Case) -> None:
    syncs = [*(step_syncs(case, HingeTriplet) or []), *scoring_syncs(case)]
    assert not syncs or case.matcher.__name__ in NOT_YET, f"{len(syncs)} waits:\n{told(syncs)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "queries"),
    [(case, 1) for case in CASES if case.matcher.__name__ in CONSTRAINED]
    + [(case, queries) for case in DEFAULTS if case.matcher.__name__ in CONSTRAINED for queries in (3, 0)],
    ids=str,
)
def test_a_step_that_logs_conflicts_never_waits(case: Case, queries: int) -> None:
    """Chapter 11's whole loss, in a batch whose conflicts are logged; it samples one in twenty of them."""
    calls = []

    def counted(ranking_loss: HingeTriplet) -> AttentionConstraintLoss:
        loss = AttentionConstraintLoss(ranking_loss, queries=queries, conflicts_every=1)
        assert loss.logs_conflicts(pair_batch())
        calls.append(loss)
        return loss

    syncs = step_syncs(case, counted)
    assert calls and syncs == [], told(syncs or [])


@pytest.mark.parametrize("settings", [{"by_image": True}, {"by_image": True, "hardest": False}, {"budget": 2**20}])
def test_no_way_to_select_negatives_waits(settings: dict) -> None:
    """The hardest and random ones, all in one piece and chunk by chunk, with several captions of an image."""
    model, batch = Case(MMCA).build().train().to(DEVICE), pair_batch()
    batch = replace(batch, images=replace(batch.images, ids=torch.tensor([4, 1, 4, 4, 2]))).to(DEVICE)
    with counting() as syncs:
        HardNegativeTripletLoss(**settings)(model, batch)[0].backward()
    assert not syncs, told(syncs)


def test_a_step_of_the_training_loop_never_waits(
    any_pairs: PairDataset, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own step, not a copy of it; its numbers are read afterwards, with one wait for all steps."""
    monkeypatch.setattr(Accelerator, "device", property(lambda accelerator: DEVICE))
    model = small(MeanPool, 30, any_pairs.split.feature_dim)
    config = TrainConfig(epochs=1, batch_size=4, device="cpu")
    run = loop._Run(model, HingeTriplet(), any_pairs, config, tmp_path, None, {})
    batches = [any_pairs[list(range(start, start + 4))].to(DEVICE, non_blocking=True) for start in (0, 4, 8)]
    run._train_step(batches[0])  # fills the optimizer's state
    with counting() as syncs:
        for batch in batches[1:]:
            run._train_step(batch)
    assert not syncs, told(syncs)
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    with counting() as syncs:
        run._read_unread()
    assert len(syncs) == 1 and len(run.log) == 3, told(syncs)


def test_what_still_waits_is_listed() -> None:
    """A name that no longer waits is no longer listed."""
    clean = Case(MeanPool), Case(MMCA)  # without and with attention
    found = {loss.__name__ for loss in OBJECTIVES if any(step_syncs(case, loss) for case in clean)}
    for case in CASES:
        name = case.matcher.__name__
        if name in NOT_YET - found and (step_syncs(case, HingeTriplet) or scoring_syncs(case)):
            found.add(name)
    assert found >= NOT_YET, f"clean, but still listed: {', '.join(sorted(NOT_YET - found))}"


# ---------------------------------------------------------------- the device itself


@every_objective
@pytest.mark.parametrize("case", DEFAULTS, ids=str)
def test_another_device_computes_the_same(case: Case, objective: type) -> None:
    """The loss of every model on the second device is that on the CPU, where kernels may be others."""
    losses = []
    for device in ("cpu", DEVICE):
        model, batch = case.build().to(device), pair_batch().to(device)
        if lacks_attention(objective, model, batch):
            return
        torch.manual_seed(3)
        losses.append(made(objective)(model, batch)[0].detach().cpu())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


WAITS = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: bool(x.any()),
    "values": lambda x: x.tolist(),
    "copy": lambda x: x.cpu(),
    "blocking copy to the device": lambda x: torch.zeros(3).to(DEVICE),
    "made from a list": lambda x: torch.tensor([1, 2], device=DEVICE),
    "boolean mask": lambda x: x[x > 0],
    "positions of the host": lambda x: x[torch.tensor([0])],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}
FREE = {
    "arithmetic": lambda x: (x + 1.0).softmax(0),
    "CPU number": lambda x: x * torch.tensor(2.0),
    "queued copy": lambda x: torch.zeros(3).to(DEVICE, non_blocking=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "device positions": lambda x: x[x.long()],
    "repeats of known size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "host tensors": lambda x: torch.tensor([1, 2]).sum().item(),
}
REFUSED = {
    "two devices": lambda x: x + torch.zeros(3),
    "a number of the host among rows": lambda x: torch.stack([x.sum(), torch.tensor(0.0)]),
    "device positions in a host tensor": lambda x: torch.zeros(3)[x.long()],
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
}


def count(job) -> int:
    with counting() as syncs:
        job(torch.ones(3).to(DEVICE, non_blocking=True))
    return len(syncs)


@pytest.mark.parametrize("name", WAITS)
def test_it_counts_what_a_gpu_waits_for(name: str) -> None:
    assert count(WAITS[name]) == 1


@pytest.mark.parametrize("name", FREE)
def test_it_does_not_count_what_is_free(name: str) -> None:
    assert count(FREE[name]) == 0


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_what_a_gpu_refuses(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        count(REFUSED[name])


def test_a_wait_is_noted_with_its_line() -> None:
    with counting() as syncs:
        torch.ones(3).to(DEVICE, non_blocking=True).sum().item()
    assert [sync.operation for sync in syncs] == ["_local_scalar_dense"]
    assert "test_a_wait_is_noted_with_its_line" in syncs[0].where
    assert second_device.NAME in str(DEVICE)


@pytest.mark.parametrize("packed", [False, True])
def test_its_gru_is_that_of_the_cpu(packed: bool) -> None:
    """Accelerators have a kernel of their own for it: states and gradients."""
    torch.manual_seed(0)
    gru, words, found = torch.nn.GRU(4, 5, batch_first=True), torch.randn(3, 6, 4), []
    for device in ("cpu", DEVICE):
        gru = gru.to(device)
        gru.zero_grad()
        inputs = words.to(device).detach().requires_grad_()
        run = torch.nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([6, 5, 2]), True) if packed else inputs
        gru(run)[1].square().sum().backward()
        found.append([inputs.grad.cpu(), *(parameter.grad.cpu() for parameter in gru.parameters())])
    torch.testing.assert_close(*found)
