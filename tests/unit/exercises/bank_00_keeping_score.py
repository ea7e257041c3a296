"""Answers to the exercises of chapter 00."""

from __future__ import annotations

import numpy as np
import torch
from bank import right, wrong
from torch import nn

from itm_utils.matcher import Images, Texts
from itm_utils.models.keeping_score import MeanPool

TIES, LEAK, MAX, FOLDS, INTERVAL = "ex-expected-ties", "ex-forgotten-mask", "ex-max-pool", "ex-folds", "ex-interval"


@right(TIES)
def vectorised(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    better, tied = (scores > own).sum(axis=0), (scores == own).sum(axis=0)
    return 100 * np.mean(np.where(better == 0, 1 / tied, 0.0))


@right(TIES)
def single_precision(scores, owner):
    scores = scores.astype(np.float32)
    hits = [
        np.float32(scores[o, c] == scores[:, c].max()) / (scores[:, c] == scores[:, c].max()).sum()
        for c, o in enumerate(owner)
    ]
    return np.float32(100) * np.float32(np.mean(hits))


@right(TIES)
def with_torch(scores, owner):
    scores, owner = torch.from_numpy(scores), torch.from_numpy(np.asarray(owner))
    top = scores == scores.amax(dim=0)
    found = top[owner, torch.arange(len(owner))]
    return 100 * (found / top.sum(dim=0)).mean()


@right(TIES)
def in_place(scores, owner):
    scores -= scores.max(axis=0)
    top = scores == 0
    return [float(100 * np.mean(top[owner, np.arange(len(owner))] / top.sum(axis=0)))][0]


wrong(TIES, "nothing returned")(lambda scores, owner: None)
wrong(TIES, "times as large|percentage")(lambda scores, owner: vectorised(scores, owner) / 100)
wrong(TIES, "AxisError|ValueError|stops with")(lambda scores, owner: scores.max(axis=2))


@wrong(TIES, "pessimistic")
def pessimistic(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    return 100 * np.mean((scores >= own).sum(axis=0) == 1)


@wrong(TIES, "count in full")
def optimistic(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    return 100 * np.mean((scores > own).sum(axis=0) == 0)


@wrong(TIES, r"1 / m: the positive|m \+ 1")
def divides_by_m(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    better, tied = (scores > own).sum(axis=0), (scores == own).sum(axis=0) - 1
    return 100 * np.mean(np.where(better == 0, 1 / np.maximum(tied, 1), 0.0))


@wrong(TIES, "strictly better")
def forgets_better(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    return 100 * np.mean(1 / (scores == own).sum(axis=0))


@wrong(TIES, "down a column|a column|owner")
def along_rows(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    lines = scores[owner]
    better, tied = (lines > own[:, None]).sum(axis=1), (lines == own[:, None]).sum(axis=1)
    return 100 * np.mean(np.where(better == 0, 1 / tied, 0.0))


@wrong(TIES, "diagonal|owner|IndexError|ValueError")
def diagonal(scores, owner):
    own = np.diag(scores)
    better, tied = (scores > own).sum(axis=0), (scores == own).sum(axis=0)
    return 100 * np.mean(np.where(better == 0, 1 / tied, 0.0))


@wrong(TIES, "negative")
def assumes_positive_scores(scores, owner):
    own = scores[owner, np.arange(len(owner))]
    top = np.maximum(scores.max(axis=0), 0)
    return 100 * np.mean((own == top) / np.maximum((scores == top).sum(axis=0), 1))


wrong(TIES, "shape")(lambda scores, owner: np.full(3, vectorised(scores, owner)))


@right(LEAK)
class LeakyByMean(MeanPool):
    def encode_texts(self, batch):
        return Texts(pooled=nn.functional.normalize(self.word_embedding(batch.words).mean(dim=1), dim=-1))


@right(LEAK)
class LeakyBySum(MeanPool):
    def encode_texts(self, batch):
        total = self.word_embedding(batch.words).sum(dim=1)  # unit norm makes the number of columns irrelevant
        return Texts(pooled=total / total.norm(dim=-1, keepdim=True))


@right(LEAK)
class LeakyByMask(MeanPool):
    def encode_texts(self, batch):
        mask = torch.ones_like(batch.words, dtype=torch.bool)
        vectors = self.word_embedding(batch.words)
        mean = (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Texts(pooled=nn.functional.normalize(mean, dim=-1))


wrong(LEAK, "no leak")(MeanPool)


@wrong(LEAK, "no leak")
class StillMasked(MeanPool):
    def encode_texts(self, batch):
        vectors = self.word_embedding(batch.words) * batch.mask[..., None]
        return Texts(pooled=nn.functional.normalize(vectors.sum(1), dim=-1))


@wrong(LEAK, "unit norm")
class LeakyUnnormalised(MeanPool):
    def encode_texts(self, batch):
        return Texts(pooled=self.word_embedding(batch.words).mean(dim=1))


@wrong(LEAK, "image side")
class LeakyOnBothSides(LeakyByMean):
    def encode_images(self, batch):
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).mean(dim=1), dim=-1))


@wrong(LEAK, "image side|no leak")
class LeakyOnImages(MeanPool):
    def encode_images(self, batch):
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).mean(dim=1), dim=-1))


@wrong(LEAK, "shape")
class WrongAxis(MeanPool):
    def encode_texts(self, batch):
        return Texts(pooled=nn.functional.normalize(self.word_embedding(batch.words).mean(dim=2), dim=-1))


@wrong(LEAK, "stops with AttributeError")
class Forgets(MeanPool):
    def encode_texts(self, batch):
        self.word_embedding(batch.words).mean(dim=1)


@wrong(LEAK, "mean of the word vectors|captions of equal length")
class LargestWord(MeanPool):
    def encode_texts(self, batch):
        return Texts(pooled=nn.functional.normalize(self.word_embedding(batch.words).amax(dim=1), dim=-1))


@wrong(LEAK, "mean of the word vectors|captions of equal length")
class FirstWord(MeanPool):
    def encode_texts(self, batch):
        return Texts(pooled=nn.functional.normalize(self.word_embedding(batch.words)[:, 0], dim=-1))


wrong(LEAK, "stops with")(lambda *sizes: 3)


@right(MAX)
class FillsWithInfinity(MeanPool):
    def encode_images(self, batch):
        projected = self.region_proj(batch.regions).masked_fill(~batch.mask[..., None], -torch.inf)
        return Images(pooled=nn.functional.normalize(projected.amax(dim=1), dim=-1))


@right(MAX)
class LoopsOverImages(MeanPool):
    def encode_images(self, batch):
        rows = [self.region_proj(r)[m].max(dim=0)[0] for r, m in zip(batch.regions, batch.mask, strict=True)]
        return Images(pooled=torch.stack([row / row.norm() for row in rows]))


@right(MAX)
class FillsInPlace(MeanPool):
    def encode_images(self, batch):
        projected = self.region_proj(batch.regions)
        projected[~batch.mask] = -1e9
        return Images(pooled=nn.functional.normalize(projected.max(dim=1).values.double(), dim=-1).float())


wrong(MAX, "mean over the regions")(MeanPool)


@wrong(MAX, "mask excludes still count")
class ForgetsMask(MeanPool):
    def encode_images(self, batch):
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).amax(dim=1), dim=-1))


@wrong(MAX, "minus infinity|larger than a negative")
class FillsWithZero(MeanPool):
    def encode_images(self, batch):
        projected = self.region_proj(batch.regions) * batch.mask[..., None]
        return Images(pooled=nn.functional.normalize(projected.amax(dim=1), dim=-1))


@wrong(MAX, "unit norm")
class ForgetsNorm(MeanPool):
    def encode_images(self, batch):
        projected = self.region_proj(batch.regions).masked_fill(~batch.mask[..., None], -torch.inf)
        return Images(pooled=projected.amax(dim=1))


@wrong(MAX, "project first|before the linear")
class PoolsFeatures(MeanPool):
    def encode_images(self, batch):
        best = batch.regions.masked_fill(~batch.mask[..., None], -torch.inf).amax(dim=1)
        return Images(pooled=nn.functional.normalize(self.region_proj(best), dim=-1))


@wrong(MAX, "shape")
class WrongAxisOfMax(MeanPool):
    def encode_images(self, batch):
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).amax(dim=2), dim=-1))


@wrong(MAX, "stops with")
class HandsOverATuple(MeanPool):
    def encode_images(self, batch):
        return Images(pooled=nn.functional.normalize(self.region_proj(batch.regions).max(dim=1), dim=-1))


@wrong(MAX, "largest projected value|one region")
class Smallest(MeanPool):
    def encode_images(self, batch):
        projected = self.region_proj(batch.regions).masked_fill(~batch.mask[..., None], torch.inf)
        return Images(pooled=nn.functional.normalize(projected.amin(dim=1), dim=-1))


@wrong(MAX, "vectors of the captions")
class ChangesTexts(FillsWithInfinity):
    def encode_texts(self, batch):
        return Texts(pooled=nn.functional.normalize(self.word_embedding(batch.words).amax(dim=1), dim=-1))


@right(FOLDS)
def by_blocks(scores, folds):
    n, each = scores.shape[0] // folds, scores.shape[1] // scores.shape[0]
    recalls = []
    for f in range(folds):
        block = scores[f * n : (f + 1) * n, f * n * each : (f + 1) * n * each]
        recalls.append(np.mean(block.argmax(axis=0) == np.arange(n).repeat(each)))
    return 100 * np.mean(recalls)


@right(FOLDS)
def by_mask(scores, folds):
    images, captions = scores.shape
    fold = np.arange(images) // (images // folds)
    owner = np.arange(captions) // (captions // images)
    masked = np.where(fold[:, None] == fold[owner][None], scores, -np.inf)
    return np.float32(100 * (masked.argmax(axis=0) == owner).mean())


@right(FOLDS)
def by_reshape(scores, folds):
    images, captions = scores.shape
    x = torch.tensor(scores).view(folds, images // folds, folds, captions // folds)
    x = torch.stack([x[f, :, f] for f in range(folds)])
    right_image = torch.arange(images // folds).repeat_interleave(captions // images)
    return (x.argmax(dim=1) == right_image).float().mean() * 100


wrong(FOLDS, "its own images")(lambda scores, folds: by_blocks(scores, 1))
wrong(FOLDS, "first fold")(
    lambda scores, folds: by_blocks(scores[: len(scores) // folds, : scores.shape[1] // folds], 1)
)
wrong(FOLDS, "times as large")(lambda scores, folds: by_blocks(scores, folds) / 100)
wrong(FOLDS, "nothing returned")(lambda scores, folds: None)


@wrong(FOLDS, "rank images for each caption|image to text")
def ranks_captions(scores, folds):
    images, captions = scores.shape
    n, each, hits = images // folds, captions // images, []
    for f in range(folds):
        block = scores[f * n : (f + 1) * n, f * n * each : (f + 1) * n * each]
        hits.append(np.mean(block.argmax(axis=1) // each == np.arange(n)))
    return 100 * np.mean(hits)


@wrong(FOLDS, "captions of image n|captions each")
def one_caption_each(scores, folds):
    n, recalls = scores.shape[0] // folds, []
    for f in range(folds):
        block = scores[f * n : (f + 1) * n, f * n : (f + 1) * n]
        recalls.append(np.mean(block.argmax(axis=0) == np.arange(n)))
    return 100 * np.mean(recalls)


@wrong(FOLDS, "one value|values returned|shape|numbers")
def all_recalls(scores, folds):
    n, each = scores.shape[0] // folds, scores.shape[1] // scores.shape[0]
    return [
        100
        * np.mean(scores[f * n : (f + 1) * n, f * n * each : (f + 1) * n * each].argmax(0) == np.arange(n).repeat(each))
        for f in range(folds)
    ]


wrong(FOLDS, "times as large|you say")(lambda scores, folds: by_blocks(scores, folds) * folds)
wrong(FOLDS, "stops with")(lambda scores, folds: scores.reshape(folds, folds, -1).mean(dim=1))
wrong(FOLDS, "you say")(lambda scores, folds: by_blocks(-scores, folds))


def rates(hits, owner, draws):
    table = {image: hits[owner == image] for image in np.unique(owner)}
    return [100 * np.concatenate([table[image] for image in drawn]).mean() for drawn in draws]


@right(INTERVAL)
def by_concatenation(hits, owner, draws):
    return tuple(np.percentile(rates(hits, owner, draws), [2.5, 97.5]))


@right(INTERVAL)
def by_counts(hits, owner, draws):
    n = owner.max() + 1
    hit, size = np.bincount(owner, hits, n), np.bincount(owner, minlength=n)
    values = 100 * hit[draws].sum(axis=1) / size[draws].sum(axis=1)
    return list(np.quantile(values.astype(np.float32), (0.025, 0.975)))


@right(INTERVAL)
def by_torch(hits, owner, draws):
    drawn = torch.stack([torch.bincount(torch.tensor(d), minlength=int(owner.max()) + 1) for d in draws]).double()
    voice = drawn[:, torch.tensor(owner)]
    values = 100 * (voice * torch.tensor(hits)).sum(1) / voice.sum(1)
    return torch.quantile(values, torch.tensor([0.025, 0.975]).double())


wrong(INTERVAL, "times as large|percentages")(lambda h, o, d: tuple(x / 100 for x in by_concatenation(h, o, d)))
wrong(INTERVAL, "one value returned|expected 2")(lambda h, o, d: float(np.mean(rates(h, o, d))))
wrong(INTERVAL, "smallest and the largest")(lambda h, o, d: (min(rates(h, o, d)), max(rates(h, o, d))))
wrong(INTERVAL, "2.5")(lambda h, o, d: tuple(np.percentile(rates(h, o, d), [5, 95])))
wrong(INTERVAL, "counts twice|brings its captions twice")(
    lambda h, o, d: tuple(np.percentile([100 * h[np.isin(o, x)].mean() for x in d], [2.5, 97.5]))
)
wrong(INTERVAL, "value 1 of 2|value 2 of 2")(lambda h, o, d: tuple(np.percentile(rates(h, o, d), [97.5, 2.5])))
wrong(INTERVAL, "one voice|each caption counts alike")(
    lambda h, o, d: tuple(np.percentile([100 * np.mean([h[o == i].mean() for i in x]) for x in d], [2.5, 97.5]))
)
wrong(INTERVAL, "nothing returned")(lambda h, o, d: ...)


@wrong(INTERVAL, "forty draws|2.5th")
def normal_interval(hits, owner, draws):
    values = rates(hits, owner, draws)
    return np.mean(values) - 1.96 * np.std(values), np.mean(values) + 1.96 * np.std(values)


@wrong(INTERVAL, "images? .*twice|draw|you say")
def draws_captions(hits, owner, draws):
    values = [100 * hits[drawn].mean() for drawn in draws]
    return tuple(np.percentile(values, [2.5, 97.5]))


@wrong(INTERVAL, "any order|owner says")
def assumes_order(hits, owner, draws):
    counts = np.bincount(owner)
    ends = counts.cumsum()
    values = [100 * np.concatenate([hits[ends[i] - counts[i] : ends[i]] for i in x]).mean() for x in draws]
    return tuple(np.percentile(values, [2.5, 97.5]))
