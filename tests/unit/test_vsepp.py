"""VSE++: awkward inputs, its scores and its loss against slow loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, PairBatch, Scores, TextBatch
from itm_utils.models import vsepp
from itm_utils.models.vsepp import VSEPP, HingeTriplet, hinge_loss, l2_normalize, order_scores

VARIANTS = [
    {"measure": measure, "image_norm": norm, "absolute": absolute}
    for measure in ("cosine", "order")
    for norm in (True, False)
    for absolute in (False, True)
]


def build(**options) -> VSEPP:
    torch.manual_seed(0)
    return VSEPP(vocabulary_size=9, image_dim=4, width=5, word_dim=3, **options)


def images(regions: torch.Tensor, mask: torch.Tensor | None = None) -> ImageBatch:
    mask = torch.ones(regions.shape[:2], dtype=torch.bool) if mask is None else mask
    return ImageBatch(regions=regions, mask=mask, ids=torch.arange(len(regions)))


def texts(*captions: list[int]) -> TextBatch:
    width = max(map(len, captions))
    words = torch.tensor([ids + [0] * (width - len(ids)) for ids in captions])
    return TextBatch(lengths=torch.tensor([len(ids) for ids in captions]), ids=torch.arange(len(words)), words=words)


def slow_hinge(
    i2t: torch.Tensor, t2i: torch.Tensor, margin: float, hardest: bool, of: list[int] | None = None
) -> torch.Tensor:
    """One query at a time, as one would explain it on a blackboard. of: image of each pair, all different by default."""
    total = torch.zeros((), dtype=i2t.dtype)
    of = of or list(range(len(i2t)))
    for b in range(len(i2t)):
        others = [k for k in range(len(i2t)) if of[k] != of[b]]
        captions = [(margin - i2t[b, b] + i2t[b, c]).clamp(min=0) for c in others]
        pictures = [(margin - t2i[b, b] + t2i[i, b]).clamp(min=0) for i in others]
        for violations in (captions, pictures):
            total = total + (max(violations) if hardest else sum(violations))
    return total


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_hinge_is_the_slow_loop_with_its_gradients(hardest: bool, decoupled: bool) -> None:
    rng = np.random.default_rng(3)
    i2t = torch.tensor(rng.normal(scale=0.3, size=(6, 6)), requires_grad=True)
    t2i = torch.tensor(rng.normal(scale=0.3, size=(6, 6)), requires_grad=True) if decoupled else i2t
    inputs = (i2t, t2i) if decoupled else (i2t,)
    fast, slow = hinge_loss(Scores(i2t, t2i), 0.2, hardest), slow_hinge(i2t, t2i, 0.2, hardest)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(torch.autograd.grad(fast, inputs), torch.autograd.grad(slow, inputs))


@pytest.mark.parametrize("hardest", [False, True])
def test_other_captions_of_an_image_are_no_negatives_on_request(hardest: bool) -> None:
    rng = np.random.default_rng(4)
    i2t, t2i = torch.tensor(rng.normal(scale=0.3, size=(2, 6, 6)), requires_grad=True)
    of = torch.tensor([0, 1, 2, 1, 3, 1])
    fast = hinge_loss(Scores(i2t, t2i), 0.2, hardest, of[:, None] == of)
    slow = slow_hinge(i2t, t2i, 0.2, hardest, of.tolist())
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(torch.autograd.grad(fast, (i2t, t2i)), torch.autograd.grad(slow, (i2t, t2i)))


@pytest.mark.parametrize("hardest", [False, True])
def test_two_captions_of_one_image_cost_nothing_if_the_objective_counts_by_image(hardest: bool) -> None:
    """A constant score: every negative costs the margin, four times 0.2 for two pairs."""
    same = images(torch.ones(2, 1, 4))
    batch = PairBatch(replace(same, ids=torch.tensor([7, 7])), texts([1, 5, 2], [1, 5, 2]))
    by_pair, by_image = (HingeTriplet(0.2, hardest, by_image=way)(build(), batch)[0] for way in (False, True))
    assert by_pair.item() == pytest.approx(0.8) and by_image.item() == 0


def test_hinge_of_one_pair_is_zero_and_of_a_rectangle_an_error() -> None:
    assert hinge_loss(Scores.same(torch.tensor([[0.3]])), 0.2, hardest=True).item() == 0
    with pytest.raises(ItmError, match=r"\(2, 3\)"):
        hinge_loss(Scores.same(torch.zeros(2, 3)), 0.2, hardest=False)


@pytest.mark.parametrize("hardest", [False, True])
def test_collapse_costs_twice_the_margin_per_pair(hardest: bool) -> None:
    loss = hinge_loss(Scores.same(torch.full((8, 8), 0.7)), 0.2, hardest)
    torch.testing.assert_close(loss, torch.tensor(8 * 2 * 0.2 * (1 if hardest else 7)))


def test_warm_up_switches_from_all_negatives_to_the_hardest(toy_pairs: PairDataset) -> None:
    torch.manual_seed(0)
    model = VSEPP(30, toy_pairs.split.feature_dim, width=8, word_dim=8)
    batch = toy_pairs[[0, 5, 10, 15]]
    objective = HingeTriplet(warmup_epochs=2)
    everything = HingeTriplet(hardest=False)(model, batch)[0]
    hardest = HingeTriplet()(model, batch)[0]
    assert everything > hardest
    for epoch, expected in ((0, everything), (1, everything), (2, hardest), (7, hardest), (0, everything)):
        objective.set_epoch(epoch)
        loss, logs = objective(model, batch)
        assert loss == expected
        assert logs == {"hardest": float(epoch >= 2)}
    never = HingeTriplet(hardest=False, warmup_epochs=1)
    never.set_epoch(5)
    assert never(model, batch)[0] == everything


def test_objective_adds_a_models_own_terms(toy_pairs: PairDataset) -> None:
    class WithTerm(VSEPP):
        def extra_losses(self, images, texts, batch):
            return {"own": torch.tensor(10.0)}

    torch.manual_seed(0)
    model = WithTerm(30, toy_pairs.split.feature_dim, width=8, word_dim=8)
    batch = toy_pairs[[0, 5]]
    with_term = HingeTriplet()(model, batch)[0]
    model.__class__ = VSEPP
    torch.testing.assert_close(with_term, HingeTriplet()(model, batch)[0] + 10)


@pytest.mark.parametrize("chunk", [1, 40, 2**24])
def test_order_scores_are_the_loop(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vsepp, "ORDER_CHUNK", chunk)
    rng = np.random.default_rng(0)
    pictures = torch.tensor(rng.normal(size=(5, 4)), requires_grad=True)
    captions = torch.tensor(rng.normal(size=(7, 4)), requires_grad=True)
    slow = torch.stack([torch.stack([-((c - i).clamp(min=0) ** 2).sum().sqrt() for c in captions]) for i in pictures])
    fast = order_scores(pictures, captions)
    torch.testing.assert_close(fast, slow)
    weights = torch.tensor(rng.normal(size=(5, 7)))
    ours = torch.autograd.grad((fast * weights).sum(), (pictures, captions))
    theirs = torch.autograd.grad((slow * weights).sum(), (pictures, captions))
    torch.testing.assert_close(ours, theirs)


def test_order_is_best_at_zero_and_its_gradient_exists_there() -> None:
    pictures = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    captions = torch.tensor([[0.5, 1.0], [0.0, 0.0]], requires_grad=True)
    scores = order_scores(pictures, captions)
    assert scores[0].tolist() == [0.0, 0.0]
    assert scores[1, 0] < 0
    scores.sum().backward()
    assert pictures.grad.isfinite().all()
    assert captions.grad.isfinite().all()


def test_l2_normalize_leaves_zero_alone() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    normalized = l2_normalize(vectors)
    torch.testing.assert_close(normalized, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    normalized.sum().backward()
    assert vectors.grad.isfinite().all()
    assert vectors.grad.abs().max() <= 1


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_awkward_inputs_give_numbers(options: dict) -> None:
    model = build(**options)
    with_zeros = torch.cat([torch.zeros(1, 3, 4), torch.randn(2, 3, 4)])
    captions = texts([4], [3, 3, 3, 3, 3], [1, 5, 2])  # one word; only unknown words
    encoded = model.encode_images(images(with_zeros)), model.encode_texts(captions)
    scores = model.score(*encoded)
    assert scores.i2t.shape == (3, 3)
    assert scores.i2t.isfinite().all()
    torch.testing.assert_close(model.score_pairs(*encoded).t2i, scores.t2i.diagonal())
    hinge_loss(scores, 0.2, hardest=True).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    one = model.score(model.encode_images(images(with_zeros[1:2])), model.encode_texts(captions[:1]))
    torch.testing.assert_close(one.i2t, scores.i2t[1:2, :1])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_neighbours_order_and_padding_change_nothing(options: dict) -> None:
    model = build(**options)
    pictures = images(torch.randn(4, 3, 4))
    captions = texts([1, 4, 2], [1, 2], [1, 4, 5, 6, 7, 8, 2], [1, 5, 5, 2])
    together = model.score(model.encode_images(pictures), model.encode_texts(captions)).i2t
    turn = torch.tensor([2, 0, 3, 1])
    turned = model.score(model.encode_images(pictures[turn]), model.encode_texts(captions[turn])).i2t
    torch.testing.assert_close(turned, together[turn][:, turn])
    for c in range(4):
        length = int(captions.lengths[c])
        alone = replace(captions[c : c + 1], words=captions.words[c : c + 1, :length])
        other_padding = replace(alone, words=torch.cat([alone.words, torch.full((1, 3), 8)], dim=1))
        for one in (alone, other_padding):
            column = model.score(model.encode_images(pictures), model.encode_texts(one)).i2t[:, 0]
            torch.testing.assert_close(column, together[:, c])


def test_masked_regions_do_not_count() -> None:
    model = build()
    regions = torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    pooled = model.encode_images(images(regions, mask)).pooled
    torch.testing.assert_close(pooled[1], model.encode_images(images(regions[1:, :1])).pooled[0])
    torch.testing.assert_close(pooled[0], model.encode_images(images(regions[:1, :2])).pooled[0])


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = VSEPP(vocabulary_size=500, image_dim=60, width=40, word_dim=20)
    bound = (6 / 100) ** 0.5
    assert 0.95 * bound < model.image_proj.weight.abs().max() <= bound
    assert not model.image_proj.bias.any()
    assert 0.095 < model.text_encoder.word_embedding.weight.abs().max() <= 0.1
    assert model.text_encoder.word_embedding.weight[0].any()  # the padding row is drawn like the others
