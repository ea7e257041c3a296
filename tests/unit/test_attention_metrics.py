"""Attention against boxes: by hand, against loops, and through whole matchers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import small, whole_matchers

from itm_lab.scenes import scenes_folder
from itm_lab.scenes.phrases import scenes_grounding
from itm_utils.data.batches import WordCaptions, image_batch
from itm_utils.data.phrases import Grounding, Phrase
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Attention, Images, Matcher, Texts
from itm_utils.metrics.attention import (
    NO_BOX,
    NO_REGION,
    NO_WORD,
    THRESHOLDS,
    AttentionQuality,
    attention_quality,
    check_split,
    collect_attention,
    common_phrases,
    relevant_regions,
)
from itm_utils.models.bfan import BFAN
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import VSEPP
from itm_utils.scoring import BATCH


def measure_attention(model, split, texts, grounding, thresholds=THRESHOLDS, iou=0.4, within="max", **more):
    """Collect and measure at once."""
    return collect_attention(model, split, texts, grounding, **more).quality(thresholds, iou, within)


# -- the slow version ------------------------------------------------------------------------------------------------


def slow_iou(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union else 0.0


def slow_word(weights, relevant, threshold: float) -> tuple[float, float, float]:
    attended = {r for r, weight in enumerate(weights) if weight > threshold}
    target = {r for r, yes in enumerate(relevant) if yes}
    precision = len(attended & target) / len(attended) if attended else 0.0
    recall = len(attended & target) / len(target)
    return precision, recall, 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def slow_quality(weights, phrase, relevant, thresholds, within: str):
    """(t, 3) means over phrases, and how many phrases were dropped; words are (weights, phrase number)."""
    means, kept = [], 0
    for threshold in thresholds:
        of_phrases = []
        for number, target in enumerate(relevant):
            words = [
                slow_word(w, target, threshold)
                for w, p in zip(weights, phrase, strict=True)
                if p == number and any(target)
            ]
            if words:
                pick = max if within == "max" else lambda values: sum(values) / len(values)
                of_phrases.append([pick([word[k] for word in words]) for k in range(3)])
        kept = len(of_phrases)
        means.append(np.mean(of_phrases, axis=0))
    return np.array(means), len(relevant) - kept


def means(quality: AttentionQuality) -> np.ndarray:
    return np.stack([quality.precision, quality.recall, quality.f1], axis=1)


# -- relevant regions ------------------------------------------------------------------------------------------------


def test_overlap_must_be_above_the_threshold() -> None:
    box = np.array([[0, 0, 10, 10]])
    regions = np.array(
        [[0, 0, 10, 4], [0, 0, 10, 4.01], [0, 0, 10, 10], [10, 0, 20, 10], [0, 0, 25, 10], [0, 0, 24, 10]]
    )
    np.testing.assert_array_equal(relevant_regions(regions, box), [False, True, True, False, False, True])
    np.testing.assert_array_equal(relevant_regions(regions, box, 0.3), [True, True, True, False, True, True])
    np.testing.assert_array_equal(relevant_regions(regions, box, 0.5), [False, False, True, False, False, False])


def test_no_extra_pixel_is_counted() -> None:
    # with one pixel more each way the overlap would be 3 * 3 / 6 * 3 = 0.5
    assert not relevant_regions(np.array([[0, 0, 5, 2]]), np.array([[0, 0, 2, 2]]), 0.4)[0]


def test_one_of_several_boxes_is_enough_and_none_is_not() -> None:
    regions = np.array([[0, 0, 4, 4], [20, 20, 24, 24], [0, 0, 24, 24]])
    boxes = np.array([[20, 20, 24, 25], [0, 0, 4, 5]])
    np.testing.assert_array_equal(relevant_regions(regions, boxes), [True, True, False])
    np.testing.assert_array_equal(relevant_regions(regions, boxes[:1]), [False, True, False])
    np.testing.assert_array_equal(relevant_regions(regions, np.zeros((0, 4))), [False] * 3)


def test_boxes_without_area_are_never_relevant_and_cause_no_warning() -> None:
    flat = np.array([[3, 3, 3, 9], [0, 0, 5, 5]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(relevant_regions(flat, flat[:1], 0.0), [False, False])


def test_random_boxes_as_the_loop_finds_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        corners = rng.uniform(0, 10, size=(15, 2))
        regions = np.concatenate([corners, corners + rng.uniform(0.5, 8, size=(15, 2))], axis=1).astype(np.float32)
        boxes = regions[:3] + rng.normal(scale=0.5, size=(3, 4))
        expected = [any(slow_iou(r, b) > 0.4 for b in boxes.tolist()) for r in regions.tolist()]
        np.testing.assert_array_equal(relevant_regions(regions, boxes), expected)


# -- the metrics -----------------------------------------------------------------------------------------------------


def test_three_words_by_hand() -> None:
    """Regions 0 and 1 are relevant to the phrase of the first two words, region 3 to that of the third."""
    weights = np.array([[0.7, 0.0, 0.2, 0.1], [0.1, 0.1, 0.0, 0.8], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 1.0]])
    relevant = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], dtype=bool)
    phrase = np.array([0, 0, 1, -1])
    best = attention_quality(weights, None, phrase, relevant, (0.0, 0.1, 0.25), "max")
    # word 0: A = {0, 2, 3}, {0, 2}, {0}; word 1: {0, 1, 3}, {3}, {3}; word 2: all, all, none
    np.testing.assert_allclose(best.values[0, :, 0], [2 / 3, 1 / 2, 1])
    np.testing.assert_allclose(best.values[0, :, 1], [1, 1 / 2, 1 / 2])
    np.testing.assert_allclose(best.values[0, :, 2], [4 / 5, 1 / 2, 2 / 3])
    np.testing.assert_allclose(best.values[1], [[1 / 4, 1, 2 / 5], [1 / 4, 1, 2 / 5], [0, 0, 0]])
    np.testing.assert_allclose(best.precision, [11 / 24, 3 / 8, 1 / 2])
    assert (best.phrases, best.dropped) == (2, 0)
    mean = attention_quality(weights, None, phrase, relevant, (0.0, 0.1, 0.25), "mean")
    np.testing.assert_allclose(mean.values[0, 0], [(1 / 3 + 2 / 3) / 2, (1 / 2 + 1) / 2, (2 / 5 + 4 / 5) / 2])
    np.testing.assert_allclose(mean.values[1], best.values[1])


def test_the_maximum_is_taken_for_each_measure() -> None:
    """One word is precise, the other complete: the phrase is both, and its F1 is not made of the two."""
    weights = np.array([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    relevant = np.array([[True, True, False, False]])
    values = attention_quality(weights, None, np.array([0, 0]), relevant, [0.0]).values[0, 0]
    np.testing.assert_allclose(values, [1, 1, 2 / 3])


def test_a_threshold_in_float32_is_strict_too() -> None:
    weights = np.full((1, 4), 0.25, dtype=np.float32)
    quality = attention_quality(weights, None, np.array([0]), np.eye(4, dtype=bool)[:1], [0.2499, 0.25])
    np.testing.assert_allclose(quality.recall, [1, 0])


def test_nan_is_not_attended() -> None:
    weights = np.array([[np.nan, 0.5]])
    quality = attention_quality(weights, None, np.array([0]), np.array([[True, False]]), [0.0])
    assert quality.values.tolist() == [[[0, 0, 0]]]


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    words, regions, phrases = 23, 9, 6
    weights = rng.dirichlet(np.full(regions, 0.3), size=words)
    weights[weights < 0.02] = 0
    weights[::7] = 0
    phrase = rng.integers(-1, phrases - 1, size=words)  # the last phrase has no word
    relevant = rng.random((phrases, regions)) < 0.25
    relevant[2] = False
    relevant[0, 0] = relevant[-1, 0] = True
    phrase[0] = 0
    if seed % 2:  # a phrase that has neither word nor region is dropped once
        phrase[phrase == 2] = -1
    return weights, phrase, relevant


@pytest.mark.parametrize("within", ["max", "mean"])
@pytest.mark.parametrize("seed", range(8))
def test_random_words_as_the_loops_measure_them(seed: int, within: str) -> None:
    weights, phrase, relevant = random_case(seed)
    quality = attention_quality(weights, None, phrase, relevant, THRESHOLDS, within)
    expected, dropped = slow_quality(weights, phrase, relevant, THRESHOLDS, within)
    np.testing.assert_allclose(means(quality), expected, atol=1e-12)
    assert quality.dropped == dropped
    assert quality.reasons[NO_WORD] >= 1
    assert quality.reasons[NO_REGION] == (~relevant.any(axis=1)).sum()
    assert quality.keys[:, 1].tolist() == sorted({p for p in phrase if p >= 0 and relevant[p].any()})
    assert (np.diff(quality.recall) <= 0).all()


def test_batches_and_tensors_are_the_same_words() -> None:
    weights, phrase, relevant = random_case(0)
    flat = attention_quality(weights[:20], None, phrase[:20], relevant)
    graph = torch.from_numpy(weights[:20]).view(4, 5, -1).requires_grad_()
    batch = attention_quality(
        graph, torch.ones(4, 5, dtype=torch.bool), torch.from_numpy(phrase[:20]).view(4, 5), relevant
    )
    np.testing.assert_array_equal(flat.values, batch.values)
    mask = np.arange(23) < 20
    np.testing.assert_array_equal(flat.values, attention_quality(weights, mask, phrase, relevant).values)
    assert attention_quality(weights[:1], None, phrase[:1], relevant[0]).phrases == 1


def test_best_threshold_phrases_and_pairs() -> None:
    weights, phrase, relevant = random_case(1)
    quality = attention_quality(weights, None, phrase, relevant)
    place = int(np.argmax(quality.f1))
    assert quality.best == (THRESHOLDS[place], quality.precision[place], quality.recall[place], quality.f1[place])
    assert quality.at(0.03)[1:] == (quality.precision[3], quality.recall[3], quality.f1[3])
    np.testing.assert_array_equal(quality.per_phrase()["recall"], quality.values[:, place, 1])
    np.testing.assert_array_equal(quality.per_phrase(0.1)["precision"], quality.values[:, 10, 0])
    with pytest.raises(ItmError, match=r"threshold: found 0\.035, expected one of 0, 0\.01"):
        quality.at(0.035)
    assert f"F1 {quality.best[3]:.3f}" in str(quality)
    assert f"{quality.phrases} phrases, {quality.dropped} dropped" in str(quality)
    fewer = replace(quality, values=quality.values[::-1][:3], keys=quality.keys[::-1][:3].copy())
    fewer.keys[0] = 99  # a phrase that only one of them measured
    ours, theirs = common_phrases(quality, fewer)
    np.testing.assert_array_equal(quality.values[ours], fewer.values[theirs])
    assert len(ours) == 2


def line(recall: list[float], precision: list[float]) -> AttentionQuality:
    values = np.stack([precision, recall, np.zeros(len(recall))], axis=1)[None]
    return AttentionQuality(np.arange(len(recall)) / 100, values, np.zeros((1, 2), dtype=np.int64), np.ones(1))


def test_area_under_the_curve() -> None:
    curve = line([1.0, 0.5, 0.5, 0.1], [0.2, 0.6, 0.4, 0.8])  # of the two points at recall 0.5 the upper counts
    assert curve.area(0.5, 1.0) == pytest.approx(0.5 * 0.4)
    assert curve.area(0.1, 0.5) == pytest.approx(0.4 * 0.7)
    assert curve.area(0.3, 0.75) == pytest.approx(0.2 * (0.7 + 0.6) / 2 + 0.25 * (0.6 + 0.4) / 2)
    for low, high in ((0.0, 0.5), (0.5, 1.01), (0.5, 0.5), (0.6, 0.5)):
        with pytest.raises(ItmError, match=r"0\.1000 to 1\.0000"):
            curve.area(low, high)


def test_invalid_arguments_are_refused() -> None:
    weights, phrase, relevant = random_case(0)
    with pytest.raises(ItmError, match="within: found 'median'"):
        attention_quality(weights, None, phrase, relevant, within="median")
    for thresholds in ([], [0.1, 0.0], [0.1, 0.1], [[0.1]]):
        with pytest.raises(ItmError, match="thresholds: found"):
            attention_quality(weights, None, phrase, relevant, thresholds)
    with pytest.raises(ItmError, match="phrase: found 23 words up to phrase 4, expected 22 words"):
        attention_quality(weights[:-1], None, phrase, relevant)
    with pytest.raises(ItmError, match="phrases 0 to 2"):
        attention_quality(weights, None, phrase, relevant[:3])
    with pytest.raises(ItmError, match="6 with no relevant region"):
        attention_quality(weights, None, phrase, np.zeros_like(relevant))


# -- whole matchers --------------------------------------------------------------------------------------------------


def toy_grounding(split: PrecompSplit) -> Grounding:
    """Each "a … thing" of a toy caption, with one or two boxes near its image's regions; every tenth has none."""
    rng, phrases = np.random.default_rng(3), []
    for caption, image in enumerate(split.owner):
        boxes, own, at = split.region_boxes(np.array([image]))[0], [], 0
        for number, text in enumerate(split.captions[caption].rstrip(".").split(" and ")):
            picked = boxes[rng.integers(len(boxes), size=rng.integers(1, 3))] + rng.normal(scale=4, size=4)
            empty = (caption + number) % 10 == 0
            own.append(Phrase(at, at + len(text), np.zeros((0, 4)) if empty else picked))
            at += len(text) + len(" and ")
        phrases.append(own)
    return Grounding(phrases)


def slow_measure(model: Matcher, split: PrecompSplit, texts, grounding: Grounding, iou: float, within: str):
    """One caption at a time; a token belongs to the phrase in which its first character stands."""
    weights, phrase, relevant = [], [], []
    for caption, phrases in enumerate(grounding.phrases):
        batch = texts.batch(np.array([caption]), spans=True)
        image = image_batch(split, split.owner[[caption]])
        with torch.no_grad():
            seen = model.attention(model.encode_images(image), model.encode_texts(batch))["t2i"].weights[0]
        for own in phrases:
            for token, (start, end) in enumerate(batch.spans[0].tolist()):
                if end > start and own.start <= start < own.end:
                    weights.append(seen[token].tolist())
                    phrase.append(len(relevant))
            relevant.append([any(slow_iou(r, b) > iou for b in own.boxes.tolist()) for r in image.boxes[0].tolist()])
    return slow_quality(weights, phrase, relevant, THRESHOLDS, within)


@pytest.fixture
def toy_texts(toy_train: PrecompSplit, toy_vocabulary: Vocabulary) -> WordCaptions:
    return WordCaptions(toy_train, toy_vocabulary)


@pytest.mark.parametrize(("kind", "within", "iou"), [(SCAN, "max", 0.4), (SCAN, "mean", 0.6), (BFAN, "max", 0.3)])
def test_a_matcher_is_measured_as_one_caption_at_a_time(
    kind, within: str, iou: float, toy_train: PrecompSplit, toy_texts: WordCaptions, toy_vocabulary: Vocabulary
) -> None:
    torch.manual_seed(0)
    model = small(kind, len(toy_vocabulary), toy_train.feature_dim).eval()
    split = toy_train.first(8)
    grounding = toy_grounding(split)
    expected, dropped = slow_measure(model, split, toy_texts, grounding, iou, within)
    for batch in (7, 128):  # seven: captions of one image in two batches, and a shorter last one
        quality = measure_attention(model, split, toy_texts, grounding, iou=iou, within=within, batch=batch)
        np.testing.assert_allclose(means(quality), expected, atol=1e-12)
        assert quality.dropped == dropped
        assert quality.reasons[NO_BOX] == sum(not len(p.boxes) for own in grounding.phrases for p in own) > 0
    assert quality.phrases + quality.dropped == sum(len(own) for own in grounding.phrases)
    caption, place = quality.keys[5]
    assert len(grounding.phrases[caption][place].boxes)
    assert (np.diff(quality.keys[:, 0]) >= 0).all()


class PerfectAttention(Matcher):
    """Words of phrases attend to exactly the relevant regions, by the characters of their spans; others uniformly."""

    def __init__(self, texts, grounding: Grounding, boxes: np.ndarray, right: bool = True) -> None:
        super().__init__()
        self.texts, self.grounding, self.boxes, self.right = texts, grounding, boxes, right
        self.largest = 0

    def encode_images(self, batch) -> Images:
        self.largest = max(self.largest, len(batch))
        return Images(local=batch.regions, mask=batch.mask, extra={"ids": batch.ids})

    def encode_texts(self, batch) -> Texts:
        self.largest = max(self.largest, len(batch))
        return Texts(local=torch.zeros(*batch.mask.shape, 1), mask=batch.mask, extra={"ids": batch.ids})

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        weights = torch.full((*texts.mask.shape, images.mask.shape[1]), 1.0 / images.mask.shape[1])
        for row, (image, caption) in enumerate(zip(images.extra["ids"], texts.extra["ids"], strict=True)):
            named = {c: p for p in self.grounding.phrases[caption] for c in range(p.start, p.end)}
            spans = self.texts.batch(np.array([int(caption)]), spans=True).spans[0].tolist()
            for token, (start, end) in enumerate(spans):
                if end > start and start in named:
                    right = torch.from_numpy(relevant_regions(self.boxes[image], named[start].boxes)).float()
                    right = right if self.right else 1 - right
                    weights[row, token] = right / right.sum().clamp_min(1)
        return {"t2i": Attention(weights, texts.local, images.local, texts.mask, images.mask)}


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_perfect_attention_on_scenes_has_perfect_metrics(kind: str) -> None:
    """Only if each token, a word or a piece of one, is given to its own phrase and image."""
    split, grounding = open_split(scenes_folder(), "dev").first(12), scenes_grounding("dev").first(60)
    texts = WordCaptions(split, Vocabulary.of_folder(split.root)) if kind == "words" else bert_captions(split)
    boxes = split.region_boxes(np.arange(12))
    for right, value in ((True, 1.0), (False, 0.0)):
        model = PerfectAttention(texts, grounding, boxes, right)
        for within in ("max", "mean"):
            quality = measure_attention(model, split, texts, grounding, [0.0], within=within, batch=17)
            np.testing.assert_array_equal(quality.values, np.full((quality.phrases, 1, 3), value))
        assert quality.phrases > 100
        assert model.largest == 17


def test_what_cannot_be_measured(toy_train: PrecompSplit, toy_texts: WordCaptions, toy_vocabulary: Vocabulary) -> None:
    grounding = toy_grounding(toy_train)
    size = len(toy_vocabulary), toy_train.feature_dim
    scan = small(SCAN, *size)

    def refuses(message: str, model: Matcher = scan, split: PrecompSplit = toy_train, known=grounding, **more) -> None:
        with pytest.raises(ItmError, match=message):
            measure_attention(model, split, toy_texts, known, **more)

    refuses(r"SCAN: found attention 't2i' \(the model offers i2t\)", SCAN(*size, width=8, direction="i2t"))
    refuses(r"VSEPP: found attention 't2i' \(the model offers none\)", small(VSEPP, *size))
    refuses("words that attend to regions", small(BFAN, *size), direction="i2t")
    refuses(r"train_boxes\.npy: found no such file", split=replace(toy_train, boxes=None))
    coded = replace(toy_train, boxes=SimpleNamespace(shape=(40, 6, 5)))
    refuses(r"train_boxes\.npy: found 5 numbers per region", split=coded)
    shares = replace(toy_train, boxes=SimpleNamespace(shape=(40, 6, 4), rows=lambda images: np.ones((8, 6, 4))))
    refuses(r"train_boxes\.npy: found shares of the sides.*Add train_sizes\.npy", split=replace(shares, sizes=None))
    check_split(shares, grounding)  # beside sizes they are read as pixels
    refuses("grounding: found phrases of 200 captions, expected 50", split=toy_train.first(10))
    refuses("within: found 'sum'", within="sum")
    refuses("thresholds: found", thresholds=[0.1, 0.05])
    far = [[Phrase(p.start, p.end, p.boxes + 1000) for p in own] for own in grounding.phrases]
    refuses(r"with no relevant region.* pixels of the same image", known=Grounding(far))
    refuses("none at all", known=Grounding([[] for _ in far]))


def test_weights_that_are_not_the_tokens_are_refused(toy_train: PrecompSplit, toy_texts: WordCaptions) -> None:
    class Trims(PerfectAttention):
        def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
            seen = super().attention(images, texts)["t2i"]
            return {"t2i": replace(seen, weights=seen.weights[:, 1:])}

    model = Trims(toy_texts, toy_grounding(toy_train), toy_train.region_boxes(np.arange(toy_train.n_images)))
    with pytest.raises(ItmError, match=r"Trims: found weights 't2i' of shape .*captions, tokens, regions"):
        measure_attention(model, toy_train, toy_texts, model.grounding)


def test_masked_regions_and_words_do_not_count(toy_train: PrecompSplit, toy_texts: WordCaptions) -> None:
    class Blind(PerfectAttention):
        """Region 0 and every second token are not there, whatever the weights say."""

        def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
            seen = super().attention(images, texts)["t2i"]
            regions, words = seen.key_mask.clone(), seen.query_mask.clone()
            regions[:, 0] = False
            words[:, 1::2] = False
            weights = seen.weights.clone()
            weights[:, :, 0] = 1
            weights[:, 1::2] = 1
            return {"t2i": replace(seen, weights=weights, key_mask=regions, query_mask=words)}

    grounding, boxes = toy_grounding(toy_train), toy_train.region_boxes(np.arange(toy_train.n_images))
    model = Blind(toy_texts, grounding, boxes)
    quality = measure_attention(model, toy_train, toy_texts, grounding, [0.0], within="mean")
    np.testing.assert_array_equal(quality.values, np.ones_like(quality.values))
    blind = sum(not relevant_regions(boxes[image][1:], p.boxes).any() for image, own in zip(toy_train.owner, grounding.phrases, strict=True) for p in own)  # fmt: skip
    assert quality.reasons[NO_BOX] + quality.reasons[NO_REGION] == blind


def test_every_matcher_whose_words_attend_can_be_measured(any_pairs, toy_vocabulary: Vocabulary) -> None:
    split, texts = any_pairs.split.first(6), any_pairs.texts
    grounding, measured = toy_grounding(split), []
    for matcher in whole_matchers():
        model = small(matcher, len(toy_vocabulary), split.feature_dim)
        try:
            quality = measure_attention(model, split, texts, grounding)
        except ItmError as error:
            assert "the model offers" in str(error), matcher.__name__
            continue
        measured.append(matcher.__name__)
        assert quality.recall[0] > 0
        assert model.training, "the mode it was in"
    assert {"SCAN", "BFAN", "SGRAF", "MMCA", "DCPA"} <= set(measured)


def test_all_measures_come_from_one_pass(
    toy_train: PrecompSplit, toy_texts: WordCaptions, toy_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = small(BFAN, len(toy_vocabulary), toy_train.feature_dim).eval()
    grounding, passes = toy_grounding(toy_train), []
    plain = model.attention
    monkeypatch.setattr(model, "attention", lambda *sides: passes.append(1) or plain(*sides))
    collected = collect_attention(model, toy_train, toy_texts, grounding)
    batches = len(passes)
    monkeypatch.setattr("itm_utils.metrics.attention.PHRASES_AT_ONCE", 7)  # in parts, as a large split is
    for iou, within, thresholds in ((0.3, "max", [0.0, 0.2]), (0.6, "mean", THRESHOLDS)):
        whole = measure_attention(model, toy_train, toy_texts, grounding, thresholds, iou, within, batch=13)
        passes.clear()
        found = collected.quality(thresholds, iou, within)
        assert not passes
        np.testing.assert_array_equal(found.keys, whole.keys)
        np.testing.assert_allclose(found.values, whole.values, atol=1e-12)
        assert found.reasons == whole.reasons and found.phrases > 7
    assert batches == -(-toy_train.n_captions // BATCH)


def test_chance_is_attending_to_every_region(toy_train: PrecompSplit, toy_texts: WordCaptions) -> None:
    class Everywhere(PerfectAttention):
        def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
            seen = super().attention(images, texts)["t2i"]
            regions = seen.key_mask.clone()
            regions[:, 0] = False  # not a region: it is no part of "every"
            return {"t2i": replace(seen, weights=torch.ones_like(seen.weights), key_mask=regions)}

    boxes = toy_train.region_boxes(np.arange(toy_train.n_images))
    quality = measure_attention(
        Everywhere(toy_texts, toy_grounding(toy_train), boxes), toy_train, toy_texts, toy_grounding(toy_train), [0.0]
    )
    assert quality.chance_f1 == pytest.approx(quality.best[3]) and 0 < quality.chance_f1 < 1
    assert f"every region: F1 {quality.chance_f1:.3f}" in str(quality)
    nothing = attention_quality(np.zeros((1, 4)), None, np.array([0]), np.eye(4, dtype=bool)[:1], [0.0])
    assert nothing.best[3] == 0 and nothing.chance_f1 == pytest.approx(2 * 1 / (4 + 1))
