"""Training steps: ours, and the straightforward version with the same weights on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from benchmarks import cases_scoring as scoring
from benchmarks import dcpa_scoring, mmca_scoring
from benchmarks import straightforward as plain
from benchmarks.harness import REGIONS
from benchmarks.runner import Case, Work, faster
from itm_utils.matcher import ImageBatch, Images, Matcher, OfflineNegatives, PairBatch, TextBatch, Texts
from itm_utils.models.aoq import OfflineLoss
from itm_utils.models.bfan import BFAN
from itm_utils.models.ccr_ccs import AttentionConstraintLoss
from itm_utils.models.dcpa import IntraPAM
from itm_utils.models.mmca import HardNegativeTripletLoss
from itm_utils.models.pfan import MAX_BLOCKS, PFAN
from itm_utils.models.saem import SAEM
from itm_utils.models.scan import SCAN
from itm_utils.models.sgraf import SGRAF
from itm_utils.models.vsepp import VSEPP, HingeTriplet
from itm_utils.models.vsrn import VSRN

WORDS, IMAGE_DIM, CLIP = 8000, 2048, 2.0  # a vocabulary and features of Flickr30K's size
BUDGET = 2**28
Loss = Callable[[Matcher, PairBatch], Tensor]


def caption_lengths(captions: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths with the mean, spread and long tail of Flickr30K's captions, start and end included."""
    return 2 + np.clip(np.round(rng.gamma(4.9, 2.5, size=captions)), 2, 50).astype(np.int64)


def random_pairs(pairs: int, seed: int = 0, regions: int = REGIONS, image_dim: int = IMAGE_DIM) -> PairBatch:
    """Random features and word ids."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(caption_lengths(pairs, rng))
    words = torch.from_numpy(rng.integers(4, WORDS, size=(pairs, int(lengths.max()))))
    words[torch.arange(words.shape[1]) >= lengths[:, None]] = 0
    ids = torch.arange(pairs)
    features = torch.from_numpy(rng.normal(size=(pairs, regions, image_dim)).astype(np.float32))
    mask, counts = torch.ones(pairs, regions, dtype=torch.bool), torch.full((pairs,), regions)
    return PairBatch(ImageBatch(features, mask, ids, lengths=counts), TextBatch(lengths, ids, words=words))


def with_offline(pairs: int) -> PairBatch:
    batch = random_pairs(pairs)
    batch.offline = OfflineNegatives(random_pairs(pairs, seed=1), random_pairs(pairs, seed=2))
    return batch


def steps(model: Matcher, batch: PairBatch, ours: Loss, straightforward: Loss, tolerance: float = 1e-3) -> Work:
    """Loss, gradients, clipping and Adam; each way has a copy of the model. Compared: loss and norm of the gradients."""

    def way(loss_of: Loss, update: bool) -> Callable[[], Tensor]:
        own = deepcopy(model).train()
        optimizer = torch.optim.Adam(own.parameters(), lr=2e-4)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(own, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(own.parameters(), CLIP)
            if update:
                optimizer.step()
            return torch.stack([loss.detach(), norm])

        return step

    both = {"ours": ours, "straightforward": straightforward}
    return Work(
        ways={name: way(loss, True) for name, loss in both.items()},
        outputs={name: way(loss, False) for name, loss in both.items()},
        tolerance=tolerance,
        relative=True,
        facts={
            "rows": len(batch),
            "words": int(batch.texts.lengths.sum()),
            "longest": int(batch.texts.lengths.max()),
        },
    )


def hinge(model: Matcher, batch: PairBatch) -> Tensor:
    return HingeTriplet(0.2, hardest=True)(model, batch)[0]


def encoded_hinge(score: Callable[..., Tensor], encode: Callable = plain.encode_regions_and_words) -> Loss:
    return lambda model, batch: plain.hinge(score(model, *encode(model, batch)))


def scan(direction: str) -> Callable[..., Work]:
    def build(pairs: int) -> Work:
        model = SCAN(WORDS, IMAGE_DIM, direction=direction)
        loss = encoded_hinge(lambda _, i, t: plain.scan_scores(i, t, direction, 9.0, 6.0))
        return steps(model, random_pairs(pairs), hinge, loss)

    return build


def bfan(pairs: int) -> Work:
    loss = encoded_hinge(lambda _, i, t: plain.bfan_scores(i, t, 20.0, "equal"))
    return steps(BFAN(WORDS, IMAGE_DIM), random_pairs(pairs), hinge, loss, tolerance=3e-2)  # keys on the threshold


def pfan(pairs: int) -> Work:
    """Regions come with the blocks of a public file."""
    model, batch = PFAN(WORDS, IMAGE_DIM), random_pairs(pairs)
    rng = torch.Generator().manual_seed(0)
    blocks = torch.rand(pairs, REGIONS, 256, generator=rng).argsort(dim=-1)[..., :MAX_BLOCKS]
    shares = torch.rand(pairs, REGIONS, MAX_BLOCKS, generator=rng)
    batch.images.boxes = torch.cat([blocks.float(), shares / shares.sum(dim=-1, keepdim=True)], dim=-1)
    return steps(model, batch, hinge, encoded_hinge(lambda _, i, t: plain.pfan_scores(i, t), plain.encode_pfan))


def token_states(pairs: int, seed: int = 0) -> PairBatch:
    """Region features and states of a text encoder, of the sizes of MMCA's and DCPA's cases."""
    return PairBatch(*dcpa_scoring.random_batches(pairs, pairs, seed=seed))


def saem(pairs: int) -> Work:
    return steps(SAEM(0, IMAGE_DIM, dropout=0.0), token_states(pairs), hinge, plain.saem_loss)


def dcpa_intra(pairs: int) -> Work:
    return steps(IntraPAM(IMAGE_DIM), token_states(pairs), hinge, plain.intra_loss)


def constrained(pairs: int) -> Work:
    """SCAN t2i with CCR and CCS of every query and every swap, which needs no random numbers."""
    ours = AttentionConstraintLoss(HingeTriplet(0.2), queries=0)
    return steps(SCAN(WORDS, IMAGE_DIM), random_pairs(pairs), lambda m, b: ours(m, b)[0], plain.constrained_scan_loss)


def sgraf(head: str) -> Callable[..., Work]:
    def build(pairs: int) -> Work:
        model = SGRAF(WORDS, IMAGE_DIM, head=head, dropout=0.0, region_slots=REGIONS)  # norms of the public code
        return steps(model, random_pairs(pairs), hinge, encoded_hinge(plain.sgraf_scores, plain.encode_sgraf), 1e-2)

    return build


def vsepp(pairs: int) -> Work:
    model = VSEPP(WORDS, 4096)
    return steps(model, random_pairs(pairs, regions=1, image_dim=4096), hinge, plain.vsepp_loss)


def vsrn_model() -> VSRN:
    return VSRN(WORDS, IMAGE_DIM, caption_dropout=0.0)


def vsrn(pairs: int) -> Work:
    return steps(vsrn_model(), random_pairs(pairs), hinge, plain.vsrn_loss, tolerance=5e-3)


def offline(model: Matcher, batch: PairBatch) -> Tensor:
    return OfflineLoss(by_image=False)(model, batch)[0]


def aoq_bfan(pairs: int) -> Work:
    model = BFAN(WORDS, IMAGE_DIM)
    loss = lambda m, b: plain.aoq_bfan_loss(m, b, 20.0, "equal")  # noqa: E731
    return steps(model, with_offline(pairs), offline, loss, tolerance=5e-2)


def aoq_vsrn(pairs: int) -> Work:
    return steps(vsrn_model(), with_offline(pairs), offline, plain.aoq_vsrn_loss, tolerance=5e-3)


def hardest(model: Matcher, batch: PairBatch) -> Tensor:
    return HardNegativeTripletLoss(0.2, budget=BUDGET)(model, batch)[0]


def selected_hinge(scores: Tensor, score_pairs: Callable, images: Images, texts: Texts) -> Tensor:
    """Hinges of the hardest negatives by scores (b, b, 2) without gradients, of pairs scored again with them."""
    pairs, own, each = len(scores), torch.eye(len(scores), dtype=torch.bool), torch.arange(len(scores))
    captions = scores[..., 0].masked_fill(own, -torch.inf).argmax(dim=1)
    negative_images = scores[..., 1].masked_fill(own, -torch.inf).argmax(dim=0)
    rows, columns = torch.cat([each, each, negative_images]), torch.cat([each, captions, each])
    i2t, t2i = (part.split(pairs) for part in score_pairs(images[rows], texts[columns]).unbind(dim=1))
    return (0.2 + i2t[1] - i2t[0]).relu().sum() + (0.2 + t2i[2] - t2i[0]).relu().sum()


def mmca_sides(model: Matcher, batch: PairBatch) -> tuple[Images, Texts]:
    """Projected regions and tokens and the vectors of the first score: where the explicit layer starts."""
    regions, i0 = model.self_attention.encode_images(batch.images.regions, batch.images.mask)
    tokens, mask = batch.texts.features, batch.texts.mask
    c0 = model.self_attention.encode_texts(tokens, mask)
    return Images(regions, batch.images.mask, i0), Texts(model.cross_attention.token_proj(tokens), mask, c0)


def mmca(pairs: int) -> Work:
    model, batch = mmca_scoring.matcher(), PairBatch(*mmca_scoring.random_batches(pairs, pairs, seed=0))

    return steps(model, batch, hardest, mmca_loss)


def mmca_loss(model: Matcher, batch: PairBatch) -> Tensor:
    """As ``dcpa_loss``; the first score of all pairs is one product."""
    images, texts = mmca_sides(model, batch)
    cross = scoring.explicit_pairs(lambda i, t: scoring.mmca_pairs(model, i, t, True), images, texts, rows=25)
    scores = model.combine_scores((images.pooled @ texts.pooled.T).detach(), cross).i2t

    def score_pairs(i: Images, t: Texts) -> Tensor:
        cross = scoring.mmca_pairs(model, i, t)
        score = model.combine_scores((i.pooled * t.pooled).sum(dim=-1), cross).i2t
        return torch.stack([score, score], dim=1)

    return selected_hinge(torch.stack([scores, scores], dim=-1), score_pairs, images, texts)


def dcpa_sides(model: Matcher, batch: PairBatch) -> tuple[Images, Texts]:
    regions, words = model.region_proj(batch.images.regions), model.token_proj(batch.texts.features)
    return Images(regions, batch.images.mask), Texts(words, batch.texts.mask)


def dcpa_loss(model: Matcher, batch: PairBatch) -> Tensor:
    """Every score from explicit pairs and PyTorch's own attention, with the same selection of negatives."""
    images, texts = dcpa_sides(model, batch)
    score = lambda i, t, full=False: torch.stack(scoring.dcpa_pairs(model, i, t, full), dim=1)  # noqa: E731
    scores = scoring.explicit_pairs(lambda i, t: score(i, t, True), images, texts, rows=20)
    return selected_hinge(scores, score, images, texts)


def dcpa(pairs: int) -> Work:
    model, batch = dcpa_scoring.matcher(), PairBatch(*dcpa_scoring.random_batches(pairs, pairs, seed=0))
    return steps(model, batch, hardest, dcpa_loss)


TINY = {"pairs": 3}
STEP = "a training step (loss, gradients, clipping, Adam) at batch"


def case(
    name: str,
    what: str,
    build: Callable[..., Work],
    pairs: int,
    target: float,
    rounds: int = 3,
    growth: tuple[int, ...] = (),
) -> Case:
    ratio = (faster("faster than straightforward", target),)
    return Case(f"step-{name}", "training steps", f"{what}: {STEP} {pairs}", build, ratio,
                {"pairs": pairs}, TINY, rounds, tuple({"pairs": n} for n in growth))  # fmt: skip


CASES = (
    case("scan-t2i", "SCAN t2i", scan("t2i"), 128, 4.2),
    case("scan-i2t", "SCAN i2t", scan("i2t"), 128, 5.7),
    case("bfan", "BFAN equal", bfan, 128, 7),
    case("pfan", "PFAN t2i", pfan, 64, 1.0),
    case("saf", "SGRAF SAF", sgraf("SAF"), 128, 2.5),
    case("sgr", "SGRAF SGR", sgraf("SGR"), 128, 2.5),
    case("vsepp", "VSE++, real caption lengths", vsepp, 128, 1.1, 7),
    case("vsrn", "VSRN", vsrn, 32, 2.0),
    case("saem", "SAEM", saem, 64, 1.0),
    case("aoq-bfan", "AOQ over BFAN", aoq_bfan, 32, 3.0),
    case("aoq-vsrn", "AOQ over VSRN", aoq_vsrn, 16, 1.8),
    case("ccr-ccs", "SCAN t2i with CCR and CCS of every query", constrained, 64, 1.0),
    case("mmca", "MMCA, same selection", mmca, 32, 1.5, growth=(16, 64, 128)),
    case("dcpa-intra", "DCPA stage one", dcpa_intra, 64, 1.0),
    case("dcpa", "DCPA stage two, same selection", dcpa, 32, 1.5),
)
