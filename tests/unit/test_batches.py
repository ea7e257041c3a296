"""Batches: what is in them, in which order they come, and that worker processes can make them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from itm_utils.data.batches import PairDataset, ResumableBatches, WordCaptions, image_batch, pair_loader
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, Images, PairBatch, Scores, TensorBatch, Texts


def test_a_pair_is_a_caption_with_its_image(toy_pairs: PairDataset, toy_vocabulary: Vocabulary) -> None:
    batch = toy_pairs[[7, 0, 199]]
    split = toy_pairs.split
    assert batch.images.ids.tolist() == [1, 0, 39]
    assert batch.texts.ids.tolist() == [7, 0, 199]
    np.testing.assert_array_equal(batch.images.regions.numpy(), split.regions(np.array([1, 0, 39])))
    for row, caption in enumerate((7, 0, 199)):
        ids = toy_vocabulary.encode(split.captions[caption])
        length = int(batch.texts.lengths[row])
        assert batch.texts.words[row, :length].tolist() == ids.tolist()
        assert not batch.texts.words[row, length:].any()
    assert batch.images.boxes.shape == (3, 6, 4)
    assert batch.images.sizes.tolist() == [[96, 96]] * 3


def test_special_tokens_and_spans_point_at_the_text(toy_pairs: PairDataset) -> None:
    batch = toy_pairs.texts.batch(np.array([3, 4]), spans=True)
    assert batch.special.sum(dim=1).tolist() == [2, 2]
    assert not (batch.special & ~batch.mask).any()
    caption = toy_pairs.split.captions[3]
    words = [caption[a:b] for a, b in batch.spans[0].tolist() if b]
    assert words == caption.replace(".", " .").split()


def test_words_are_padded_behind_every_caption(toy_pairs: PairDataset, toy_vocabulary: Vocabulary) -> None:
    captions = [7, 0, 7, toy_pairs.split.n_captions - 1]
    batch = toy_pairs.texts.batch(np.array(captions))
    expected = [toy_vocabulary.encode(toy_pairs.split.captions[c]).tolist() for c in captions]
    width = max(len(ids) for ids in expected)
    assert batch.words.tolist() == [ids + [0] * (width - len(ids)) for ids in expected]
    assert batch.special.sum(dim=1).tolist() == [2] * len(captions)
    assert batch.lengths.tolist() == [len(ids) for ids in expected]


def test_batches_can_be_sliced_moved_and_joined(toy_pairs: PairDataset) -> None:
    batch = toy_pairs[[0, 1, 2, 3]]
    assert batch[1:3].texts.ids.tolist() == [1, 2]
    assert batch.to("meta").images.regions.device.type == "meta"
    images = ImageBatch.cat([batch.images[:1], batch.images[1:]])
    assert torch.equal(images.regions, batch.images.regions)
    narrow = Texts(local=torch.ones(1, 2, 3), mask=torch.ones(1, 2, dtype=torch.bool))
    wide = Texts(local=torch.ones(2, 4, 3), mask=torch.ones(2, 4, dtype=torch.bool))
    joined = Texts.cat([narrow, wide])
    assert joined.local.shape == (3, 4, 3)
    assert joined.mask.sum(dim=1).tolist() == [2, 4, 4]


def test_nested_batches_and_scores_are_joined_whole(toy_pairs: PairDataset) -> None:
    batch = toy_pairs[[0, 1, 2, 3]]
    joined = PairBatch.cat([batch[:2], batch[2:]])
    assert len(joined) == 4
    assert torch.equal(joined.images.regions, batch.images.regions)
    assert not Scores.cat([Scores.same(torch.ones(2, 3)), Scores.same(torch.zeros(1, 3))]).decoupled


def test_scores_keep_knowing_whether_they_are_decoupled() -> None:
    same, apart = Scores.same(torch.ones(2, 3)), Scores(torch.ones(2, 3), torch.zeros(2, 3))
    assert not same[:1].decoupled
    assert apart.to("cpu").decoupled


def test_empty_things_have_no_length() -> None:
    with pytest.raises(ItmError, match="no tensor"):
        len(Images())
    with pytest.raises(ItmError, match="empty list"):
        TensorBatch.cat([])


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = (ResumableBatches(100, 8, seed) for seed in (1, 1, 2))
    whole = list(first)
    torch.rand(5)
    assert list(again) == whole
    assert list(other) != whole
    drawn = [item for batch in whole for item in batch]
    assert len(drawn) == len(set(drawn)) == 96  # the last four wait for another epoch
    again.epoch = 1
    assert list(again) != whole
    first.first_batch = 5
    assert list(first) == whole[5:]


@pytest.mark.parametrize("size", [0, 101])
def test_impossible_batch_sizes(size: int) -> None:
    with pytest.raises(ItmError, match="batch_size"):
        ResumableBatches(100, size, 0)


@pytest.mark.slow
def test_workers_that_share_nothing_give_the_same_batches(toy_pairs: PairDataset) -> None:
    alone = list(pair_loader(toy_pairs, 50, seed=3))
    loader = pair_loader(toy_pairs, 50, seed=3, num_workers=2)
    loader.multiprocessing_context = "spawn"  # the start method of macOS and Windows, and of Linux since Python 3.14
    for mine, theirs in zip(alone, loader, strict=True):
        assert torch.equal(mine.images.regions, theirs.images.regions)
        assert torch.equal(mine.texts.words, theirs.texts.words)


def test_starting_an_epoch_leaves_the_global_generator_alone(toy_pairs: PairDataset) -> None:
    before = torch.get_rng_state()
    next(iter(pair_loader(toy_pairs, 10, seed=0)))
    assert torch.equal(before, torch.get_rng_state())


def test_datasets_without_boxes(tmp_path: Path, toy_train: PrecompSplit) -> None:
    np.save(tmp_path / "a_ims.npy", toy_train.regions(np.arange(3)))
    (tmp_path / "a_caps.txt").write_text("a dog\n" * 15)
    split = open_split(tmp_path, "a")
    batch = image_batch(split, np.array([2]))
    assert batch.boxes is None
    assert batch.sizes is None
    assert len(WordCaptions(split, Vocabulary.build(split.captions)).batch(np.array([0]))) == 1
