"""All image-caption scores of any matcher, in blocks, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from itm_utils.data.batches import image_batch
from itm_utils.data.precomp import PrecompSplit
from itm_utils.distributed import GatheredMatcher, in_turns
from itm_utils.errors import input_error
from itm_utils.matcher import Images, Matcher, Scores, TextBatch, Texts
from itm_utils.progress import bar

BUDGET = 512 * 2**20  # bytes of working memory for one block of pairs
BATCH = 128  # images or captions that go through an encoder at once
ROWS = 64  # images that a block has at least, if the budget allows it


class Captions(Protocol):
    """Where the captions of a split come from: word ids, or states of a frozen text encoder."""

    lengths: np.ndarray

    def batch(self, captions: np.ndarray, spans: bool = False) -> TextBatch: ...


@contextmanager
def evaluating(model: Matcher) -> Iterator[torch.device]:
    """Evaluation mode without gradients; afterwards, whatever happens, the mode it was in. Yields the device."""
    was_training = model.training
    parameter = next(model.parameters(), None)
    model.eval()
    try:
        with torch.inference_mode():
            yield torch.device("cpu") if parameter is None else parameter.device
    finally:
        model.train(was_training)


def encode_images(model: Matcher, split: PrecompSplit) -> list[Images]:
    """Every image of a split through the encoder, in order, in blocks; several processes take turns."""
    with evaluating(model) as device:
        blocks = [np.arange(start, min(start + BATCH, split.n_images)) for start in range(0, split.n_images, BATCH)]
        encoded = in_turns(blocks, lambda index: model.encode_images(image_batch(split, index).to(device)))
        return list(bar(encoded, "encode images", "batch", total=len(blocks)))


def encode_split(model: Matcher, split: PrecompSplit, texts: Captions) -> tuple[Images, Texts]:
    """Every image and every caption through the encoders, joined. For whole splits of long captions this pads all
    to the longest one; :func:`score_split` does not."""
    with evaluating(model) as device:
        captions = [
            model.encode_texts(texts.batch(index).to(device)) for index in _chunks(split.n_captions, "captions")
        ]
        return Images.cat(encode_images(model, split)), Texts.cat(captions)


def score_split(model: Matcher, split: PrecompSplit, texts: Captions, budget: int = BUDGET) -> Scores:
    """(i, c) scores of a whole split, on the CPU.

    Images are encoded once and kept. Captions are encoded in order of length, a block at a time, scored against
    all images and forgotten: padding costs little, and memory does not grow with their number. Several processes
    that call it together take turns in the blocks, and all have the scores of one.
    """
    with evaluating(model) as device:
        images = encode_images(model, split)
        order = np.argsort(texts.lengths, kind="stable")
        blocks = [order[start : start + BATCH] for start in range(0, split.n_captions, BATCH)]

        def score_block(captions: np.ndarray) -> Scores:
            encoded = model.encode_texts(texts.batch(captions).to(device))
            return Scores.cat([score_all(model, block, encoded, budget, progress=False) for block in images])

        table = _Table(split.n_images, split.n_captions, "cpu")
        parts = bar(in_turns(blocks, score_block), "score", "block", total=len(blocks))
        for captions, part in zip(blocks, parts, strict=True):
            table.put(part, slice(None), torch.from_numpy(captions))
    return table.scores()


def score_all(
    model: Matcher,
    images: Images,
    texts: Texts,
    budget: int = BUDGET,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> Scores:
    """(i, c) scores of given encodings, on ``device``, computed block by block.

    Captions are visited in order of length and each block is cut to its longest one; a block never needs more than
    ``budget`` bytes by the model's own estimate. Of a matcher that several processes train, each scores its images.
    """
    if isinstance(model, GatheredMatcher):
        alone = model.model
        return model.shared(len(images), lambda own: score_all(alone, images[own], texts, budget, progress, device))
    with evaluating(model):
        order = _by_length(texts)
        rows, columns = block_shape(model, images, texts, budget)
        table = _Table(len(images), len(texts), device)
        starts = range(0, len(texts), columns)
        for column in bar(starts, "score", "block") if progress else starts:
            captions = order[column : column + columns]
            block = trim(texts[captions])
            for row in range(0, len(images), rows):
                table.put(model.score(images[row : row + rows], block), slice(row, row + rows), captions)
    return table.scores()


class _Table:
    """The full matrices, filled block by block; the second one only if the model is decoupled."""

    def __init__(self, images: int, captions: int, device: torch.device | str) -> None:
        self.i2t = torch.empty((images, captions), device=device)
        self.t2i = self.i2t

    def put(self, part: Scores, rows: slice, captions: torch.Tensor) -> None:
        captions = captions.to(self.i2t.device, non_blocking=True)  # indexing would wait for the copy
        self.i2t[rows, captions] = part.i2t.float().to(self.i2t.device)
        if part.decoupled:
            if self.t2i is self.i2t:
                self.t2i = torch.empty_like(self.i2t)
            self.t2i[rows, captions] = part.t2i.float().to(self.i2t.device)

    def scores(self) -> Scores:
        return Scores(i2t=self.i2t, t2i=self.t2i)


def block_shape(model: Matcher, images: Images, texts: Texts, budget: int) -> tuple[int, int]:
    """How many images and captions one block may have: nearly square, so that both sides are reused.

    Of expensive pairs a block has many images and few captions: those of a few lengths need little padding.
    budget: bytes; on a CPU the model's tile, if it has one and that is less.
    """
    cost = model.bytes_per_pair(images, texts)
    parameter = next(model.parameters(), None)
    if model.tile and parameter is not None and parameter.device.type == "cpu":
        budget = min(budget, max(model.tile, cost))
    pairs = budget // cost
    if pairs < 1:
        raise input_error("budget", f"{budget:,} bytes", f"at least {cost:,}, the cost of one pair")
    rows = min(len(images), max(int(pairs**0.5), min(pairs, ROWS)))
    columns = min(len(texts), max(1, pairs // rows))
    rows = min(len(images), max(1, pairs // columns))
    return rows, columns


def trim(texts: Texts) -> Texts:
    """Drop the positions after the last real word of the longest caption."""
    if texts.local is None or texts.lengths is None:
        return texts
    longest = max(1, int(texts.lengths.max()))
    shorter = {name: value[:, :longest] for name, value in texts.extra_local.items()}
    return replace(texts, local=texts.local[:, :longest], mask=texts.mask[:, :longest], extra_local=shorter)


def _by_length(texts: Texts) -> torch.Tensor:
    return torch.arange(len(texts)) if texts.lengths is None else torch.argsort(texts.lengths, stable=True)


def _chunks(items: int, what: str) -> Iterator[np.ndarray]:
    for start in bar(range(0, items, BATCH), f"encode {what}", "batch"):
        yield np.arange(start, min(start + BATCH, items))
