"""MMCA as its cases measure it: 36 regions of width 2,048, tokens of width 768, width 256, 16 heads; random features."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks import harness
from benchmarks.harness import REGIONS
from itm_utils.matcher import ImageBatch, Images, TextBatch, Texts
from itm_utils.models.mmca import MMCA

IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS = 2048, 768, 256, 16


def matcher() -> MMCA:
    torch.manual_seed(0)
    return MMCA(IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS)


def random_batches(count: int, captions: int, seed: int) -> tuple[ImageBatch, TextBatch]:
    """Random features of unit variance. A caption has one token more than words: some word is cut into pieces."""
    rng = torch.Generator().manual_seed(seed)
    lengths = 1 + harness.sentence_lengths(captions, seed)
    encoded_images = harness.random_side(Images, np.full(count, REGIONS), rng, IMAGE_DIM)
    encoded_texts = harness.random_side(Texts, lengths, rng, TOKEN_DIM)
    images = ImageBatch(encoded_images.local * IMAGE_DIM**0.5, encoded_images.mask, torch.arange(count))
    texts = TextBatch(torch.from_numpy(lengths), torch.arange(captions), features=encoded_texts.local * TOKEN_DIM**0.5)
    return images, texts
