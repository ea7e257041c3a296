"""The page on photographs: every variant on Flickr8k with its recalls, the baseline, and two worlds' verdicts side by side."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from itm_lab.evidence.ledger import Verdict
from itm_lab.evidence.statistics import Interval
from itm_lab.evidence.verdicts import ComparisonResult
from itm_lab.publish.photographs_page import BASELINES, recalls, verdicts
from itm_lab.records.rules import RECALLS


def receipt(rsum: float, seed: int = 0, **parameters: str) -> dict:
    metrics = {name: {"value": rsum / 6} for name in RECALLS} | {"rsum": {"value": rsum}}
    return {"schema": 4, "metrics": metrics, "parameters": parameters, "models": 1, "seed": seed}


def runs(*rsums: float, **parameters: str) -> dict:
    return {seed: (Path(), receipt(rsum, seed, **parameters)) for seed, rsum in enumerate(rsums)}


def rows_of(lines: list[str]) -> list[list[str]]:
    table = [line for text in lines for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]


def test_arms_are_sorted_among_them_the_yardstick(tmp_path: Path) -> None:
    found = {
        ("02_scan", "SCAN t2i AVG", "flickr8k"): runs(240.0, 252.0, 246.0),
        ("02_scan", "SCAN t2i AVG", "scenes"): runs(500.0),
        ("06_saem", "SAEM", "flickr8k"): runs(300.0, text_encoder="data/minilm"),
        ("09_dcpa", "DCPA GRU", "flickr8k"): runs(200.0, text_encoder="data/minilm", text_backbone="gru"),
    }
    ledger = SimpleNamespace(root=tmp_path, receipts=found)
    assert [row[0] for row in rows_of(list(recalls(ledger)))] == ["SAEM", "SCAN t2i AVG", "DCPA GRU"]
    measured = {"test": dict.fromkeys(RECALLS, 40.65) | {"rsum": 243.9}, "what": {"text": "bag of words"}}
    (tmp_path / BASELINES[0]).parent.mkdir(parents=True)
    (tmp_path / BASELINES[0]).write_text(json.dumps(measured))
    saem, scan, cca, gru = rows_of(list(recalls(ledger)))
    assert [row[2] for row in (saem, scan, cca, gru)] == ["minilm", "words", "bag of words", "words"]
    assert scan[3] == scan[4] == "41.0/41.0/41.0" and scan[-2:] == ["246.0 \\[231.1, 260.9\\]", "3"]
    assert saem[-2:] == ["300.0", "1"]  # one seed has no interval
    assert cca[-2:] == ["243.9", "–"]


def test_every_run_is_a_dot_beside_the_yardsticks(tmp_path: Path) -> None:
    found = {("06_saem", "SAEM", "flickr8k"): runs(300.0, 310.0), ("02_scan", "SCAN <t2i>", "flickr8k"): runs(200.0)}
    for name, rsum in zip(BASELINES, (243.9, 254.0), strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        measured = {"test": dict.fromkeys(RECALLS, rsum / 6) | {"rsum": rsum}, "what": {"text": "x"}}
        (tmp_path / name).write_text(json.dumps(measured))
    drawn = "\n".join(recalls(SimpleNamespace(root=tmp_path, receipts=found)))
    assert drawn.count("<circle") == 3 and drawn.count("stroke-dasharray") == 2
    assert drawn.index("SAEM</text>") < drawn.index("SCAN &lt;t2i&gt;</text>")  # the best above


def test_a_loss_that_never_improved_on_its_warm_up_is_marked(tmp_path: Path) -> None:
    found = {("10_aoq", "VSRN OffQuin", "flickr8k"): runs(150.0, 155.0, warmup_epochs=2)}
    for (_, run), chosen in zip(next(iter(found.values())).values(), (2.0, 3.0), strict=True):
        run["metrics"]["chosen_epoch"] = {"value": chosen}
    lines = list(recalls(SimpleNamespace(root=tmp_path, receipts=found)))
    assert rows_of(lines)[0][0] == "VSRN OffQuin †"
    assert "† VSRN OffQuin kept the weights of its warm-up in seed 0:" in lines[-1]


def test_a_row_of_the_old_protocol_says_so(tmp_path: Path) -> None:
    found = {("06_saem", "SAEM", "flickr8k"): runs(300.0, 310.0)}
    for _, run in found["06_saem", "SAEM", "flickr8k"].values():
        run["schema"] = 2
    assert rows_of(list(recalls(SimpleNamespace(root=tmp_path, receipts=found))))[0][0] == "SAEM, old protocol"


def test_without_receipts_the_page_says_so(tmp_path: Path) -> None:
    lines = list(recalls(SimpleNamespace(root=tmp_path, receipts={})))
    assert lines[0].startswith("## ") and "No run" in lines[1] and len(lines) == 2


def test_verdicts_of_two_worlds_stand_side_by_side() -> None:
    words = {("A-01", "flickr8k"): "partly", ("A-01", "scenes"): "reproduced"}
    held = [ComparisonResult("a − b", Interval(1, 0, 2), "above 0", status, 3) for status in ("holds", "open", "open")]
    held[1] = ComparisonResult("a − b", Interval(-1, -1, -1), "above 0", "open", 3)

    def verdict(name: str, dataset: str) -> Verdict:
        return Verdict(name, words.get((name, dataset), "not run"), dataset, findings=tuple(held))

    rules = {
        "A-01": {"words": "More is more.", "datasets": {"scenes": 5, "flickr8k": 3}},
        "A-02": {"datasets": {"flickr8k": 3}},
    }
    rules |= {"A-03": {"datasets": {"scenes": 5}}, "A-04": {"kind": "table"}}
    claims = {name: {"claim": f"What {name} says."} for name in rules}
    lines = list(verdicts(SimpleNamespace(rules=rules, verdict=verdict, claims=claims, foundations={})))
    assert "1 of the 2 claims" in lines[1]
    assert rows_of(lines) == [["A-01", "partly", "reproduced", "1 hold, 2 open"]]
    assert lines[-5] == "**A-01** What A-01 says. *Partly* on Flickr8k. Our rule: More is more.\n"
    assert lines[-4] == "- holds: a − b: +1.0 [+0, +2.0], n = 3; expected above 0"
    assert lines[-3] == "- open: a − b: -1.0 [-1.0, -1.0], n = 3 (the same number in every seed); expected above 0"
