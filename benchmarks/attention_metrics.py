"""What the attention metrics cost beside the scores: SCAN whose words look at regions, on made-up features.

1,000 images x 5 captions, 36 regions of 2,048 numbers, width 1,024, 11 thresholds, one thread. Both ways read features
from disk and encode every image and caption; scoring then meets all pairs, the metrics only matched ones. Captions are
encoded and scored for some of them, against all images, and the rest is added by words; each part is timed by itself, and
*whole* is score_split on the same captions, which the parts must add up to. With fewer images both are also scaled to
1,000: encoding and the metrics grow with the images, the pairs with their square.

    python -m benchmarks.attention_metrics        (about five minutes; writes benchmarks/results/attention_metrics.json)
    python -m benchmarks.attention_metrics --images 100 --scored-captions 100 --out trial.json
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import REGIONS, WIDTH, finish, settings, start, take_turns
from itm_utils.data.batches import WordCaptions
from itm_utils.data.phrases import Grounding, Phrase
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.metrics.attention import THRESHOLDS, collect_attention
from itm_utils.models.scan import SCAN
from itm_utils.scoring import BATCH, encode_images, encode_split, evaluating, score_all, score_split

IMAGE_DIM, WORD_DIM, KNOWN_WORDS = 2048, 300, 8000
FULL, CAPTIONS = 1000, 5  # images of the test set, captions of an image
PICTURE = np.array((500, 375))
GROUNDED = 3  # phrases a caption, of two words each


def write_split(folder: Path, images: int, rng: np.random.Generator) -> tuple[PrecompSplit, Vocabulary]:
    """Random features, boxes and captions of about ten words, as in Flickr30K."""
    words = np.array([f"w{''.join(chr(97 + n // 26**k % 26) for k in range(3))}" for n in range(KNOWN_WORDS)])
    features = np.lib.format.open_memmap(
        folder / "test_ims.npy", mode="w+", dtype=np.float32, shape=(images, REGIONS, IMAGE_DIM)
    )
    for row in features:
        row[:] = rng.random(row.shape, dtype=np.float32)
    features.flush()
    np.save(folder / "test_boxes.npy", random_boxes(rng, (images, REGIONS)))
    counts = 8 + rng.poisson(4, size=CAPTIONS * images)
    lines = [" ".join(rng.choice(words, size=count)) for count in counts]
    (folder / "test_caps.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return open_split(folder, "test"), Vocabulary.build(words.tolist(), threshold=1)


def random_boxes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    corners = np.sort(rng.random((*shape, 2, 2), dtype=np.float32), axis=-2) * PICTURE.astype(np.float32)
    return corners.reshape(*shape, 4)


def ground(split: PrecompSplit, rng: np.random.Generator) -> Grounding:
    """Pairs of neighbouring words; a box of a phrase is one of the image's regions, a little moved."""
    regions, phrases = split.region_boxes(np.arange(split.n_images)), []
    for caption, image in zip(split.captions, split.owner, strict=True):
        ends = np.cumsum([len(word) + 1 for word in caption.split()]) - 1
        own = regions[image, rng.integers(REGIONS, size=(GROUNDED, 2))] + rng.normal(scale=5, size=(GROUNDED, 2, 4))
        starts = np.concatenate([[0], ends + 1])
        phrases.append([Phrase(int(starts[2 * n]), int(ends[2 * n + 1]), own[n]) for n in range(GROUNDED)])
    return Grounding(phrases)


def encode_captions(model: SCAN, texts: WordCaptions) -> None:
    with evaluating(model):
        for index in np.array_split(np.argsort(texts.lengths), -(-len(texts.lengths) // BATCH)):
            model.encode_texts(texts.batch(index))


def main() -> None:
    args = start(__doc__, "attention_metrics.json", images=1000, scored_captions=500, rounds=2)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        split, vocabulary = write_split(Path(folder), args.images, rng)
        grounding, texts = ground(split, rng), WordCaptions(split, vocabulary)
        model = SCAN(len(vocabulary), IMAGE_DIM, width=WIDTH, word_dim=WORD_DIM, direction="t2i").eval()
        chosen = np.arange(0, split.n_captions, split.n_captions // args.scored_captions)[: args.scored_captions]
        some = replace(split, captions=[split.captions[c] for c in chosen], owner=split.owner[chosen])
        some_texts = WordCaptions(some, vocabulary)
        images, captions = encode_split(model, some, some_texts)  # and everything is warm
        collect_attention(model, split.first(2), texts, grounding.first(2 * CAPTIONS)).quality()
        ways = {
            "encode images": lambda: encode_images(model, split),
            "encode some captions": lambda: encode_captions(model, some_texts),
            "pairs of some captions": lambda: score_all(model, images, captions, progress=False),
            "whole of some captions": lambda: score_split(model, some, some_texts),
            "attention metrics": lambda: collect_attention(model, split, texts, grounding).quality(),
        }
        seconds, peak, found = take_turns(ways, args.rounds)
    quality = found["attention metrics"]
    by_words = float(texts.lengths.sum() / some_texts.lengths.sum())
    encoding = seconds["encode images"] + by_words * seconds["encode some captions"]
    pairs = by_words * seconds["pairs of some captions"]
    times = FULL / args.images
    measured = {"attention metrics": seconds["attention metrics"], "scoring": encoding + pairs}
    scaled = {
        "attention metrics": times * measured["attention metrics"],
        "scoring": times * encoding + times**2 * pairs,
    }
    result = {
        "what": settings(
            images=args.images,
            captions=split.n_captions,
            scored_captions=len(chosen),
            width=WIDTH,
            image_dim=IMAGE_DIM,
            words_mean=round(float(texts.lengths.mean()), 2),
            phrases=quality.phrases,
            phrases_dropped=quality.dropped,
            thresholds=len(THRESHOLDS),
            seconds="processor time of one thread, encoding included; scoring: some captions, the rest by words",
        ),
        "seconds": measured | {"encoding": encoding, "pairs": pairs},
        "seconds_of_parts": seconds,
        f"seconds_scaled_to_{FULL}_images": scaled,
        "scoring_takes_times_as_long": {
            f"{args.images} images": measured["scoring"] / measured["attention metrics"],
            f"{FULL} images, scaled": scaled["scoring"] / scaled["attention metrics"],
        },
        "peak_bytes_beyond_inputs": {"attention metrics": peak["attention metrics"]},
    }
    finish(args, result)


if __name__ == "__main__":
    main()
