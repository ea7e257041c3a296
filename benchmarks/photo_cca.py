"""A yardstick that needs no training: regularised CCA between mean regions and what a caption says.

Both sides are mapped linearly so that a picture and its captions correlate as much as possible (canonical correlation
analysis); each direction counts by a power of its correlation. Ridges and power are chosen on dev.

    python -m benchmarks.photo_cca --data data/flickr8k --keep runs/photo_cca
    python -m benchmarks.photo_cca --data data/flickr8k --text-encoder data/minilm

(a minute of one core each. The second takes the mean token state of a frozen text encoder instead of the words: the
yardstick of models that read one. Writes results/photo_cca.json or results/photo_cca_minilm.json, after the encoder's
name, and with --keep the scores for benchmarks/judgements.py)
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.harness import RESULTS, finish
from itm_lab.records.scores import write_scores
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import evaluate

PICTURE_RIDGES, WORD_RIDGES, POWERS = (
    (0.01, 0.1, 1, 10),
    (0.01, 0.1, 1, 10),
    (0.25, 0.5, 1, 2),
)  # ridges: of the mean variance


class Sides(NamedTuple):
    """A split. pictures: (i, d) mean regions. words: (c, v) weighted bags, or mean token states. owner: (c,) image of each."""

    pictures: torch.Tensor
    words: torch.Tensor
    owner: np.ndarray


class Covariances(NamedTuple):
    """Of the training set, with the two means."""

    pictures: torch.Tensor
    words: torch.Tensor
    both: torch.Tensor
    picture_mean: torch.Tensor
    word_mean: torch.Tensor


def bags(split: PrecompSplit, vocabulary: Vocabulary) -> torch.Tensor:
    """(c, v) ones where a caption has the word."""
    found = torch.zeros(split.n_captions, len(vocabulary))
    for row, caption in enumerate(split.captions):
        found[row, torch.from_numpy(vocabulary.encode(caption)[1:-1])] = 1
    return found


def mean_regions(split: PrecompSplit) -> torch.Tensor:
    """(i, d) the mean over the regions of each picture."""
    parts = np.array_split(np.arange(split.n_images) * split.repeat, 10)
    return torch.from_numpy(np.concatenate([split.features.rows(part).mean(axis=1) for part in parts]))


def covariances(train: Sides) -> Covariances:
    """Each picture counts once for each of its captions."""
    pictures = train.pictures[torch.from_numpy(np.asarray(train.owner))]
    means = pictures.mean(dim=0), train.words.mean(dim=0)
    pictures, words, count = pictures - means[0], train.words - means[1], len(train.words)
    return Covariances(pictures.T @ pictures / count, words.T @ words / count, pictures.T @ words / count, *means)


def directions(known: Covariances, ridge: float, word_ridge: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maps of pictures (d, k) and of words (v, k), and the k correlations."""
    first, second = (
        matrix + share * matrix.diagonal().mean() * torch.eye(len(matrix))
        for matrix, share in ((known.pictures, ridge), (known.words, word_ridge))
    )
    lower = torch.linalg.cholesky(first)
    solved = torch.cholesky_solve(known.both.T, torch.linalg.cholesky(second))  # (v, d)
    half = torch.linalg.solve_triangular(lower, known.both @ solved, upper=False)
    inner = torch.linalg.solve_triangular(lower, half.T, upper=False)
    squares, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    maps = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
    correlations = squares.clamp(min=1e-12).sqrt()
    return maps, solved @ maps / correlations, correlations


def scores_of(split: Sides, known: Covariances, maps: tuple[torch.Tensor, ...], power: float) -> Scores:
    """Cosines in the shared space, each direction weighted by a power of its correlation."""
    ours, theirs, correlations = maps
    pictures = (split.pictures - known.picture_mean) @ ours * correlations**power
    words = (split.words - known.word_mean) @ theirs * correlations**power
    pictures, words = (torch.nn.functional.normalize(side, dim=1) for side in (pictures, words))
    return Scores.same(pictures @ words.T)


def weighted_bags(splits: dict[str, PrecompSplit], data: Path) -> dict[str, torch.Tensor]:
    """(c, v) of each split, of length one; rare words weigh more, as counted on train."""
    counted = {name: bags(split, Vocabulary.of_folder(data)) for name, split in splits.items()}
    weights = torch.log(len(counted["train"]) / (1 + counted["train"].sum(dim=0)))
    return {name: torch.nn.functional.normalize(found * weights, dim=1) for name, found in counted.items()}


def mean_states(split: PrecompSplit, encoder: str) -> torch.Tensor:
    """(c, d) the mean over the tokens of each caption, cut as the recipes cut them."""
    captions = bert_captions(split, encoder, max_tokens=32)
    sums = np.add.reduceat(captions.states, captions.starts[:-1], axis=0, dtype=np.float32)
    return torch.from_numpy(sums / captions.lengths[:, None].astype(np.float32))


def open_sides(data: Path, encoder: str | None) -> dict[str, Sides]:
    """The three splits."""
    splits = {name: open_split(data, name) for name in ("train", "dev", "test")}
    texts = (
        {name: mean_states(split, encoder) for name, split in splits.items()}
        if encoder
        else weighted_bags(splits, data)
    )
    return {name: Sides(mean_regions(split), texts[name], split.owner) for name, split in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="folder for scores.safetensors of the test split")
    parser.add_argument("--text-encoder", help="folder of a frozen encoder whose mean states are taken, not the words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = Path(args.text_encoder).name if args.text_encoder else ""
    args.out = args.out or RESULTS / (f"photo_cca_{name}.json" if name else "photo_cca.json")
    torch.set_num_threads(1)
    sides = open_sides(args.data, args.text_encoder)
    known, found = covariances(sides["train"]), {}
    for ridge, word_ridge in product(PICTURE_RIDGES, WORD_RIDGES):
        maps = directions(known, ridge, word_ridge)
        for power in POWERS:
            rsum = evaluate(scores_of(sides["dev"], known, maps, power), sides["dev"].owner).rsum
            found[ridge, word_ridge, power] = rsum
            print(f"ridges {ridge:g}, {word_ridge:g}, power {power:g}: rsum on dev {rsum:.1f}", flush=True)
    ridge, word_ridge, power = best = max(found, key=found.get)
    scores = scores_of(sides["test"], known, directions(known, ridge, word_ridge), power)
    if args.keep:
        write_scores(args.keep / "scores.safetensors", scores)
    what = {"picture_ridge": ridge, "word_ridge": word_ridge, "power": power, "dev_rsum": found[best]}
    what |= {"dataset": open_split(args.data, "test").identity(), "text": name or "bag of words"}
    finish(args, {"what": what, "test": evaluate(scores, sides["test"].owner).as_dict()})


if __name__ == "__main__":
    main()
