"""MMCA: every equation of the paper as loops in double precision, masks, the switches, selected pairs and their memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mmca_weights import ALPHA, HEADS, IMAGE_DIM, TOKEN_DIM, WIDTH, public_weights
from notebook_cells import cells_of, run_cells
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from itm_lab.parity.adapters.mmca import NAMES, load
from itm_lab.parity.comparison import our_name
from itm_lab.records.old_names import modern_parameters
from itm_lab.records.parameters import declared_parameters
from itm_utils import fast_attention
from itm_utils.errors import ItmError
from itm_utils.fast_attention import GRAPH_FACTOR, attend_pairs
from itm_utils.matcher import ImageBatch, Images, Matcher, PairBatch, Scores, TextBatch, Texts, length_mask
from itm_utils.models import mmca
from itm_utils.models.mmca import (
    MMCA,
    CrossAttentionModule,
    CrossModalTransformerLayer,
    HardNegativeTripletLoss,
    PairTextCNN,
    apply_to_all_pairs,
    apply_to_concatenation,
    apply_to_pairs,
    build,
    positive_pairs,
    sample_negatives,
    select_hardest,
    stages,
)
from itm_utils.models.saem import TextCNN
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import VSEPP, HingeTriplet, hinge_loss
from itm_utils.scoring import score_all
from itm_utils.training import train_config

LENGTHS = [5, 1, 2, 3]  # one and two tokens are fewer than the widest window
REGIONS = [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]]  # holes too: a mask need not be a beginning
EXACT = {"rtol": 1e-9, "atol": 1e-11}


# ---------------------------------------------------------------- inputs and weights


def model(weights: dict[str, Tensor] | None = None, **more) -> MMCA:
    """A small model in double precision, from the public names."""
    weights = weights or public_weights()
    public = load(weights, {"h": HEADS, "alpha": ALPHA})
    made = MMCA(**(public.config | more))
    made.load_state_dict(public.state_dict())
    return made.double().eval()


def image_batch(seed: int = 1, rows: list[list[int]] | None = None) -> ImageBatch:
    """Regions with garbage where the mask says there is none."""
    mask = torch.tensor(rows or REGIONS, dtype=torch.bool)
    regions = torch.randn(*mask.shape, IMAGE_DIM, generator=torch.Generator().manual_seed(seed)).double()
    return ImageBatch(regions=regions, mask=mask, ids=torch.arange(len(mask)))


def text_batch(lengths: list[int] | None = None, seed: int = 2, width: int | None = None) -> TextBatch:
    """Token states with garbage under the padding."""
    sizes = torch.tensor(lengths or LENGTHS)
    shape = (len(sizes), width or int(sizes.max()), TOKEN_DIM)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    return TextBatch(lengths=sizes, ids=torch.arange(len(sizes)), features=features)


def encode(matcher: Matcher, images: ImageBatch | None = None, texts: TextBatch | None = None) -> tuple[Images, Texts]:
    return matcher.encode_images(images or image_batch()), matcher.encode_texts(texts or text_batch())


# ---------------------------------------------------------------- the paper, one vector at a time

Weights = dict[str, Tensor]
Vectors = list[Tensor]
Seen = Callable[[int, int], bool]


def everything(query: int, key: int) -> bool:
    return True


def slow_linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def slow_attention(q: Vectors, k: Vectors, v: Vectors, seen: Seen = everything) -> tuple[Vectors, list[Vectors]]:
    """Eq. 1, one query and one key at a time; a key that is not seen has weight 0."""
    found, weights = [], []
    for a, query in enumerate(q):
        exps = []
        for b, key in enumerate(k):
            logit = (query * key).sum() / math.sqrt(len(query))
            exps.append(logit.exp() if seen(a, b) else torch.zeros_like(logit))
        row = [one / sum(exps) for one in exps]
        weights.append(row)
        found.append(sum(share * value for share, value in zip(row, v, strict=True)))
    return found, weights


def slow_multi_head(
    w: Weights, unit: str, vectors: Vectors, seen: Seen = everything
) -> tuple[Vectors, list[list[Vectors]]]:
    """Eq. 2 and 3; also the weights as [head][query][key]."""
    size = WIDTH // HEADS
    heads, weights = [], []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        q, k, v = ([slow_linear(w, f"{unit}.{name}", x)[part] for x in vectors] for name in "qkv")
        found, shares = slow_attention(q, k, v, seen)
        heads.append(found)
        weights.append(shares)
    joined = [torch.cat([heads[head][a] for head in range(HEADS)]) for a in range(len(vectors))]
    return [slow_linear(w, f"{unit}.o", x) for x in joined], weights


def slow_feed_forward(w: Weights, unit: str, x: Tensor) -> Tensor:
    """Eq. 4."""
    inner = slow_linear(w, f"{unit}.ffn1", x)
    return slow_linear(w, f"{unit}.ffn2", torch.where(inner > 0, inner, torch.zeros_like(inner)))


def slow_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def slow_unit(w: Weights, unit: str, vectors: Vectors, seen: Seen = everything) -> Vectors:
    """Figure 3: two sub-layers, each with a shortcut and a norm behind it."""
    found, _ = slow_multi_head(w, unit, vectors, seen)
    attended = [slow_norm(w, f"{unit}.norm1", x + f) for x, f in zip(vectors, found, strict=True)]
    return [slow_norm(w, f"{unit}.norm2", x + slow_feed_forward(w, unit, x)) for x in attended]


def slow_unit_length(x: Tensor) -> Tensor:
    return x / (x * x).sum().sqrt()


def slow_mean(vectors: Vectors) -> Tensor:
    """Eq. 5, and the sentence below it."""
    return slow_unit_length(sum(vectors) / len(vectors))


def slow_windows(w: Weights, cnn: str, tokens: Vectors, full: bool = True) -> Tensor:
    """Eq. 6 and the maximum after it; zeros fill up a caption that is shorter than a window.

    full: only windows of real tokens count; else all n positions of section 3.3, zeros after the last token.
    """
    best = []
    for window in (1, 2, 3):
        filled = tokens + [torch.zeros_like(tokens[0])] * (max(0, window - len(tokens)) if full else window - 1)
        taps, bias = w[f"{cnn}.conv{window}.weight"], w[f"{cnn}.conv{window}.bias"]
        answers = []
        for k in range(len(filled) - window + 1):
            answer = bias + sum(taps[:, :, t] @ filled[k + t] for t in range(window))
            answers.append(torch.where(answer > 0, answer, torch.zeros_like(answer)))
        best.append(torch.stack(answers).max(dim=0).values)
    return torch.cat(best)


def slow_sentence(w: Weights, cnn: str, tokens: Vectors) -> Tensor:
    """Eq. 7, with unit norm in the place of the layer norm (reading M6)."""
    return slow_unit_length(slow_linear(w, f"{cnn}.fc", slow_windows(w, cnn, tokens)))


def block_rule(blocks: str, regions: int) -> Seen:
    """Which of the four blocks of the joint logits are left."""

    def seen(query: int, key: int) -> bool:
        same = (query < regions) == (key < regions)
        return blocks == "all" or same == (blocks == "self")

    return seen


def slow_joint(w: Weights, seen_regions: Vectors, tokens: Vectors) -> Vectors:
    """Y of Eq. 8 to 10: mapped regions, then mapped tokens (M1, M2)."""
    regions = [slow_linear(w, "region_fc", x) for x in seen_regions]
    return regions + [slow_linear(w, "text_fc", x) for x in tokens]


def slow_pair(w: Weights, regions: Vectors, tokens: Vectors, blocks: str = "all") -> dict[str, Tensor]:
    """i0, c0, i1, c1 of one pair without padding."""
    mapped = [slow_linear(w, "region_fc", x) for x in regions]
    i0, c0 = slow_mean(slow_unit(w, "self_unit", mapped)), slow_sentence(w, "text_cnn0", tokens)
    joint = slow_unit(w, "cross_unit", slow_joint(w, regions, tokens), block_rule(blocks, len(regions)))
    i1, c1 = slow_mean(joint[: len(regions)]), slow_sentence(w, "text_cnn1", joint[len(regions) :])
    return {"i0": i0, "c0": c0, "i1": i1, "c1": c1}


def real_items(images: ImageBatch, texts: TextBatch) -> tuple[list[Vectors], list[Vectors]]:
    """What is really there, as lists of vectors."""
    region_lists = [list(x[m]) for x, m in zip(images.regions, images.mask, strict=True)]
    return region_lists, [list(x[:n]) for x, n in zip(texts.features, texts.lengths.tolist(), strict=True)]


def slow_scores(
    w: Weights, images: ImageBatch, texts: TextBatch, parts: str = "both", blocks: str = "all", alpha: float = ALPHA
) -> Tensor:
    """S of section 3.5 for all pairs."""
    rows = []
    region_lists, token_lists = real_items(images, texts)
    for regions in region_lists:
        row = []
        for tokens in token_lists:
            v = slow_pair(w, regions, tokens, blocks)
            first, second = v["i0"] @ v["c0"], v["i1"] @ v["c1"]
            row.append({"both": first + alpha * second, "first": first, "cross": second}[parts])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def slow_loss(scores: Tensor, margin: float, hardest: bool = True, t2i: Tensor | None = None) -> Tensor:
    """Eq. 15, summed over the pairs of a batch."""
    total, t2i = scores.new_zeros(()), scores if t2i is None else t2i
    for b in range(len(scores)):
        others = [x for x in range(len(scores)) if x != b]
        captions = [margin - scores[b, b] + scores[b, x] for x in others]
        images = [margin - t2i[b, b] + t2i[x, b] for x in others]
        if hardest:
            captions, images = [max(captions)], [max(images)]
        total = total + sum(torch.relu(cost) for cost in captions + images)
    return total


@pytest.fixture
def w() -> Weights:
    """The same weights for the slow version: leaves in double precision."""
    return {name: value.double().requires_grad_() for name, value in public_weights().items()}


def same_gradients(matcher: MMCA, w: Weights, still: tuple[str, ...] = ()) -> None:
    """Every weight of the model has the gradient of its twin; ``still``: prefixes of those that must have none."""
    assert {our_name(NAMES, name) for name in w} == {name for name, _ in matcher.named_parameters()}
    for name, twin in w.items():
        ours = matcher.get_parameter(our_name(NAMES, name)).grad
        if name.startswith(still) if still else False:
            assert ours is None or not ours.abs().max() > 0, name
            assert twin.grad is None or not twin.grad.abs().max() > 0, name
            continue
        torch.testing.assert_close(ours, twin.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        # A key's bias adds the same number to all logits of a query, so its gradient is zero.
        assert (ours.abs().max() > 1e-6) != name.endswith(".k.bias"), name


# ---------------------------------------------------------------- 1. the equations


def test_equations_1_to_3_heads_are_the_loop(w: Weights) -> None:
    """Attended values and weights of each head, without masked keys."""
    unit, vectors = model().self_attention.transformer, image_batch().regions @ torch.randn(IMAGE_DIM, WIDTH).double()
    mask = image_batch().mask
    found, weights = unit.attention(vectors, vectors, mask)
    for item in range(len(vectors)):
        expected, shares = slow_multi_head(w, "self_unit", list(vectors[item][mask[item]]))
        torch.testing.assert_close(found[item][mask[item]], torch.stack(expected), **EXACT)
        real = weights[item][:, mask[item]][:, :, mask[item]]
        torch.testing.assert_close(real, torch.stack([torch.stack([torch.stack(r) for r in h]) for h in shares]))
        assert not weights[item][:, :, ~mask[item]].any()


def test_equation_4_is_square_and_follows_the_attention(w: Weights) -> None:
    """``attention_output``: projection, residual, norm, feed-forward of the same width, residual, norm."""
    unit = model().cross_attention.transformer
    assert unit.linear1.weight.shape == unit.linear2.weight.shape == (WIDTH, WIDTH)
    torch.manual_seed(3)
    vectors, found = torch.randn(3, WIDTH).double(), torch.randn(3, HEADS, WIDTH // HEADS).double()
    for x, f, ours in zip(vectors, found, unit.attention_output(vectors, found), strict=True):
        attended = slow_norm(w, "cross_unit.norm1", x + slow_linear(w, "cross_unit.o", f.flatten()))
        expected = slow_norm(w, "cross_unit.norm2", attended + slow_feed_forward(w, "cross_unit", attended))
        torch.testing.assert_close(ours, expected, **EXACT)


def test_equation_5_the_image_vector(w: Weights) -> None:
    """i0 is the mean of the real regions after their unit, of length one."""
    region_lists, _ = real_items(image_batch(), text_batch())
    expected = [slow_pair(w, regions, [torch.ones(TOKEN_DIM).double()])["i0"] for regions in region_lists]
    torch.testing.assert_close(model().encode_images(image_batch()).pooled, torch.stack(expected), **EXACT)


@pytest.mark.parametrize("width", [5, 9])
def test_equation_7_the_caption_vector(w: Weights, width: int) -> None:
    """c0 from one token up, however wide the padding."""
    batch = text_batch(width=width)
    _, token_lists = real_items(image_batch(), batch)
    expected = torch.stack([slow_sentence(w, "text_cnn0", tokens) for tokens in token_lists])
    torch.testing.assert_close(model().encode_texts(batch).pooled, expected, **EXACT)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", [TextCNN, PairTextCNN])
@pytest.mark.parametrize(("lengths", "width"), [(LENGTHS, 5), (LENGTHS, 9), ([1, 1], 1), ([2, 1], 2)])
def test_equation_6_windows_and_their_gradients(
    kind: type[TextCNN], lengths: list[int], width: int, full: bool
) -> None:
    """Both text CNNs: windows of real tokens, or one at each of the n tokens; zeros fill up what is missing."""
    torch.manual_seed(4)
    cnn = kind(TOKEN_DIM, 5, full).double()
    w = {f"cnn.conv{n}.{k}": v for n, conv in enumerate(cnn.convs, 1) for k, v in conv.named_parameters()}
    batch = text_batch(lengths, width=width)
    found = []
    for way in ("class", "loop"):
        cnn.zero_grad()
        tokens = batch.features.clone().requires_grad_()
        if way == "class":
            answers = cnn(tokens, batch.mask)
        else:
            captions = [list(x[:n]) for x, n in zip(tokens, lengths, strict=True)]
            answers = torch.stack([slow_windows(w, "cnn", caption, full) for caption in captions])
        (answers * torch.arange(answers.numel()).view_as(answers)).sum().backward()
        found.append([answers.detach(), tokens.grad, *(p.grad for p in cnn.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)


def test_a_window_at_every_token_sees_what_full_windows_do_not() -> None:
    """A filter that answers to the last token in first place: only a window that starts there finds it."""
    cnn = TextCNN(1, 1, full_windows=False)
    tokens, mask = torch.tensor([[[0.0], [0.0], [1.0]]]), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        for conv in cnn.convs:
            nn.init.zeros_(conv.weight)[..., 0] = 1
            nn.init.zeros_(conv.bias)
        assert cnn(tokens, mask).tolist() == [[1, 1, 1]]
        cnn.full_windows = True
        assert cnn(tokens, mask).tolist() == [[1, 0, 0]]


def test_equations_8_to_10_both_sides_apart_are_the_sequence(w: Weights) -> None:
    """Queries, keys and values prepared once per item are those of the joint sequence; the query is scaled."""
    images, texts = encode(model())
    region_lists, token_lists = real_items(image_batch(), text_batch())
    for b in range(4):
        joint = slow_joint(w, region_lists[b], token_lists[b])
        for name, root in (("query", math.sqrt(WIDTH / HEADS)), ("key", 1.0), ("value", 1.0)):
            sides = [side.extra_local[name][b][side.mask[b]] for side in (images, texts)]
            expected = torch.stack([slow_linear(w, f"cross_unit.{name[0]}", x) for x in joint])
            torch.testing.assert_close(root * torch.cat(sides).flatten(1), expected, **EXACT)


@pytest.mark.parametrize("blocks", ["all", "self", "cross"])
def test_equation_11_one_softmax_over_both_sides(w: Weights, blocks: str) -> None:
    """Attention over the joint sequence; ``self`` and ``cross`` are the same softmax with blocks of its logits masked."""
    matcher = model(blocks=blocks)
    images, texts = encode(matcher)
    square = matcher.cross_attention.joint_attention(images, texts)
    region_lists, token_lists = real_items(image_batch(), text_batch())
    for b in range(4):
        real = torch.cat([images.mask[b], texts.mask[b]])
        joint, rule = slow_joint(w, region_lists[b], token_lists[b]), block_rule(blocks, len(region_lists[b]))
        _, shares = slow_multi_head(w, "cross_unit", joint, rule)
        expected = torch.stack([torch.stack([torch.stack(row) for row in head]) for head in shares])
        torch.testing.assert_close(square[b][:, real][:, :, real], expected, **EXACT)
        assert not square[b][:, :, ~real].any()


def test_equations_12_to_14_without_softmax_the_blocks_add_up() -> None:
    """Q K^T V of the sequence is the sum over the two modalities, for regions and for words."""
    images, texts = encode(model(), image_batch(rows=[[1] * 4] * 4), text_batch([5] * 4))
    sides = [images.extra_local, texts.extra_local]
    q, k, v = (torch.cat([side[name] for side in sides], dim=1) for name in ("query", "key", "value"))
    for b in range(4):
        for head in range(HEADS):
            whole = q[b, :, head] @ k[b, :, head].T @ v[b, :, head]
            apart = []
            for one in sides:
                parts = [one["query"][b, :, head] @ o["key"][b, :, head].T @ o["value"][b, :, head] for o in sides]
                assert all(part.abs().max() > 1e-3 for part in parts)
                apart.append(sum(parts))
            torch.testing.assert_close(torch.cat(apart), whole, **EXACT)


def test_after_the_layer_the_sides_are_those_of_the_concatenation(w: Weights) -> None:
    """Given pairs, all pairs, the concatenation and the loop: the same vectors after the cross-modal layer."""
    matcher = model()
    images, texts = encode(matcher)
    unit = matcher.cross_attention.transformer
    all_regions, all_words = apply_to_all_pairs(unit, images, texts), apply_to_all_pairs(unit, texts, images)
    regions, words = apply_to_pairs(unit, images, texts), apply_to_pairs(unit, texts, images)
    concatenated = apply_to_concatenation(unit, images.local, texts.local, images.mask, texts.mask)
    region_lists, token_lists = real_items(image_batch(), text_batch())
    for b in range(4):
        seen, said = images.mask[b], texts.mask[b]
        expected = torch.stack(slow_unit(w, "cross_unit", slow_joint(w, region_lists[b], token_lists[b])))
        for r, t in (
            (regions[b], words[b]),
            (all_regions[b, b], all_words[b, b]),
            (concatenated[0][b], concatenated[1][b]),
        ):
            torch.testing.assert_close(torch.cat([r[seen], t[said]]), expected, **EXACT)


def test_the_four_vectors_of_every_pair(w: Weights) -> None:
    """i1 and c1 depend on the pair, i0 and c0 do not; all have unit norm."""
    matcher = model()
    images, texts = encode(matcher)
    region_lists, token_lists = real_items(image_batch(), text_batch())
    i1s = []
    for i in range(4):
        for c in range(4):
            image, text = images[i : i + 1], texts[c : c + 1]
            i1 = matcher.cross_attention.image_vector(
                apply_to_pairs(matcher.cross_attention.transformer, image, text), image.mask
            )
            c1 = matcher.cross_attention.caption_vector(
                apply_to_pairs(matcher.cross_attention.transformer, text, image), text.mask
            )
            expected = slow_pair(w, region_lists[i], token_lists[c])
            for ours, name in ((image.pooled, "i0"), (text.pooled, "c0"), (i1, "i1"), (c1, "c1")):
                torch.testing.assert_close(ours[0], expected[name], **EXACT)
                assert ours.norm().item() == pytest.approx(1)
            i1s.append(i1)
    assert (i1s[0] - i1s[1]).abs().max() > 1e-3


@pytest.mark.parametrize("blocks", ["all", "self", "cross"])
@pytest.mark.parametrize("parts", ["both", "cross", "first"])
def test_scores_are_the_paper_with_all_gradients(w: Weights, parts: str, blocks: str) -> None:
    """The whole model: values, and the gradient of every weight, for every switch."""
    matcher = model(parts=parts, blocks=blocks)
    scores = matcher.score(*encode(matcher)).i2t
    expected = slow_scores(w, image_batch(), text_batch(), parts, blocks)
    torch.testing.assert_close(scores, expected, **EXACT)
    spread = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)).double()
    for values in (scores, expected):
        (values * spread).sum().backward()
    unused = {"first": ("text_fc", "cross_unit", "text_cnn1"), "cross": ("self_unit", "text_cnn0")}
    same_gradients(matcher, w, unused.get(parts, ()))


def test_given_pairs_have_the_same_gradients(w: Weights) -> None:
    """``score_pairs``, the way that training takes: an image may stand in several pairs."""
    matcher = model()
    row, column = torch.tensor([0, 0, 2, 3, 1]), torch.tensor([1, 2, 1, 3, 0])
    images, texts = encode(matcher)
    scores = matcher.score_pairs(images[row], texts[column]).i2t
    expected = slow_scores(w, image_batch(), text_batch())[row, column]
    torch.testing.assert_close(scores, expected, **EXACT)
    spread = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.7]).double()
    for values in (scores, expected):
        (values * spread).sum().backward()
    same_gradients(matcher, w)


@pytest.mark.parametrize("feed_forward", [WIDTH, 11])
def test_equation_15_and_its_gradients(feed_forward: int) -> None:
    """The loss of a batch by the full score, hardest negatives, and the gradient of every weight through it."""
    public = public_weights(feed_forward, seed=6)
    w = {name: value.double().requires_grad_() for name, value in public.items()}
    matcher = model(public)
    loss, _ = HardNegativeTripletLoss(0.4)(matcher, PairBatch(image_batch(), text_batch()))
    expected = slow_loss(slow_scores(w, image_batch(), text_batch()), 0.4)
    torch.testing.assert_close(loss, expected, **EXACT)
    assert loss > 0
    loss.backward()
    expected.backward()
    same_gradients(matcher, w)


# ---------------------------------------------------------------- 2. masks and batches


@pytest.mark.parametrize("blocks", ["all", "self", "cross"])
@pytest.mark.parametrize("garbage", [0.0, 1e4])
def test_garbage_under_a_mask_takes_no_part(blocks: str, garbage: float) -> None:
    """Scores, and gradients: none flows into padding, and what stands there changes none."""
    matcher, found = model(blocks=blocks), []
    for fill in (None, garbage):
        images, texts = image_batch(), text_batch()
        if fill is not None:
            images.regions = images.regions.masked_fill(~images.mask[..., None], fill)
            texts.features = texts.features.masked_fill(~texts.mask[..., None], fill)
        images.regions.requires_grad_(), texts.features.requires_grad_()
        matcher.zero_grad()
        scores = matcher.score(*encode(matcher, images, texts)).i2t
        (scores * torch.arange(16).view(4, 4)).sum().backward()
        assert not images.regions.grad[~images.mask].any() and not texts.features.grad[~texts.mask].any()
        found.append([scores.detach(), *(p.grad for p in matcher.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("blocks", ["all", "self", "cross"])
def test_more_padding_changes_nothing(blocks: str) -> None:
    """Wider batches, padding at the end of both sides."""
    matcher, images, texts = model(blocks=blocks), image_batch(), text_batch()
    expected = matcher.score(*encode(matcher, images, texts)).i2t
    more = torch.full((4, 3, IMAGE_DIM), 7.0).double()
    wide_images = replace(images, regions=torch.cat([images.regions, more], dim=1))
    wide_images.mask = torch.cat([images.mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    wide_texts = replace(texts, features=torch.cat([texts.features, more[..., :TOKEN_DIM]], dim=1))
    for i in (images, wide_images):
        for t in (texts, wide_texts):
            ours = encode(matcher, i, t)
            torch.testing.assert_close(matcher.score(*ours).i2t, expected, **EXACT)
            torch.testing.assert_close(matcher.score_pairs(*ours).i2t, expected.diagonal(), **EXACT)


@pytest.mark.parametrize("blocks", ["all", "self", "cross"])
def test_scores_do_not_depend_on_the_batch(blocks: str) -> None:
    """A pair alone without padding, in a batch, and in a batch in another order."""
    matcher, images, texts = model(blocks=blocks), image_batch(), text_batch()
    together = matcher.score(*encode(matcher, images, texts)).i2t
    order = torch.tensor([2, 0, 3, 1])
    turned = matcher.score(*encode(matcher, images[order], texts[order])).i2t
    torch.testing.assert_close(turned, together[order][:, order], **EXACT)
    for i in range(4):
        for c in range(4):
            one = replace(images[i : i + 1], regions=images.regions[i : i + 1, images.mask[i]])
            one.mask = images.mask[i : i + 1, images.mask[i]]
            other = replace(texts[c : c + 1], features=texts.features[c : c + 1, : LENGTHS[c]])
            sides = encode(matcher, one, other)
            for scores in (matcher.score(*sides).i2t[0], matcher.score_pairs(*sides).i2t):
                torch.testing.assert_close(scores[0], together[i, c], **EXACT)


@pytest.mark.parametrize("pairs", [1, 2, 3, 5, 7, 100])
def test_tiles_of_any_size_agree(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are cut by a number of bytes; scores and gradients do not change, nor with blocks."""
    matcher, found = model(), []
    images, texts = encode(matcher)
    cost = matcher.bytes_per_pair(images, texts)
    for tile in (2**24, pairs * cost):
        monkeypatch.setattr(mmca, "TILE", tile)
        calls, plain = [], CrossAttentionModule.encode_all_pairs
        monkeypatch.setattr(CrossAttentionModule, "encode_all_pairs", lambda *a, p=plain, c=calls: c.append(1) or p(*a))
        matcher.zero_grad()
        scores = matcher.score(*encode(matcher)).i2t
        (scores * torch.arange(16).view(4, 4)).sum().backward()
        found.append([scores.detach(), *(p.grad for p in matcher.parameters())])
        monkeypatch.setattr(CrossAttentionModule, "encode_all_pairs", plain)
    assert len(calls) >= math.ceil(16 / pairs)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)
    in_blocks = score_all(matcher, images, texts, budget=pairs * cost, progress=False).i2t
    torch.testing.assert_close(in_blocks, found[0][0].float())


def joined(matcher: MMCA) -> tuple[Images, Texts]:
    """Encodings of batches of their own, which were padded to different widths, joined."""
    images, texts, sides = image_batch(), text_batch(), []
    for i, c in ((0, 0), (1, 1), (2, 2), (3, 3)):
        real = images.mask[i]
        one = ImageBatch(images.regions[i : i + 1, real], images.mask[i : i + 1, real], images.ids[i : i + 1])
        other = replace(texts[c : c + 1], features=texts.features[c : c + 1, : LENGTHS[c]])
        sides.append(encode(matcher, one, other))
    return Images.cat([one for one, _ in sides]), Texts.cat([other for _, other in sides])


def test_encodings_joined_from_batches_of_other_widths() -> None:
    """``encode_split`` joins blocks that were padded to different widths; the scores must stay."""
    matcher = model()
    torch.testing.assert_close(matcher.score(*joined(matcher)).i2t, matcher.score(*encode(matcher)).i2t, **EXACT)


def test_one_of_anything_works() -> None:
    """One image of one region with one caption of one token, with finite gradients."""
    matcher = model()
    scores = matcher.score(*encode(matcher, image_batch(rows=[[1]]), text_batch([1]))).i2t
    scores.sum().backward()
    assert scores.shape == (1, 1) and all(p.grad.isfinite().all() for p in matcher.parameters())


def test_half_precision_trains() -> None:
    """A step under autocast has a finite loss and finite gradients, masks included."""
    matcher = model().float().train()
    images, texts = image_batch(), text_batch()
    images.regions, texts.features = images.regions.float(), texts.features.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = HardNegativeTripletLoss(0.2)(matcher, PairBatch(images, texts))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in matcher.parameters())


# ---------------------------------------------------------------- 3. switches


def test_without_cross_blocks_vectors_do_not_depend_on_the_pair() -> None:
    """self: i1 is the same for every caption and c1 for every image; all and cross: they are not."""
    for blocks, alike in (("self", True), ("all", False), ("cross", False)):
        matcher = model(blocks=blocks)
        images, texts = encode(matcher)
        regions = apply_to_all_pairs(matcher.cross_attention.transformer, images, texts)[0]  # image 0 with all captions
        words = apply_to_all_pairs(matcher.cross_attention.transformer, texts, images)[0]
        for after in (regions, words):
            assert torch.allclose(after[0][0], after[1][0], atol=1e-12) == alike


def test_parts_are_the_two_terms() -> None:
    """both = first + cross_weight * cross, for all pairs and for given ones."""
    scores = {}
    for parts in ("both", "first", "cross"):
        matcher = model(parts=parts)
        scores[parts] = matcher.score(*encode(matcher)).i2t
        torch.testing.assert_close(matcher.score_pairs(*encode(matcher)).i2t, scores[parts].diagonal(), **EXACT)
    torch.testing.assert_close(scores["both"], scores["first"] + ALPHA * scores["cross"], **EXACT)
    assert (scores["first"] - scores["cross"]).abs().max() > 1e-2


@pytest.mark.parametrize("more", [{"cross_weight": 0.0}, {"parts": "first"}])
def test_without_a_second_score_nothing_is_prepared(more: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 0 is the first score alone, and the cross-modal layer is not run."""

    def never(*_) -> None:
        raise AssertionError("the cross-modal layer ran")

    for name in ("prepare", "attention_output"):
        monkeypatch.setattr(CrossModalTransformerLayer, name, never)
    matcher = model(**more)
    images, texts = encode(matcher)
    assert not matcher.uses_cross_score and images.extra_local == texts.extra_local == {}
    torch.testing.assert_close(matcher.score(images, texts).i2t, images.pooled @ texts.pooled.T, **EXACT)
    assert matcher.attention(images, texts) == {} and matcher.bytes_per_pair(images, texts) == 4
    loss, _ = HardNegativeTripletLoss(0.2)(matcher, PairBatch(image_batch(), text_batch()))
    torch.testing.assert_close(loss, hinge_loss(matcher.score(images, texts), 0.2, True), **EXACT)


def test_cross_alone_ignores_the_weight() -> None:
    matcher = model(parts="cross", cross_weight=0.0)
    other = model(parts="cross")
    torch.testing.assert_close(matcher.score(*encode(matcher)).i2t, other.score(*encode(other)).i2t, **EXACT)


def test_one_vector_is_the_mean_of_the_real_regions(w: Weights) -> None:
    """The same as an image with one region, the mean of those that are there."""
    matcher, images = model(one_vector=True), image_batch()
    means = torch.stack([x[m].mean(dim=0) for x, m in zip(images.regions, images.mask, strict=True)])
    single = ImageBatch(means[:, None], torch.ones(4, 1, dtype=torch.bool), images.ids)
    sides = encode(matcher)
    assert sides[0].mask.shape == (4, 1) and sides[0].local.shape == (4, 1, WIDTH)
    torch.testing.assert_close(matcher.score(*sides).i2t, slow_scores(w, single, text_batch()), **EXACT)
    torch.testing.assert_close(matcher.score_pairs(*sides).i2t, matcher.score(*sides).i2t.diagonal(), **EXACT)
    assert matcher.attention(*sides)["t2i"].weights.shape == (4, 5, 1)


def test_filters_do_not_follow_the_width() -> None:
    """Section 4.2 names 256 filters, whatever the width (M8); the tie is a number of filters like any other."""
    for width, more, channels in ((64, {}, 256), (64, {"channels": 64}, 64), (512, {}, 256)):
        matcher = MMCA(IMAGE_DIM, TOKEN_DIM, width=width, heads=2, **more)
        for module in (matcher.self_attention, matcher.cross_attention):
            assert [conv.out_channels for conv in module.text_cnn.convs] == [channels] * 3
            assert module.text_proj.weight.shape == (width, 3 * channels)


def test_windows_at_every_token_reach_both_text_cnns() -> None:
    """The switch changes the first and the second score, and leaves the weights as they are."""
    full, every = model(), model(full_windows=False)
    assert not every.self_attention.text_cnn.full_windows and not every.cross_attention.text_cnn.full_windows
    for parts in ("first", "cross"):
        full.parts = every.parts = parts
        scores = [matcher.score(*encode(matcher)).i2t for matcher in (full, every)]
        assert (scores[0] - scores[1]).abs().max() > 1e-3
    pairs, images_and_texts = every.score_pairs(*encode(every)).i2t, every.score(*encode(every)).i2t
    torch.testing.assert_close(pairs, images_and_texts.diagonal(), **EXACT)


# ---------------------------------------------------------------- 4. selected pairs


class Decoupled(Matcher):
    """Two similarities, one for each direction, and a loss of its own."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width, width))

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=batch.regions[:, 0, :5])

    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=batch.features[:, 0, :5])

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores(*(images.pooled @ m @ texts.pooled.T for m in (self.one, self.two)))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        return Scores(*((images.pooled @ m * texts.pooled).sum(dim=1) for m in (self.one, self.two)))

    def extra_losses(self, images: Images, texts: Texts, batch: PairBatch) -> dict[str, Tensor]:
        return {"size": self.one.pow(2).sum()}


def six_pairs() -> PairBatch:
    """Six pairs, of captions with word ids and with token states."""
    rows = [[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    texts = text_batch([5, 1, 2, 3, 4, 5])
    words = torch.randint(4, 20, (6, 5), generator=torch.Generator().manual_seed(7)) * texts.mask
    return PairBatch(image_batch(rows=rows), replace(texts, words=words))


def any_matcher(kind: str) -> Matcher:
    torch.manual_seed(8)
    made = {
        "mmca": model,
        "mmca one vector": lambda: model(one_vector=True),
        "decoupled": Decoupled,
        "vsepp": lambda: VSEPP(20, IMAGE_DIM, width=8, word_dim=5),
        "scan": lambda: SCAN(20, IMAGE_DIM, width=8, word_dim=5),
    }
    return made[kind]().double().train()


def gradients(matcher: Matcher, loss: Tensor) -> dict[str, Tensor]:
    matcher.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in matcher.named_parameters() if p.grad is not None}


KINDS = ["mmca", "mmca one vector", "decoupled", "vsepp"]


@pytest.mark.parametrize("kind", [*KINDS, "scan"])
@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("at_a_time", [1000, 5, 1])
def test_selected_pairs_have_the_loss_and_gradients_of_all(
    kind: str, hardest: bool, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly and by selection, in one chunk and in many, for any matcher."""
    matcher, batch, pieces = any_matcher(kind), six_pairs(), []
    images, texts = encode(matcher, batch.images, batch.texts)
    scores = matcher.score(images, texts)
    assert scores.decoupled == (kind == "decoupled")
    extra = sum(matcher.extra_losses(images, texts, batch).values())
    expected = hinge_loss(scores, 0.4, hardest) + extra
    torch.testing.assert_close(expected, slow_loss(scores.i2t, 0.4, hardest, scores.t2i) + extra, **EXACT)
    reference = gradients(matcher, expected)
    plain = fast_attention.checkpoint
    monkeypatch.setattr(fast_attention, "checkpoint", lambda *a, **k: pieces.append(len(a[1])) or plain(*a, **k))
    budget = at_a_time * GRAPH_FACTOR * matcher.bytes_per_pair(images, texts)
    loss, told = HardNegativeTripletLoss(0.4, hardest=hardest, negatives=0, budget=budget)(matcher, batch)
    asked = 3 * 6 if hardest else 6 + 2 * 6 * 5
    assert sum(pieces) == (0 if at_a_time > asked else asked) and max(pieces, default=0) <= at_a_time
    torch.testing.assert_close(loss, expected, **EXACT)
    ours = gradients(matcher, loss)
    assert ours.keys() == reference.keys() and told == {"hardest": float(hardest)} and matcher.training
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, **EXACT)


def test_the_hardest_are_selected_in_each_direction_by_its_own_score() -> None:
    """Negative captions by i2t along rows, negative images by t2i along columns."""
    matcher, batch = any_matcher("decoupled"), six_pairs()
    sides = encode(matcher, batch.images, batch.texts)
    scores = matcher.score(*sides)
    captions, images = select_hardest(matcher, *sides, budget=2**20)
    for b in range(6):
        others = [x for x in range(6) if x != b]
        assert captions[b].item() == max(others, key=lambda x, b=b: scores.i2t[b, x].item())
        assert images[b].item() == max(others, key=lambda x, b=b: scores.t2i[x, b].item())
    assert captions.tolist() != images.tolist()


TWICE = [3, 1, 3, 2, 1, 3]  # images of a batch in which some stand more than once


def same_images(ids: list[int] | None = None) -> PairBatch:
    """Six pairs of a few images."""
    batch = six_pairs()
    return replace(batch, images=replace(batch.images, ids=torch.tensor(ids or TWICE)))


def slow_loss_by_image(scores: Scores, ids: list[int], margin: float, hardest: bool) -> Tensor:
    """Eq. 15 where every caption of an image is a positive of it."""
    total = scores.i2t.new_zeros(())
    for b, image in enumerate(ids):
        others = [x for x, other in enumerate(ids) if other != image]
        for costs in (
            [margin - scores.i2t[b, b] + scores.i2t[b, x] for x in others],
            [margin - scores.t2i[b, b] + scores.t2i[x, b] for x in others],
        ):
            total = total + sum(torch.relu(cost) for cost in ([max(costs)] if hardest and costs else costs))
    return total


@pytest.mark.parametrize("kind", ["mmca", "decoupled"])
@pytest.mark.parametrize("hardest", [True, False])
@pytest.mark.parametrize("ids", [TWICE, [0, 0, 0, 0, 0, 1], [4] * 6, [0, 1, 2, 3, 4, 5]])
def test_captions_of_the_same_image_are_no_negatives_by_image(kind: str, hardest: bool, ids: list[int]) -> None:
    """Loss and gradients are those of the loop over other images, for the hardest and for all negatives."""
    matcher, batch = any_matcher(kind), same_images(ids)
    sides = encode(matcher, batch.images, batch.texts)
    expected = slow_loss_by_image(matcher.score(*sides), ids, 0.4, hardest)
    expected = expected + sum(matcher.extra_losses(*sides, batch).values())
    loss, _ = HardNegativeTripletLoss(0.4, hardest=hardest, negatives=0, by_image=True)(matcher, batch)
    torch.testing.assert_close(loss, expected, **EXACT)
    ours, reference = gradients(matcher, loss), {}
    if expected.requires_grad:
        reference = gradients(matcher, expected)
    for name, value in ours.items():
        torch.testing.assert_close(value, reference.get(name, torch.zeros_like(value)), **EXACT)


def test_by_default_only_the_pair_itself_is_no_negative() -> None:
    """As the paper writes it: another caption of the same image may be the hardest."""
    matcher = any_matcher("mmca")
    losses = [HardNegativeTripletLoss(0.4)(matcher, batch)[0] for batch in (six_pairs(), same_images([4] * 6))]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert losses[0] > 0
    assert not HardNegativeTripletLoss(0.4, by_image=True)(matcher, same_images([4] * 6))[0] > 0


@pytest.mark.parametrize("negatives", [1, 3])
def test_random_pairs_by_image_stand_for_all_other_images(negatives: int) -> None:
    """In the warm-up too: nothing of the same image is drawn, and the mean over draws is the loss over all others.

    With three negatives per pair the pairs of image 3 have no more than that: all of them count, once.
    """
    matcher, batch = any_matcher("decoupled"), same_images()
    objective = HardNegativeTripletLoss(0.4, warmup_epochs=1, negatives=negatives, by_image=True)
    positive = positive_pairs(batch, by_image=True)
    torch.manual_seed(10)
    for _ in range(50):
        for drawn, own in zip(sample_negatives(positive, negatives), (positive, positive.T), strict=True):
            assert not own.gather(1, drawn).any()
    with torch.no_grad():
        scores = matcher.score(*encode(matcher, batch.images, batch.texts))
        expected = slow_loss_by_image(scores, TWICE, 0.4, hardest=False) + matcher.one.pow(2).sum()
        losses = torch.stack([objective(matcher, batch)[0] for _ in range(400)])
    error = losses.std() / math.sqrt(len(losses))
    assert error > 0 and (losses.mean() - expected).abs() < 4 * error


def test_random_negatives_are_distinct_and_uniform() -> None:
    """Never the positive, none twice, every negative equally often, captions and images drawn apart."""
    torch.manual_seed(9)
    often, draws = torch.zeros(2, 6, 6), 2000
    for _ in range(draws):
        selected = torch.stack(sample_negatives(torch.eye(6, dtype=torch.bool), 2))
        often.scatter_add_(2, selected, torch.ones_like(selected, dtype=torch.float32))
        assert (selected[..., 0] != selected[..., 1]).all()
    assert not often.diagonal(dim1=1, dim2=2).any()
    wrong = often[:, ~torch.eye(6, dtype=torch.bool)] / draws
    assert (wrong - 2 / 5).abs().max() < 5 * math.sqrt(0.4 * 0.6 / draws)
    everyone = torch.stack(sample_negatives(torch.eye(6, dtype=torch.bool), 5))
    assert all(sorted(row) == [x for x in range(6) if x != b] for way in everyone for b, row in enumerate(way.tolist()))


@pytest.mark.parametrize("negatives", [1, 2, 4])
def test_random_pairs_stand_for_all_on_average(negatives: int) -> None:
    """The mean over many draws approaches the loss over all negatives; a single draw does not."""
    matcher, batch = any_matcher("decoupled"), six_pairs()
    objective = HardNegativeTripletLoss(0.4, hardest=False, negatives=negatives)
    torch.manual_seed(10)
    with torch.no_grad():
        expected = hinge_loss(matcher.score(*encode(matcher, batch.images, batch.texts)), 0.4, False)
        expected = expected + matcher.one.pow(2).sum()
        losses = torch.stack([objective(matcher, batch)[0] for _ in range(400)])
    error = losses.std() / math.sqrt(len(losses))
    assert losses.std() > 0.02 * expected and (losses.mean() - expected).abs() < 4 * error


def test_more_negatives_than_there_are_is_all_of_them() -> None:
    matcher, batch = any_matcher("vsepp"), six_pairs()
    every = [HardNegativeTripletLoss(0.4, hardest=False, negatives=n)(matcher, batch)[0] for n in (0, 5, 99)]
    torch.testing.assert_close(every[1], every[0], **EXACT)
    torch.testing.assert_close(every[2], every[0], **EXACT)


def test_the_hardest_take_over_after_the_warmup() -> None:
    objective = HardNegativeTripletLoss(warmup_epochs=2)
    now = []
    for epoch in range(4):
        objective.set_epoch(epoch)
        now.append(objective.hardest_now)
    assert now == [False, False, True, True]
    objective = HardNegativeTripletLoss(hardest=False, warmup_epochs=0)
    objective.set_epoch(7)
    assert not objective.hardest_now and HardNegativeTripletLoss().hardest_now


def test_gradients_in_chunks_use_the_same_dropout() -> None:
    """With dropout, recomputed chunks must drop the same units: gradients against finite differences."""
    matcher, batch = model(dropout=0.3).train(), six_pairs()
    cost = matcher.bytes_per_pair(*encode(matcher, batch.images, batch.texts))
    objective, names = (
        HardNegativeTripletLoss(0.4, budget=4 * GRAPH_FACTOR * cost),
        ("cross_attention.text_proj.weight", "cross_attention.transformer.linear1.weight"),
    )

    def loss() -> Tensor:
        torch.manual_seed(11)
        return objective(matcher, batch)[0]

    reference = gradients(matcher, loss())
    for name in names:
        weight, step = matcher.get_parameter(name), 1e-6 * torch.sign(reference[name])
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * step
                values.append(loss().item())
                weight -= sign * step
        assert values[0] - values[1] == pytest.approx(2e-6 * reference[name].abs().sum().item(), rel=1e-4)


@pytest.mark.parametrize("hardest", [True, False])
def test_one_pair_has_no_negative(hardest: bool) -> None:
    """As in HingeTriplet: nothing to learn from, and no failure."""
    matcher, batch = any_matcher("mmca"), six_pairs()
    batch = PairBatch(batch.images[:1], batch.texts[:1])
    expected, _ = HingeTriplet(0.2, hardest=hardest)(matcher, batch)
    torch.testing.assert_close(HardNegativeTripletLoss(0.2, hardest=hardest)(matcher, batch)[0], expected, **EXACT)


# ---------------------------------------------------------------- 5. memory


def wide_pairs(pairs: int) -> tuple[MMCA, PairBatch]:
    """Width 64, twelve regions, ten tokens."""
    torch.manual_seed(12)
    images = ImageBatch(torch.randn(pairs, 12, 16), torch.ones(pairs, 12, dtype=torch.bool), torch.arange(pairs))
    lengths = torch.full((pairs,), 10)
    texts = TextBatch(lengths=lengths, ids=torch.arange(pairs), features=torch.randn(pairs, 10, 16))
    return MMCA(16, 16, width=64, heads=4), PairBatch(images, texts)


def most_bytes(run: Callable[[], None]) -> int:
    """The most that tensors of the run hold at one time, beyond what was there before: counted, not sampled."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def bytes_of_encoding(matcher: MMCA, batch: PairBatch) -> int:
    """The most that encoding a batch and its gradients hold, without any pair."""

    def run() -> None:
        sides = encode(matcher, batch.images, batch.texts)
        tensors = [t for side in sides for t in (side.pooled, side.local, *side.extra_local.values())]
        sum(t.sum() for t in tensors if t.requires_grad).backward()

    return most_bytes(run)


def bytes_of_step(matcher: MMCA, batch: PairBatch, objective: Callable) -> int:
    """The most that a training step holds beyond its encodings."""
    for p in matcher.parameters():
        p.grad = torch.zeros_like(p)
    return most_bytes(lambda: objective(matcher, batch)[0].backward()) - bytes_of_encoding(matcher, batch)


def test_a_step_stays_within_its_budget() -> None:
    """Batches of 16 and of 64, forward and backward: the budget holds, and the direct way grows with the square."""
    budget = 2**22
    for pairs in (16, 64):
        assert bytes_of_step(*wide_pairs(pairs), HardNegativeTripletLoss(budget=budget)) < 2 * budget, pairs
    direct = [bytes_of_step(*wide_pairs(pairs), HingeTriplet()) for pairs in (8, 16)]
    assert direct[1] > 3 * direct[0] and direct[1] > 2 * budget


@pytest.mark.parametrize(("width", "heads", "regions", "words"), [(64, 4, 12, 10), (32, 16, 36, 14), (64, 4, 36, 3)])
def test_the_memory_of_a_graph_is_as_stated(width: int, heads: int, regions: int, words: int) -> None:
    """Bytes that are kept for the gradients of 20 given pairs, against GRAPH_FACTOR times the model's own estimate."""
    torch.manual_seed(13)
    matcher = MMCA(16, 16, width=width, heads=heads)
    images = ImageBatch(torch.randn(20, regions, 16), torch.ones(20, regions, dtype=torch.bool), torch.arange(20))
    texts = TextBatch(torch.full((20,), words), torch.arange(20), features=torch.randn(20, words, 16))
    sides, kept = encode(matcher, images, texts), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = matcher.score_pairs(*sides).i2t
    weights = {p.untyped_storage().data_ptr() for p in matcher.parameters()}
    total = sum(size for place, size in kept.items() if place not in weights)
    stated = GRAPH_FACTOR * 20 * matcher.bytes_per_pair(*sides)
    assert scores.requires_grad and stated / 6 < total < 2 * stated


# ---------------------------------------------------------------- 6. the paper's size


@pytest.mark.slow
def test_two_steps_at_the_papers_size() -> None:
    """Width 256, 16 heads, 36 regions of 2048 numbers, tokens of a BERT of base geometry: all weights move."""
    from transformers import BertConfig, BertModel  # here: its import takes longer than all others together

    torch.manual_seed(14)
    bert = BertModel(BertConfig(vocab_size=50, num_hidden_layers=1), add_pooling_layer=False).eval()
    lengths = torch.tensor([14, 9, 4, 11])
    words = torch.randint(1, 50, (4, 14)) * length_mask(lengths, 14)
    with torch.no_grad():
        states = bert(words, attention_mask=length_mask(lengths, 14)).last_hidden_state
    batch = PairBatch(
        ImageBatch(torch.randn(4, 36, 2048), torch.ones(4, 36, dtype=torch.bool), torch.arange(4)),
        TextBatch(lengths=lengths, ids=torch.arange(4), features=states),
    )
    matcher = MMCA(2048)  # everything else is the paper's by default
    settings = ("token_dim", "width", "channels", "full_windows", "dropout", "cross_weight", "parts", "blocks")
    assert [matcher.config[name] for name in settings] == [768, 256, 256, True, 0.0, 0.2, "both", "all"]
    assert (
        matcher.self_attention.transformer.attention.heads == matcher.cross_attention.transformer.attention.heads == 16
    )
    assert (
        matcher.self_attention.text_proj.weight.shape
        == matcher.cross_attention.text_proj.weight.shape
        == (256, 3 * 256)
    )
    before = {name: p.detach().clone() for name, p in matcher.named_parameters()}
    optimiser, objective = torch.optim.Adam(matcher.parameters(), lr=2e-4), HardNegativeTripletLoss(0.2)
    losses = []
    for _ in range(2):
        loss, _ = objective(matcher, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(math.isfinite(value) for value in losses) and losses[1] < losses[0]
    still = {name for name, p in matcher.named_parameters() if not (p - before[name]).abs().max() > 1e-5}
    assert still <= {
        f"{side}_attention.transformer.attention.k_proj.bias" for side in ("self", "cross")
    }  # their gradient is zero
    assert all(p.isfinite().all() for p in matcher.parameters())


# ---------------------------------------------------------------- 7. bad input


def test_word_ids_are_refused() -> None:
    batch = TextBatch(lengths=torch.tensor([2]), ids=torch.tensor([0]), words=torch.tensor([[4, 5]]))
    with pytest.raises(ItmError, match="captions: found word ids, expected states of a text encoder"):
        model().encode_texts(batch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"parts": "second"}, "parts: found 'second', expected one of both, first, cross"),
        ({"blocks": "none"}, "blocks: found 'none', expected one of all, self, cross"),
        ({"heads": 3}, "heads: found 3, expected a number that divides the width 8"),
    ],
)
def test_unknown_options_are_named(more: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        MMCA(7, 6, **({"width": 8, "heads": 2} | more))


def test_a_budget_below_one_pair_is_named() -> None:
    with pytest.raises(ItmError, match="budget: found 10 bytes, expected at least"):
        HardNegativeTripletLoss(budget=10)(model(), six_pairs())


# ---------------------------------------------------------------- 8. attention


@pytest.mark.parametrize("blocks", ["all", "cross"])
def test_attention_is_the_crossing_blocks_scaled_to_one(blocks: str) -> None:
    """Rows of real queries sum to one over real keys; padding gets nothing; gradients flow."""
    matcher = model(blocks=blocks)
    images, texts = encode(matcher)
    joint, r = matcher.cross_attention.joint_attention(images, texts), images.mask.shape[1]
    torch.testing.assert_close(joint.sum(dim=-1), torch.ones(4, HEADS, r + 5).double())
    found = matcher.attention(images, texts)
    assert set(found) == {"t2i", "i2t"}
    for way, one, other in (("t2i", texts, images), ("i2t", images, texts)):
        seen = found[way]
        assert seen.queries is one.local and seen.keys is other.local
        assert seen.query_mask is one.mask and seen.key_mask is other.mask
        rows = seen.weights.sum(dim=-1)[seen.query_mask]
        torch.testing.assert_close(rows, torch.ones_like(rows))
        assert not seen.weights[~seen.key_mask[:, None].expand_as(seen.weights)].any()
        assert seen.weights.requires_grad
    crossing = joint[0, :, r, :r].sum(dim=0)  # the first word of the first pair, both heads
    torch.testing.assert_close(found["t2i"].weights[0, 0], crossing / crossing.sum(), **EXACT)


def test_without_cross_blocks_there_is_no_attention() -> None:
    matcher = model(blocks="self")
    assert matcher.attention(*encode(matcher)) == {}


def test_the_gate_is_the_share_that_crosses() -> None:
    """Of the one softmax, the part on the other side is the sigmoid of the difference in log-sum-exp."""
    matcher = model()
    images, texts = encode(matcher)
    joint, r = matcher.cross_attention.joint_attention(images, texts), images.mask.shape[1]
    blocks = (images, texts, joint[:, :, :r, r:]), (texts, images, joint[:, :, r:, :r])
    for one, other, block in blocks:
        mine, theirs = one.extra_local, other.extra_local
        _, logsumexp = attend_pairs(mine["query"], theirs["key"], theirs["value"], other.mask)
        gate = torch.sigmoid(logsumexp - mine["self_logsumexp"])  # (b, q, h)
        torch.testing.assert_close(block.sum(dim=-1).mT, gate, **EXACT)
        assert gate[one.mask].std() > 0.01


def test_equal_logits_set_the_gate_by_the_number_of_keys() -> None:
    """With no queries all logits are equal: the share is that of the other side's keys."""
    matcher = model()
    nn.init.zeros_(matcher.cross_attention.transformer.attention.q_proj.weight)
    nn.init.zeros_(matcher.cross_attention.transformer.attention.q_proj.bias)
    images, texts = encode(matcher)
    crossing = matcher.cross_attention.joint_attention(images, texts)[:, 0, 0, images.mask.shape[1] :].sum(dim=-1)
    words, regions = texts.mask.sum(dim=1), images.mask.sum(dim=1)
    torch.testing.assert_close(crossing, words / (words + regions).double())


def test_attention_is_finite_where_little_of_it_crosses() -> None:
    """Sharp self-attention: scores stay finite, and attention should too."""
    matcher = model().float()
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(matcher.cross_attention.transformer.attention, name).weight *= 20
    images, texts = image_batch(), text_batch()
    images.regions, texts.features = images.regions.float(), texts.features.float()
    sides = encode(matcher, images, texts)
    if not matcher.score(*sides).i2t.isfinite().all():
        raise RuntimeError("the scores themselves are not finite")
    for seen in matcher.attention(*sides).values():
        assert seen.weights[seen.query_mask].isfinite().all()


# ---------------------------------------------------------------- 9. building


def chapter_parameters() -> dict:
    source = cells_of("08_mmca")["parameters"]
    return {name: value for name, (_, value) in declared_parameters(source).items()}


def test_build_takes_the_chapters_parameters() -> None:
    """The defaults of the page build a model that scores, and whose configuration builds it again."""
    parameters = chapter_parameters()
    matcher = build(parameters, 0, 11)
    assert matcher.config["image_dim"] == 11 and matcher.uses_cross_score
    for name in ("token_dim", "width", "heads", "channels", "dropout", "cross_weight"):
        assert matcher.config[name] == parameters[name]
    for name in ("full_windows", "parts", "blocks", "one_vector"):
        assert matcher.config[name] == parameters[name]
    again = MMCA(**matcher.config)
    again.load_state_dict(matcher.state_dict())
    images = ImageBatch(torch.randn(2, 3, 11), torch.ones(2, 3, dtype=torch.bool), torch.arange(2))
    states = torch.randn(2, 4, parameters["token_dim"])
    texts = TextBatch(lengths=torch.tensor([4, 2]), ids=torch.arange(2), features=states)
    scores = [m.eval().score(*encode(m, images, texts)).i2t for m in (matcher, again)]
    assert scores[0].shape == (2, 2)
    torch.testing.assert_close(*scores, rtol=0, atol=0)


@pytest.mark.parametrize(
    "more", [{}, {"hardest": False, "negatives": 0, "budget_mb": 8, "margin": 0.1, "by_image": True}]
)
def test_stages_are_one_training_with_the_chapters_objective(more: dict) -> None:
    """The objective takes every parameter of the loss, and the training is that of the parameters."""
    parameters = chapter_parameters() | more
    matcher = build(parameters, 0, 11)
    (stage,) = stages(parameters, matcher)
    assert stage.model is stage.validated is matcher and not stage.mines
    assert stage.config == train_config(parameters)
    names = ("margin", "hardest", "warmup_epochs", "negatives", "by_image")
    assert all(getattr(stage.objective, name) == parameters[name] for name in names)
    assert stage.objective.budget == parameters["budget_mb"] * 2**20


@pytest.mark.parametrize(
    ("name", "value"),
    [("parts", "cross"), ("blocks", "cross"), ("one_vector", True), ("full_windows", False), ("channels", 5)],
)
def test_build_passes_every_switch_on(name: str, value: object) -> None:
    assert build(chapter_parameters() | {name: value}, 0, 11).config[name] == value


@pytest.mark.parametrize("way", ["t2i", "i2t"])
def test_attention_has_gradients_where_captions_are_padded(way: str) -> None:
    """Chapter 11 trains through the weights: padding leaves them finite, and gets no weight."""
    matcher, batch = model(), six_pairs()
    sides = encode(matcher, batch.images, batch.texts)
    assert len(set(batch.texts.lengths.tolist())) > 1
    attention = matcher.attention(*sides)[way]
    attention.weights.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in matcher.parameters() if p.grad is not None)
    assert not attention.weights[(~attention.key_mask)[:, None].expand_as(attention.weights)].any()


def test_older_runs_had_as_many_filters_as_their_width() -> None:
    """A receipt from before there was a choice says what it did; one that names its filters keeps them."""
    assert modern_parameters("08_mmca", {"width": 16})["channels"] == 16
    named = {"width": 16, "channels": 64, "full_windows": False, "by_image": True}
    assert modern_parameters("08_mmca", named) == named


# ---------------------------------------------------------------- cells of the chapter


@pytest.mark.parametrize(
    ("evaluate_on", "epochs", "validates"),
    [("dev", 2, False), ("dev", 3, True), ("test", 2, True), ("test", 1, True), ("testall", 2, True)],
)
def test_only_the_page_trains_without_validation(
    evaluate_on: str, epochs: int, validates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of two epochs that are judged on test choose their weights on dev, as all others do."""
    given: list[bool] = []

    def train(stage: object, validate: bool) -> SimpleNamespace:
        given.append(validate)
        return SimpleNamespace(seconds=0.0)

    monkeypatch.setattr("itm_utils.scoring.score_split", lambda *arguments: None)
    monkeypatch.setattr("itm_utils.metrics.retrieval.evaluate", lambda *arguments: None)
    split = SimpleNamespace(feature_dim=3, owner=None)
    data = SimpleNamespace(vocabulary=(), train=split, test=split, test_texts=None)
    names = {"torch": torch, "seed": 0, "evaluate_on": evaluate_on, "epochs": epochs, "data": data}
    names |= {"run": SimpleNamespace(parameters={}, train=train), "stages": lambda *arguments: [None]}
    run_cells("08_mmca", ("train",), names | {"build": lambda *arguments: nn.Linear(1, 1)})
    assert given == [validates]
