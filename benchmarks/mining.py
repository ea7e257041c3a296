"""Data for the mining cases: vectors of images and captions in mapped files, and the cheapest matcher there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from itm_utils.data.precomp import load_array
from itm_utils.matcher import ImageBatch, Images, Matcher, Scores, TextBatch, Texts

WIDTH, PER_IMAGE, SCENES = 1024, 5, 1000


class OneProduct(Matcher):
    """The cheapest matcher there is: vectors are given, a score is their product."""

    def encode_images(self, batch: ImageBatch) -> Images:
        return Images(pooled=batch.regions[:, 0])

    def encode_texts(self, batch: TextBatch) -> Texts:
        return Texts(pooled=batch.features[:, 0])

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(images.pooled @ texts.pooled.T)


class Vectors:
    """Captions that are vectors already, in a mapped file."""

    def __init__(self, path: Path) -> None:
        self.vectors = load_array(path, mmap_mode="r")
        self.lengths = np.ones(len(self.vectors), dtype=np.int64)

    def batch(self, captions: np.ndarray) -> TextBatch:
        features = torch.from_numpy(self.vectors[captions])[:, None]
        return TextBatch(
            torch.ones(len(captions), dtype=torch.int64),
            torch.from_numpy(captions),
            features=features,
        )


def write_data(root: Path, images: int) -> None:
    """Pictures of some scenes, and captions near their pictures; neighbours in the file have nothing in common."""
    rng = torch.Generator().manual_seed(0)
    scenes = torch.randn(SCENES, WIDTH, generator=rng)
    captions = np.lib.format.open_memmap(root / "vectors.npy", "w+", np.float32, (images * PER_IMAGE, WIDTH))
    pictures = np.lib.format.open_memmap(root / "train_ims.npy", "w+", np.float32, (images, WIDTH))
    for first in range(0, images, 1000):
        some = pictures[first : first + 1000]
        shown = torch.randint(SCENES, (len(some),), generator=rng)
        vectors = nn.functional.normalize(scenes[shown] + 1.5 * torch.randn(len(some), WIDTH, generator=rng), dim=1)
        some[:] = vectors.numpy()
        said = vectors.repeat_interleave(PER_IMAGE, dim=0)
        said = said + 1.5 * WIDTH**-0.5 * torch.randn(said.shape, generator=rng)
        captions[first * PER_IMAGE : (first + len(some)) * PER_IMAGE] = nn.functional.normalize(said, dim=1).numpy()
    (root / "train_caps.txt").write_text("a caption\n" * images * PER_IMAGE)
