"""SCAN: the kernel against one pair at a time, in double precision, for every option; and the awkward cases."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from cross_attention import check_definition, images_of, ragged, texts_of
from torch import Tensor

from itm_utils import fast_attention
from itm_utils.errors import ItmError
from itm_utils.matcher import Images, TextBatch, Texts
from itm_utils.models.scan import FIRST_NORMS, POOLINGS, SCAN, score_by_loop
from itm_utils.scoring import score_all

OPTIONS = list(itertools.product(("t2i", "i2t"), FIRST_NORMS, POOLINGS))


def one_pair(regions: Tensor, words: Tensor, direction: str, first_norm: str, pooling: str) -> Tensor:
    """The definition, written out: regions (r, d), words (w, d) without padding."""
    keys, queries = (regions, words) if direction == "t2i" else (words, regions)
    normalized = keys @ queries.T  # (k, q)
    if first_norm.startswith("clipped"):
        normalized = torch.where(normalized > 0, normalized, 0.1 * normalized)
    if first_norm == "softmax":
        normalized = normalized.exp() / normalized.exp().sum(dim=1, keepdim=True)
    elif first_norm.endswith("l2norm"):
        normalized = normalized / (normalized.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-8)
    elif first_norm.endswith("l1norm"):
        normalized = normalized / (normalized.abs().sum(dim=1, keepdim=True) + 1e-8)
    weights = (7.0 * normalized).exp()
    attended = (weights / weights.sum(dim=0)).T @ keys  # (q, d)
    relevance = (queries * attended).sum(dim=1) / (queries.norm(dim=1) * attended.norm(dim=1)).clamp_min(1e-8)
    pooled = {
        "LogSumExp": (5.0 * relevance).exp().sum().log() / 5.0,
        "Mean": relevance.mean(),
        "Max": relevance.max(),
        "Sum": relevance.sum(),
    }
    return pooled[pooling]


def model(direction: str = "t2i", first_norm: str = "clipped_l2norm", pooling: str = "LogSumExp", **more) -> SCAN:
    settings = {"temperature": 7.0, "lse": 5.0, "width": 6, "word_dim": 5} | more
    return SCAN(12, 7, direction=direction, first_norm=first_norm, pooling=pooling, **settings)


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_kernel_is_the_definition_with_gradients(direction: str, first_norm: str, pooling: str) -> None:
    given = {"direction": direction, "first_norm": first_norm, "pooling": pooling}
    check_definition(model(**given), partial(one_pair, **given), ragged())


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("tile", [1, 50, 2**20])
def test_loop_tiles_and_blocks_agree(direction: str, tile: int, monkeypatch) -> None:
    monkeypatch.setitem(fast_attention.TILE, "cpu", tile)
    images = Images(local=torch.randn(4, 3, 6), mask=torch.ones(4, 3, dtype=torch.bool))
    texts = ragged()[1]._map(lambda x: x.float() if x.is_floating_point() else x)
    matcher = model(direction)
    expected = score_by_loop(images, texts, direction, "clipped_l2norm", 7.0, "LogSumExp", 5.0)
    torch.testing.assert_close(matcher.score(images, texts).i2t, expected)
    cost = matcher.bytes_per_pair(images, texts)
    torch.testing.assert_close(score_all(matcher, images, texts, budget=3 * cost).i2t, expected)


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_masks_with_holes_are_those_without(direction: str, first_norm: str, pooling: str) -> None:
    """All pairs and given ones; with lengths, without them, and with real words scattered among padding."""
    images, texts = ragged()
    texts = texts[2:]
    scattered = torch.randperm(6, generator=torch.Generator().manual_seed(4))
    holes = Texts(local=texts.local[:, scattered], mask=texts.mask[:, scattered])
    known = Texts(local=texts.local, mask=texts.mask, lengths=texts.mask.sum(dim=1))
    assert not holes.mask.sort(dim=1, descending=True).values.equal(holes.mask)  # there are holes
    matcher = model(direction, first_norm, pooling)
    expected = matcher.score(images, texts).i2t
    for side in (holes, known):
        torch.testing.assert_close(matcher.score(images, side).i2t, expected)
        torch.testing.assert_close(matcher.score_pairs(images, side).i2t, expected.diagonal())


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_scores_do_not_depend_on_the_company(direction: str, first_norm: str, pooling: str) -> None:
    matcher = model(direction, first_norm, pooling).eval()
    images, texts = matcher.encode_images(images_of(3)), texts_of([2, 7, 4])
    together = matcher.score(images, matcher.encode_texts(texts)).i2t
    alone = TextBatch(lengths=texts.lengths[:1], ids=texts.ids[:1], words=texts.words[:1, :2])
    by_itself = matcher.score(images[1:2], matcher.encode_texts(alone)).i2t
    torch.testing.assert_close(together[1:2, :1], by_itself, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("first_norm", FIRST_NORMS)
def test_zero_vectors_have_scores_and_gradients(direction: str, first_norm: str) -> None:
    images, texts = ragged()
    images.local[0], texts.local[1, 2] = 0, 0
    sides = images.local.requires_grad_(), texts.local.requires_grad_()
    scores = model(direction, first_norm).score(images, texts).i2t
    scores.sum().backward()
    assert scores.isfinite().all() and all(side.grad.isfinite().all() for side in sides)


def test_large_logits_do_not_overflow() -> None:
    matcher = model(first_norm="no_norm", temperature=100.0, lse=500.0)
    images = Images(local=30 * torch.randn(2, 3, 6), mask=torch.ones(2, 3, dtype=torch.bool))
    texts = Texts(local=30 * torch.randn(2, 4, 6), mask=torch.ones(2, 4, dtype=torch.bool))
    assert matcher.score(images, texts).i2t.isfinite().all()


@pytest.mark.parametrize("wrong", [{"direction": "both"}, {"first_norm": "l3norm"}, {"pooling": "Median"}])
def test_unknown_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ItmError, match=f"{next(iter(wrong))}: found .* expected one of"):
        SCAN(12, 7, **wrong)


def test_an_item_without_anything_is_refused() -> None:
    images = Images(local=torch.zeros(1, 2, 6), mask=torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ItmError, match="without regions or words"):
        model().score(images, Texts(local=torch.zeros(1, 2, 6), mask=torch.ones(1, 2, dtype=torch.bool)))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_half_precision_encoders_do_not_blur_the_attention(direction: str) -> None:
    matcher = model(direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images, texts = matcher.encode_images(images_of(3)), matcher.encode_texts(texts_of([2, 5, 3]))
        scores, pairs = matcher.score(images, texts).i2t, matcher.score_pairs(images, texts).i2t
        found = matcher.attention(images, texts)[direction]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(pairs, scores.diagonal())
    torch.testing.assert_close(found.weights.sum(dim=2), found.query_mask.float())
