"""The protocol: checks that are computed, planned seeds, and rules that are neither out of reach nor met by anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.planned import planned_seeds, seeds_of
from itm_lab.evidence.protocol import DOUBLED, ModelControl, check_protocol, collapsed, late_gain, model_of
from itm_lab.evidence.statistics import Estimate, Interval, seed_estimate, two_way_estimate
from itm_lab.evidence.verdicts import ComparisonResult, after_holm, evaluate, verdict_of
from itm_lab.experiments.experiment_files import Experiment, read_experiments, read_seeds, twin_seeds
from itm_lab.experiments.runner import make_jobs
from itm_lab.experiments.trial_queue import read_queue
from itm_lab.publish.ledger_pages import dataset_of, variant_of
from itm_lab.records.rules import RECALLS, Comparison, comparisons
from tests.checked_receipts import FLAT, search, stage, training

ROOT = Path(__file__).resolve().parents[2]
BOOK = Ledger(ROOT)
NUMBERS = BOOK.protocol
ONE = Comparison((("A", "rsum"),), (("B", "rsum"),), (), {"above": 0})


def run(**change: Any) -> dict[str, Any]:
    """What the checks read of a receipt; everything in order."""
    good = {
        "schema": 4,
        "dataset": {"name": "scenes", "split": "test", "fingerprint": "f"},
        "inputs": {"train": "t"},
        "training": training(),
        "search": [search()],
        "parameters": {"learning_rate": 0.002},
        "protocol": "all 500",
        "metrics": {"rsum": {"value": 300.0}},
        "seed": 5,
    }
    return good | change


def checked(comparison: Comparison = ONE, doubled: Mapping[str, Any] | None = None, **change: Any):
    """The checks of A against B at two seeds; ``change`` is what is different in B."""
    runs = {"A": {5: run(), 6: run(seed=6)}, "B": {5: run(**change), 6: run(seed=6, **change)}}
    return check_protocol(comparison, runs, doubled or {}, NUMBERS)


def said(**declared: str) -> Comparison:
    return Comparison((("A", "rsum"),), (("B", "rsum"),), (), {"above": 0}, declared=declared)


# ---------------------------------------------------------------------------------------------- checks


def test_a_fair_comparison_fails_no_check_and_misses_its_double_controls() -> None:
    found = checked()
    assert found.failed == () and found.missing == ("no run with twice the captions of A and B",)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dataset": {"fingerprint": "g"}}, "scored on different test data"),
        ({"inputs": {"train": "u"}}, "trained on different data"),
        ({"training": training(stage(captions=24_000))}, "B saw 24,000 captions, A 12,000"),
        ({"training": training(stage(captions=12_000 + 601))}, "B saw 12,601 captions, A 12,000"),
        ({"search": [search(runs=12)]}, "searched unequally: A with 6 runs, B with 12 runs"),
        (
            {"search": [search(), search(record="08_mmca/choices/y.json")]},
            "searched unequally: A with 6 runs, B with 12 runs",
        ),
        ({"search": []}, "searched unequally: A with 6 runs, B with 0 runs"),
        ({"search": [search(seeds=1)]}, "B was searched with 1 of 2 seeds"),
        ({"parameters": {"learning_rate": 0.004}}, "B has its learning_rate from the edge of the grid"),
        (
            {"training": training(stage(dev=[[12_000, 280.0]]))},
            "B, seed 5, was validated 1 times in 12 epochs of final",
        ),
        (
            {"training": training(stage(np.linspace(200, 280, 12)))},
            "B had not converged: dev rsum rose 21.8 over the last quarter of final",
        ),
    ],
)
def test_each_check_fails_for_its_reason(change: dict, why: str) -> None:
    assert checked(**change).failed[0] == why if "dev" not in why else why in checked(**change).failed


def test_a_batch_for_each_epoch_is_no_difference_of_budget() -> None:
    assert not checked(training=training(stage(captions=12_000 - 600))).failed


@pytest.mark.parametrize(
    ("declared", "change"),
    [
        ({"budget": "unequal"}, {"training": training(stage(captions=24_000))}),
        ({"budget": "last stage"}, {"training": training(stage(name="one"), stage(name="two"))}),
        ({"data": "unequal"}, {"inputs": {"train": "u"}}),
        ({"search": "unequal"}, {"search": [search(runs=12)]}),
        ({"checks": "none"}, {"training": None, "search": []}),
    ],
)
def test_what_a_rule_declares_as_its_subject_is_not_checked(declared: dict, change: dict) -> None:
    assert checked(ONE, **change).failed or checked(ONE, **change).missing
    assert not checked(said(**declared), **change).failed


def test_the_control_of_equal_length_is_checked_too() -> None:
    longer = training(stage(name="one"), stage(name="two", captions=24_000))
    assert checked(said(budget="last stage"), training=longer).failed == (
        "B saw 24,000 captions in their last stage, A 12,000",
    )


def test_a_grid_of_the_papers_or_of_two_values_may_be_chosen_at_its_edge() -> None:
    grid = {"ccr_weight": [0.1, 1.0, 10.0], "focal": ["equal", "prob"], "width": [32, 64]}
    given = {"search": [search(grid=grid)], "parameters": {"ccr_weight": 0.1, "focal": "equal", "width": 64}}
    assert not checked(**given).failed


def test_a_baseline_with_as_many_runs_beside_a_search_is_searched_equally() -> None:
    runs = {"A": {5: run()}, "B": {5: run(search=[])}}
    beside = {search()["record"]: "B"}
    assert not check_protocol(ONE, runs, {}, NUMBERS, beside).failed
    assert check_protocol(ONE, runs, {}, NUMBERS, {search()["record"]: "C"}).failed


def test_searches_share_the_runs_of_their_baseline() -> None:
    """Three constraints are searched beside one baseline: it has the runs of one of them, and so has each of them."""
    searches = [search(record=f"11_ccr_ccs/choices/{name}.json", grid={"ccr_weight": [0.1, 1.0]}) for name in "abc"]
    runs = {name: {5: run(search=[one])} for name, one in zip("ABC", searches, strict=True)} | {
        "D": {5: run(search=[])}
    }
    terms = tuple((name, "rsum") for name in runs)
    beside = {one["record"]: "D" for one in searches}
    assert not check_protocol(Comparison(terms[:2], terms[2:], (), {"above": 0}), runs, {}, NUMBERS, beside).failed


def test_further_values_of_a_ladder_are_no_more_effort() -> None:
    """The planned grid counts: a ladder goes on where its best value lies at an end, for whatever variant that happens."""
    assert not checked(search=[search(runs=10, planned=6)]).failed
    assert "searched unequally: A with 6 runs, B with 12 runs" in checked(search=[search(runs=12, planned=12)]).failed


def test_each_stage_may_have_a_learning_rate_of_its_own() -> None:
    """Both are searched as often as the one of a training of one stage; any other setting comes on top."""
    second = search(grid={"inter_learning_rate": [0.0005, 0.001, 0.002]}, record="09_dcpa/choices/two.json")
    assert not checked(search=[search(), second]).failed
    assert (
        checked(search=[search(), second | {"runs": 8}]).failed[0] == "searched unequally: A with 6 runs, B with 8 runs"
    )
    margin = search(grid={"margin": [0.1, 0.2]}, record="09_dcpa/choices/margin.json")
    assert checked(search=[search(), margin]).failed[0] == "searched unequally: A with 6 runs, B with 12 runs"


def test_a_gain_is_that_of_the_smoothed_running_best_over_the_last_quarter() -> None:
    assert late_gain(stage(FLAT), NUMBERS) == 0
    assert late_gain(stage([*FLAT[:-1], 290.0]), NUMBERS) == pytest.approx(5)  # one lucky validation counts by half
    assert late_gain(stage([*FLAT[:-3], 270.0, 260.0, 250.0]), NUMBERS) == 0  # a fall is no gain
    moved = stage(FLAT) | {"dev": [[seen + 50_000, rsum] for seen, rsum in stage(FLAT)["dev"]]}
    assert late_gain(moved, NUMBERS) == 0  # a second stage may count captions from the first on
    assert late_gain(stage([100.0]), NUMBERS) is None


def test_one_seed_may_rise_by_chance_while_the_variant_has_converged() -> None:
    noisy = run(training=training(stage([*FLAT[:-1], 290.0])))
    runs = {"A": {seed: run() for seed in (5, 6, 7)} | {8: noisy}, "B": {seed: run() for seed in (5, 6, 7, 8)}}
    assert not check_protocol(ONE, runs, {}, NUMBERS).failed
    assert check_protocol(ONE, runs | {"A": {seed: noisy for seed in (5, 6)}}, {}, NUMBERS).failed


def test_a_double_control_that_moves_the_test_rsum_says_that_nothing_had_converged() -> None:
    twice = {"training": training(stage(captions=24_000))}
    good = {variant: run(**twice) for variant in "AB"}
    assert checked(doubled=good) == check_protocol(ONE, {v: {5: run(), 6: run()} for v in "AB"}, good, NUMBERS)
    assert not checked(doubled=good).failed and not checked(doubled=good).missing
    moved = good | {"B": run(metrics={"rsum": {"value": 300.0 + NUMBERS["doubled_within"]}}, **twice)}
    assert checked(doubled=moved).failed == ("B had not converged: twice the captions moved its test rsum by +9.0",)
    short = good | {"B": run()}
    assert checked(doubled=short).failed == ("the control of B saw 1.0 times the captions, not twice",)


def test_one_control_speaks_for_the_variants_of_its_model() -> None:
    control = run(training=training(stage(captions=24_000)))
    model = ModelControl("M", {5: run()}, control)
    runs = {"A": {5: run()}, "B": {5: run(search=[search()])}}
    found = check_protocol(ONE, runs, {"A": control}, NUMBERS, models={"B": model})
    assert found.failed == () and found.missing == ()
    moved = model._replace(control=control | {"metrics": {"rsum": {"value": 310.0}}})
    found = check_protocol(ONE, runs, {}, NUMBERS, models={"A": moved, "B": moved})
    assert found.failed == ("M had not converged: twice the captions moved its test rsum by +10.0",)


def test_the_longest_beginning_says_which_model_a_variant_is_of() -> None:
    controls = NUMBERS["doubled_controls"]
    for variant, model in (
        ("DCPA K one", "DCPA"),
        ("DCPA intra global batch 16", "DCPA intra"),
        ("DCPA GRU", "DCPA GRU"),
        ("DCPA intra GRU", "DCPA intra"),
    ):
        assert model_of(variant, controls["09_dcpa"]) == model
    assert model_of("VSRN OnlineQuin", controls["10_aoq"]) == "VSRN AdapOffQuin"  # a word is whole
    assert model_of("VSRN online larger batch", controls["10_aoq"]) == "VSRN online short"
    assert model_of("PFAN baseline", controls["11_ccr_ccs"]) is None


def test_a_training_that_is_not_recorded_is_a_missing_check() -> None:
    assert "the training of B is not recorded" in checked(training=None).missing


def test_a_run_near_chance_is_called_collapsed() -> None:
    """Chance is a rsum of 6.4 among 500 images, and the protocol names what is below three times that."""
    runs = {"A": {5: run(metrics={"rsum": {"value": 19.0}}), 6: run(metrics={"rsum": {"value": 20.0}})}}
    assert list(collapsed(runs, NUMBERS)) == ["A, seed 5"]
    folds = {"A": {5: run(protocol="1K", metrics={"rsum": {"value": 9.7}})}}
    assert list(collapsed(folds, NUMBERS)) == []


def test_the_numbers_of_the_protocol_stand_in_one_place() -> None:
    for path in (ROOT / "itm_lab/evidence").glob("*.py"):
        assert "converged_within =" not in path.read_text(encoding="utf-8")
    assert "protocol:" not in (ROOT / "book/data/foundations.yaml").read_text(encoding="utf-8")
    assert all(rule["protocol"] is BOOK.protocol for rule in BOOK.rules.values())


# ---------------------------------------------------------------------------------------------- planned seeds


def test_seeds_are_read_from_the_experiment_files(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "notebooks/02_scan.ipynb").touch()
    text = """
base: {seeds: 0-2}
variants:
  one: {variant: SCAN, ensemble: both}
  other: {variant: SCAN i2t, ensemble: both, seeds: "1,2,7"}
datasets:
  coco: {variants: {one: {}, other: {}}}
  scenes: {base: {seeds: 5-9}, variants: {one: {}, other: {seeds: ""}}}
"""
    (tmp_path / "experiments/scan.yaml").write_text(text, encoding="utf-8")
    plan = planned_seeds(tmp_path)
    assert seeds_of(plan, "02_scan", "SCAN", "coco 5K") == (0, 1, 2)  # one run has both protocols
    assert seeds_of(plan, "02_scan", "both", "coco") == (1, 2)  # what both members plan
    assert seeds_of(plan, "02_scan", "SCAN", "scenes") == (5, 6, 7, 8, 9)
    assert seeds_of(plan, "02_scan", "SCAN i2t", "scenes") is None


def test_a_comparison_takes_the_seeds_that_all_its_variants_plan() -> None:
    ledger = Ledger(ROOT)
    chapter = ledger.chapter_of("MMCA"), ledger.chapter_of("SAEM")
    ledger.__dict__["plan"] = {
        (chapter[0], "MMCA", "scenes"): (5, 6, 7, 8),
        (chapter[1], "SAEM", "scenes"): (6, 7, 8, 9),
    }
    both = Comparison((("MMCA", "rsum"),), (("SAEM", "rsum"),), (), {"above": 0})
    assert ledger.seeds(both, "scenes", 5) == [6, 7, 8]
    assert ledger.seeds(both, "f30k", 3) == [0, 1, 2]  # no file plans any: the first that are needed
    unknown = Comparison((("MMCA", "rsum"),), (("SCAN t2i AVG", "rsum"),), (), {"above": 0})
    assert ledger.seeds(unknown, "scenes", 5) == [5, 6, 7, 8]


def test_more_seeds_where_the_protocol_asks_for_them() -> None:
    main = NUMBERS["more_seeds"]["scenes"][10]
    of = [
        Comparison(((a, "rsum"),), ((b, "rsum"),), (), {"above": 0}) for a, b in ((main[0], main[1]), (main[0], "MMCA"))
    ]
    assert [BOOK.needed(one, "scenes", 5) for one in of] == [10, 5]
    assert BOOK.needed(of[0], "f30k", 3) == 3
    for variant in main:
        assert BOOK.chapter_of(variant)


def scenes_comparisons() -> Iterator[tuple[str, Comparison, int]]:
    for name, rule in BOOK.rules.items():
        if least := rule.get("datasets", {}).get("scenes"):
            for plan in comparisons(rule, "scenes"):
                yield name, plan, BOOK.needed(plan, "scenes", least)


def test_every_comparison_on_scenes_has_its_planned_runs() -> None:
    """Every variant of a rule is in the experiment files, with as many seeds as its rule or the protocol asks for."""
    planned = {variant for _, variant, dataset in BOOK.plan if dataset == "scenes"}
    lacking = set()
    for name, plan, need in scenes_comparisons():
        lacking |= (missing := set(plan.variants) - planned)
        if not missing:
            assert len(BOOK.seeds(plan, "scenes", need)) >= need, f"{name}: {plan}"
    assert not lacking
    for number, variants in NUMBERS["more_seeds"]["scenes"].items():
        for variant in variants:
            assert len(seeds_of(BOOK.plan, BOOK.chapter_of(variant), variant, "scenes") or ()) >= number, variant


def test_every_variant_on_scenes_has_a_control_with_twice_the_captions() -> None:
    """Its own or that of its model, with the settings of the variant it doubles."""
    known = {(one.chapter, one.settings["variant"]): one for one in scenes_experiments()}
    ensembles = {(one.chapter, name) for one in known.values() for name in (one.ensemble, one.twins)}
    for _, plan, _ in scenes_comparisons():
        for variant in plan.variants:
            chapter = BOOK.chapter_of(variant)
            if (chapter, variant) in ensembles:  # their members are checked
                continue
            model = model_of(variant, NUMBERS["doubled_controls"][chapter])
            assert model and (chapter, DOUBLED.format(model)) in known, variant
    for (chapter, variant), one in known.items():
        if variant.endswith(" doubled"):
            single, double = known[chapter, variant.removesuffix(" doubled")].values(), one.values()
            changed = {name for name in double if double[name] != single[name]} - {"variant", "run_dir"}
            lengths = {"epochs", "first_epochs", "inter_epochs"} & changed
            assert changed <= lengths | {"stage_one", "round_one", "online_run", "baseline"}, variant
            assert all(double[name] == 2 * single[name] for name in lengths) and lengths, variant


def test_no_run_on_scenes_is_there_for_nothing() -> None:
    """A variant that no rule asks for says that it is judged by none."""
    asked = {variant for _, plan, _ in scenes_comparisons() for variant in plan.variants}
    for one in scenes_experiments():
        variant = one.settings["variant"].removesuffix(" doubled")
        judged = variant in asked or {one.ensemble, one.twins} & asked
        assert judged or "judged by no rule" in one.note, one.name


def test_variants_of_one_comparison_see_as_many_captions() -> None:
    """As planned: the protocol checks it again when the runs are there."""
    known = {one.settings["variant"]: one for one in scenes_experiments()}
    for name, plan, _ in scenes_comparisons():
        said = {key: plan.declared.get(key) for key in ("budget", "checks")}
        if said["budget"] == "unequal" or said["checks"] == "none" or set(plan.variants) - known.keys():
            continue
        seen = {variant: passes(known[variant], said["budget"] == "last stage") for variant in plan.variants}
        assert len(set(seen.values())) == 1, f"{name}: {seen}"


def passes(experiment: Experiment, last_stage: bool) -> float:
    """Passes over the training captions in all stages of a run that count for it."""
    (job,) = make_jobs(experiment, None, {})
    trained = job.stages(vocabulary_size=1, image_dim=1)
    lent = job.parameters.get("kind") == "online" and job.parameters.get("start") == "scratch"
    counted = [stage.config.epochs for stage in trained if not (stage.mines and lent)]
    return sum(counted[-1:] if last_stage else counted)


def scenes_experiments() -> list[Experiment]:
    return [one for name, one in read_experiments(ROOT).items() if name.split("/")[1] == "scenes"]


def test_the_queue_has_every_run_that_a_rule_on_scenes_needs() -> None:
    wanted: dict[tuple[str, str], set[int]] = {}
    for entry in read_queue(ROOT, ROOT / "experiments/queue.yaml"):
        for one in entry.experiments:
            seeds = set(read_seeds(entry.seeds or one.seeds))
            wanted.setdefault((one.chapter, one.settings["variant"]), set()).update(seeds)
    asked = {variant for _, plan, _ in scenes_comparisons() for variant in plan.variants}
    for one in scenes_experiments():
        variant = one.settings["variant"]
        if variant in asked or {one.ensemble, one.twins} & asked or variant.endswith(" doubled"):
            assert wanted.get((one.chapter, variant)) == set(read_seeds(one.seeds)), one.name


def test_a_mean_of_twins_has_the_seeds_of_the_first_of_them() -> None:
    assert twin_seeds([5, 6, 20, 21]) == {5: 20, 6: 21}
    assert seeds_of(BOOK.plan, "02_scan", "SCAN twin ensemble AVG", "scenes") == (5, 6, 7, 8, 9)


# ---------------------------------------------------------------------------------------------- statistics


def test_p_has_the_degrees_of_freedom_of_its_interval() -> None:
    """At the end of a 95 % interval p is 0.05 whatever they are; far beyond it five seeds say less than a normal law."""
    five = seed_estimate([1.0, 2.0, 3.0, 2.0, 2.0])
    assert five.p(five.interval.low) == pytest.approx(0.05) and five.freedom == 4
    normal = Estimate(five.interval, float("inf"))
    assert five.p(-4) > 10 * normal.p(-4) and normal.p(normal.interval.low) == pytest.approx(0.05)
    two_way = two_way_estimate(np.random.default_rng(0).normal(1, 5, (5, 200)))
    assert two_way.freedom > 4 and two_way.p(two_way.interval.high) == pytest.approx(0.05)


# ---------------------------------------------------------------------------------------------- rules

Values = dict[str, dict[str, float]]  # variant → metric → value
SAME_ROW = {" online short": " online", " online short larger batch": " online larger batch"}  # one baseline is printed
OTHER_NAMES = {"att_f1": "att_f1_to_one_tenth", "att_precision": "att_precision_to_one_tenth",
               "att_recall": "att_recall_to_one_tenth", "ratio_to_baseline": "step_time_ratio"}  # fmt: skip


def printed_values(paper: str, dataset: str) -> Values:
    """What a paper prints of each variant on one dataset, under the metrics that our receipts have."""
    found: Values = {}
    for table, body in BOOK.results[paper]["tables"].items():
        for block in body["blocks"]:
            for row in block["rows"] if dataset_of(block) == dataset else ():
                known = variant_of(BOOK, f"{paper} {table}", row)
                name = known[0].removesuffix(" ensemble") if known else {"SCAN": "SCAN t2i AVG"}.get(row["method"], "")
                numbers = {OTHER_NAMES.get(key, key): value for key, value in row.items() if isinstance(value, float)}
                rsum = row.get("rsum") or row.get("rsum_computed")
                for variant in {name, twin(name)} - {""}:
                    found.setdefault(variant, {}).update(numbers | ({"rsum": rsum} if rsum else {}))
    return found


def twin(variant: str) -> str:
    """The second control that the book has where a paper prints one baseline."""
    ending = next((end for end in reversed(SAME_ROW) if variant.endswith(end)), "")
    return variant.removesuffix(ending) + SAME_ROW[ending] if ending else variant


def fed(comparison: Comparison, values: Values) -> ComparisonResult | None:
    """The comparison with printed numbers in the place of ours; None where one is not printed."""
    if any(not set(metric.split("-")) <= values.get(variant, {}).keys() for variant, metric in comparison.terms):
        return None
    if comparison.correlated:
        x, y = ([values[variant][metric] for variant, metric in side] for side in (comparison.plus, comparison.minus))
        r = float(np.corrcoef(x, y)[0, 1])
        status = "holds" if r > comparison.expected["above"] else "fails"
        return ComparisonResult(str(comparison), Interval(r, r, r), "", status, 0)
    runs = {
        variant: {
            seed: {"metrics": {name: {"value": value} for name, value in values[variant].items()}} for seed in (0, 1)
        }
        for variant in comparison.variants
    }
    return evaluate(comparison, runs, NUMBERS)


def fed_rules() -> Iterator[tuple[str, str, list[ComparisonResult]]]:
    for name, rule in BOOK.rules.items():
        paper = BOOK.paper_of(name)
        for dataset in rule.get("datasets", ()) if paper in BOOK.results else ():
            values = printed_values(paper, dataset)
            found = [one for plan in comparisons(rule, dataset) if (one := fed(plan, values))]
            if found:
                yield name, dataset, found


def test_every_rule_is_met_by_the_papers_own_numbers() -> None:
    """A rule that the paper's printed numbers do not meet asks for something that the paper does not have."""
    asked = {}
    for name, dataset, found in fed_rules():
        asked[name, dataset] = len(found)
        wrong = [str(one) for one in found if one.status != "holds"]
        assert verdict_of(found) == "reproduced", f"{name} on {dataset}: {wrong}"
    names = {name for name, _ in asked}
    never = {"DCPA-11", "DCPA-12", "DCPA-15", "DCPA-16", "DCPA-17", "AOQ-05", "AOQ-13", "AOQ-15", "AOQ-17", "AOQ-18"}
    never |= {"CC-08", "CC-11", "CC-12", "CC-13", "MMCA-04", "MMCA-05", "MMCA-11", "MMCA-12", "MMCA-13"}
    runs = {name for name in BOOK.claims if BOOK.rules[name]["kind"] == "runs"}
    assert runs - names - never == set() and len(names) > 25  # of all others the paper prints what the rule compares
    assert asked["DCPA-01", "f30k"] == 21 and asked["AOQ-04", "coco"] == 12 and asked["CC-03", "coco 5K"] == 9


def test_what_the_tables_section_asks_of_printed_numbers_holds() -> None:
    for name in BOOK.checks:
        found = BOOK.printed(name)
        assert verdict_of(found) == "reproduced", [str(one) for one in found if one.status != "holds"]


def test_sentences_that_their_own_tables_contradict_are_marked() -> None:
    marked = {name for name, rule in BOOK.rules.items() if rule.get("contradicts_itself")}
    assert {"DCPA-04", "DCPA-07", "DCPA-14", "AOQ-11", "AOQ-16", "CC-09", "MMCA-01", "MMCA-02", "MMCA-03"} == marked


NULL = {  # what a model that knows nothing has; everything else is the same for all variants
    "att_f1": 30.0, "att_f1_chance": 30.0, "att_best_threshold": 0.0, "module_overlap": 0.16, "pair_time_exponent": 1.0,
    "encoder_time_exponent": 1.0, "step_time_ratio": 1.0, "gradient_conflict_all": 0.5, "mirror_left_right": 50.0,
}  # fmt: skip


@pytest.mark.parametrize("draw", range(5))
def test_no_rule_is_met_by_variants_that_do_not_differ(draw: int) -> None:
    """All variants are one model with the noise of seeds, and attention is that of chance: no claim is reproduced."""
    random = np.random.default_rng(draw)
    families: dict[tuple[str, str], list[str]] = {}
    for name, rule in BOOK.rules.items():
        for dataset in rule.get("datasets", ()):
            families.setdefault((BOOK.paper_of(name), dataset), []).append(name)
    for (_, dataset), names in families.items():
        found, known = {}, {}
        for name in names:
            found[name] = [null_result(plan, known, random) for plan in comparisons(BOOK.rules[name], dataset)]
        for name, of in after_holm(found, len(names), NUMBERS["level"]).items():
            assert verdict_of(of) != "reproduced", f"{name} on {dataset}: {[str(one) for one in of]}"


def null_result(plan: Comparison, known: dict, random: np.random.Generator) -> ComparisonResult:
    """A comparison of noise whose mean over the seeds is nothing. known: (variant, metric) → values that were drawn already."""
    runs: dict[str, dict[int, dict]] = {variant: {} for variant in plan.variants}
    metrics = {part for _, metric in plan.terms for part in metric.split("-")}
    for variant, name in product(plan.variants, sorted(metrics)):
        middle = NULL.get(name, 60.0)
        noise = random.normal(size=5)
        values = known.setdefault((variant, name), middle * (1 + 0.02 * (noise - noise.mean())))
        for seed, value in enumerate(values):
            runs[variant].setdefault(seed, {"metrics": {}, "dataset": {}})["metrics"][name] = {"value": float(value)}
    return evaluate(plan, runs, NUMBERS)


def test_a_method_with_a_round_before_it_is_compared_with_both_controls() -> None:
    """Wherever a rule takes the control of equal length of an offline loss, it takes that of equal total as well."""
    offline = ("AdapOffQuin", "OffTri")
    for name, rule in BOOK.rules.items():
        for dataset in rule.get("datasets", ()):
            plans = [one for one in comparisons(rule, dataset) if not one.correlated]
            rewarded = {
                plan.plus + plan.minus: plan
                for plan in plans
                if all(metric in (*RECALLS, "rsum") for _, metric in plan.terms)
            }
            for terms, plan in rewarded.items():
                (ours, metric), (control, _) = terms[0], terms[-1]
                if plan.declared.get("budget") == "last stage" and ours.split(" ", 1)[1].startswith(offline):
                    longer = control.replace("online short", "online")
                    assert ((ours, metric), (longer, metric)) in rewarded, f"{name} on {dataset}: {plan}"
                    assert "budget" not in rewarded[(ours, metric), (longer, metric)].declared


def test_the_rules_name_the_trials_that_the_papers_would_ask_for() -> None:
    wanted = {variant for name in BOOK.claims for variant in BOOK.variants_of(BOOK.rules[name])}
    for batch, how in product((16, 32, 64, 128), ("intra", "intra global")):
        assert f"DCPA {how} batch {batch}" in wanted
    assert {"DCPA GRU", "DCPA intra twins", "DCPA intra GRU twins", "DCPA joint"} <= wanted
    assert {"MMCA hardest from step one", "MMCA trainable text", "MMCA inter only"} <= wanted
    for base in ("BFAN", "VSRN"):
        for of in ("constant weight 1.5", "OnlyOffline", "fine-tuned", "OnlineQuin", "without OfflineAdap"):
            assert f"{base} {of}" in wanted
    for claim in ("AOQ-13", "AOQ-15"):  # the paper's figures 4 and 6
        assert {"BFAN AdapOffQuin", "VSRN AdapOffQuin"} <= BOOK.variants_of(BOOK.rules[claim])
    assert "SCAN CCS other phrases" in wanted
    overlaps = {metric for plan in comparisons(BOOK.rules["CC-04"], "scenes") for _, metric in plan.terms}
    assert overlaps == {"att_f1", "att_f1_iou_06"}
