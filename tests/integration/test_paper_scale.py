"""The way of a GPU user, on a small Flickr30K and a small COCO: from experiment to receipt to a row beside the paper's.

What is small is the data, and with it batches, epochs and lists. Models have the widths of the papers where they stand
for themselves, in part I, and in MMCA and DCPA; where a chain of runs is the point (AOQ, a search) they are narrow.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from forked_runs import forked_runs, itm
from small_photos import ROOT, TEST, write_small_book

from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.run_tables import table_of
from itm_lab.experiments.ensembles import run_ensembles
from itm_lab.experiments.experiment_files import find_experiment, read_experiments
from itm_lab.experiments.plan import plan
from itm_lab.experiments.runner import Job, run_jobs
from itm_lab.publish.ledger_pages import dataset_of, results_page, variant_of
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import read_receipt

FEW = {"epochs": 1, "batch_size": 16, "num_workers": 0}
MORE = FEW | {"epochs": 3}  # chapters that look at dev only in a training of more than two epochs
COSTLY = MORE | {"batch_size": 8}  # pairs are expensive here, and a batch has its square of them
STAGES = MORE | {"inter_epochs": 3, "inter_batch_size": 8}
LISTS = {"captions_mined": 20, "captions_kept": 10}
NARROW = {"width": 64, "word_dim": 16}
ROUNDS = FEW | LISTS | NARROW | {"batch_size": 8, "first_epochs": 1, "first_batch_size": 16}
ROUNDS |= {"miner_width": 64, "caption_width": 16}
# Chapter → its experiments, and what is smaller in them than published. On Flickr30K those of chapter 10 share a miner, two
# of them are a row together, and VSRN's is measured by the online run before it; stage one of chapter 09 is trained by
# the first of its runs; of chapter 11 the last is measured by the first.
RUNS = {
    "02_scan": (["scan/f30k/t2i_avg", "scan/coco/i2t_lse"], FEW),
    "03_bfan": (["bfan/f30k/equal", "bfan/coco/prob"], FEW),
    "04_pfan": (["pfan/f30k/t2i", "pfan/f30k/i2t"], FEW | NARROW),
    "05_vsrn": (["vsrn/f30k/first", "vsrn/coco/first"], FEW),
    "06_saem": (["saem/f30k/full", "saem/coco/full"], FEW),
    "07_sgraf": (["sgraf/f30k/saf", "sgraf/coco/sgr"], FEW),
    "08_mmca": (["mmca/f30k/full", "mmca/coco/full"], COSTLY),
    "09_dcpa": (["dcpa/f30k/intra", "dcpa/f30k/two_stages", "dcpa/coco/gru"], STAGES),
    "10_aoq": (
        ["aoq/f30k/vsrn_online_short", "aoq/f30k/vsrn_adapoffquin", "aoq/f30k/scan_adapoffquin",
         "aoq/f30k/scan_i2t_adapoffquin", "aoq/coco/bfan_adapoffquin"],
        ROUNDS,
    ),
    "11_ccr_ccs": (["ccr_ccs/f30k/scan_baseline", "ccr_ccs/coco/saf_ccr_ccs", "ccr_ccs/f30k/scan_ccr_ccs"], MORE),
}  # fmt: skip


NARROWER = {"vsrn/coco/first": {"width": 64, "caption_width": 16}}  # its width is that of the run on Flickr30K


def changes_of(name: str) -> dict[str, int]:
    changes = next(changes for names, changes in RUNS.values() if name in names)
    return changes | NARROWER.get(name, {})


def options(name: str, **more: str) -> list[str]:
    """What a command of ``itm run`` says after the experiment's name; the variant keeps its published one."""
    variant = find_experiment(ROOT, name).settings["variant"]
    return [f"{key}={value}" for key, value in (changes_of(name) | {"variant": variant} | more).items()]


@pytest.fixture(scope="module")
def small_book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("small_book")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ITM_CACHE", str(root / "cache"))
        yield write_small_book(root)
    shutil.rmtree(root / "runs")


@pytest.fixture(scope="module")
def finished(small_book: Path) -> Callable[[str], list[Job]]:
    """Runs the experiments of a chapter, once; returns their jobs."""
    done: dict[str, list[Job]] = {}

    def run(chapter: str) -> list[Job]:
        if chapter not in done:
            jobs = [job for name in RUNS[chapter][0] for job in plan(small_book, [name], "", "", options(name), [])]
            with forked_runs():
                failed = run_jobs(jobs, small_book / "made", at_a_time=2)
            for job in failed:
                print((job.folder / "papermill.log").read_text(encoding="utf-8")[-3000:])
            assert not failed
            for checkpoint in small_book.glob("runs/**/step-*.safetensors"):
                checkpoint.unlink()  # those of VSRN have 2 GB each
            done[chapter] = jobs
        return done[chapter]

    return run


def receipts_of(job: Job, results: Path) -> list[dict]:
    found = [read_receipt(path) for path in sorted((results / job.experiment.chapter).glob("*.json"))]
    known = job.parameters["variant"], job.data.name
    return [receipt for receipt in found if (receipt["variant"], receipt["dataset"]["name"]) == known]


@pytest.mark.parametrize("chapter", RUNS)
def test_experiments_run_to_a_receipt_and_a_row(chapter: str, finished: Callable, small_book: Path) -> None:
    jobs = finished(chapter)
    rows = list(table_of(small_book / "made", run_ensembles(jobs, small_book / "made")))
    for job in jobs:
        receipts = receipts_of(job, small_book / "made")
        coco = job.data.name == "coco_precomp"
        protocols = {f"all {TEST}", f"5 folds of {TEST // 5}"} if coco else {f"all {TEST}"}
        assert {receipt["protocol"] for receipt in receipts} == protocols
        for receipt in receipts:
            published = settings_of(job.experiment.values())
            assert receipt["parameters"] == published | settings_of(changes_of(job.experiment.name))
            assert receipt["run"]["device"] != "auto"
            shown = f"{receipt['metrics']['rsum']['value']:8.1f}  {job.data.name} {receipt['protocol']}, 1 seed"
            assert any(row.startswith(f"{receipt['variant']:28} 1 model") and shown in row for row in rows)


@pytest.mark.parametrize(
    ("chapter", "paper", "row"),
    [
        ("08_mmca", "MMCA", "| **MMCA**"),
        ("09_dcpa", "DCPA", "| **DCPA Full-Model BERT**"),
        ("10_aoq", "AOQ", "| **SCAN + AdapOffQuin (Eq. 5)**"),
        ("11_ccr_ccs", "CCR_CCS", "| SCAN CCR+CCS |"),
    ],
)
def test_a_receipt_stands_beside_the_row_of_its_paper(
    chapter: str, paper: str, row: str, finished: Callable, small_book: Path, tmp_path: Path
) -> None:
    run_ensembles(finished(chapter), small_book / "made")
    for name in ("book", "notebooks", "pyproject.toml", "_toc.yml"):  # the same book, with what these runs measured
        (tmp_path / name).symlink_to(small_book / name)
    (tmp_path / "receipts").symlink_to(small_book / "made")
    ledger = Ledger(tmp_path)
    assert ledger.datasets["f30k"] == {"images": 1000}
    ledger.datasets["f30k"] = {"images": TEST}
    page = [line.replace("\\", "") for line in results_page(ledger, paper)]
    lines = [line for line in page if line.startswith(row)]
    assert any(re.search(r"\| \d+\.\d \[\d+\.\d, \d+\.\d\] \(1\) \|$", line) for line in lines), lines


def job_named(jobs: list[Job], name: str) -> Job:
    return next(job for job in jobs if job.experiment.name == name)


def test_round_two_is_measured_by_the_online_run_before_it(finished: Callable, small_book: Path) -> None:
    """AOQ: online run, miner, lists, round two; runs that share the miner find its lists."""
    jobs = finished("10_aoq")
    online, second = (job_named(jobs, f"aoq/f30k/{name}") for name in ("vsrn_online_short", "vsrn_adapoffquin"))
    assert second.parameters["online_run"].format(seed=0) == online.parameters["run_dir"]
    assert "epochs_to_online_best_i2t" in receipts_of(second, small_book / "made")[0]["metrics"]
    lists = [path.relative_to(small_book).parent for path in small_book.glob("runs/aoq/f30k/**/lists/manifest.json")]
    assert lists == [Path("runs/aoq/f30k/round_one/s0/lists")]


def test_stage_two_finds_the_stage_one_that_another_run_trained(finished: Callable) -> None:
    intra, both = (job_named(finished("09_dcpa"), f"dcpa/f30k/{name}") for name in ("intra", "two_stages"))
    assert both.root / both.parameters["stage_one"].format(seed=0) == intra.folder / "intra"
    assert (intra.folder / "intra/best.safetensors").is_file() and not (both.folder / "intra").exists()


GRID = {"ccr_weight": [0.1, 1.0]}


def test_a_search_chooses_the_setting_of_the_run_that_fills_the_row(small_book: Path, tmp_path: Path) -> None:
    """CCR: every setting and as many baselines on dev, the recorded choice, the baseline and the chosen run on test."""
    for name in ("_toc.yml", "book", "notebooks", "pyproject.toml", "data"):
        (tmp_path / name).symlink_to(small_book / name)
    (tmp_path / "experiments").mkdir()
    text = (ROOT / "experiments/ccr_ccs.yaml").read_text(encoding="utf-8")
    text, count = re.subn(r"(search_ccr: {select: {grid: ){.+?}", rf"\1{json.dumps(GRID)}", text)
    assert count == 1
    (tmp_path / "experiments/ccr_ccs.yaml").write_text(text, encoding="utf-8")
    names = ["ccr_ccs/f30k/scan_baseline", "ccr_ccs/f30k/scan_ccr"]
    changes = [word for key, value in (FEW | NARROW).items() for word in ("-p", f"{key}={value}")]
    command = ["run", *names, *changes, "--jobs", "2"]
    ended = itm(tmp_path, *command)
    assert ended.exit_code == 0, ended.output
    (path,) = (tmp_path / "receipts/11_ccr_ccs/choices").iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    tried = {run["setting"]["ccr_weight"]: run["rsum"] for run in record["runs"]}
    assert sorted(tried) == GRID["ccr_weight"] and len(record["baseline_runs"]) == len(tried)
    assert record["chosen"] == {"ccr_weight": max(tried, key=tried.__getitem__)}
    (chosen,) = map(read_receipt, (tmp_path / "receipts/11_ccr_ccs").glob("SCAN-CCR-*.json"))
    assert chosen["parameters"]["ccr_weight"] == record["chosen"]["ccr_weight"]
    assert chosen["dataset"]["split"] == "test" and "att_f1_common" in chosen["metrics"]  # beside the baseline's
    row = f"{chosen['metrics']['rsum']['value']:8.1f}  f30k_precomp all {TEST}, 1 seed"
    assert any(line.startswith("SCAN CCR ") and row in line for line in ended.output.splitlines()), ended.output
    again = itm(tmp_path, *command)
    assert again.exit_code == 0 and again.output.count("kept") == 2  # nothing is searched or trained a second time


@pytest.mark.parametrize("name", ["scan/f30k/t2i_avg", "mmca/coco/full"])
def test_the_recipe_of_an_experiment_gives_the_same_with_papermill_alone(
    name: str, finished: Callable, small_book: Path
) -> None:
    """``papermill notebook out -y "$(itm recipe name)"``, as the pages say."""
    job = next(job for jobs in map(finished, [chapter_of(name)]) for job in jobs if job.experiment.name == name)
    program, alone = str(Path(sys.executable).with_name("itm")), f"runs/alone/{name}"
    smaller = [word for key, value in changes_of(name).items() for word in ("-p", f"{key}={value}")]
    asked = [program, "recipe", name, *smaller, "-p", f"variant={job.parameters['variant']}", "-p", f"run_dir={alone}"]
    recipe = subprocess.run(asked, cwd=small_book, check=True, capture_output=True, text=True).stdout
    command = [
        sys.executable,
        "-m",
        "papermill",
        f"notebooks/{job.experiment.chapter}.ipynb",
        "runs/out.ipynb",
        "-y",
        recipe,
    ]
    subprocess.run(command, cwd=small_book, check=True, capture_output=True)
    mine, ours = (receipts_of(job, place) for place in (small_book / alone / "s0", small_book / "made"))
    assert mine and [one["ranks"] for one in mine] == [one["ranks"] for one in ours]
    assert [one["parameters"] for one in mine] == [one["parameters"] for one in ours]


def chapter_of(name: str) -> str:
    return next(chapter for chapter, (names, _) in RUNS.items() if name in names)


@pytest.mark.parametrize(
    ("name", "shared", "second", "begun", "all_steps"),
    [
        ("dcpa/f30k/two_stages", "stage_one", "inter", "log.jsonl", 9),  # logs after its first epoch of three steps
        ("aoq/f30k/scan_adapoffquin", "round_one", "final", ".lock", 3),  # has one epoch: killed before it ends
    ],
)
def test_killed_in_its_second_stage_a_run_ends_with_the_same_ranks(
    name: str, shared: str, second: str, begun: str, all_steps: int, finished: Callable, small_book: Path
) -> None:
    job = next(job for job in finished(chapter_of(name)) if job.experiment.name == name)
    cut = f"runs/cut_{second}"
    changes = options(job.experiment.name, run_dir=cut, **{shared: f"{cut}/first"})
    changes = [word for change in changes for word in ("-p", change)]
    command = ["run", job.experiment.name, *changes, "--receipts", str(small_book / cut / "receipts")]
    program = str(Path(sys.executable).with_name("itm"))
    running = subprocess.Popen([program, *command], cwd=small_book, stdout=subprocess.DEVNULL)
    folder, deadline = small_book / cut / "s0" / second, time.monotonic() + 600
    while not (folder / begun).is_file():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    for process in (psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)):
        process.kill()
    running.wait()
    log = folder / "log.jsonl"
    steps = log.read_text(encoding="utf-8").count('"loss"') if log.is_file() else 0
    assert steps < all_steps and not (small_book / cut / "receipts").exists()
    made = [*(small_book / cut / "first").rglob("step-*.safetensors"), *(small_book / cut / "first").rglob("*.npy")]
    written = {path: path.stat().st_mtime_ns for path in made}
    assert written
    ended = itm(small_book, *command)
    assert ended.exit_code == 0, ended.output
    # The first training was read, and so were the lists that were mined with it: nothing was made again.
    assert {path: path.stat().st_mtime_ns for path in made} == written
    whole, resumed = (receipts_of(job, small_book / place)[0] for place in ("made", f"{cut}/receipts"))
    assert resumed["ranks"] == whole["ranks"] and resumed["metrics"]["rsum"] == whole["metrics"]["rsum"]


# Methods that the four papers print for comparison, with the numbers of others.
OTHERS = {
    "CAMP", "CMPM", "DAN", "DPC", "DSPE", "DVSA", "GSMN", "GXN", "IMRAM", "JGCAR", "PVSE", "SAN", "SCAN", "SCO", "SMFEA",
    "Unicoder-VL", "VSE++", "WCGL",
}  # fmt: skip


def test_every_own_row_of_the_four_papers_has_an_experiment() -> None:
    ledger = Ledger()
    experiments = read_experiments(ROOT).values()
    variants = {(one.settings["dataset"], one.settings["variant"]) for one in experiments}
    members = Counter((one.settings["dataset"], one.ensemble) for one in experiments)
    variants |= {row for row, count in members.items() if count > 1}
    assert set(ledger.results) == {"AOQ", "CCR_CCS", "DCPA", "MMCA"}
    without = []
    for paper, content in ledger.results.items():
        for table, body in content["tables"].items():
            for block, row in ((part, row) for part in body["blocks"] for row in part["rows"]):
                variant = variant_of(ledger, f"{paper} {table}", row)
                data = f"data/{dataset_of(block).removesuffix(' 5K')}_precomp"
                if variant and (data, variant[0]) not in variants:
                    without.append(f"{paper} {table}: {variant[0]} on {data}")
                elif not variant and (row.get("method") not in OTHERS or paper in ("AOQ", "CCR_CCS")):
                    without.append(f"{paper} {table}: no variant for {row}")  # these two print only rows of their own
    assert not without
