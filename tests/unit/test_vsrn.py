"""VSRN: padding, order, the two norms, the caption decoder against a slow loop, its loss, and a run's parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from notebook_cells import run_cells
from torch.nn import functional as F

from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, PairBatch, TextBatch
from itm_utils.models import vsrn
from itm_utils.models.vsepp import HingeTriplet, hinge_loss
from itm_utils.models.vsrn import (
    IGNORE_INDEX,
    VSRN,
    ReasoningStep,
    build,
    encode_regions,
    normalize_regions,
    relations,
    stages,
    teacher_forcing,
)


def model(seed: int = 0, **options) -> VSRN:
    """A small VSRN whose reasoning does something (its norms start at zero)."""
    torch.manual_seed(seed)
    small = {"width": 8, "word_dim": 5, "caption_width": 7, "caption_word_dim": 4, "max_len": 9}
    made = VSRN(vocabulary_size=30, image_dim=6, **(small | options))
    for step in made.reasoning.steps:
        torch.nn.init.uniform_(step.norm.weight, 0.2, 0.8)
    return made.eval()


def image_batch(n: int = 4, regions: int = 5, seed: int = 1) -> ImageBatch:
    torch.manual_seed(seed)
    mask = torch.ones(n, regions, dtype=torch.bool)
    return ImageBatch(regions=torch.randn(n, regions, 6), mask=mask, ids=torch.arange(n))


def captions(*rows: list[int]) -> TextBatch:
    width = max(map(len, rows))
    words = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return TextBatch(lengths=torch.tensor([len(row) for row in rows]), ids=torch.arange(len(rows)), words=words)


def pairs() -> PairBatch:
    return PairBatch(image_batch(), captions([1, 7, 8, 9, 2], [1, 4, 2], [1, 2], [1, *range(4, 16), 2]))


def test_relations_against_a_loop() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[True, True, True, False], [True, False, True, True]])
    found = relations(queries, keys, mask)
    for i in range(2):
        for r in range(4):
            for k in range(4):
                expected = float(queries[i, r] @ keys[i, k]) / 3 if mask[i, k] else 0.0
                assert math.isclose(found[i, r, k].item(), expected, abs_tol=1e-6)


def test_a_step_is_the_identity_at_initialisation() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 8)
    step = ReasoningStep(8).train()
    torch.testing.assert_close(step(x, torch.ones(3, 4, dtype=torch.bool)), x)


@pytest.mark.parametrize("norm_axis", ["width", "regions"])
@pytest.mark.parametrize("architecture", ["coco", "f30k"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(norm_axis: str, architecture: str, training: bool) -> None:
    made = model(norm_axis=norm_axis, architecture=architecture, caption_dropout=0.0).train(training)
    plain = pairs()
    garbage = torch.full((4, 2, 6), 1e3)
    regions = torch.cat([garbage[:, :1], plain.images.regions, garbage[:, 1:]], dim=1)
    mask = torch.tensor([[False, *[True] * 5, False]]).expand(4, -1)
    padded = PairBatch(replace(plain.images, regions=regions, mask=mask), plain.texts)
    results = []
    for batch in (plain, padded):
        images, texts = made.encode_images(batch.images), made.encode_texts(batch.texts)
        loss = made.extra_losses(images, texts, batch)["captioning"]
        results.append((images.pooled, made.score(images, texts).i2t, loss))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_batch_statistics_leave_padding_out() -> None:
    made = model(architecture="f30k").train()
    batch = image_batch()
    made.encode_images(batch)
    plain = {name: value.clone() for name, value in made.named_buffers()}
    again = model(architecture="f30k").train()
    zeros = torch.zeros(4, 3, 6)
    mask = torch.cat([batch.mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    again.encode_images(replace(batch, regions=torch.cat([batch.regions, zeros], dim=1), mask=mask))
    for name, value in again.named_buffers():
        torch.testing.assert_close(value, plain[name])


@pytest.mark.parametrize("norm_axis", ["width", "regions"])
def test_no_image_depends_on_its_batch(norm_axis: str) -> None:
    made = model(norm_axis=norm_axis)
    batch = image_batch()
    together = made.encode_images(batch).pooled
    for i in range(len(batch)):
        torch.testing.assert_close(made.encode_images(batch[i : i + 1]).pooled[0], together[i])


def test_the_two_norms() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(normalize_regions(x, "width").norm(dim=2), torch.ones(2, 5))
    torch.testing.assert_close(normalize_regions(x, "regions").norm(dim=1), torch.ones(2, 3))
    for axis in ("width", "regions"):
        assert not normalize_regions(torch.zeros(1, 2, 3), axis).any()


def test_zero_features_stay_finite_in_value_and_gradient() -> None:
    for axis in ("width", "regions"):
        made = model(norm_axis=axis).train()
        batch = pairs()
        batch = PairBatch(replace(batch.images, regions=torch.zeros_like(batch.images.regions)), batch.texts)
        loss, _ = HingeTriplet()(made, batch)
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in made.parameters() if p.grad is not None)


def test_the_region_gru_follows_the_order_and_stops_at_the_last_region() -> None:
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 4, batch_first=True)
    x, mask = torch.randn(1, 4, 3), torch.tensor([[True, False, True, False]])
    states, kept, last = encode_regions(gru, x, mask)
    expected = gru(x[:, [0, 2]])[0]
    torch.testing.assert_close(last, expected[:, -1])
    torch.testing.assert_close(states[:, :2], expected)
    assert kept.tolist() == [[True, True, False, False]]


def test_an_image_without_regions_is_refused() -> None:
    batch = image_batch()
    batch.mask[2] = False
    with pytest.raises(ItmError, match="an image without regions"):
        model().encode_images(batch)


def test_teacher_forcing_by_hand() -> None:
    inputs, targets = teacher_forcing(captions([1, 7, 2], [1, 5, 6, 7, 8, 2]), max_len=60)
    assert inputs.tolist() == [[1, 7, 2, 0, 0, 0], [1, 5, 6, 7, 8, 2]]
    assert targets.tolist() == [[7, 2, 0, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX], [5, 6, 7, 8, 2, 0]]
    inputs, targets = teacher_forcing(captions([1, 7, 2], [1, 5, 6, 7, 8, 2]), max_len=4)
    assert inputs.tolist() == [[1, 7, 2], [1, 5, 6]]
    assert targets.tolist() == [[7, 2, 0], [5, 6, 2]]  # truncated, with an end mark


def test_the_captioning_loss_against_a_slow_loop() -> None:
    made = model(caption_weight=0.5)
    batch = pairs()
    regions, decoder = made.reasoning(batch.images), made.caption_decoder
    total = 0.0
    for b in range(len(batch)):
        inputs = decoder.input_proj(regions[b])
        states, last = decoder.encoder(inputs[None])
        state, states = last[0], states[0]
        tokens = batch.texts.words[b, : batch.texts.lengths[b]].tolist()
        tokens = [*tokens[:8], 2] if len(tokens) > 8 else [*tokens, 0]
        for word, target in pairwise(tokens):
            compared = [torch.tanh(decoder.attention_proj(torch.cat([s, state[0]]))) for s in states]
            logits = [decoder.attention_score(x) for x in compared]
            context = torch.softmax(torch.cat(logits), dim=0) @ states
            embedded = decoder.word_embedding.weight[word]
            state = decoder.decoder(torch.cat([embedded, context])[None], state)
            total -= F.log_softmax(decoder.out_proj(state[0]), dim=0)[target].item()
    images, texts = made.encode_images(batch.images), made.encode_texts(batch.texts)
    found = made.extra_losses(images, texts, batch)["captioning"]
    assert math.isclose(found.item(), 0.5 * total / len(batch), rel_tol=1e-5)


def test_every_objective_adds_it() -> None:
    made = model()
    batch = pairs()
    images, texts = made.encode_images(batch.images), made.encode_texts(batch.texts)
    ranking = hinge_loss(made.score(images, texts), 0.2, hardest=True)
    loss, _ = HingeTriplet(0.2)(made, batch)
    torch.testing.assert_close(loss, ranking + made.extra_losses(images, texts, batch)["captioning"])
    assert model(caption_weight=0.0).extra_losses(images, texts, batch) == {}


def test_only_training_keeps_the_regions() -> None:
    made = model()
    assert made.encode_images(image_batch()).local is None
    assert made.train().encode_images(image_batch()).local.shape == (4, 5, 8)


def test_decoded_captions_depend_on_their_own_image_only() -> None:
    made = model()
    regions, mask = made.reasoning(image_batch()), image_batch().mask
    greedy_decode = run_cells("05_vsrn", ("write-greedily",), vars(vsrn)).greedy_decode
    written = greedy_decode(made.caption_decoder, regions, mask, max_len=6)
    assert written.shape == (4, 6)
    assert torch.equal(greedy_decode(made.caption_decoder, regions[2:3], mask[2:3], max_len=6)[0], written[2])
    # greedy: each word is the likeliest one after those before it
    start = torch.cat([torch.ones(4, 1, dtype=torch.int64), written[:, :-1]], dim=1)
    assert torch.equal(made.caption_decoder(regions, mask, start).argmax(dim=-1), written)


@pytest.mark.parametrize("wrong", [{"architecture": "f8k"}, {"norm_axis": "batch"}, {"measure": "l1"}])
def test_unknown_choices_are_named(wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(ItmError, match=name):
        model(**wrong)


def test_a_run_builds_its_model(toy_pairs: PairDataset) -> None:
    parameters = {"width": 8, "word_dim": 5, "reasoning_steps": 2, "architecture": "f30k", "norm_axis": "regions"}
    parameters |= {"caption_weight": 0.0, "caption_width": 7, "caption_word_dim": 4}
    parameters |= {"caption_dropout": 0.1, "max_len": 20, "epochs": 3}
    made = build(parameters, 30, toy_pairs.split.feature_dim)
    assert len(made.reasoning.steps) == 2
    assert (made.reasoning.architecture, made.reasoning.norm_axis, made.caption_decoder) == ("f30k", "regions", None)
    loss, _ = HingeTriplet()(made.train(), toy_pairs[[0, 5, 10]])
    loss.backward()
    assert made.reasoning.region_proj.weight.grad.abs().sum() > 0


def test_a_run_has_one_stage() -> None:
    parameters = {"width": 8, "word_dim": 5, "reasoning_steps": 2, "architecture": "f30k", "norm_axis": "regions"}
    parameters |= {"caption_weight": 0.0, "caption_width": 7, "caption_word_dim": 4}
    parameters |= {"caption_dropout": 0.1, "max_len": 20, "epochs": 3, "margin": 0.3, "warmup_epochs": 1}
    parameters |= {"batch_size": 4, "learning_rate": 0.01, "seed": 0, "device": "cpu", "precision": "fp32"}
    parameters |= {"num_workers": 0, "schedule": "lab", "decay_every": 15}
    made = build(parameters, 30, 6)
    (stage,) = stages(parameters, made)
    assert stage.validated is made
    assert (stage.objective.margin, stage.objective.hardest, stage.objective.warmup_epochs) == (0.3, True, 1)
    assert (stage.config.epochs, stage.config.learning_rate) == (3, 0.01)
