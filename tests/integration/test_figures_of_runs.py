"""``itm figures`` from end to end: small runs are trained, and their chapters draw from them what the papers show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toy_dataset import write_entities, write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_lab.experiments import run_figures
from itm_lab.experiments.experiment_files import find_experiment
from itm_lab.experiments.plan import plan
from itm_lab.experiments.runner import run_jobs

ROOT = Path(__file__).resolve().parents[2]
IMAGES = {"train": 24, "dev": 8, "test": 12}
SMALL = {"epochs": 1, "batch_size": 8, "num_workers": 0, "device": "cpu", "width": 16, "word_dim": 8}
LISTS = {"captions_mined": 20, "captions_kept": 10, "first_epochs": 1, "first_batch_size": 8, "miner_width": 16}
RUNS = {
    "ccr_ccs/f30k/scan_baseline": SMALL,
    "ccr_ccs/f30k/scan_ccr_ccs": SMALL,  # measured beside the baseline, and drawn beside it
    "aoq/f30k/vsrn_adapoffquin": SMALL | LISTS | {"caption_width": 8, "reasoning_steps": 1, "online_run": ""},
}


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
    assert not run_jobs(jobs, root / "receipts", at_a_time=2)
    return {job.experiment.name: job.folder for job in jobs}


@pytest.fixture
def draw(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[set[str], str]]:
    """Run the command; returns the names of the figures that were drawn, and what the chapter printed meanwhile."""
    notebooks, execute = [], run_figures.execute
    monkeypatch.setattr(run_figures, "execute", lambda *given: notebooks.append(execute(*given)) or notebooks[-1])

    def figures(name: str) -> tuple[set[str], str]:
        run = runs[name]
        monkeypatch.chdir(run.parents[3])
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        ended = CliRunner().invoke(app, ["figures", str(run)])
        assert ended.exit_code == 0, ended.output
        assert {path: path.read_bytes() for path in before} == before  # nothing was trained again
        drawn = [path for path in (run / "figures").iterdir() if path.suffix != ".md"]
        assert all(str(path.name) in ended.output.replace("\n", "") for path in drawn)
        outputs = [output for cell in notebooks[-1].cells for output in cell.get("outputs", ())]
        return {path.stem for path in drawn}, "".join(output.get("text", "") for output in outputs)

    return figures


@pytest.mark.slow
def test_chapter_11_draws_a_run_beside_its_baseline(draw: Callable) -> None:
    drawn, printed = draw("ccr_ccs/f30k/scan_ccr_ccs")
    assert {"ccr-picture", "ccr-pr", "ccr-gaps", "ccr-arms"} <= drawn
    assert "compared: none, both" in printed  # the baseline was found, and its model opened
    assert "SCAN CCR+CCS               rsum" in printed  # receipts of this dataset, not of Scenes


@pytest.mark.slow
def test_chapter_10_draws_a_run_on_photographs(draw: Callable) -> None:
    """The paper's examples, lists and curves; no mark of an oracle, which only Scenes has."""
    drawn, printed = draw("aoq/f30k/vsrn_adapoffquin")
    assert {"aoq-examples", "aoq-panel", "aoq-cross", "aoq-gaps"} <= drawn
    assert "of its list" in printed and "(true!)" not in printed
    assert "shown as its boxes" not in printed  # every photograph was found
