"""SAEM: attention against loops, the text CNN against windows, padding, losses, and the published schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from itm_lab.data.opening import token_states
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, PairBatch, TextBatch, length_mask
from itm_utils.models.saem import (
    SAEM,
    WINDOWS,
    MultiHeadAttention,
    TextCNN,
    TransformerLayer,
    angular_loss,
    build,
    stages,
)
from itm_utils.models.vsepp import HingeTriplet, hinge_loss

SETTINGS = {"width": 8, "token_dim": 6, "feed_forward": 10, "channels": 5}


def model(**more) -> SAEM:
    torch.manual_seed(0)
    return SAEM(30, 7, **(SETTINGS | more)).eval()


def texts_of(lengths: list[int], width: int | None = None, seed: int = 0) -> TextBatch:
    """Token states with garbage under the padding."""
    sizes = torch.tensor(lengths)
    features = torch.randn(len(lengths), width or max(lengths), 6, generator=torch.Generator().manual_seed(seed))
    return TextBatch(lengths=sizes, ids=torch.arange(len(lengths)), features=features)


def images_of(counts: list[int], seed: int = 1) -> ImageBatch:
    regions = torch.randn(len(counts), max(counts), 7, generator=torch.Generator().manual_seed(seed))
    mask = length_mask(torch.tensor(counts), max(counts))
    return ImageBatch(regions=regions, mask=mask, ids=torch.arange(len(counts)))


def attention_by_loop(layer: MultiHeadAttention, queries: Tensor, context: Tensor) -> Tensor:
    """One head, one query, one key at a time; no padding."""
    q, k, v = layer.q_proj(queries), layer.k_proj(context), layer.v_proj(context)
    width = q.shape[-1] // layer.heads
    found = torch.zeros_like(q)
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        for row in range(len(q)):
            logits = torch.stack([q[row, part] @ key[part] / math.sqrt(width) for key in k])
            weights = logits.exp() / logits.exp().sum()
            found[row, part] = sum(w * value[part] for w, value in zip(weights, v, strict=True))
    return layer.out_proj(found)


def test_heads_are_the_loop_and_leave_padding_out() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2).eval()
    queries, context = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    mask = length_mask(torch.tensor([5, 2, 1]), 5)
    with torch.no_grad():
        found, weights = layer(queries, context, mask)
        for item in range(3):
            expected = attention_by_loop(layer, queries[item], context[item][mask[item]])
            torch.testing.assert_close(found[item], expected)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 2, 4))
    assert (weights[~mask[:, None, None, :].expand_as(weights)] == 0).all()


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ItmError, match="divides the width 8"):
        MultiHeadAttention(8, 3)


def test_heads_compute_pytorchs_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2).eval()
    queries, context = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    mask = length_mask(torch.tensor([5, 2, 1]), 5)
    q, k, v = (
        layer.split_heads(proj(x))
        for proj, x in ((layer.q_proj, queries), (layer.k_proj, context), (layer.v_proj, context))
    )
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    torch.testing.assert_close(layer(queries, context, mask)[0], layer.out_proj(fused.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(("activation", "eps"), [("gelu", 1e-12), ("relu", 1e-5)])
def test_the_layer_is_the_one_of_torch(activation: str, eps: float) -> None:
    torch.manual_seed(0)
    ours = TransformerLayer(8, 2, 12, dropout=0.0, activation=activation, eps=eps)
    theirs = torch.nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation=activation, layer_norm_eps=eps, batch_first=True
    )
    maps = (ours.attention.q_proj, ours.attention.k_proj, ours.attention.v_proj)
    weights = {
        "self_attn.in_proj_weight": torch.cat([linear.weight for linear in maps]),
        "self_attn.in_proj_bias": torch.cat([linear.bias for linear in maps]),
    }
    pairs = {"self_attn.out_proj": ours.attention.out_proj, "linear1": ours.linear1, "linear2": ours.linear2}
    pairs |= {"norm1": ours.attn_norm, "norm2": ours.ffn_norm}
    for name, part in pairs.items():
        weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    theirs.load_state_dict(weights)
    vectors, mask = torch.randn(2, 5, 8), length_mask(torch.tensor([5, 3]), 5)
    expected = theirs(vectors, src_key_padding_mask=~mask)
    torch.testing.assert_close(ours(vectors, mask)[0][mask], expected[mask])


def cnn_by_loop(cnn: TextCNN, tokens: Tensor) -> Tensor:
    """One window at a time; tokens (w, d) without padding."""
    pooled = []
    for conv, window in zip(cnn.convs, WINDOWS, strict=True):
        filled = torch.cat([tokens, tokens.new_zeros(max(0, window - len(tokens)), tokens.shape[1])])
        responses = [
            torch.einsum("fdw,wd->f", conv.weight, filled[k : k + window]) + conv.bias
            for k in range(len(filled) - window + 1)
        ]
        pooled.append(torch.stack(responses).relu().amax(dim=0))
    return torch.cat(pooled)


@pytest.mark.parametrize("width", [5, 9])
def test_the_text_cnn_pools_windows_of_real_tokens_only(width: int) -> None:
    torch.manual_seed(0)
    cnn = TextCNN(6, 5)
    batch = texts_of([5, 3, 2, 1], width)
    found = cnn(batch.features, batch.mask)
    for row, length in enumerate(batch.lengths.tolist()):
        torch.testing.assert_close(found[row], cnn_by_loop(cnn, batch.features[row, :length]))


def test_a_batch_of_one_token_captions() -> None:
    batch = texts_of([1, 1])
    assert model().encode_texts(batch).pooled.isfinite().all()


def test_nothing_under_a_mask_takes_part() -> None:
    matcher = model()
    texts, images = texts_of([5, 2, 3]), images_of([4, 1, 2])
    torn = replace(texts, features=texts.features.masked_fill(~texts.mask[..., None], float("nan")))
    torch.testing.assert_close(matcher.encode_texts(torn).pooled, matcher.encode_texts(texts).pooled)
    other = replace(images, regions=images.regions.masked_fill(~images.mask[..., None], 99.0))
    torch.testing.assert_close(matcher.encode_images(other).pooled, matcher.encode_images(images).pooled)


def test_scores_do_not_depend_on_the_batch_unless_padding_leaks() -> None:
    texts = texts_of([2, 6])
    alone = texts_of([2], 6)[:1]
    alone = replace(alone, features=texts.features[:1, :2])
    for leak in (False, True):
        matcher = model(public_padding=leak)
        moved = (matcher.encode_texts(texts).pooled[0] - matcher.encode_texts(alone).pooled[0]).abs().max()
        assert (moved > 1e-3) == leak


def test_given_pairs_are_the_diagonal_and_order_of_regions_does_not_matter() -> None:
    matcher = model()
    images, texts = matcher.encode_images(images_of([4, 4, 4])), matcher.encode_texts(texts_of([5, 2, 3]))
    torch.testing.assert_close(matcher.score_pairs(images, texts).i2t, matcher.score(images, texts).i2t.diagonal())
    batch = images_of([4, 4, 4])
    turned = replace(batch, regions=batch.regions[:, [3, 1, 0, 2]])
    torch.testing.assert_close(matcher.encode_images(turned).pooled, images.pooled)
    assert matcher.attention(images, texts) == {}


def angular_by_loop(images: Tensor, texts: Tensor, soft: bool) -> float:
    total = 0.0
    for anchors, positives in ((images, texts), (texts, images)):
        for b in range(len(anchors)):
            a, p = anchors[b], positives[b]
            costs = [float(4 * (a + p) @ positives[n] - 4 * a @ p) for n in range(len(positives)) if n != b]
            total += math.log1p(sum(map(math.exp, costs))) / len(anchors) if soft else math.log1p(math.exp(max(costs)))
    return total


@pytest.mark.parametrize("soft", [False, True])
def test_the_angular_loss_is_its_definition(soft: bool) -> None:
    images, texts = torch.nn.functional.normalize(
        torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)), dim=-1
    )
    assert angular_loss(images, texts, soft).item() == pytest.approx(angular_by_loop(images, texts, soft), rel=1e-5)


def test_one_pair_has_no_negative_and_a_finite_gradient() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(2, 1, 4), dim=-1).requires_grad_()
    loss = angular_loss(*vectors)
    loss.backward()
    assert loss.item() == 0 and vectors.grad.isfinite().all()


def test_own_losses_fade_and_every_objective_adds_them() -> None:
    matcher = model()
    batch = PairBatch(images=images_of([4, 4, 4]), texts=texts_of([5, 2, 3]))
    images, texts = matcher.encode_images(batch.images), matcher.encode_texts(batch.texts)
    expected = {0: 0.5, 4: 0.5, 5: 0.05, 10: 0.005, 20: 0.5e-4}
    plain = angular_loss(images.pooled, texts.pooled)
    for epoch, weight in expected.items():
        matcher.set_epoch(epoch)
        own = matcher.extra_losses(images, texts, batch)
        torch.testing.assert_close(own["angular"], weight * plain)
    matcher.set_epoch(21)
    assert set(matcher.extra_losses(images, texts, batch)) == {"weight_penalty"}
    matrices = [p for p in matcher.image_encoder.parameters() if p.dim() == 2]
    assert len(matrices) == 7
    penalty = 0.01 * sum(matrix.norm() for matrix in matrices)
    total, _ = HingeTriplet(0.2)(matcher, batch)
    torch.testing.assert_close(total, hinge_loss(matcher.score(images, texts), 0.2, True) + penalty)
    assert model(angular_weight=0.0, weight_penalty=0.0).extra_losses(images, texts, batch) == {}


def test_word_ids_are_refused() -> None:
    batch = TextBatch(lengths=torch.tensor([2]), ids=torch.tensor([0]), words=torch.tensor([[4, 5]]))
    with pytest.raises(ItmError, match="expected states of a text encoder"):
        model().encode_texts(batch)


def test_captions_are_opened_as_the_parameters_say() -> None:
    asked = {"text_encoder": "scenes-mini", "text_layers": "0,-1", "token_dim": 128}
    assert callable(token_states(asked))
    with pytest.raises(ItmError, match="Set token_dim to 64"):
        token_states(asked | {"text_layers": "-1"})
    with pytest.raises(ItmError, match="whole numbers such as 0,-1"):
        token_states(asked | {"text_layers": "last"})


def test_build_takes_the_chapters_parameters() -> None:
    parameters = SETTINGS | {"layers": 0, "dropout": 0.0, "angular_weight": 0.0, "weight_penalty": 0.0}
    matcher = build(parameters | {"public_padding": True, "margin": 0.2}, 30, 7)
    assert len(matcher.image_encoder.layers) == 0 and matcher.public_padding and matcher.config["token_dim"] == 6


def test_a_run_has_one_stage() -> None:
    parameters = SETTINGS | {"layers": 1, "dropout": 0.0, "angular_weight": 0.5, "weight_penalty": 0.01}
    parameters |= {"public_padding": False, "margin": 0.3, "warmup_epochs": 1, "epochs": 3, "clip_norm": 1.5}
    parameters |= {"batch_size": 4, "learning_rate": 0.01, "seed": 0, "device": "cpu", "precision": "fp32"}
    parameters |= {"num_workers": 0, "schedule": "paper", "decay_every": 10}
    matcher = build(parameters, 30, 7)
    (stage,) = stages(parameters, matcher)
    assert stage.validated is matcher
    assert (stage.objective.margin, stage.objective.hardest, stage.objective.warmup_epochs) == (0.3, True, 1)
    assert (stage.config.epochs, stage.config.clip_norm, stage.config.decay_every) == (3, 1.5, 10)


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 1, 5, 8)])
def test_residual_added_in_place_is_the_sum(shape: tuple[int, ...]) -> None:
    """Without gradients the product is added in place, to vectors that may be the same for several pairs."""
    torch.manual_seed(0)
    layer, vectors, x = TransformerLayer(8, 2, 6).eval(), torch.randn(shape), torch.randn(3, 4, 5, 6)
    x = x if len(shape) == 4 else x[:, 0]
    kept = vectors.clone()
    expected = vectors + layer.linear2(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.add_residual(vectors, layer.linear2, x), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.add_residual(vectors, layer.linear2, x).dtype == torch.float32
    torch.testing.assert_close(vectors, kept)
    layer.train()
    layer.dropout.p = 1.0
    with torch.no_grad():
        torch.testing.assert_close(layer.add_residual(vectors, layer.linear2, x), vectors.expand_as(expected))
