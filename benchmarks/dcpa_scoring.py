"""DCPA's stage two as its cases measure it: as MMCA's, with a feed-forward width of 2,048; random features."""

from __future__ import annotations

import torch

from benchmarks.mmca_scoring import HEADS, IMAGE_DIM, TOKEN_DIM, WIDTH, random_batches
from itm_utils.matcher import Encoded, ImageBatch, Images, TextBatch, Texts
from itm_utils.models.dcpa import InterPAM

__all__ = ["matcher", "projected", "random_batches", "unit_norm"]

INNER = 2048


def matcher() -> InterPAM:
    torch.manual_seed(0)
    return InterPAM(IMAGE_DIM, TOKEN_DIM, WIDTH, HEADS, INNER).eval()


def projected(model: InterPAM, images: ImageBatch, texts: TextBatch) -> tuple[Images, Texts]:
    """Regions and words of width 256, where both versions start."""
    with torch.inference_mode():
        regions, words = model.region_proj(images.regions), model.token_proj(texts.features)
    return Images(regions, images.mask), Texts(words, texts.mask)


def unit_norm(side: Encoded) -> Encoded:
    return Encoded(torch.nn.functional.normalize(side.local, dim=-1), side.mask)
