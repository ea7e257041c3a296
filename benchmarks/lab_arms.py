"""The seed tables of chapters 01 and 02, and the grid that tuned VSE++: one receipt a run, in results/.

A receipt that is there already is kept, so an interrupted call goes on where it was. Grids are measured on dev with
seed 0 and chose the settings of the arms; arms are measured on test with seeds 0 to 4.

Not all is here: the learning rates of "all negatives" and "mean-pool" come from twelve runs whose receipts are in
results/01_vsepp (grid all, grid mean-pool; six of them were given their present name after the run), and that of SCAN
from a search that left no receipts.

usage: python benchmarks/lab_arms.py [grid] [01_vsepp] [02_scan]     (one thread; about a minute a run)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_utils.batches import PairDataset, WordCaptions
from itm_utils.matcher import Matcher, Scores
from itm_utils.metrics import bootstrap_intervals, ensemble, evaluate, retrieval_ranks
from itm_utils.models.keeping_score import MeanPool
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import VSEPP, HingeTriplet
from itm_utils.precomp import open_split
from itm_utils.receipts import make_receipt, write_receipt
from itm_utils.scenes import oracle_matrix, scenes_folder
from itm_utils.scoring import score_split
from itm_utils.text import Vocabulary
from itm_utils.training import TrainConfig, TrainResult, train

RESULTS = Path(__file__).parents[1] / "results"
ROOT = scenes_folder()
VOCABULARY = Vocabulary.of_folder(ROOT)
SPLITS = {name: open_split(ROOT, name) for name in ("train", "dev", "test")}
TEXTS = {name: WordCaptions(split, VOCABULARY) for name, split in SPLITS.items()}
PAIRS = PairDataset(SPLITS["train"], TEXTS["train"])

# ---- chapter 01
TUNED = {
    "model": "VSE++", "schedule": "cosine", "learning_rate": 0.008, "width": 128, "word_dim": 64, "margin": 0.2,
    "warmup_epochs": 2, "hardest": True, "epochs": 10, "batch_size": 128,
}  # fmt: skip
SMALL = TUNED | {"learning_rate": 0.004, "batch_size": 64}
VSEPP_ARMS = {
    "VSE++ hardest from step one": SMALL | {"warmup_epochs": 0},
    "VSE++ hardest after warm-up": SMALL,
    "VSE++ all negatives": SMALL | {"hardest": False, "warmup_epochs": 0},
    "mean-pool": SMALL | {"model": "mean-pool", "learning_rate": 0.032},
    "VSE++ tuned on validation": TUNED,
}
GRID = [
    *(TUNED | {"learning_rate": rate} for rate in (0.001, 0.002, 0.004, 0.008, 0.016)),
    *(TUNED | {"warmup_epochs": epochs} for epochs in (1, 4)),
    *(TUNED | {"margin": margin} for margin in (0.1, 0.3)),
    TUNED | {"width": 256},
    *(SMALL | {"learning_rate": rate} for rate in (0.004, 0.008)),
    SMALL | {"warmup_epochs": 5},
    *(SMALL | {"batch_size": 32, "learning_rate": rate} for rate in (0.002, 0.004)),
]
# ---- chapter 02: the temperatures of the four published variants
BASE = {
    "epochs": 4, "batch_size": 64, "learning_rate": 0.008, "schedule": "cosine", "width": 64, "word_dim": 64,
    "margin": 0.2, "warmup_epochs": 2, "first_norm": "clipped_l2norm",
}  # fmt: skip
SCAN_ARMS = {
    "SCAN t2i LSE": BASE | {"direction": "t2i", "pooling": "LogSumExp", "temperature": 9.0, "lse": 6.0},
    "SCAN i2t LSE": BASE | {"direction": "i2t", "pooling": "LogSumExp", "temperature": 4.0, "lse": 5.0},
    "SCAN t2i AVG": BASE | {"direction": "t2i", "pooling": "Mean", "temperature": 9.0, "lse": 6.0},
    "SCAN i2t AVG": BASE | {"direction": "i2t", "pooling": "Mean", "temperature": 4.0, "lse": 5.0},
}
ENSEMBLES = {f"SCAN ensemble {pool}": [f"SCAN {way} {pool}" for way in ("t2i", "i2t")] for pool in ("LSE", "AVG")}


def build(settings: dict[str, Any]) -> Matcher:
    """The model that the settings describe."""
    sizes = (len(VOCABULARY), SPLITS["train"].feature_dim, settings["width"])
    if settings.get("model") == "mean-pool":
        return MeanPool(*sizes)
    if settings.get("model") == "VSE++":
        return VSEPP(*sizes, settings["word_dim"])
    names = ("word_dim", "direction", "pooling", "temperature", "lse", "first_norm")
    return SCAN(*sizes, **{name: settings[name] for name in names})


def trained(settings: dict[str, Any], seed: int) -> tuple[Matcher, TrainResult]:
    """Train one arm; the weights of its best epoch on dev."""
    torch.manual_seed(seed)
    model = build(settings)
    config = TrainConfig(
        epochs=settings["epochs"], batch_size=settings["batch_size"], learning_rate=settings["learning_rate"],
        schedule="cosine", decay_every=settings["epochs"], seed=seed, device="cpu",
    )  # fmt: skip
    objective = HingeTriplet(settings["margin"], settings.get("hardest", True), settings["warmup_epochs"])
    with tempfile.TemporaryDirectory() as folder:
        return model, train(model, objective, PAIRS, config, folder, validate=lambda m: scored(m, "dev")[1].as_dict())


def scored(model: Matcher, split: str):
    scores = score_split(model, SPLITS[split], TEXTS[split])
    return scores, evaluate(scores, SPLITS[split].owner)


def there(chapter: str, arm: str, seed: int) -> bool:
    return (RESULTS / chapter / f"{arm}_scenes_s{seed}.json".replace(" ", "-")).exists()


def keep(
    chapter: str, arm: str, seed: int, split: str, settings: dict, scores: Scores, seconds: float, more: dict
) -> None:
    """Write the receipt of one run."""
    opened = SPLITS[split]
    result = evaluate(scores, opened.owner)
    receipt = make_receipt(
        chapter=chapter, arm=arm, seed=seed, dataset=opened.identity(), parameters=settings,
        metrics=result.as_dict() | more, intervals=bootstrap_intervals(retrieval_ranks(scores, opened.owner), opened.owner),
        models=result.models, protocol=result.protocol, seconds=seconds, device="cpu",
    )  # fmt: skip
    print(write_receipt(receipt, RESULTS).name, f"rsum {result.rsum:.1f}, {seconds:.0f} s", flush=True)


def facts(result: TrainResult, settings: dict[str, Any], scores: Scores, split: str) -> dict[str, float]:
    """What the chapters ask besides recalls."""
    losses = [record["loss"] / settings["batch_size"] for record in result.log if "loss" in record]
    last = float(np.mean(losses[-(len(losses) // settings["epochs"]) :]))
    true = oracle_matrix(split)[scores.t2i.argmax(dim=0).numpy(), np.arange(scores.t2i.shape[1])].mean()
    return {"dev_rsum": result.best["rsum"], "last_loss_per_pair": last, "t2i_r1_true": 100 * float(true)}


def run(chapter: str, arm: str, settings: dict[str, Any], seed: int, split: str = "test") -> tuple[Scores, float]:
    """Train, score and keep one run."""
    model, result = trained(settings, seed)
    scores, _ = scored(model, split)
    keep(chapter, arm, seed, split, settings, scores, result.seconds, facts(result, settings, scores, split))
    return scores, result.seconds


def grid() -> None:
    for settings in GRID:
        arm = "grid hardest " + " ".join(
            f"{short} {settings[name]:g}"
            for short, name in (
                ("batch", "batch_size"), ("lr", "learning_rate"), ("warmup", "warmup_epochs"), ("width", "width"),
                ("margin", "margin"),
            )
        )  # fmt: skip
        if not there("01_vsepp", arm, 0):
            run("01_vsepp", arm, settings, 0, "dev")


def vsepp() -> None:
    for seed in range(5):
        for arm, settings in VSEPP_ARMS.items():
            if not there("01_vsepp", arm, seed):
                run("01_vsepp", arm, settings, seed)


def scan() -> None:
    """Members of an ensemble are trained again if one of its receipts is missing: scores are not kept."""
    for seed in range(5):
        if all(there("02_scan", arm, seed) for arm in (*SCAN_ARMS, *ENSEMBLES)):
            continue
        got = {arm: run("02_scan", arm, settings, seed) for arm, settings in SCAN_ARMS.items()}
        for arm, members in ENSEMBLES.items():
            scores, seconds = ensemble([got[name][0] for name in members]), sum(got[name][1] for name in members)
            settings = {"members": members} | {
                k: BASE[k] for k in ("epochs", "batch_size", "learning_rate", "warmup_epochs", "width")
            }
            keep("02_scan", arm, seed, "test", settings, scores, seconds, {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = {"grid": grid, "01_vsepp": vsepp, "02_scan": scan}
    for name in sys.argv[1:] or jobs:
        jobs[name]()
