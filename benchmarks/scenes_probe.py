"""Two quick matchers on the little world, and the knobs that make it harder or easier.

    python -m benchmarks.scenes_probe            the shipped dataset, three seeds: results/scenes_probe.json
    python -m benchmarks.scenes_probe knobs      one knob at a time, on a design seed: results/scenes_knobs.json
    python -m benchmarks.scenes_probe bert       attention on frozen states of the miniature BERT: results/scenes_bert.json

Both matchers are small on purpose: they show that the dataset is neither saturated nor noise, before any chapter
is built. One thread, at most 60 s a training run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from itm_lab.scenes import ScenesSpec, oracle_matrix, scenes_folder
from itm_lab.scenes.oracle import ceiling
from itm_lab.scenes.world import Knobs
from itm_utils.data.batches import PairDataset, WordCaptions, pair_loader
from itm_utils.data.precomp import open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import input_error
from itm_utils.matcher import Images, Matcher, Scores, Texts
from itm_utils.metrics.retrieval import evaluate
from itm_utils.scoring import score_split

RESULTS = Path(__file__).parent / "results"
DESIGN_SEED = 1  # of the generator: the design was chosen on it, the shipped dataset uses another
OUTPUTS = {"shipped": "scenes_probe.json", "knobs": "scenes_knobs.json", "bert": "scenes_bert.json"}
KNOB_TRAIN = 600  # training images where many datasets are compared
KNOB_PASSES = 2  # times as many passes over them
WIDTH = 64


class MeanPool(Matcher):
    """Mean of the regions, mean of the words, one linear map each, cosine."""

    def __init__(self, regions: int, words: int) -> None:
        super().__init__()
        self.image = nn.Linear(regions, WIDTH)
        self.words = nn.Embedding(words, WIDTH)

    def encode_images(self, batch) -> Images:
        return Images(pooled=F.normalize(self.image(batch.regions.mean(dim=1)), dim=-1))

    def encode_texts(self, batch) -> Texts:
        mask = batch.mask[..., None].float()
        mean = (self.words(batch.words) * mask).sum(dim=1) / mask.sum(dim=1)
        return Texts(pooled=F.normalize(mean, dim=-1))

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(images.pooled @ texts.pooled.T)


class Attend(Matcher):
    """Words (read by a GRU) look at regions; the score is the mean cosine of a word and what it saw."""

    def __init__(self, regions: int, words: int) -> None:
        super().__init__()
        self.image = nn.Linear(regions, WIDTH)
        self.words = nn.Embedding(words, WIDTH)
        self.context = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def encode_images(self, batch) -> Images:
        return Images(local=F.normalize(self.image(batch.regions), dim=-1), mask=batch.mask)

    def encode_texts(self, batch) -> Texts:
        both = self.context(self.words(batch.words))[0]
        return Texts(local=F.normalize(both[..., :WIDTH] + both[..., WIDTH:], dim=-1), mask=batch.mask)

    def score(self, images: Images, texts: Texts) -> Scores:
        cosine = torch.einsum("ird,cwd->icwr", images.local, texts.local)
        weights = torch.softmax(9.0 * cosine, dim=-1)
        # |sum_r a_r v_r|^2 = a^T G a with the Gram matrix G of the regions: no (i, c, w, d) tensor is needed.
        gram = torch.einsum("ird,isd->irs", images.local, images.local)
        length = torch.einsum("icwr,icwr->icw", torch.einsum("icwr,irs->icws", weights, gram), weights)
        seen = (weights * cosine).sum(dim=-1) / length.clamp_min(1e-6).sqrt()
        mask = texts.mask[None].float()
        return Scores.same((seen * mask).sum(dim=-1) / mask.sum(dim=-1))


class AttendFrozen(Attend):
    """The same with frozen states of the miniature BERT in place of learned word vectors."""

    def __init__(self, regions: int, width: int) -> None:
        super().__init__(regions, 1)
        self.words = nn.Linear(width, WIDTH)

    def encode_texts(self, batch) -> Texts:
        both = self.context(self.words(batch.features))[0]
        return Texts(local=F.normalize(both[..., :WIDTH] + both[..., WIDTH:], dim=-1), mask=batch.mask)


PROBES = {"mean pool": (MeanPool, 6, 0.06), "attention": (Attend, 3, 0.06)}  # class, epochs, temperature


BERT_LAYERS = {"mini BERT, last layer": (-1,), "mini BERT, embeddings and last layer": (0, -1)}
BERT_PROBES = {name: (AttendFrozen, 3, 0.06) for name in BERT_LAYERS}


def contrast(scores: Tensor, images: Tensor, temperature: float) -> Tensor:
    """Cross entropy in both directions; a second caption of the same picture is no negative."""
    same = (images[:, None] == images[None, :]) & ~torch.eye(len(images), dtype=torch.bool)
    logits = (scores / temperature).masked_fill(same, -1e4)
    target = torch.arange(len(logits))
    return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


def train_probe(name: str, folder: Path, seed: int, passes: int = 1) -> dict[str, float]:
    """Train one probe and evaluate it on the test split."""
    torch.manual_seed(seed)
    train, test = open_split(folder, "train"), open_split(folder, "test")
    kind, epochs, temperature = (PROBES | BERT_PROBES)[name]
    epochs *= passes
    if name in BERT_PROBES:
        train_texts, test_texts = (bert_captions(split, layers=BERT_LAYERS[name]) for split in (train, test))
        model = kind(train.feature_dim, train_texts.feature_dim)
    else:
        vocabulary = Vocabulary.load(folder / "scenes_vocab.json")
        train_texts, test_texts = (WordCaptions(split, vocabulary) for split in (train, test))
        model = kind(train.feature_dim, len(vocabulary))
    loader = pair_loader(PairDataset(train, train_texts), batch_size=64, seed=seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=epochs * len(loader))
    start = time.process_time()
    for epoch in range(epochs):
        loader.batch_sampler.epoch = epoch
        for batch in loader:
            scores = model.score(model.encode_images(batch.images), model.encode_texts(batch.texts)).i2t
            loss = contrast(scores, batch.images.ids, temperature)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    seconds = time.process_time() - start
    scores = score_split(model, test, test_texts)
    return evaluate(scores, test.owner).as_dict() | {"seconds": seconds, **family_errors(scores.t2i.numpy(), folder)}


def family_errors(scores: np.ndarray, folder: Path) -> dict[str, float]:
    """Of the captions whose first picture is wrong: in how many does that picture come from the right family?"""
    records = json.loads((folder / "test_scenes.json").read_text())
    family = np.array([record["family"] for record in records])
    owner = np.repeat(np.arange(len(records)), 5)
    first = scores.argmax(axis=0)
    wrong = first != owner
    return {"wrong_in_family": float((family[first] == family[owner])[wrong].mean() * 100)}


def measure(spec: ScenesSpec, seeds: tuple[int, ...], probes: Iterable[str] = tuple(PROBES), passes: int = 1) -> dict:
    """Ceiling, ambiguity and probes on one dataset."""
    folder = scenes_folder(spec)
    truth = oracle_matrix("test", spec)
    owner = np.repeat(np.arange(spec.test), 5)
    result = {"ceiling": ceiling(truth, owner), "ambiguity": float(truth.sum(axis=0).mean())}
    result["fits_one"] = float((truth.sum(axis=0) == 1).mean() * 100)
    for name in probes:
        runs = [train_probe(name, folder, seed, passes) for seed in seeds]
        result[name] = {key: [round(run[key], 3) for run in runs] for key in runs[0]}
        print(name, "rsum", result[name]["rsum"], "seconds", result[name]["seconds"], flush=True)
    return result


KNOBS = {
    "as shipped": {},
    "no families": {"family": 0},
    "edits only, no retakes": {"retakes": 0, "edits": 4},
    "vague captions": {"colour": 30, "pattern": 5, "size": 5, "relation": 0, "place": 0, "third": 5},
    "full captions": {"colour": 95, "pattern": 80, "size": 80, "third": 80},
    "no junk regions": {"regions": 8, "missed": 0},
    "twice the regions": {"regions": 48},
}


def main(what: str = "shipped") -> None:
    if what not in OUTPUTS:
        raise input_error("scenes_probe.py", repr(what), f"one of {', '.join(OUTPUTS)}")
    torch.set_num_threads(1)
    if what == "shipped":
        result = measure(ScenesSpec(), (0, 1, 2))
    elif what == "bert":
        result = measure(ScenesSpec(), (0,), BERT_PROBES)
    else:
        result = {"train": KNOB_TRAIN, "generator_seed": DESIGN_SEED, "changes": {}}
        for name, change in KNOBS.items():
            print(name, flush=True)
            spec = ScenesSpec(DESIGN_SEED, train=KNOB_TRAIN, dev=10, knobs=replace(Knobs(), **change))
            result["changes"][name] = measure(spec, (0,), passes=KNOB_PASSES) | {"knobs": change}
    (RESULTS / OUTPUTS[what]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
