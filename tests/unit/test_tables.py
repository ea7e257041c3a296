"""Tables that chapters print: receipts, searches, published rows."""

from __future__ import annotations

import pytest

from itm_lab.evidence.statistics import seed_interval
from itm_lab.evidence.tables import chance_beside, lab_table, published_rows, search_table
from itm_lab.records.receipts import variant_values


def test_an_arm_counts_only_with_all_its_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = lab_table({"SCAN t2i AVG": "02_scan", "nobody": "02_scan"}, seeds=range(5, 10))
    assert rows == {"SCAN t2i AVG": seed_interval(variant_values("02_scan", "SCAN t2i AVG"))}
    printed = capsys.readouterr().out.splitlines()
    assert "not run yet (0 of 5 seeds)" in printed[1]
    assert f"{rows['SCAN t2i AVG'].value:.1f}" in printed[0]
    assert lab_table({"SCAN t2i AVG": "02_scan"}, seeds=(5, 4)) == {}


def test_a_search_lists_the_values_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    search_table("02_scan", ["SCAN i2t LSE", "SCAN i2t"])
    searched, unknown = capsys.readouterr().out.splitlines()
    assert [pair.split(":")[0] for pair in searched.removeprefix("SCAN i2t LSE").split("  ") if pair.strip()] == [
        "0.004",
        "0.008",
        "0.016",
    ]
    assert unknown.split() == ["SCAN", "i2t", "none"]  # the name of a variant is not a prefix


def test_published_rows_are_of_the_method_itself() -> None:
    plain = [(found.place, found.photos, found.rsum) for found in published_rows("PFAN")]
    assert plain == [("CCR/CCS table 1", "Flickr30K 1K", 468.7), ("CCR/CCS table 2", "MS-COCO 1K", 511.9)]
    assert len(list(published_rows("PFAN", plain=False))) > len(plain)
    assert next(published_rows("VSE++")).recalls == [52.9, 80.5, 87.2, 39.6, 70.1, 79.5]


def test_the_chance_level_stands_beside_an_attention_f1_and_nothing_else() -> None:
    receipts = [{"metrics": {"att_f1_chance": {"value": value}}} for value in (39.0, 40.0)]
    assert chance_beside("att_f1", receipts) == "; every region 39.5"
    assert chance_beside("att_f1_iou_06", receipts) == ""  # other regions are relevant there
    strict = [{"metrics": {"att_f1_chance": {"value": 40.0}, "att_f1_chance_iou_06": {"value": 25.0}}}]
    assert chance_beside("att_f1_iou_06", strict) == "; every region 25.0"
    assert chance_beside("rsum", receipts) == chance_beside("att_f1", [{"metrics": {}}]) == ""
