"""Small data in the real file format, and the matchers that every generic test goes through."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_dataset import write_toy_dataset

import itm_utils.models
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import Matcher, TextBatch

# Two threads on two busy cores wait for each other; one thread a process is faster and repeatable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
TOKEN_DIM = 12  # width of the toy token states
# Tests of these files share runs that take minutes: one worker does all of a file, and begins with it.
TOGETHER = ("test_paper_scale.py",)
# Many short tests that share nothing: any worker does the next one.
APART = ("test_matchers.py", "test_objectives.py", "test_no_host_sync.py")


def place(item: pytest.Item) -> int:
    """When a test starts: shared runs first, then slow tests, then fast files, then what can be split finely."""
    if item.path.name in TOGETHER:
        return 0
    if item.get_closest_marker("slow"):
        return 1
    return 3 if item.path.name in APART else 2


def pytest_itemcollected(item: pytest.Item) -> None:
    """Name the groups that one worker does (``--dist loadgroup``); xdist reads them when the collection is complete."""
    if place(item) in (0, 2):
        item.add_marker(pytest.mark.xdist_group(item.path.name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep two workers busy (``--no-loadscope-reorder``): slow tests one by one, whoever is free takes the next."""
    items.sort(key=place)


@pytest.fixture(scope="session")
def toy_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_dataset(tmp_path_factory.mktemp("toy"), {"train": 40, "dev": 12, "test": 12})


@pytest.fixture(scope="session")
def toy_vocabulary(toy_root: Path) -> Vocabulary:
    return Vocabulary.load(toy_root / "toy_vocab.json")


@pytest.fixture
def toy_train(toy_root: Path) -> PrecompSplit:
    return open_split(toy_root, "train")


@pytest.fixture
def toy_pairs(toy_train: PrecompSplit, toy_vocabulary: Vocabulary) -> PairDataset:
    return PairDataset(toy_train, WordCaptions(toy_train, toy_vocabulary))


class WordsAndStates(WordCaptions):
    """Captions as word ids and as token states at once: every matcher finds what it reads."""

    def batch(self, captions, spans: bool = False) -> TextBatch:
        batch = super().batch(captions, spans)
        table = torch.randn(100, TOKEN_DIM, generator=torch.Generator().manual_seed(0))
        return replace(batch, features=table[batch.words] * batch.mask[..., None])


@pytest.fixture
def any_pairs(toy_train: PrecompSplit, toy_vocabulary: Vocabulary) -> PairDataset:
    """Training pairs for any matcher."""
    return PairDataset(toy_train, WordsAndStates(toy_train, toy_vocabulary))


def exported(kind: type | None = None) -> list:
    """Every class or function that the chapters export, optionally only subclasses of ``kind``."""
    found = []
    for module in pkgutil.iter_modules(itm_utils.models.__path__):
        loaded = importlib.import_module(f"itm_utils.models.{module.name}")
        for value in vars(loaded).values():
            if getattr(value, "__module__", None) != loaded.__name__:
                continue
            if kind is None or (inspect.isclass(value) and issubclass(value, kind)):
                found.append(value)
    return found


def whole_matchers() -> list[type[Matcher]]:
    """Exported matchers that are built by their own constructor and are no base of another: the models of the book."""
    found = [matcher for matcher in exported(Matcher) if matcher.__init__ is not Matcher.__init__]
    return [matcher for matcher in found if not any(o is not matcher and issubclass(o, matcher) for o in found)]


def small(matcher: type[Matcher], vocabulary_size: int, image_dim: int, **options: Any) -> Matcher:
    """A matcher of a few units, built from the arguments that all of them share, and ``options`` of its own."""
    takes = inspect.signature(matcher).parameters
    reads_words = "vocabulary_size" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    texts = {"vocabulary_size": vocabulary_size} if reads_words else {}
    texts |= {"token_dim": TOKEN_DIM} if "token_dim" in takes else {}
    if "intra" in takes:  # a model of two stages: sizes belong to the stages
        stage = {"token_dim": TOKEN_DIM, "width": 8, "heads": 2, "feed_forward": 8}
        stages = {name: stage | options.pop(name, {}) for name in ("intra", "inter")}
        return matcher(image_dim=image_dim, **stages, **options)
    heads = {"heads": 2} if "heads" in takes else {}
    return matcher(image_dim=image_dim, **({"width": 8} | heads | texts | options))


def listens_to_interrupts() -> None:
    """For ``preexec_fn``: a shell starts its background jobs deaf to Ctrl-C, and they pass it on to their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
