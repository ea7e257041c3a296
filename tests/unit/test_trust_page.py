"""The page on trust: its tables come from files, nothing was lost, and every test that it names exists."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from itm_lab.publish.trust_page import ATTACKS, FAULTS, fragment

ROOT = Path(__file__).resolve().parents[2]


def test_the_campaign_lost_nothing() -> None:
    counted = json.loads((ROOT / FAULTS).read_text(encoding="utf-8"))
    assert not sum(row["lost"] for row in counted["faults"]) + sum(row["traceback"] for row in counted["inputs"])
    assert sum(row["same result"] + row["one clear error"] for row in counted["faults"]) >= 200
    assert sum(row["accepted"] + row["one clear line"] for row in counted["inputs"]) >= 500


def test_every_attack_names_a_test_that_is_there() -> None:
    for attack in yaml.safe_load((ROOT / ATTACKS).read_text(encoding="utf-8")):
        path, _, name = attack["test"].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), attack


def test_the_page_shows_the_sums() -> None:
    text = "\n".join(fragment(ROOT))
    assert "0 lost" in text and "0 traceback" in text and "| area" in text
