"""Scoring of all pairs: ours, the straightforward version and the bare matrix product."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import dcpa_scoring, mmca_scoring
from benchmarks import straightforward as plain
from benchmarks.attention_metrics import write_split
from benchmarks.harness import REGIONS, WIDTH, bare_product, random_side, sentence_lengths
from benchmarks.runner import Case, Work, faster, times
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.matcher import Encoded, Images, Matcher, Texts
from itm_utils.models.bfan import BFAN
from itm_utils.models.dcpa import InterPAM, PhraseDecoder
from itm_utils.models.mmca import MMCA
from itm_utils.models.pfan import PFAN
from itm_utils.models.saem import MultiHeadAttention
from itm_utils.models.scan import SCAN
from itm_utils.models.sgraf import SGRAF
from itm_utils.scoring import BUDGET, block_shape, score_all, score_split

SMALL = {"vocabulary_size": 4, "image_dim": 4, "width": WIDTH, "word_dim": 4}  # the encoders are not timed


def sides(images: int, captions: int, pooled: bool = False) -> tuple[Images, Texts]:
    """Random unit vectors of regions and words."""
    rng = torch.Generator().manual_seed(0)
    both = random_side(Images, np.full(images, REGIONS), rng), random_side(Texts, sentence_lengths(captions, 0), rng)
    if pooled:
        for side in both:
            side.pooled = F.normalize(torch.randn(len(side), WIDTH, generator=rng), dim=-1)
    return both


def all_pairs(model: Matcher, score: Callable[[Images, Texts], Tensor], both: tuple[Images, Texts], **more) -> Work:
    """Ours, the straightforward one on every eighth caption, and the bare product of ours in ours' blocks."""
    images, texts = both
    every = 8 if len(texts) >= 64 else 1
    part = texts[torch.arange(0, len(texts), every)]
    shape = block_shape(model, images, texts, BUDGET)

    @torch.inference_mode()
    def loop() -> Tensor:
        return plain.in_shards(score, images, part)

    return Work(
        ways={
            "ours": lambda: score_all(model, images, texts, progress=False),
            "straightforward": loop,
            "product": lambda: bare_product(images, texts, *shape),
        },
        scale={"straightforward": float(texts.mask.sum() / part.mask.sum())},  # by words
        outputs={"straightforward": loop, "ours": lambda: score_all(model, images, part, progress=False).i2t},
        facts={"words": int(texts.mask.sum()), "pairs": len(images) * len(texts)},
        **more,
    )


def scan(direction: str) -> Callable[..., Work]:
    def build(images: int, captions: int) -> Work:
        model = SCAN(**SMALL, direction=direction, temperature=9.0, lse=6.0).eval()
        return all_pairs(model, lambda i, t: plain.scan_scores(i, t, direction, 9.0, 6.0), sides(images, captions))

    return build


def bfan(focal: str) -> Callable[..., Work]:
    def build(images: int, captions: int) -> Work:
        model = BFAN(**SMALL, focal=focal, temperature=20.0).eval()
        # a key that lies on the threshold to the last digit may fall on either side of it
        both = sides(images, captions)
        return all_pairs(model, lambda i, t: plain.bfan_scores(i, t, 20.0, focal), both, tolerance=2e-2)

    return build


def pfan(images: int, captions: int) -> Work:
    model = PFAN(**SMALL, position="none").eval()  # positions are part of the encoder
    return all_pairs(model, plain.pfan_scores, sides(images, captions))


def sgraf(head: str) -> Callable[..., Work]:
    def build(images: int, captions: int) -> Work:
        model = SGRAF(**SMALL, head=head).eval()
        return all_pairs(model, lambda i, t: plain.sgraf_scores(model, i, t), sides(images, captions, pooled=True))

    return build


# --------------------------------------------------------------------- explicit pairs and PyTorch's own attention


def torch_attention(layer: MultiHeadAttention, queries: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
    """Multi-head attention (b, q, d) by ``F.scaled_dot_product_attention``. mask: (b, k), or None without padding."""
    q, k, v = (layer.split_heads(proj(x)) for proj, x in
               ((layer.q_proj, queries), (layer.k_proj, context), (layer.v_proj, context)))  # fmt: skip
    attended = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
    return layer.out_proj(attended.transpose(1, 2).flatten(2))


def mmca_pairs(model: MMCA, images: Encoded, texts: Encoded, full: bool = False) -> Tensor:
    """MMCA's second score (b,) of given pairs: the whole layer over regions and words together."""
    module, layer, r = model.cross_attention, model.cross_attention.transformer, images.local.shape[1]
    joint, mask = torch.cat([images.local, texts.local], dim=1), torch.cat([images.mask, texts.mask], dim=1)
    joint = layer.ffn(joint, torch_attention(layer.attention, joint, joint, None if full else mask))
    i1 = module.image_vector(joint[:, :r], images.mask)
    return (i1 * module.caption_vector(joint[:, r:], texts.mask)).sum(dim=-1)


def dcpa_decode(decoder: PhraseDecoder, source: Encoded, memory: Encoded, full: bool) -> Tensor:
    """The whole decoder for given pairs: (b, k, d)."""
    own, other = (None, None) if full else (source.mask, memory.mask)
    vectors = source.local
    phrases = decoder.self_attn_norm(vectors + torch_attention(decoder.self_attention, vectors, vectors, own))
    return decoder.ffn(phrases, torch_attention(decoder.attention, phrases, memory.local, other))


def dcpa_pairs(model: InterPAM, images: Encoded, texts: Encoded, full: bool = False) -> tuple[Tensor, Tensor]:
    """DCPA's two scores (b,) of given pairs: both decoders run whole."""
    as_text, as_image = dcpa_decode(model.i2t, images, texts, full), dcpa_decode(model.t2i, texts, images, full)
    i2t = model.compare(as_text, images.mask, dcpa_scoring.unit_norm(texts))
    return i2t, model.compare(as_image, texts.mask, dcpa_scoring.unit_norm(images))


@torch.inference_mode()
def explicit_pairs(score: Callable, images: Encoded, texts: Encoded, rows: int) -> Tensor:
    """Scores of all pairs, a caption with ``rows`` images at a time, so that nothing is padded."""
    columns = []
    for caption, length in enumerate(texts.mask.sum(dim=1).tolist()):
        parts = []
        for row in range(0, len(images), rows):
            some = images[row : row + rows]
            words = texts.local[caption, :length].expand(len(some), -1, -1)
            parts.append(score(some, Texts(words, texts.mask[caption, :length].expand(len(some), -1))))
        columns.append(torch.cat(parts))
    return torch.stack(columns, dim=1)


def some_captions(texts: Texts) -> tuple[Tensor, float]:
    """Every fourth caption of many, for the slow way; and how many times their words all captions have."""
    some = torch.arange(0, len(texts), 4 if len(texts) >= 64 else 1)
    return some, float(texts.mask.sum() / texts.mask[some].sum())


def mmca(images: int, captions: int) -> Work:
    model, given = mmca_scoring.matcher().eval(), mmca_scoring.random_batches(images, captions, seed=0)
    with torch.inference_mode():
        encoded = model.encode_images(given[0]), model.encode_texts(given[1])
    whole = encoded[0].pooled @ encoded[1].pooled.T

    some, scale = some_captions(encoded[1])

    def loop() -> Tensor:
        cross = explicit_pairs(lambda i, t: mmca_pairs(model, i, t, full=True), encoded[0], encoded[1][some], rows=25)
        return model.combine_scores(whole[:, some], cross).i2t

    def ours() -> Tensor:
        return score_all(model, *encoded, progress=False).i2t

    return Work({"ours": ours, "straightforward": loop}, {"straightforward": scale},
                {"ours": lambda: ours()[:, some], "straightforward": loop},
                facts={"pairs": images * captions})  # fmt: skip


def dcpa(images: int, captions: int) -> Work:
    model, given = dcpa_scoring.matcher(), dcpa_scoring.random_batches(images, captions, seed=0)
    bare = dcpa_scoring.projected(model, *given)
    with torch.inference_mode():
        encoded = model.encode_images(given[0]), model.encode_texts(given[1])

    some, scale = some_captions(bare[1])

    def loop() -> Tensor:
        score = lambda i, t: torch.stack(dcpa_pairs(model, i, t, full=True), dim=1)  # noqa: E731
        return explicit_pairs(score, bare[0], bare[1][some], rows=20)

    def ours() -> Tensor:
        scores = score_all(model, *encoded, progress=False)
        return torch.stack([scores.i2t, scores.t2i], dim=-1)

    return Work({"ours": ours, "straightforward": loop}, {"straightforward": scale},
                {"ours": lambda: ours()[:, some], "straightforward": loop},
                facts={"pairs": images * captions})  # fmt: skip


def scan_whole(images: int) -> Work:
    """From files to scores. The straightforward one encodes each image with each of its five captions.

    Of many images it reads and scores every eighth with its captions, against as many images as ours.
    """
    folder = tempfile.TemporaryDirectory()
    split, vocabulary = write_split(Path(folder.name), images, np.random.default_rng(0))
    texts = WordCaptions(split, vocabulary)
    model = SCAN(len(vocabulary), split.feature_dim, width=WIDTH, direction="t2i").eval()
    rows = np.arange(0, images, 8 if images >= 64 else 1)
    captions = (5 * rows[:, None] + np.arange(5)).ravel()

    @torch.inference_mode()
    def loop(keep: tempfile.TemporaryDirectory = folder) -> Tensor:
        data, image_parts, text_parts = PairDataset(split, texts), [], []
        for start in range(0, len(captions), plain.SHARD):
            encoded = plain.encode_regions_and_words(model, data[captions[start : start + plain.SHARD]])
            image_parts.append(encoded[0])
            text_parts.append(encoded[1])
        own = Images.cat(image_parts)[torch.arange(0, len(captions), 5)]
        every = own[torch.arange(images) % len(rows)]
        return plain.in_shards(lambda i, t: plain.scan_scores(i, t, "t2i", 9.0, 6.0), every, Texts.cat(text_parts))

    def ours() -> Tensor:
        return score_split(model, split, texts).i2t

    return Work(
        {"ours": ours, "straightforward": loop},
        {"straightforward": float(texts.lengths.sum() / texts.lengths[captions].sum())},
        {"ours": lambda: ours()[rows][:, captions], "straightforward": lambda: loop()[: len(rows)]},
        facts={"pairs": images * split.n_captions},
    )


SIZES = {"full": {"images": 128, "captions": 512}, "tiny": {"images": 6, "captions": 8}}
SLOW = SIZES | {"full": {"images": 64, "captions": 128}}  # SGRAF's heads take a hundred times SCAN's scores
GROWTH = tuple({"images": n, "captions": 4 * n} for n in (32, 64, 256, 384))  # besides the full size
PAIRS = {"full": {"images": 100, "captions": 100}, "tiny": {"images": 3, "captions": 4}}
LOOP = "one caption at a time, against the bare product of every region with every word"

CASES = (
    Case("scan-t2i", "scoring", f"SCAN, words attend to regions: {LOOP}", scan("t2i"),
         (faster("faster than the loop", 10.2), times("times the product", 1.23)), **SIZES,
         growth=GROWTH, grown=("ours", "product")),
    Case("scan-i2t", "scoring", f"SCAN, regions attend to words: {LOOP}", scan("i2t"),
         (faster("faster than the loop", 12.5), times("times the product", 1.26)), **SIZES),
    Case("bfan", "scoring", f"BFAN, equal: {LOOP}", bfan("equal"),
         (faster("faster than the loop", 14), times("times the product", 1.6)), **SIZES,
         growth=GROWTH, grown=("ours", "product")),
    Case("pfan", "scoring", f"PFAN t2i: {LOOP}", pfan,
         (faster("faster than the loop"), times("times the product")), **SIZES, rounds=3),
    Case("sgraf-saf", "scoring", f"SGRAF, SAF: {LOOP}", sgraf("SAF"),
         (faster("faster than the loop", 4), times("times the product")), **SLOW, rounds=3),
    Case("sgraf-sgr", "scoring", f"SGRAF, SGR: {LOOP}", sgraf("SGR"),
         (faster("faster than the loop", 4), times("times the product")), **SLOW, rounds=3),
    Case("mmca", "scoring", "MMCA: all pairs, against PyTorch's own attention over explicit pairs", mmca,
         (faster("faster than explicit pairs", 2.2),), **PAIRS, rounds=3),
    Case("dcpa", "scoring", "DCPA stage two: all pairs, against PyTorch's own attention over explicit pairs", dcpa,
         (faster("faster than explicit pairs", 2.0),), **PAIRS, rounds=3),
    Case("scan-from-files", "scoring", "SCAN t2i, 500 images x 2,500 captions from files to scores, encoding included", scan_whole,
         (faster("faster than the loop", 10),), full={"images": 500}, tiny={"images": 5}, rounds=3),
)  # fmt: skip
