"""Nothing may assume the CPU: every exported matcher and objective runs on the device "meta".

A meta tensor has a shape and a device and no numbers. A mask or an index made on the CPU inside a model meets tensors
of another device there, and fails as it would on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import exported, small

from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.matcher import Matcher, OfflineNegatives, PairBatch, length_mask
from itm_utils.models.aoq import encode
from itm_utils.models.ccr_ccs import AttentionConstraintLoss
from itm_utils.models.vsepp import HingeTriplet

# A stand-in of golden cases takes vectors for features: no model, and without sizes.
EXPORTED = [cls for cls in exported(Matcher) if cls.__init__ is not Matcher.__init__]
# What others build on is no model of its own.
MATCHERS = [cls for cls in EXPORTED if not any(other is not cls and issubclass(other, cls) for other in EXPORTED)]
OBJECTIVES = [
    value
    for value in exported()
    if inspect.isclass(value) and not issubclass(value, Matcher) and "__call__" in vars(value)
    if not getattr(value, "_is_protocol", False)
]


def meta_batch(pairs: PairDataset) -> PairBatch:
    """Four pairs, with offline ones for the objectives that ask for them."""
    offline = OfflineNegatives(pairs[[1, 6, 10, 15]], pairs[[2, 7, 11, 16]])
    return replace(pairs[[0, 5, 9, 14]], offline=offline).to("meta")


def made(objective: type) -> Callable:
    """With its defaults; one that adds to another is given the first of the book."""
    return objective(HingeTriplet()) if "ranking_loss" in inspect.signature(objective).parameters else objective()


def test_there_is_something_to_test() -> None:
    assert MATCHERS
    assert OBJECTIVES


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda cls: cls.__name__)
def test_matcher_on_another_device(matcher: type[Matcher], any_pairs: PairDataset) -> None:
    model = small(matcher, 30, any_pairs.split.feature_dim).to("meta")
    batch = meta_batch(any_pairs)
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    all_pairs, pairs = model.score(images, texts), model.score_pairs(images, texts)
    assert all_pairs.i2t.shape == all_pairs.t2i.shape == (4, 4)
    assert pairs.i2t.shape == (4,)
    tensors = [all_pairs.i2t, all_pairs.t2i, pairs.i2t, *model.extra_losses(images, texts, batch).values()]
    tensors += [attention.weights for attention in model.attention(images, texts).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda cls: cls.__name__)
def test_objective_on_another_device(
    matcher: type[Matcher], objective: type, any_pairs: PairDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = small(matcher, 30, any_pairs.split.feature_dim).to("meta"), meta_batch(any_pairs)
    if objective is AttentionConstraintLoss and not model.attention(*encode(model, batch)):
        with pytest.raises(ItmError, match="no attention"):
            made(objective)(model, batch)
        return
    # Logs read numbers, and there are none here.
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: 0.0)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.0] * len(tensor))
    loss, _ = made(objective)(model, batch)
    assert loss.device.type == "meta"
    loss.backward()


@pytest.mark.parametrize("matcher", MATCHERS, ids=lambda cls: cls.__name__)
def test_scores_do_not_depend_on_the_rest_of_the_batch(matcher: type[Matcher], any_pairs: PairDataset) -> None:
    torch.manual_seed(0)
    model = small(matcher, 30, any_pairs.split.feature_dim).eval()
    batch = any_pairs[list(range(0, 40))]
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    together = model.score(images, texts)
    torch.testing.assert_close(model.score_pairs(images, texts).i2t, together.i2t.diagonal())
    shortest = int(batch.texts.lengths.argmin())
    alone = any_pairs[[shortest]]
    one = model.score(model.encode_images(alone.images), model.encode_texts(alone.texts))
    torch.testing.assert_close(one.t2i[0, 0], together.t2i[shortest, shortest])
    torch.testing.assert_close(one.i2t[0, 0], together.i2t[shortest, shortest])


def test_a_mask_follows_its_lengths() -> None:
    assert length_mask(torch.empty(3, device="meta"), 5).device.type == "meta"
    assert length_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]
