"""Tables that chapters print: receipts, searches, published rows."""

from __future__ import annotations

import json

import pytest

from itm_lab.evidence import tables
from itm_lab.evidence.chance import FILE, chance_beside, with_chance
from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.statistics import seed_interval
from itm_lab.evidence.tables import (
    collapse_means,
    collapse_table,
    current_values,
    differences_from,
    lab_table,
    published_rows,
    search_table,
)
from itm_lab.evidence.verdicts import evaluate
from itm_lab.paths import Paths
from itm_lab.publish.ledger_pages import ours
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.receipts import variant_receipts, variant_values
from itm_lab.records.rules import Comparison
from itm_lab.scenes import scenes_folder
from itm_lab.scenes.phrases import scenes_grounding
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.metrics.attention import collect_attention
from itm_utils.models.scan import SCAN


def test_an_arm_counts_only_with_all_its_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = lab_table({"SCAN t2i AVG": "02_scan", "nobody": "02_scan"}, seeds=range(5, 10))
    assert rows == {"SCAN t2i AVG": seed_interval(variant_values("02_scan", "SCAN t2i AVG"))}
    printed = capsys.readouterr().out.splitlines()
    assert "not run yet (0 of 5 seeds)" in printed[1]
    assert f"{rows['SCAN t2i AVG'].value:.1f}" in printed[0]
    assert lab_table({"SCAN t2i AVG": "02_scan"}, seeds=(5, 4)) == {}


def test_collapse_is_shown_where_receipts_have_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"metrics": {"rsum": {"value": 100.0}}}
    new = [
        {"metrics": {"final_loss": {"value": loss}, "image_cosine": {"value": 0.98}, "score_spread": {"value": 0.01}}}
        for loss in (12.0, 13.0)
    ]
    expected = {"loss of a batch at the end": 12.5, "mean cosine of two images": 0.98, "spread of the scores": 0.01}
    assert collapse_means([old, *new]) == pytest.approx(expected)
    assert collapse_means([old]) == collapse_means([]) == {}
    given = {"new": new, "old": [old], "none": []}
    monkeypatch.setattr(tables, "variant_receipts", lambda chapter, variant, dataset: given[variant])
    assert collapse_table(dict.fromkeys(given, "08_mmca")) == {"new": pytest.approx(expected)}
    assert collapse_table({}) == {}
    assert capsys.readouterr().out.splitlines() == [
        "new   loss of a batch at the end 12.5; mean cosine of two images 0.98; spread of the scores 0.01",
        "old   not recorded by these runs",
    ]


def test_differences_are_those_of_common_seeds_under_todays_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old receipts and seeds that the chosen setting has not run take no part."""

    def receipt(seed: int, rsum: float, schema: int = 4) -> dict:
        return {"seed": seed, "schema": schema, "metrics": {"rsum": {"value": rsum}}}

    given = {
        "chosen": [receipt(5, 100.0), receipt(6, 110.0), receipt(7, 50.0, schema=2)],
        "more": [receipt(5, 103.0), receipt(6, 114.0), receipt(7, 0.0), receipt(8, 0.0)],
        "old": [receipt(5, 1.0, schema=2), receipt(6, 2.0, schema=2)],
    }
    monkeypatch.setattr(tables, "variant_receipts", lambda chapter, variant, dataset: given[variant])
    assert current_values("08_mmca", "chosen") == {5: 100.0, 6: 110.0}
    found = differences_from(0.2, {0.1: "old", 0.2: "chosen", 0.4: "more"}, "08_mmca")
    assert found == {0.2: (0, 0, 0), 0.4: seed_interval([3.0, 4.0])}


def test_one_seed_has_a_value_and_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """At paper size a chapter shows its own run beside others of the same seed."""
    value = variant_values("02_scan", "SCAN t2i AVG")[0]
    assert lab_table({"SCAN t2i AVG": "02_scan"}, seeds=[5]) == {"SCAN t2i AVG": (value, value, value)}
    assert capsys.readouterr().out == f"SCAN t2i AVG  rsum {value:5.1f}  (one seed)  one model\n"


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


def test_a_table_of_attention_f1_prints_chance_in_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    lab_table({"SCAN CCR": "11_ccr_ccs", "BFAN CCR": "11_ccr_ccs"}, range(10, 15), "att_f1")
    assert all(line.endswith("one model; every region 39.9") for line in capsys.readouterr().out.splitlines())


def test_the_chance_level_stands_beside_an_attention_f1_and_nothing_else() -> None:
    receipts = [{"metrics": {"att_f1_chance": {"value": value}}} for value in (39.0, 40.0)]
    assert chance_beside("att_f1", receipts) == "; every region 39.5"
    assert chance_beside("att_f1_iou_06", receipts) == ""  # other regions are relevant there
    strict = [{"metrics": {"att_f1_chance": {"value": 40.0}, "att_f1_chance_iou_06": {"value": 25.0}}}]
    assert chance_beside("att_f1_iou_06", strict) == "; every region 25.0"
    assert chance_beside("rsum", receipts) == chance_beside("att_f1", [{"metrics": {}}]) == ""


def test_receipts_without_a_chance_level_have_that_of_their_dataset() -> None:
    (old, *_) = variant_receipts("11_ccr_ccs", "SCAN baseline")
    assert "att_f1_chance" not in old["metrics"]
    assert chance_beside("att_f1_mean_words", [old]) == "; every region 39.9"
    assert chance_beside("att_f1_iou_06", [old]) == "; every region 25.8"
    for change in ({"split": "dev"}, {"fingerprint": "0"}, {"name": "flickr8k"}):
        assert chance_beside("att_f1", [old | {"dataset": old["dataset"] | change}]) == ""
    assert chance_beside("att_f1", []) == chance_beside("att_recall", [old]) == ""


def test_the_chance_levels_of_scenes_are_those_of_its_boxes() -> None:
    root = Paths.find()
    known = load_yaml((root.book_data / FILE).read_text(encoding="utf-8"))["scenes"]
    # those of the first design, for its receipts; newer receipts state their own level
    assert known["fingerprint"] == Ledger().datasets["scenes"]["old_fingerprint"]
    measured = json.loads((root.root / "benchmarks/results/scenes_dataset.json").read_text(encoding="utf-8"))
    split = open_split(scenes_folder(), "test")
    vocabulary = Vocabulary.of_folder(split.root)
    model = SCAN(len(vocabulary), split.feature_dim, width=4, word_dim=4)
    seen = collect_attention(model, split, WordCaptions(split, vocabulary), scenes_grounding("test"))
    found = {iou: round(100 * seen.quality([0.0], iou).chance_f1, 2) for iou in (0.3, 0.4, 0.5, 0.6)}
    assert measured["every_region"] == {str(iou): level for iou, level in found.items()}


def test_a_page_has_chance_beside_an_attention_f1() -> None:
    ledger = Ledger()
    assert "every region 39.9" in ours(ledger, ("SCAN baseline", "att_f1"), "scenes")
    assert "every region" not in ours(ledger, ("SCAN baseline", "rsum"), "scenes")
    measured = {"metrics": {"att_f1": {"value": 80.0}, "att_f1_chance": {"value": 30.0}}}
    assert with_chance(measured) == measured  # a run's own level stays
    assert with_chance({"metrics": {"rsum": {"value": 1.0}}}) == {"metrics": {"rsum": {"value": 1.0}}}


def test_comparisons_of_attention_f1_say_its_chance_level() -> None:
    book = Ledger()
    found = {}
    for metric in ("att_f1", "att_precision"):
        plan = Comparison((("SCAN CCR", metric),), (("SCAN baseline", metric),), (), {"above": 0})
        known = {variant: book.receipts["11_ccr_ccs", variant, "scenes"] for variant in plan.variants}
        runs = {variant: {seed: receipt for seed, (_, receipt) in of.items()} for variant, of in known.items()}
        found[metric] = str(evaluate(plan, runs, book.protocol))
    assert found["att_f1"].endswith("n = 5; every region 39.9")
    assert "every region" not in found["att_precision"]
