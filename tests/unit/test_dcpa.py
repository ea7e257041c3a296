"""DCPA: both stages as loops in double precision, masks, decoupled scores, switches, stages, selected regions, sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from notebook_cells import cells_of
from test_mmca import (
    EXACT,
    HEADS,
    IMAGE_DIM,
    LENGTHS,
    TOKEN_DIM,
    WIDTH,
    Vectors,
    Weights,
    encode,
    gradients,
    image_batch,
    most_bytes,
    real_items,
    six_pairs,
    slow_attention,
    slow_feed_forward,
    slow_linear,
    slow_loss,
    slow_mean,
    slow_norm,
    slow_sentence,
    slow_unit,
    slow_unit_length,
    text_batch,
)
from torch import Tensor, nn

from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.parity.adapters.dcpa import NAMES, load
from itm_lab.parity.comparison import our_name
from itm_lab.records.old_names import modern_parameters
from itm_lab.records.parameters import declared_parameters, settings_of
from itm_utils.data.batches import PairDataset
from itm_utils.errors import ItmError
from itm_utils.fast_attention import GRAPH_FACTOR
from itm_utils.matcher import ImageBatch, Images, Matcher, PairBatch, Scores, TextBatch, Texts
from itm_utils.metrics.retrieval import ensemble, evaluate
from itm_utils.models.dcpa import (
    DCPA,
    InterPAM,
    PhraseDecoder,
    TokenEncoder,
    build,
    decode_all_pairs,
    decode_pairs,
    share_region_proj,
    stages,
    topk_mean,
    weighted_sum,
)
from itm_utils.models.mmca import HardNegativeTripletLoss, select_hardest
from itm_utils.models.vsepp import HingeTriplet, hinge_loss
from itm_utils.scoring import encode_split, score_all, score_split
from itm_utils.training import TrainConfig
from itm_utils.training.checkpoints import load_model, save_model

ROOT = Path(__file__).resolve().parents[2]
INNER, CHANNELS, TOP, WEIGHT = 11, 5, 3, 0.7
OPTIONS = {"h": HEADS, "f": INNER, "filters": CHANNELS, "K": TOP, "w1": WEIGHT}
PAIRS = [(i, c) for i in range(4) for c in range(4)]


# ---------------------------------------------------------------- weights


def public_weights(seed: int = 0) -> Weights:
    """Weights under the names of the reference cases; no bias is zero and no norm is plain."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"region_fc": (WIDTH, IMAGE_DIM), "region_fc2": (WIDTH, IMAGE_DIM), "text_fc": (WIDTH, TOKEN_DIM)}
    shapes |= {f"text_cnn.conv{window}": (CHANNELS, TOKEN_DIM, window) for window in (1, 2, 3)}
    shapes["text_cnn.fc"] = (WIDTH, 3 * CHANNELS)
    attentions = {"encoder": [""], "decoder_i2t": ["self.", "cross."], "decoder_t2i": ["self.", "cross."]}
    for unit, kinds in attentions.items():
        shapes |= {f"{unit}.{kind}{name}": (WIDTH, WIDTH) for kind in kinds for name in "qkvo"}
        shapes |= {f"{unit}.ffn1": (INNER, WIDTH), f"{unit}.ffn2": (WIDTH, INNER)}
        shapes |= {f"{unit}.norm{n}": (WIDTH,) for n in range(1, len(kinds) + 2)}
    weights = {}
    for name, shape in shapes.items():
        scale = 0.5 if len(shape) == 1 else 1.2 / math.sqrt(math.prod(shape[1:]))
        weights[f"{name}.weight"] = scale * torch.randn(shape, generator=draw) + (len(shape) == 1)
        weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=draw)
    return weights


def model(top_k: int = TOP, intra: dict | None = None, inter: dict | None = None) -> DCPA:
    """A small model in double precision, from the public names."""
    public = load(public_weights(), OPTIONS | {"K": top_k})
    arguments = public.config["intra"] | (intra or {}), public.config["inter"] | (inter or {})
    made = DCPA(IMAGE_DIM, *arguments, intra_weight=WEIGHT)
    made.load_state_dict(public.state_dict())
    return made.double().eval()


@pytest.fixture
def w() -> Weights:
    """The same weights for the slow version: leaves in double precision."""
    return {name: value.double().requires_grad_() for name, value in public_weights().items()}


SWITCHES = {
    "full": ({}, {}),
    "global-ave": ({"similarity": "global"}, {}),
    "w/o local-agg": ({}, {"similarity": "global"}),
    "w/o decoupled": ({}, {"decoupled": False}),
}


# ---------------------------------------------------------------- the paper, one vector at a time


def slow_heads(w: Weights, name: str, queries: Vectors, keys: Vectors) -> tuple[Vectors, list[list[Vectors]]]:
    """Eq. 1 to 4 and 11: heads of neighbouring numbers; also the weights as [head][query][key]."""
    size, found, weights = WIDTH // HEADS, [], []
    for part in (slice(start, start + size) for start in range(0, WIDTH, size)):
        q = [slow_linear(w, f"{name}q", x)[part] for x in queries]
        k, v = ([slow_linear(w, f"{name}{letter}", x)[part] for x in keys] for letter in "kv")
        head, shares = slow_attention(q, k, v)
        found.append(head)
        weights.append(shares)
    joined = [torch.cat([head[a] for head in found]) for a in range(len(queries))]
    return [slow_linear(w, f"{name}o", x) for x in joined], weights


def slow_phrases(w: Weights, unit: str, vectors: Vectors) -> Vectors:
    """i^P or c^P: self-attention."""
    own, _ = slow_heads(w, f"{unit}.self.", vectors, vectors)
    return [slow_norm(w, f"{unit}.norm1", x + f) for x, f in zip(vectors, own, strict=True)]


def slow_decoder(w: Weights, unit: str, vectors: Vectors, others: Vectors) -> Vectors:
    """Eq. 12: self-attention, cross-attention and feed-forward, each with a residual and a norm behind it."""
    phrases = slow_phrases(w, unit, vectors)
    found, _ = slow_heads(w, f"{unit}.cross.", phrases, others)
    attended = [slow_norm(w, f"{unit}.norm2", x + f) for x, f in zip(phrases, found, strict=True)]
    return [slow_norm(w, f"{unit}.norm3", x + slow_feed_forward(w, unit, x)) for x in attended]


def slow_topk_mean(values: Vectors, count: int) -> Tensor:
    best = sorted(values, key=Tensor.item, reverse=True)[:count]
    return sum(best) / len(best)


def slow_cosine(x: Tensor, y: Tensor) -> Tensor:
    return slow_unit_length(x) @ slow_unit_length(y)


def slow_intra(w: Weights, regions: Vectors, tokens: Vectors, kind: str = "local", top_k: int = TOP) -> Tensor:
    """Eq. 1 to 10 of one pair."""
    phrases = slow_unit(w, "encoder", [slow_linear(w, "region_fc", x) for x in regions])
    sentence = slow_sentence(w, "text_cnn", tokens)
    if kind == "global":
        return slow_mean(phrases) @ sentence
    return slow_topk_mean([slow_unit_length(x) @ sentence for x in phrases], top_k)


def slow_mapped(w: Weights, regions: Vectors, tokens: Vectors) -> tuple[Vectors, Vectors]:
    """i and c of stage two."""
    return [slow_linear(w, "region_fc2", x) for x in regions], [slow_linear(w, "text_fc", x) for x in tokens]


def slow_direction(w: Weights, unit: str, one: Vectors, other: Vectors, kind: str, top_k: int) -> Tensor:
    """Eq. 11 to 14: ``one`` decoded into the space of ``other``, and compared with ``other`` itself."""
    decoded = slow_decoder(w, unit, one, other)
    if kind == "global":
        return slow_cosine(sum(decoded) / len(decoded), sum(other) / len(other))
    return slow_topk_mean([max((slow_cosine(x, y) for y in other), key=Tensor.item) for x in decoded], top_k)


def slow_inter(
    w: Weights, regions: Vectors, tokens: Vectors, kind: str = "local", top_k: int = TOP
) -> tuple[Tensor, Tensor]:
    """S(i^T, c) and S(i, c^V) of one pair."""
    i, c = slow_mapped(w, regions, tokens)
    return slow_direction(w, "decoder_i2t", i, c, kind, top_k), slow_direction(w, "decoder_t2i", c, i, kind, top_k)


def slow_scores(score: Callable[[Vectors, Vectors], tuple[Tensor, ...]], images: int = 4) -> list[Tensor]:
    """Matrices (i, c) of whatever one pair gives."""
    image_items, caption_items = real_items(image_batch(), text_batch())
    found = [score(regions, tokens) for regions in image_items[:images] for tokens in caption_items]
    return [torch.stack(values).view(images, 4) for values in zip(*found, strict=True)]


def same_gradients(matcher: DCPA, w: Weights, stage: str) -> None:
    """Every weight of a stage has the gradient of its twin; the other stage has none."""
    names = {name: our_name(NAMES, name) for name in w}
    assert set(names.values()) == {name for name, _ in matcher.named_parameters()}
    for name, ours in names.items():
        gradient = matcher.get_parameter(ours).grad
        if not ours.startswith(stage):
            assert gradient is None and w[name].grad is None, name
            continue
        torch.testing.assert_close(gradient, w[name].grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        # A key's bias adds the same number to all logits of a query, so its gradient is zero.
        assert (gradient.abs().max() > 1e-6) != name.endswith("k.bias"), name


def spread() -> Tensor:
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(5)).double()


def as_list(scores: Scores) -> list[Tensor]:
    return [scores.i2t, scores.t2i]


def same_scores(ours: Scores, expected: Scores, **more) -> None:
    assert ours.decoupled == expected.decoupled
    for one, other in zip(as_list(ours), as_list(expected), strict=True):
        torch.testing.assert_close(one, other, **(EXACT | more))


# ---------------------------------------------------------------- 1. the top-k mean


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10])
def test_topk_mean_is_the_loop_with_gradients(count: int) -> None:
    """Rows of one to four entries, with holes, for every caption at once: divided by how many there are."""
    mask = image_batch().mask
    values = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    found = topk_mean(values, mask[:, None], count)
    rows = [slow_topk_mean(list(values[i, c][mask[i]]), count) for i in range(4) for c in range(3)]
    expected = torch.stack(rows).view(4, 3)
    torch.testing.assert_close(found, expected, **EXACT)
    factor = torch.arange(1, 13).view(4, 3)
    both = [torch.autograd.grad((result * factor).sum(), values)[0] for result in (found, expected)]
    torch.testing.assert_close(*both, **EXACT)
    if count >= 4:
        torch.testing.assert_close(found[0], values[0].mean(dim=-1), **EXACT)


def test_topk_mean_of_nothing_is_zero_without_gradient() -> None:
    values = torch.tensor([[3.0, -2.0], [-5.0, -7.0]], requires_grad=True)
    found = topk_mean(values, torch.tensor([[False, False], [False, True]]), 2)
    assert found.tolist() == [0, -7]
    found.sum().backward()
    assert values.grad.tolist() == [[0, 0], [0, 1]]


# ---------------------------------------------------------------- 2. bad input


@pytest.mark.parametrize(
    ("stage", "more", "message"),
    [
        ("intra", {"similarity": "lokal"}, "similarity of stage intra: found 'lokal', expected one of local, global"),
        ("inter", {"similarity": "mean"}, "similarity of stage inter: found 'mean', expected one of local, global"),
        ("intra", {"text_backbone": "rnn"}, "text_backbone: found 'rnn', expected one of bert, gru"),
        ("inter", {"text_backbone": "BERT"}, "text_backbone: found 'BERT', expected one of bert, gru"),
        ("intra", {"top_k": 0}, "top_k: found 0, expected how many of the best are averaged, at least 1"),
        ("inter", {"top_k": 0}, "top_k: found 0, expected how many of the best are averaged, at least 1"),
        ("intra", {"heads": 3}, "heads: found 3, expected a number that divides the width 8"),
        ("inter", {"heads": 3}, "heads: found 3, expected a number that divides the width 8"),
    ],
)
def test_unknown_options_are_named(stage: str, more: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message) as found:
        model(**{stage: more})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("stage", ["intra", "inter"])
def test_word_ids_are_refused_by_an_encoder_of_states(stage: str) -> None:
    batch = TextBatch(lengths=torch.tensor([2]), ids=torch.tensor([0]), words=torch.tensor([[4, 5]]))
    with pytest.raises(ItmError, match="captions: found word ids, expected states of a text encoder"):
        getattr(model(), stage).encode_texts(batch)


# ---------------------------------------------------------------- 3. stage one


def test_equations_1_to_6_visual_phrases(w: Weights) -> None:
    """Each region after the layer, L2-normalised; and their mean, which is normalised after it is taken."""
    images = model().intra.encode_images(image_batch())
    image_items, _ = real_items(image_batch(), text_batch())
    for b, regions in enumerate(image_items):
        phrases = slow_unit(w, "encoder", [slow_linear(w, "region_fc", x) for x in regions])
        expected = torch.stack([slow_unit_length(x) for x in phrases])
        torch.testing.assert_close(images.local[b][images.mask[b]], expected, **EXACT)
        torch.testing.assert_close(images.pooled[b], slow_mean(phrases), **EXACT)


@pytest.mark.parametrize("width", [5, 9])
def test_equations_7_to_9_the_sentence(w: Weights, width: int) -> None:
    """Windows inside the caption only, zeros behind one that is shorter than a window, L2-normalised at the end."""
    batch = text_batch(width=width)
    _, caption_items = real_items(image_batch(), batch)
    expected = torch.stack([slow_sentence(w, "text_cnn", tokens) for tokens in caption_items])
    torch.testing.assert_close(model().intra.encode_texts(batch).pooled, expected, **EXACT)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_equation_10_with_all_gradients(w: Weights, kind: str) -> None:
    """All pairs of stage one, and the gradient of every weight; images with fewer regions than K among them."""
    matcher = model(intra={"similarity": kind})
    scores = matcher.intra.score(*encode(matcher.intra))
    assert not scores.decoupled
    (expected,) = slow_scores(lambda r, t: (slow_intra(w, r, t, kind),))
    torch.testing.assert_close(scores.i2t, expected, **EXACT)
    for values in (scores.i2t, expected):
        (values * spread()[0]).sum().backward()
    same_gradients(matcher, w, "intra")


# ---------------------------------------------------------------- 4. stage two


def test_what_does_not_depend_on_the_pair_is_prepared_once(w: Weights) -> None:
    """Phrases; queries of these, keys and values of the vectors themselves; the root sits in the query."""
    images, texts = encode(model().inter)
    image_items, caption_items = real_items(image_batch(), text_batch())
    sides = (images, image_items, "region_fc2", "i2t", "t2i"), (texts, caption_items, "text_fc", "t2i", "i2t")
    for side, items, projection, source, memory in sides:
        for b, item in enumerate(items):
            vectors = [slow_linear(w, projection, x) for x in item]
            phrases = slow_phrases(w, f"decoder_{source}", vectors)
            expected = {
                "phrase": phrases,
                "query": [slow_linear(w, f"decoder_{source}.cross.q", x) / math.sqrt(WIDTH / HEADS) for x in phrases],
                "key": [slow_linear(w, f"decoder_{memory}.cross.k", x) for x in vectors],
                "value": [slow_linear(w, f"decoder_{memory}.cross.v", x) for x in vectors],
            }
            real = side.mask[b]
            assert side.extra_local.keys() == expected.keys()
            for name, rows in expected.items():
                ours = side.extra_local[name][b][real].flatten(1)
                torch.testing.assert_close(ours, torch.stack(rows), **EXACT)
            torch.testing.assert_close(side.local[b][real], torch.stack([slow_unit_length(x) for x in vectors]))
            torch.testing.assert_close(side.pooled[b], slow_mean(vectors), **EXACT)


def test_equations_11_and_12_one_side_decoded_into_the_space_of_the_other(w: Weights) -> None:
    """Both decoders, for given pairs and for all of them."""
    matcher = model().inter
    images, texts = encode(matcher)
    image_items, caption_items = real_items(image_batch(), text_batch())
    pairs = decode_pairs(matcher.i2t, images, texts), decode_pairs(matcher.t2i, texts, images)
    across = decode_all_pairs(matcher.i2t, images, texts), decode_all_pairs(matcher.t2i, texts, images)
    for i, c in ((0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (2, 3)):
        r, t = slow_mapped(w, image_items[i], caption_items[c])
        i_t, c_v = (torch.stack(slow_decoder(w, *given)) for given in (("decoder_i2t", r, t), ("decoder_t2i", t, r)))
        torch.testing.assert_close(across[0][i, c][images.mask[i]], i_t, **EXACT)
        torch.testing.assert_close(across[1][c, i][texts.mask[c]], c_v, **EXACT)
        if i == c:
            torch.testing.assert_close(pairs[0][i][images.mask[i]], i_t, **EXACT)
            torch.testing.assert_close(pairs[1][c][texts.mask[c]], c_v, **EXACT)


def pytorch_decoder(ours: PhraseDecoder) -> nn.TransformerDecoderLayer:
    """PyTorch's own decoder layer with the weights of ours, in its precision."""
    sizes = (ours.linear1.in_features, ours.attention.heads, ours.linear1.out_features)
    theirs = nn.TransformerDecoderLayer(*sizes, dropout=0.0, batch_first=True).to(ours.linear1.weight.dtype)
    twins = {"linear1": ours.linear1, "linear2": ours.linear2}
    twins |= {"norm1": ours.self_attn_norm, "norm2": ours.attn_norm, "norm3": ours.ffn_norm}
    for name, one in twins.items():
        getattr(theirs, name).load_state_dict(one.state_dict())
    for twin, one in ((theirs.self_attn, ours.self_attention), (theirs.multihead_attn, ours.attention)):
        projections = (one.q_proj, one.k_proj, one.v_proj)
        weights = {"in_proj_weight": torch.cat([part.weight for part in projections])}
        weights["in_proj_bias"] = torch.cat([part.bias for part in projections])
        weights |= {f"out_proj.{key}": value for key, value in one.out_proj.state_dict().items()}
        twin.load_state_dict(weights)
    return theirs.eval()


def test_the_decoder_is_that_of_pytorch() -> None:
    """With the same weights and padding on both sides, for given pairs and for all of them."""
    decoder = PhraseDecoder(16, 4, 24, 0.0).double().eval()
    vectors, keys = torch.randn(3, 6, 16).double(), torch.randn(3, 5, 16).double()
    mask, key_mask = (
        torch.arange(n) < torch.tensor(lengths)[:, None] for n, lengths in ((6, [6, 4, 1]), (5, [5, 2, 3]))
    )
    phrase = decoder.phrases(vectors, mask)
    source = Images(mask=mask, extra_local={"phrase": phrase, "query": decoder.project_queries(phrase)})
    memory = Texts(mask=key_mask, extra_local=decoder.project_keys_values(keys))
    theirs = pytorch_decoder(decoder)
    expected = theirs(vectors, keys, tgt_key_padding_mask=~mask, memory_key_padding_mask=~key_mask)
    given, every = decode_pairs(decoder, source, memory), decode_all_pairs(decoder, source, memory)
    for decoded in (given, every[range(3), range(3)]):
        torch.testing.assert_close(decoded[mask], expected[mask], **EXACT)


@pytest.mark.parametrize("switch", ["full", "w/o local-agg", "w/o decoupled"])
def test_equations_13_and_14_with_all_gradients(w: Weights, switch: str) -> None:
    """Both matrices of stage two, and the gradient of every weight, for all pairs and then for given ones."""
    matcher = model(inter=SWITCHES[switch][1])
    kind = matcher.inter.similarity
    expected = slow_scores(lambda r, t: slow_inter(w, r, t, kind))
    if switch == "w/o decoupled":
        expected = [sum(expected) / 2] * 2
    scores = matcher.inter.score(*encode(matcher.inter))
    same_scores(scores, Scores(*expected))
    assert scores.decoupled == (switch != "w/o decoupled")
    total = sum((values * part).sum() for values, part in zip(expected, spread(), strict=True))
    total.backward()
    sum((values * part).sum() for values, part in zip(as_list(scores), spread(), strict=True)).backward()
    same_gradients(matcher, w, "inter")
    row, column = torch.tensor(PAIRS).unbind(dim=1)
    images, texts = encode(matcher.inter)
    pairs = matcher.inter.score_pairs(images[row], texts[column])
    same_scores(pairs, scores._map(Tensor.flatten))
    matcher.zero_grad()
    sum((values * part.flatten()).sum() for values, part in zip(as_list(pairs), spread(), strict=True)).backward()
    same_gradients(matcher, w, "inter")


def test_equation_15_each_term_from_its_own_matrix(w: Weights) -> None:
    """Loss and gradients; the hardest by the other matrix, or by the mean of both, would be others."""
    matcher = model().inter
    expected = slow_scores(lambda r, t: slow_inter(w, r, t))
    positive = torch.eye(4, dtype=torch.bool)
    i2t, t2i = (values.detach().masked_fill(positive, -9) for values in expected)
    assert (i2t.argmax(dim=1) != t2i.argmax(dim=1)).any() and (i2t.argmax(dim=0) != t2i.argmax(dim=0)).any()
    loss = slow_loss(expected[0], 0.4, t2i=expected[1])
    loss.backward()
    whole = model()
    batch = PairBatch(image_batch(), text_batch())
    direct = hinge_loss(matcher.score(*encode(matcher)), 0.4, hardest=True)
    selected, _ = HardNegativeTripletLoss(0.4)(whole.inter, batch)
    for ours in (direct, selected):
        torch.testing.assert_close(ours, loss, **EXACT)
    assert loss > 0 and abs((slow_loss(expected[0], 0.4) - loss).item()) > 1e-3
    selected.backward()
    for name, value in w.items():
        if value.grad is not None:
            torch.testing.assert_close(whole.get_parameter(our_name(NAMES, name)).grad, value.grad, **EXACT)


# ---------------------------------------------------------------- 5. both stages


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_sum_of_both_stages(w: Weights, switch: str) -> None:
    """W1 of stage one and 1 - W1 of stage two, both directions; two images are enough."""
    matcher = model(intra=SWITCHES[switch][0], inter=SWITCHES[switch][1])
    kinds = matcher.intra.similarity, matcher.inter.similarity
    with torch.no_grad():
        found = slow_scores(lambda r, t: (slow_intra(w, r, t, kinds[0]), *slow_inter(w, r, t, kinds[1])), images=2)
    first, i2t, t2i = found
    if switch == "w/o decoupled":
        i2t = t2i = (i2t + t2i) / 2
    images, texts = encode(matcher)
    scores = matcher.score(images[:2], texts)
    assert scores.decoupled == (switch != "w/o decoupled")
    for ours, second in zip(as_list(scores), (i2t, t2i), strict=True):
        torch.testing.assert_close(ours, WEIGHT * first + (1 - WEIGHT) * second, **EXACT)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_weight_of_stage_one_goes_from_stage_two_alone_to_stage_one_alone(decoupled: bool) -> None:
    """A sweep over the weight needs the scores of both stages, and no model."""
    torch.manual_seed(3)
    intra, i2t, t2i = torch.rand(3, 4, 6)
    inter = Scores(i2t, t2i) if decoupled else Scores.same(i2t)
    both = {weight: weighted_sum(Scores.same(intra), inter, weight) for weight in (0.0, 0.25, 1.0)}
    for direction in ("i2t", "t2i"):
        second = getattr(inter, direction)
        for weight, found in both.items():
            torch.testing.assert_close(getattr(found, direction), weight * intra + (1 - weight) * second)
    assert all(found.decoupled == decoupled for found in both.values())


def test_the_published_weights_are_the_defaults() -> None:
    made = DCPA(4, {"token_dim": 5, "width": 16, "channels": 2}, {"token_dim": 5, "width": 16})
    assert made.intra_weight == 0.6
    assert made.intra.top_k == made.inter.top_k == 10
    assert made.inter.decoupled and made.inter.special_tokens
    decoders = made.inter.i2t, made.inter.t2i
    attentions = [made.intra.encoder.attention, *(part.self_attention for part in decoders), made.inter.i2t.attention]
    assert {part.heads for part in attentions} == {16}
    assert made.intra.encoder.linear1.out_features == made.inter.t2i.linear1.out_features == 2048
    norms = [part for part in made.modules() if isinstance(part, nn.LayerNorm)]
    assert len(norms) == 8 and {norm.eps for norm in norms} == {1e-5}


def matchers(switch: str = "full") -> list[Matcher]:
    made = model(intra=SWITCHES[switch][0], inter=SWITCHES[switch][1])
    return [made, made.intra, made.inter]


@pytest.mark.parametrize("switch", SWITCHES)
def test_all_pairs_are_the_given_pairs(switch: str) -> None:
    row, column = torch.tensor(PAIRS).unbind(dim=1)
    for matcher in matchers(switch):
        images, texts = encode(matcher)
        scores, pairs = matcher.score(images, texts), matcher.score_pairs(images[row], texts[column])
        same_scores(pairs, scores._map(Tensor.flatten))


@pytest.mark.parametrize("places", [4, 5, 99])
def test_more_than_there_are_is_the_mean(places: int) -> None:
    """With K beyond everything, the means of all cosines and of all best matches."""
    matcher = model(top_k=places)
    images, texts = encode(matcher)
    sides = matcher.intra_encodings(images, texts)
    cosines = torch.einsum("ird,cd->icr", sides[0].local, sides[1].pooled)
    for i in range(4):
        expected = cosines[i][:, images.mask[i]].mean(dim=1)
        torch.testing.assert_close(matcher.intra.score(*sides).i2t[i], expected, **EXACT)
    decoded = nn.functional.normalize(decode_pairs(matcher.inter.i2t, images, texts), dim=-1)
    for b, score in enumerate(matcher.inter.score_pairs(images, texts).i2t):
        best = (decoded[b][images.mask[b]] @ texts.local[b][texts.mask[b]].T).max(dim=1).values
        torch.testing.assert_close(score, best.mean(), **EXACT)


# ---------------------------------------------------------------- 6. masks and company


@pytest.mark.parametrize("switch", SWITCHES)
def test_garbage_under_a_mask_takes_no_part(switch: str) -> None:
    """Scores, and gradients: none flows into padding, and what stands there changes none."""
    found = []
    matcher = matchers(switch)[0]
    for fill in (None, 0.0, 1e3):
        images, texts = image_batch(), text_batch()
        if fill is not None:
            images.regions = images.regions.masked_fill(~images.mask[..., None], fill)
            texts.features = texts.features.masked_fill(~texts.mask[..., None], fill)
        images.regions.requires_grad_(), texts.features.requires_grad_()
        matcher.zero_grad()
        scores = torch.stack(as_list(matcher.score(*encode(matcher, images, texts))))
        (scores * spread()).sum().backward()
        assert not images.regions.grad[~images.mask].any() and not texts.features.grad[~texts.mask].any()
        assert images.regions.grad[images.mask].any() and texts.features.grad[texts.mask].any()
        found.append([scores.detach(), *(p.grad for p in matcher.parameters())])
    for expected, *others in zip(*found, strict=True):
        for ours in others:
            torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("switch", SWITCHES)
def test_scores_do_not_depend_on_padding_or_company(switch: str) -> None:
    """In wider batches, in another order, and each pair alone and cut to its size."""
    images, texts = image_batch(), text_batch()
    more = torch.full((4, 3, IMAGE_DIM), 7.0).double()
    mask = torch.cat([images.mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    wide_images = replace(images, regions=torch.cat([images.regions, more], dim=1), mask=mask)
    wide_texts = replace(texts, features=torch.cat([texts.features, more[..., :TOKEN_DIM]], dim=1))
    order = torch.tensor([2, 0, 3, 1])
    for matcher in matchers(switch):
        together = matcher.score(*encode(matcher, images, texts))
        same_scores(matcher.score(*encode(matcher, wide_images, wide_texts)), together)
        turned = matcher.score(*encode(matcher, images[order], texts[order]))
        same_scores(turned, together._map(lambda values: values[order][:, order]))
        for i, c in PAIRS:
            one = replace(images[i : i + 1], regions=images.regions[i : i + 1, images.mask[i]])
            one.mask = images.mask[i : i + 1, images.mask[i]]
            other = replace(texts[c : c + 1], features=texts.features[c : c + 1, : LENGTHS[c]])
            alone = matcher.score(*encode(matcher, one, other))
            same_scores(alone, together._map(lambda values, i=i, c=c: values[i : i + 1, c : c + 1]))


@pytest.mark.parametrize("pairs", [1, 3, 7, 100])
@pytest.mark.parametrize("switch", SWITCHES)
def test_blocks_of_any_size_agree(pairs: int, switch: str) -> None:
    for matcher in matchers(switch):
        images, texts = encode(matcher)
        budget = pairs * matcher.bytes_per_pair(images, texts)
        in_blocks = score_all(matcher, images, texts, budget, progress=False)
        expected = matcher.score(images, texts)._map(Tensor.float)
        same_scores(in_blocks, expected, rtol=1e-5, atol=1e-6)


def test_encodings_joined_from_batches_of_other_widths() -> None:
    """Blocks that were padded to different widths, joined; the scores must stay."""
    matcher, texts, sides = model(), text_batch(), []
    for c in range(4):
        sides.append(matcher.encode_texts(replace(texts[c : c + 1], features=texts.features[c : c + 1, : LENGTHS[c]])))
    images = matcher.encode_images(image_batch())
    same_scores(matcher.score(images, Texts.cat(sides)), matcher.score(*encode(matcher)))


def with_special_tokens(lengths: list[int]) -> TextBatch:
    """The first and the last token of each caption are no words."""
    batch = text_batch(lengths)
    special = torch.zeros_like(batch.mask)
    special[:, 0] = True
    special[torch.arange(len(lengths)), batch.lengths - 1] = True
    return replace(batch, special=special)


def test_without_special_tokens_is_with_them_cut_out() -> None:
    """Stage two sees the words between them; stage one reads all tokens as before."""
    batch = with_special_tokens([6, 3, 4, 5])
    inside = replace(batch, features=batch.features[:, 1:], lengths=batch.lengths - 2)
    without, plain = model(inter={"special_tokens": False}), model()
    for kind in ("local", "global"):
        without.inter.similarity = plain.inter.similarity = kind
        ours = without.inter.score(*encode(without.inter, texts=batch))
        same_scores(ours, plain.inter.score(*encode(plain.inter, texts=inside)))
        assert (ours.t2i - plain.inter.score(*encode(plain.inter, texts=batch)).t2i).abs().max() > 1e-3
        pairs = without.inter.score_pairs(*encode(without.inter, texts=batch))
        torch.testing.assert_close(pairs.t2i, ours.t2i.diagonal(), **EXACT)
        blocks = score_all(without.inter, *encode(without.inter, texts=batch), progress=False)
        same_scores(blocks, ours._map(Tensor.float), rtol=1e-5, atol=1e-6)
    first = [matcher.encode_texts(batch).extra["intra"] for matcher in (without, plain)]
    torch.testing.assert_close(*first, rtol=0, atol=0)


def test_a_caption_of_special_tokens_alone_keeps_them() -> None:
    """An empty caption has nothing else to be compared with; its neighbours do without, as ever."""
    without, plain, batch = (
        model(inter={"special_tokens": False}).inter,
        model().inter,
        with_special_tokens([6, 2, 4, 5]),
    )
    ours = without.score(*encode(without, texts=batch))
    kept = plain.score(*encode(plain, texts=batch))
    same_scores(ours._map(lambda values: values[:, 1]), kept._map(lambda values: values[:, 1]))
    others = without.score(*encode(without, texts=batch[torch.tensor([0, 2, 3])]))
    same_scores(ours._map(lambda values: values[:, [0, 2, 3]]), others)


def test_one_of_anything_simply_works() -> None:
    """One image of one region with one caption of one token, with finite gradients."""
    matcher = model()
    sides = encode(matcher, image_batch(rows=[[1]]), text_batch([1]))
    scores = matcher.score(*sides)
    (scores.i2t + scores.t2i).sum().backward()
    assert scores.i2t.shape == (1, 1) and all(p.grad.isfinite().all() for p in matcher.parameters())
    assert all(mask.tolist() == [[True]] for mask in matcher.selected_regions(*sides))


# ---------------------------------------------------------------- 7. two matrices, kept apart


def test_the_two_directions_stay_apart_through_blocks_metrics_and_ensembles() -> None:
    """score_all, evaluate and ensemble: captions are ranked by i2t, images by t2i."""
    one, two = model(), model(top_k=1)
    parts = [score_all(m, *encode(m), progress=False) for m in (one, two)]
    for matcher, part in zip((one, two), parts, strict=True):
        assert part.decoupled and (part.i2t - part.t2i).abs().max() > 1e-2
        same_scores(part, matcher.score(*encode(matcher))._map(Tensor.float), rtol=1e-5, atol=1e-6)
    mean = ensemble(parts)
    assert mean.decoupled and mean.models == 2
    torch.testing.assert_close(mean.i2t, (parts[0].i2t + parts[1].i2t) / 2)
    torch.testing.assert_close(mean.t2i, (parts[0].t2i + parts[1].t2i) / 2)
    found, ranks = evaluate(parts[0], np.arange(4)), torch.arange(4)
    best = {"i2t": parts[0].i2t.argmax(dim=1) == ranks, "t2i": parts[0].t2i.argmax(dim=0) == ranks}
    assert found.i2t.r1 == 100 * best["i2t"].float().mean() and found.t2i.r1 == 100 * best["t2i"].float().mean()
    same = evaluate(Scores.same(parts[0].i2t), np.arange(4))
    assert (found.t2i.r1, found.t2i.mean_rank) != (same.t2i.r1, same.t2i.mean_rank)


@pytest.mark.parametrize("stage", ["intra", "inter", "both"])
@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("at_a_time", [1000, 5])
def test_selected_pairs_have_the_loss_and_gradients_of_all(stage: str, hardest: bool, at_a_time: int) -> None:
    """HardNegativeTripletLoss, in one piece and in many, against the hinges of all pairs."""
    whole, batch = model(), six_pairs()
    matcher = whole if stage == "both" else getattr(whole, stage)
    matcher.train()
    images, texts = encode(matcher, batch.images, batch.texts)
    expected = hinge_loss(matcher.score(images, texts), 0.4, hardest)
    all_pairs = gradients(matcher, expected)
    budget = at_a_time * GRAPH_FACTOR * matcher.bytes_per_pair(images, texts)
    loss, _ = HardNegativeTripletLoss(0.4, hardest=hardest, negatives=0, budget=budget)(matcher, batch)
    torch.testing.assert_close(loss, expected, **EXACT)
    ours = gradients(matcher, loss)
    assert ours.keys() == all_pairs.keys() and loss > 0
    for name, value in all_pairs.items():
        torch.testing.assert_close(ours[name], value, **EXACT)


def test_the_hardest_are_selected_by_the_score_of_their_direction() -> None:
    matcher, batch = model().inter, six_pairs()
    sides = encode(matcher, batch.images, batch.texts)
    i2t, t2i = (v.masked_fill(torch.eye(6, dtype=torch.bool), -9) for v in as_list(matcher.score(*sides)))
    captions, picked_images = select_hardest(matcher, *sides, budget=2**20)
    assert torch.equal(captions[:, 0], i2t.argmax(dim=1)) and torch.equal(picked_images[:, 0], t2i.argmax(dim=0))
    assert (t2i.argmax(dim=1) != i2t.argmax(dim=1)).any() and (t2i.argmax(dim=0) != i2t.argmax(dim=0)).any()


@pytest.mark.parametrize("text_backbone", ["bert", "gru"])
def test_a_split_is_scored_in_blocks(any_pairs: PairDataset, text_backbone: str) -> None:
    """score_split with little memory, on captions of many lengths, equals one large block."""
    split, texts = any_pairs.split, any_pairs.texts
    sizes = {"token_dim": 12, "width": 8, "heads": 2, "feed_forward": 6, "top_k": 4}
    sizes |= {"text_backbone": text_backbone, "vocabulary_size": 40, "word_dim": 5}
    torch.manual_seed(0)
    matcher = DCPA(split.feature_dim, sizes | {"channels": 4}, sizes).eval()
    images, captions = encode_split(matcher, split, texts)
    with torch.inference_mode():
        expected = matcher.score(images, captions)
    budget = 150 * matcher.bytes_per_pair(images, captions)
    same_scores(score_split(matcher, split, texts, budget), expected, rtol=1e-4, atol=1e-5)
    assert expected.decoupled and expected.i2t.shape == (40, 200)


# ---------------------------------------------------------------- 8. the GRU


def test_the_gru_reads_each_caption_as_if_alone() -> None:
    """States of both stages against nn.GRU run caption by caption, its two directions averaged."""
    learns = {"text_backbone": "gru", "vocabulary_size": 20, "word_dim": 4}
    torch.manual_seed(1)
    sizes = {"token_dim": TOKEN_DIM, "width": WIDTH, "heads": HEADS, "feed_forward": INNER, "top_k": TOP}
    matcher = DCPA(IMAGE_DIM, sizes | learns | {"channels": CHANNELS}, sizes | learns).double().eval()
    batch = six_pairs().texts
    assert matcher.intra.token_encoder.gru is not matcher.inter.token_encoder.gru
    for stage in (matcher.intra, matcher.inter):
        states = stage.token_encoder(batch)
        assert states.shape == (6, 5, TOKEN_DIM) and not states[~batch.mask].any()
        weights = dict(stage.token_encoder.gru.named_parameters())
        for c, length in enumerate(batch.lengths.tolist()):
            words = stage.token_encoder.word_embedding.weight[batch.words[c, :length]]
            directions = [slow_gru(weights, words, ""), slow_gru(weights, words.flip(0), "_reverse").flip(0)]
            torch.testing.assert_close(states[c, :length], sum(directions) / 2, **EXACT)
        assert stage.token_encoder.word_embedding.weight.abs().max() <= 0.1
    read = replace(batch, features=matcher.inter.token_encoder(batch), words=None)
    plain = InterPAM(IMAGE_DIM, **sizes).double().eval()
    plain.load_state_dict({k: v for k, v in matcher.inter.state_dict().items() if not k.startswith("token_encoder.")})
    images = six_pairs().images
    ours, expected = (m.score(*encode(m, images, t)) for m, t in ((matcher.inter, batch), (plain, read)))
    same_scores(ours, expected)


def slow_gru(weights: Weights, words: Tensor, suffix: str) -> Tensor:
    """One direction, one word at a time."""
    state, states = torch.zeros(TOKEN_DIM).double(), []
    for word in words:
        inside = weights[f"weight_ih_l0{suffix}"] @ word + weights[f"bias_ih_l0{suffix}"]
        before = weights[f"weight_hh_l0{suffix}"] @ state + weights[f"bias_hh_l0{suffix}"]
        (r, z, n), (hr, hz, hn) = inside.chunk(3), before.chunk(3)
        reset, keep = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        state = (1 - keep) * torch.tanh(n + reset * hn) + keep * state
        states.append(state)
    return torch.stack(states)


# ---------------------------------------------------------------- 9. attention and selected regions


def test_attention_is_the_cross_attention_averaged_over_heads(w: Weights) -> None:
    """Against the loop; rows of real queries sum to one over real keys, padding gets nothing, gradients flow."""
    matcher = model()
    images, texts = encode(matcher)
    found = matcher.attention(images, texts)
    image_items, caption_items = real_items(image_batch(), text_batch())
    assert set(found) == {"i2t", "t2i"}
    for direction, one, other in (("i2t", images, texts), ("t2i", texts, images)):
        seen = found[direction]
        assert seen.queries is one.local and seen.keys is other.local
        assert seen.query_mask is one.mask and seen.key_mask is other.mask and seen.weights.requires_grad
        rows = seen.weights.sum(dim=-1)[seen.query_mask]
        torch.testing.assert_close(rows, torch.ones_like(rows))
        assert not seen.weights[~seen.key_mask[:, None].expand_as(seen.weights)].any()
        for b in range(4):
            sides = slow_mapped(w, image_items[b], caption_items[b])
            queries, keys = sides if direction == "i2t" else sides[::-1]
            queries = slow_phrases(w, f"decoder_{direction}", queries)
            _, shares = slow_heads(w, f"decoder_{direction}.cross.", queries, keys)
            expected = torch.stack([torch.stack([torch.stack(row) for row in head]) for head in shares])
            heads = matcher.head_weights(one, other)[b][:, one.mask[b]][:, :, other.mask[b]]
            torch.testing.assert_close(heads, expected, **EXACT)
            ours = seen.weights[b][one.mask[b]][:, other.mask[b]]
            torch.testing.assert_close(ours, expected.mean(dim=0), **EXACT)


@pytest.mark.parametrize("top_k", [1, 2, 3, 50])
def test_selected_regions_are_those_that_enter_the_scores(w: Weights, top_k: int) -> None:
    """Stage one: its best regions. Stage two: the best region of each of the best words, few words or many."""
    matcher = model(top_k)
    rows = [[1] * 8, [1, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    images, texts = image_batch(rows=rows), text_batch(width=9)  # padded words would select regions of their own
    intra, inter = matcher.selected_regions(*encode(matcher, images, texts))
    image_items, caption_items = real_items(images, texts)
    for b in range(4):
        places = images.mask[b].nonzero()[:, 0].tolist()
        phrases = slow_unit(w, "encoder", [slow_linear(w, "region_fc", x) for x in image_items[b]])
        sentence = slow_sentence(w, "text_cnn", caption_items[b])
        cosines = [(slow_unit_length(x) @ sentence).item() for x in phrases]
        best = sorted(range(len(places)), key=cosines.__getitem__, reverse=True)[:top_k]
        assert set(intra[b].nonzero()[:, 0].tolist()) == {places[k] for k in best}
        i, c = slow_mapped(w, image_items[b], caption_items[b])
        cosines = [[slow_cosine(x, y).item() for y in i] for x in slow_decoder(w, "decoder_t2i", c, i)]
        words = sorted(range(len(c)), key=lambda word: max(cosines[word]), reverse=True)[:top_k]
        expected = {places[max(range(len(i)), key=cosines[word].__getitem__)] for word in words}
        assert set(inter[b].nonzero()[:, 0].tolist()) == expected


# ---------------------------------------------------------------- 10. building, stages, files


@pytest.fixture(scope="module")
def parameters() -> dict:
    """The defaults of the page."""
    source = cells_of("09_dcpa")["parameters"]
    return {name: value for name, (_, value) in declared_parameters(source).items()}


PAPER = {"epochs": 50, "batch_size": 300, "inter_epochs": 30, "inter_batch_size": 84}
SIZES = {"token_dim": 6, "width": 8, "heads": 4, "feed_forward": 10, "dropout": 0.25, "top_k": 7, "word_dim": 9}


def test_build_takes_the_chapters_parameters(parameters: dict) -> None:
    """All sizes and switches of both stages; a vocabulary only where words are embedded."""
    both = ("token_dim", "width", "heads", "dropout", "top_k", "text_backbone", "word_dim")
    changes = [{}, SIZES, {"similarity": "global"}, {"inter_similarity": "global"}, {"decoupled": False}]
    changes += [{"special_tokens": False}, {"intra_weight": 0.25}, {"text_backbone": "gru"}, {"channels": 3}]
    changes += [{"inter_feed_forward": 12}]
    for change in changes:
        p = parameters | change
        made = build(p, 50, 11)
        assert (made.config["image_dim"], made.intra_weight) == (11, p["intra_weight"])
        for stage in (made.intra, made.inter):
            assert stage.config["image_dim"] == 11 and all(stage.config[name] == p[name] for name in both)
            assert stage.config["vocabulary_size"] == (50 if p["text_backbone"] == "gru" else 0)
            assert (stage.token_encoder.gru is not None) == (p["text_backbone"] == "gru")
        assert (made.intra.similarity, made.intra.config["channels"]) == (p["similarity"], p["channels"])
        assert made.inter.similarity == p["inter_similarity"]
        widths = (made.intra.config["feed_forward"], made.inter.config["feed_forward"])
        assert widths == (p["feed_forward"], p["inter_feed_forward"])
        assert (made.inter.decoupled, made.inter.special_tokens) == (p["decoupled"], p["special_tokens"])


def test_an_encoder_of_words_wants_words() -> None:
    """And says so in one line."""
    made = TokenEncoder("gru", 5, 4, 3)
    with pytest.raises(ItmError, match="captions"):
        made(TextBatch(torch.tensor([2]), torch.tensor([0]), features=torch.zeros(1, 2, 3)))


def test_two_stages_and_the_first_alone(parameters: dict) -> None:
    """What is trained, with which objective, how long, in which batches, and what is validated."""
    p = parameters | PAPER | SIZES | {"learning_rate": 0.5, "inter_learning_rate": 0.25, "margin": 0.1}
    p |= {"warmup_epochs": 3, "inter_warmup_epochs": 4, "negatives": 5, "budget_mb": 6}
    made = build(p, 50, 11)
    one, two = stages(p | {"training": "two"}, made)
    sizes = [(s.name, s.config.epochs, s.config.batch_size, s.config.learning_rate) for s in (one, two)]
    assert sizes == [("intra", 50, 300, 0.5), ("inter", 30, 84, 0.25)]
    assert one.model is made.intra and two.model is made.inter
    assert one.validated is made.intra and two.validated is made
    assert isinstance(one.objective, HingeTriplet) and isinstance(two.objective, HardNegativeTripletLoss)
    assert (one.objective.margin, one.objective.hardest, one.objective.warmup_epochs) == (0.1, True, 3)
    assert (two.objective.margin, two.objective.hardest, two.objective.warmup_epochs) == (0.1, True, 4)
    assert (two.objective.negatives, two.objective.budget) == (5, 6 * 2**20)
    (alone,) = stages(p | {"training": "intra"}, made)
    assert (alone.name, alone.model, alone.config, alone.validated) == (one.name, one.model, one.config, made.intra)
    assert {id(x) for x in made.intra.parameters()}.isdisjoint(id(x) for x in made.inter.parameters())


@pytest.mark.parametrize("sizes", [PAPER, {"epochs": 3, "batch_size": 32, "inter_epochs": 2, "inter_batch_size": 32}])
def test_trained_jointly_there_are_as_many_updates(parameters: dict, sizes: dict) -> None:
    """Within half an epoch of what both stages have together, on Flickr30K's 145,000 captions."""
    p = parameters | sizes | SIZES
    made = build(p, 50, 11)
    (joint,) = stages(p | {"training": "joint"}, made)
    trainings = {stage.name: stage.config for stage in (*stages(p, made), joint)}
    updates = {name: config.epochs * 145_000 / config.batch_size for name, config in trainings.items()}
    assert (
        joint.model is joint.validated is made
        and isinstance(joint.objective, HardNegativeTripletLoss)
        and joint.name == "joint"
    )
    assert (joint.config.batch_size, joint.config.learning_rate) == (p["inter_batch_size"], p["inter_learning_rate"])
    assert abs(updates["joint"] - updates["intra"] - updates["inter"]) <= 145_000 / joint.config.batch_size / 2


@pytest.mark.parametrize("training", ["two", "intra", "joint"])
def test_the_learning_rate_restarts_at_the_papers_schedule_and_falls_once_in_the_lab(
    parameters: dict, training: str
) -> None:
    """Down to zero every ``cycle`` epochs, or one cosine over each training; everything else as the parameters say."""
    p = (
        parameters
        | PAPER
        | SIZES
        | {"training": training, "cycle": 7, "clip_norm": 0.0, "validate_every": 9, "seed": 3}
    )
    made = build(p, 50, 11)
    for schedule in ("paper", "mini"):
        for stage in stages(p | {"schedule": schedule}, made):
            assert (stage.config.schedule, stage.config.decay_every, stage.config.decay) == ("cosine", 7, 0.0)
    for stage in stages(p | {"schedule": "lab"}, made):
        config = stage.config
        assert (config.schedule, config.decay_every, config.decay) == ("cosine", config.epochs, TrainConfig.decay)
        assert (config.clip_norm, config.validate_every, config.seed) == (0.0, 9, 3)


def test_a_shared_projection_is_stage_ones_and_stays(parameters: dict) -> None:
    """Reading D9: stage two trains everything but the projection of the regions, which is that of stage one."""
    p = parameters | SIZES | {"dropout": 0.0, "training": "two", "shared_region_proj": True, "width": 8}
    torch.manual_seed(5)
    made, batch = build(p, 50, IMAGE_DIM).double(), six_pairs()
    batch.texts.features = batch.texts.features[..., : SIZES["token_dim"]]
    for stage in stages(p, made):
        if stage.name == "inter":
            share_region_proj(made)
        steps(stage.model, stage.objective, batch)
    images = [one.region_proj(batch.images.regions) for one in (made.intra, made.inter)]
    torch.testing.assert_close(*images, rtol=0, atol=0)
    trained = {name for name, weight in made.inter.named_parameters() if weight.grad is not None}
    assert trained == {name for name in made.inter.state_dict() if not name.startswith("region_proj")}


@pytest.mark.parametrize("training", ["joint", "inter"])
def test_a_projection_is_shared_by_two_stages_only(parameters: dict, training: str) -> None:
    p = parameters | SIZES | {"training": training, "shared_region_proj": True}
    with pytest.raises(ItmError, match=f"shared_region_proj: found training '{training}', expected two stages"):
        stages(p, build(p, 50, 11))


def test_stage_two_alone_is_trained_as_after_stage_one_and_validated_by_itself(parameters: dict) -> None:
    p = parameters | SIZES
    made = build(p, 50, 11)
    (alone,) = stages(p | {"training": "inter"}, made)
    _, second = stages(p | {"training": "two"}, made)
    assert alone.model is alone.validated is made.inter and second.validated is made
    assert alone.config == second.config and vars(alone.objective) == vars(second.objective)


@pytest.mark.parametrize("by_image", [True, False])
def test_the_objectives_of_both_stages_know_which_captions_are_no_negatives(parameters: dict, by_image: bool) -> None:
    p = parameters | SIZES | {"by_image": by_image}
    for training in ("two", "joint"):
        trained = stages(p | {"training": training}, build(p, 50, 11))
        assert [stage.objective.by_image for stage in trained] == [by_image] * len(trained)


def test_older_runs_left_out_the_pair_alone() -> None:
    assert modern_parameters("09_dcpa", {"stages": "two"}) == {"training": "two", "by_image": False}


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("narrow_ffn", {"inter_feed_forward": 256}),
        ("fewer_filters", {"channels": 256, "stage_one": ""}),
        ("shared_projection", {"shared_region_proj": True}),
        ("no_special_tokens", {"special_tokens": False}),
        ("dropout", {"dropout": 0.1, "stage_one": ""}),
        ("by_image", {"by_image": True, "stage_one": ""}),
        ("inter_only", {"training": "inter", "stage_one": ""}),
        ("k_two", {"top_k": 2, "stage_one": ""}),
        ("k_half_more", {"top_k": 15, "stage_one": ""}),
    ],
)
def test_a_reading_differs_in_one_thing(name: str, differs: dict) -> None:
    """And trains a stage one of its own where that thing belongs to it; else it stands on that of all others."""
    both = (settings_of(find_experiment(ROOT, f"dcpa/f30k/{one}").values()) for one in ("two_stages", name))
    published, other = both
    assert {key: value for key, value in other.items() if value != published[key]} == differs


def test_a_misspelt_training_is_named(parameters: dict) -> None:
    p = parameters | SIZES
    with pytest.raises(ItmError, match="training: found 'both', expected one of two, intra, inter, joint"):
        stages(p | {"training": "both"}, build(p, 50, 11))


@pytest.mark.parametrize("stage", ["both", "intra", "inter"])
def test_a_checkpoint_brings_the_model_back(tmp_path: Path, stage: str) -> None:
    """Weights and arguments, through a file; another K is another model."""
    whole = model(inter={"decoupled": False}).float()
    kept = whole if stage == "both" else getattr(whole, stage)
    save_model(tmp_path / "it.safetensors", kept, {})
    again = type(kept)(**kept.config)
    info = load_model(tmp_path / "it.safetensors", again)
    assert info["config"] == json.loads(json.dumps(kept.config))
    images, texts = image_batch(), text_batch()
    images.regions, texts.features = images.regions.float(), texts.features.float()
    scores = [m.eval().score(*encode(m, images, texts)) for m in (kept, again)]
    same_scores(*scores, rtol=0, atol=0)
    config = {"inter": kept.config["inter"] | {"top_k": 9}} if stage == "both" else {"top_k": 9}
    with pytest.raises(ItmError, match="top_k = 3"):
        load_model(tmp_path / "it.safetensors", type(kept)(**(kept.config | config)))


# ---------------------------------------------------------------- 11. training at the paper's size


def steps(
    matcher: Matcher, objective: HingeTriplet | HardNegativeTripletLoss, batch: PairBatch, count: int = 2
) -> list[float]:
    """So many updates of a matcher's own weights."""
    optimiser, losses = torch.optim.Adam(matcher.parameters(), lr=2e-4), []
    matcher.train()
    for _ in range(count):
        loss, _ = objective(matcher, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("training", ["two", "joint"])
def test_two_steps_of_each_stage_at_the_papers_size(parameters: dict, training: str) -> None:
    """36 regions of 2,048 numbers, tokens of 768, width 256, 16 heads: a stage moves its own weights and no others."""
    torch.manual_seed(14)
    lengths = torch.tensor([14, 9, 4, 11])
    batch = PairBatch(
        ImageBatch(torch.randn(4, 36, 2048), torch.ones(4, 36, dtype=torch.bool), torch.arange(4)),
        TextBatch(lengths=lengths, ids=torch.arange(4), features=torch.randn(4, 14, 768)),
    )
    sizes = {"token_dim": 768, "width": 256, "heads": 16, "feed_forward": 2048, "channels": 512, "top_k": 10}
    p = parameters | PAPER | sizes | {"margin": 0.1, "warmup_epochs": 0, "inter_warmup_epochs": 0, "training": training}
    made = build(p, 50, 2048)
    assert made.intra.text_proj.weight.shape == (256, 3 * 512)
    for stage in stages(p, made):
        before = {name: value.clone() for name, value in made.state_dict().items()}
        losses = steps(stage.model, stage.objective, batch)
        assert all(map(math.isfinite, losses)) and losses[1] < losses[0]
        moved = {name for name, value in made.state_dict().items() if (value - before[name]).abs().max() > 1e-5}
        own = {name for name in before if stage.name == "joint" or name.startswith(stage.name)}
        assert moved <= own and all(name.endswith("k_proj.bias") for name in own - moved)  # their gradient is zero
    assert all(value.isfinite().all() for value in made.state_dict().values())


def test_random_negatives_train_too_and_a_gru_learns(parameters: dict) -> None:
    """The warm-up of stage two, with captions as words."""
    p = parameters | SIZES | {"text_backbone": "gru", "dropout": 0.0, "training": "two"}
    torch.manual_seed(2)
    made, batch = build(p, 50, IMAGE_DIM).double(), six_pairs()
    for stage in stages(p, made):
        before = stage.model.token_encoder.gru.weight_ih_l0.detach().clone()
        assert not stage.objective.hardest_now
        assert all(map(math.isfinite, steps(stage.model, stage.objective, batch)))
        assert (stage.model.token_encoder.gru.weight_ih_l0 - before).abs().max() > 1e-5


def test_half_precision_trains() -> None:
    """A step under autocast has a finite loss and finite gradients, masks included."""
    matcher, batch = model().float().train(), six_pairs()
    batch.images.regions, batch.texts.features = batch.images.regions.float(), batch.texts.features.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = HardNegativeTripletLoss(0.2)(matcher, batch)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in matcher.parameters())


SHAPES = [(64, 4, 64, 10), (32, 16, 256, 14), (64, 4, 512, 3)]  # width, heads, inside a layer, words


def wide_sides(width: int, heads: int, inner: int, words: int, pairs: int) -> tuple[InterPAM, Images, Texts]:
    torch.manual_seed(13)
    matcher = InterPAM(16, 16, width=width, heads=heads, feed_forward=inner)
    images = ImageBatch(torch.randn(pairs, 36, 16), torch.ones(pairs, 36, dtype=torch.bool), torch.arange(pairs))
    lengths = torch.full((pairs,), words)
    texts = TextBatch(lengths, torch.arange(pairs), features=torch.randn(pairs, words, 16))
    return matcher, *encode(matcher, images, texts)


@pytest.mark.parametrize("shape", SHAPES)
def test_scoring_a_block_needs_what_is_stated(shape: tuple[int, ...]) -> None:
    """The most that the scores of 12 x 12 pairs hold at one time, against the model's own estimate."""
    matcher, images, texts = wide_sides(*shape, pairs=12)
    with torch.inference_mode():
        most = most_bytes(lambda: matcher.score(images, texts))
    stated = 144 * matcher.bytes_per_pair(images, texts)
    assert stated / 3 < most < 1.2 * stated


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_graph_remembers_of_a_pair_is_as_stated(shape: tuple[int, ...]) -> None:
    """Bytes that are kept for the gradients of 20 given pairs, against GRAPH_FACTOR times the model's own estimate."""
    matcher, *sides = wide_sides(*shape, pairs=20)
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = matcher.score_pairs(*sides)
    weights = {p.untyped_storage().data_ptr() for p in matcher.parameters()}
    total = sum(size for place, size in kept.items() if place not in weights)
    stated = GRAPH_FACTOR * 20 * matcher.bytes_per_pair(*sides)
    assert scores.i2t.requires_grad and stated / 6 < total < 2 * stated
