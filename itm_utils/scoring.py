"""All image-caption scores of any matcher, in blocks, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from itm_utils.batches import WordCaptions, image_batch
from itm_utils.errors import problem
from itm_utils.matcher import Images, Matcher, Scores, Texts
from itm_utils.precomp import PrecompSplit
from itm_utils.progress import bar

BUDGET = 512 * 2**20  # bytes of working memory for one block of pairs


@torch.inference_mode()
def encode_split(
    model: Matcher, split: PrecompSplit, texts: WordCaptions, batch_size: int = 128
) -> tuple[Images, Texts]:
    """Every image and every caption of a split through the encoders, once each, in order."""
    device = _device(model)
    was_training = model.training
    model.eval()
    images = [
        model.encode_images(image_batch(split, index).to(device))
        for index in _chunks(split.n_images, batch_size, "encode images")
    ]
    captions = [
        model.encode_texts(texts.batch(index).to(device))
        for index in _chunks(split.n_captions, batch_size, "encode captions")
    ]
    model.train(was_training)
    return Images.cat(images), Texts.cat(captions)


@torch.inference_mode()
def score_all(model: Matcher, images: Images, texts: Texts, budget: int = BUDGET) -> Scores:
    """(i, c) scores of all pairs on the CPU, computed block by block.

    Captions are visited in order of length and each block is cut to its longest one, so that padding costs
    little; a block never needs more than ``budget`` bytes by the model's own estimate.
    """
    was_training = model.training
    model.eval()
    order = _by_length(texts)
    rows, columns = block_shape(model, images, texts, budget)
    i2t = torch.empty((len(images), len(texts)))
    t2i = i2t
    blocks = [(r, c) for c in _starts(len(texts), columns) for r in _starts(len(images), rows)]
    for row, column in bar(blocks, "score", "block"):
        captions = order[column : column + columns]
        part = model.score(images[row : row + rows], trim(texts[captions.to(_device(model))]))
        i2t[row : row + rows, captions] = part.i2t.float().cpu()
        if part.decoupled:
            if t2i is i2t:
                t2i = torch.empty_like(i2t)
            t2i[row : row + rows, captions] = part.t2i.float().cpu()
    model.train(was_training)
    return Scores(i2t=i2t, t2i=t2i)


def score_split(model: Matcher, split: PrecompSplit, texts: WordCaptions, budget: int = BUDGET) -> Scores:
    """Encode a split and score all its pairs."""
    return score_all(model, *encode_split(model, split, texts), budget=budget)


def block_shape(model: Matcher, images: Images, texts: Texts, budget: int) -> tuple[int, int]:
    """How many images and captions one block may have: nearly square, so that both sides are reused."""
    pairs = budget // model.bytes_per_pair(images, texts)
    if pairs < 1:
        raise problem(
            "budget",
            f"{budget:,} bytes",
            f"at least {model.bytes_per_pair(images, texts):,}, the cost of one pair",
        )
    rows = min(len(images), max(1, int(pairs**0.5)))
    columns = min(len(texts), max(1, pairs // rows))
    rows = min(len(images), max(1, pairs // columns))
    return rows, columns


def trim(texts: Texts) -> Texts:
    """Drop the positions that are padding for every caption of the block."""
    if texts.local is None or texts.mask is None:
        return texts
    width = texts.mask.shape[1]
    longest = max(1, int(texts.mask.sum(dim=1).max()))
    shorter = {
        name: value[:, :longest] if value.dim() > 1 and value.shape[1] == width else value
        for name, value in texts.extra.items()
    }
    return Texts(local=texts.local[:, :longest], mask=texts.mask[:, :longest], pooled=texts.pooled, extra=shorter)


def _by_length(texts: Texts) -> torch.Tensor:
    if texts.mask is None:
        return torch.arange(len(texts))
    return torch.argsort(texts.mask.sum(dim=1).cpu(), stable=True)


def _starts(items: int, size: int) -> range:
    return range(0, items, size)


def _chunks(items: int, size: int, what: str) -> Iterator[np.ndarray]:
    for start in bar(_starts(items, size), what, "batch"):
        yield np.arange(start, min(start + size, items))


def _device(model: Matcher) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
