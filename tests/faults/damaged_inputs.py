"""Good files, damaged at random, for the readers: each must accept what it is given or say one clear line."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from toy_dataset import write_toy_dataset

from itm_lab.data.karpathy import read_karpathy
from itm_lab.experiments.experiment_files import expand, find_experiment, read_overrides, read_seeds
from itm_lab.notebook_io import read_notebook
from itm_lab.photos.captions import read_lines
from itm_lab.photos.image_files import UnreadableError, read_image
from itm_lab.records.receipts import Evidence, make_receipt, read_receipt, write_receipt
from itm_lab.records.scores import read_scores, write_scores
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.training.checkpoints import read_checkpoint, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED, CLEAR, TRACEBACK = "accepted", "one clear line", "traceback"


@dataclass(frozen=True)
class Reader:
    """write: a good file in a folder, and its path. read: what opens it."""

    write: Callable[[Path], Path]
    read: Callable[[Path], Any]


WAYS = 9


def damage(content: bytes, random: Random, way: int) -> bytes:
    """Other bytes: cut, nothing, replaced, repeated, removed, in another encoding, nested without end; by number."""
    here = random.randrange(len(content) + 1)
    there = min(len(content), here + random.randrange(1, 64))
    ways: list[Callable[[], bytes]] = [
        lambda: content[:here],
        lambda: b"",
        lambda: content[:here] + random.randbytes(there - here) + content[there:],
        lambda: content[:here] + content[here:there] * 50 + content[there:],
        lambda: content[:here] + content[there:],
        lambda: random.randbytes(200),
        lambda: content.decode("latin-1").encode("utf-16"),
        lambda: b"[" * 100_000,
        lambda: (
            content[:here]
            + random.choice([b"1e999", b"-1", b"null", b"NaN", b"\x00", b"\x1b[31m", b"{}"])
            + content[there:]
        ),
    ]
    return ways[way]()


def read_damaged(reader: Reader, folder: Path, random: Random, way: int) -> str:
    """Damage a good file in one of the ways, read it, and say what came of it."""
    path = reader.write(folder)
    path.write_bytes(damage(path.read_bytes(), random, way))
    try:
        with redirect_stdout(StringIO()):
            reader.read(path)
    except (ItmError, UnreadableError) as error:
        return CLEAR if str(error).isprintable() else TRACEBACK
    except Exception:
        print(traceback.format_exc())
        return TRACEBACK
    return ACCEPTED


def toy(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_toy_dataset(folder, {"train": 4})
        return folder / name

    return write


def text(name: str, content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(content, encoding="utf-8")
        return folder / name

    return write


def checkpoint(folder: Path) -> Path:
    write_checkpoint(folder / "c.safetensors", {"model.w": torch.ones(3)}, {"step": 1})
    return folder / "c.safetensors"


def scores(folder: Path) -> Path:
    write_scores(folder / "s.safetensors", Scores.same(torch.rand(2, 10)))
    return folder / "s.safetensors"


def receipt(folder: Path) -> Path:
    for path in folder.rglob("*.*"):
        path.unlink()
    evidence = Evidence(np.array([0, 3]), np.arange(10), np.repeat([0, 1], 5))
    about = {"chapter": "02_scan", "variant": "a", "seed": 0, "parameters": {}, "seconds": 1.0, "device": "cpu"}
    data = {"name": "toy", "split": "test", "fingerprint": "0" * 64}
    made = make_receipt(**about, dataset=data, metrics=evidence.recalls("all"), evidence=evidence)
    return write_receipt(made, folder, evidence)


def image(folder: Path) -> Path:
    Image.new("RGB", (40, 30), (200, 40, 40)).save(folder / "p.png")
    return folder / "p.png"


KARPATHY = {
    "images": [{"filename": "1.jpg", "imgid": 0, "split": "train", "sentences": [{"raw": "a dog", "tokens": []}]}]
}
EXPERIMENTS = {"base": {"epochs": 1}, "datasets": {"f30k": {"variants": {"vsepp": {"about": "a", "variant": "A"}}}}}
SPLIT = {name: Reader(toy(f"train_{name}"), lambda p: open_split(p.parent, "train")) for name in ("caps.txt", "ims.npy", "boxes.npy", "sizes.npy", "ids.txt")}  # fmt: skip
READERS = {f"a split, {name}": reader for name, reader in SPLIT.items()} | {
    "a vocabulary": Reader(toy("toy_vocab.json"), Vocabulary.load),
    "a checkpoint": Reader(checkpoint, read_checkpoint),
    "scores": Reader(scores, read_scores),
    "a receipt": Reader(receipt, read_receipt),
    "a photograph": Reader(image, lambda path: read_image(path, 16)),
    "captions of photographs": Reader(text("c.csv", "a.jpg,two dogs\nb.jpg,a cat\n"), read_lines),
    "Karpathy's splits": Reader(text("k.json", json.dumps(KARPATHY)), read_karpathy),
    "an experiment file": Reader(text("vsepp.yaml", yaml.safe_dump(EXPERIMENTS)), expand),
    "a notebook": Reader(text("n.ipynb", json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []})), read_notebook),
    "option --seeds": Reader(text("o", "0-4,7"), lambda p: read_seeds(p.read_text(encoding="latin-1"))),
    "option -p": Reader(text("o", "width=32"), lambda p: read_overrides(find_experiment(ROOT, "vsepp/f30k/vsepp"), [p.read_text(encoding="latin-1")])),
}  # fmt: skip
