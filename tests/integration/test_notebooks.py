"""Notebook rules, runs, stored outputs and launch copies."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from killing import listens_to_interrupts
from nbformat import NotebookNode, v4
from papermill.cli import papermill
from PIL import Image
from tiny_book import PNG, ROOT, code, printed, text, tiny_book, tiny_notebook

from itm_lab.notebook_io import find_notebooks, read_notebook, write_notebook
from itm_lab.publish import execute as notebooks
from itm_lab.publish.execute import run_notebooks
from itm_lab.publish.launch_copies import launch_copies, read_citations
from itm_lab.publish.notebook_lint import lint_file
from itm_utils.errors import ItmError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_book(tmp_path)


def change(path: Path, edit: Callable[[NotebookNode], object]) -> None:
    notebook = read_notebook(path)
    edit(notebook)
    write_notebook(path, notebook)


def add_cell(path: Path, cell: NotebookNode) -> None:
    change(path, lambda notebook: notebook.cells.append(cell))


def image(**mystnb: dict) -> NotebookNode:
    output = v4.new_output("display_data", data={"image/png": PNG, "text/plain": "<Figure>"})
    return code("plot()", "figure", [output], mystnb=mystnb)


# --- lint ---------------------------------------------------------------------------------------------


def test_clean_notebook_has_no_findings(path: Path) -> None:
    assert lint_file(path) == []


FIGURE = {"figure": {"caption": "Halves"}}
BAD_CELLS = {
    "execution count": v4.new_code_cell("1", id="x", execution_count=3),
    "stray metadata colab": code("1", "x", colab={}),
    "injected by papermill": code("1", "x", tags=["injected-parameters"]),
    "raises-exception": code("1", "x", tags=["raises-exception"]),
    "stored error (KeyError)": code("1", "x", [v4.new_output("error", ename="KeyError", evalue="", traceback=[])]),
    "stored stderr": code("1", "x", [v4.new_output("stream", name="stderr", text="Warning")]),
    "a path of one machine": code("1", "x", [printed("saved to /home/me/out\n")]),
    "without alt text": image(**FIGURE),
    'starts with "image of"': image(image={"alt": "Image of a bar chart"}, **FIGURE),
    "without a caption": image(image={"alt": "Bars rise from left to right"}),
    "an image without alt text": text("![](a.png)", "x"),
    "an image without alt text: ": text("```{figure} a.png\n:name: a\n\nCaption\n```", "x"),
    "an image without alt": text('<img src="a.png">', "x"),
    "stands on several cells": code("1", "title"),
    "2 cells tagged `parameters`": code("x: int = 1  # one", "x", tags=["parameters"]),
    "not a typed literal": code("x = 1  # one", "x", tags=["parameters"]),
    "`y: int = x` is not a typed literal": code("x: int = 1  # one\ny: int = x  # two", "x", tags=["parameters"]),
    "has no comment": code("x: list = [\n    1,  # one\n]", "x", tags=["parameters"]),
}


@pytest.mark.parametrize("finding", BAD_CELLS)
def test_bad_cell_is_found(path: Path, finding: str) -> None:
    add_cell(path, BAD_CELLS[finding])
    findings = lint_file(path)
    assert any(finding in text for text in findings), findings
    assert all(text.startswith("01_tiny.ipynb: ") and "\n" not in text for text in findings)


def test_good_figures_pass(path: Path) -> None:
    add_cell(path, image(image={"alt": "Bars rise from left to right"}, **FIGURE))
    add_cell(path, text("![A rising line](a.png)\n\n:::{figure} a.png\n:alt: A rising line\n:::", "x"))
    assert lint_file(path) == []


@pytest.mark.parametrize(
    ("edit", "finding"),
    [
        (lambda nb: nb.cells.pop(0), "level-1 heading"),
        (lambda nb: nb.cells.pop(1), "0 cells tagged `parameters`"),
        (lambda nb: nb.cells.pop(), "7 cells checked by nbval"),
        (lambda nb: nb.cells[1].pop("id"), "cell 2 (no id): no cell id"),
        (lambda nb: nb.metadata.update(colab={}), "notebook metadata"),
        (lambda nb: nb.update(nbformat_minor=4), "format 4.4"),
        (lambda nb: nb.cells.append(text("x" * 2_100_000, "long")), "2.1 MB"),
    ],
)
def test_bad_notebook_is_found(path: Path, edit: Callable, finding: str) -> None:
    change(path, edit)
    assert any(finding in text for text in lint_file(path)), lint_file(path)


def test_fix_repairs_what_is_mechanical_and_nothing_else(path: Path) -> None:
    def spoil(notebook: NotebookNode) -> None:
        notebook.metadata["language_info"]["version"] = "3.11.1"
        notebook.cells[0].pop("id")
        notebook.cells[3]["id"] = "halving"
        notebook.cells[4].update(execution_count=7, metadata={"tags": ["hide-input"], "collapsed": True})

    change(path, spoil)
    assert len(lint_file(path)) >= 4
    assert lint_file(path, fix=True) == []
    fixed, original = read_notebook(path), tiny_notebook()
    assert [cell.source for cell in fixed.cells] == [cell.source for cell in original.cells]
    assert [cell.get("outputs") for cell in fixed.cells] == [cell.get("outputs") for cell in original.cells]
    assert fixed.cells[4].metadata == {"tags": ["hide-input"]}
    before = path.stat().st_mtime_ns
    assert lint_file(path, fix=True) == [] and path.stat().st_mtime_ns == before


def test_unreadable_notebook_is_one_clear_error(path: Path) -> None:
    path.write_text("{not json")
    with pytest.raises(ItmError, match=r"01_tiny.ipynb: found unreadable JSON"):
        lint_file(path)


def test_committed_notebooks_keep_the_rules() -> None:
    assert [text for path in find_notebooks(ROOT) for text in lint_file(path)] == []


# --- run ----------------------------------------------------------------------------------------------


def test_names_are_resolved(path: Path) -> None:
    root = path.parents[1]
    for name in ("01_tiny", "tiny", str(path), "notebooks/01_tiny.ipynb"):
        assert find_notebooks(root, [name]) == [path]
    with pytest.raises(ItmError, match="nosuch: found no such notebook, expected one of: 01_tiny"):
        find_notebooks(root, ["nosuch"])


def test_run_stores_a_clean_copy_and_a_record_and_runs_again_only_on_change(
    path: Path, capsys: pytest.CaptureFixture
) -> None:
    root = path.parents[1]
    change(path, lambda notebook: notebook.cells[1].update(source="import time\n\ntime.sleep(0.3)\nepochs = 1"))
    original = path.read_bytes()
    broken = tiny_notebook()
    broken.cells.insert(4, code("assert epochs == 2, 'epochs is not two'", "wrong"))
    write_notebook(root / "notebooks/02_broken.ipynb", broken)

    assert run_notebooks(root, [], in_place=False, jobs=2) == ["02_broken"]
    captured = capsys.readouterr()
    assert "01_tiny: 10 cells in" in captured.out
    assert "02_broken.ipynb: cell 5 (wrong) failed" in captured.err and "epochs is not two" in captured.err
    assert path.read_bytes() == original
    assert lint_file(root / "_build/notebooks/01_tiny.ipynb") == lint_file(path)
    assert not (root / "_build/executions/02_broken.json").exists()

    record = json.loads((root / "_build/executions/01_tiny.json").read_text())
    assert set(record) == {
        "chapter", "finished", "seconds", "cells", "cpu_count", "machine", "python", "torch", "key",
    }  # fmt: skip
    assert [cell["section"] for cell in record["cells"]] == ["A tiny chapter"] * 2 + ["Checked halves"] * 8
    assert record["finished"].endswith("+00:00")
    assert record["cells"][0]["seconds"] > 0.3 and 0.3 < record["seconds"] < 10

    (root / "notebooks/02_broken.ipynb").unlink()
    for left_over in ("_build/notebooks/page.ipynb", "_build/executions/page.json"):  # a notebook that is no more
        (root / left_over).write_text("{}")
    assert run_notebooks(root, [], in_place=False, jobs=2) == []
    assert "nothing changed" in capsys.readouterr().out
    assert not list((root / "_build").rglob("page.*"))
    run = notebooks.prepare(root, path)
    (root / "itm_utils/metrics.py").write_text("CHANGED = True\n")
    assert not notebooks.is_current(root, notebooks.prepare(root, path))
    assert run.key != notebooks.prepare(root, path).key


def test_in_place_writes_outputs_back_only_on_success(path: Path) -> None:
    root = path.parents[1]
    change(path, lambda notebook: notebook.cells[4].update(source="print(notebook_folder)"))
    failing = path.read_bytes()
    assert run_notebooks(root, ["tiny"], in_place=True, jobs=1) == ["01_tiny"]
    assert path.read_bytes() == failing and not (root / "book/data/executions").exists()

    source = "import os\nfrom pathlib import Path\nprint(Path.cwd().name, os.environ['OMP_NUM_THREADS'])"
    change(path, lambda notebook: notebook.cells[4].update(source=source))
    assert run_notebooks(root, ["tiny"], in_place=True, jobs=1) == []
    assert read_notebook(path).cells[4].outputs[0].text == "notebooks 1\n"
    assert read_notebook(path).cells[4].execution_count is None
    assert (root / "book/data/executions/01_tiny.json").is_file()


def test_edits_made_during_a_run_are_not_overwritten(path: Path) -> None:
    run = notebooks.prepare(path.parents[1], path)
    change(path, lambda notebook: notebook.cells[0].update(source="# Edited"))
    with pytest.raises(ItmError, match="changed during the run"):
        notebooks.save(path.parents[1], run, in_place=True)
    assert read_notebook(path).cells[0].source == "# Edited"


@pytest.mark.slow
def test_interrupt_leaves_no_kernel_behind(path: Path) -> None:
    source = "import os, time\nfrom pathlib import Path\nPath('pid').write_text(str(os.getpid()))\ntime.sleep(300)"
    add_cell(path, code(source, "sleep"))
    command = [sys.executable, "-c", "from itm_lab.cli import app; app()", "notebooks", "run"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=path.parent, preexec_fn=listens_to_interrupts, **pipes)
    deadline = time.monotonic() + 120
    while not (pid_file := path.parent / "pid").exists() or not pid_file.read_text():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and b"Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# --- other tools on the same notebooks ------------------------------------------------------------------


@pytest.mark.slow
def test_nbval_sees_one_altered_output(path: Path) -> None:
    altered = path.with_name("02_altered.ipynb")
    altered.write_text(path.read_text())
    change(altered, lambda notebook: notebook.cells[-1].outputs[0].update(text="3.6\n"))
    options = ["-q", "--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "notebooks"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=path.parents[1])
    assert result.returncode == 1
    assert "1 failed, 19 passed" in result.stdout and "02_altered.ipynb::Cell 9" in result.stdout, result.stdout


def test_papermill_runs_a_clean_notebook_with_a_parameter(path: Path, tmp_path: Path) -> None:
    command = [str(path), str(tmp_path / "out.ipynb"), "-p", "epochs", "3", "--no-progress-bar"]
    result = CliRunner().invoke(papermill, command)
    assert result.exit_code == 0, result.output
    assert read_notebook(tmp_path / "out.ipynb").cells[-1].outputs[0].text == "10.5\n"


# --- launch copies ------------------------------------------------------------------------------------

MYST = """\
(a-label)=
## Loss {cite}`faghri2018` and {term}`recall <recall at K>`

See {doc}`/notebooks/02_scan`, {ref}`the table <tab>`, {math}`x^2`, `code[0](x)` and [there](02_scan.ipynb).

````{exercise} Halve it
:label: ex
:class: dropdown

Use {term}`recall`.

```python
x = {doc}`untouched`
```
````

:::{note}
Mind the **gap**.
:::

```{figure} ../book/img/a.png
:alt: A rising line
:name: fig

The {term}`recall` rises.
```

$$
a = b
$$ (eq)
"""


def test_launch_copies_are_plain(path: Path, tmp_path: Path) -> None:
    root = path.parents[1]
    add_cell(path, text("```{solution-start} ex\n:class: dropdown\n```", "gate"))
    add_cell(path, text("```{solution-end}\n```", "gate-end"))
    add_cell(path, text("{cite:t}`faghri2018` asked.", "cited"))
    add_cell(path, text(MYST, "myst"))
    (root / "book/references.bib").write_text(
        "@article{faghri2018,\n  author = {Faghri, Fartash and Fleet, David J.},\n  year = {2018}\n}\n"
    )
    [copy] = launch_copies(root, tmp_path / "copies", "https://github.com/o/r", "v1")
    notebook = read_notebook(copy)
    assert '-c kept.txt "itm-utils @ git+https://github.com/o/r@v1"' in notebook.cells[0].source
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert notebook.cells[2].metadata.tags == ["parameters"]
    assert [cell.source for cell in notebook.cells[-3:-1]] == ["> **Solution**", "Faghri et al. (2018) asked."]
    assert notebook.cells[-1].source.splitlines() == [
        "## Loss (Faghri et al., 2018) and recall",
        "",
        "See 02 scan, the table, $x^2$, `code[0](x)` and [there](https://github.com/o/r/raw/v1/notebooks/02_scan.ipynb).",
        "",
        "<details>",
        "<summary>Exercise: Halve it</summary>",
        "",
        "Use recall.",
        "",
        "```python",
        "x = {doc}`untouched`",
        "```",
        "",
        "</details>",
        "",
        "> **Note**",
        ">",
        "> Mind the **gap**.",
        "",
        "![A rising line](https://github.com/o/r/raw/v1/book/img/a.png)",
        "",
        "*The recall rises.*",
        "",
        "$$",
        "a = b",
        "$$",
    ]


def test_install_cell_keeps_torch_and_numpy(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [copy] = launch_copies(path.parents[1], tmp_path / "copies", "https://github.com/o/r", "v1")
    monkeypatch.chdir(tmp_path)
    python = [line for line in read_notebook(copy).cells[0].source.splitlines() if not line.startswith("%")]
    exec("\n".join(python), {})
    assert (tmp_path / "kept.txt").read_text() == f"torch=={version('torch')}\nnumpy=={version('numpy')}\n"


def test_citations_without_a_bibliography(tmp_path: Path) -> None:
    assert read_citations(tmp_path / "none.bib") == {}


def test_large_pictures_are_stored_as_jpeg_and_charts_stay_as_they_are() -> None:
    def encoded(pixels: np.ndarray) -> str:
        packed = io.BytesIO()
        Image.fromarray(pixels).save(packed, "PNG")
        return base64.b64encode(packed.getvalue()).decode()

    grainy = encoded(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    chart = encoded(np.zeros((300, 400, 3), dtype=np.uint8))
    cell = v4.new_code_cell(
        "", outputs=[v4.new_output("display_data", {"image/png": data}) for data in (grainy, chart)]
    )
    notebooks.compress_images(v4.new_notebook(cells=[cell]))
    assert list(cell.outputs[0].data) == ["image/jpeg"]
    assert Image.open(io.BytesIO(base64.b64decode(cell.outputs[0].data["image/jpeg"]))).size == (400, 300)
    assert cell.outputs[1].data == {"image/png": chart}
