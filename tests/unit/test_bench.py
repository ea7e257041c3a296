"""The runner of the benchmarks: it measures, compares, and fails when a ratio is 20 % worse than the committed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases_commands import EXPERIMENT, RATE
from benchmarks.runner import Absent, Case, Work, check_outputs, faster, measure, run, times
from itm_lab.experiments.plan import plan_searches

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ratio", "committed", "measured", "worse"), [
    (faster("loop"), 10.0, 8.1, False), (faster("loop"), 10.0, 7.9, True), (faster("loop"), 10.0, 30.0, False),
    (times("product"), 1.0, 1.19, False), (times("product"), 1.0, 1.21, True), (times("product"), 1.0, 0.5, False),
])  # fmt: skip
def test_a_fifth_worse_fails(ratio, committed, measured, worse):
    assert ratio.worse(committed, measured) is worse


def test_ways_that_do_different_work_are_not_timed():
    with pytest.raises(SystemExit, match="differ by 1"):
        check_outputs("case", Work({}, outputs={"ours": lambda: 1.0, "straightforward": lambda: 2.0}))


def test_differences_may_be_relative_to_ours():
    large = {"ours": lambda: [1000.0, 1.0], "straightforward": lambda: [1000.5, 1.0]}
    assert check_outputs("case", Work({}, outputs=large, tolerance=1e-3, relative=True)) == pytest.approx(5e-4)
    with pytest.raises(SystemExit, match=r"differ by 0\.5"):
        check_outputs("case", Work({}, outputs=large, tolerance=1e-3))


def test_ratio_is_that_of_the_work():
    def build(n: int) -> Work:
        return Work({"ours": lambda: sum(range(n)), "straightforward": lambda: [sum(range(n)) for _ in range(8)]})

    found = measure(Case("c", "g", "w", build, (faster("loop"),), {}, {}), {"n": 200_000}, rounds=5)
    assert 4 < found["ratios"]["loop"]["ratio"] < 16


def test_a_given_way_is_not_run():
    """Commands are compared with a second, by the clock of the processes they start."""

    def build() -> Work:
        return Work({"ours": lambda: None}, given={"a second": 1.0}, clock=lambda job: 2.5)

    found = measure(Case("c", "g", "w", build, (times("seconds", 2.5, of="a second"),), {}, {}), {}, rounds=2)
    assert found["ratios"]["seconds"]["ratio"] == pytest.approx(2.5)


def test_a_case_says_what_is_absent():
    def build() -> Work:
        raise Absent("faiss is not installed")

    ((_, found),) = run({"c": Case("c", "g", "w", build, (faster("loop"),), {}, {})}, quick=True)
    assert found["absent"] == "faiss is not installed"
    assert found["ratios"] == {}


def bench(*given: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", "scan-t2i", "recall", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def receipt(path: Path, ratio: float) -> Path:
    path.write_text(json.dumps({"cases": {"recall": {"ratios": {"faster than the loop": {"ratio": ratio}}}}}))
    return path


def test_runner_works_on_tiny_sizes_and_names_the_worse_row(tmp_path):
    fine = bench("--committed", str(receipt(tmp_path / "fine.json", 1e-6)))
    assert fine.returncode == 0, fine.stderr
    assert "scan-t2i: times the product" in fine.stdout
    failed = bench("--committed", str(receipt(tmp_path / "high.json", 1e6)))
    assert failed.returncode == 1
    assert "recall: faster than the loop" in failed.stderr
    assert "scan-t2i" not in failed.stderr


def test_a_timed_lab_run_begins_with_no_search(tmp_path: Path) -> None:
    """The experiment of the case may be given a search of its learning rate, whose runs are no part of what is timed."""
    assert plan_searches(ROOT, [EXPERIMENT], "", [RATE, "epochs=1"], tmp_path) == []
