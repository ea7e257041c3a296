"""SAEM: attention against loops, the text CNN against windows, padding, losses, BERT, and the published schedule."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from itm_lab.data.opening import token_states
from itm_lab.parity.comparison import our_name
from itm_lab.parity.reference_cases import run_case
from itm_utils.data.text_encoder import load_text_encoder
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, PairBatch, TextBatch, length_mask
from itm_utils.models.saem import (
    SAEM,
    WINDOWS,
    Bert,
    MultiHeadAttention,
    TextCNN,
    TransformerLayer,
    angular_loss,
    build,
)
from itm_utils.models.vsepp import HingeTriplet, hinge_loss
from itm_utils.training.checkpoints import load_model, save_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "saem"
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
    q, k, v = layer.query(queries), layer.key(context), layer.value(context)
    width = q.shape[-1] // layer.heads
    found = torch.zeros_like(q)
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)
        for row in range(len(q)):
            logits = torch.stack([q[row, part] @ key[part] / math.sqrt(width) for key in k])
            weights = logits.exp() / logits.exp().sum()
            found[row, part] = sum(w * value[part] for w, value in zip(weights, v, strict=True))
    return layer.output(found)


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
    best = []
    for conv, window in zip(cnn.convs, WINDOWS, strict=True):
        filled = torch.cat([tokens, tokens.new_zeros(max(0, window - len(tokens)), tokens.shape[1])])
        answers = [
            torch.einsum("fdw,wd->f", conv.weight, filled[k : k + window]) + conv.bias
            for k in range(len(filled) - window + 1)
        ]
        best.append(torch.stack(answers).relu().amax(dim=0))
    return torch.cat(best)


@pytest.mark.parametrize("width", [5, 9])
def test_the_text_cnn_sees_windows_of_real_tokens_only(width: int) -> None:
    torch.manual_seed(0)
    cnn = TextCNN(6, 5)
    batch = texts_of([5, 3, 2, 1], width)
    answers = cnn(batch.features, batch.mask)
    for row, length in enumerate(batch.lengths.tolist()):
        torch.testing.assert_close(answers[row], cnn_by_loop(cnn, batch.features[row, :length]))


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


def test_scores_do_not_depend_on_company_unless_padding_leaks() -> None:
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
    for anchors, partners in ((images, texts), (texts, images)):
        for b in range(len(anchors)):
            a, p = anchors[b], partners[b]
            costs = [float(4 * (a + p) @ partners[n] - 4 * a @ p) for n in range(len(partners)) if n != b]
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
        torch.testing.assert_close(own["angular_weight"], weight * plain)
    matcher.set_epoch(21)
    assert set(matcher.extra_losses(images, texts, batch)) == {"weights"}
    matrices = [p for n, p in matcher.named_parameters() if n.startswith(("region_proj", "layers")) and p.dim() == 2]
    assert len(matrices) == 7
    penalty = 0.01 * sum(matrix.norm() for matrix in matrices)
    total, _ = HingeTriplet(0.2)(matcher, batch)
    torch.testing.assert_close(total, hinge_loss(matcher.score(images, texts), 0.2, True) + penalty)
    assert model(angular_weight=0.0, weight_penalty=0.0).extra_losses(images, texts, batch) == {}


def test_our_bert_is_bert() -> None:
    encoder = load_text_encoder()
    config, theirs = encoder.model.config, encoder.model.state_dict()
    ours = Bert(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.intermediate_size,
        config.max_position_embeddings,
    )
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {}
    for name, value in theirs.items():
        if name.startswith("pooler."):
            continue
        for new, public in old.items():
            name = name.replace(new, public)
        weights[our_name(SAEM, f"txt_enc.bert.{name}").removeprefix("bert.")] = value
    ours.load_state_dict(weights)
    assert not any(p.requires_grad for p in ours.parameters())
    cut = encoder.tokenizer(["a red fish", "two large blue toys above a small star"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = encoder.model(**cut, output_hidden_states=True).hidden_states[1:]
        for mine, state in zip(ours(cut["input_ids"], cut["attention_mask"].bool()), expected, strict=True):
            torch.testing.assert_close(mine, state, atol=2e-5, rtol=0)  # padding included


@pytest.fixture(params=["given_cnn", "given_train5", "given_rnn_bigru_EXTRA", "given_pooling_EXTRA"])
def case(request) -> Path:
    return GOLDEN / f"{request.param}.npz"


def test_the_public_code_computes_the_same(case: Path) -> None:
    rows = run_case(case)
    assert rows and all(row.ok for row in rows), [str(row) for row in rows if not row.ok]


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "given_cnn.npz"))
    arrays["out.loss_total_epoch5"] = arrays["out.loss_total_epoch5"] * np.float32(1.001)
    arrays["out.gradangular.txt_enc.mapping.bias"] = arrays["out.gradangular.txt_enc.mapping.bias"] * np.float32(1.01)
    np.savez(tmp_path / "case.npz", **arrays)
    (tmp_path / "case.json").write_text((GOLDEN / "given_cnn.json").read_text())
    worst = {row.kind: row.worst for row in run_case(tmp_path / "case.npz") if not row.ok}
    assert worst == {"losses": "loss_total_epoch5", "gradients": "out.gradangular.txt_enc.mapping.bias"}


def public() -> tuple[dict[str, Tensor], dict]:
    about = json.loads((GOLDEN / "given_cnn.json").read_text())
    arrays = np.load(GOLDEN / "given_cnn.npz")
    weights = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("w.")}
    return weights, about["options"] | {name: about[name] for name in ("trans_cfg", "bert_config")}


def test_public_weights_must_fit(tmp_path: Path) -> None:
    weights, options = public()
    with pytest.raises(ItmError, match=r"img_enc\.layer|layers\.0|no weight|has no place"):
        SAEM.from_public({k: v for k, v in weights.items() if "intermediate" not in k}, options)
    with pytest.raises(ItmError, match="no bert_config"):
        SAEM.from_public(weights, {k: v for k, v in options.items() if k != "bert_config"})
    with pytest.raises(ItmError, match="the name of a file"):
        SAEM.from_public(weights, options | {"trans_cfg": "t_cfg.json"})
    with pytest.raises(ItmError, match="the same number"):
        SAEM.from_public(weights, options | {"final_dims": 12})
    with pytest.raises(ItmError, match="one of cnn, pooling, rnn"):
        SAEM.from_public(weights, options | {"txt_stru": "trans"})


def test_a_public_model_can_be_saved_and_built_again(tmp_path: Path) -> None:
    matcher = SAEM.from_public(*public()).eval()
    words = torch.randint(3, 50, (3, 12), generator=torch.Generator().manual_seed(5))
    batch = TextBatch(lengths=torch.tensor([12, 4, 7]), ids=torch.arange(3), words=words)
    save_model(tmp_path / "saem.safetensors", matcher, {})
    again = SAEM(**json.loads(json.dumps(matcher.config))).eval()  # what a checkpoint remembers is plain JSON
    load_model(tmp_path / "saem.safetensors", again)
    torch.testing.assert_close(again.encode_texts(batch).pooled, matcher.encode_texts(batch).pooled)


def test_word_ids_without_a_bert_are_refused() -> None:
    batch = TextBatch(lengths=torch.tensor([2]), ids=torch.tensor([0]), words=torch.tensor([[4, 5]]))
    with pytest.raises(ItmError, match="expected states of a text encoder"):
        model().encode_texts(batch)
    with pytest.raises(ItmError, match="one of cnn, pooling, rnn"):
        model(reader="trans")


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
    assert len(matcher.layers) == 0 and matcher.public_padding and matcher.config["token_dim"] == 6
