"""BFAN: the kernel against one pair at a time in double precision, ties, and the awkward cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts, length_mask
from itm_utils.models import bfan
from itm_utils.models.bfan import BFAN, kept_as_published, refocus, score_by_loop
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
        worth = [1.0 if focal == "equal" else value**0.5 for value in values]
        if focal != "none":
            margins = [sum((mine - v) * g for v, g in zip(values, worth, strict=True)) for mine in values]
            stays = torch.tensor([margin > -1e-9 for margin in margins], dtype=row.dtype)
            row = row * stays / (row * stays).sum()
        found = row @ keys
        relevance.append((query * found).sum() / (query.norm() * found.norm()).clamp_min(1e-8))
    return torch.stack(relevance).mean()


def ragged(seed: int = 0, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three pictures and five sentences of different sizes; what lies under the padding is not zero."""
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
            pictures = [v[i][region_mask[i]] for i in range(3)]
            sentences = [e[c][word_mask[c]] for c in range(5)]
            rows = [
                torch.stack([one_direction(r, w, focal) + one_direction(w, r, focal) for w in sentences])
                for r in pictures
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
    kept = refocus(weights, focal) > 0
    assert torch.equal(kept, kept_as_published(weights, focal))
    assert 0 < kept.double().mean() < 1  # the test can fail: some stay, some go
    torch.testing.assert_close(refocus(weights, focal), refocus(weights, focal, ties="drop"))


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("keys", [1, 2, 3, 7, 36])
def test_an_even_look_stays_even_and_is_nothing_in_the_public_code(focal: str, keys: int) -> None:
    even = torch.softmax(torch.zeros(1, keys, 2), dim=1)
    torch.testing.assert_close(refocus(even, focal), even)
    assert refocus(even, focal, ties="drop").isnan().all()


@pytest.mark.parametrize("focal", ["equal", "prob"])
@pytest.mark.parametrize("gap", [5.0, 20.0, 40.0, 90.0])
def test_a_very_decided_look_keeps_its_one_key(focal: str, gap: float) -> None:
    weights = torch.softmax(torch.tensor([gap, 0.0, 0.0, -gap]), dim=0)[None, :, None]
    assert (refocus(weights, focal)[0, :, 0] > 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("focal", ["equal", "prob"])
def test_rounding_does_not_decide_about_ties(focal: str) -> None:
    noise = 1 + 3e-7 * torch.randn(200, 5, 1, generator=torch.Generator().manual_seed(4))
    weights = torch.softmax(torch.zeros(200, 5, 1), dim=1) * noise
    assert (refocus(weights, focal) > 0).all()
    assert not (refocus(weights, focal, ties="drop") > 0).all()


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
    pictures, sentences = matcher.encode_images(images_of(40, 16)), batch_of([length] + [7, 4, 1, 9, 12] * 20)
    together = matcher.score(pictures, matcher.encode_texts(sentences)).i2t
    alone = TextBatch(lengths=sentences.lengths[:1], ids=sentences.ids[:1], words=sentences.words[:1, :length])
    for i in range(40):
        by_itself = matcher.score(pictures[i : i + 1], matcher.encode_texts(alone)).i2t
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
        bfan.scan.SCAN(12, 7, direction=d, pooling="Mean", temperature=7.0, width=6, word_dim=5)
        .score(images, texts)
        .i2t
        for d in ("t2i", "i2t")
    )
    torch.testing.assert_close(model("none").score(images, texts).i2t, both)


@pytest.mark.parametrize("wrong", [{"focal": "hard"}, {"ties": "toss"}])
def test_unknown_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ItmError, match=f"{next(iter(wrong))}: found .* expected one of"):
        BFAN(12, 7, **wrong)


PUBLIC = {
    "vocab_size": 12,
    "img_dim": 7,
    "embed_size": 6,
    "word_dim": 5,
    "num_layers": 1,
    "lambda_softmax": 9.0,
    "focal_type": "prob",
    "no_imgnorm": False,
    "no_txtnorm": True,
    "precomp_enc_type": "basic",
}


def public_weights() -> dict[str, Tensor]:
    names = {"region_proj": "img_enc.fc", "word_embedding": "txt_enc.embed", "gru": "txt_enc.rnn"}
    return {
        name.replace(ours, public): tensor
        for name, tensor in model().state_dict().items()
        for ours, public in names.items()
        if name.startswith(ours + ".")
    }


def test_public_weights_and_options_load() -> None:
    loaded = BFAN.from_public(public_weights(), PUBLIC)
    assert (loaded.config["focal"], loaded.config["temperature"], loaded.config["ties"]) == ("prob", 9.0, "keep")
    assert loaded.gru.bidirectional and not loaded.config["text_norm"]
    assert BFAN(**loaded.config).config == loaded.config  # a checkpoint can be built again
    assert BFAN.from_public(public_weights(), PUBLIC | {"ties": "drop"}).config["ties"] == "drop"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precomp_enc_type": "attention"}, "precomp_enc_type"),
        ({"embed_size": 8}, "shape"),
        ({"focal_type": "x"}, "focal"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        BFAN.from_public(public_weights(), PUBLIC | change)


@pytest.mark.parametrize("missing", ["focal_type", "lambda_softmax"])
def test_missing_options_are_refused(missing: str) -> None:
    with pytest.raises(ItmError, match=f"no {missing}"):
        BFAN.from_public(public_weights(), {k: v for k, v in PUBLIC.items() if k != missing})
