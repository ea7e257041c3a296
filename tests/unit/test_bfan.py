"""BFAN: the kernel against one pair at a time in double precision, ties, and the awkward cases."""

from __future__ import annotations

import pytest
import torch
from cross_attention import check_definition, images_of, ragged, texts_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from itm_utils.errors import ItmError
from itm_utils.matcher import Images, TextBatch, Texts
from itm_utils.models.bfan import BFAN, build, focal_weights, pairwise_focal_mask, score_by_loop
from itm_utils.models.scan import SCAN
from itm_utils.scoring import score_all

FOCALS = ["equal", "prob", "none"]
SIZES = {"regions": (4, 2, 3), "words": (2, 6, 3, 3, 5)}  # a single key cannot lose to another


def one_direction(keys: Tensor, queries: Tensor, focal: str) -> Tensor:
    """The definition, written out: keys (k, d), queries (q, d) without padding; which key stays by two loops."""
    fair = keys @ queries.T  # (k, q)
    fair = torch.where(fair > 0, fair, 0.1 * fair)
    fair = fair / (fair.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-8)
    weights = (7.0 * fair).exp()
    weights = (weights / weights.sum(dim=0)).T  # (q, k)
    relevance = []
    for query, row in zip(queries, weights, strict=True):
        values = row.tolist()
        importance = [1.0 if focal == "equal" else value**0.5 for value in values]
        if focal != "none":
            margins = [sum((mine - v) * g for v, g in zip(values, importance, strict=True)) for mine in values]
            stays = torch.tensor([margin > -1e-9 for margin in margins], dtype=row.dtype)
            row = row * stays / (row * stays).sum()
        attended = row @ keys
        relevance.append((query * attended).sum() / (query.norm() * attended.norm()).clamp_min(1e-8))
    return torch.stack(relevance).mean()


def model(focal: str = "equal", **more) -> BFAN:
    return BFAN(12, 7, focal=focal, **({"temperature": 7.0, "width": 6, "word_dim": 5} | more))


@pytest.mark.parametrize("focal", FOCALS)
def test_kernel_is_the_definition_with_gradients(focal: str) -> None:
    def both_directions(regions: Tensor, words: Tensor) -> Tensor:
        return one_direction(regions, words, focal) + one_direction(words, regions, focal)

    check_definition(model(focal), both_directions, ragged(**SIZES))


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("temperature", [1.0, 9.0, 20.0])
def test_two_sums_decide_as_all_pairs_of_keys_do(focal: str, temperature: float) -> None:
    logits = torch.randn(5, 12, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.softmax(temperature / 4 * logits, dim=1)
    kept = focal_weights(weights, focal) > 0
    assert torch.equal(kept, pairwise_focal_mask(weights, focal))
    assert 0 < kept.double().mean() < 1  # the test can fail: some stay, some go
    torch.testing.assert_close(focal_weights(weights, focal), focal_weights(weights, focal, ties="drop"))


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("keys", [1, 2, 3, 7, 36])
def test_even_weights_stay_even_and_are_nan_in_the_public_code(focal: str, keys: int) -> None:
    even = torch.softmax(torch.zeros(1, keys, 2), dim=1)
    torch.testing.assert_close(focal_weights(even, focal), even)
    assert focal_weights(even, focal, ties="drop").isnan().all()


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("gap", [5.0, 20.0, 40.0, 90.0])
def test_peaked_weights_keep_their_one_key(focal: str, gap: float) -> None:
    weights = torch.softmax(torch.tensor([gap, 0.0, 0.0, -gap]), dim=0)[None, :, None]
    assert (focal_weights(weights, focal)[0, :, 0] > 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("focal", ["equal", "prob"])
def test_rounding_does_not_decide_about_ties(focal: str) -> None:
    noise = 1 + 3e-7 * torch.randn(200, 5, 1, generator=torch.Generator().manual_seed(4))
    weights = torch.softmax(torch.zeros(200, 5, 1), dim=1) * noise
    assert (focal_weights(weights, focal) > 0).all()
    assert not (focal_weights(weights, focal, ties="drop") > 0).all()


@pytest.mark.parametrize("focal", FOCALS)
def test_loop_and_blocks_agree(focal: str) -> None:
    images, matcher = Images(local=torch.randn(4, 3, 6), mask=torch.ones(4, 3, dtype=torch.bool)), model(focal)
    texts = ragged(**SIZES)[1]._map(lambda x: x.float() if x.is_floating_point() else x)
    expected = score_by_loop(images, texts, 7.0, focal)
    torch.testing.assert_close(matcher.score(images, texts).i2t, expected)
    cost = matcher.bytes_per_pair(images, texts)
    torch.testing.assert_close(score_all(matcher, images, texts, budget=3 * cost).i2t, expected)


@pytest.mark.parametrize("focal", FOCALS)
def test_attention_is_focal(focal: str) -> None:
    images, texts = ragged(**SIZES)
    attention = model(focal).attention(images, texts[:3])
    assert set(attention) == {"t2i", "i2t"}
    for found in attention.values():
        real = found.query_mask[:, :, None] & found.key_mask[:, None, :]
        assert (found.weights[real] == 0).any() == (focal != "none")


def test_one_product_serves_both_directions() -> None:
    images, texts = ragged(**SIZES)
    with FlopCounterMode(display=False) as counter:
        model().score(images, texts)
    operations = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert operations == 2 * int(images.mask.sum()) * int(texts.mask.sum()) * images.local.shape[2]


@pytest.mark.parametrize("focal", FOCALS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_scores_do_not_depend_on_the_company(focal: str, length: int) -> None:
    torch.manual_seed(5)
    matcher = BFAN(12, 7, focal=focal, width=64, word_dim=16).eval()
    images, captions = matcher.encode_images(images_of(40, 16)), texts_of([length] + [7, 4, 1, 9, 12] * 20)
    together = matcher.score(images, matcher.encode_texts(captions)).i2t
    alone = TextBatch(lengths=captions.lengths[:1], ids=captions.ids[:1], words=captions.words[:1, :length])
    for i in range(40):
        by_itself = matcher.score(images[i : i + 1], matcher.encode_texts(alone)).i2t
        torch.testing.assert_close(together[i : i + 1, :1], by_itself, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("focal", FOCALS)
def test_zero_vectors_have_scores_and_gradients(focal: str) -> None:
    images, texts = ragged(**SIZES)
    images.local[0], texts.local[1, 2], texts.local[2] = 0, 0, 0
    sides = images.local.requires_grad_(), texts.local.requires_grad_()
    scores = model(focal).score(images, texts).i2t
    scores.sum().backward()
    assert scores.isfinite().all() and all(side.grad.isfinite().all() for side in sides)


def test_without_focus_it_is_the_sum_of_two_scans() -> None:
    images, texts = ragged(**SIZES)
    both = sum(
        SCAN(12, 7, direction=d, pooling="Mean", temperature=7.0, width=6, word_dim=5).score(images, texts).i2t
        for d in ("t2i", "i2t")
    )
    torch.testing.assert_close(model("none").score(images, texts).i2t, both)


@pytest.mark.parametrize("wrong", [{"focal": "hard"}, {"ties": "toss"}])
def test_unknown_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ItmError, match=f"{next(iter(wrong))}: found .* expected one of"):
        BFAN(12, 7, **wrong)


def test_parameters_describe_the_model() -> None:
    given = {"width": 6, "word_dim": 5, "focal": "prob", "temperature": 7.0, "ties": "drop", "margin": 0.3}
    built = build(given, 12, 7)
    assert {name: built.config[name] for name in ("focal", "temperature", "ties", "width")} == {
        "focal": "prob", "temperature": 7.0, "ties": "drop", "width": 6
    }  # fmt: skip


def test_given_pairs_need_one_product_for_both_directions() -> None:
    """At a large width the affinities and the two Gram matrices are nearly all multiplications; each is formed once."""
    pairs, r, w, d = 3, 5, 4, 512
    images = Images(local=torch.randn(pairs, r, d), mask=torch.ones(pairs, r, dtype=torch.bool))
    texts = Texts(local=torch.randn(pairs, w, d), mask=torch.ones(pairs, w, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter:
        model(width=d).score_pairs(images, texts)
    once = 2 * pairs * d * (r * w + r * r + w * w)
    assert once <= counter.get_total_flops() < 2 * pairs * d * (2 * r * w + r * r + w * w)
