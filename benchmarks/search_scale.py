"""Search at scale: what re-ranking keeps, for every attention model, and a large collection behind an index.

Two parts. *Curves*: each attention model of the book, trained for a few passes over Scenes, scores all test pairs; a cheap
score retrieves a share of the candidates of every query, the full score orders them, and rsum is measured for each
share, with the processor time of both ways. *Collection*: captions of Scenes' grammar, no two alike, go through
SCAN's text encoder into vectors; faiss searches them exactly, by inverted lists and by a graph.

    python -m benchmarks.search_scale [--captions 1000000] [--epochs 2] [--percent 50]

(one thread, ten to fifteen minutes and 3 GB of memory; writes results/search_scale.json after every model, and called again with the same
settings measures what is missing there)
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from benchmarks.harness import finish, start, timed
from itm_lab.data.opening import token_states
from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.index.collection import new_captions
from itm_lab.index.nearest import build_nearest, nearest, read_nearest, write_nearest
from itm_lab.photos.retrieve import caption_vectors
from itm_lab.records.chapter import Chapter
from itm_utils.data.batches import WordCaptions, image_batch
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import Images, Matcher, Scores, Texts
from itm_utils.metrics.retrieval import evaluate
from itm_utils.models.search_at_scale import candidate_lists, rerank, score_candidates, summary_vectors
from itm_utils.scoring import encode_split, evaluating, score_all

ROOT = Path(__file__).parent.parent
MODELS = {
    "VSE++": "vsepp/scenes/after_warmup",
    "SCAN": "scan/scenes/t2i_avg",
    "BFAN": "bfan/scenes/equal",
    "PFAN": "pfan/scenes/t2i",
    "SGRAF": "sgraf/scenes/saf",
    "MMCA": "mmca/scenes/full",
    "DCPA": "dcpa/scenes/two_stages",
}
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
TIMED_SHARES = (0.05, 0.1)
GRAPH = 200_000  # vectors of the graph, which takes far longer to build than inverted lists
CANDIDATES = 200  # captions that the full score orders in the second part


# ------------------------------------------------------------------------------------------------- curves


class Trained:
    """A model of a chapter after a short training on Scenes, and its encodings of the test split."""

    def __init__(self, name: str, epochs: int, percent: int) -> None:
        experiment = find_experiment(ROOT, MODELS[name])
        changes: dict[str, Any] = {
            "epochs": epochs,
            "evaluate_on": "test",
            "run_dir": "",
            "train_fraction": percent / 100,
        }
        if name == "DCPA":  # stage two in the same run, as long as the others
            changes |= {"stage_one": "", "inter_epochs": epochs, "inter_warmup_epochs": 1}
        self.parameters = experiment.values(changes)
        chapter = {"VSE++": "01_vsepp", "SCAN": "02_scan", "BFAN": "03_bfan", "PFAN": "04_pfan", "SGRAF": "07_sgraf"}
        chapter |= {"MMCA": "08_mmca", "DCPA": "09_dcpa"}
        module = import_module(f"itm_utils.models.{chapter[name].partition('_')[2]}")
        self.name = name
        run = Chapter(chapter[name], self.parameters)
        frozen = "text_encoder" in self.parameters and self.parameters.get("text_backbone") != "gru"
        self.data = run.open(token_states(self.parameters) if frozen else None)
        torch.manual_seed(self.parameters["seed"])
        self.model: Matcher = module.build(self.parameters, len(self.data.vocabulary), self.data.train.feature_dim)
        begin = time.process_time()
        for stage in module.stages(self.parameters, self.model):
            run.train(stage, folder=run.folder / stage.name)
        self.seconds = time.process_time() - begin
        self.images, self.texts = encode_split(self.model, self.data.test, self.data.test_texts)

    @property
    def own(self) -> torch.Tensor:
        """(i, c) inner products of the model's own vectors."""
        return summary_vectors(self.images) @ summary_vectors(self.texts).T


def curve(cheap: torch.Tensor, full: Scores, owner: np.ndarray) -> dict[str, list[float]]:
    """rsum and the share of all pairs that were scored, for each share of candidates."""
    rows: dict[str, list[float]] = {"share": [], "pairs": [], "rsum": []}
    for share in SHARES:
        lists = candidate_lists(cheap, share)
        rows["share"].append(share)
        rows["pairs"].append((lists[0] | lists[1]).float().mean().item())
        rows["rsum"].append(evaluate(rerank(cheap, full, lists), owner).rsum)
    return rows


def measure_curves(one: Trained, cheap: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Quality of each cheap score, and processor seconds of scoring everything and of scoring what is listed."""
    owner, sides = one.data.test.owner, (one.images, one.texts)
    found: dict[str, Any] = {}
    whole = timed(lambda: found.update(full=score_all(one.model, *sides, progress=False)))
    full: Scores = found["full"]
    seconds = {}
    with evaluating(one.model):
        cheap_seconds = min(timed(lambda: one.own) for _ in range(3))
        for share in TIMED_SHARES:
            lists = candidate_lists(cheap["own"], share)
            seconds[str(share)] = timed(partial(score_candidates, one.model, *sides, lists))
    result = {
        "train_seconds": one.seconds, "full_rsum": evaluate(full, owner).rsum, "full_seconds": whole,
        "cheap_seconds": cheap_seconds, "listed_seconds": seconds,
        "cheap_rsum": {name: evaluate(Scores.same(scores), owner).rsum for name, scores in cheap.items()},
        "curves": {name: curve(scores, full, owner) for name, scores in cheap.items()},
    }  # fmt: skip
    print(one.name, {name: value for name, value in result.items() if name != "curves"}, flush=True)
    return result


def cheap_scores(one: Trained, vsepp: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every cheap score that may stand before a model: (i, c) each."""
    cheap = {"own": one.own, "VSE++": vsepp}
    if one.name == "DCPA":
        with evaluating(one.model):
            cheap["stage one"] = one.model.intra.score(*one.model.intra_encodings(one.images, one.texts)).i2t
    return cheap


# ------------------------------------------------------------------------------------------------- a collection


def encode_all(one: Trained, captions: list[str], chunk: int = 50_000) -> np.ndarray:
    """Vectors of all captions, tokenised and encoded a chunk at a time."""
    vocabulary: Vocabulary = one.data.vocabulary
    parts = []
    for begin in range(0, len(captions), chunk):
        some = captions[begin : begin + chunk]
        said = replace(one.data.test, captions=some, owner=np.zeros(len(some), np.int64))
        parts.append(caption_vectors(one.model, WordCaptions(said, vocabulary)))
    return np.concatenate(parts)


def milliseconds(values: list[float]) -> dict[str, float]:
    """Percentiles of processor seconds, in milliseconds."""
    return {f"p{level}": 1000 * float(np.percentile(values, level)) for level in (50, 95, 99)}


def probe(index: Any, kind: str, queries: np.ndarray, exact: np.ndarray, effort: int) -> dict[str, Any]:
    """Processor time of single queries, and how many of the exact nearest 10 and candidates were found."""
    seconds, numbers = [], []
    for query in queries:
        begin = time.process_time()
        numbers.append(nearest(index, kind, query[None], CANDIDATES, effort)[1][0])
        seconds.append(time.process_time() - begin)
    found: dict[str, Any] = {"effort": effort, "milliseconds": milliseconds(seconds)}
    for count in (10, CANDIDATES):
        hits = [len(np.intersect1d(a[:count], b[:count])) for a, b in zip(numbers, exact, strict=True)]
        found[f"recall_{count}"] = float(np.mean(hits)) / count
    return found


EFFORTS = {"flat": (0,), "ivf": (1, 2, 4, 8, 16, 32, 64), "hnsw": (16, 32, 64, 128, 256, 512)}


def measure_kind(kind: str, vectors: np.ndarray, queries: np.ndarray, exact: np.ndarray) -> tuple[dict[str, Any], Any]:
    """Build, write, open memory-mapped and search one kind of index."""
    begin = time.process_time()
    index = build_nearest(vectors, kind)
    built = time.process_time() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        write_nearest(index, path)
        del index
        before = resident()
        mapped = read_nearest(path, kind)
        opened = resident() - before
        probes = [probe(mapped, kind, queries, exact, effort) for effort in EFFORTS[kind]]
        size, touched = path.stat().st_size, resident() - before
    found = {
        "vectors": len(vectors), "build_seconds": built, "file_bytes": size, "opened_bytes": opened,
        "touched_bytes": touched, "probes": probes,
    }  # fmt: skip
    print(kind, found, flush=True)
    return found, mapped


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def whole_queries(one: Trained, index: Any, kind: str, captions: list[str], count: int) -> dict[str, Any]:
    """A query from an image to its captions, by step: encode, retrieve, read and encode candidates, score."""
    steps: dict[str, list[float]] = {name: [] for name in ("encode", "retrieve", "encode candidates", "score", "whole")}
    for image in range(count):
        marks = [time.process_time()]
        with evaluating(one.model):
            encoded: Images = one.model.encode_images(image_batch(one.data.test, np.array([image])))
            query = summary_vectors(encoded).numpy()
            marks.append(time.process_time())
            numbers = nearest(index, kind, query, CANDIDATES)[1][0]
            marks.append(time.process_time())
            some = [captions[number] for number in numbers]
            said = replace(one.data.test, captions=some, owner=np.zeros(len(some), np.int64))
            texts: Texts = one.model.encode_texts(WordCaptions(said, one.data.vocabulary).batch(np.arange(len(some))))
            marks.append(time.process_time())
            score_all(one.model, encoded, texts, progress=False)
            marks.append(time.process_time())
        for name, seconds in zip(steps, [*np.diff(marks), marks[-1] - marks[0]], strict=True):
            steps[name].append(float(seconds))
    return {name: milliseconds(values) for name, values in steps.items()}


def part_collection(one: Trained, count: int) -> dict[str, Any]:
    """Generate, encode, index and ask."""
    begin = time.process_time()
    captions = list(new_captions(count, one.data.train.captions))
    assert len(set(captions)) == count
    generated = time.process_time() - begin
    begin = time.process_time()
    vectors = encode_all(one, captions)
    encoded = time.process_time() - begin
    print(count, "captions", captions[:: count // 5], generated, encoded, flush=True)
    queries = summary_vectors(one.images)[random.Random(0).sample(range(len(one.images)), 200)].numpy()
    kinds, steps = {}, {}
    for kind in ("flat", "ivf", "hnsw"):
        some = vectors[:GRAPH] if kind == "hnsw" else vectors
        exact = nearest(build_nearest(some, "flat"), "flat", queries, CANDIDATES)[1]
        kinds[kind], index = measure_kind(kind, some, queries, exact)
        if kind == "ivf":
            steps = whole_queries(one, index, kind, captions, len(queries))
    return {
        "captions": count, "width": vectors.shape[1], "words": float(np.mean([len(c.split()) for c in captions])),
        "text_bytes": sum(len(caption) + 1 for caption in captions), "generate_seconds": generated,
        "encode_seconds": encoded, "queries": len(queries), "candidates": CANDIDATES, "kinds": kinds, "whole": steps,
        "examples": captions[:: count // 5][:5],
    }  # fmt: skip


def known_results(path: Path, what: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call with the same settings has measured."""
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["what"] == what:
            return {name: found[name] for name in ("models", "collection", "processor_seconds", "peak_bytes")}
    return {"models": {}, "collection": None, "processor_seconds": 0.0, "peak_bytes": 0}


def main() -> None:
    args = start(__doc__ or "", "search_scale.json", captions=1_000_000, epochs=2, percent=50)
    faiss.omp_set_num_threads(1)
    what = {"epochs": args.epochs, "percent": args.percent, "captions": args.captions, "threads": 1,
            "seconds": "of the processor", "faiss": faiss.__version__}  # fmt: skip
    result = known_results(args.out, what)
    before, begin, trained = result["processor_seconds"], time.process_time(), {}

    def train(name: str) -> Trained:
        if name not in trained:
            trained[name] = Trained(name, args.epochs, args.percent)
        return trained[name]

    def note() -> None:
        result["peak_bytes"] = max(result["peak_bytes"], 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        result["processor_seconds"] = before + time.process_time() - begin
        finish(args, {"what": what, **result})

    for name in MODELS:
        if name not in result["models"]:
            vsepp = train("VSE++")
            if name == "VSE++":
                rsum = evaluate(Scores.same(vsepp.own), vsepp.data.test.owner).rsum
                result["models"][name] = {"train_seconds": vsepp.seconds, "full_rsum": rsum}
            else:
                result["models"][name] = measure_curves(train(name), cheap_scores(train(name), vsepp.own))
            note()
        if name == "SCAN" and result["collection"] is None:  # early: most of the page rests on it
            result["collection"] = part_collection(train("SCAN"), args.captions)
            note()
        if name not in ("VSE++", "SCAN"):
            trained.pop(name, None)


if __name__ == "__main__":
    main()
