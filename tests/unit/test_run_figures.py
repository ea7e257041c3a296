"""``itm figures``: which run it reads, and what it takes out of an executed chapter."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from nbformat import v4

from itm_lab.experiments import run_figures
from itm_lab.experiments.run_figures import draw_figures, executed_notebook, figures_of, runs_beside
from itm_lab.notebook_io import write_notebook
from itm_utils.errors import ItmError

PNG = b"\x89PNG made up"
PARAMETERS = {"seed": 3, "device": "cpu", "teach": False, "run_dir": "runs/x", "epochs": 2}


def drawing(name: str, kind: str, data: str) -> Any:
    cell = v4.new_code_cell("draw()", metadata={"mystnb": {"figure": {"name": name, "caption": f"What {name} shows."}}})
    cell.outputs = [v4.new_output("stream", text="said"), v4.new_output("display_data", data={kind: data})]
    return cell


def chapter(*cells: Any, **about: Any) -> Any:
    papermill = {"parameters": PARAMETERS, "input_path": "notebooks/08_mmca.ipynb"} | about
    return v4.new_notebook(cells=list(cells), metadata={"papermill": papermill})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "s3"
    folder.mkdir()
    write_notebook(folder / "08_mmca.ipynb", chapter())
    (folder / "step-00000002.safetensors").write_bytes(b"weights")
    return folder


def test_captioned_drawings_are_taken_and_nothing_else() -> None:
    plain = v4.new_code_cell("draw()")
    plain.outputs = [v4.new_output("display_data", data={"image/png": base64.b64encode(PNG).decode()})]
    one = drawing("fig-one", "image/png", base64.b64encode(PNG).decode())
    found = list(figures_of(chapter(plain, one, drawing("fig-two", "image/svg+xml", "<svg/>"))))
    assert [(figure.name, figure.suffix, figure.content) for figure in found] == [
        ("one", "png", PNG),
        ("two", "svg", b"<svg/>"),
    ]


def test_a_run_is_drawn_from_a_copy_with_its_own_parameters(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def execute(root: Path, name: str, parameters: dict[str, Any], folder: Path) -> Any:
        given.update(parameters, name=name, checkpoints=sorted(p.name for p in Path(parameters["run_dir"]).iterdir()))
        return chapter(drawing("fig-one", "image/png", base64.b64encode(PNG).decode()))

    monkeypatch.setattr(run_figures, "execute", execute)
    before = {path: path.read_bytes() for path in run.iterdir()}
    (path,) = draw_figures(Path(), run)
    assert path == run / "figures" / "one.png" and path.read_bytes() == PNG
    assert "What fig-one shows." in (run / "figures" / "README.md").read_text(encoding="utf-8")
    assert given["name"] == "08_mmca" and given["teach"] and (given["seed"], given["epochs"]) == (3, 2)
    assert given["checkpoints"] == ["step-00000002.safetensors"] and given["run_dir"] != str(run)
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_that_is_no_finished_run_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ItmError, match="0 executed chapters"):
        executed_notebook(tmp_path / "nowhere")
    write_notebook(run / "08_mmca.ipynb", chapter(exception=True))
    with pytest.raises(ItmError, match="a run that failed"):
        executed_notebook(run)
    write_notebook(run / "08_mmca.ipynb", v4.new_notebook())
    with pytest.raises(ItmError, match="without parameters"):
        executed_notebook(run)


def test_a_chapter_that_draws_nothing_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_figures, "execute", lambda *given: chapter())
    with pytest.raises(ItmError, match="draws nothing"):
        draw_figures(Path(), run)
    assert not (run / "figures").exists()


def test_a_chapter_that_compares_runs_gets_the_variants_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same dataset and seed, finished, and not the run itself."""
    for place in ("scan_ccr/s0", "scan_baseline/s0", "scan_ccs/s1"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "best.safetensors").write_bytes(b"weights")
    (tmp_path / "scan_ccr_ccs" / "s0").mkdir(parents=True)  # still training
    run = tmp_path / "scan_ccr" / "s0"
    assert runs_beside(run) == [tmp_path / "scan_baseline" / "s0"]
    given: dict[str, Any] = {}

    def execute(root: Path, name: str, parameters: dict[str, Any], folder: Path) -> Any:
        given.update(parameters)
        return chapter(drawing("fig-one", "image/png", base64.b64encode(PNG).decode()))

    monkeypatch.setattr(run_figures, "execute", execute)
    write_notebook(run / "11_ccr_ccs.ipynb", chapter(parameters=PARAMETERS | {"compare_with": ""}))
    draw_figures(Path(), run)
    assert given["compare_with"] == str(tmp_path / "scan_baseline" / "s0")
