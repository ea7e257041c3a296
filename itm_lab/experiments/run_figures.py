"""``itm figures``: the figures of a chapter, drawn from a finished run instead of the model of its page."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from nbformat import NotebookNode

from itm_lab.experiments.processes import end, start_dependent
from itm_lab.experiments.runner import environment_of
from itm_lab.notebook_io import is_chapter, read_notebook
from itm_utils.errors import input_error
from itm_utils.files import write_text

COMPARES = "compare_with"  # the parameter of a chapter whose figures compare several finished runs
TYPES = {"image/svg+xml": "svg", "image/png": "png"}  # the first that an output has


@dataclass(frozen=True)
class Figure:
    """A drawing of an executed notebook. content: the bytes of its file."""

    name: str
    caption: str
    suffix: str
    content: bytes


def draw_figures(root: Path, run: Path, out: Path | None = None) -> list[Path]:
    """Run the chapter of a finished run again, figures on; write them to ``out``, by default ``figures`` in its folder.

    The training is not repeated: the chapter goes on from a copy of the run's last checkpoint, which is the end. A
    chapter that compares variants takes them from the runs beside this one, and trains none.
    """
    executed = executed_notebook(run)
    parameters = dict(executed.metadata["papermill"]["parameters"])
    chapter = Path(executed.metadata["papermill"]["input_path"]).stem
    out = out or run / "figures"
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "run"
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.ipynb", ".lock", "figures", chapter))
        parameters |= {"teach": True, "run_dir": str(copy)}
        if COMPARES in parameters:
            parameters[COMPARES] = ",".join(map(str, runs_beside(run)))
        notebook = execute(root, chapter, parameters, Path(temporary))
    figures = list(figures_of(notebook))
    if not figures:
        raise input_error(run, "a run whose chapter draws nothing from it", "a dataset with boxes, or another chapter")
    return write_figures(figures, out)


def runs_beside(run: Path) -> list[Path]:
    """Folders of the finished runs of other variants with the same dataset and seed: ``runs/…/<variant>/<this name>``."""
    run = run.resolve()
    others = [path.parent for path in sorted(run.parents[1].glob(f"*/{run.name}/best.safetensors"))]
    return [path for path in others if path != run]


def executed_notebook(run: Path) -> NotebookNode:
    """The notebook that papermill left in the folder of a run, with the parameters it was given."""
    found = [path for path in sorted(run.glob("*.ipynb")) if is_chapter(path)] if run.is_dir() else []
    if len(found) != 1:
        raise input_error(run, f"{len(found)} executed chapters", "the folder of one finished run, such as runs/…/s0")
    notebook = read_notebook(found[0])
    about = notebook.metadata.get("papermill", {})
    if "parameters" not in about or "input_path" not in about:
        raise input_error(found[0], "a notebook without parameters", "one that papermill executed")
    if about.get("exception"):
        raise input_error(found[0], "a run that failed", "a finished one", "Start it again: it goes on.")
    return notebook


def execute(root: Path, chapter: str, parameters: dict[str, Any], folder: Path) -> NotebookNode:
    """The chapter, executed with these parameters by papermill, as ``itm run`` does."""
    source, target, log = root / "notebooks" / f"{chapter}.ipynb", folder / f"{chapter}.ipynb", folder / "papermill.log"
    given = yaml.safe_dump(parameters, sort_keys=False, allow_unicode=True)
    command = ["papermill", str(source), str(target), "--no-progress-bar", "-y", given]
    with log.open("w", encoding="utf-8") as file:
        process = start_dependent(command, stdout=file, stderr=file, cwd=root, env=environment_of(parameters))
        try:
            failed = process.wait()
        finally:
            end([process])
    if failed:
        last = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()][-1]
        raise input_error(source, f"an error with the parameters of this run ({last})", "a chapter that runs")
    return read_notebook(target)


def figures_of(notebook: NotebookNode) -> Iterator[Figure]:
    """Every captioned drawing of an executed notebook."""
    for cell in notebook.cells:
        about = cell.metadata.get("mystnb", {}).get("figure", {})
        for output in cell.get("outputs", ()) if about.get("name") else ():
            kind = next((kind for kind in TYPES if kind in output.get("data", {})), None)
            if kind is not None:
                data = output["data"][kind]
                content = base64.b64decode(data) if kind == "image/png" else data.encode()
                yield Figure(about["name"].removeprefix("fig-"), about.get("caption", ""), TYPES[kind], content)


def write_figures(figures: list[Figure], out: Path) -> list[Path]:
    """One file each, and a page that shows them with their captions."""
    out.mkdir(parents=True, exist_ok=True)
    paths, lines = [], []
    for figure in figures:
        path = out / f"{figure.name}.{figure.suffix}"
        path.write_bytes(figure.content)
        paths.append(path)
        lines += [f"![{figure.name}]({path.name})", "", figure.caption, ""]
    write_text(out / "README.md", "\n".join(lines))
    return paths
