"""AOQ: every loss as loops in double precision, equation 6 by finite differences, masks, the objective, the analysis."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from notebook_cells import cells_of, run_cells
from torch import Tensor

from itm_lab.evidence import tables
from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.tables import learning_curves, published_text
from itm_lab.experiments.choice import chosen_setting
from itm_lab.experiments.experiment_files import read_experiments, read_select
from itm_lab.publish.ledger_pages import page, variant_of
from itm_lab.records import offline_negatives
from itm_lab.records.offline_negatives import (
    STEPS,
    TURNS,
    cross_ranks,
    cross_shares,
    curve_numbers,
    dev_curves,
    epochs_to,
    false_shares,
    held_out_anchors,
    mean_positive_score,
    online_curves,
    online_ranks,
    score_gaps,
    seconds_of_steps,
    step_ratios,
)
from itm_lab.records.parameters import declared_parameters
from itm_lab.records.receipts import make_receipt, write_receipt
from itm_lab.records.rules import comparisons
from itm_lab.teaching.figures import method_colour
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, Matcher, OfflineNegatives, PairBatch, Scores, TextBatch
from itm_utils.models import aoq
from itm_utils.models.aoq import (
    KINDS,
    AnchorScores,
    LossConfig,
    OfflineLoss,
    OfflineScores,
    adaptive_weight,
    anchor_loss,
    build,
    build_miner,
    gather_scores,
    hardest_negatives,
    loss_statistics,
    offline_loss,
    stages,
)
from itm_utils.models.bfan import BFAN
from itm_utils.models.mmca import MMCA, HardNegativeTripletLoss
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import VSEPP, HingeTriplet, hinge_loss
from itm_utils.models.vsrn import VSRN
from itm_utils.training.loop import TrainConfig, _described

ROOT = Path(__file__).resolve().parents[2]
EXACT = {"rtol": 1e-9, "atol": 1e-11}
IDS = torch.tensor([0, 1, 2, 1, 3, 3])  # two images stand twice in the batch
# What the chapter teaches with and does not export.
chapter = run_cells("10_aoq", ("luck", "equation-6"), vars(aoq))
GIVEN = {"margin": 0.3, "offline_margin": 0.05, "alpha": 0.4, "beta": 1.2}


# ---------------------------------------------------------------- losses, by loops


def draws(seed: int = 0) -> tuple[Scores, OfflineScores]:
    """A decoupled square of scores and the four offline vectors, in double precision, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    size = len(IDS)
    squares = [torch.rand(size, size, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    # up to 1.6: some weights are negative before an open hinge
    vectors = [(1.6 * torch.rand(size, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(4)]
    return Scores(*squares), OfflineScores(*vectors)


def batch_loss(scores: Scores, positive: Tensor, offline: OfflineScores | None, **settings) -> Tensor:
    """The loss of a batch from all its scores (b, b)."""
    config = LossConfig(**settings)
    return offline_loss(gather_scores(scores, positive, offline, config), config)


def loss_by_loop(
    scores: Scores, offline: OfflineScores, ids: Tensor, kind: str, margin: float, offline_margin: float, alpha: float,
    beta: float, weigh_by: str = "offline", detach: bool = False, clamp: bool = False, squared: bool = False,
) -> Tensor:  # fmt: skip
    """One pair after the other, one term after the other."""
    total = torch.zeros((), dtype=torch.float64)

    def hinge(margin: float, positive: Tensor, negative: Tensor) -> Tensor:
        violation = margin - positive + negative
        violation = violation if violation > 0 else violation * 0
        return violation * violation if squared else violation

    for b in range(len(ids)):
        negatives = [n for n in range(len(ids)) if ids[n] != ids[b]]
        c_on = max(negatives, key=lambda n: scores.i2t[b, n].item())
        i_on = max(negatives, key=lambda n: scores.t2i[n, b].item())
        match = bool(ids[i_on] == ids[c_on])
        sides = [
            (scores.i2t[b, b], scores.i2t[b, c_on], offline.caption[b], offline.first[b], scores.i2t[i_on, c_on]),
            (scores.t2i[b, b], scores.t2i[i_on, b], offline.image[b], offline.second[b], scores.t2i[c_on, i_on]),
        ]
        for positive, online, off, derived, derived_online in sides:
            weight = torch.ones((), dtype=torch.float64)
            if kind == "AdapOffQuin":
                weight = beta - ((off if weigh_by == "offline" else positive) - online) / alpha
                weight = weight * 0 if clamp and weight < 0 else weight
                weight = weight.detach() if detach else weight
            if kind != "OnlyOffline":
                total = total + weight * hinge(margin, positive, online)
            if kind != "online":
                total = total + hinge(offline_margin, positive, off)
            if kind in ("OffQuin", "AdapOffQuin", "OnlyOffline"):
                total = total + hinge(offline_margin, positive, derived)
            if kind == "OnlineQuin" and not match:
                total = total + hinge(offline_margin, positive, derived_online)
    return total


def gradients(value: Tensor, scores: Scores, offline: OfflineScores) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, [scores.i2t, scores.t2i, *offline], materialize_grads=True)


SETTINGS = [{"kind": kind} for kind in KINDS] + [
    {"kind": "AdapOffQuin", **more}
    for more in (
        {"weigh_by": "positive"},
        {"detach": True},
        {"clamp": True},
        {"squared": True},
        {"detach": True, "clamp": True, "squared": True},
        {"weigh_by": "positive", "detach": True},
    )
]


@pytest.mark.parametrize("ids", [IDS, torch.arange(len(IDS))], ids=["by image", "diagonal"])
@pytest.mark.parametrize("settings", [*SETTINGS, {"kind": "OnlineQuin", "squared": True}], ids=str)
def test_every_loss_is_its_loop_with_all_gradients(settings: dict, ids: Tensor) -> None:
    same = ids[:, None] == ids
    for seed in range(4):
        scores, offline = draws(seed)
        expected = loss_by_loop(scores, offline, ids, **GIVEN, **settings)
        found = batch_loss(scores, same, offline, **GIVEN, **settings)
        torch.testing.assert_close(found, expected, **EXACT)
        pairs = zip(gradients(found, scores, offline), gradients(expected, scores, offline), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, **EXACT)


def test_the_settings_are_all_different_losses() -> None:
    scores, offline = draws()
    same = IDS[:, None] == IDS
    values = [batch_loss(scores, same, offline, **GIVEN, **s).item() for s in SETTINGS]
    different = {round(value, 9) for value in values}
    assert len(different) == len(values) - 2  # what is detached differs in its gradients alone


def test_online_is_the_hardest_hinge_of_chapter_01() -> None:
    scores, _ = draws()
    same = torch.eye(len(IDS), dtype=torch.bool)
    found = batch_loss(scores, same, None, kind="online", margin=0.3)
    torch.testing.assert_close(found, hinge_loss(scores, 0.3, hardest=True), **EXACT)


def test_flat_weights_give_equation_4() -> None:
    scores, offline = draws()
    same = IDS[:, None] == IDS
    flat = batch_loss(scores, same, offline, alpha=1e12, beta=1.0)
    torch.testing.assert_close(flat, batch_loss(scores, same, offline, kind="OffQuin"), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- equation 6


def random_anchors(count: int = 2000) -> AnchorScores:
    """Anchors away from the kinks of their hinges."""
    values = torch.rand(4, count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kinks = [0.2 - values[0] + values[1], values[2] - values[0], values[3] - values[0]]
    return AnchorScores(*values[:, torch.stack(kinks).abs().amin(dim=0) > 1e-3])


@pytest.mark.parametrize("place", range(4), ids=AnchorScores._fields)
def test_equation_6_by_finite_differences_and_by_autograd(place: int) -> None:
    anchors, config, step = random_anchors(), LossConfig(), 1e-5
    name = AnchorScores._fields[place]
    claimed = chapter.equation_6(anchors, config)[place]
    up, down = (anchor_loss(anchors._replace(**{name: anchors[place] + sign * step}), config) for sign in (1, -1))
    torch.testing.assert_close((up - down) / (2 * step), claimed, rtol=0, atol=1e-7)
    moving = anchors[place].clone().requires_grad_()
    automatic = torch.autograd.grad(anchor_loss(anchors._replace(**{name: moving}), config).sum(), moving)[0]
    torch.testing.assert_close(automatic, claimed, **EXACT)
    if name != "derived":  # the weight takes part: detached, the gradients are others
        detached = anchor_loss(anchors._replace(**{name: moving}), LossConfig(detach=True)).sum()
        assert not torch.allclose(torch.autograd.grad(detached, moving)[0], claimed) or name == "positive"


def test_where_the_chapter_disagrees_with_the_papers_text() -> None:
    def at(positive: float, online: float, offline: float) -> AnchorScores:
        scores = (torch.tensor([x], dtype=torch.float64) for x in (positive, online, offline, -1))
        return chapter.equation_6(AnchorScores(*scores), LossConfig())

    assert at(0.6, 0.6, 0.8).offline.item() == pytest.approx(1 - 0.2 / 0.3)  # not neutral where both score alike
    assert at(0.6, 0.7, 0.8).offline.item() == pytest.approx(0)
    assert at(0.6, 0.5, 0.5).offline.item() < 0  # pulled up below the positive pair
    pushes = [at(0.6, online, 0.8).online.item() for online in (0.5, 0.6, 0.7, 0.8, 0.9)]
    assert np.allclose(np.diff(pushes), 2 * 0.1 / 0.3)  # linear: no peak near the mean
    assert at(0.6, 0.41, 0.9).online.item() < 0  # a negative weight pulls the online pair up


# ---------------------------------------------------------------- batches without negatives


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_negatives_has_no_online_terms(kind: str) -> None:
    scores, offline = draws()
    same = torch.ones(6, 6, dtype=torch.bool)
    found = batch_loss(scores, same, offline, kind=kind)
    expected = batch_loss(scores, same, offline, kind="OnlyOffline")
    if kind in ("OffTri", "OnlineQuin"):
        hinges = (offline.caption - scores.i2t.diagonal()).relu() + (offline.image - scores.t2i.diagonal()).relu()
        expected = hinges.sum()
    elif kind == "online":
        expected = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(found, expected, **EXACT)
    assert all(gradient.isfinite().all() for gradient in gradients(found + 0 * scores.i2t.sum(), scores, offline))


def test_the_hardest_negative_is_never_of_the_same_image() -> None:
    square = torch.zeros(6, 6)
    square[1, 3] = square[3, 1] = 9.0  # another caption of the same image
    square[1, 4], square[5, 3] = 1.0, 2.0
    captions, images = hardest_negatives(Scores.same(square), IDS[:, None] == IDS)
    assert captions[1] == 4 and images[3] == 5
    captions, images = hardest_negatives(Scores.same(square), torch.eye(6, dtype=torch.bool))
    assert captions[1] == 3 and images[3] == 1


# ---------------------------------------------------------------- the objective with real matchers


def pair_batch(seed: int, ids: Tensor, token_dim: int = 0, longest: int = 5) -> PairBatch:
    generator = torch.Generator().manual_seed(seed)
    size = len(ids)
    regions = torch.randn(size, 4, 6, generator=generator, dtype=torch.float64)
    images = ImageBatch(regions, torch.ones(size, 4, dtype=torch.bool), ids)
    lengths = torch.randint(2, longest + 1, (size,), generator=generator)
    lengths[0] = longest
    words = torch.randint(1, 20, (size, longest), generator=generator)
    texts = TextBatch(lengths, torch.arange(size), words * (torch.arange(longest) < lengths[:, None]))
    if token_dim:
        states = torch.randn(size, longest, token_dim, generator=generator, dtype=torch.float64)
        texts = replace(texts, words=None, features=states)
    return PairBatch(images, texts)


def whole_batch(token_dim: int = 0) -> PairBatch:
    """Positive pairs, and both sets of offline negatives with captions of other lengths."""
    parts = [
        pair_batch(n, ids, token_dim, longest) for n, ids, longest in ((1, IDS, 5), (2, IDS + 7, 7), (3, IDS + 9, 4))
    ]
    return replace(parts[0], offline=OfflineNegatives(*parts[1:]))


def vsrn(**more) -> VSRN:
    torch.manual_seed(5)
    small = {"width": 8, "word_dim": 5, "caption_width": 6, "caption_word_dim": 4, "caption_dropout": 0.0, "max_len": 9}
    return VSRN(20, 6, **(small | more)).double()


def scan() -> SCAN:
    torch.manual_seed(6)
    return SCAN(20, 6, width=8, word_dim=5, direction="t2i", first_norm="clipped_l2norm", pooling="Mean").double()


def bfan() -> BFAN:
    torch.manual_seed(6)
    return BFAN(20, 6, width=8, word_dim=5, focal="prob").double()


def mmca() -> MMCA:
    torch.manual_seed(7)
    return MMCA(6, 10, width=8, heads=2, channels=8).double()


class TwoWays(VSEPP):
    """A matcher with a score for each direction."""

    def score(self, images, texts):
        one = super().score(images, texts).i2t
        return Scores(one, one**2 - 0.3 * one)

    def score_pairs(self, images, texts):
        one = super().score_pairs(images, texts).i2t
        return Scores(one, one**2 - 0.3 * one)


def two_ways() -> TwoWays:
    torch.manual_seed(8)
    return TwoWays(20, 6, width=8, word_dim=5).double()


def direct(model: Matcher, batch: PairBatch, **settings) -> Tensor:
    """The loss from scores that are computed one pair at a time, plus the model's own losses."""
    sides = {}
    for name, part in (("positive", batch), ("first", batch.offline.first), ("second", batch.offline.second)):
        sides[name] = model.encode_images(part.images), model.encode_texts(part.texts)

    def score(image: tuple[str, int], text: tuple[str, int]) -> Scores:
        one = sides[image[0]][0][torch.tensor([image[1]])]
        return model.score_pairs(one, sides[text[0]][1][torch.tensor([text[1]])])

    size = range(len(batch))
    squares = [[score(("positive", i), ("positive", c)) for c in size] for i in size]
    scores = Scores(
        *(torch.stack([torch.cat([getattr(s, way) for s in row]) for row in squares]) for way in ("i2t", "t2i"))
    )
    offline = OfflineScores(
        torch.cat([score(("positive", b), ("first", b)).i2t for b in size]),
        torch.cat([score(("first", b), ("positive", b)).t2i for b in size]),
        torch.cat([score(("first", b), ("first", b)).i2t for b in size]),
        torch.cat([score(("second", b), ("second", b)).t2i for b in size]),
    )
    loss = loss_by_loop(scores, offline, IDS, **({"kind": "AdapOffQuin"} | GIVEN | settings))
    return loss + sum(model.extra_losses(*sides["positive"], batch).values())


@pytest.mark.parametrize("selected", [False, True], ids=["all pairs", "selected pairs"])
@pytest.mark.parametrize("kind", ["online", "OffQuin", "AdapOffQuin", "OnlineQuin"])
@pytest.mark.parametrize("make", [vsrn, scan, bfan, mmca, two_ways], ids=lambda make: make.__name__)
def test_the_objective_is_the_loss_of_pairs_scored_one_by_one(make: Callable, kind: str, selected: bool) -> None:
    model = make().eval()
    batch = whole_batch(10 if make is mmca else 0)
    budget = (2**12 if make is mmca else 2**26) * selected  # the first: a pair at a time
    expected = direct(model, batch, kind=kind)
    model.zero_grad()
    expected.backward()
    theirs = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    found, logs = OfflineLoss(LossConfig(kind, **GIVEN), budget=budget)(model, batch)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert theirs
    for name, weight in model.named_parameters():
        if name in theirs:
            torch.testing.assert_close(weight.grad, theirs[name], rtol=1e-6, atol=1e-9)
    assert logs["hardest"] == 1.0 and all(math.isfinite(value) for value in logs.values())


def test_captioning_counts_for_positive_pairs_only() -> None:
    model, batch = vsrn(), whole_batch()
    with_captions = OfflineLoss()(model, batch)[0]
    own = model.extra_losses(*aoq.encode_with_offline(model, batch, LossConfig("online")), batch)["captioning"]
    model.caption_weight = 0.0
    without = OfflineLoss()(model, batch)[0]
    torch.testing.assert_close(with_captions - without, own, rtol=1e-8, atol=1e-8)
    assert own > 1


@pytest.mark.parametrize(
    ("kind", "parts"), [("online", 1), ("OffTri", 2), ("OnlineQuin", 2), ("OffQuin", 3), ("AdapOffQuin", 3)]
)
def test_only_what_a_loss_needs_is_encoded_in_one_pass(kind: str, parts: int) -> None:
    model, calls = two_ways(), []
    encode = model.encode_images
    model.encode_images = lambda batch: calls.append(len(batch)) or encode(batch)
    OfflineLoss(LossConfig(kind))(model, whole_batch())
    assert calls == [6 * parts]


@pytest.mark.parametrize("architecture", ["coco", "f30k"])
def test_a_batch_norm_sees_each_of_the_three_batches_alone(architecture: str) -> None:
    """As in the public code: the loss, its gradients and the running averages are those of three passes."""

    def step(one_by_one: bool) -> list[Tensor]:
        model = vsrn(architecture=architecture).train()
        for step in model.reasoning.steps:
            torch.nn.init.constant_(step.norm.weight, 0.3)  # at zero it would hide what it normalises
        if one_by_one:
            model.encode_image_batches = lambda batches: Images.cat([model.encode_images(batch) for batch in batches])
            model.encode_images = lambda batch: VSRN.encode_image_batches(model, [batch])
        loss = OfflineLoss()(model, whole_batch())[0]
        loss.backward()
        return [loss, *model.buffers(), *(weight.grad for weight in model.parameters())]

    together, apart = step(False), step(True)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("by_image", [True, False])
@pytest.mark.parametrize(("budget", "warm"), [(0, HingeTriplet), (2**26, HardNegativeTripletLoss)])
def test_the_warm_up_is_that_of_the_other_chapters(budget: int, warm: type, by_image: bool) -> None:
    model, batch = two_ways(), replace(whole_batch(), offline=None)  # no lists are needed yet
    loss = OfflineLoss(LossConfig(margin=0.3), by_image, warmup_epochs=2, budget=budget, negatives=0)
    for epoch in (0, 1):
        loss.set_epoch(epoch)
        more = {"negatives": 0, "budget": budget} if budget else {}
        expected = warm(0.3, hardest=False, by_image=by_image, **more)(model, batch)[0]
        torch.testing.assert_close(loss(model, batch)[0], expected)
    loss.set_epoch(2)
    with pytest.raises(ItmError, match="OfflinePairs"):
        loss(model, batch)


@pytest.mark.parametrize("budget", [0, 2**26])
def test_two_captions_of_one_image_cost_nothing_before_and_after_the_warm_up(budget: int) -> None:
    """A constant score: each caption would cost the margin of 0.2 in each direction, 0.8 together."""
    part = pair_batch(1, torch.tensor([4, 4]))
    regions, words = part.images.regions, part.texts.words
    batch = PairBatch(
        replace(part.images, regions=regions[:1].expand_as(regions)),
        replace(part.texts, words=words[:1].expand_as(words), lengths=part.texts.lengths[:1].expand(2)),
    )
    for by_image, expected in ((True, 0.0), (False, 0.8)):
        loss = OfflineLoss(LossConfig("online"), by_image, warmup_epochs=1, budget=budget, negatives=0)
        for epoch in (0, 1):
            loss.set_epoch(epoch)
            assert loss(two_ways(), batch)[0].item() == pytest.approx(expected)


def test_the_log_tells_how_the_weights_stand() -> None:
    scores, offline = draws(2)
    config = LossConfig(**GIVEN)
    anchors = gather_scores(scores, IDS[:, None] == IDS, offline, config)
    found = loss_statistics(anchors, config)
    weights = torch.cat([adaptive_weight(side, config) for side in anchors])
    open_hinge = torch.cat([0.3 - side.positive + side.online > 0 for side in anchors])
    assert found["weight"] == pytest.approx(weights.mean().item(), rel=1e-6)
    assert 0 < found["rewarded"] <= found["negative"] < 1
    assert found["negative"] == pytest.approx(float((weights < 0).double().mean()), rel=1e-6)
    assert found["rewarded"] == pytest.approx(float(((weights < 0) & open_hinge).double().mean()), rel=1e-6)
    assert found["offline"] == pytest.approx(torch.cat([offline.caption, offline.image]).mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"kind": "Offtri"}, "kind: found 'Offtri'"), ({"weigh_by": "on"}, "weigh_by"), ({"alpha": 0.0}, "alpha")],
)
def test_a_misspelt_setting_is_an_error(settings: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        LossConfig(**settings)


# ---------------------------------------------------------------- ranks of online negatives


def test_the_formula_of_the_expected_rank() -> None:
    assert chapter.expected_rank(566_415, 128) == pytest.approx(4425, abs=1)
    assert 100 * chapter.chance_of_top(566_415, 128) == pytest.approx(2.22, abs=0.01)
    assert 100 * chapter.chance_of_top(500_000, 128) == pytest.approx(2.51, abs=0.01)
    # by hand: two of three candidates are drawn; the best of them is first with 2/3, second with 1/3
    assert chapter.expected_rank(3, 3) == pytest.approx(4 / 3)


def test_ranks_of_drawn_negatives() -> None:
    generator = np.random.default_rng(0)
    scores = generator.random((400, 900))
    negative = np.ones_like(scores, dtype=bool)
    negative[:, :300] = False
    scores[:, :300] += 5  # positives must neither be drawn nor counted
    ranks = online_ranks(scores, negative, 20)
    assert ranks.min() >= 1 and ranks.mean() == pytest.approx(chapter.expected_rank(600, 20), rel=0.1)
    assert (online_ranks(scores, negative, 601) == 1).all()  # all of them drawn
    assert np.mean(ranks <= 50) == pytest.approx(chapter.chance_of_top(600, 20, 50), abs=0.06)
    often = online_ranks(scores[:40], negative[:40], 20, repeats=30)
    assert len(often) == 1200 and often.mean() == pytest.approx(chapter.expected_rank(600, 20), rel=0.1)


# ---------------------------------------------------------------- cross rank and gaps


def test_cross_ranks_by_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    owner = np.repeat(np.arange(7), 5)
    scores = Scores(torch.rand(7, 35, generator=generator), torch.rand(7, 35, generator=generator))
    scores.i2t[torch.from_numpy(owner), torch.arange(35)] += 0.4
    scores.t2i[torch.from_numpy(owner), torch.arange(35)] += 0.4
    scores.i2t[0, 7] = scores.i2t[0, 0]  # a tie counts against the pair
    expected = []
    for caption, image in enumerate(owner):
        among_images = 1 + sum(
            bool(scores.t2i[other, caption] >= scores.t2i[image, caption]) for other in range(7) if other != image
        )
        among_captions = 1 + sum(
            bool(scores.i2t[image, other] >= scores.i2t[image, caption]) for other in range(35) if owner[other] != image
        )
        expected.append(max(5 * among_images - 4, among_captions))
    found = cross_ranks(scores, owner)
    assert found.tolist() == expected and len(set(expected)) > 3
    shares = cross_shares(scores, owner)
    assert shares["cross_rank_first_share"] == pytest.approx(100 * np.mean(np.array(expected) == 1))
    assert shares["cross_rank_far_share"] == pytest.approx(100 * np.mean(np.array(expected) > 0.008 * 35))


def test_a_perfect_and_a_constant_model_stand_at_the_ends_of_the_cross_rank() -> None:
    owner = np.repeat(np.arange(10), 5)
    perfect = torch.from_numpy((owner[None] == np.arange(10)[:, None]).astype(np.float32))
    assert (cross_ranks(Scores.same(perfect), owner) == 1).all()
    assert (cross_ranks(Scores.same(torch.zeros(10, 50)), owner) == 46).all()  # 5 * 10 - 4


def test_held_out_anchors_draw_from_the_miners_lists() -> None:
    owner = torch.arange(20).repeat_interleave(5)
    own = owner[None] == torch.arange(20)[:, None]
    generator = torch.Generator().manual_seed(1)
    miner = Scores(torch.rand(20, 100, generator=generator), torch.rand(20, 100, generator=generator))
    marked = Scores(torch.zeros(20, 100), torch.zeros(20, 100))  # 1 in the miner's lists, 2 at positives
    for image in range(20):
        marked.i2t[image, miner.i2t[image].masked_fill(own[image], -1).topk(4).indices] = 1
    for caption in range(100):
        marked.t2i[miner.t2i[:, caption].masked_fill(own[:, caption], -1).topk(2).indices, caption] = 1
    marked.i2t[own] = marked.t2i[own] = 2
    anchors = held_out_anchors(marked, miner, owner, 16, (4, 2))
    for side in anchors:
        assert len(side.positive) == 96  # six whole batches of a hundred
        assert (side.positive == 2).all() and (side.offline == 1).all()
        assert set(side.online.tolist()) == {0.0, 1.0}  # the hardest of a batch is now and then in the lists
    again = held_out_anchors(marked, miner, owner, 16, (4, 2))
    assert torch.equal(again[0].online, anchors[0].online)
    gaps = score_gaps(anchors)
    out = torch.cat([side.online == 1 for side in anchors]).float().mean().item()
    assert gaps["gap_positive_offline"] == pytest.approx(1)
    assert gaps["gap_offline_online"] == pytest.approx(1 - out)
    assert gaps["order_violations"] == pytest.approx(100 * out)
    assert gaps["mean_listed_score"] == pytest.approx(1)
    assert mean_positive_score(marked, owner) == pytest.approx(2)
    one_way = Scores(marked.i2t, marked.t2i + 1)
    assert mean_positive_score(one_way, owner) == pytest.approx(2.5)  # both directions count


def test_epochs_to_a_value(tmp_path: Path) -> None:
    log = [{"step": n, "loss": 1.0} for n in range(3)]
    log += [{"val_i2t_r1": a, "val_t2i_r1": b, "val_rsum": 0.0} for a, b in ((1, 1), (4, 2), (3, 3), (9, 0))]
    curves = dev_curves(log)
    assert curves == {"i2t": [1, 4, 3, 9], "t2i": [1, 2, 3, 0]}
    assert [epochs_to(curves["i2t"], goal) for goal in (0, 4, 9, 10)] == [1, 2, 4, 5]
    assert [epochs_to(curves["t2i"], max(curves[way])) for way in ("t2i", "i2t")] == [3, 5]
    with pytest.raises(ItmError, match="Run the online variant"):
        online_curves(tmp_path)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "log.jsonl").write_text("\n".join(map(json.dumps, log)), encoding="utf-8")
    assert online_curves(tmp_path) == curves


def test_a_run_that_never_gets_there_is_not_the_faster_one() -> None:
    """The rule of AOQ-13 subtracts: a miss of the shorter run must not look like a gain."""
    late, never = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1.0, 1.0, 1.0]
    assert epochs_to(late, max(late)) - epochs_to(never, max(late)) == 4  # what came out before
    assert epochs_to(late, max(late)) - epochs_to(never, max(late), len(late)) == -1
    assert epochs_to(never, max(late), 2) == 4


def test_a_receipt_holds_the_curves_and_how_fast_the_rival_was_reached() -> None:
    curves = {"i2t": [1.0, 4.0, 3.0], "t2i": [1.0, 2.0, 2.0]}
    alone = curve_numbers(curves)
    assert alone["dev_i2t_r1_epoch_02"] == 4.0 and alone["best_dev_t2i_r1"] == 2.0
    assert alone["epochs_to_best_i2t"] == alone["epochs_to_best_t2i"] == 2 and len(alone) == 10
    beside = curve_numbers(curves, {"i2t": [2.0, 3.0], "t2i": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert beside.items() - alone.items() == {("epochs_to_online_best_i2t", 2), ("epochs_to_online_best_t2i", 6)}


def test_curves_of_two_protocols_are_never_drawn_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over the seeds that are asked for; an old variant stays away where another has been run again."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for seed, curve in ((1, [10.0, 20.0]), (2, [12.0, 26.0]), (3, [90.0, 90.0])):
        write_curves(tmp_path, "VSRN online", "f30k", seed, curve)
    write_curves(tmp_path, "VSRN OffTri", "f30k", 1, [1.0, 2.0])
    found = learning_curves("10_aoq", ["VSRN online", "VSRN OffTri", "VSRN OffQuin"], (1, 2), "f30k")
    assert list(found) == ["VSRN online", "VSRN OffTri"]
    assert found["VSRN online"].i2t == found["VSRN online"].t2i == [11.0, 23.0]
    again = {"VSRN OffTri"}
    monkeypatch.setattr(tables, "is_old_protocol", lambda receipt: receipt["variant"] not in again)
    assert list(learning_curves("10_aoq", ["VSRN online", "VSRN OffTri"], (1, 2), "f30k")) == ["VSRN OffTri"]


def test_every_loss_has_its_turns_and_moves_the_model() -> None:
    """The ratio of a receipt is the median over turns of seconds beside those of the online loss in the same turn."""
    part = pair_batch(4, torch.arange(4))
    source = SimpleNamespace(batches=[part] * (STEPS + 1))
    model, taken = two_ways(), []

    def objective(moved: Matcher, batch: PairBatch) -> tuple[Tensor, dict]:
        taken.append(len(batch))
        return sum(weight.sum() for weight in moved.parameters()), {}

    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_negatives, "pair_loader", lambda given, *_: iter(given.batches))
        seconds = seconds_of_steps(
            model, {"online": objective, "OffTri": objective}, dict.fromkeys(("online", "OffTri"), source), 4
        )
    assert [len(of) for of in seconds.values()] == [TURNS, TURNS] and min(min(of) for of in seconds.values()) >= 0
    assert taken == [4] * (2 * TURNS * (STEPS + 1))  # one more step for each turn, which is not counted
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step_ratios({"online": [1.0, 2.0, 4.0], "OffTri": [2.0, 2.0, 12.0]}) == {"online": 1.0, "OffTri": 2.0}


def test_false_shares_by_place() -> None:
    truth = np.array([[True, False, True, False], [False, False, True, False]])
    lists = np.array([[2, 1, 3], [2, 0, 1]], dtype=np.int32)
    assert false_shares(lists, truth).tolist() == [1.0, 0.0, 0.0]


def write_curves(root: Path, variant: str, dataset: str, seed: int, curve: list[float]) -> None:
    """A receipt of a run with R@1 on dev after each epoch."""
    metrics = {f"dev_{way}_r1_epoch_{n:02}": value for way in ("i2t", "t2i") for n, value in enumerate(curve, start=1)}
    receipt = make_receipt(
        chapter="10_aoq", variant=variant, seed=seed, parameters={"warmup_epochs": 0}, seconds=1.0, device="cpu",
        metrics=metrics | {"rsum": 300.0}, dataset={"name": dataset, "split": "test", "fingerprint": 64 * "0"},
    )  # fmt: skip
    write_receipt(receipt, root / "receipts")


def test_the_papers_curves_come_from_receipts_of_the_runs_own_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOQ's Figure 4, drawn beside a run on photographs; receipts of Scenes and of other seeds take no part."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    for variant, curve in (("BFAN online short", [10.0, 20.0]), ("BFAN AdapOffQuin", [12.0, 25.0])):
        write_curves(tmp_path, variant, "f30k", 3, curve)
        write_curves(tmp_path, variant, "f30k", 4, [90.0, 90.0])
        write_curves(tmp_path, variant, "scenes", 5, [80.0, 80.0, 80.0])
    split = SimpleNamespace(identity=lambda: {"name": "f30k"})
    given = {"data": SimpleNamespace(test=split), "seed": 3, "teach": True, "plt": plt, "method_colour": method_colour}
    found = run_cells("10_aoq", ("curves",), given)
    assert list(found.learned) == ["BFAN online short", "BFAN AdapOffQuin"]
    panels = plt.gcf().axes
    assert [panel.get_title() for panel in panels] == ["BFAN, i2t", "BFAN, t2i"]
    for panel in panels:
        drawn = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
        assert drawn == {"online short": [10.0, 20.0], "AdapOffQuin": [12.0, 25.0]}  # no warm-up, no line for its end
    plt.close("all")


# ---------------------------------------------------------------- the chapter's parameters


def parameters(**more) -> dict:
    source = cells_of("10_aoq")["parameters"]
    return {name: value for name, (_, value) in declared_parameters(source).items()} | more


@pytest.mark.parametrize(("base_model", "kind"), [("vsrn", VSRN), ("scan", SCAN), ("bfan", BFAN)])
def test_base_models_and_miners(base_model: str, kind: type) -> None:
    given = parameters(base_model=base_model, miner_width=10, width=12)
    assert type(build(given, 30, 6)) is kind
    miner = build_miner(given, 30, 6)
    assert type(miner) is VSRN and miner.config["width"] == (12 if base_model == "vsrn" else 10)
    assert type(build_miner(given | {"miner": "self"}, 30, 6)) is kind


@pytest.mark.parametrize(
    ("given", "names", "warmups"),
    [
        ({}, ["miner", "final"], [1, 2]),
        ({"warmup_epochs": 0}, ["miner", "final"], [1, 0]),
        ({"kind": "online"}, ["final"], [2]),
        ({"kind": "online", "round_one": "runs/x"}, ["miner", "final"], [1, 2]),
        ({"kind": "online", "start": "fine-tune"}, ["miner", "final"], [1, 0]),
        ({"kind": "online", "start": "fine-tune", "base_model": "bfan"}, ["base_model", "final"], [1, 0]),
        ({"start": "fine-tune"}, ["miner", "final"], [1, 0]),
        ({"start": "fine-tune", "base_model": "bfan"}, ["miner", "base_model", "final"], [1, 1, 0]),
        ({"start": "fine-tune", "base_model": "bfan", "miner": "self"}, ["miner", "final"], [1, 0]),
    ],
)
def test_every_model_of_a_run_warms_up_at_most_once(given: dict, names: list[str], warmups: list[int]) -> None:
    given = parameters(**({"width": 8, "first_warmup_epochs": 1, "warmup_epochs": 2} | given))
    found = stages(given, build(given, 30, 6))
    assert [stage.name for stage in found] == names
    assert [stage.mines for stage in found] == [name == "miner" for name in names]
    assert [stage.objective.warmup_epochs for stage in found] == warmups
    assert all(stage.objective.config.kind == "online" for stage in found[:-1])
    if given["start"] == "fine-tune":  # what is fine-tuned has the architecture of the base model
        assert type(found[-2].model) is type(found[-1].model)


def test_a_base_model_that_is_fine_tuned_has_a_round_one_of_its_own() -> None:
    given = parameters(base_model="bfan", start="fine-tune", width=8, first_epochs=30, first_learning_rate=0.1)
    given |= {"base_epochs": 20, "base_decay_every": 15, "epochs": 7, "learning_rate": 0.5, "batch_size": 9}
    for schedule, decays in (("lab", (30, 20, 7)), ("paper", (15, 15, 10))):  # lab: one cosine over all epochs
        found = stages(given | {"schedule": schedule}, build(given, 30, 6))
        miner, base_model, final = (stage.config for stage in found)
        assert (miner.epochs, miner.learning_rate) == (30, 0.1)
        assert (base_model.epochs, base_model.batch_size, base_model.learning_rate) == (20, 9, 0.5)
        assert (final.epochs, final.batch_size, final.learning_rate) == (7, 9, 0.5)
        assert tuple(stage.config.decay_every for stage in found) == decays
        assert {stage.config.schedule for stage in found} == {"cosine" if schedule == "lab" else "step"}
        assert all(isinstance(stage.config, TrainConfig) for stage in found)


def test_the_last_stage_has_the_loss_of_the_parameters() -> None:
    settings = {"kind": "OffQuin", "margin": 0.3, "offline_margin": 0.1, "alpha": 0.4, "beta": 1.2}
    settings |= {"weigh_by": "positive", "detach": True, "clamp": True, "squared": True}
    given = parameters(width=8, by_image=False, **settings)
    objective = stages(given, build(given, 30, 6))[-1].objective
    assert asdict(objective.config) == settings and not objective.by_image


# ---------------------------------------------------------------- the experiments, variant against variant


def variants(dataset: str) -> dict[str, dict]:
    known = read_experiments(ROOT, "aoq").items()
    found = [experiment.values() for name, experiment in known if name.startswith(f"aoq/{dataset}/")]
    return {given["variant"]: given for given in found}


def differing(one: dict, other: dict) -> set[str]:
    return {name for name in one if one[name] != other[name]} - {"variant", "run_dir", "learning_rate", "online_run"}


# Trials that rules ask for and no experiment describes yet; until then their claims say "not run".
WAITING = {f"{base} constant weight 1.5" for base in ("BFAN", "VSRN")} | {
    f"BFAN {of}"
    for of in ("OffQuin", "OffQuin without warm-up", "OnlyOffline", "OnlyOffline margin 0.2", "fine-tuned", "fine-tuned slowly",
               "online continued", "OnlineQuin", "without OfflineAdap")
}  # fmt: skip


def test_every_variant_of_a_rule_has_an_experiment() -> None:
    ledger = Ledger()
    for dataset in ("scenes", "coco", "f30k"):
        rules = [
            rule
            for name, rule in ledger.rules.items()
            if name.startswith("AOQ") and dataset in rule.get("datasets", ())
        ]
        wanted = {variant for rule in rules for one in comparisons(rule, dataset) for variant, _ in one.terms}
        assert wanted - WAITING <= set(variants(dataset)), dataset
    whole = {
        variant
        for variant in variants("scenes")
        if variant.removeprefix("VSRN ") in ("online short", "AdapOffQuin detached")
    }
    assert len(whole) == 2


def test_what_is_compared_differs_in_what_the_rule_names() -> None:
    """Lab variants: rounds in the paper's proportion, and one thing changed at a time."""
    lab = variants("scenes")
    for base_model in ("VSRN", "SCAN", "BFAN"):
        whole = lab[f"{base_model} AdapOffQuin"]
        assert (whole["first_epochs"], whole["epochs"]) == (9, 6)  # as 30 and 20 in the paper
        assert whole["warmup_epochs"] == whole["first_warmup_epochs"]
        assert differing(lab[f"{base_model} online short"], whole) == {"kind"}
        assert differing(lab[f"{base_model} online"], whole) == {"kind", "epochs"}
        assert lab[f"{base_model} online"]["epochs"] == whole["epochs"] + whole["first_epochs"]
    short = lab["VSRN online short"]  # trained as the miner, for round two's epochs, at a learning rate of its own
    assert [short[name] for name in ("batch_size", "warmup_epochs")] == [
        short[f"first_{name}"] for name in ("batch_size", "warmup_epochs")
    ]
    whole = lab["VSRN AdapOffQuin"]
    for name in ("fine-tuned", "fine-tuned slowly", "online continued"):
        assert differing(lab[f"VSRN {name}"], whole) - {"kind"} == {"start"}  # and as many captions
    assert differing(lab["VSRN online continued"], lab["VSRN fine-tuned"]) == {"kind"}
    assert lab["VSRN online continued"]["learning_rate"] == lab["VSRN fine-tuned"]["learning_rate"]
    cold = lab["VSRN OffQuin without warm-up"]
    assert cold["warmup_epochs"] == 0 and differing(cold, lab["VSRN OffQuin"]) == {"warmup_epochs"}
    assert differing(cold, lab["VSRN OnlyOffline"]) == {"kind"}
    assert differing(lab["VSRN OnlyOffline"], lab["VSRN OnlyOffline margin 0.2"]) == {"offline_margin"}
    assert differing(lab["VSRN OffQuin squared hinge"], lab["VSRN OffQuin"]) == {"squared"}
    assert differing(lab["VSRN AdapOffQuin detached"], whole) == {"detach"}
    for name in ("online", "online short"):
        assert differing(lab[f"VSRN {name} larger batch"], lab[f"VSRN {name}"]) == {"batch_size"}
    by_vsrn = [given for variant, given in lab.items() if given["miner"] == "vsrn" and "doubled" not in variant]
    assert len({given["round_one"] for given in by_vsrn}) == 1
    mined = {
        tuple(given[n] for n in given if n.startswith(("first_", "caption_", "captions_mined"))) for given in by_vsrn
    }
    assert len(mined) == 1  # whoever comes first trains the same miner


def test_two_models_stand_behind_the_papers_rows_of_scan_and_bfan() -> None:
    for dataset, kinds in (("coco", ["online short", "OffTri", "OffQuin", "AdapOffQuin"]), ("f30k", ["online short"])):
        found = variants(dataset)
        for kind in kinds:
            one, other = found[f"SCAN {kind}"], found[f"SCAN i2t {kind}"]
            assert differing(one, other) == {"direction", "temperature", "pooling", "lse"}
            assert (one["pooling"], other["pooling"]) == ("Mean", "LogSumExp")  # t-i AVG + i-t LSE
            assert other["lse"] == {"coco": 20.0, "f30k": 5.0}[dataset]
            assert differing(found[f"BFAN {kind}"], found[f"BFAN equal {kind}"]) == {"focal"}


def test_two_models_stand_behind_the_rows_of_bfan_in_table_3() -> None:
    known = read_experiments(ROOT, "aoq").items()
    rows = {name: one for name, one in known if "aoq/table_3" in one.tables and "/bfan_" in name}
    ensembles = {one.ensemble for one in rows.values()}
    assert len(ensembles) == 4 and len(rows) == 8
    for ensemble in ensembles:
        one, other = (member.values() for member in rows.values() if member.ensemble == ensemble)
        assert differing(one, other) == {"focal"}


def test_without_offlineadap_is_searched_over_the_pairs_of_table_5_before_it_runs() -> None:
    known = read_experiments(ROOT, "aoq")
    for base_model in ("vsrn", "bfan", "bfan_equal"):
        row = known[f"aoq/coco/{base_model}_no_offlineadap"]
        pairs = [(one["alpha"], one["beta"]) for one in row.select.settings]
        assert pairs == [(0.3, 1.5), (0.2, 1.5), (0.5, 1.5), (0.3, 1.0), (0.3, 2.0)]
        baseline = known[f"aoq/coco/{row.select.baseline}"]
        assert differing(row.values(), baseline.values()) == {"weigh_by"}


def test_a_listed_setting_is_chosen_as_a_whole() -> None:
    pairs = [(0.3, 1.5, 5.0), (0.2, 1.5, 6.0), (0.5, 1.5, 9.0), (0.3, 1.0, 1.0), (0.3, 2.0, 8.0)]
    runs = [({"alpha": alpha, "beta": beta}, rsum) for alpha, beta, rsum in pairs]
    assert chosen_setting(runs, whole=True) == {"alpha": 0.5, "beta": 1.5}
    assert chosen_setting(runs) == {"alpha": 0.5, "beta": 2.0}  # by its means: a pair that nobody ran
    again = [*runs, ({"alpha": 0.5, "beta": 1.5}, 1.0)]
    assert chosen_setting(again, whole=True) == {"alpha": 0.3, "beta": 2.0}  # means over seeds, not the luckiest run


@pytest.mark.parametrize("given", [[], [{}], [{"alpha": 0.2}, {"beta": 1.0}], [{"alpha": 0.2}] * 2, {"alpha": 0.2}])
def test_settings_that_cannot_be_compared_are_an_error(given: object) -> None:
    experiment = read_experiments(ROOT, "aoq")["aoq/coco/vsrn_no_offlineadap"]
    with pytest.raises(ItmError, match="settings"):
        read_select(experiment, {"settings": given, "on": "dev"})


def test_the_papers_rows_of_bfan_are_shown_beside_two_models() -> None:
    ledger = Ledger()
    for table in ("table_1", "table_2", "table_3"):
        for block in ledger.results["AOQ"]["tables"][table]["blocks"]:
            for row in block["rows"]:
                if row["method"] == "BFAN":
                    variant, _ = variant_of(ledger, f"AOQ {table}", row)
                    assert variant.endswith(" ensemble"), (table, row)
                    assert variant in {one.ensemble for one in read_experiments(ROOT, "aoq").values()}


def test_the_time_of_mining_stands_beside_the_papers() -> None:
    shown = page(Ledger(), "AOQ").partition("## Numbers of the text")[2]
    assert "| Flickr30K | 620 |" in shown and "| COCO | 3,400 |" in shown
    assert published_text("AOQ", "global_similarity_prediction_seconds_VSRN")["flickr30k"] == 620


def test_table_6_is_timed_with_captioner_reasoning_and_loaders_that_read_ahead() -> None:
    rows = [one.values() for one in read_experiments(ROOT, "aoq").values() if "aoq/table_6" in one.tables]
    assert {row["kind"] for row in rows} == {"online", "OffTri", "OffQuin", "AdapOffQuin"}
    for row in rows:
        assert row["num_workers"] > 0 and row["caption_weight"] == 1.0 and row["reasoning_steps"] == 4
        assert (row["base_model"], row["batch_size"], row["width"]) == ("vsrn", 128, 2048)


def test_weights_are_chosen_and_rates_begin_as_the_base_models_scripts_do() -> None:
    for dataset in ("coco", "f30k"):
        for name, given in variants(dataset).items():
            if "self-mined" not in name:
                assert given["first_select_by"] == "r1_r5", name  # the miner is VSRN
            assert given["select_by"] == ("r1_r5" if given["base_model"] == "vsrn" else "rsum"), name
    coco = variants("coco")
    assert {coco[f"BFAN {kind}"]["learning_rate"] for kind in ("online short", "online", "AdapOffQuin")} == {0.0005}


@pytest.mark.parametrize(("dataset", "rate"), [("coco", 0.0005), ("f30k", 0.0002)])
def test_the_released_code_has_recipes_of_its_own(dataset: str, rate: float) -> None:
    found = variants(dataset)
    changed = {"sampling", "by_image", "round_one", "first_batch_size"}
    assert differing(found["VSRN released code"], found["VSRN AdapOffQuin"]) == changed | {"batch_size"}
    assert differing(found["BFAN released code"], found["BFAN AdapOffQuin"]) == changed
    assert differing(found["BFAN released code"], found["BFAN equal released code"]) == {"focal"}
    released = [found[f"{name} released code"] for name in ("VSRN", "BFAN", "BFAN equal")]
    assert len({given["round_one"] for given in released}) == 1  # whoever comes first trains their miner
    mined = [{n: given[n] for n in given if n.startswith(("first_", "caption"))} for given in released]
    assert mined[0] == mined[1] == mined[2] and mined[0]["first_batch_size"] == 124
    assert found["VSRN released code"]["sampling"] == "tied" and not found["VSRN released code"]["by_image"]
    # the README sends its readers to that of BFAN, which passes a rate of its own for each dataset
    assert {found[f"{name} released code"]["learning_rate"] for name in ("BFAN", "BFAN equal")} == {rate}
    assert (found["BFAN released code"]["epochs"], found["BFAN released code"]["decay_every"]) == (15, 10)


def test_a_stage_keeps_the_weights_that_its_metric_chooses() -> None:
    given = parameters(width=8, select_by="r1_r5", base_model="bfan", start="fine-tune")
    found = {stage.name: stage.config.select for stage in stages(given, build(given, 30, 6))}
    assert found == {"miner": "rsum", "base_model": "r1_r5", "final": "r1_r5"}


def test_a_shared_miner_begins_with_the_same_weights_whoever_trains_it() -> None:
    weights = []
    for base_model in ("vsrn", "scan"):
        given = parameters(base_model=base_model, width=8, seed=3)
        miner = stages(given, build(given, 30, 6))[0].model
        weights.append(torch.cat([weight.flatten() for weight in miner.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "wrong", [{"base_model": "vsrm"}, {"miner": "scan"}, {"start": "finetune"}, {"select_by": "r1"}]
)
def test_a_misspelt_choice_is_an_error(wrong: dict) -> None:
    with pytest.raises(ItmError, match=next(iter(wrong))):
        build(parameters(**wrong), 30, 6)


def test_training_remembers_every_setting() -> None:
    other = OfflineLoss(LossConfig(detach=True, alpha=0.5), by_image=False)
    plain, other = _described(OfflineLoss()), _described(other)
    assert {name for name in plain if plain[name] != other[name]} == {"detach", "alpha", "by_image"}
    assert {
        "kind",
        "margin",
        "offline_margin",
        "beta",
        "weigh_by",
        "clamp",
        "squared",
        "warmup_epochs",
        "budget",
    } <= set(plain)
    assert set(asdict(LossConfig())) <= set(plain) and plain["name"] == "OfflineLoss"
