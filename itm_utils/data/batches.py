"""From a split on disk to batches of tensors. Importable, so that worker processes can use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from itm_utils.data.offline import Drawn, OfflineLists, draw_offline
from itm_utils.data.phrases import NOT_A_PHRASE, Grounding, phrase_of_words
from itm_utils.data.precomp import PrecompSplit
from itm_utils.data.vocabulary import Vocabulary, token_spans
from itm_utils.digests import digest_of
from itm_utils.distributed import share
from itm_utils.errors import input_error
from itm_utils.matcher import ABSENT, ImageBatch, OfflineNegatives, PairBatch, TextBatch


class WordCaptions:
    """All captions of a split as word ids in one flat array: tokenised once, sent to workers cheaply."""

    def __init__(self, split: PrecompSplit, vocabulary: Vocabulary) -> None:
        encoded = [vocabulary.encode(caption) for caption in split.captions]
        self.lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.ids = np.concatenate(encoded)
        self.captions = split.captions
        self.fingerprint = vocabulary.fingerprint
        self.phrases: np.ndarray | None = None

    def add_phrases(self, grounding: Grounding) -> None:
        """Batches say from now on which tokens belong to one phrase: ``TextBatch.phrases``."""
        found = []
        for caption, phrases in zip(self.captions, grounding.phrases, strict=True):
            words = phrase_of_words(np.array(token_spans(caption)).reshape(-1, 2), phrases)
            found += [[NOT_A_PHRASE], words, [NOT_A_PHRASE]]  # between the start and the end token
        self.phrases = np.concatenate(found)
        self.fingerprint = digest_of([self.fingerprint, grounding.fingerprint])

    def batch(self, captions: np.ndarray, spans: bool = False) -> TextBatch:
        """Word ids padded to the longest caption asked for; with ``spans`` also the characters they cover."""
        captions = np.asarray(captions, dtype=np.int64)
        lengths = self.lengths[captions]
        places = np.arange(lengths.max())
        real = places < lengths[:, None]
        words = np.zeros(real.shape, dtype=np.int64)
        words[real] = self.ids[(self.starts[captions, None] + places)[real]]
        special = (places == 0) | (places == lengths[:, None] - 1)
        return TextBatch(
            lengths=torch.from_numpy(lengths),
            ids=torch.from_numpy(captions),
            words=torch.from_numpy(words),
            special=torch.from_numpy(special & real),
            spans=self._spans(captions, len(places)) if spans else ABSENT,
            phrases=ABSENT if self.phrases is None else self._phrases(self.phrases, captions, places, real),
        )

    def _phrases(self, phrases: np.ndarray, captions: np.ndarray, places: np.ndarray, real: np.ndarray) -> torch.Tensor:
        """(c, w) number of each token's phrase, -1 for none and at padding."""
        found = np.full(real.shape, NOT_A_PHRASE)
        found[real] = phrases[(self.starts[captions, None] + places)[real]]
        return torch.from_numpy(found)

    def _spans(self, captions: np.ndarray, width: int) -> torch.Tensor:
        """(c, w, 2) first and one-past-last character of each word; zeros at start, end and padding."""
        covered = torch.zeros((len(captions), width, 2), dtype=torch.int64)
        for row, caption in enumerate(captions):
            length = self.lengths[caption]
            covered[row, 1 : length - 1] = torch.tensor(token_spans(self.captions[caption])).reshape(-1, 2)
        return covered


def image_batch(split: PrecompSplit, images: np.ndarray) -> ImageBatch:
    """Features, boxes and sizes of the given images."""
    regions = torch.from_numpy(split.regions(images))
    boxes = split.region_boxes(images)
    return ImageBatch(
        regions=regions,
        mask=torch.ones(regions.shape[:2], dtype=torch.bool),
        lengths=torch.full((len(regions),), regions.shape[1]),
        ids=torch.from_numpy(np.asarray(images, dtype=np.int64)),
        boxes=ABSENT if boxes is None else torch.from_numpy(boxes),
        sizes=ABSENT if split.sizes is None else torch.from_numpy(np.asarray(split.sizes)[images]),
    )


class PairDataset(Dataset):
    """Item c is caption c with its image: one epoch sees every caption once, as in the public code.

    Captions come from :class:`WordCaptions` or anything else with ``batch(captions) -> TextBatch``.
    part: which share of every batch is loaded, and of how many; of several processes each loads one.
    """

    part = (0, 1)

    def __init__(self, split: PrecompSplit, texts: WordCaptions) -> None:
        self.split = split
        self.texts = texts

    def __len__(self) -> int:
        return self.split.n_captions

    def __getitem__(self, captions: int | list[int] | np.ndarray) -> PairBatch:
        """A whole batch at once: rows are read together, and padded once."""
        rows = np.atleast_1d(captions)
        rows = rows[share(len(rows), *self.part)]
        return self.pairs(self.split.owner[rows], rows)

    def __getitems__(self, captions: list[int]) -> PairBatch:
        """The name under which a DataLoader asks for a whole batch."""
        return self[captions]

    def pairs(self, images: np.ndarray, captions: np.ndarray) -> PairBatch:
        """Image b beside caption b, whether they match or not."""
        return PairBatch(images=image_batch(self.split, images), texts=self.texts.batch(captions))

    def identity(self) -> dict[str, Any]:
        """What must not change while a model trains on it; checkpoints remember it."""
        facts = {"dataset": self.split.identity()["fingerprint"], "captions": len(self)}
        return facts | {"texts": self.texts.fingerprint}


class OfflinePairs(PairDataset):
    """Pairs with negatives from lists that :func:`itm_utils.mining.mine` made: ``batch.offline`` holds them.

    What is drawn for a batch depends on the seed and its captions alone. Workers need no state, a resumed run draws
    what it would have drawn, and another epoch draws anew, because its batches are others.
    texts_per_image, images_per_text: use only the first so many entries of each list; 0 for all.
    derived: also load the positives of what is drawn, of which a loss may derive pairs; a third of all features.
    warmup_epochs: epochs in which the loss uses no offline negatives: none are loaded.
    """

    def __init__(
        self,
        split: PrecompSplit,
        texts: WordCaptions,
        lists: OfflineLists,
        seed: int,
        sampling: str = "uniform",
        texts_per_image: int = 0,
        images_per_text: int = 0,
        derived: bool = True,
        warmup_epochs: int = 0,
    ) -> None:
        super().__init__(split, texts)
        self.lists, self.seed, self.sampling, self.derived = lists, seed, sampling, derived
        self.warmup_epochs, self.epoch = warmup_epochs, warmup_epochs
        self.lengths = texts_per_image or None, images_per_text or None
        lists.check(split)
        self.draw(np.arange(1))  # settings with which nothing can be drawn are an error now, not in training

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0, before its workers start."""
        self.epoch = epoch

    def __getitem__(self, captions: int | list[int] | np.ndarray) -> PairBatch:
        if self.epoch < self.warmup_epochs:
            return super().__getitem__(captions)
        captions = np.atleast_1d(captions)
        own = share(len(captions), *self.part)
        drawn = Drawn(*(numbers[own] for numbers in self.draw(captions)))  # drawn for the whole batch, whoever loads it
        first = self.pairs(drawn.images, drawn.texts)
        second = self.pairs(drawn.text_images, drawn.image_texts) if self.derived else ABSENT
        return replace(super().__getitem__(captions), offline=OfflineNegatives(first, second))

    def draw(self, captions: np.ndarray) -> Drawn:
        """The negatives of a batch, as numbers."""
        generator = np.random.default_rng([self.seed, *captions.tolist()])
        return draw_offline(self.lists, self.split.owner, captions, generator, self.sampling, *self.lengths)

    def identity(self) -> dict[str, Any]:
        """What must not change: the pairs, the lists, and how they are drawn from."""
        texts, images = self.lengths
        drawing = {"seed": self.seed, "sampling": self.sampling, "texts_per_image": texts, "images_per_text": images}
        return super().identity() | {"offline": {"lists": self.lists.fingerprint} | drawing}


class ResumableBatches(Sampler[list[int]]):
    """Shuffled batches whose order depends on seed and epoch alone, and that can start in the middle.

    A sampler that draws from the global generator cannot be continued: this one needs no state but ``epoch``
    and ``first_batch``.
    """

    def __init__(self, items: int, batch_size: int, seed: int, drop_last: bool = True) -> None:
        if not 1 <= batch_size <= items:
            raise input_error("batch_size", str(batch_size), f"1 to {items}, the number of training captions")
        self.items, self.batch_size, self.seed, self.drop_last = items, batch_size, seed, drop_last
        self.epoch = 0
        self.first_batch = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.items // self.batch_size if self.drop_last else -(-self.items // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # [seed, epoch] is hashed by SeedSequence: neighbouring seeds and epochs give unrelated orders.
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.items)
        for batch in range(self.first_batch, len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


def _as_is(batch: PairBatch) -> PairBatch:
    """The dataset already made a batch. (A function with a name: worker processes must be able to import it.)"""
    return batch


def pair_loader(
    dataset: PairDataset, batch_size: int, seed: int, num_workers: int = 0, pin: bool = False
) -> DataLoader:
    """Training batches. ``loader.batch_sampler`` carries the position, see :class:`ResumableBatches`."""
    return DataLoader(
        dataset,
        batch_sampler=ResumableBatches(len(dataset), batch_size, seed),
        collate_fn=_as_is,  # pyright: ignore[reportArgumentType] - a batch of __getitems__, not a list of items
        num_workers=num_workers,
        pin_memory=pin,
        # A generator of its own: else starting an epoch would draw from the model's dropout noise.
        generator=torch.Generator().manual_seed(seed),
    )
