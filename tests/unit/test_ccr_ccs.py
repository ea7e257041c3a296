"""CCR and CCS: Eqs. 5 to 8 as loops in double precision, sampling, composition with every ranking loss and base model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from notebook_cells import run_cells
from second_device import DEVICE, counting
from small_models import TOKEN_DIM
from torch import Tensor

from itm_lab.evidence.tables import lab_table, planned_runs
from itm_lab.experiments.ensembles import ensemble_of
from itm_lab.records.receipts import make_receipt, read_receipt, write_receipt
from itm_lab.records.scores import save_scores, write_scores
from itm_lab.teaching.figures import intervals
from itm_utils.data.batches import PairDataset
from itm_utils.data.phrases import Grounding, Phrase
from itm_utils.errors import ItmError
from itm_utils.matcher import Attention, Matcher, OfflineNegatives, Scores, length_mask
from itm_utils.models import bfan, ccr_ccs, pfan, scan, sgraf
from itm_utils.models.aoq import OfflineLoss
from itm_utils.models.bfan import BFAN
from itm_utils.models.ccr_ccs import (
    AttentionConstraintLoss,
    all_query_terms,
    build,
    ccr_values,
    eligible_queries,
    gradient_cosine,
    logit_gradients,
    one_query_terms,
    reversed_weights,
    sample_across_phrases,
    sample_queries,
    sample_two_queries,
    sampled_query_terms,
    stages,
)
from itm_utils.models.mmca import MMCA, HardNegativeTripletLoss
from itm_utils.models.pfan import PFAN
from itm_utils.models.scan import SCAN
from itm_utils.models.sgraf import SGRAF
from itm_utils.models.vsepp import VSEPP, HingeTriplet
from itm_utils.training.loop import TrainConfig, train

ROOT = Path(__file__).resolve().parents[2]
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# Queries and keys of five pairs: plenty, one key, one query, one of each, and two of each.
QUERIES, KEYS, MARGINS = [4, 3, 1, 1, 2], [5, 1, 4, 1, 2], (1.2, 1.1)


# ---------------------------------------------------------------- the paper, one number at a time


def dot(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return sum(a * b for a, b in zip(x, y, strict=True))


def cosine(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return dot(x, y) / (dot(x, x).sqrt() * dot(y, y).sqrt())


def mixed(weights: list[Tensor], keys: list[list[Tensor]]) -> list[Tensor]:
    return [sum(w * key[n] for w, key in zip(weights, keys, strict=True)) for n in range(len(keys[0]))]


def by_hand(pair: Attention, query: int, swapped: int, ccr_margin: float, ccs_margin: float) -> tuple[Tensor, Tensor]:
    """Eqs. 5, 6 and 7 for one pair without padding; swapped: -1 if missing."""
    weights, queries, keys = list(pair.weights[0][query]), list(pair.queries[0]), [list(key) for key in pair.keys[0]]
    found = mixed(weights, keys)
    ccr = ccs = torch.zeros((), dtype=torch.float64)
    right = cosine(list(queries[query]), found)
    if len(keys) > 1:
        total = sum(1 - w for w in weights)
        away = mixed([(1 - w) / total for w in weights], keys)
        ccr = torch.clamp(cosine(list(queries[query]), away) - right + ccr_margin, min=0)
    if swapped >= 0:
        ccs = torch.clamp(cosine(list(queries[swapped]), found) - right + ccs_margin, min=0)
    return ccr, ccs


def ragged(seed: int = 0, width: int = 4) -> Attention:
    """Five pairs of different sizes; weights of real queries sum to one, and what lies under padding is not zero."""
    rng = torch.Generator().manual_seed(seed)
    q, k = length_mask(torch.tensor(QUERIES), max(QUERIES)), length_mask(torch.tensor(KEYS), max(KEYS))
    logits = 2 * torch.randn(5, 4, 5, generator=rng, dtype=torch.float64)
    weights = logits.masked_fill(~k[:, None], -math.inf).softmax(dim=-1)
    weights = torch.where(k[:, None] & q[:, :, None], weights, 0.0)
    queries = torch.randn(5, 4, width, generator=rng, dtype=torch.float64)
    keys = torch.randn(5, 5, width, generator=rng, dtype=torch.float64)
    return Attention(weights, queries, keys, q, k)


def leaves(attention: Attention) -> Attention:
    """A copy whose weights, queries and keys collect gradients."""
    given = {name: getattr(attention, name).clone().requires_grad_() for name in ("weights", "queries", "keys")}
    return replace(attention, **given)


def pair_of(attention: Attention, row: int) -> Attention:
    """One pair, cut to what is real."""
    q, k = QUERIES[row], KEYS[row]
    parts = attention.weights[row, :q, :k], attention.queries[row, :q], attention.keys[row, :k]
    masks = torch.ones(1, q, dtype=torch.bool), torch.ones(1, k, dtype=torch.bool)
    return Attention(*(part[None] for part in parts), *masks)


def gradients(attention: Attention, loss: Tensor) -> list[Tensor]:
    given = (attention.weights, attention.queries, attention.keys)
    found = torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]


SAMPLED = torch.tensor([[2, 0], [1, 2], [0, -1], [0, -1], [1, 0]])
SPREAD = torch.tensor([1.0, -0.5, 2.0, 0.7, 1.3], dtype=torch.float64)  # pairs must not be mixed up


@pytest.mark.parametrize("seed", range(4))
def test_one_query_terms_are_the_paper_with_gradients(seed: int) -> None:
    ours, theirs = leaves(ragged(seed)), leaves(ragged(seed))
    terms = one_query_terms(ours, SAMPLED, *MARGINS)
    slow = [by_hand(pair_of(theirs, row), *SAMPLED[row].tolist(), *MARGINS) for row in range(5)]
    for number, name in enumerate(("ccr", "ccs")):
        expected = torch.stack([pair[number] for pair in slow])
        torch.testing.assert_close(getattr(terms, name), expected, **EXACT)
        assert expected.count_nonzero() > 0  # inactive hinges would prove little
        found = gradients(ours, (getattr(terms, name) * SPREAD).sum())
        for one, two in zip(found, gradients(theirs, (expected * SPREAD).sum()), strict=True):
            torch.testing.assert_close(one, two, **EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_all_query_terms_are_the_mean_over_all_samples_with_gradients(seed: int) -> None:
    ours, theirs = leaves(ragged(seed)), leaves(ragged(seed))
    terms = all_query_terms(ours, ours.query_mask, *MARGINS)
    expected = []
    for row, count in enumerate(QUERIES):
        pair = pair_of(theirs, row)
        samples = list(itertools.permutations(range(count), 2)) or [(0, -1)]
        values = [by_hand(pair, *sample, *MARGINS) for sample in samples]
        expected.append([sum(value[n] for value in values) / len(values) for n in (0, 1)])
    for number, name in enumerate(("ccr", "ccs")):
        means = torch.stack([row[number] for row in expected])
        torch.testing.assert_close(getattr(terms, name), means, **EXACT)
        found = gradients(ours, (getattr(terms, name) * SPREAD).sum())
        for one, two in zip(found, gradients(theirs, (means * SPREAD).sum()), strict=True):
            torch.testing.assert_close(one, two, **EXACT)


def test_the_mean_of_many_samples_is_that_of_all_queries() -> None:
    attention = ragged()
    torch.manual_seed(0)
    samples = [one_query_terms(attention, sample_two_queries(attention.query_mask), *MARGINS) for _ in range(4000)]
    expected = all_query_terms(attention, attention.query_mask, *MARGINS)
    for name in ("ccr", "ccs"):
        mean = torch.stack([getattr(one, name) for one in samples]).mean(dim=0)
        torch.testing.assert_close(mean, getattr(expected, name), rtol=0, atol=0.05)


def test_only_queries_in_the_mask_are_used_and_swapped() -> None:
    attention = ragged()
    mask = attention.query_mask.clone()
    mask[0, 0] = False  # as a start token
    changed = attention.queries.clone()
    changed[0, 0] = 100.0
    other = replace(attention, queries=changed)
    for one, two in zip(
        all_query_terms(attention, mask, *MARGINS), all_query_terms(other, mask, *MARGINS), strict=True
    ):
        torch.testing.assert_close(one, two, **EXACT)
    assert not torch.allclose(
        all_query_terms(attention, attention.query_mask, *MARGINS).ccs,
        all_query_terms(other, attention.query_mask, *MARGINS).ccs,
    )


# ---------------------------------------------------------------- reversed weights


def test_reversed_weights_sum_to_one_over_real_keys() -> None:
    attention = ragged()
    found = reversed_weights(attention.weights, attention.key_mask)
    assert (found[~attention.key_mask[:, None].expand_as(found)] == 0).all()
    several = (attention.key_mask.sum(dim=1) > 1)[:, None] & attention.query_mask
    torch.testing.assert_close(found.sum(dim=-1)[several], torch.ones(int(several.sum()), dtype=torch.float64))


def test_reversed_weights_of_36_keys_are_almost_even() -> None:
    weights = torch.full((1, 1, 36), 0.5 / 35)
    weights[..., 7] = 0.5
    found = reversed_weights(weights, torch.ones(1, 36, dtype=torch.bool))[0, 0]
    assert float(found[7]) == pytest.approx(0.5 / 35) and float(found[0]) == pytest.approx((1 - 0.5 / 35) / 35)
    assert float(found.max()) < 1 / 35  # the largest possible


def test_reversed_attended_feature_is_the_mean_less_a_part_of_the_attended_one() -> None:
    attention = ragged()
    keys, n = attention.keys[:1], KEYS[0]
    found = reversed_weights(attention.weights[:1], attention.key_mask[:1]) @ keys
    expected = (n * keys.mean(dim=1, keepdim=True) - attention.weights[:1] @ keys) / (n - 1)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("row", [1, 3])
def test_one_key_skips_ccr_without_a_trace(row: int) -> None:
    attention = leaves(ragged()[row : row + 1])
    values = ccr_values(attention, 5.0)
    assert (values == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(attention, values.sum()))


def test_one_key_does_not_skip_ccs_and_one_query_does() -> None:
    terms = one_query_terms(ragged(), SAMPLED, 5.0, 5.0)
    assert terms.ccs.gt(0).tolist() == [True, True, False, False, True]
    assert terms.ccr.gt(0).tolist() == [True, False, True, False, True]
    missing = one_query_terms(ragged(), torch.full((5, 2), -1), 5.0, 5.0)
    assert (missing.ccr == 0).all() and (missing.ccs == 0).all()


# ---------------------------------------------------------------- sampling


def test_samples_are_uniform_different_and_never_outside_the_mask() -> None:
    mask = torch.tensor([[False, True, True, True, False], [True, False, False, False, True]])
    torch.manual_seed(3)
    seen = [Counter(), Counter()]
    for _ in range(3000):
        for row, pair in enumerate(sample_two_queries(mask).tolist()):
            seen[row][tuple(pair)] += 1
    assert set(seen[0]) == set(itertools.permutations([1, 2, 3], 2))
    assert set(seen[1]) == {(0, 4), (4, 0)}
    for counts in seen:
        even = 3000 / len(counts)
        assert max(abs(count - even) for count in counts.values()) < 5 * even**0.5


@pytest.mark.parametrize(("row", "expected"), [([1, 0, 0], {(0, -1)}), ([0, 0, 0], {(-1, -1)}), ([1], {(0, -1)})])
def test_a_missing_query_is_minus_one(row: list[int], expected: set[tuple[int, int]]) -> None:
    sampled = {tuple(sample_two_queries(torch.tensor([row]).bool())[0].tolist()) for _ in range(20)}
    assert sampled == expected


def test_samples_come_from_torchs_generator() -> None:
    mask = torch.ones(64, 9, dtype=torch.bool)
    torch.manual_seed(11)
    first, second = sample_two_queries(mask), sample_two_queries(mask)
    torch.manual_seed(11)
    assert torch.equal(first, sample_two_queries(mask)) and not torch.equal(first, second)


def test_a_query_is_swapped_with_every_word_of_other_phrases_and_with_no_other() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    phrases = torch.tensor([[-1, 0, 0, -1, 1, -1], [-1, 0, 0, -1, -1, -1], [-1] * 6])
    drawn = torch.stack([sample_across_phrases(mask, phrases)[:, 0] for _ in range(400)])  # (400, b, 2)
    found = {tuple(pair) for pair in drawn[:, 0].tolist()}
    assert found == set(itertools.permutations((1, 2, 3, 4), 2)) - {(1, 2), (2, 1)}
    assert {tuple(pair) for pair in drawn[:, 1].tolist()} == {(1, -1), (2, -1)}  # one phrase: nothing to swap with
    assert (drawn[:, 2] == -1).all()
    outside = torch.full_like(phrases, -1)
    torch.manual_seed(3)
    anywhere = sample_across_phrases(mask, outside)
    torch.manual_seed(3)
    assert torch.equal(anywhere, sample_queries(mask, 1))  # words outside every phrase: as without phrases


def test_swaps_across_phrases_need_phrases_and_one_sampled_query(toy_pairs: PairDataset) -> None:
    given = Grounding([[Phrase(0, len(caption), np.zeros((0, 4)))] for caption in toy_pairs.split.captions])
    model = SCAN(60, toy_pairs.split.feature_dim, direction="t2i", width=8, word_dim=8)
    objective = AttentionConstraintLoss(HingeTriplet(0.2), ccr_weight=0.0, swap_within_phrase=False)
    with pytest.raises(ItmError, match="captions: found no phrases"):
        objective(model, toy_pairs[list(range(6))])
    with pytest.raises(ItmError, match="queries: found 0"):
        replace(objective, queries=0)
    before = toy_pairs.texts.fingerprint
    toy_pairs.texts.add_phrases(given)
    assert toy_pairs.texts.fingerprint != before
    batch = toy_pairs[list(range(6))]
    real = batch.texts.mask & ~batch.texts.special
    assert torch.equal(batch.texts.phrases == 0, real)  # each caption is one phrase
    _, logs = objective(model, batch)
    assert logs["ccs"] == 0  # so that nothing can be swapped
    _, logs = replace(objective, swap_within_phrase=True)(model, batch)
    assert logs["ccs"] > 0


@pytest.mark.parametrize("number", [1, 3, 9])
def test_several_samples_are_different_uniform_and_swapped_with_another(number: int) -> None:
    mask = torch.tensor(
        [[False, True, True, True, True], [True, False, False, False, True], [False, True] + 3 * [False]]
    )
    torch.manual_seed(3)
    swaps = [Counter(), Counter()]
    for _ in range(3000):
        sampled = sample_queries(mask, number)
        assert sampled.shape == (3, number, 2)
        for row, pairs in enumerate(sampled.tolist()):
            real = [pair for pair in pairs if pair[0] >= 0]
            queries = [query for query, _ in real]
            assert len(real) == min(number, int(mask[row].sum())) == len(set(queries))
            assert all(a != b for a, b in real) and {-1} >= {a for pair in pairs[len(real) :] for a in pair}
            if row < 2:
                swaps[row].update(map(tuple, real))
            else:
                assert real == [[1, -1]]  # nothing to swap with
    assert set(swaps[0]) == set(itertools.permutations([1, 2, 3, 4], 2)) and set(swaps[1]) == {(0, 4), (4, 0)}
    for counts in swaps:
        even = sum(counts.values()) / len(counts)
        assert max(abs(count - even) for count in counts.values()) < 5 * even**0.5


def test_one_sampled_query_is_the_papers_and_enough_of_them_are_all() -> None:
    attention = ragged()
    torch.manual_seed(4)
    one = sample_queries(attention.query_mask, 1)
    found, expected = sampled_query_terms(attention, one, *MARGINS), one_query_terms(attention, one[:, 0], *MARGINS)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    many = sampled_query_terms(attention, sample_queries(attention.query_mask, 7), *MARGINS)
    torch.testing.assert_close(many.ccr, all_query_terms(attention, attention.query_mask, *MARGINS).ccr, **EXACT)
    three = sample_queries(attention.query_mask, 3)
    terms = sampled_query_terms(attention, three, *MARGINS)
    for row in range(5):
        pairs = [pair for pair in three[row].tolist() if pair[0] >= 0]
        values = [by_hand(pair_of(attention, row), *pair, *MARGINS) for pair in pairs]
        torch.testing.assert_close(terms.ccr[row], torch.stack([v[0] for v in values]).mean(), **EXACT)
        torch.testing.assert_close(terms.ccs[row], torch.stack([v[1] for v in values]).mean(), **EXACT)


# ---------------------------------------------------------------- gradients and conflicts


def softmax_attention(logits: Tensor, like: Attention) -> Attention:
    weights = logits.masked_fill(~like.key_mask[:, None], -math.inf).softmax(dim=-1)
    return replace(like, weights=weights)


def test_logit_gradients_are_those_of_autograd() -> None:
    attention = ragged()[:1]
    logits = torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    attention_of_logits = softmax_attention(logits, attention)
    swapped = attention.queries.roll(1, dims=1)
    found = logit_gradients(attention_of_logits, swapped, *MARGINS)
    for number, values in enumerate((ccr_values, ccr_ccs.ccs_values)):
        extra = () if number == 0 else (swapped,)
        loss = values(attention_of_logits, *extra, MARGINS[number]).sum()
        (expected,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found[number], expected, **EXACT)
        assert expected.abs().max() > 0.01


def test_logit_gradients_hold_after_bfan_has_dropped_keys() -> None:
    """Focal weights are a softmax over the keys that stayed: the same formula gives the gradient."""
    attention = ragged()[:1]
    logits = 2 * torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    logits.requires_grad_()
    focal = bfan.focal_weights(softmax_attention(logits, attention).weights.mT, "equal").mT
    attention_of_logits = replace(attention, weights=focal)
    assert (focal == 0).any()
    (expected,) = torch.autograd.grad(ccr_values(attention_of_logits, 1.2).sum(), logits)
    torch.testing.assert_close(logit_gradients(attention_of_logits, attention.queries, 1.2, 1.2)[0], expected, **EXACT)
    assert expected.abs().max() > 0.01


def test_gradient_cosine_is_that_of_the_logit_gradients() -> None:
    attention = ragged()
    cosines = gradient_cosine(attention, SAMPLED, 3.0, 3.0)
    assert cosines[[2, 3]].tolist() == [0, 0] and cosines[1] == 0  # nothing to swap with; one key cannot change
    one = ccr_ccs.select_query(attention, SAMPLED[:, 0].clamp_min(0))
    swapped = ccr_ccs.select_query(attention, SAMPLED[:, 1].clamp_min(0)).queries
    ccr, ccs = logit_gradients(one, swapped, 3.0, 3.0)
    expected = torch.cosine_similarity(ccr, ccs, dim=-1)[:, 0]
    torch.testing.assert_close(cosines[[0, 4]], expected[[0, 4]])
    assert (gradient_cosine(attention, SAMPLED, -3.0, 3.0) == 0).all()  # CCR is inactive


# ---------------------------------------------------------------- any objective, any base model

SMALL = {"width": 8, "word_dim": 8}
BASE_MODELS = {
    "SCAN t2i": (lambda v, d: SCAN(v, d, pooling="Mean", **SMALL), ["t2i"]),
    "SCAN i2t": (lambda v, d: SCAN(v, d, direction="i2t", **SMALL), ["i2t"]),
    "BFAN": (lambda v, d: BFAN(v, d, **SMALL), ["t2i", "i2t"]),
    "PFAN": (lambda v, d: PFAN(v, d, position_dim=4, **SMALL), ["t2i"]),
    "SAF": (lambda v, d: SGRAF(v, d, head="SAF", sim_dim=4, dropout=0.0, **SMALL), ["t2i"]),
    "SGR": (lambda v, d: SGRAF(v, d, head="SGR", sim_dim=4, steps=2, dropout=0.0, **SMALL), ["t2i"]),
    "MMCA": (lambda v, d: MMCA(d, token_dim=TOKEN_DIM, width=8, heads=2), ["t2i", "i2t"]),
}


def base_model(name: str, pairs: PairDataset) -> Matcher:
    torch.manual_seed(1)
    return BASE_MODELS[name][0](100, pairs.split.feature_dim)


def slow_terms(model: Matcher, batch, directions: list[str], **margins: float) -> dict[str, Tensor]:
    """The sums of both constraints, pair by pair and query by query, with samples of the generator as it stands."""
    offered = model.attention(model.encode_images(batch.images), model.encode_texts(batch.texts))
    total = {"ccr": 0.0, "ccs": 0.0}
    for way in directions:
        attention, mask = offered[way], offered[way].query_mask.clone()
        if way == "t2i":
            mask &= ~batch.texts.special
        for row, (query, swapped) in enumerate(sample_two_queries(mask).tolist()):
            q, k = attention.query_mask[row], attention.key_mask[row]
            place = {int(old): new for new, old in enumerate(q.nonzero()[:, 0])} | {-1: -1}
            parts = attention.weights[row][q][:, k], attention.queries[row][q], attention.keys[row][k]
            pair = Attention(*(part[None].double() for part in parts), q[None], k[None])
            values = by_hand(pair, place[query], place[swapped], margins["ccr_margin"], margins["ccs_margin"])
            total = {name: total[name] + value for name, value in zip(total, values, strict=True)}
    return total


@pytest.mark.parametrize("name", BASE_MODELS)
@pytest.mark.parametrize(
    "objective",
    [HingeTriplet(0.2), HardNegativeTripletLoss(0.2, negatives=1), OfflineLoss()],
    ids=["hinge", "hard negatives", "offline"],
)
def test_the_loss_is_the_ranking_loss_and_its_terms(name: str, objective, any_pairs: PairDataset) -> None:
    model, (batch, *wrong) = base_model(name, any_pairs).eval(), (any_pairs[list(range(n, n + 6))] for n in (0, 40, 80))
    batch = replace(batch, offline=OfflineNegatives(*wrong))  # only AOQ uses these
    margins = {"ccr_margin": 1.5, "ccs_margin": 1.4}
    directions = BASE_MODELS[name][1]
    assert list(model.attention(model.encode_images(batch.images), model.encode_texts(batch.texts))) == directions
    if name == "MMCA":  # one of its two: so that the choice of a direction is tested too
        directions = ["t2i"]
        margins["directions"] = "t2i"
    constrained = AttentionConstraintLoss(objective, ccr_weight=0.7, ccs_weight=0.3, **margins)
    torch.manual_seed(7)
    loss, logs = constrained(model, batch)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.manual_seed(7)
    terms = slow_terms(model, batch, directions, ccr_margin=1.5, ccs_margin=1.4)
    plain, _ = objective(model, batch)
    expected = plain + 0.7 * terms["ccr"] + 0.3 * terms["ccs"]
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert terms["ccr"] > 0.1 and terms["ccs"] > 0.1
    assert logs["ccr"] == pytest.approx(float(terms["ccr"].detach()) / 6 / len(directions), rel=1e-4)
    expected.backward()
    for n, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[n], parameter.grad, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_weight_of_zero_leaves_a_term_out_but_not_its_samples(weights, toy_pairs: PairDataset) -> None:
    model, batch = base_model("SCAN t2i", toy_pairs), toy_pairs[list(range(8))]
    rank, _ = HingeTriplet()(model, batch)
    torch.manual_seed(2)
    loss, logs = AttentionConstraintLoss(HingeTriplet(), ccr_weight=weights[0], ccs_weight=weights[1], ccs_margin=0.5)(
        model, batch
    )
    torch.testing.assert_close(loss, rank + 8 * (weights[0] * logs["ccr"] + weights[1] * logs["ccs"]))
    after = torch.rand(1)
    torch.manual_seed(2)
    AttentionConstraintLoss(HingeTriplet())(model, batch)
    assert torch.equal(after, torch.rand(1)) and logs["ccs"] > 0


def test_for_a_mean_the_terms_are_means(toy_pairs: PairDataset) -> None:
    model, batch = base_model("BFAN", toy_pairs), toy_pairs[list(range(8))]

    def nothing(model: Matcher, batch) -> tuple[Tensor, dict]:
        images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
        return sum(model.extra_losses(images, texts, batch).values()), {}

    losses = []
    for mean in (False, True):
        torch.manual_seed(2)
        losses.append(AttentionConstraintLoss(nothing, mean=mean)(model, batch)[0])
    torch.testing.assert_close(losses[0], 8 * losses[1])
    torch.manual_seed(2)
    loss, logs = AttentionConstraintLoss(nothing)(model, batch)
    torch.testing.assert_close(loss, 8 * 2 * (logs["ccr"] + logs["ccs"]))  # both directions


def test_all_queries_through_the_loss(toy_pairs: PairDataset) -> None:
    model, batch = base_model("SCAN t2i", toy_pairs), toy_pairs[list(range(8))]
    attention = model.attention(model.encode_images(batch.images), model.encode_texts(batch.texts))["t2i"]
    expected = all_query_terms(attention, attention.query_mask & ~batch.texts.special, 0.2, 0.2)
    rank, _ = HingeTriplet()(model, batch)
    loss, _ = AttentionConstraintLoss(HingeTriplet(), queries=0)(model, batch)
    torch.testing.assert_close(loss, rank + expected.ccr.sum() + expected.ccs.sum())


def test_nothing_is_encoded_twice(toy_pairs: PairDataset) -> None:
    model, counted = base_model("SCAN t2i", toy_pairs), Counter()

    def counting(name: str, plain):
        def call(*given):
            counted[name] += 1
            return plain(*given)

        return call

    for name in ("encode_images", "encode_texts", "score"):
        setattr(model, name, counting(name, getattr(model, name)))
    AttentionConstraintLoss(HingeTriplet(), conflicts_every=1)(model, toy_pairs[list(range(6))])
    assert counted == {"encode_images": 1, "encode_texts": 1, "score": 1}


def test_a_models_own_losses_stay(toy_pairs: PairDataset) -> None:
    class WithOwn(SCAN):
        def extra_losses(self, images, texts, batch):
            return {"own": torch.tensor(1000.0)}

    torch.manual_seed(1)
    model, batch = WithOwn(100, toy_pairs.split.feature_dim, **SMALL), toy_pairs[list(range(6))]
    torch.manual_seed(2)
    loss, _ = AttentionConstraintLoss(HingeTriplet())(model, batch)
    model.__class__ = SCAN
    torch.manual_seed(2)
    torch.testing.assert_close(
        loss - 1000, AttentionConstraintLoss(HingeTriplet())(model, batch)[0], rtol=1e-4, atol=1e-4
    )


def test_a_term_is_added_only_for_the_time_of_the_call(toy_pairs: PairDataset) -> None:
    class WithOwn(SCAN):
        def extra_losses(self, images, texts, batch):
            return {"own": torch.tensor(1.0)}

    model, batch = WithOwn(100, toy_pairs.split.feature_dim, **SMALL), toy_pairs[list(range(4))]
    given = model.encode_images(batch.images), model.encode_texts(batch.texts), batch

    def term(name: str):
        return lambda images, texts, batch: {name: images.local.sum() + texts.local.sum()}

    with model.with_loss_term(term("outer")):
        with model.with_loss_term(term("inner")):
            assert list(model.extra_losses(*given)) == ["own", "outer", "inner"]
        assert list(model.extra_losses(*given)) == ["own", "outer"]
        with pytest.raises(KeyboardInterrupt), model.with_loss_term(term("lost")):
            raise KeyboardInterrupt
        assert list(model.extra_losses(*given)) == ["own", "outer"]
    assert list(model.extra_losses(*given)) == ["own"] and "extra_losses" not in vars(model)


def test_one_constraint_inside_another(toy_pairs: PairDataset) -> None:
    """CCR in one direction, CCS in the other: each is added once."""
    model, batch = base_model("BFAN", toy_pairs), toy_pairs[list(range(8))]
    chosen = {"queries": 0, "ccr_margin": 0.5, "ccs_margin": 0.5}
    rank, _ = HingeTriplet()(model, batch)
    inner = AttentionConstraintLoss(HingeTriplet(), 1.0, 0.0, directions="t2i", **chosen)
    outer = AttentionConstraintLoss(inner, 0.0, 1.0, directions="i2t", **chosen)
    one, _ = inner(model, batch)
    two, _ = AttentionConstraintLoss(HingeTriplet(), 0.0, 1.0, directions="i2t", **chosen)(model, batch)
    both, _ = outer(model, batch)
    torch.testing.assert_close(both - rank, (one - rank) + (two - rank))


def test_start_and_end_are_never_queries(toy_pairs: PairDataset) -> None:
    model, batch = base_model("BFAN", toy_pairs), toy_pairs[list(range(8))]
    offered = model.attention(model.encode_images(batch.images), model.encode_texts(batch.texts))
    words = eligible_queries(offered["t2i"], "t2i", batch)
    assert not words[:, 0].any() and words.sum(dim=1).tolist() == (batch.texts.lengths - 2).tolist()
    assert torch.equal(eligible_queries(offered["i2t"], "i2t", batch), batch.images.mask)


def test_logging_conflicts_changes_neither_loss_nor_gradients(toy_pairs: PairDataset) -> None:
    model, batch, seen = base_model("BFAN", toy_pairs), toy_pairs[list(range(8))], []
    for every in (0, 1):
        model.zero_grad()
        torch.manual_seed(4)
        loss, logs = AttentionConstraintLoss(HingeTriplet(), conflicts_every=every)(model, batch)
        loss.backward()
        seen.append((loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.rand(1)))
    assert all(torch.equal(one, two) for one, two in zip(*seen, strict=True))
    assert 0 <= logs["conflict"] <= logs["both_active"] <= 1 and logs["both_active"] > 0


def test_conflicts_are_logged_in_one_batch_of_so_many(toy_pairs: PairDataset) -> None:
    model, logged = base_model("SCAN t2i", toy_pairs), []
    objective = AttentionConstraintLoss(HingeTriplet(), conflicts_every=5)
    rng = np.random.default_rng(0)
    batches = [toy_pairs[rng.choice(len(toy_pairs), 8, replace=False).tolist()] for _ in range(100)]
    for batch in batches:
        _, logs = objective(model, batch)
        logged.append("conflict" in logs)
        own = [logs[name] for name in ("ccr", "ccs", "conflict") if name in logs]
        assert all(isinstance(value, Tensor) and value.dim() == 0 for value in own)  # not read: no step waits
    assert 8 < sum(logged) < 35  # 20 on average
    assert logged == [objective.logs_conflicts(batch) for batch in batches]  # the batch decides, not a counter


@pytest.mark.parametrize("queries", [0, 1, 3])
def test_no_term_and_no_log_waits_for_the_device(queries: int) -> None:
    attention = leaves(ragged().to(DEVICE, non_blocking=True))
    with counting() as syncs:
        objective = AttentionConstraintLoss(HingeTriplet(), queries=queries)
        terms, logs = objective.direction_terms(attention, attention.query_mask, log_conflicts=True)
        (terms.ccr.sum() + terms.ccs.sum() + sum(logs.values())).backward()
    assert not syncs and set(logs) == {"ccr", "ccs", "conflict", "both_active"}


def test_epochs_reach_the_objective() -> None:
    inner = HingeTriplet(warmup_epochs=2)
    constrained = AttentionConstraintLoss(inner)
    constrained.set_epoch(1)
    assert not inner.hardest_now
    constrained.set_epoch(2)
    assert inner.hardest_now
    AttentionConstraintLoss(lambda model, batch: None).set_epoch(3)  # an objective that does not count them


def forgetful(model: Matcher, batch) -> tuple[Tensor, dict]:
    """An objective that leaves out a model's own losses."""
    return model.score(model.encode_images(batch.images), model.encode_texts(batch.texts)).i2t.sum(), {}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda v, d: VSEPP(v, d, **SMALL), {}, "VSEPP: found no attention"),
        (BASE_MODELS["SCAN t2i"][0], {"directions": "i2t"}, "attention t2i, expected attention i2t"),
        (BASE_MODELS["SCAN t2i"][0], {"ranking_loss": forgetful}, "losses 0 times"),
        (BASE_MODELS["SCAN t2i"][0], {"directions": "up"}, "one of all, t2i, i2t"),
    ],
)
def test_what_does_not_fit_is_refused(model, settings: dict, message: str, toy_pairs: PairDataset) -> None:
    settings = {"ranking_loss": HingeTriplet()} | settings
    with pytest.raises(ItmError, match=message):
        AttentionConstraintLoss(**settings)(model(100, toy_pairs.split.feature_dim), toy_pairs[list(range(4))])


def test_base_models_are_built_as_in_their_chapters() -> None:
    given = {"width": 8, "word_dim": 8, "direction": "t2i", "first_norm": "clipped_l2norm", "pooling": "Mean"}
    given |= {"temperature": 9.0, "lse": 6.0, "focal": "equal", "ties": "keep", "bonus": 0.5, "position": "focused"}
    given |= {"position_dim": 4, "grid": 8, "head": "SGR", "sim_dim": 4, "steps": 1, "dropout": 0.0, "region_slots": 0}
    for name, module in {"scan": scan, "bfan": bfan, "pfan": pfan, "sgraf": sgraf}.items():
        torch.manual_seed(0)
        ours = build(given | {"base_model": name}, 30, 7)
        torch.manual_seed(0)
        theirs = module.build(given, 30, 7)
        assert type(ours) is type(theirs) and ours.config == theirs.config
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    with pytest.raises(ItmError, match="one of scan, bfan, pfan, sgraf"):
        build(given | {"base_model": "saem"}, 30, 7)


PARAMETERS = {
    "margin": 0.3, "warmup_epochs": 2, "ccr_weight": 0.5, "ccs_weight": 2.0, "ccr_margin": 0.1, "ccs_margin": 0.4,
    "directions": "t2i", "queries": 3, "swap_within_phrase": True, "epochs": 3, "batch_size": 16, "learning_rate": 0.01, "seed": 5,
    "device": "cpu", "precision": "fp32", "num_workers": 0, "schedule": "paper", "decay_every": 2,
}  # fmt: skip


def test_the_stage_holds_the_parameters() -> None:
    model = SCAN(30, 7, **SMALL)
    (stage,) = stages(PARAMETERS, model)
    loss = stage.objective
    assert stage.model is model and isinstance(loss, AttentionConstraintLoss)
    assert (loss.ranking_loss.margin, loss.ranking_loss.hardest, loss.ranking_loss.warmup_epochs) == (0.3, True, 2)
    assert all(getattr(loss, name) == PARAMETERS[name] for name in ("ccr_weight", "ccs_weight", "ccr_margin"))
    assert (loss.ccs_margin, loss.directions, loss.queries, loss.conflicts_every) == (0.4, "t2i", 3, 20)
    assert (stage.config.epochs, stage.config.schedule, stage.config.decay_every) == (3, "step", 2)


@pytest.mark.parametrize(("ccr", "ccs"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_constraints_without_weight_are_left_out(ccr: float, ccs: float) -> None:
    (stage,) = stages(PARAMETERS | {"ccr_weight": ccr, "ccs_weight": ccs}, SCAN(30, 7, **SMALL))
    if ccr or ccs:
        assert (stage.objective.ccr_weight, stage.objective.ccs_weight) == (ccr, ccs)
        assert stage.objective.conflicts_every == 0
    else:
        assert type(stage.objective) is HingeTriplet


# ---------------------------------------------------------------- training


CONFIG = TrainConfig(epochs=2, batch_size=32, learning_rate=0.01, device="cpu", checkpoint_every=3)


class Dies(HingeTriplet):
    """Stops the run at its seventh call, once."""

    def __init__(self, calls: int | None) -> None:
        super().__init__()
        self._calls = calls

    def __call__(self, model, batch):
        if self._calls == 0:
            raise KeyboardInterrupt
        self._calls = None if self._calls is None else self._calls - 1
        return super().__call__(model, batch)


def test_an_interrupted_run_samples_the_same_queries(toy_pairs: PairDataset, tmp_path: Path) -> None:
    ends = {}
    for name, calls in (("whole", [None]), ("broken", [7, None])):
        for call in calls:
            model = base_model("SCAN t2i", toy_pairs)
            objective = AttentionConstraintLoss(Dies(call), ccr_margin=0.5, ccs_margin=0.5, conflicts_every=3)
            try:
                result = train(model, objective, toy_pairs, CONFIG, tmp_path / name)
            except KeyboardInterrupt:
                assert call == 7
        ends[name] = (result.log, [p.detach().clone() for p in model.parameters()])
    assert ends["whole"][0] == ends["broken"][0]
    assert all(torch.equal(a, b) for a, b in zip(ends["whole"][1], ends["broken"][1], strict=True))


def test_a_run_does_not_go_on_with_another_inner_margin(toy_pairs: PairDataset, tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=1)
    train(base_model("SCAN t2i", toy_pairs), AttentionConstraintLoss(HingeTriplet(0.2)), toy_pairs, config, tmp_path)
    with pytest.raises(ItmError, match=r"margin = 0\.2, expected margin = 0\.3"):
        train(
            base_model("SCAN t2i", toy_pairs), AttentionConstraintLoss(HingeTriplet(0.3)), toy_pairs, config, tmp_path
        )
    with pytest.raises(ItmError, match=r"ccr_margin = 0\.2, expected ccr_margin = 0\.1"):
        train(
            base_model("SCAN t2i", toy_pairs),
            AttentionConstraintLoss(HingeTriplet(0.2), ccr_margin=0.1),
            toy_pairs,
            config,
            tmp_path,
        )


def test_ccr_alone_lowers_ccr_and_ccs_alone_lowers_ccs(toy_pairs: PairDataset) -> None:
    """A few steps on the constraint alone, over all queries: its own value must shrink."""

    def nothing(model: Matcher, batch) -> tuple[Tensor, dict]:
        images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
        return sum(model.extra_losses(images, texts, batch).values()), {}

    for name in ("ccr", "ccs"):
        model, batch = base_model("SCAN t2i", toy_pairs), toy_pairs[list(range(16))]
        only = {"ccr_weight": float(name == "ccr"), "ccs_weight": float(name == "ccs"), "queries": 0}
        objective = AttentionConstraintLoss(nothing, **only)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        seen = []
        for _ in range(25):
            loss, logs = objective(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(logs[name])
        assert seen[-1] < 0.7 * seen[0], name


def test_an_ensemble_has_the_mean_attention_metrics_of_its_members(tmp_path: Path) -> None:
    owner, rng = np.repeat(np.arange(6), 5), torch.Generator().manual_seed(0)
    about = {"chapter": "11_ccr_ccs", "seed": 5, "parameters": {}, "seconds": 1.0, "device": "cpu", "rules": {}}
    about["dataset"] = {"name": "toy", "split": "test", "fingerprint": 64 * "0"}
    folders = [tmp_path / name for name in ("SAF CCR", "SGR CCR")]
    for folder, f1 in zip(folders, (40.0, 50.0), strict=True):
        scores = Scores.same(torch.randn(6, 30, generator=rng))
        more = about | {"curves": {"attention": {"threshold": [0.0], "recall_iou_04": [f1 + 1]}}}
        save_scores(scores, owner, folder, {"att_f1": f1, "dev_rsum": 9.0}, variant=folder.name, **more)
        write_scores(folder / "scores.safetensors", scores)
    ensemble_of(folders, "SGRAF CCR", tmp_path / "receipts")
    receipt = read_receipt(next((tmp_path / "receipts").rglob("*.json")))
    assert receipt["models"] == 2 and receipt["metrics"]["att_f1"]["value"] == 45
    assert "dev_rsum" not in receipt["metrics"]
    assert receipt["curves"] == {"attention": {"threshold": [0.0], "recall_iou_04": [46.0]}}


def test_old_receipts_say_their_number_of_queries() -> None:
    one, every = (read_receipt(ROOT / f"receipts/11_ccr_ccs/{name}_scenes_s10.json") for name in ("SCAN-CCR+CCS", "SCAN-CCR+CCS-all-queries"))  # fmt: skip
    assert (one["parameters"]["queries"], every["parameters"]["queries"]) == (1, 0)
    assert "all_queries" not in one["parameters"]


CURVE_KINDS = ("baseline", "CCR", "CCS", "CCR+CCS")


def write_curve(root: Path, variant: str, seed: int, precision: float, with_curves: bool = True) -> None:
    """A receipt of a small run; its attention has this precision at every recall."""
    curve = {"threshold": [0.0, 0.1, 0.2], "recall_iou_04": [90.0, 50.0, 10.0], "precision_iou_04": 3 * [precision]}
    receipt = make_receipt(
        chapter="11_ccr_ccs", variant=variant, seed=seed, parameters={}, metrics={"rsum": 300.0}, seconds=1.0,
        dataset={"name": "toy", "split": "test", "fingerprint": 64 * "0"}, device="cpu",
        curves={"attention": curve} if with_curves else None,
    )  # fmt: skip
    write_receipt(receipt, root / "receipts")


@pytest.fixture
def drawn_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the cell that draws the paper's Figure 3 in a checkout that has only the test's receipts."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    names = {"none": "--", "CCR": "-.", "CCS": ":", "both": "-"}
    given = {"teach": True, "grounding": True, "by_variant": {}, "DATA_NAME": "toy", "SEEDS": (0, 1), "np": np}
    given |= {"plt": plt, "planned_runs": planned_runs, "KINDS": CURVE_KINDS, "LAB_MODELS": ("SCAN", "BFAN", "SAF")}
    given["styles"] = {name: ("#0072b2", style) for name, style in names.items()}
    yield lambda **more: run_cells("11_ccr_ccs", ("receipt-curves",), given | more)
    plt.close("all")


def test_the_curves_of_receipts_are_drawn_as_means_over_the_seeds(tmp_path: Path, drawn_curves) -> None:
    for model in ("SCAN", "SAF"):
        for number, kind in enumerate(CURVE_KINDS):
            for seed in (0, 1, 2):  # the last is no planned seed
                write_curve(tmp_path, f"{model} {kind}", seed, 20.0 * number + 10 * seed)
    found = drawn_curves()
    assert found.complete == ["SCAN", "SAF"]
    panels = plt.gcf().axes
    assert [panel.get_title() for panel in panels] == ["SCAN", "SAF"]
    for panel in panels:
        for number, (line, kind) in enumerate(zip(panel.lines, CURVE_KINDS, strict=True)):
            assert line.get_label() == kind and line.get_linestyle() == ("--", "-.", ":", "-")[number]
            np.testing.assert_allclose(line.get_xdata(), [90, 50, 10])
            np.testing.assert_allclose(line.get_ydata(), 20.0 * number + 5)  # of seeds 0 and 1
    (legend,) = plt.gcf().legends
    assert [text.get_text() for text in legend.get_texts()] == list(CURVE_KINDS)


@pytest.mark.parametrize(("run", "shown"), [("SGRAF", "SGRAF"), ("SAF", "SAF")])
def test_both_heads_of_sgraf_stand_in_the_place_of_the_first_where_they_were_run(
    run: str, shown: str, tmp_path: Path, drawn_curves, capsys
) -> None:
    """At paper size the ensemble has receipts, with the mean of its members' curves; on Scenes SAF has."""
    for number, kind in enumerate(CURVE_KINDS):
        for name in {run, "SAF"}:  # the members of an ensemble have receipts, too
            write_curve(tmp_path, f"{name} {kind}", 0, 20.0 * number)
    given = {"DATA_NAME": "toy", "seed": 0, "teach": True, "grounding": None, "plt": plt}
    given |= {"lab_table": lab_table, "intervals": intervals}
    found = run_cells("11_ccr_ccs", ("arms",), given)
    assert ("SCAN", "BFAN", shown) == found.LAB_MODELS and list(found.by_variant) == [
        f"{shown} {k}" for k in CURVE_KINDS
    ]
    printed = capsys.readouterr().out
    assert "SCAN CCR+CCS three queries  not run yet" in printed and f"{shown} CCR+CCS" in printed
    assert drawn_curves(LAB_MODELS=found.LAB_MODELS, SEEDS=found.SEEDS).complete == [shown]


def test_a_base_model_without_all_its_curves_is_not_drawn(tmp_path: Path, drawn_curves, capsys) -> None:
    for number, kind in enumerate(CURVE_KINDS):
        write_curve(tmp_path, f"SCAN {kind}", 0, 50.0, with_curves=number > 0)  # the baseline is from before curves
        if number:
            write_curve(tmp_path, f"BFAN {kind}", 0, 50.0)  # and BFAN's has not been run
    assert drawn_curves().complete == [] and not plt.get_fignums()
    assert capsys.readouterr().out == "no base model whose four variants all have receipts with curves\n"
