"""InterPAM's scores with what does not depend on the pair done once per item, against both decoders run anew for each pair.

36 regions of dimension 2,048, tokens of 768, width 256, 16 heads, feed-forward width 2,048, one thread. *Anew* is the plain
batched version: both decoders run over some pairs, with the self-attention and all projections. It takes a caption with
several images at a time, so that nothing is padded; how many images is tried out first, and the quickest counts. *Prepared*
is score_all. Both start from projected regions and tokens, compare in the same way, and take turns. What preparing costs,
per item, is measured too.

    python -m benchmarks.dcpa_scoring        (about five minutes; writes benchmarks/results/dcpa_scoring.json)
    python -m benchmarks.dcpa_scoring --pictures 8 --captions 16 --rounds 1 --out trial.json
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import REGIONS
from itm_utils.matcher import Encoded, ImageBatch, Images, Scores, TextBatch, Texts
from itm_utils.models.dcpa import InterPAM, PhraseDecoder, prepare
from itm_utils.scoring import score_all

IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS, INNER = 2048, 768, 256, 16, 2048
TRIED = (1, 2, 5, 10, 20, 40)  # images that are paired with a caption at once when the decoders run anew


def matcher() -> InterPAM:
    torch.manual_seed(0)
    return InterPAM(IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS, INNER).eval()


def random_batches(images: int, captions: int, seed: int) -> tuple[ImageBatch, TextBatch]:
    """Random features of variance one. A caption has one token more than words: some word is cut into pieces."""
    rng = torch.Generator().manual_seed(seed)
    lengths = 1 + harness.sentence_lengths(captions, seed)
    regions = harness.random_side(Images, np.full(images, REGIONS), rng, IMAGE_DIM)
    tokens = harness.random_side(Texts, lengths, rng, TOKEN_DIM)
    image_batch = ImageBatch(regions.local * IMAGE_DIM**0.5, regions.mask, torch.arange(images))
    features = tokens.local * TOKEN_DIM**0.5
    return image_batch, TextBatch(torch.from_numpy(lengths), torch.arange(captions), features=features)


def one_decoder(source: float, memory: float, d: int, inner: int) -> tuple[float, float]:
    """Multiplications of a pair in one decoder: run anew, and with items prepared (chapter 09)."""
    pair = 3 * source * memory * d + source * d**2 + 2 * source * d * inner
    own = (5 * source + 2 * memory) * d**2 + 2 * source**2 * d
    return pair + own, pair


def multiplications(r: int, w: float, d: int, inner: int) -> tuple[float, float]:
    """Of a pair in both decoders: run anew, and with items prepared."""
    i2t, t2i = one_decoder(r, w, d, inner), one_decoder(w, r, d, inner)
    return i2t[0] + t2i[0], i2t[1] + t2i[1]


def projected(model: InterPAM, images: ImageBatch, texts: TextBatch) -> tuple[Images, Texts]:
    """Regions and words of width 256, where both versions start."""
    with torch.inference_mode():
        regions, words = model.region_proj(images.regions), model.token_proj(texts.features)
    return Images(regions, images.mask), Texts(words, texts.mask)


def decode(decoder: PhraseDecoder, source: Encoded, memory: Encoded) -> Tensor:
    """The whole decoder for given pairs: (b, k, d)."""
    phrases = decoder.phrases(source.local, source.mask)
    attended, _ = decoder.attention(phrases, memory.local, memory.mask)
    return decoder.ffn(phrases, attended)


def unit_norm(side: Encoded) -> Encoded:
    return Encoded(torch.nn.functional.normalize(side.local, dim=-1), side.mask)


@torch.inference_mode()
def score_anew(model: InterPAM, images: Images, texts: Texts, rows: int) -> Scores:
    """(i, c) scores; both decoders run whole for every pair, a caption with ``rows`` images at a time."""
    i2t, t2i = torch.empty(2, len(images), len(texts))
    lengths = texts.mask.sum(dim=1).tolist()
    for caption, length in enumerate(lengths):
        for row in range(0, len(images), rows):
            some = images[row : row + rows]
            words = texts.local[caption, :length].expand(len(some), -1, -1)
            caption_words = Texts(words, texts.mask[caption, :length].expand(len(some), -1))
            as_text, as_image = decode(model.i2t, some, caption_words), decode(model.t2i, caption_words, some)
            i2t[row : row + rows, caption] = model.compare(as_text, some.mask, unit_norm(caption_words))
            t2i[row : row + rows, caption] = model.compare(as_image, caption_words.mask, unit_norm(some))
    return Scores(i2t, t2i)


def try_rows(model: InterPAM, images: Images, texts: Texts) -> dict[int, float]:
    """Microseconds per pair of the version that runs anew, by the number of images at a time; best of three turns."""
    part = texts[harness.some_of(texts, max(1, len(texts) // 20))]
    ways = {str(rows): lambda rows=rows: score_anew(model, images, part, rows) for rows in TRIED if rows <= len(images)}
    seconds, _, _ = harness.take_turns(ways, rounds=3, label="anew, pictures at a time ")
    return {int(rows): 1e6 * value / (len(images) * len(part)) for rows, value in seconds.items()}


@torch.inference_mode()
def prepare_us(model: InterPAM, images: Images, texts: Texts) -> float:
    """Microseconds of what is done once per item, an image or a caption."""

    def job() -> None:
        for side, decoders in ((images, (model.i2t, model.t2i)), (texts, (model.t2i, model.i2t))):
            for start in range(0, len(side), 128):
                some = side[start : start + 128]
                prepare(some.local, some.mask, *decoders)

    return 1e6 * min(harness.timed(job) for _ in range(3)) / (len(images) + len(texts))


def main() -> None:
    args = harness.start(__doc__, "dcpa_scoring.json", pictures=40, captions=200, rounds=5)
    model, given = matcher(), random_batches(args.pictures, args.captions, seed=0)
    plain = projected(model, *given)
    with torch.inference_mode():
        images, texts = model.encode_images(given[0]), model.encode_texts(given[1])
    by_rows = try_rows(model, *plain)
    rows = min(by_rows, key=by_rows.get)
    ways = {
        "anew": lambda: score_anew(model, *plain, rows),
        "prepared": lambda: score_all(model, images, texts, progress=False),
    }
    seconds, peak, scores = harness.take_turns(ways, args.rounds)
    pairs, tokens = args.pictures * args.captions, float(given[1].lengths.float().mean())
    anew_us, prepared_us = (1e6 * seconds[way] / pairs for way in ways)
    anew, prepared = multiplications(REGIONS, tokens, WIDTH, INNER)
    apart = [
        (getattr(scores["anew"], direction) - getattr(scores["prepared"], direction)).abs().max()
        for direction in ("i2t", "t2i")
    ]
    kept = sum(part.nbytes for side in (images, texts) for part in side.extra_local.values())
    result = {
        "settings": harness.settings(
            pictures=args.pictures,
            captions=args.captions,
            rounds=args.rounds,
            image_dim=IMAGE_DIM,
            token_dim=TOKEN_DIM,
            width=WIDTH,
            heads=HEADS,
            top_k=model.top_k,
            tokens_mean=round(tokens, 2),
            tokens_max=int(given[1].lengths.max()),
            anew_pictures_at_a_time=rows,
            seconds="processor time of one thread; the ways take turns, best of rounds; mapped regions and tokens given",
        ),
        "inner": INNER,
        "pairs": pairs,
        "anew_us": anew_us,
        "prepared_us": prepared_us,
        "times": anew_us / prepared_us,
        "bound": anew / prepared,
        "multiplications": {"anew": anew, "prepared": prepared},
        "difference": float(max(apart)),
        "flickr30k_hours": 1000 * 5000 * prepared_us / 3600e6,
        "anew_us_by_pictures_at_a_time": {str(rows): value for rows, value in by_rows.items()},
        "prepare_us_an_item": prepare_us(model, *plain),
        "prepared_bytes_an_item": kept / (args.pictures + args.captions),
        "peak_bytes_beyond_inputs": peak,
    }
    harness.finish(args, result)


if __name__ == "__main__":
    main()
