"""The page on trust: its tables come from files, nothing was lost, and every test that it names exists."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from itm_lab.publish.trust_page import ATTACKS, FAULTS, WORKS, circumstances, fragment

ROOT = Path(__file__).resolve().parents[2]
AREAS = {"evidence", "runs", "input", "code", "first run"}


@cache
def attacks() -> list[dict[str, Any]]:
    return yaml.safe_load((ROOT / ATTACKS).read_text(encoding="utf-8"))


@cache
def names_of_tests(path: str) -> set[str]:
    """Names of the test functions of a file, as Python reads it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_campaign_lost_nothing() -> None:
    counted = json.loads((ROOT / FAULTS).read_text(encoding="utf-8"))
    faults = [row for part in WORKS for row in counted[part]["faults"]]
    inputs = counted["inputs"]["inputs"]
    assert not sum(row["lost"] for row in faults) + sum(row["traceback"] for row in inputs)
    assert sum(row["same result"] + row["one clear error"] for row in faults) >= 200
    assert sum(row["accepted"] + row["one clear line"] for row in inputs) >= 500
    assert all(row["same result"] + row["one clear error"] for row in faults), "a kind of fault that never struck"
    assert {"itm run, the command", "itm run, its kernel"} < {row["work"] for row in faults}


def test_every_attack_names_a_test_that_is_there() -> None:
    assert len(attacks()) >= 53 and {attack["area"] for attack in attacks()} == AREAS
    assert len({attack["attack"] for attack in attacks()}) == len(attacks())
    for attack in attacks():
        assert attack.keys() == {"area", "attack", "before", "now", "test"} and all(attack.values()), attack
        for named in [attack["test"]] if isinstance(attack["test"], str) else attack["test"]:
            path, _, name = named.partition("::")
            assert name in names_of_tests(path), named


def test_the_page_shows_the_sums() -> None:
    text = "\n".join(fragment(ROOT))
    assert "0 lost" in text and "0 traceback" in text and "| area" in text
    assert f"{len(attacks())} attacks: " in text


def test_a_state_with_changes_is_said() -> None:
    run = {"began": "2026-01-02T03:04:05+00:00", "seconds": 120, "machine": "Linux", "python": "3.11", "torch": "2"}
    assert "2026-01-02, 2 minutes, commit `aaaaaaaaaaaa` with changes, Linux" in circumstances(
        run | {"commit": "a" * 40 + "+"}
    )
    assert "commit `aaaaaaaaaaaa`, Linux" in circumstances(run | {"commit": "a" * 40})
