"""What ``compiled=true`` changes: scores of the models of part I at their published widths, with and without.

Weights and batches are random, and the same for both. What counts is the largest difference between two scores;
seconds are those of this machine's processor, and say nothing about a GPU.

    python benchmarks/compiled.py

(some minutes of one core, most of them in the compiler; writes results/compiled.json)
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from harness import finish, start, take_turns

from itm_book.plan import PUBLISHED, make_batch, plan, tokens_of, trainings
from itm_utils.matcher import Images, Matcher, PairBatch, Texts
from itm_utils.training import compiled_scores

ROOT = Path(__file__).parents[1]
# One recipe a model. SCAN, BFAN and SGRAF are those of CCR/CCS too; SCAN, BFAN and VSRN those of AOQ. Not here is MMCA,
# whose scores the compiler had not finished after ten minutes of one core, and DCPA, whose stage two is built like it.
RECIPES = {
    "VSE++": "01_vsepp_f30k_vsepp",
    "SCAN": "02_scan_f30k_t2i_avg",
    "BFAN": "03_bfan_f30k_equal",
    "PFAN": "04_pfan_f30k_t2i",
    "VSRN": "05_vsrn_f30k_first",
    "SAEM": "06_saem_f30k",
    "SGRAF, SAF": "07_sgraf_f30k_saf",
    "SGRAF, SGR": "07_sgraf_f30k_sgr",
}


def model_and_batch(recipe: str, pairs: int) -> tuple[Matcher, PairBatch]:
    """The model of a recipe with random weights, and a random batch in the published sizes."""
    job, sizes = plan(ROOT, [recipe], "", "", [], [])[0], PUBLISHED["f30k"]
    torch.manual_seed(0)
    model = trainings(job, sizes, "cpu")[-1].judged.eval()
    return model, make_batch(pairs, sizes, tokens_of(job), "cpu")


def measure(recipe: str, pairs: int, rounds: int) -> dict[str, float]:
    """Largest difference of a score, of all pairs and of given pairs, and seconds of scoring all pairs."""
    model, batch = model_and_batch(recipe, pairs)
    with torch.no_grad():
        sides = model.encode_images(batch.images), model.encode_texts(batch.texts)
        eager, before = model.score, both(model, *sides)
        with compiled_scores(model, True):
            began = time.perf_counter()
            after = both(model, *sides)
            compiling = time.perf_counter() - began
            ways = {"eager": lambda: eager(*sides), "compiled": lambda: model.score(*sides)}
            seconds, _, _ = take_turns(ways, rounds)
    differences = [float((one - other).abs().max()) for one, other in zip(before, after, strict=True)]
    return {"largest_difference": max(differences), "compiling_s": compiling, **seconds}


def both(model: Matcher, images: Images, texts: Texts) -> list[torch.Tensor]:
    """Scores of all pairs and of given pairs, in both directions."""
    found = model.score(images, texts), model.score_pairs(images, texts)
    return [scores for one in found for scores in (one.i2t, one.t2i)]


def main() -> None:
    args = start(__doc__, "compiled.json", pairs=16, rounds=3)
    found = {}
    for name, recipe in RECIPES.items():
        found[name] = {key: float(f"{value:.3g}") for key, value in measure(recipe, args.pairs, args.rounds).items()}
        print(name, found[name], flush=True)
    finish(args, {"pairs": args.pairs**2, "models": found})


if __name__ == "__main__":
    main()
