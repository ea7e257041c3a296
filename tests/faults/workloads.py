"""Small works that faults strike: each writes to one folder, goes on when it is called again, and has one right result."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from killed_mining import SETTINGS, open_toy
from killed_photos import Tiny
from killed_run import main as train_toy
from PIL import Image
from toy_dataset import write_toy_dataset

from itm_lab.data import bottom_up
from itm_lab.experiments import runner
from itm_lab.experiments.ensembles import run_ensembles
from itm_lab.experiments.plan import plan
from itm_lab.photos import extract as extraction
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import read_evidence, read_receipt
from itm_lab.records.scores import save_scores, write_scores
from itm_lab.scenes.build import ScenesSpec, scenes_folder
from itm_utils import mining, scoring
from itm_utils.data.precomp import open_split
from itm_utils.data.text_encoder import bert_captions, load_text_encoder
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.training.checkpoints import read_checkpoint, tensor_digest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Workload:
    """prepare: write the inputs, once. run: do the work, or the rest of it. result: what must come out, as one text."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path, Path], None]
    result: Callable[[Path], str]


def digest_of(folder: Path, pattern: str = "*") -> str:
    """Hash of the names and bytes of all finished files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


# -- training ---------------------------------------------------------------------------------------------------------


def prepare_toy(inputs: Path) -> None:
    write_toy_dataset(inputs, {"train": 40, "dev": 12, "test": 12})


def train(inputs: Path, work: Path) -> None:
    train_toy(str(inputs), str(work / "run"), None)


def trained(work: Path) -> str:
    """The last checkpoint, the best weights as other commands open them, and the log."""
    last = read_checkpoint(max((work / "run").glob("step-*.safetensors")))
    best = read_checkpoint(work / "run/best.safetensors")
    log = (work / "run/log.jsonl").read_text(encoding="utf-8")
    return json.dumps([last.info["step"], tensor_digest(last.tensors), tensor_digest(best.tensors), best.info, log])


# -- mining -----------------------------------------------------------------------------------------------------------


def mine(inputs: Path, work: Path) -> None:
    scoring.BATCH, mining.BLOCK, mining.SAVE_EVERY, mining.TILE = 16, 16, 0, 1  # a checkpoint after every block
    mining.mine(*open_toy(inputs), work / "lists", **SETTINGS)


def mined(work: Path) -> str:
    return digest_of(work / "lists", "*.npy")


# -- features of photographs ------------------------------------------------------------------------------------------


def prepare_photos(inputs: Path) -> None:
    rng = np.random.default_rng(0)
    (inputs / "photos").mkdir(parents=True)
    lines = []
    for number in range(24):
        name = f"p{number:02d}.png"
        Image.fromarray(rng.integers(0, 256, size=(24, 36, 3), dtype=np.uint8)).save(inputs / "photos" / name)
        lines += [(name, f"An image with the number {number}, you see."), (name, "two dogs on a beach")]
    (inputs / "photos/p99.png").write_bytes(b"no image")
    with (inputs / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([*lines, ("p99.png", "a bad one")])


def extract(inputs: Path, work: Path) -> None:
    extraction.BATCH = 4
    extraction.extract(inputs / "photos", inputs / "captions.csv", work / "out", "2,1,1", least=1, network=Tiny())


def extracted(work: Path) -> str:
    return digest_of(work / "out")


# -- datasets ---------------------------------------------------------------------------------------------------------


def nothing(inputs: Path) -> None:
    inputs.mkdir(parents=True)


def build_scenes(inputs: Path, work: Path) -> None:
    with cache_in(work):
        scenes_folder(ScenesSpec(train=4, dev=2, test=2))


def built(work: Path) -> str:
    """Digest of the one dataset or set of states in a cache; notes of digests lie beside it."""
    (manifest,) = work.glob("*/manifest.json")
    return digest_of(manifest.parent)


@contextmanager
def cache_in(folder: Path):
    """Caches below another folder, for a while."""
    import os

    before = os.environ.get("ITM_CACHE")
    os.environ["ITM_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("ITM_CACHE") if before is None else os.environ.update(ITM_CACHE=before)


def prepare_tsv(inputs: Path) -> None:
    rng = np.random.default_rng(7)
    inputs.mkdir(parents=True)
    rows = []
    for number in [3, 1, 4, 1, 5, 9, 2, 6, 8, 7, 12, 11]:  # one twice
        rng = np.random.default_rng(number)
        corner = rng.uniform(0, 20, size=(3, 2))
        parts = np.concatenate([corner, corner + rng.uniform(1, 20, (3, 2))], axis=1), rng.normal(size=(3, 40))
        boxes, features = (base64.b64encode(part.astype("<f4").tobytes()).decode() for part in parts)
        rows.append("\t".join((str(number), "64", "48", "3", boxes, features)) + "\r\n")
    (inputs / "a.tsv").write_bytes("".join(rows).encode())


def convert(inputs: Path, work: Path) -> None:
    bottom_up.convert([inputs / "a.tsv"], work / "out", "dev", note_seconds=0)  # a note after every image


def converted(work: Path) -> str:
    return digest_of(work / "out")


def encode(inputs: Path, work: Path) -> None:
    with cache_in(work):
        bert_captions(open_split(inputs, "dev"), load_encoder(), batch_size=8)


def load_encoder() -> Any:
    """Loaded once: the children of a process that has it need not load it again."""
    if not ENCODER:
        ENCODER.append(load_text_encoder())
    return ENCODER[0]


ENCODER: list[Any] = []


# -- receipts ---------------------------------------------------------------------------------------------------------


def prepare_pair(inputs: Path) -> None:
    write_toy_dataset(inputs / "f30k", {"train": 12, "dev": 6, "test": 20})


def leave(job: runner.Job) -> SimpleNamespace:
    """In place of papermill: write what a chapter writes at its end, with made-up scores, in the chapter's order."""
    split = open_split(job.data, job.parameters["evaluate_on"])
    generator = torch.Generator().manual_seed(len(job.parameters["variant"]))
    scores = Scores.same(torch.rand(split.n_images, split.n_captions, generator=generator))
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "step-00000001.safetensors").touch()  # as a training leaves one: scores can be made again
    write_scores(job.folder / "scores.safetensors", scores)
    about = {"chapter": job.experiment.chapter, "variant": job.parameters["variant"], "seed": job.seed}
    about |= {"dataset": split.identity(), "parameters": settings_of(job.parameters), "seconds": 1.0, "device": "cpu"}
    save_scores(scores, split.owner, job.folder, {}, **about)
    return SimpleNamespace(poll=lambda: 0, returncode=0)


def record(inputs: Path, work: Path) -> None:
    """Two runs and their ensemble, from scores to collected receipts."""
    runner.read_data.cache_clear()
    given = [f"dataset={inputs / 'f30k'}", f"run_dir={work / 'run'}"]
    jobs = plan(ROOT, ["scan/f30k/t2i_avg", "scan/f30k/i2t_avg"], "", "0", given, [])
    with in_this_process():
        failed = runner.run_jobs(jobs, work / "receipts", at_a_time=1)
    if failed:
        raise ItmError(f"failed: {', '.join(job.label for job in failed)}")
    run_ensembles(jobs, work / "receipts")


@contextmanager
def in_this_process():
    """Let ``run_jobs`` call :func:`leave` instead of papermill, without waiting in between."""
    start, runner.start = runner.start, leave
    sleep, runner.time = runner.time, SimpleNamespace(sleep=lambda seconds: None)
    try:
        yield
    finally:
        runner.start, runner.time = start, sleep


def recorded(work: Path) -> str:
    found: list[Any] = []
    for path in sorted((work / "receipts").rglob("*.json")):
        receipt = read_receipt(path)
        parts = {name: value for name, value in receipt.items() if name not in ("run", "seal")}
        found.append([str(path.relative_to(work)), parts, read_evidence(path).digest])
    return json.dumps(found, sort_keys=True)


WORKLOADS = {
    work.name: work
    for work in (
        Workload("training", prepare_toy, train, trained),
        Workload("mining", prepare_toy, mine, mined),
        Workload("features of photographs", prepare_photos, extract, extracted),
        Workload("building Scenes", nothing, build_scenes, built),
        Workload("converting features", prepare_tsv, convert, converted),
        Workload("states of a text encoder", prepare_toy, encode, built),
        Workload("scores and receipts", prepare_pair, record, recorded),
    )
}
