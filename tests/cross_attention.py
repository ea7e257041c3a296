"""What the tests of models with cross-attention share: ragged sides, small batches, a kernel against its definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from itm_utils.matcher import ImageBatch, Images, Matcher, TextBatch, Texts, length_mask

REGIONS, WORDS = (4, 2, 1), (1, 6, 3, 3, 5)
IMAGE_DIM, VOCABULARY, WIDTH = 7, 12, 6
# The settings of one training, as the parameters of a chapter have them.
TRAINING = {
    "epochs": 4, "batch_size": 8, "learning_rate": 0.01, "seed": 1, "device": "cpu", "precision": "fp32", "num_workers": 0,
    "schedule": "paper", "decay_every": 3, "margin": 0.3, "warmup_epochs": 2,
}  # fmt: skip


def ragged(regions: Sequence[int] = REGIONS, words: Sequence[int] = WORDS) -> tuple[Images, Texts]:
    """Encoded images and captions of different sizes, in double precision; what lies under the padding is not zero."""
    rng = torch.Generator().manual_seed(0)
    sides = []
    for sizes in (regions, words):
        vectors = torch.randn(len(sizes), max(sizes), WIDTH, generator=rng, dtype=torch.float64)
        sides.append((vectors, length_mask(torch.tensor(sizes), max(sizes))))
    (v, region_mask), (e, word_mask) = sides
    return Images(local=v, mask=region_mask), Texts(local=e, mask=word_mask)


def images_of(count: int, regions: int = 4) -> ImageBatch:
    features = torch.randn(count, regions, IMAGE_DIM, generator=torch.Generator().manual_seed(3))
    return ImageBatch(regions=features, mask=torch.ones(count, regions, dtype=torch.bool), ids=torch.arange(count))


def texts_of(lengths: Sequence[int], seed: int = 0) -> TextBatch:
    """Captions of these lengths, zero under the padding."""
    generator, sizes = torch.Generator().manual_seed(seed), torch.tensor(lengths)
    words = torch.randint(4, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    return TextBatch(lengths=sizes, ids=torch.arange(len(lengths)), words=words * length_mask(sizes, max(lengths)))


def check_definition(
    matcher: Matcher, one_pair: Callable[[Tensor, Tensor], Tensor], sides: tuple[Images, Texts]
) -> None:
    """All pairs score as ``one_pair`` of regions (r, d) and words (w, d) without padding does, gradients included."""
    images, texts = sides
    rows, columns = range(len(images)), range(len(texts))
    spread = torch.randn(len(rows), len(columns), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for way in ("kernel", "definition"):
        v, e = images.local.clone().requires_grad_(), texts.local.clone().requires_grad_()
        if way == "kernel":
            scores = matcher.score(Images(local=v, mask=images.mask), Texts(local=e, mask=texts.mask)).i2t
        else:
            pairs = [[one_pair(v[i][images.mask[i]], e[c][texts.mask[c]]) for c in columns] for i in rows]
            scores = torch.stack([torch.stack(row) for row in pairs])
        (scores * spread).sum().backward()
        found.append((scores.detach(), v.grad, e.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
