"""``itm figures`` from end to end: small runs are trained, and their chapters draw from them what the papers show."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from forked_runs import forked_runs
from nbformat import NotebookNode
from PIL import Image
from toy_dataset import write_entities, write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import run_figures
from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.experiments.plan import plan
from itm_lab.experiments.runner import run_jobs
from itm_lab.records.receipts import read_receipt

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"train": 24, "dev": 8, "test": 12}
SMALL = {"epochs": 1, "batch_size": 8, "num_workers": 0, "device": "cpu", "width": 16, "word_dim": 8}
LISTS = {"captions_mined": 20, "captions_kept": 10, "first_epochs": 1, "first_batch_size": 8, "miner_width": 16}
RUNS = {
    "ccr_ccs/f30k/scan_baseline": SMALL,
    "ccr_ccs/f30k/scan_ccr_ccs": SMALL,  # measured beside the baseline, and drawn beside it
    "aoq/f30k/vsrn_adapoffquin": SMALL | LISTS | {"caption_width": 8, "reasoning_steps": 1, "online_run": ""},
}


class Drawn(NamedTuple):
    """Names of the figures of a run, and what its chapter printed meanwhile."""

    figures: set[str]
    printed: str


def write_book(root: Path) -> Path:
    """Chapters and experiments of the book, and a Flickr30K of toys with photographs, boxes and phrases."""
    for name in ("_toc.yml", "notebooks", "pyproject.toml", "experiments"):
        (root / name).symlink_to(ROOT / name)
    (root / "book" / "data").mkdir(parents=True)
    for path in (ROOT / "book" / "data").glob("*.yaml"):
        (root / "book" / "data" / path.name).symlink_to(path)
    rules, size = (root / "book" / "data" / "rules.yaml"), f"f30k: {{images: {IMAGES['test']}}}"
    text = rules.read_text(encoding="utf-8")
    assert "f30k: {images: 1000}" in text
    rules.unlink()  # the same rules, for a smaller test split
    rules.write_text(text.replace("f30k: {images: 1000}", size), encoding="utf-8")
    data = write_toy_dataset(root / "data/f30k_precomp", IMAGES)
    rng = np.random.default_rng(0)
    for split, count in IMAGES.items():
        names = [f"{split}_{number}" for number in range(count)]
        (data / f"{split}_ids.txt").write_text("".join(f"{name}.png\n" for name in names), encoding="utf-8")
        (root / "photos" / split).mkdir(parents=True)
        for name in names:
            pixels = rng.integers(0, 256, size=(96, 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "photos" / split / f"{name}.png")
    write_entities(root / "data/flickr30k_entities", data, names)
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the finished runs."""
    root, jobs = write_book(tmp_path_factory.mktemp("small_book")), []
    for name, changes in RUNS.items():
        kept = {"variant": find_experiment(ROOT, name).settings["variant"], "photos": "photos"}  # the published name
        jobs += plan(root, [name], "", "", [f"{key}={value}" for key, value in (changes | kept).items()], [])
    with forked_runs():
        assert not run_jobs(jobs, root / "receipts", at_a_time=2)
    return {job.experiment.name: job.folder for job in jobs}


@pytest.fixture(scope="module")
def drawn(runs: dict[str, Path]) -> dict[str, Drawn]:
    """The figures of two chapters, drawn at the same time: one by the command, one by what the command calls."""
    one, other = "ccr_ccs/f30k/scan_ccr_ccs", "aoq/f30k/vsrn_adapoffquin"
    root, notebooks, execute = runs[one].parents[4], {}, run_figures.execute

    def noting(book: Path, chapter: str, *given: Any) -> NotebookNode:
        notebooks[chapter] = execute(book, chapter, *given)
        return notebooks[chapter]

    before = {path: path.read_bytes() for name in (one, other) for path in runs[name].rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(run_figures, "execute", noting)
        patch.chdir(root)
        beside = pool.submit(run_figures.draw_figures, root, runs[other])
        ended = CliRunner().invoke(app, ["figures", str(runs[one])])
        assert ended.exit_code == 0, ended.output
        assert {path.parent for path in beside.result()} == {runs[other] / "figures"}
    assert {path: path.read_bytes() for path in before} == before  # nothing was trained again
    found = {}
    for name, chapter in ((one, "11_ccr_ccs"), (other, "10_aoq")):
        outputs = [output for cell in notebooks[chapter].cells for output in cell.get("outputs", ())]
        files = {path.stem for path in (runs[name] / "figures").iterdir() if path.suffix != ".md"}
        found[chapter] = Drawn(files, "".join(output.get("text", "") for output in outputs))
    assert all(name in ended.output for name in found["11_ccr_ccs"].figures)
    return found


@pytest.mark.slow
def test_chapter_11_draws_a_run_beside_its_baseline(drawn: dict[str, Drawn]) -> None:
    figures, printed = drawn["11_ccr_ccs"]
    assert {"ccr-picture", "ccr-pr", "ccr-gaps", "ccr-arms"} <= figures
    assert "compared: none, both" in printed  # the baseline was found, and its model opened
    for variant in ("SCAN baseline", r"SCAN CCR\+CCS"):  # from the receipts of this dataset, not of Scenes
        assert re.search(rf"^{variant} +rsum +[\d.]+  \(one seed\)", printed, re.MULTILINE)


@pytest.mark.slow
def test_chapter_10_draws_a_run_on_photographs(drawn: dict[str, Drawn]) -> None:
    """The paper's examples, lists and curves; no mark of an oracle, which only Scenes has."""
    figures, printed = drawn["10_aoq"]
    assert {"aoq-examples", "aoq-panel", "aoq-cross", "aoq-gaps"} <= figures
    assert "of its list" in printed and "(true!)" not in printed
    assert "shown as its boxes" not in printed  # every photograph was found


@pytest.mark.slow
def test_a_receipt_of_chapter_10_says_how_long_mining_took(runs: dict[str, Path]) -> None:
    """The page of results shows it beside the paper's (`book/data/rows.yaml`)."""
    (path,) = (runs["aoq/f30k/vsrn_adapoffquin"].parents[4] / "receipts" / "10_aoq").glob("*.json")
    assert read_receipt(path)["metrics"]["mining_seconds"]["value"] > 0
