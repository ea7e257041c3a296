"""InterPAM's scores with what needs no partner done once, against both decoders run anew for each pair.

36 regions of 2,048 numbers, tokens of 768, width 256, 16 heads, 2,048 inside, one thread. *Anew* is the plain batched way:
both decoders run over some pairs, with the look at one's own kind and all projections. It takes a caption with several
pictures at a time, so that nothing is padded; how many pictures is tried out first, and the quickest counts. *Prepared*
is score_all. Both start from mapped regions and tokens, compare in the same way, and take turns. What preparing costs,
once an item, is measured too.

    python benchmarks/dcpa_scoring.py        (about five minutes; writes benchmarks/results/dcpa_scoring.json)
    python benchmarks/dcpa_scoring.py --pictures 8 --captions 16 --rounds 1 --out trial.json
"""

from __future__ import annotations

import harness
import numpy as np
import torch
from harness import REGIONS
from torch import Tensor

from itm_utils.matcher import Encoded, ImageBatch, Images, Scores, TextBatch, Texts
from itm_utils.models.dcpa import InterPAM, PhraseDecoder, prepare
from itm_utils.scoring import score_all

IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS, INNER = 2048, 768, 256, 16, 2048
TRIED = (1, 2, 5, 10, 20, 40)  # pictures that a caption meets at once when the decoders run anew


def matcher() -> InterPAM:
    torch.manual_seed(0)
    return InterPAM(IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS, INNER).eval()


def random_batches(pictures: int, captions: int, seed: int) -> tuple[ImageBatch, TextBatch]:
    """Random features of variance one. A caption has one token more than words: some word is cut into pieces."""
    rng = torch.Generator().manual_seed(seed)
    lengths = 1 + harness.sentence_lengths(captions, seed)
    seen = harness.random_side(Images, np.full(pictures, REGIONS), rng, IMAGE_DIM)
    said = harness.random_side(Texts, lengths, rng, TOKEN_DIM)
    images = ImageBatch(seen.local * IMAGE_DIM**0.5, seen.mask, torch.arange(pictures))
    texts = TextBatch(torch.from_numpy(lengths), torch.arange(captions), features=said.local * TOKEN_DIM**0.5)
    return images, texts


def one_decoder(asks: float, answers: float, d: int, inner: int) -> tuple[float, float]:
    """Multiplications of a pair in one decoder: run anew, and with items prepared (chapter 09)."""
    pair = 3 * asks * answers * d + asks * d**2 + 2 * asks * d * inner
    own = (5 * asks + 2 * answers) * d**2 + 2 * asks**2 * d
    return pair + own, pair


def multiplications(r: int, w: float, d: int, inner: int) -> tuple[float, float]:
    """Of a pair in both decoders: run anew, and with items prepared."""
    i2t, t2i = one_decoder(r, w, d, inner), one_decoder(w, r, d, inner)
    return i2t[0] + t2i[0], i2t[1] + t2i[1]


def mapped(model: InterPAM, images: ImageBatch, texts: TextBatch) -> tuple[Images, Texts]:
    """Regions and words of width 256, where both ways start."""
    with torch.inference_mode():
        regions, words = model.region_proj(images.regions), model.token_proj(texts.features)
    return Images(regions, images.mask), Texts(words, texts.mask)


def decode(decoder: PhraseDecoder, one: Encoded, other: Encoded) -> Tensor:
    """The whole decoder for given pairs: (b, k, d)."""
    phrases = decoder.phrases(one.local, one.mask)
    found, _ = decoder.attention(phrases, other.local, other.mask)
    return decoder.finish(phrases, found)


def unit(side: Encoded) -> Encoded:
    return Encoded(torch.nn.functional.normalize(side.local, dim=-1), side.mask)


@torch.inference_mode()
def score_anew(model: InterPAM, images: Images, texts: Texts, rows: int) -> Scores:
    """(i, c) scores; both decoders run whole for every pair, a caption with ``rows`` pictures at a time."""
    i2t, t2i = torch.empty(2, len(images), len(texts))
    lengths = texts.mask.sum(dim=1).tolist()
    for caption, length in enumerate(lengths):
        for row in range(0, len(images), rows):
            some = images[row : row + rows]
            words = texts.local[caption, :length].expand(len(some), -1, -1)
            said = Texts(words, texts.mask[caption, :length].expand(len(some), -1))
            as_text, as_image = decode(model.i2t, some, said), decode(model.t2i, said, some)
            i2t[row : row + rows, caption] = model.compare(as_text, some.mask, unit(said))
            t2i[row : row + rows, caption] = model.compare(as_image, said.mask, unit(some))
    return Scores(i2t, t2i)


def try_rows(model: InterPAM, images: Images, texts: Texts) -> dict[int, float]:
    """Microseconds a pair of the way that runs anew, for each number of pictures at a time; best of three turns."""
    part = texts[harness.some_of(texts, max(1, len(texts) // 20))]
    ways = {str(rows): lambda rows=rows: score_anew(model, images, part, rows) for rows in TRIED if rows <= len(images)}
    seconds, _, _ = harness.take_turns(ways, rounds=3, label="anew, pictures at a time ")
    return {int(rows): 1e6 * value / (len(images) * len(part)) for rows, value in seconds.items()}


@torch.inference_mode()
def prepare_us(model: InterPAM, images: Images, texts: Texts) -> float:
    """Microseconds of what is done once an item, a picture or caption."""

    def job() -> None:
        for side, ways in ((images, (model.i2t, model.t2i)), (texts, (model.t2i, model.i2t))):
            for start in range(0, len(side), 128):
                some = side[start : start + 128]
                prepare(some.local, some.mask, *ways)

    return 1e6 * min(harness.timed(job) for _ in range(3)) / (len(images) + len(texts))


def main() -> None:
    args = harness.start(__doc__, "dcpa_scoring.json", pictures=40, captions=200, rounds=5)
    model, given = matcher(), random_batches(args.pictures, args.captions, seed=0)
    plain = mapped(model, *given)
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
    apart = [(getattr(scores["anew"], way) - getattr(scores["prepared"], way)).abs().max() for way in ("i2t", "t2i")]
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
