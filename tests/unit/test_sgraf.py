"""SGRAF: the class against one pair at a time in double precision, its batch norms, and the awkward cases."""

from __future__ import annotations

import pytest
import torch
from cross_attention import WORDS as LENGTHS
from cross_attention import texts_of
from torch import Tensor, nn

from itm_utils import fast_attention
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts, length_mask
from itm_utils.models.sgraf import (
    HEADS,
    SGRAF,
    GateBatchNorm,
    MaskedBatchNorm,
    SelfAttentionPool,
    build,
    score_by_loop,
)
from itm_utils.scoring import score_all


def model(head: str = "SAF", **more) -> SGRAF:
    """A small model whose biases and batch norms are not at their starting values, in double precision."""
    torch.manual_seed(0)
    settings = {"width": 6, "word_dim": 5, "sim_dim": 4, "dropout": 0.0, "head": head} | more
    made = SGRAF(12, 7, **settings).double()
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        if name.endswith("bias") or name.endswith("running_mean"):
            tensor.data.normal_(0, 0.3)
        if name.endswith("running_var") or "norm.weight" in name:
            tensor.data.uniform_(0.5, 2)
    return made.eval()


def image_batch(sizes: tuple[int, ...] = (4, 2, 1), seed: int = 1) -> ImageBatch:
    regions = torch.randn(len(sizes), max(sizes), 7, generator=torch.Generator().manual_seed(seed)).double()
    return ImageBatch(regions=regions, mask=length_mask(torch.tensor(sizes), max(sizes)), ids=torch.arange(len(sizes)))


def encode(matcher: SGRAF, images: ImageBatch, texts: TextBatch) -> tuple[Images, Texts]:
    return matcher.encode_images(images), matcher.encode_texts(texts)


def unit_norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).sum(dim=-1, keepdim=True).sqrt() + 1e-8)


def pair_vector(matcher: SGRAF, nodes: Tensor) -> Tensor:
    """What the head makes of the nodes (k, s) of one pair, written out."""
    if matcher.config["head"] == "SAF":
        norm = matcher.head.norm
        gates = matcher.head.gate(nodes)[:, 0]
        gates = (gates - norm.running_mean) / (norm.running_var + 1e-5).sqrt() * norm.weight + norm.bias
        gates = 1 / (1 + (-gates).exp())
        return unit_norm((gates / (gates.abs().sum() + 1e-8)) @ nodes)
    for step in matcher.head.steps:
        logits = step.q_proj(nodes) @ step.k_proj(nodes).T
        edges = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
        nodes = step.out_proj(edges @ nodes).clamp_min(0)
    return nodes[0]


def one_pair(matcher: SGRAF, regions: Tensor, words: Tensor, image: Tensor, caption: Tensor) -> Tensor:
    """The definition: regions (r, d) and words (w, d) without padding, and the two pooled vectors (d,)."""
    fair = regions @ words.T
    fair = torch.where(fair > 0, fair, 0.1 * fair)
    fair = fair / (fair.pow(2).sum(dim=1, keepdim=True).sqrt() + 1e-8)
    weights = (9.0 * fair).exp()
    attended = unit_norm((weights / weights.sum(dim=0)).T @ regions)
    local = unit_norm(matcher.similarity.local_proj((attended - words) ** 2))
    whole = unit_norm(matcher.similarity.global_proj((image - caption) ** 2))
    vector = pair_vector(matcher, torch.cat([whole[None], local]))
    return 1 / (1 + (-matcher.score_proj(vector)[0]).exp())


def by_definition(matcher: SGRAF, images: Images, texts: Texts) -> Tensor:
    rows = [
        [one_pair(matcher, v[vm], e[em], p, s) for e, em, s in zip(texts.local, texts.mask, texts.pooled, strict=True)]
        for v, vm, p in zip(images.local, images.mask, images.pooled, strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("head", HEADS)
def test_scores_are_the_definition_with_gradients(head: str) -> None:
    matcher = model(head)
    spread = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for way in ("class", "definition"):
        matcher.zero_grad()
        sides = encode(matcher, image_batch(), texts_of(LENGTHS, seed=2))
        scores = matcher.score(*sides).i2t if way == "class" else by_definition(matcher, *sides)
        (scores * spread).sum().backward()
        found.append([scores.detach(), *(p.grad for p in matcher.parameters())])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tile", [1, 60, 2**20])
def test_loop_chunks_and_blocks_agree(head: str, tile: int, monkeypatch) -> None:
    monkeypatch.setitem(fast_attention.TILE, "cpu", tile)
    matcher = model(head)
    with torch.no_grad():
        images, texts = encode(matcher, image_batch((3, 3, 3, 3)), texts_of(LENGTHS, seed=2))
        expected = score_by_loop(matcher, images, texts)
        torch.testing.assert_close(matcher.score(images, texts).i2t, expected)
    cost = matcher.bytes_per_pair(images, texts)
    in_blocks = score_all(matcher, images, texts, budget=3 * cost, progress=False).i2t
    torch.testing.assert_close(in_blocks, expected.float())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("sizes", "lengths"), [((1,), [1]), ((5,), [1, 4]), ((1, 1, 1), [2, 2]), ((3, 1), [1, 1])])
def test_one_of_anything_can_be_trained_on(head: str, sizes: tuple[int, ...], lengths: list[int]) -> None:
    """Statistics of a batch norm over a single number."""
    matcher = model(head).train()
    scores = matcher.score(*encode(matcher, image_batch(sizes), texts_of(lengths, seed=2))).i2t
    assert scores.shape == (len(sizes), len(lengths)) and scores.isfinite().all()
    scores.sum().backward()
    assert all(p.grad.isfinite().all() for p in matcher.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_zero_vectors_have_scores_and_gradients(head: str) -> None:
    matcher = model(head)
    images, texts = encode(matcher, image_batch(), texts_of(LENGTHS, seed=2))
    for side in (images, texts):
        side.local, side.pooled = side.local.detach(), side.pooled.detach()
        side.local[0] = 0
        side.pooled[0] = 0
        side.local.requires_grad_(), side.pooled.requires_grad_()
    scores = matcher.score(images, texts).i2t
    scores.sum().backward()
    assert scores.isfinite().all()
    assert all(t.grad.isfinite().all() for side in (images, texts) for t in (side.local, side.pooled))


def test_attention_is_the_cross_attention_below_the_similarity_vectors() -> None:
    matcher = model()
    images, texts = encode(matcher, image_batch(), texts_of([1, 6, 3], seed=2))
    found = matcher.attention(images, texts)["t2i"]
    assert found.queries is texts.local and found.keys is images.local


@pytest.mark.parametrize("head", HEADS)
def test_our_norms_do_not_know_the_order_of_regions(head: str) -> None:
    order = torch.tensor([2, 0, 3, 1])
    for slots, same in ((0, True), (4, False)):
        matcher = model(head, region_slots=slots)
        batch = image_batch((4, 4, 4))
        shuffled = ImageBatch(regions=batch.regions[:, order], mask=batch.mask, ids=batch.ids)
        scores = [matcher.score(*encode(matcher, b, texts_of(LENGTHS, seed=2))).i2t for b in (batch, shuffled)]
        assert torch.allclose(*scores, atol=1e-9) == same


def test_padding_does_not_enter_the_statistics() -> None:
    torch.manual_seed(0)
    pooling = SelfAttentionPool(6, dropout=0.0, slots=0).double()
    regions = torch.randn(3, 4, 6).double()
    mask = length_mask(torch.tensor([4, 2, 1]), 4)
    other = regions.masked_fill(~mask[..., None], 1e3)
    torch.testing.assert_close(pooling(regions, mask), pooling(other, mask))
    expected = pooling.local_proj(regions[mask])
    pooling.local_norm.momentum = 1.0
    pooling(regions, mask)
    torch.testing.assert_close(pooling.local_norm.running_mean, expected.mean(dim=0).detach())


def test_masked_statistics_are_those_of_the_real_rows() -> None:
    """Values, running statistics and gradients, as PyTorch computes them without padding."""
    torch.manual_seed(0)
    ours, plain = MaskedBatchNorm(6).double(), nn.BatchNorm1d(6).double()
    regions, mask = torch.randn(3, 4, 6).double(), length_mask(torch.tensor([4, 2, 1]), 4)
    spread, found = torch.randn(7, 6).double(), []
    for norm in (ours, plain):
        x = regions.clone().requires_grad_()
        rows = ours(x, mask)[mask] if norm is ours else plain(x[mask])
        (rows * spread).sum().backward()
        found.append([rows.detach(), x.grad, norm.running_mean, norm.running_var, norm.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("head", HEADS)
def test_training_keeps_no_differences(head: str) -> None:
    """Nothing of the size of all attended features waits for the backward pass."""
    matcher = model(head, width=50).train()
    images, texts = encode(matcher, image_batch((4, 4, 4)), texts_of(LENGTHS, seed=2))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        matcher.score(images, texts)
    assert kept and max(kept) < len(images) * sum(LENGTHS) * 50


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_slots_refuse_other_numbers_of_regions(sizes: tuple[int, int]) -> None:
    with pytest.raises(ItmError, match=r"region_slots: found .* exactly 4"):
        model(region_slots=4).encode_images(image_batch(sizes))


def test_statistics_by_caption_are_those_of_a_loop() -> None:
    torch.manual_seed(0)
    ours, loop = GateBatchNorm(per_caption=True), nn.BatchNorm1d(1)
    gates = [torch.randn(4, 2, 3), torch.randn(4, 3, 6)]  # captions 1 and 3, then 0, 2 and 4
    captions = [torch.tensor([1, 3]), torch.tensor([0, 2, 4])]
    found = ours(gates, captions)
    expected = {}
    for caption, group, column in ((0, 1, 0), (1, 0, 0), (2, 1, 1), (3, 0, 1), (4, 1, 2)):
        part = gates[group][:, column]
        expected[caption] = loop(part.reshape(-1, 1)).view_as(part)
    for group, index in enumerate(captions):
        for column, caption in enumerate(index.tolist()):
            torch.testing.assert_close(found[group][:, column], expected[caption])
    torch.testing.assert_close(ours.running_mean, loop.running_mean)
    torch.testing.assert_close(ours.running_var, loop.running_var)
    assert int(ours.num_batches_tracked) == 5


def test_without_steps_only_the_global_node_is_read() -> None:
    matcher = model("SGR", steps=0)
    images, texts = encode(matcher, image_batch(), texts_of(LENGTHS, seed=2))
    before = matcher.score(images, texts).i2t
    texts.local = torch.randn_like(texts.local)
    torch.testing.assert_close(matcher.score(images, texts).i2t, before)


def test_half_precision_encoders_do_not_blur_the_scores() -> None:
    matcher = model().float()
    single = image_batch()
    single.regions = single.regions.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images, texts = encode(matcher, single, texts_of([1, 6, 3], seed=2))
        scores, pairs = matcher.score(images, texts).i2t, matcher.score_pairs(images, texts).i2t
    assert scores.dtype == images.pooled.dtype == texts.pooled.dtype == torch.float32
    torch.testing.assert_close(pairs, scores.diagonal())


def test_parameters_build_the_model_and_unknown_heads_are_refused() -> None:
    given = {"width": 8, "word_dim": 5, "head": "SGR", "sim_dim": 4, "steps": 1, "temperature": 4.0}
    made = build(given | {"dropout": 0.1, "region_slots": 0, "margin": 0.2}, 12, 7)
    assert len(made.head.steps) == 1 and made.word_dropout.p == 0.1
    assert SGRAF(**made.config).config == made.config  # a checkpoint can be built again
    with pytest.raises(ItmError, match="head: found 'AVE', expected one of SAF, SGR"):
        SGRAF(12, 7, head="AVE")
