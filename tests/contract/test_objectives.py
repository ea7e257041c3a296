"""The contract of every objective, with every matcher: devices, gradients, a model's own losses, one pair."""

from __future__ import annotations

import math

import pytest
import torch
from contract_cases import DEFAULTS, OBJECTIVES, Case, encode, made, pair_batch

from itm_utils.errors import ItmError
from itm_utils.matcher import Matcher, PairBatch
from itm_utils.models.ccr_ccs import AttentionConstraintLoss

every_matcher = pytest.mark.parametrize("case", DEFAULTS, ids=str)
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda cls: cls.__name__)


def lacks_attention(objective: type, model: Matcher, batch: PairBatch) -> bool:
    """True where an objective asks for attention that the model does not have; it must say so."""
    if objective is not AttentionConstraintLoss or model.attention(*encode(model, batch.images, batch.texts)):
        return False
    with pytest.raises(ItmError, match="no attention"):
        made(objective)(model, batch)
    return True


def test_there_is_something_to_test() -> None:
    assert {"HingeTriplet", "OfflineLoss", "AttentionConstraintLoss"} <= {
        objective.__name__ for objective in OBJECTIVES
    }


@every_objective
@every_matcher
def test_another_device(case: Case, objective: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case.build().train().to("meta"), pair_batch(3).to("meta")
    if lacks_attention(objective, model, batch):
        return
    # Logs read numbers, and there are none here; lengths are on the CPU and have theirs.
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: 0.0)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: [0.0] * len(x) if x.is_meta else read(x))
    loss, _ = made(objective)(model, batch)
    assert loss.device.type == "meta"
    loss.backward()


@every_objective
@every_matcher
def test_loss_logs_and_gradients(case: Case, objective: type) -> None:
    """A finite number that reaches the encoders of both sides, the same for the same seed; logs are plain numbers."""
    model, batch, losses = case.build(), pair_batch(), []
    if lacks_attention(objective, model, batch):
        return
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        loss, logs = made(objective)(model, batch)
        assert loss.shape == () and loss.isfinite()
        assert all(isinstance(name, str) and math.isfinite(float(value)) for name, value in logs.items())
        losses.append(loss.item())
        loss.backward()
    assert losses[0] == losses[1]
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(parameter.grad.isfinite().all() for name, parameter in model.named_parameters() if name in reached)
    torch.manual_seed(3)
    model.zero_grad()
    images, texts = encode(model, batch.images, batch.texts)
    sum(values.sum() for values in vars(model.score(images, texts)).values() if torch.is_tensor(values)).backward()
    scored = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert scored <= reached, "the loss reaches what the scores reach"


@every_objective
@every_matcher
def test_own_losses_are_added(case: Case, objective: type) -> None:
    model, batch, losses = case.build(), pair_batch(), []
    if lacks_attention(objective, model, batch):
        return
    for amount in (0.0, 2.5):
        torch.manual_seed(3)
        with model.with_loss_term(lambda images, texts, batch, amount=amount: {"own": torch.tensor(amount)}):
            loss, _ = made(objective)(model, batch)
        losses.append(loss.item())
    assert losses[1] - losses[0] == pytest.approx(2.5, abs=1e-5)


@every_objective
@every_matcher
def test_one_pair_has_a_finite_loss(case: Case, objective: type) -> None:
    model, batch = case.build(), pair_batch(1)
    if lacks_attention(objective, model, batch):
        return
    loss, _ = made(objective)(model, batch)
    assert loss.isfinite()
    if loss.requires_grad:
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
