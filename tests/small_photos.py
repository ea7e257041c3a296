"""A small Flickr30K and a small COCO in the files of the real ones, and a book beside them that finds them as its own.

Features are 36 x 2,048 numbers an image, ids stand once for each caption, COCO has ``test`` and ``testall``, BERT has
the width, the heads and the files of BERT base. Only the numbers of images, words and layers are small.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from toy_dataset import COLOURS, SHAPES, write_entities, write_toy_dataset

ROOT = Path(__file__).resolve().parents[1]
TRAIN, DEV, TEST = 6, 5, 10  # few to learn from: an image through VSRN, forth and back, is 20 billion operations
FIRST_NAME = 1_000_092_795  # file names are numbers in Flickr30K


def write_small_book(root: Path) -> Path:
    """A folder in which the experiments run as they stand: chapters and settings are the book's, the data is made up."""
    for name in ("_toc.yml", "book", "notebooks", "pyproject.toml", "experiments"):
        (root / name).symlink_to(ROOT / name)
    (root / "runs").mkdir()
    flickr = write_photos(root / "data/f30k_precomp", {"train": TRAIN, "dev": DEV, "test": TEST})
    write_entities(root / "data/flickr30k_entities", flickr, [str(FIRST_NAME + number) for number in range(TEST)])
    write_photos(root / "data/coco_precomp", {"train": TRAIN, "dev": DEV, "test": TEST // 2, "testall": TEST}, seed=1)
    write_bert(root / "bert-base-uncased")
    return root


def write_photos(folder: Path, images: dict[str, int], seed: int = 0) -> Path:
    """Toy images and captions under the names and in the shapes of the public packages."""
    write_toy_dataset(folder, images, seed, regions=36, width=2048)
    (folder / "toy_vocab.json").rename(folder / f"{folder.name}_vocab.json")
    for split, count in images.items():
        names = [f"{FIRST_NAME + number}.jpg\n" for number in range(count)]
        (folder / f"{split}_ids.txt").write_text("".join(name for name in names for _ in range(5)), encoding="utf-8")
        features = np.load(folder / f"{split}_ims.npy")
        np.save(folder / f"{split}_ims.npy", np.maximum(features, 0))  # as they leave the detector's last ReLU
    return folder


def write_bert(folder: Path, layers: int = 2) -> None:
    """An untrained BERT of the geometry of ``bert-base-uncased``, as ``transformers`` saves one."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["a", "and", ".", *COLOURS, *(shape[:2] for shape in SHAPES), *(f"##{shape[2:]}" for shape in SHAPES)]
    folder.mkdir()
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(words)]
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(lines), num_hidden_layers=layers)).save_pretrained(folder)
