"""The notebook is the source: stale, unsafe and ambiguous exports are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_book import ROOT, code, tiny_book

from itm_lab.notebook_io import read_notebook, write_notebook
from itm_lab.publish.export import export, render_all, stale_modules
from itm_lab.teaching.cells import add_to
from itm_utils.errors import ItmError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tiny_book(tmp_path)
    return tmp_path


def add_cells(project: Path, *sources: str) -> None:
    path = project / "notebooks/01_tiny.ipynb"
    notebook = read_notebook(path)
    notebook.cells += [code(source, f"extra{number}") for number, source in enumerate(sources)]
    write_notebook(path, notebook)


def differences(project: Path) -> dict[str, str]:
    return {path.name: text for path, text in stale_modules(project, render_all(project)).items()}


def test_round_trip(project: Path) -> None:
    written = export(project)
    module = project / "itm_utils/models/tiny.py"
    assert {path.name for path in written} == {"__init__.py", "tiny.py"}
    text = module.read_text()
    assert text.startswith("# Generated from notebooks/01_tiny.ipynb")
    assert "# cell halving\n" in text
    scope: dict = {}
    exec(text, scope)
    assert scope["half"](5) == 2.5
    assert differences(project) == {} and export(project) == []


def test_the_mark_of_a_fold_stays_in_the_notebook(project: Path) -> None:
    """What a page folds is no matter of the module; other comments are."""
    add_cells(project, "#| export\ndef one():\n    return 1\n\n\n# more\n# of the same\ndef two():\n    return 2")
    export(project)
    text = (project / "itm_utils/models/tiny.py").read_text()
    assert "def one()" in text and "# of the same\ndef two()" in text and "# more" not in text


def test_stale_module_is_caught_and_named(project: Path) -> None:
    export(project)
    module = project / "itm_utils/models/tiny.py"
    module.write_text(module.read_text().replace("LIMIT = 3", "LIMIT = 4"))
    assert "is 'LIMIT = 4', the notebook says 'LIMIT = 3'" in differences(project)["tiny.py"]


def test_module_of_a_vanished_notebook_is_stale_and_removed(project: Path) -> None:
    export(project)
    (project / "notebooks/01_tiny.ipynb").unlink()
    assert differences(project)["tiny.py"] == "no notebook exports it"
    export(project)
    assert [path.name for path in (project / "itm_utils/models").glob("*")] == ["__init__.py"]


def test_hand_written_module_is_not_deleted(project: Path) -> None:
    mine = project / "itm_utils/models/mine.py"
    mine.write_text("X = 1\n")
    with pytest.raises(ItmError, match=r"mine\.py: hand-written"):
        export(project)
    assert mine.exists()


@pytest.mark.parametrize(
    "source",
    [
        "print('hello')",
        "x = 3",
        "A, B = 1, 2",
        "X.y = 1",
        "for i in range(3): pass",
        "if True:\n    X = 1",
        "'late'",
        "X: int",
    ],
)
def test_side_effect_is_caught(project: Path, source: str) -> None:
    add_cells(project, f"#| export\n{source}")
    with pytest.raises(ItmError, match=r"cell extra0.*only imports, functions, classes"):
        render_all(project)


@pytest.mark.parametrize("source", ["from . import x", "from .a import b", "from math import *"])
def test_relative_and_star_imports_are_caught(project: Path, source: str) -> None:
    add_cells(project, f"#| export\n{source}")
    with pytest.raises(ItmError, match="absolute import"):
        render_all(project)


@pytest.mark.parametrize(
    "sources",
    [
        ["#| export\ndef half(): ..."],
        ["#| export\ndef two(): ...\n\n\ndef two(): ..."],
        ["#| export\nimport cmath as math"],
        ["#| export\nclass A: ...", "# | export\nA = 1"],
        ["#| export\nLIMIT = 3"],
    ],
)
def test_duplicate_definition_is_caught(project: Path, sources: list[str]) -> None:
    add_cells(project, *sources)
    with pytest.raises(ItmError, match="a second `"):
        render_all(project)


def test_magic_and_semicolon_are_caught(project: Path) -> None:
    add_cells(project, "#| export\nimport json; import os")
    with pytest.raises(ItmError, match="semicolon"):
        render_all(project)


def test_two_notebooks_may_not_share_a_module(project: Path) -> None:
    shutil.copy(project / "notebooks/01_tiny.ipynb", project / "notebooks/02_tiny.ipynb")
    with pytest.raises(ItmError, match="no other notebook has"):
        render_all(project)


def test_pages_export_nothing(project: Path) -> None:
    (project / "notebooks/01_tiny.ipynb").rename(project / "notebooks/tiny.ipynb")
    with pytest.raises(ItmError, match=r"notebooks/tiny.ipynb: found an exported cell, expected .* numbered chapters"):
        render_all(project)


def test_imports_are_merged_and_sorted(project: Path) -> None:
    add_cells(
        project,
        '#| export\n"""About halves."""\n\nimport torch\nfrom itm_utils.errors import problem\nfrom torch import nn, Tensor',
        "# | export\nfrom __future__ import annotations\n\nimport math\nfrom torch import (\n    Tensor,\n    cat,\n)\n\n\nclass A: ...",
    )
    with pytest.raises(ItmError, match="About halves"):  # a docstring is the first thing or nothing
        render_all(project)
    path = project / "notebooks/01_tiny.ipynb"
    notebook = read_notebook(path)
    notebook.cells = notebook.cells[-2:]
    write_notebook(path, notebook)
    assert render_all(project)[project / "itm_utils/models/tiny.py"] == (
        "# Generated from notebooks/01_tiny.ipynb by `itm export`: edit the notebook, not this file.\n\n"
        '"""About halves."""\n\n'
        "from __future__ import annotations\n\nimport math\n\nimport torch\nfrom torch import Tensor, cat, nn\n\n"
        "from itm_utils.errors import problem\n\n\n# cell extra1\nclass A: ...\n"
    )


def test_output_is_stable_under_the_formatter(project: Path) -> None:
    names = ", ".join(f"a_rather_long_name_{letter}" for letter in "abcdefgh")
    add_cells(project, f"#| export\nfrom torch import {names}\n\nEPS = 1e-8\n\n\n# a note\nclass A:\n    pass")
    for path in export(project):
        command = [
            sys.executable,
            "-m",
            "ruff",
            "format",
            "--check",
            "--config",
            str(ROOT / "pyproject.toml"),
        ]
        assert subprocess.run([*command, str(path)], capture_output=True).returncode == 0, path.read_text()


def test_committed_modules_are_current() -> None:
    assert stale_modules(ROOT, render_all(ROOT)) == {}


def test_every_module_imports_without_data_gpu_or_network(tmp_path: Path) -> None:
    """In one new process, because here a module may have been imported before."""
    stems = sorted(path.stem for path in (ROOT / "itm_utils/models").glob("*.py"))
    names = ["itm_utils.models" if stem == "__init__" else f"itm_utils.models.{stem}" for stem in stems]
    # Each module anew: what one has imported does not help the next.
    script = (
        "import importlib, socket, sys, torch\n"
        "socket.socket.connect = None\n"
        f"for name in {names}:\n"
        "    for known in [known for known in sys.modules if known.startswith('itm_utils')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
        "    print(name)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ITM_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, names), run.stderr
    assert not list(tmp_path.iterdir())


GROWING = """\
#| export
class Counter:
    \"\"\"Count.\"\"\"

    def __init__(self) -> None:
        self.count = 0

    def up(self) -> int:
        self.count += 1
        return self.count
"""
ADDED = """\
#| export
from itm_lab.teaching.cells import add_to


@add_to(Counter)
def twice(self) -> int:
    self.up()

    return self.up()


@add_to(Counter)
@property
def doubled(self) -> int:
    return 2 * self.count
"""


def test_methods_of_later_cells_are_folded_into_their_class(project: Path) -> None:
    add_cells(project, GROWING, "#| export\nTHREE = 3", ADDED)
    export(project)
    text = (project / "itm_utils/models/tiny.py").read_text()
    assert "add_to" not in text and "teaching" not in text
    assert text.index("def twice") < text.index("THREE = 3")
    scope: dict = {}
    exec(text, scope)
    counter = scope["Counter"]()
    assert (counter.twice(), counter.doubled) == (2, 4)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([GROWING, "#| export\n@add_to(Counter)\ndef up(self) -> int:\n    return 0"], "a second Counter.up"),
        ([GROWING, ADDED, ADDED], "a second Counter.twice"),
        (["#| export\n@add_to(Nobody)\ndef up(self) -> int:\n    return 0"], "a method of Nobody"),
    ],
)
def test_a_method_is_defined_once_and_of_a_known_class(project: Path, sources: list[str], message: str) -> None:
    add_cells(project, *sources)
    with pytest.raises(ItmError, match=message):
        export(project)


def test_in_a_notebook_a_method_joins_its_class_and_never_replaces_one() -> None:
    class Counter:
        def up(self) -> int:
            return 1

    for _ in range(2):  # a cell may be run again

        @add_to(Counter)
        def down(self) -> int:
            return -1

    assert Counter().down() == -1
    with pytest.raises(ItmError, match=r"Counter\.up: found a second definition"):

        @add_to(Counter)
        def up(self) -> int:
            return 2
