"""What the contract is checked on: every exported matcher in each of its variants, and small batches with ragged masks.

A new model is found by itself. A new option of a model belongs into VARIANTS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from small_models import TOKEN_DIM, exported, small, whole_matchers
from torch import Tensor

from itm_utils.matcher import (
    ImageBatch,
    Images,
    Matcher,
    OfflineNegatives,
    PairBatch,
    TextBatch,
    Texts,
    length_mask,
)
from itm_utils.models.bfan import FOCALS
from itm_utils.models.mmca import BLOCKS, PARTS
from itm_utils.models.pfan import POSITIONS
from itm_utils.models.scan import FIRST_NORMS, POOLINGS
from itm_utils.models.vsepp import HingeTriplet

IMAGE_DIM = 24
VOCABULARY = 30
REGIONS, WORDS = (4, 2, 6, 1, 5), (3, 7, 1, 5, 4)  # real ones of each image and of each caption


def options(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination of the given values."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


DIRECTIONS = ("t2i", "i2t")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "VSEPP": options(measure=("cosine", "order"), image_norm=(True, False), absolute=(False, True)),
    "SCAN": [
        *options(direction=DIRECTIONS, first_norm=FIRST_NORMS),
        *options(direction=DIRECTIONS, pooling=[name for name in POOLINGS if name != "LogSumExp"]),
    ],
    "BFAN": options(focal=FOCALS),
    "PFAN": options(direction=DIRECTIONS, position=POSITIONS),
    "VSRN": options(architecture=("coco", "f30k"), norm_axis=("width", "regions")),
    "SGRAF": options(head=("SAF", "SGR")),
    "MMCA": [*options(blocks=BLOCKS, parts=PARTS), *options(channels=(16,), full_windows=(False, True))],
    "IntraPAM": options(similarity=("local", "global"), text_backbone=("bert", "gru")),
    "InterPAM": options(similarity=("local", "global"), decoupled=(True, False), special_tokens=(True, False)),
    "DCPA": [
        {},
        {"intra": {"similarity": "global"}},
        {"inter": {"similarity": "global"}},
        {"inter": {"decoupled": False}},
    ],
}


@dataclass
class Case:
    """A matcher and the arguments of one of its variants."""

    matcher: type[Matcher]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        chosen = ",".join(f"{value}" for value in self.options.values())
        return f"{self.matcher.__name__}[{chosen}]" if chosen else self.matcher.__name__

    def build(self) -> Matcher:
        """In double precision, so that rounding hides nothing; the same weights on every call."""
        torch.manual_seed(0)
        model = small(self.matcher, VOCABULARY, IMAGE_DIM, **self.options).double()
        for parameter in model.parameters():  # what starts at zero would hide what it multiplies
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model.eval()


MATCHERS = whole_matchers()
DEFAULTS = [Case(matcher) for matcher in MATCHERS]
CASES = [Case(matcher, chosen) for matcher in MATCHERS for chosen in VARIANTS.get(matcher.__name__, [{}])]
OBJECTIVES = [
    value
    for value in exported()
    if inspect.isclass(value) and not issubclass(value, Matcher) and "__call__" in vars(value)
    if not getattr(value, "_is_protocol", False)
]


def made(objective: type) -> Callable:
    """An objective with its defaults; one that adds to another is given the first of the book."""
    return objective(HingeTriplet()) if "ranking_loss" in inspect.signature(objective).parameters else objective()


# ---------------------------------------------------------------- batches


def image_batch(regions: Iterable[int] = REGIONS, more: int = 0, fill: float = 0.0, seed: int = 1) -> ImageBatch:
    """Images with the given numbers of regions. more: columns of padding, fill: what stands under the mask."""
    counts = torch.tensor(list(regions))
    wide = int(counts.max())
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(len(counts), wide, IMAGE_DIM, generator=rng, dtype=torch.float64)
    corners = 60 * torch.rand(len(counts), wide, 2, generator=rng, dtype=torch.float64)
    mask = length_mask(counts, wide + more)
    features = _padded(features, more).masked_fill(~mask[..., None], fill)
    boxes = _padded(torch.cat([corners, corners + 30], dim=2), more).masked_fill(~mask[..., None], 0.0)
    sizes = torch.full((len(counts), 2), 96)
    return ImageBatch(features, mask, torch.arange(len(counts)), boxes, sizes, lengths=counts)


def text_batch(lengths: Iterable[int] = WORDS, more: int = 0, fill: float = 0.0, seed: int = 2) -> TextBatch:
    """Captions of the given lengths, as word ids and as token states at once: every matcher finds what it reads."""
    counts = torch.tensor(list(lengths))
    wide = int(counts.max())
    rng = torch.Generator().manual_seed(seed)
    words = torch.randint(4, VOCABULARY, (len(counts), wide), generator=rng)
    features = torch.randn(len(counts), wide, TOKEN_DIM, generator=rng, dtype=torch.float64)
    mask = length_mask(counts, wide + more)
    words = _padded(words, more).masked_fill(~mask, 5 if fill else 0)
    features = _padded(features, more).masked_fill(~mask[..., None], fill)
    special = torch.zeros_like(mask)
    return TextBatch(counts, torch.arange(len(counts)), words, features, special)


def _padded(values: Tensor, more: int) -> Tensor:
    return torch.cat([values, values.new_zeros(len(values), more, *values.shape[2:])], dim=1)


def pair_batch(count: int = 5, **more: Any) -> PairBatch:
    """Matched pairs, with offline negatives for the objectives that ask for them."""

    def pairs(seed: int) -> PairBatch:
        images = image_batch(REGIONS[:count], seed=seed, **more)
        texts = text_batch(WORDS[:count], seed=seed + 1, **more)
        ids = torch.arange(count) + 10 * seed
        return PairBatch(replace(images, ids=ids), replace(texts, ids=ids))

    return replace(pairs(1), offline=OfflineNegatives(pairs(3), pairs(5)))


def encode(model: Matcher, images: ImageBatch | None = None, texts: TextBatch | None = None) -> tuple[Images, Texts]:
    """Encode the given batches, or those of every test."""
    return (
        model.encode_images(image_batch() if images is None else images),
        model.encode_texts(text_batch() if texts is None else texts),
    )
