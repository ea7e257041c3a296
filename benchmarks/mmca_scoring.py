"""MMCA's scores with self-attention computed once per item, against the layer run for each pair; memory of training.

36 regions of width 2,048, tokens of width 768, width 256, 16 heads, one thread. *Anew* is the plain batched way: regions
and words of some pairs are concatenated and the whole layer runs over them, projections and self-attention included. It
takes a caption with several images at a time, so that nothing is padded; how many images is tried out first, and the
fastest counts. *Prepared* is score_all. Both start from projected regions and tokens, end in the same pooling and text
CNN, and alternate. The cost of preparing, once per item, is measured too. The memory of a training step is counted beyond
the model, the batch, its encodings and the gradients of both.

    python -m benchmarks.mmca_scoring        (about five minutes; writes benchmarks/results/mmca_scoring.json)
    python -m benchmarks.mmca_scoring --images 8 --captions 16 --rounds 1 --batches 4 --direct 4 --out trial.json
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import REGIONS
from itm_utils.matcher import Encoded, ImageBatch, Images, PairBatch, TextBatch, Texts
from itm_utils.models.mmca import MMCA, HardNegativeTripletLoss, apply_to_concatenation
from itm_utils.models.vsepp import hinge_loss
from itm_utils.scoring import score_all, trim

IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS = 2048, 768, 256, 16
TRIED = (1, 2, 5, 10, 25, 50)  # images scored with a caption at once when the layer runs anew
MARGIN, BUDGET = 0.2, 2**28  # of a training step; bytes


def matcher() -> MMCA:
    torch.manual_seed(0)
    return MMCA(IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS)


def random_batches(count: int, captions: int, seed: int) -> tuple[ImageBatch, TextBatch]:
    """Random features of unit variance. A caption has one token more than words: some word is cut into pieces."""
    rng = torch.Generator().manual_seed(seed)
    lengths = 1 + harness.sentence_lengths(captions, seed)
    encoded_images = harness.random_side(Images, np.full(count, REGIONS), rng, IMAGE_DIM)
    encoded_texts = harness.random_side(Texts, lengths, rng, TOKEN_DIM)
    images = ImageBatch(encoded_images.local * IMAGE_DIM**0.5, encoded_images.mask, torch.arange(count))
    texts = TextBatch(torch.from_numpy(lengths), torch.arange(captions), features=encoded_texts.local * TOKEN_DIM**0.5)
    return images, texts


def multiplications(r: int, w: float, d: int) -> tuple[float, float]:
    """Of one pair: run anew, and with what does not depend on the pair done once per item (the table of chapter 08)."""
    shared = 4 * r * w * d + 3 * (r + w) * d**2 + 6 * w * d**2 + 3 * d**2
    return shared + 3 * (r + w) * d**2 + 2 * (r**2 + w**2) * d, shared


@torch.inference_mode()
def score_anew(model: MMCA, images: Images, texts: Texts, rows: int) -> Tensor:
    """(i, c) scores; the whole layer runs for every pair, a caption with ``rows`` images at a time."""
    module, cross = model.cross_attention, torch.empty(len(images), len(texts))
    for caption in range(len(texts)):
        text = trim(Texts(texts.local[[caption]], texts.mask[[caption]]))
        for row in range(0, len(images), rows):
            regions, present = images.local[row : row + rows], images.mask[row : row + rows]
            words, real = text.local.expand(len(regions), -1, -1), text.mask.expand(len(regions), -1)
            regions, words = apply_to_concatenation(module.transformer, regions, words, present, real)
            i1, c1 = module.image_vector(regions, present), module.caption_vector(words, real)
            cross[row : row + rows, caption] = (i1 * c1).sum(dim=-1)
    return model.combine_scores(images.pooled @ texts.pooled.T, cross).i2t


def try_rows(model: MMCA, images: Images, texts: Texts) -> dict[int, float]:
    """Microseconds per pair when run anew, for each number of images at a time; best of three rounds."""
    part = texts[harness.some_of(texts, max(1, len(texts) // 20))]
    ways = {str(rows): lambda rows=rows: score_anew(model, images, part, rows) for rows in TRIED if rows <= len(images)}
    seconds, _, _ = harness.take_turns(ways, rounds=3, label="anew, images at a time ")
    return {int(rows): 1e6 * value / (len(images) * len(part)) for rows, value in seconds.items()}


@torch.inference_mode()
def prepare_us(model: MMCA, sides: tuple[Encoded, ...]) -> float:
    """Microseconds per item of the part of the encoders that only the prepared way needs."""

    def prepare() -> None:
        for side in sides:
            for start in range(0, len(side), 128):
                model.cross_attention.transformer.prepare(
                    side.local[start : start + 128], side.mask[start : start + 128]
                )

    return 1e6 * min(harness.timed(prepare) for _ in range(3)) / sum(len(side) for side in sides)


def kept_bytes(sides: tuple[Encoded, ...]) -> int:
    """What the encodings hold for the prepared way only."""
    return sum(part.nbytes for side in sides for part in side.extra_local.values())


def selected(model: MMCA, batch: PairBatch) -> Tensor:
    """The loss of chapter 08: all pairs within a budget without gradients, then positives and hardest negatives with them."""
    return HardNegativeTripletLoss(MARGIN, budget=BUDGET)(model, batch)[0]


def direct(model: MMCA, batch: PairBatch) -> Tensor:
    """The same loss from a graph through all pairs."""
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    return hinge_loss(model.score(images, texts), MARGIN, hardest=True)


def step_memory(loss_of: Callable[[MMCA, PairBatch], Tensor], pairs: int) -> tuple[int | None, float]:
    """Peak of loss and backward beyond model, batch, encodings and the gradients of both, in bytes; and the loss."""
    model, batch, losses = matcher().train(), PairBatch(*random_batches(pairs, pairs, seed=pairs)), []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # there already, and not only promised
    images, texts = model.encode_images(batch.images), model.encode_texts(batch.texts)
    model.encode_images, model.encode_texts = (lambda _: images), (lambda _: texts)  # not again

    def step() -> None:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())

    peak = harness.peak_beyond(step)
    if peak is not None:  # the gradients of the encodings are as large as these, however pairs are scored
        peak -= sum(part.nbytes for side in (images, texts) for part in (side.pooled, side.local)) + kept_bytes(
            (images, texts)
        )
    print(f"training step, {loss_of.__name__}, {pairs} pairs: peak {peak}", flush=True)
    return peak, losses[0]


def training_memory(batches: list[int], direct_pairs: int) -> dict[str, object]:
    """Peaks of training steps by batch size."""
    step_memory(selected, 2), step_memory(direct, 2)  # whatever is loaded at first use is loaded
    peaks = {str(pairs): step_memory(selected, pairs)[0] for pairs in batches}
    peak, loss = step_memory(direct, direct_pairs)
    _, same_loss = step_memory(selected, direct_pairs)
    return {
        "budget": BUDGET,
        "selected": peaks,
        "direct": {str(direct_pairs): peak},
        "loss_relative_difference": abs(loss - same_loss) / loss,
        "beyond": "model, batch, encodings and the gradients of both; bytes",
    }


def main() -> None:
    sizes = {"images": 50, "captions": 400, "rounds": 5, "batches": [32, 64, 128], "direct": 32}
    args = harness.start(__doc__, "mmca_scoring.json", **sizes)
    memory = training_memory(args.batches, args.direct)
    model, (image_batch, text_batch) = matcher().eval(), random_batches(args.images, args.captions, seed=0)
    with torch.inference_mode():
        images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    by_rows = try_rows(model, images, texts)
    rows = min(by_rows, key=by_rows.get)
    ways = {
        "anew": lambda: score_anew(model, images, texts, rows),
        "prepared": lambda: score_all(model, images, texts, progress=False).i2t,
    }
    seconds, peak, scores = harness.take_turns(ways, args.rounds)
    pairs, tokens = args.images * args.captions, float(text_batch.lengths.float().mean())
    anew_us, prepared_us = (1e6 * seconds[way] / pairs for way in ways)
    anew, prepared = multiplications(REGIONS, tokens, WIDTH)
    result = {
        "settings": harness.settings(
            images=args.images,
            captions=args.captions,
            rounds=args.rounds,
            image_dim=IMAGE_DIM,
            token_dim=TOKEN_DIM,
            width=WIDTH,
            heads=HEADS,
            tokens_mean=round(tokens, 2),
            tokens_max=int(text_batch.lengths.max()),
            anew_images_at_a_time=rows,
            seconds="processor time of one thread; the ways take turns, best of rounds; encodings given",
        ),
        "pairs": pairs,
        "anew_us": anew_us,
        "prepared_us": prepared_us,
        "ratio": anew_us / prepared_us,
        "bound": anew / prepared,
        "multiplications": {"anew": anew, "prepared": prepared},
        "difference": float((scores["anew"] - scores["prepared"]).abs().max()),
        "flickr30k_minutes": 1000 * 5000 * prepared_us / 60e6,
        "anew_us_by_images_at_a_time": {str(rows): value for rows, value in by_rows.items()},
        "prepare_us_per_item": prepare_us(model, (images, texts)),
        "prepared_bytes_per_item": kept_bytes((images, texts)) / (args.images + args.captions),
        "peak_bytes_beyond_inputs": peak,
        "memory": memory,
    }
    harness.finish(args, result)


if __name__ == "__main__":
    main()
