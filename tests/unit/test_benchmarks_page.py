"""The page on benchmarks: every committed ratio is on it, and every target that is missed has a note."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from itm_lab.publish.benchmarks_page import (
    BENCH,
    HEADS,
    NOTES,
    fragment,
    last_rise,
    missed,
    profile_cells,
    reached,
    rows,
    summary,
)

ROOT = Path(__file__).resolve().parents[2]
CASES = json.loads((ROOT / BENCH).read_text(encoding="utf-8"))["cases"]


def test_every_case_of_the_command_is_committed() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {line.split()[0] for line in listed.stdout.splitlines()} == set(CASES)


def without_a_note(cases: dict, notes: dict) -> set[str]:
    """Missed targets that nobody explains."""
    return {name for name in missed(cases) if not notes.get(name, "").strip()}


def test_every_missed_target_has_a_note() -> None:
    notes = yaml.safe_load((ROOT / NOTES).read_text(encoding="utf-8"))
    assert set(notes) <= set(CASES)
    assert without_a_note(CASES, notes) == set()


def test_a_missed_target_without_a_note_is_found() -> None:
    slow = {"ratios": {"faster": {"ratio": 1.0, "target": 2.0, "lower_is_better": False}}}
    assert without_a_note({"slow": slow}, {"slow": " "}) == {"slow"}
    assert without_a_note({"slow": slow}, {"slow": "Its products are all there is."}) == set()


def test_a_case_that_was_not_measured_says_why() -> None:
    (row,) = rows({"what": "lists", "ratios": {}, "absent": "faiss is not installed"})
    assert row[:2] == ["lists", "not measured: faiss is not installed"]
    assert len(row) == len(HEADS)


def test_the_page_shows_every_ratio() -> None:
    text = "\n".join(fragment(ROOT))
    for case in CASES.values():
        for one in case["ratios"].values():
            assert f"**{one['ratio']:.2f}**" in text
    assert summary(CASES) in text
    assert text.count("<polyline") >= 2 * sum("growth" in case for case in CASES.values())
    assert "OfflineLoss" in text


@pytest.mark.parametrize(
    ("lower", "now", "outcome"), [(False, 1.9, False), (False, 2.0, True), (True, 1.9, True), (True, 2.1, False)]
)
def test_targets_have_a_direction(lower: bool, now: float, outcome: bool) -> None:
    assert reached({"target": 2.0, "ratio": now, "lower_is_better": lower}) is outcome
    assert reached({"target": None, "ratio": now, "lower_is_better": lower}) is None


@pytest.mark.parametrize(("lower", "alone"), [(False, "4.00"), (True, "1.00")])
def test_products_alone_can_only_be_better(lower: bool, alone: str) -> None:
    found = {"largest": {"mm": 0.5}, "seconds": {"ours": 2.0}, "product_seconds": {"ours": 1.0}}
    assert profile_cells(found, {"ratio": 2.0, "lower_is_better": lower}) == ["`mm` 50%", "50%", alone]


@pytest.mark.parametrize(("last", "said"), [(105, "flat"), (210, "grows 2.1 times"), (None, "not known")])
def test_the_page_says_whether_memory_is_flat(last: int | None, said: str) -> None:
    found = [(100, {"peak_bytes": {"ours": 100}}), (300, {"peak_bytes": {"ours": last}})]
    assert last_rise("scan", found).startswith(f"scan, {said}")
