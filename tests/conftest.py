"""Small data in the real file format, and the order in which two workers do the tests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import TOKEN_DIM
from toy_dataset import write_toy_dataset

from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.matcher import TextBatch

# Two threads on two busy cores wait for each other; one thread a process is faster and repeatable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.manual_seed leaves a note for every kind of GPU that has not started yet, each with the stack of calls as text:
# milliseconds, and in tests stacks are deep. Where there is no such GPU nobody will read it.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        kind.manual_seed_all = lambda seed: None
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
