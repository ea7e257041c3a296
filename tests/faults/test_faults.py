"""A few faults and damaged inputs of the campaign: every work, every kind of fault, every reader, every command.

`make faults` strikes more than two hundred times and reads more than five hundred inputs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from campaign import lost_after
from command_lines import COMMANDS, call, lines_of, write_checkout
from damaged_inputs import CLEAR, READERS, TRACEBACK, draw, fresh, outcome_of, read_damaged
from process_tree import Tree
from striking import KINDS, LOST
from workloads import WORKLOADS

# Every work once and every kind at least once; the campaign strikes every work with every kind.
QUICK = list(zip(WORKLOADS, [*KINDS, *KINDS], strict=False))


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """Works are struck in forked children, which cannot train once their parent has trained on a second device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_nothing_is_lost(name: str, kind: str, tmp_path: Path, fresh_process: ProcessPoolExecutor) -> None:
    assert fresh_process.submit(lost_after, name, kind, tmp_path).result() == []


def test_every_work_and_every_kind_of_fault_is_tried() -> None:
    assert {name for name, _ in QUICK} == {*WORKLOADS} and {kind for _, kind in QUICK} == {*KINDS}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_accepted_or_one_clear_line(name: str, tmp_path: Path) -> None:
    outcomes = sum((counts for _, counts in read_damaged(READERS[name], tmp_path / "x", 1)), Counter())
    assert not outcomes[TRACEBACK] and outcomes[CLEAR]


def within(name: str, value: Any) -> Callable[[bytes], bytes]:
    """A JSON file with another value under a name."""
    return lambda content: json.dumps({**json.loads(content), name: value}).encode()


def without_seal(name: str, value: Any) -> Callable[[bytes], bytes]:
    """The same in a note from before notes had seals."""
    return lambda content: json.dumps(
        {key: one for key, one in json.loads(content).items() if key != "seal"} | {name: value}
    ).encode()


def odd_direction(content: bytes) -> bytes:
    """Options of public SCAN with two values of one option."""
    about = json.loads(content)
    return json.dumps(about | {"options": about["options"] | {"bi_gru": [True, None]}}).encode()


NESTED = b"[" * 100_000
# What the campaign found, each as small as it could be made: tracebacks once.
FOUND: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("a vocabulary", within("word2idx", {"<pad>": float("inf")})),
    ("a receipt's ranks", lambda content: content[:70] + b"\xff" * 40 + content[110:]),
    ("the journal of an extraction", without_seal("batches", None)),
    ("the journal of an extraction", without_seal("remarks", [["image left out", "p99.png"]])),
    ("the journal of an extraction", without_seal("rows", {"train": -1})),
    ("offline lists, manifest", lambda content: NESTED),
    ("a recorded choice", lambda content: NESTED),
    ("a notebook", within("cells", None)),
    ("a published checkpoint's options", odd_direction),
    ("option -p", lambda content: b"\xe9" + content),
    ("option -p", lambda content: b"variant=\xff"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), FOUND)
def test_what_was_found_is_one_clear_line(name: str, change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = fresh(READERS[name], tmp_path / "x")
    path.write_bytes(change(path.read_bytes()))
    outcome, said = outcome_of(lambda: READERS[name].read(path))
    assert outcome == CLEAR, said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_checkout(folder := tmp_path_factory.mktemp("book") / "checkout")
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_does_its_work_or_says_what_is_wrong(name: str, checkout: Path) -> None:
    assert not draw(lines_of(name), 2, lambda words: call(words, checkout))[TRACEBACK]


def test_a_place_on_the_web_that_is_no_text_is_one_clear_line(checkout: Path) -> None:
    words = ["notebooks", "launch", "copies", "--repository", "https://example.org/a", "--ref", "\udce9"]
    outcome, said = call(words, checkout)
    assert outcome == CLEAR, said


@pytest.mark.slow
def test_a_run_whose_kernel_is_killed_goes_on(tmp_path: Path) -> None:
    (outcome,) = Tree(tmp_path, "its kernel").faults("SIGKILL", 1)
    assert outcome.kind != LOST, outcome.said
