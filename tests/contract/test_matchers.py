"""The contract of every matcher: shapes, masks, devices, gradients, blocks, given pairs, attention, copies."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract_cases import CASES, DEFAULTS, MATCHERS, REGIONS, WORDS, Case, encode, image_batch, pair_batch, text_batch
from small_models import exported, small
from torch import Tensor

from itm_lab.finished_run import find_model
from itm_lab.records.collapse import item_vectors
from itm_utils.data.batches import PairDataset
from itm_utils.matcher import Images, Matcher, Scores, Texts, length_mask
from itm_utils.models.vsrn import VSRN
from itm_utils.scoring import score_all
from itm_utils.training.checkpoints import load_model, save_model

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_matcher = pytest.mark.parametrize("case", DEFAULTS, ids=str)
# Encoders in double precision; some models score in single precision by design.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def same_scores(ours: Scores, theirs: Scores) -> None:
    torch.testing.assert_close(ours.i2t, theirs.i2t, **CLOSE, check_dtype=False)
    torch.testing.assert_close(ours.t2i, theirs.t2i, **CLOSE, check_dtype=False)
    assert ours.decoupled == theirs.decoupled


def total(scores: Scores) -> Tensor:
    """A number that every score enters with a weight of its own."""
    both = torch.cat([scores.i2t.flatten(), scores.t2i.flatten()])
    return (both * torch.linspace(0.5, 1.5, len(both), dtype=both.dtype)).sum()


def test_there_is_something_to_test() -> None:
    assert {"VSEPP", "SCAN", "DCPA"} <= {matcher.__name__ for matcher in MATCHERS}
    assert len(CASES) > len(MATCHERS)


# ---------------------------------------------------------------- shapes and devices


@every_case
def test_shapes(case: Case) -> None:
    model = case.build()
    images, texts = encode(model, image_batch(REGIONS[:3]), text_batch())
    assert (len(images), len(texts)) == (3, 5)
    scores, pairs = model.score(images, texts), model.score_pairs(images, texts[:3])
    assert scores.i2t.shape == scores.t2i.shape == (3, 5)
    assert pairs.i2t.shape == pairs.t2i.shape == (3,)
    assert scores.i2t.isfinite().all() and scores.t2i.isfinite().all()
    assert scores.decoupled == pairs.decoupled
    assert model.bytes_per_pair(images, texts) > 0


@every_matcher
def test_items_can_be_compared_with_each_other(case: Case) -> None:
    """Every side has a vector per item, its own or a mean, so that a run can record how alike its items are."""
    for side in encode(case.build()):
        vectors = item_vectors(side)
        assert vectors.shape[0] == len(side) and vectors.dim() == 2 and vectors.isfinite().all()


@every_matcher
def test_another_device(case: Case) -> None:
    """A meta tensor has a shape and a device and no numbers: what is made on the CPU inside a model fails as on a GPU."""
    model, batch = case.build().train().to("meta"), pair_batch(3).to("meta")
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    all_pairs, pairs = model.score(images, texts), model.score_pairs(images, texts)
    assert all_pairs.i2t.shape == all_pairs.t2i.shape == (3, 3)
    assert pairs.i2t.shape == (3,)
    tensors = [all_pairs.i2t, all_pairs.t2i, pairs.i2t, *model.extra_losses(images, texts, batch).values()]
    tensors += [attention.weights for attention in model.attention(images, texts).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@every_case
def test_several_batches_are_encoded_as_if_each_were_alone(case: Case) -> None:
    """In training, where a batch norm would mix them. Batches have captions and regions of different numbers."""
    parts = [pair_batch(), replace(pair_batch(2), offline=None), pair_batch().offline.first]
    found = []
    for together in (True, False):
        model = case.build().train()
        for layer in model.modules():
            if isinstance(layer, torch.nn.Dropout):
                layer.p = 0.0
        sides = [part.images for part in parts], [part.texts for part in parts]
        if together:
            images, texts = model.encode_image_batches(sides[0]), model.encode_text_batches(sides[1])
        else:
            images = Images.cat([model.encode_images(batch) for batch in sides[0]])
            texts = Texts.cat([model.encode_texts(batch) for batch in sides[1]])
        total(model.eval().score(images, texts)).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append([*model.score(images, texts).i2t, *model.buffers(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_mask_follows_its_lengths() -> None:
    assert length_mask(torch.empty(3, device="meta"), 5).device.type == "meta"
    assert length_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]


@every_case
@pytest.mark.parametrize("training", [False, True])
def test_one_of_anything(case: Case, training: bool) -> None:
    """One image, one region, one caption, one word: finite scores and gradients."""
    model = case.build().train(training)
    for regions, words in (((1,), (1,)), ((5,), (1, 4)), ((1, 1, 1), (2, 2)), ((3, 1), (1, 1))):
        if training and case.matcher is VSRN and len(regions) == 1:  # batch statistics need two images
            continue
        scores = model.score(*encode(model, image_batch(regions), text_batch(words)))
        assert scores.i2t.shape == (len(regions), len(words))
        assert scores.i2t.isfinite().all() and scores.t2i.isfinite().all()
        model.zero_grad()
        total(scores).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_matcher
def test_half_precision(case: Case, any_pairs: PairDataset) -> None:
    """Scores differ by at most what the page on using the book promises."""
    page = (Path(__file__).resolve().parents[2] / "book/how-to-use.md").read_text(encoding="utf-8")
    promised = float(re.search(r"^\| `precision=bf16.*\| at most ([\d.]+)", page, re.MULTILINE)[1])
    torch.manual_seed(0)
    model = small(case.matcher, 30, any_pairs.split.feature_dim).eval()
    batch = any_pairs[list(range(0, 60, 3))]
    with torch.inference_mode():
        whole = model.score(*encode(model, batch.images, batch.texts)).i2t
        with torch.autocast("cpu", torch.bfloat16):
            half = model.score(*encode(model, batch.images, batch.texts)).i2t.float()
    assert 0 < (whole - half).abs().max() <= promised


# ---------------------------------------------------------------- masks and batches


@every_case
@pytest.mark.parametrize(("more", "fill"), [(3, 0.0), (2, 100.0)])
def test_padding_changes_nothing(case: Case, more: int, fill: float) -> None:
    """Neither more of it nor what stands there; and no gradient flows into it."""
    model = case.build()
    expected = model.score(*encode(model))
    images, texts = image_batch(more=more, fill=fill), text_batch(more=more, fill=fill)
    images.regions.requires_grad_(), texts.features.requires_grad_()
    scores = model.score(*encode(model, images, texts))
    same_scores(scores, expected)
    total(scores).backward()
    assert not images.regions.grad[~images.mask].any() and images.regions.grad[images.mask].any()
    if texts.features.grad is not None:  # a reader of token states
        assert not texts.features.grad[~texts.mask].any() and texts.features.grad[texts.mask].any()


@every_case
def test_scores_do_not_depend_on_the_rest_of_the_batch(case: Case) -> None:
    """In another order, and each pair alone and cut to its size."""
    model, images, texts = case.build(), image_batch(), text_batch()
    together = model.score(*encode(model, images, texts))
    order = torch.tensor([2, 0, 3, 1, 4])
    turned = model.score(*encode(model, images[order], texts[order]))
    same_scores(turned, together._map(lambda values: values[order][:, order]))
    for i, c in ((0, 0), (1, 2), (2, 1), (3, 3), (4, 2)):
        image, text = images[i : i + 1], texts[c : c + 1]
        columns, rows = slice(0, REGIONS[i]), slice(0, WORDS[c])
        image = replace(image, regions=image.regions[:, columns], mask=image.mask[:, columns], boxes=image.boxes[:, columns])  # fmt: skip
        text = replace(text, words=text.words[:, rows], features=text.features[:, rows], special=text.special[:, rows])
        alone = model.score(*encode(model, image, text))
        same_scores(alone, together._map(lambda values, i=i, c=c: values[i : i + 1, c : c + 1]))


@every_matcher
def test_in_single_precision_scores_do_not_depend_on_the_rest_of_the_batch(case: Case, any_pairs: PairDataset) -> None:
    """On data in the real format, through the kernels that training uses."""
    torch.manual_seed(0)
    model = small(case.matcher, 30, any_pairs.split.feature_dim).eval()
    batch = any_pairs[list(range(40))]
    images, texts = encode(model, batch.images, batch.texts)
    together = model.score(images, texts)
    torch.testing.assert_close(model.score_pairs(images, texts).i2t, together.i2t.diagonal())
    shortest = int(batch.texts.lengths.argmin())
    alone = any_pairs[[shortest]]
    one = model.score(*encode(model, alone.images, alone.texts))
    torch.testing.assert_close(one.t2i[0, 0], together.t2i[shortest, shortest])
    torch.testing.assert_close(one.i2t[0, 0], together.i2t[shortest, shortest])


@every_case
def test_one_of_anything_simply_works(case: Case) -> None:
    """One image, one caption, one region, one word: scores and gradients are finite."""
    model = case.build()
    for regions, lengths in (((1,), (1,)), ((5,), (1, 4)), ((1, 1, 1), (2, 2)), ((3, 1), (1, 1, 1))):
        scores = model.score(*encode(model, image_batch(regions), text_batch(lengths)))
        assert scores.i2t.shape == (len(regions), len(lengths))
        assert scores.i2t.isfinite().all() and scores.t2i.isfinite().all()
        total(scores).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


@every_case
def test_encodings_of_batches_can_be_joined(case: Case) -> None:
    """Batches are padded to their own widths; joined, they score as one batch."""
    model, images, texts = case.build(), image_batch(), text_batch()
    sides: list[list] = [[], []]
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        width, length = max(REGIONS[part]), max(WORDS[part])
        image, text = images[part], texts[part]
        image = replace(image, regions=image.regions[:, :width], mask=image.mask[:, :width], boxes=image.boxes[:, :width])  # fmt: skip
        text = replace(text, words=text.words[:, :length], features=text.features[:, :length], special=text.special[:, :length])  # fmt: skip
        sides[0].append(model.encode_images(image))
        sides[1].append(model.encode_texts(text))
    same_scores(model.score(Images.cat(sides[0]), Texts.cat(sides[1])), model.score(*encode(model)))


@every_case
def test_blocks_do_not_change_a_score(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        images, texts = encode(model)
        expected = model.score(images, texts)
    for pairs in (1, 3, 7, 100):
        budget = pairs * model.bytes_per_pair(images, texts)
        same_scores(score_all(model, images, texts, budget, progress=False), expected)


@every_case
def test_given_pairs_are_entries_of_all_pairs(case: Case) -> None:
    model = case.build()
    images, texts = encode(model)
    scores = model.score(images, texts)
    same_scores(model.score_pairs(images, texts), scores._map(torch.diagonal))
    row, column = torch.cartesian_prod(torch.arange(5), torch.arange(5)).unbind(dim=1)
    same_scores(model.score_pairs(images[row], texts[column]), scores._map(Tensor.flatten))


# ---------------------------------------------------------------- attention


@every_case
def test_attention_sums_to_one_over_real_keys(case: Case) -> None:
    model = case.build()
    images, texts = encode(model)
    for direction, found in model.attention(images, texts).items():
        sides = (texts.mask, images.mask) if direction == "t2i" else (images.mask, texts.mask)
        queries, keys = found.query_mask, found.key_mask
        assert found.weights.shape == (5, queries.shape[1], keys.shape[1])
        assert found.queries.shape[:2] == queries.shape and found.keys.shape[:2] == keys.shape
        for ours, side in zip((queries, keys), sides, strict=True):  # some tokens may be left out, none is added
            assert ours.shape == side.shape and not (ours & ~side).any() and ours.any(dim=1).all()
        sums = found.weights.sum(dim=2)[queries]
        torch.testing.assert_close(sums, torch.ones_like(sums), **CLOSE)
        assert (found.weights >= 0).all()
        assert not found.weights[~keys[:, None, :].expand_as(found.weights)].any()
        model.zero_grad()
        (found.weights[queries] ** 2).sum().backward(retain_graph=True)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.any() for gradient in gradients)


# ---------------------------------------------------------------- gradients


@every_case
def test_gradients_reach_every_parameter(case: Case) -> None:
    """Through the scores and the model's own losses; a parameter that nothing reaches would stay at its initial value."""
    model, batch = case.build(), pair_batch()
    torch.manual_seed(1)
    model.train()
    images, texts = encode(model, batch.images, batch.texts)
    loss = total(model.score(images, texts)) + sum(
        term.sum() for term in model.extra_losses(images, texts, batch).values()
    )
    loss.backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if unused(case, name):  # and nothing else is excused
            assert parameter.grad is None or parameter.grad.abs().max() < 1e-12, name
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# Parameters that some variants keep and do not use, so that all variants have one state dictionary; and biases that
# shift every logit of one softmax alike, which changes nothing.
UNUSED = (
    ("MMCA", {"parts": "first"}, ("cross_attention.",)),
    ("MMCA", {"parts": "cross"}, tuple(f"self_attention.{part}." for part in ("transformer", "text_cnn", "text_proj"))),
    ("PFAN", {"position": "area"}, ("position_encoder.query_proj.",)),
    ("SGRAF", {}, ("image_pool.logit_proj.bias", "text_pool.logit_proj.bias")),
)


def unused(case: Case, name: str) -> bool:
    return any(
        case.matcher.__name__ == kind and chosen.items() <= case.options.items() and name.startswith(parts)
        for kind, chosen, parts in UNUSED
    )


# ---------------------------------------------------------------- copies


@every_case
def test_a_model_is_built_again_from_its_config(case: Case, tmp_path: Path) -> None:
    model = case.build()
    config = json.loads(json.dumps(model.config))
    again = case.matcher(**config).double().eval()
    assert json.loads(json.dumps(again.config)) == config
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == shapes
    again.load_state_dict(model.state_dict())
    same_scores(again.score(*encode(again)), model.score(*encode(model)))


@every_matcher
def test_a_checkpoint_without_pickle_brings_the_model_back(case: Case, tmp_path: Path) -> None:
    model = case.build()
    save_model(tmp_path / "it.safetensors", model, {"split": "toy"})
    again = case.matcher(**model.config).double().eval()
    load_model(tmp_path / "it.safetensors", again, {"split": "toy"})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    same_scores(again.score(*encode(again)), model.score(*encode(model)))


@every_case
def test_a_copy_shares_nothing(case: Case) -> None:
    model = case.build()
    expected = model.score(*encode(model))
    with model.with_loss_term(lambda images, texts, batch: {}):
        pass
    twin = copy.deepcopy(model)
    assert twin.config == model.config and twin.config is not model.config
    same_scores(twin.score(*encode(twin)), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    same_scores(model.score(*encode(model)), expected)


# ---------------------------------------------------------------- what others ask of a matcher


@pytest.mark.parametrize("matcher", exported(Matcher), ids=lambda kind: kind.__name__)
def test_a_whole_model_is_found_by_its_name_and_no_part_of_one(matcher: type[Matcher]) -> None:
    bases = {base for kind in exported(Matcher) for base in kind.__mro__[1:]}
    assert find_model(matcher.__name__) is (None if matcher in bases else matcher)
