"""Loading, metrics, mining, feature files and search: ours, the straightforward version, and the bare work."""

from __future__ import annotations

import base64
import csv
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks import convert_tsv, mining
from benchmarks.attention_metrics import write_split
from benchmarks.harness import REGIONS, WIDTH
from benchmarks.runner import Absent, Case, Ratio, Work, faster, times
from itm_lab.data.bottom_up import convert
from itm_lab.data.selection import Wanted
from itm_utils import mining as itm_mining
from itm_utils.data.batches import PairDataset, WordCaptions, image_batch, pair_loader
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import END, START, UNK, Vocabulary, _tokenize_with_nltk
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import five_captions_each, retrieval_ranks
from itm_utils.models.scan import SCAN
from itm_utils.scoring import score_split

BATCH = 128
QUERIES = 20  # one of so many queries is ranked by the loop


class PlainPairs(Dataset):
    """One item at a time: the row made a tensor, the caption tokenised by NLTK whenever it is asked for."""

    def __init__(self, split: PrecompSplit, vocabulary: Vocabulary) -> None:
        self.features, self.captions, self.ids = np.load(split.features.path), split.captions, vocabulary.word2idx

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        words = [START, *_tokenize_with_nltk(self.captions[item]), END]
        return torch.tensor(self.features[item // 5]), torch.tensor([self.ids.get(w, self.ids[UNK]) for w in words])


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, list[int]]:
    """Longest caption first, images stacked, words padded."""
    items.sort(key=lambda item: len(item[1]), reverse=True)
    images, captions = zip(*items, strict=True)
    lengths = [len(caption) for caption in captions]
    padded = torch.zeros(len(captions), max(lengths), dtype=torch.long)
    for row, caption in enumerate(captions):
        padded[row, : lengths[row]] = caption
    return torch.stack(images), padded, lengths


def loading(images: int) -> Work:
    """An epoch of shuffled batches."""
    folder = tempfile.TemporaryDirectory()
    split, vocabulary = write_split(Path(folder.name), images, np.random.default_rng(0))
    batch = min(BATCH, split.n_captions)
    loader = pair_loader(PairDataset(split, WordCaptions(split, vocabulary)), batch, seed=0)
    public = DataLoader(PlainPairs(split, vocabulary), batch, shuffle=True, drop_last=True, collate_fn=collate)
    features = np.load(split.features.path, mmap_mode="r")

    def gather(keep: tempfile.TemporaryDirectory = folder) -> None:
        for rows in loader.batch_sampler:
            features[split.owner[rows]]

    return Work(
        ways={
            "ours": lambda: sum(len(part) for part in loader),
            "straightforward": lambda: sum(len(part[2]) for part in public),
            "bare gather": gather,
        },
        facts={"rows": split.n_captions // batch * batch},
    )


def recall(images: int) -> Work:
    """Ranks of all queries; the loop ranks some, and the rest is added."""
    owner = five_captions_each(images)
    scores = np.random.default_rng(0).normal(size=(images, 5 * images)).astype(np.float32)
    scores[owner, np.arange(5 * images)] += 3
    both, every = Scores.same(torch.from_numpy(scores)), QUERIES if images >= 10 * QUERIES else 1
    by_caption = scores.T

    def loop() -> np.ndarray:
        found = []
        for image in range(0, images, every):
            order = np.argsort(scores[image])[::-1]
            found.append(min(np.where(order == c)[0][0] for c in range(5 * image, 5 * image + 5)))
        for caption in range(0, 5 * images, every):
            order = np.argsort(by_caption[caption])[::-1]
            found.append(np.where(order == caption // 5)[0][0])
        return np.array(found)

    def ours() -> np.ndarray:
        ranks = retrieval_ranks(both, owner)
        return np.concatenate([ranks.i2t[::every], ranks.t2i[::every]])

    # two equal scores may change places
    return Work({"ours": ours, "straightforward": loop}, {"straightforward": every},
                {"ours": ours, "straightforward": loop}, tolerance=1.0, facts={"scores": scores.size})  # fmt: skip


def top_lists(images: int, texts: int, top_images: int) -> Work:
    """Lists of the hardest negatives of each image and caption; captions stand beside one vector each."""
    folder = tempfile.TemporaryDirectory()
    root = Path(folder.name)
    mining.write_data(root, images)
    split, vectors = open_split(root, "train"), mining.Vectors(root / "vectors.npy")
    rows = torch.from_numpy(np.load(root / "train_ims.npy"))
    columns, owner = torch.from_numpy(np.load(root / "vectors.npy")), torch.from_numpy(split.owner)
    block = min(1024, images)

    def ours(keep: tempfile.TemporaryDirectory = folder) -> np.ndarray:
        shutil.rmtree(root / "lists", ignore_errors=True)
        lists = itm_mining.mine(mining.OneProduct(), split, vectors, root / "lists", texts, top_images)
        return np.sort(np.asarray(lists.texts), axis=1)

    def straightforward() -> np.ndarray:
        """All scores at once, the positives masked, one top-k along each axis."""
        scores = rows @ columns.T
        scores[owner, torch.arange(len(owner))] = -torch.inf
        scores.topk(top_images, dim=0)
        return np.sort(scores.topk(texts, dim=1).indices.numpy(), axis=1)

    def product() -> None:
        for start in range(0, len(rows), block):
            rows[start : start + block] @ columns.T

    ways: dict[str, Callable] = {"ours": ours, "straightforward": straightforward, "product": product}
    differ = (ours() != straightforward()).mean()  # scores that agree to the last digits may change places
    if differ > 0.01:
        raise SystemExit(f"mining: {differ:.1%} of the lists differ")
    return Work(ways, facts={"pairs": images * len(columns), "entries_that_differ": float(differ)})


def faiss_lists(images: int, texts: int, top_images: int) -> Work:
    """Ours, and two searches of a flat index, whose lists still hold the positives."""
    try:
        import faiss
    except ImportError:
        raise Absent("faiss is not installed (`pip install faiss-cpu`)") from None
    faiss.omp_set_num_threads(1)
    work = top_lists(images, texts, top_images)
    with tempfile.TemporaryDirectory() as folder:
        mining.write_data(Path(folder), images)
        rows, columns = (np.load(Path(folder) / name)[:] for name in ("train_ims.npy", "vectors.npy"))

    def flat() -> None:
        for found, asked, most in ((columns, rows, texts + 5), (rows, columns, top_images + 1)):
            index = faiss.IndexFlatIP(found.shape[1])
            index.add(found)
            index.search(asked, most)

    return Work({"ours": work.ways["ours"], "faiss flat": flat}, facts={"pairs": images * len(columns)})


def feature_files(pictures: int) -> Work:
    """Bottom-up features in a TSV to the precomputed format; the plain reader keeps all rows and saves them."""
    folder = tempfile.TemporaryDirectory()
    root = Path(folder.name)
    tsv = root / "features.tsv"
    convert_tsv.write_tsv(tsv, pictures)
    names = [str(n) for n in range(1, pictures + 1)]

    def ours(keep: tempfile.TemporaryDirectory = folder) -> np.ndarray:
        shutil.rmtree(root / "ours", ignore_errors=True)
        convert([tsv], root / "ours", "train", Wanted(names))
        return np.load(root / "ours/train_ims.npy")

    def straightforward() -> np.ndarray:
        csv.field_size_limit(sys.maxsize)
        found = {}
        with tsv.open() as file:
            for row in csv.reader(file, delimiter="\t"):
                boxes, features = (np.frombuffer(base64.b64decode(part), dtype=np.float32) for part in row[4:6])
                found[row[0]] = features.reshape(REGIONS, -1), boxes.reshape(REGIONS, 4)
        np.save(root / "boxes.npy", np.stack([found[name][1] for name in names]))
        np.save(root / "plain.npy", np.stack([found[name][0] for name in names]))
        return np.load(root / "plain.npy")

    ways = {"ours": ours, "straightforward": straightforward}
    return Work(ways, outputs=ways, tolerance=0.0, facts={"bytes": tsv.stat().st_size})


def search(images: int) -> Work:
    """One sentence against all images of a folder, as ``itm search`` asks; or one image at a time."""
    folder = tempfile.TemporaryDirectory()
    split, vocabulary = write_split(Path(folder.name), images, np.random.default_rng(0))
    asked = replace(split, captions=split.captions[:1], owner=np.zeros(1, dtype=np.int64))
    texts = WordCaptions(asked, vocabulary)
    model = SCAN(len(vocabulary), split.feature_dim, width=WIDTH).eval()

    @torch.inference_mode()
    def straightforward(keep: tempfile.TemporaryDirectory = folder) -> Tensor:
        found = []
        for image in range(images):
            encoded = model.encode_images(image_batch(split, np.array([image])))
            found.append(model.score_pairs(encoded, model.encode_texts(texts.batch(np.array([0])))).t2i)
        return torch.stack(found)

    ways = {"ours": lambda: score_split(model, asked, texts).t2i, "straightforward": straightforward}
    return Work(ways, outputs=ways, facts={"images": images})


CASES = (
    Case("loader", "loading", "batches of 128 shuffled pairs from files, against one item at a time with NLTK, and "
         "against a bare gather of the same rows", loading,
         (faster("faster than one item at a time", 6), Ratio("rate, of a bare gather's", "bare gather", "ours", 0.65)),
         full={"images": 400}, tiny={"images": 4}, growth=tuple({"images": n} for n in (100, 200, 800)),
         grown=("ours", "bare gather")),
    Case("recall", "metrics", "ranks in a matrix of 5,000 x 25,000 scores, against one argsort per query", recall,
         (faster("faster than the loop", 35),), full={"images": 5000}, tiny={"images": 8}, rounds=3,
         growth=tuple({"images": n} for n in (1000, 2000, 8000))),
    Case("mining", "mining", "top 300 captions and 60 images among 5,000 x 25,000 vectors, against all scores and "
         "torch.topk, and against the bare product", top_lists,
         (faster("faster than all scores and top-k"), times("times the product", 1.49)),
         full={"images": 5000, "texts": 300, "top_images": 60}, tiny={"images": 40, "texts": 3, "top_images": 2},
         rounds=3, growth=tuple({"images": n, "texts": 300, "top_images": 60} for n in (1000, 2000, 10_000)),
         grown=("ours", "product")),
    Case("mining-faiss", "mining", "the same lists, against two searches of faiss's flat index", faiss_lists,
         (faster("faster than faiss", 1.5, than="faiss flat"),),
         full={"images": 5000, "texts": 300, "top_images": 60}, tiny={"images": 80, "texts": 3, "top_images": 2},
         rounds=3),
    Case("feature-files", "features", "bottom-up features from TSV to arrays, with checks and a journal, against a "
         "plain csv reader that keeps everything", feature_files,
         (faster("faster than a plain reader"),), full={"pictures": 200}, tiny={"pictures": 3}),
    Case("search", "search", "one sentence among the images of a folder, against one image at a time", search,
         (faster("faster than one image at a time"),), full={"images": 200}, tiny={"images": 4}, rounds=3),
)  # fmt: skip
