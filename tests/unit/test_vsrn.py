"""VSRN: padding, order, the two norms, the writer against a slow loop, public options, and its own loss."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from itm_lab.parity.reference_cases import run_case, run_folder
from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, PairBatch, TextBatch
from itm_utils.models.vsepp import HingeTriplet, hinge_loss
from itm_utils.models.vsrn import (
    NOT_ASKED,
    VSRN,
    ReasoningStep,
    build,
    normalise,
    read_regions,
    relations,
    write_greedily,
    writing_task,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "vsrn"
PUBLIC = {
    "vocab_size": 30,
    "img_dim": 6,
    "embed_size": 8,
    "word_dim": 5,
    "num_layers": 1,
    "measure": "cosine",
    "use_abs": False,
    "no_imgnorm": False,
    "data_name": "f30k_precomp",
    "dim_hidden": 7,
    "dim_word": 4,
    "input_dropout_p": 0.2,
    "max_len": 9,
    "bidirectional": False,
    "rnn_type": "gru",
}


def model(seed: int = 0, **options) -> VSRN:
    """A small VSRN whose reasoning does something (its norms start at zero)."""
    torch.manual_seed(seed)
    small = {"width": 8, "word_dim": 5, "caption_width": 7, "caption_word_dim": 4, "max_len": 9}
    made = VSRN(vocabulary_size=30, image_dim=6, **(small | options))
    for step in made.steps:
        torch.nn.init.uniform_(step.norm.weight, 0.2, 0.8)
    return made.eval()


def pictures(n: int = 4, regions: int = 5, seed: int = 1) -> ImageBatch:
    torch.manual_seed(seed)
    mask = torch.ones(n, regions, dtype=torch.bool)
    return ImageBatch(regions=torch.randn(n, regions, 6), mask=mask, ids=torch.arange(n))


def captions(*rows: list[int]) -> TextBatch:
    width = max(map(len, rows))
    words = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return TextBatch(lengths=torch.tensor([len(row) for row in rows]), ids=torch.arange(len(rows)), words=words)


def pairs() -> PairBatch:
    return PairBatch(pictures(), captions([1, 7, 8, 9, 2], [1, 4, 2], [1, 2], [1, *range(4, 16), 2]))


def test_the_public_numbers() -> None:
    rows = list(run_folder(GOLDEN))
    assert len(rows) == 10
    assert all(row.ok for row in rows), [str(row) for row in rows if not row.ok]
    compared = {row.kind for row in rows}
    assert compared == {"values", "losses", "gradients", "metrics"}


def test_parity_fails_where_the_norm_runs_over_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    built = VSRN.from_public.__func__

    def wrong(cls, weights, options):
        made = built(cls, weights, options)
        made.norm_axis = "width"
        return made

    monkeypatch.setattr(VSRN, "from_public", classmethod(wrong))
    assert not all(row.ok for row in run_case(GOLDEN / "given_coco.npz"))


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


def test_a_step_begins_by_changing_nothing() -> None:
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
    batch = pictures()
    made.encode_images(batch)
    plain = {name: value.clone() for name, value in made.named_buffers()}
    again = model(architecture="f30k").train()
    zeros = torch.zeros(4, 3, 6)
    mask = torch.cat([batch.mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    again.encode_images(replace(batch, regions=torch.cat([batch.regions, zeros], dim=1), mask=mask))
    for name, value in again.named_buffers():
        torch.testing.assert_close(value, plain[name])


@pytest.mark.parametrize("norm_axis", ["width", "regions"])
def test_no_picture_depends_on_its_batch(norm_axis: str) -> None:
    made = model(norm_axis=norm_axis)
    batch = pictures()
    together = made.encode_images(batch).pooled
    for i in range(len(batch)):
        torch.testing.assert_close(made.encode_images(batch[i : i + 1]).pooled[0], together[i])


def test_the_two_norms() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(normalise(x, "width").norm(dim=2), torch.ones(2, 5))
    torch.testing.assert_close(normalise(x, "regions").norm(dim=1), torch.ones(2, 3))
    for axis in ("width", "regions"):
        assert not normalise(torch.zeros(1, 2, 3), axis).any()


def test_zero_features_stay_finite_in_value_and_gradient() -> None:
    for axis in ("width", "regions"):
        made = model(norm_axis=axis).train()
        batch = pairs()
        batch = PairBatch(replace(batch.images, regions=torch.zeros_like(batch.images.regions)), batch.texts)
        loss, _ = HingeTriplet()(made, batch)
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in made.parameters() if p.grad is not None)


def test_reading_follows_the_order_and_stops_at_the_last_region() -> None:
    torch.manual_seed(0)
    gru = torch.nn.GRU(3, 4, batch_first=True)
    x, mask = torch.randn(1, 4, 3), torch.tensor([[True, False, True, False]])
    states, kept, last = read_regions(gru, x, mask)
    expected = gru(x[:, [0, 2]])[0]
    torch.testing.assert_close(last, expected[:, -1])
    torch.testing.assert_close(states[:, :2], expected)
    assert kept.tolist() == [[True, True, False, False]]


def test_a_picture_without_regions_is_refused() -> None:
    batch = pictures()
    batch.mask[2] = False
    with pytest.raises(ItmError, match="a picture without regions"):
        model().encode_images(batch)


def test_the_writing_task_by_hand() -> None:
    given, wanted = writing_task(captions([1, 7, 2], [1, 5, 6, 7, 8, 2]), max_len=60)
    assert given.tolist() == [[1, 7, 2, 0, 0, 0], [1, 5, 6, 7, 8, 2]]
    assert wanted.tolist() == [[7, 2, 0, NOT_ASKED, NOT_ASKED, NOT_ASKED], [5, 6, 7, 8, 2, 0]]
    given, wanted = writing_task(captions([1, 7, 2], [1, 5, 6, 7, 8, 2]), max_len=4)
    assert given.tolist() == [[1, 7, 2], [1, 5, 6]]
    assert wanted.tolist() == [[7, 2, 0], [5, 6, 2]]  # cut, and ended


def test_the_writing_task_is_that_of_the_public_labels() -> None:
    for name in ("given_coco", "given_f30k", "given_f30k_sorted"):
        arrays = np.load(GOLDEN / f"{name}.npz")
        texts = TextBatch(
            lengths=torch.from_numpy(arrays["in.lengths"]),
            ids=torch.arange(len(arrays["in.tokens"])),
            words=torch.from_numpy(arrays["in.tokens"]),
        )[torch.from_numpy(arrays["in.pair_cap"])]
        given, wanted = writing_task(texts, max_len=9)
        labels, masks = arrays["in.caption_labels"], arrays["in.caption_masks"]
        assert (given.numpy() == labels[:, :8]).all()
        assert (wanted.numpy() == np.where(masks[:, 1:9] > 0, labels[:, 1:9], NOT_ASKED)).all()


def test_the_captioning_loss_against_a_slow_loop() -> None:
    made = model(caption_weight=0.5)
    batch = pairs()
    regions = made.reason(batch.images)
    total = 0.0
    for b in range(len(batch)):
        entered = made.writer.enter(regions[b])
        states, last = made.writer.text_encoder(entered[None])
        state, states = last[0], states[0]
        tokens = batch.texts.words[b, : batch.texts.lengths[b]].tolist()
        tokens = [*tokens[:8], 2] if len(tokens) > 8 else [*tokens, 0]
        for given, wanted in pairwise(tokens):
            votes = [made.writer.vote(torch.tanh(made.writer.compare(torch.cat([s, state[0]])))) for s in states]
            seen = torch.softmax(torch.cat(votes), dim=0) @ states
            word = made.writer.word_embedding.weight[given]
            state = made.writer.writer(torch.cat([word, seen])[None], state)
            total -= F.log_softmax(made.writer.next_word(state[0]), dim=0)[wanted].item()
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
    assert made.encode_images(pictures()).local is None
    assert made.train().encode_images(pictures()).local.shape == (4, 5, 8)


def test_written_captions_depend_on_their_own_picture_only() -> None:
    made = model()
    regions, mask = made.reason(pictures()), pictures().mask
    written = write_greedily(made.writer, regions, mask, max_len=6)
    assert written.shape == (4, 6)
    assert torch.equal(write_greedily(made.writer, regions[2:3], mask[2:3], max_len=6)[0], written[2])
    # greedy: each word is the likeliest one after those before it
    start = torch.cat([torch.ones(4, 1, dtype=torch.int64), written[:, :-1]], dim=1)
    assert torch.equal(made.writer(regions, mask, start).argmax(dim=-1), written)


def test_public_options() -> None:
    def from_public(**changed) -> VSRN:
        theirs = PUBLIC | changed
        ours = model(architecture="f30k" if theirs["data_name"] == "f30k_precomp" else "coco")
        weights = {}
        for name, value in ours.state_dict().items():
            public, prefix = max(
                ((p, o) for p, o in VSRN.PUBLIC_NAMES.items() if name == o or name.startswith(f"{o}.")),
                key=lambda pair: len(pair[1]),
            )
            weights[public + name.removeprefix(prefix)] = value
        return VSRN.from_public(weights, theirs)

    assert from_public().norm_axis == "regions"
    assert from_public().architecture == "f30k"
    assert from_public(data_name="coco_precomp").architecture == "coco"
    for wrong in ({"bidirectional": True}, {"rnn_type": "lstm"}):
        with pytest.raises(ItmError, match="another captioner"):
            from_public(**wrong)
    with pytest.raises(ItmError, match="no max_len"):
        VSRN.from_public({}, {k: v for k, v in PUBLIC.items() if k != "max_len"})


def test_a_published_checkpoint_has_no_writer() -> None:
    ours = model(architecture="coco", caption_weight=0.0)
    weights = {}
    for public, prefix in VSRN.PUBLIC_NAMES.items():
        for name, value in ours.state_dict().items():
            if name.startswith(f"{prefix}."):
                is_map = name.startswith("steps.") and name.endswith(".weight") and value.dim() == 2
                weights[public + name.removeprefix(prefix)] = value[..., None] if is_map else value
    loaded = VSRN.from_public(weights, PUBLIC | {"data_name": "coco_precomp"}).eval()
    assert loaded.writer is None
    loaded.norm_axis = ours.norm_axis
    torch.testing.assert_close(loaded.encode_images(pictures()).pooled, ours.encode_images(pictures()).pooled)


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
    assert len(made.steps) == 2
    assert (made.architecture, made.norm_axis, made.writer) == ("f30k", "regions", None)
    loss, _ = HingeTriplet()(made.train(), toy_pairs[[0, 5, 10]])
    loss.backward()
    assert made.region_proj.weight.grad.abs().sum() > 0
