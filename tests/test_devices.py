"""Nothing may assume the CPU: every exported matcher and objective runs on the device "meta".

A meta tensor has a shape and a device and no numbers. A mask or an index made on the CPU inside a model meets tensors
of another device there, and fails as it would on a GPU.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from conftest import exported, small

from itm_utils.batches import PairDataset
from itm_utils.matcher import Matcher, PairBatch, length_mask

EXPORTED = exported(Matcher)
# What others build on is no model of its own.
MATCHERS = [cls for cls in EXPORTED if not any(other is not cls and issubclass(other, cls) for other in EXPORTED)]
OBJECTIVES = [
    value
    for value in exported()
    if inspect.isclass(value) and not issubclass(value, Matcher) and "__call__" in vars(value)
]


def meta_batch(pairs: PairDataset) -> PairBatch:
    return pairs[[0, 5, 9, 14]].to("meta")


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
def test_objective_on_another_device(matcher: type[Matcher], objective: type, any_pairs: PairDataset) -> None:
    model = small(matcher, 30, any_pairs.split.feature_dim).to("meta")
    loss, _ = objective()(model, meta_batch(any_pairs))
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
