"""BFAN: the kernel against one pair at a time in double precision, ties, and the awkward cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts, length_mask
from itm_utils.models.bfan import BFAN, build, focal_weights, pairwise_focal_mask, score_by_loop, stages
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.scoring import score_all

FOCALS = ["equal", "prob", "none"]


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


def ragged(seed: int = 0, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three images and five captions of different sizes; what lies under the padding is not zero."""
    rng = torch.Generator().manual_seed(seed)
    regions = torch.randn(3, 4, width, generator=rng, dtype=torch.float64)
    words = torch.randn(5, 6, width, generator=rng, dtype=torch.float64)
    return regions, length_mask(torch.tensor([4, 2, 3]), 4), words, length_mask(torch.tensor([2, 6, 3, 3, 5]), 6)


def model(focal: str = "equal", **more) -> BFAN:
    return BFAN(12, 7, focal=focal, **({"temperature": 7.0, "width": 6, "word_dim": 5} | more))


@pytest.mark.parametrize("focal", FOCALS)
def test_kernel_is_the_definition_with_gradients(focal: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    spread = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for way in ("kernel", "definition"):
        v, e = regions.clone().requires_grad_(), words.clone().requires_grad_()
        if way == "kernel":
            scores = model(focal).score(Images(local=v, mask=region_mask), Texts(local=e, mask=word_mask)).i2t
        else:
            images = [v[i][region_mask[i]] for i in range(3)]
            captions = [e[c][word_mask[c]] for c in range(5)]
            rows = [
                torch.stack([one_direction(r, w, focal) + one_direction(w, r, focal) for w in captions]) for r in images
            ]
            scores = torch.stack(rows)
        (scores * spread).sum().backward()
        found.append((scores.detach(), v.grad, e.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


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
    _, _, words, word_mask = ragged()
    images = Images(local=torch.randn(4, 3, 6), mask=torch.ones(4, 3, dtype=torch.bool))
    texts, matcher = Texts(local=words.float(), mask=word_mask), model(focal)
    expected = score_by_loop(images, texts, 7.0, focal)
    torch.testing.assert_close(matcher.score(images, texts).i2t, expected)
    cost = matcher.bytes_per_pair(images, texts)
    torch.testing.assert_close(score_all(matcher, images, texts, budget=3 * cost).i2t, expected)


@pytest.mark.parametrize("focal", FOCALS)
def test_given_pairs_are_the_diagonal_and_attention_is_focal(focal: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    images = Images(local=regions, mask=region_mask)
    texts = Texts(local=words[:3].requires_grad_(), mask=word_mask[:3])
    matcher = model(focal)
    torch.testing.assert_close(matcher.score_pairs(images, texts).i2t, matcher.score(images, texts).i2t.diagonal())
    attention = matcher.attention(images, texts)
    assert set(attention) == {"t2i", "i2t"}
    for found in attention.values():
        torch.testing.assert_close(found.weights.sum(dim=2), found.query_mask.double())
        assert (found.weights[~found.key_mask[:, None, :].expand_as(found.weights)] == 0).all()
        real = found.query_mask[:, :, None] & found.key_mask[:, None, :]
        assert (found.weights[real] == 0).any() == (focal != "none")
    sum((found.weights**2).sum() for found in attention.values()).backward()
    assert texts.local.grad.isfinite().all() and texts.local.grad.abs().sum() > 0


def test_one_product_serves_both_directions() -> None:
    regions, region_mask, words, word_mask = ragged()
    with FlopCounterMode(display=False) as counter:
        model().score(Images(local=regions, mask=region_mask), Texts(local=words, mask=word_mask))
    operations = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert operations == 2 * int(region_mask.sum()) * int(word_mask.sum()) * regions.shape[2]


def batch_of(lengths: list[int]) -> TextBatch:
    words = torch.randint(4, 12, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor(lengths)
    return TextBatch(lengths=sizes, ids=torch.arange(len(lengths)), words=words * length_mask(sizes, max(lengths)))


def images_of(count: int, regions: int) -> ImageBatch:
    features = torch.randn(count, regions, 7, generator=torch.Generator().manual_seed(3))
    return ImageBatch(regions=features, mask=torch.ones(count, regions, dtype=torch.bool), ids=torch.arange(count))


@pytest.mark.parametrize("focal", FOCALS)
@pytest.mark.parametrize(
    ("images", "regions", "lengths"), [(1, 1, [1]), (1, 5, [1, 4]), (3, 1, [2, 2]), (2, 3, [1, 1, 1])]
)
def test_one_of_anything_simply_works(focal: str, images: int, regions: int, lengths: list[int]) -> None:
    matcher = model(focal)
    scores = matcher.score(
        matcher.encode_images(images_of(images, regions)), matcher.encode_texts(batch_of(lengths))
    ).i2t
    assert scores.shape == (images, len(lengths)) and scores.isfinite().all()
    scores.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in matcher.parameters())


@pytest.mark.parametrize("focal", FOCALS)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_scores_do_not_depend_on_the_company(focal: str, length: int) -> None:
    torch.manual_seed(5)
    matcher = BFAN(12, 7, focal=focal, width=64, word_dim=16).eval()
    images, captions = matcher.encode_images(images_of(40, 16)), batch_of([length] + [7, 4, 1, 9, 12] * 20)
    together = matcher.score(images, matcher.encode_texts(captions)).i2t
    alone = TextBatch(lengths=captions.lengths[:1], ids=captions.ids[:1], words=captions.words[:1, :length])
    for i in range(40):
        by_itself = matcher.score(images[i : i + 1], matcher.encode_texts(alone)).i2t
        torch.testing.assert_close(together[i : i + 1, :1], by_itself, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("focal", FOCALS)
def test_zero_vectors_have_scores_and_gradients(focal: str) -> None:
    regions, region_mask, words, word_mask = ragged()
    regions[0], words[1, 2], words[2] = 0, 0, 0
    v, e = regions.requires_grad_(), words.requires_grad_()
    scores = model(focal).score(Images(local=v, mask=region_mask), Texts(local=e, mask=word_mask)).i2t
    scores.sum().backward()
    assert scores.isfinite().all() and v.grad.isfinite().all() and e.grad.isfinite().all()


def test_without_focus_it_is_the_sum_of_two_scans() -> None:
    regions, region_mask, words, word_mask = ragged()
    images, texts = Images(local=regions, mask=region_mask), Texts(local=words, mask=word_mask)
    both = sum(
        SCAN(12, 7, direction=d, pooling="Mean", temperature=7.0, width=6, word_dim=5).score(images, texts).i2t
        for d in ("t2i", "i2t")
    )
    torch.testing.assert_close(model("none").score(images, texts).i2t, both)


@pytest.mark.parametrize("wrong", [{"focal": "hard"}, {"ties": "toss"}])
def test_unknown_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ItmError, match=f"{next(iter(wrong))}: found .* expected one of"):
        BFAN(12, 7, **wrong)


def test_parameters_describe_the_model_and_its_one_training() -> None:
    given = {"width": 6, "word_dim": 5, "focal": "prob", "temperature": 7.0, "ties": "drop", "margin": 0.3}
    given |= {"epochs": 4, "batch_size": 8, "learning_rate": 0.01, "seed": 1, "device": "cpu", "precision": "fp32"}
    given |= {"num_workers": 0, "schedule": "paper", "decay_every": 3, "warmup_epochs": 2}
    built = build(given, 12, 7)
    assert {name: built.config[name] for name in ("focal", "temperature", "ties", "width")} == {
        "focal": "prob", "temperature": 7.0, "ties": "drop", "width": 6
    }  # fmt: skip
    (stage,) = stages(given, built)
    assert stage.model is built and isinstance(stage.objective, HingeTriplet)
    assert (stage.objective.margin, stage.objective.hardest, stage.objective.warmup_epochs) == (0.3, True, 2)
    assert (stage.config.epochs, stage.config.decay_every, stage.config.schedule) == (4, 3, "step")


def test_given_pairs_need_one_product_for_both_directions() -> None:
    """At a large width the affinities and the two Gram matrices are nearly all multiplications; each is formed once."""
    pairs, r, w, d = 3, 5, 4, 512
    images = Images(local=torch.randn(pairs, r, d), mask=torch.ones(pairs, r, dtype=torch.bool))
    texts = Texts(local=torch.randn(pairs, w, d), mask=torch.ones(pairs, w, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter:
        model(width=d).score_pairs(images, texts)
    once = 2 * pairs * d * (r * w + r * r + w * w)
    assert once <= counter.get_total_flops() < 2 * pairs * d * (2 * r * w + r * r + w * w)
