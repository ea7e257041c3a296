"""Receipts of schema 4 for tests of the ledger: trained, searched and validated as the protocol asks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.records.receipts import Evidence, make_receipt, receipt_path, seal_of

SCHEMA_3_RUN = ("finished", "seconds", "device", "machine", "python", "versions", "commit")
EPOCHS, CAPTIONS, BATCH = 12, 12_000, 50
FLAT = [100.0, 200.0, 250.0, *[280.0] * 9]  # dev rsum of a run that converged, an epoch each


def stage(
    curve: Iterable[float] = FLAT, name: str = "final", captions: int = CAPTIONS, **change: Any
) -> dict[str, Any]:
    """One stage of a training. curve: the dev rsum after each epoch."""
    values = list(curve)
    dev = [[captions * (k + 1) // len(values), float(value)] for k, value in enumerate(values)]
    about = {
        "name": name,
        "shared": False,
        "epochs": len(values),
        "batch_size": BATCH,
        "captions_seen": captions,
        "dev": dev,
    }
    return about | {"steps": captions // BATCH, "seconds": 1.0, "learning_rate": 0.002, "final_loss": 0.1} | change


def training(*stages: dict[str, Any]) -> dict[str, Any]:
    """What a receipt says of its training."""
    known = stages or (stage(),)
    return {"captions_seen": sum(one["captions_seen"] for one in known), "train_images": 200, "stages": list(known)}


def search(**change: Any) -> dict[str, Any]:
    """A search over three learning rates with two seeds each."""
    grid = {"learning_rate": [0.001, 0.002, 0.004]}
    return {"grid": grid, "runs": 6, "seeds": 2, "record": "01_vsepp/choices/one.json", "digest": "d" * 64} | change


def fair(receipt: Mapping[str, Any], **change: Any) -> dict[str, Any]:
    """The same receipt under schema 4, with all that the protocol checks, and its seal."""
    more = {"schema": 4, "inputs": {"train": "a" * 64}, "training": training(), "search": [search()]} | change
    known = dict(receipt) | more | {"run": dict(receipt["run"]) | {"clean": True}}
    known["parameters"] = {"learning_rate": 0.002} | known["parameters"]
    known.pop("seal", None)
    return json.loads(json.dumps(known | {"seal": seal_of(known)}))


def aged(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The same receipt as it was written before the protocol could be checked, with its seal."""
    new = ("seal", "inputs", "training", "search")
    known = {name: value for name, value in receipt.items() if name not in new} | {"schema": 3}
    known["run"] = {name: value for name, value in receipt["run"].items() if name in SCHEMA_3_RUN}
    return known | {"seal": seal_of(known)}


def write(receipt: dict[str, Any], folder: Path, evidence: Evidence) -> Path:
    """Write a receipt and its ranks under their name, as they are."""
    path = receipt_path(receipt, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path.with_suffix(".npz"), i2t=evidence.i2t, t2i=evidence.t2i, owner=evidence.owner)
    path.write_text(json.dumps(receipt), encoding="utf-8")
    return path


def hits_receipt(
    chapter: str, variant: str, seed: int, hits: int, images: int, dataset: Mapping[str, str], **change: Any
) -> tuple[dict[str, Any], Evidence]:
    """A receipt of ``hits`` images, and their captions, that are found at once: each is worth 600 / images points of rsum."""
    owner = np.repeat(np.arange(images), 5)
    order = np.random.default_rng(seed).permutation(images)
    i2t = np.where(order < hits, 0, 10 + seed)  # no two seeds have the same ranks
    evidence = Evidence(i2t, i2t[owner], owner)
    protocol = change.pop("protocol", f"all {images}")
    receipt = make_receipt(
        chapter=chapter,
        variant=variant,
        seed=seed,
        dataset=dataset,
        parameters=change.pop("parameters", {"epochs": 2}),
        metrics=evidence.recalls(protocol) | change.pop("metrics", {}),
        protocol=protocol,
        seconds=1.0,
        device="cpu",
        evidence=evidence,
        rules=change.pop("rules", {}),
        models=change.pop("models", 1),
    )
    return receipt, evidence
