"""Runs that build on one another: their order, and the folders in which one finds what another made."""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_lab.experiments.chain import built_on, in_order
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.experiments.plan import plan, plan_one
from itm_lab.experiments.runner import Job
from itm_utils.errors import ItmError

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted({table for one in read_experiments(ROOT).values() for table in one.tables})


def folders(jobs: list[Job], name: str) -> set[str]:
    return {job.parameters[name].format(seed=job.seed) for job in jobs if job.parameters.get(name)}


@pytest.mark.parametrize("table", TABLES)
def test_every_run_of_a_table_comes_after_those_it_builds_on(table: str) -> None:
    jobs = plan(ROOT, [], table, "", [], [])
    places = {job.parameters["run_dir"]: place for place, job in enumerate(jobs)}
    for place, job in enumerate(jobs):
        for folder in built_on(job).values():
            assert places.get(folder, -1) < place


def test_a_run_that_another_builds_on_comes_first_whatever_the_file_says() -> None:
    names = ["aoq/coco/vsrn_adapoffquin", "aoq/coco/vsrn_offtri", "aoq/coco/vsrn_online_short"]
    ordered = [job.experiment.name for job in plan(ROOT, names, "", "0", [], [])]
    assert ordered == [names[2], names[0], names[1]]


def test_a_chain_holds_when_a_parameter_moves_its_runs() -> None:
    names = ["aoq/coco/vsrn_adapoffquin", "aoq/coco/vsrn_online_short"]
    online, adaptive = plan(ROOT, names, "", "3", ["epochs=1"], [])
    assert online.parameters["run_dir"] == "runs/aoq/coco/vsrn_online_short/epochs=1-s3"
    assert built_on(adaptive) == {"online_run": online.parameters["run_dir"]}
    assert adaptive.parameters["round_one"] == "runs/aoq/coco/round_one/s{seed}"  # the miner has epochs of its own
    base, both = plan(ROOT, ["ccr_ccs/f30k/scan_ccr_ccs", "ccr_ccs/f30k/scan_baseline"], "", "0", ["run_dir=out"], [])
    assert (
        built_on(both) == {"baseline": base.parameters["run_dir"]} == {"baseline": "out/ccr_ccs/f30k/scan_baseline/s0"}
    )
    (alone,) = plan(ROOT, names[:1], "", "3", ["alpha=0.2"], [])  # compared with the published online run
    assert built_on(alone) == {"online_run": "runs/aoq/coco/vsrn_online_short/s3"}
    (given,) = plan(ROOT, names[:1], "", "3", ["epochs=1", "online_run=runs/mine"], [])
    assert built_on(given) == {"online_run": "runs/mine"}


def test_a_shared_stage_that_is_trained_otherwise_has_another_folder() -> None:
    names = ["dcpa/f30k/intra", "dcpa/f30k/two_stages", "dcpa/f30k/no_decoupling"]
    usual = "runs/dcpa/f30k/intra/s0/intra"
    assert folders(plan(ROOT, names, "", "0", [], []), "stage_one") == {usual}
    assert folders(plan(ROOT, names, "", "0", ["inter_epochs=1"], []), "stage_one") == {usual}
    intra, *others = plan(ROOT, names, "", "0", ["epochs=1"], [])
    assert folders(others, "stage_one") == {f"{intra.parameters['run_dir']}/intra"} != {usual}
    searched = plan(ROOT, names[1:2], "", "", [], ["inter_learning_rate=0.1,0.2", "heads=4"])
    assert folders(searched[:2], "stage_one") == {"runs/dcpa/f30k/intra/s100/intra"}
    assert folders(searched[2:], "stage_one") == {"runs/dcpa/f30k/intra/heads=4-s100/intra"}
    (miner,) = plan(ROOT, ["aoq/coco/scan_offtri"], "", "0", ["first_epochs=1", "captions_mined=9", "alpha=0.1"], [])
    assert miner.parameters["round_one"] == "runs/aoq/coco/round_one/first_epochs=1-captions_mined=9-s{seed}"
    assert plan_one(ROOT, "aoq/coco/scan_offtri", ["first_epochs=1"]).parameters["round_one"].endswith("=1-s{seed}")


def test_a_run_that_builds_on_itself_is_an_error() -> None:
    with pytest.raises(ItmError, match="builds on itself"):
        in_order(
            plan(
                ROOT,
                ["aoq/f30k/vsrn_adapoffquin"],
                "",
                "0",
                ["online_run=out/s0", "run_dir=out", "variant=VSRN AdapOffQuin"],
                [],
            )
        )
