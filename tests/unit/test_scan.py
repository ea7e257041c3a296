"""SCAN: the kernel against one pair at a time, in double precision, for every option; and the awkward cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts, length_mask
from itm_utils.models import scan
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


def ragged(seed: int = 0, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three images and five captions of different sizes; padding is not zero."""
    rng = torch.Generator().manual_seed(seed)
    regions = torch.randn(3, 4, width, generator=rng, dtype=torch.float64)
    words = torch.randn(5, 6, width, generator=rng, dtype=torch.float64)
    return (
        regions,
        length_mask(torch.tensor([4, 2, 1]), 4),
        words,
        length_mask(torch.tensor([1, 6, 3, 3, 5]), 6),
    )


def model(direction: str = "t2i", first_norm: str = "clipped_l2norm", pooling: str = "LogSumExp", **more) -> SCAN:
    settings = {"temperature": 7.0, "lse": 5.0, "width": 6, "word_dim": 5} | more
    return SCAN(12, 7, direction=direction, first_norm=first_norm, pooling=pooling, **settings)


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_kernel_is_the_definition_with_gradients(direction: str, first_norm: str, pooling: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    matcher = model(direction, first_norm, pooling)
    spread = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    for way in ("kernel", "definition"):
        v, e = regions.clone().requires_grad_(), words.clone().requires_grad_()
        if way == "kernel":
            scores = matcher.score(Images(local=v, mask=region_mask), Texts(local=e, mask=word_mask)).i2t
        else:
            rows = [
                [one_pair(v[i][region_mask[i]], e[c][word_mask[c]], direction, first_norm, pooling) for c in range(5)]
                for i in range(3)
            ]
            scores = torch.stack([torch.stack(row) for row in rows])
        (scores * spread).sum().backward()
        gradients.append((scores.detach(), v.grad, e.grad))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("tile", [1, 50, 2**20])
def test_loop_tiles_and_blocks_agree(direction: str, tile: int, monkeypatch) -> None:
    monkeypatch.setitem(scan.TILE, "cpu", tile)
    _, _, words, word_mask = ragged()
    images = Images(local=torch.randn(4, 3, 6), mask=torch.ones(4, 3, dtype=torch.bool))
    texts = Texts(local=words.float(), mask=word_mask)
    matcher = model(direction)
    expected = score_by_loop(images, texts, direction, "clipped_l2norm", 7.0, "LogSumExp", 5.0)
    torch.testing.assert_close(matcher.score(images, texts).i2t, expected)
    cost = matcher.bytes_per_pair(images, texts)
    torch.testing.assert_close(score_all(matcher, images, texts, budget=3 * cost).i2t, expected)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_given_pairs_are_the_diagonal_and_attention_sums_to_one(direction: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    images = Images(local=regions, mask=region_mask)
    texts = Texts(local=words[:3].requires_grad_(), mask=word_mask[:3])
    matcher = model(direction)
    torch.testing.assert_close(matcher.score_pairs(images, texts).i2t, matcher.score(images, texts).i2t.diagonal())
    found = matcher.attention(images, texts)[direction]
    assert found.weights.shape == (3, found.query_mask.shape[1], found.key_mask.shape[1])
    torch.testing.assert_close(found.weights.sum(dim=2), found.query_mask.double())
    assert (found.weights[~found.key_mask[:, None, :].expand_as(found.weights)] == 0).all()
    (found.weights**2).sum().backward()
    assert texts.local.grad.isfinite().all() and texts.local.grad.abs().sum() > 0


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_masks_with_holes_are_those_without(direction: str, first_norm: str, pooling: str) -> None:
    """All pairs and given ones; with lengths, without them, and with real words scattered among padding."""
    regions, region_mask, words, word_mask = ragged()
    images, texts = Images(local=regions, mask=region_mask), Texts(local=words[2:], mask=word_mask[2:])
    scattered = torch.randperm(6, generator=torch.Generator().manual_seed(4))
    holes = Texts(local=texts.local[:, scattered], mask=texts.mask[:, scattered])
    known = Texts(local=texts.local, mask=texts.mask, lengths=texts.mask.sum(dim=1))
    assert not holes.mask.sort(dim=1, descending=True).values.equal(holes.mask)  # there are holes
    matcher = model(direction, first_norm, pooling)
    expected = matcher.score(images, texts).i2t
    for side in (holes, known):
        torch.testing.assert_close(matcher.score(images, side).i2t, expected)
        torch.testing.assert_close(matcher.score_pairs(images, side).i2t, expected.diagonal())


def batch_of(lengths: list[int], seed: int = 0) -> TextBatch:
    words = torch.randint(4, 12, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    sizes = torch.tensor(lengths)
    return TextBatch(lengths=sizes, ids=torch.arange(len(lengths)), words=words * length_mask(sizes, max(lengths)))


def images_of(count: int, regions: int) -> ImageBatch:
    features = torch.randn(count, regions, 7, generator=torch.Generator().manual_seed(3))
    return ImageBatch(regions=features, mask=torch.ones(count, regions, dtype=torch.bool), ids=torch.arange(count))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize(
    ("images", "regions", "lengths"), [(1, 1, [1]), (1, 5, [1, 4]), (3, 1, [2, 2]), (2, 3, [1, 1, 1])]
)
def test_one_of_anything_simply_works(direction: str, images: int, regions: int, lengths: list[int]) -> None:
    matcher = model(direction)
    scores = matcher.score(
        matcher.encode_images(images_of(images, regions)), matcher.encode_texts(batch_of(lengths))
    ).i2t
    assert scores.shape == (images, len(lengths)) and scores.isfinite().all()
    scores.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in matcher.parameters())


@pytest.mark.parametrize(("direction", "first_norm", "pooling"), OPTIONS)
def test_scores_do_not_depend_on_the_company(direction: str, first_norm: str, pooling: str) -> None:
    matcher = model(direction, first_norm, pooling).eval()
    images, texts = matcher.encode_images(images_of(3, 4)), batch_of([2, 7, 4])
    together = matcher.score(images, matcher.encode_texts(texts)).i2t
    alone = TextBatch(lengths=texts.lengths[:1], ids=texts.ids[:1], words=texts.words[:1, :2])
    by_itself = matcher.score(images[1:2], matcher.encode_texts(alone)).i2t
    torch.testing.assert_close(together[1:2, :1], by_itself, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("first_norm", FIRST_NORMS)
def test_zero_vectors_have_scores_and_gradients(direction: str, first_norm: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    regions[0] = 0
    words[1, 2] = 0
    v, e = regions.requires_grad_(), words.requires_grad_()
    scores = model(direction, first_norm).score(Images(local=v, mask=region_mask), Texts(local=e, mask=word_mask)).i2t
    scores.sum().backward()
    assert scores.isfinite().all() and v.grad.isfinite().all() and e.grad.isfinite().all()


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
        images, texts = matcher.encode_images(images_of(3, 4)), matcher.encode_texts(batch_of([2, 5, 3]))
        scores, pairs = matcher.score(images, texts).i2t, matcher.score_pairs(images, texts).i2t
        found = matcher.attention(images, texts)[direction]
    assert scores.dtype == torch.float32
    torch.testing.assert_close(pairs, scores.diagonal())
    torch.testing.assert_close(found.weights.sum(dim=2), found.query_mask.float())
