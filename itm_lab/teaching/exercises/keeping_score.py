"""Exercises of chapter 00."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from itm_lab.teaching.checks import Case, Draw, Exercise
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts
from itm_utils.models.keeping_score import MeanPool

# ------------------------------------------------------------------------------------------------------- expected R@1


def expected_r1(scores, owner):
    """One caption after the other."""
    total = 0.0
    for caption, image in enumerate(owner):
        column = list(scores[:, caption])
        if column[image] == max(column):
            total += 1 / column.count(column[image])
    return 100 * total / len(owner)


def r1_with_ties(kind, axis=0):
    """R@1 under another rule for ties, or in the other direction."""

    def answer(scores, owner):
        found = []
        for caption, image in enumerate(owner):
            line = scores[:, caption] if axis == 0 else scores[image]
            own = scores[image, caption]
            better, tied = (line > own).sum(), (line == own).sum()
            found.append(kind(better, tied))
        return 100 * np.mean(found)

    return answer


def tie_cases(draw: Draw) -> Iterator[Case]:
    yield Case("no ties", (np.eye(3), np.arange(3)))
    yield Case("a negative image scores higher", (1 - np.eye(2), np.arange(2)), "a strictly better negative makes it 0")
    yield Case(
        "everything ties", (np.zeros((4, 4)), np.arange(4)), "with m others at the top, a query counts 1 / (m + 1)"
    )
    below = np.array([[1.0, 0, 2], [1, 3, 0], [2, 0, 1]])
    yield Case("a tie below the top", (below, np.arange(3)), "a tie counts only where nothing is strictly better")
    two = np.array([[1.0, 1, 0], [0, 1, 2]])
    yield Case(
        "two captions of one image", (two, np.array([0, 0, 1])), "the positive of caption c is scores[owner[c], c]"
    )
    for images in (3, 5):
        scores = torch.randint(0, 3, (images, 9), generator=draw.generator).numpy().astype(float)
        owner = torch.randint(0, images, (9,), generator=draw.generator).numpy()
        yield Case(f"nine captions, {images} images, owners in any order", (scores, owner), "use owner, not the order")
    yield Case("negative scores", (np.eye(3) - 2, np.arange(3)), "scores may be negative")


EXPECTED_TIES = Exercise(
    "ex-expected-ties",
    expected_r1,
    tie_cases,
    {
        "ties count 0 here: that is this book's pessimistic rule, not the coin's": r1_with_ties(
            lambda b, t: b == 0 and t == 1
        ),
        "ties count in full here: a coin finds the positive once in m + 1": r1_with_ties(lambda b, t: b == 0),
        "1 / m: the positive is one of those that tie, so divide by m + 1": r1_with_ties(
            lambda b, t: (1 / max(t - 1, 1)) if b == 0 else 0
        ),
        "a query with a strictly better negative still gets its share of the tie": r1_with_ties(lambda b, t: 1 / t),
        "this ranks captions for an image; the direction is text to image, down a column": r1_with_ties(
            lambda b, t: 1 / t if b == 0 else 0, axis=1
        ),
    },
    tolerance=1e-5,
)

# ---------------------------------------------------------------------------------------------------------- matchers


def encoded(matcher_class, words, lengths, regions, mask):
    """What a matcher class with fixed initial weights makes of a batch."""
    torch.manual_seed(5)
    matcher = matcher_class(9, 4, 6)
    ids = torch.arange(len(words))
    with torch.no_grad():
        texts = matcher.encode_texts(TextBatch(lengths=lengths, ids=ids, words=words))
        images = matcher.encode_images(ImageBatch(regions=regions, mask=mask, ids=torch.arange(len(regions))))
        scores = matcher.score(images, texts).i2t
    return {"vectors of the captions": texts.pooled, "vectors of the images": images.pooled, "scores": scores}


def batch(draw: Draw, lengths: tuple[int, ...], regions: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Words with lengths, and regions with a mask."""
    ends = torch.tensor(lengths)
    words = torch.randint(1, 9, (len(lengths), max(lengths)), generator=draw.generator)
    words = words * (torch.arange(max(lengths)) < ends[:, None])
    counts = torch.tensor(regions)
    return words, ends, draw.normal(len(regions), max(regions), 4), torch.arange(max(regions)) < counts[:, None]


class Leaky(MeanPool):
    """Averages over padding, caption by caption."""

    def encode_texts(self, batch: TextBatch) -> Texts:
        rows = [torch.stack([self.word_embedding(word) for word in row]).sum(dim=0) / len(row) for row in batch.words]
        return Texts(pooled=nn.functional.normalize(torch.stack(rows), dim=-1))


class LeakyImages(Leaky):
    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).mean(dim=1), dim=-1))


class LeakyWithoutNorm(MeanPool):
    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=self.word_embedding(batch.words).mean(dim=1))


class LeakySum(MeanPool):
    def encode_texts(self, batch: TextBatch) -> Texts:
        total = self.word_embedding(batch.words).sum(dim=1) / batch.lengths[:, None]
        return Texts(pooled=nn.functional.normalize(total, dim=-1))


def leak_cases(draw: Draw) -> Iterator[Case]:
    yield Case(
        "captions of equal length",
        batch(draw, (4, 4), (3, 3)),
        "without padding it is the mean of the word vectors, normalised",
    )
    yield Case("a short caption beside a long one", batch(draw, (2, 6, 3), (3, 3)), "average over all columns of words")
    yield Case("one caption alone", batch(draw, (5,), (3,)))
    yield Case("images with padded regions", batch(draw, (3, 5), (4, 1, 3)), "the image side stays as it was")


FORGOTTEN_MASK = Exercise(
    "ex-forgotten-mask",
    Leaky,
    leak_cases,
    {
        "no leak: padding does not count here": MeanPool,
        "the image side forgets its mask, too; only the text side should": LeakyImages,
        "the mean is to be normalised to unit norm": LeakyWithoutNorm,
    },
    observe=encoded,
)


class Largest(MeanPool):
    """The largest value over the real regions, image by image."""

    def encode_images(self, batch: ImageBatch) -> Images:
        rows = [self.region_proj(r[m]).max(dim=0).values for r, m in zip(batch.regions, batch.mask, strict=True)]
        return Images(pooled=nn.functional.normalize(torch.stack(rows), dim=-1))


class LargestOfAll(MeanPool):
    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).amax(dim=1), dim=-1))


class LargestWithZeros(MeanPool):
    def encode_images(self, batch: ImageBatch) -> Images:
        projected = self.region_proj(batch.regions) * batch.mask[..., None]
        return Images(pooled=nn.functional.normalize(projected.amax(dim=1), dim=-1))


class LargestWithoutNorm(Largest):
    def encode_images(self, batch: ImageBatch) -> Images:
        rows = [self.region_proj(r[m]).max(dim=0).values for r, m in zip(batch.regions, batch.mask, strict=True)]
        return Images(pooled=torch.stack(rows))


class LargestFeature(MeanPool):
    def encode_images(self, batch: ImageBatch) -> Images:
        best = batch.regions.masked_fill(~batch.mask[..., None], -torch.inf).amax(dim=1)
        return Images(pooled=nn.functional.normalize(self.region_proj(best), dim=-1))


def max_pool_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one region", batch(draw, (3,), (1,)), "one region is its own maximum")
    yield Case(
        "three real regions",
        batch(draw, (3, 3), (3, 3)),
        "the largest projected value of each dimension, then unit norm",
    )
    yield Case("masked regions", batch(draw, (3, 2), (5, 2, 1)), "regions that the mask excludes still count")
    yield Case(
        "many masked regions", batch(draw, (3, 2), (7, 1, 1, 1)), "a masked region of 0 is larger than a negative value"
    )
    yield Case("captions of different lengths", batch(draw, (2, 6), (3, 4)), "the text side stays as it was")


MAX_POOL = Exercise(
    "ex-max-pool",
    Largest,
    max_pool_cases,
    {
        "this is still the mean over the regions": MeanPool,
        "regions that the mask excludes still count": LargestOfAll,
        "a masked region of 0 is larger than a negative value: fill with minus infinity": LargestWithZeros,
        "the vector is to have unit norm": LargestWithoutNorm,
        "the maximum is taken before the linear projection; project first": LargestFeature,
    },
    observe=encoded,
)

# ----------------------------------------------------------------------------------------------- folds and intervals


def fold_r1(scores, folds):
    """One fold, one caption after the other."""
    images, captions = scores.shape
    size, each = images // folds, captions // images
    recalls = []
    for fold in range(folds):
        hits = 0
        for caption in range(fold * size * each, (fold + 1) * size * each):
            column = [scores[image, caption] for image in range(fold * size, (fold + 1) * size)]
            hits += column.index(max(column)) == caption // each - fold * size
        recalls.append(100 * hits / (size * each))
    return sum(recalls) / folds


def first_fold_only(scores, folds):
    images, captions = scores.shape
    return fold_r1(scores[: images // folds, : captions // folds], 1)


def fold_image_to_text(scores, folds):
    images, captions = scores.shape
    size, each, hits = images // folds, captions // images, 0
    for image in range(images):
        fold = image // size
        row = scores[image, fold * size * each : (fold + 1) * size * each]
        hits += (row.argmax() + fold * size * each) // each == image
    return 100 * hits / images


def fold_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one fold", (draw.normal(4, 8).numpy(), 1), "with one fold it is the recall over all images")
    yield Case(
        "one caption for each image, two folds", (draw.normal(6, 6).numpy(), 2), "a fold ranks its own images only"
    )
    for images, each, folds in ((6, 2, 3), (8, 5, 2), (10, 3, 5)):
        scores = draw.normal(images, images * each).numpy()
        yield Case(
            f"{images} images, {each} captions each, {folds} folds",
            (scores, folds),
            "captions of image n: from n times c / i on",
        )


FOLDS = Exercise(
    "ex-folds",
    fold_r1,
    fold_cases,
    {
        "all images compete here: a fold ranks its own images only": lambda scores, folds: fold_r1(scores, 1),
        "that is the first fold; take the mean over all": first_fold_only,
        "that is image to text: rank images for each caption": fold_image_to_text,
    },
    tolerance=1e-5,
)


def bootstrap_rates(hits, owner, draws, each_once=False, of_means=False):
    """R@1 of every draw, image by image."""
    rates = []
    for drawn in draws:
        chosen, means = [], []
        for image in set(drawn.tolist()) if each_once else drawn:
            own = [hit for hit, belongs in zip(hits, owner, strict=True) if belongs == image]
            chosen += own
            means.append(np.mean(own))
        rates.append(100 * np.mean(means if of_means else chosen))
    return rates


def bootstrap_interval(hits, owner, draws):
    """Percentiles of the recalls of all draws."""
    low, high = np.percentile(bootstrap_rates(hits, owner, draws), [2.5, 97.5])
    return low, high


def interval_of(low, high, **options):
    return lambda hits, owner, draws: tuple(np.percentile(bootstrap_rates(hits, owner, draws, **options), [low, high]))


def interval_cases(draw: Draw) -> Iterator[Case]:
    def inputs(counts: list[int], number: int) -> tuple[np.ndarray, ...]:
        owner = np.repeat(np.arange(len(counts)), counts)
        hits = (draw.uniform(len(owner)) > 0.4).numpy().astype(float)
        draws = torch.randint(0, len(counts), (number, len(counts)), generator=draw.generator).numpy()
        return hits, owner, draws

    yield Case("all captions found", (np.ones(6), np.repeat(np.arange(3), 2), np.array([[0, 1, 2], [2, 2, 0]])))
    yield Case("one draw", inputs([2, 2, 2, 2], 1), "an image drawn twice brings its captions twice")
    yield Case("forty draws", inputs([5] * 6, 40), "the 2.5th and the 97.5th percentile of the recalls of all draws")
    yield Case("images with 1 to 7 captions", inputs([1, 7, 2, 5, 3], 40), "all captions of a draw count alike")
    hits, owner, draws = inputs([2, 3, 1, 4], 40)
    order = draw.order(len(owner)).numpy()
    yield Case("captions in any order", (hits[order], owner[order], draws), "owner says whose caption it is")


INTERVAL = Exercise(
    "ex-interval",
    bootstrap_interval,
    interval_cases,
    {
        "these are shares; recalls are percentages": lambda *inputs: tuple(
            x / 100 for x in bootstrap_interval(*inputs)
        ),
        "an image that is drawn twice counts twice": interval_of(2.5, 97.5, each_once=True),
        "each caption counts alike; this gives each image one voice": interval_of(2.5, 97.5, of_means=True),
        "that leaves five percent out on each side; a 95 % interval leaves 2.5": interval_of(5, 95),
        "these are the smallest and the largest recall; take percentiles": interval_of(0, 100),
    },
    shape="the lower and the upper end",
    tolerance=1e-5,
)

EXERCISES = (FORGOTTEN_MASK, EXPECTED_TIES, MAX_POOL, FOLDS, INTERVAL)
