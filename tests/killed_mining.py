"""Mining for test_mining.py to kill, again and again, at the moments it is given.

usage: python killed_mining.py DATA FOLDER MOMENT …     (MOMENT: score:7, replace:2 or write_json:1,
the call at which to die)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from killing import die_at

from itm_utils import files, mining, scoring
from itm_utils.data import offline
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import ImageBatch, Images, Matcher, Scores, TextBatch, Texts

SETTINGS = {"texts_per_image": 20, "images_per_text": 6, "budget": 8192}  # three blocks of images, thirteen of captions


class Counting(Matcher):
    """Whole numbers throughout, so that no order of adding changes a score, and many scores are equal.

    kind: ``"product"`` of two vectors; ``"attention"``, every word with its best region; ``"decoupled"``, that for
    images and every region with its best word for captions.
    """

    def __init__(self, vocabulary_size: int, image_dim: int, kind: str = "product") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        table = torch.randint(-2, 3, (vocabulary_size, image_dim), generator=generator)
        self.table = torch.nn.Parameter(table.float())
        self.kind = kind

    def encode_images(self, batch: ImageBatch) -> Images:
        regions = batch.regions.round()
        return Images(pooled=regions.sum(dim=1)) if self.kind == "product" else Images(regions, batch.mask)

    def encode_texts(self, batch: TextBatch) -> Texts:
        words = self.table[batch.words] * batch.mask[..., None]
        return (
            Texts(pooled=words.sum(dim=1))
            if self.kind == "product"
            else Texts(words, batch.mask, lengths=batch.lengths)
        )

    def score(self, images: Images, texts: Texts) -> Scores:
        if self.kind == "product":
            return Scores.same(images.pooled @ texts.pooled.T)
        dots = torch.einsum("ird,cwd->icrw", images.local, texts.local)
        t2i = (dots.amax(dim=2) * texts.mask).sum(dim=2)
        if self.kind == "attention":
            return Scores.same(t2i)
        i2t = dots.masked_fill(~texts.mask[None, :, None, :], -1000).amax(dim=3).sum(dim=2)
        return Scores(i2t, t2i)


def open_toy(data: Path, kind: str = "product") -> tuple:
    split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
    return Counting(len(vocabulary), split.feature_dim, kind), split, WordCaptions(split, vocabulary)


def main(data: Path, folder: Path, moments: list[str]) -> None:
    torch.set_num_threads(1)
    scoring.BATCH, mining.BLOCK, mining.SAVE_EVERY = 16, 16, 0  # a checkpoint after every block
    mining.TILE = 1
    for moment in moments:
        if not (child := os.fork()):
            name, call = moment.split(":")
            die_at({"score": Counting, "replace": files.os, "write_json": offline}[name], name, int(call))
            mining.mine(*open_toy(data), folder, **SETTINGS)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (folder / mining.STATE).exists(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
