"""What a page folds away of a code cell; the notebook and what papermill injects stay whole."""

from __future__ import annotations

from pathlib import Path

import papermill
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tiny_book import code, tiny_notebook

from itm_lab.notebook_io import find_notebooks, read_notebook, tags, write_notebook
from itm_lab.publish.folding import Part, parts, visible_lines
from itm_lab.publish.notebook_lint import lint_file

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = "epochs: int = 1  # passes\nseed: int = 0  # draws\n# more\nwidth: int = 8  # of vectors\n\nclip: float = 2.0  # norm"
HELPER = "def helper(x):\n" + "".join(f"    x = x + {number}\n" for number in range(16)) + "    return x"
IMPORTS = "import a\nimport b\nimport c\nfrom d import e"
GUARD = 'def check(name):\n    """Refuse an unknown name."""\n    if name != "a":\n        raise ValueError(name)'


def kinds(source: str, *given: object) -> list[str]:
    return [part.kind for part in parts(source, *given)]


def test_parameters_below_the_mark_are_folded_and_the_mark_is_gone() -> None:
    shown, rest = parts(PARAMETERS, ["parameters"])
    assert shown == Part("epochs: int = 1  # passes\nseed: int = 0  # draws")
    assert rest.kind == "parameters" and rest.text.splitlines()[0].startswith("width") and "more" not in rest.text
    assert rest.title == "All other parameters (3 lines)"
    assert kinds("a: int = 1  # no mark\n" * 40, ["parameters"]) == [""]


def test_papermill_reads_and_injects_all_parameters_whatever_a_page_folds(tmp_path: Path) -> None:
    notebook = tiny_notebook()
    notebook.cells[1] = code(PARAMETERS, "parameters", tags=["parameters"])
    write_notebook(tmp_path / "01_tiny.ipynb", notebook)
    assert lint_file(tmp_path / "01_tiny.ipynb") == []
    found = papermill.inspect_notebook(str(tmp_path / "01_tiny.ipynb"))
    assert list(found) == ["epochs", "seed", "width", "clip"] and found["width"]["help"] == "of vectors"
    injected = parameterize_notebook(load_notebook_node(str(tmp_path / "01_tiny.ipynb")), {"width": 16})
    places = [number for number, cell in enumerate(injected.cells) if "injected-parameters" in tags(cell)]
    assert places == [2] and "width = 16" in injected.cells[2].source
    assert injected.cells[1].source == PARAMETERS


def test_a_mark_folds_any_cell() -> None:
    assert kinds("x = 1\n# more of the same\ny = 2") == ["", "more"]
    assert kinds("# more\ny = 2") == ["more"]
    assert kinds("x = '# more'\nmore = 1") == [""]


def test_imports_fold_where_they_are_many() -> None:
    assert kinds(f"%matplotlib inline\n{IMPORTS}\nx = 1") == ["imports", ""]
    assert kinds(f"#| export\n{IMPORTS}\nx = 1") == ["imports", ""]
    assert kinds("import a\nimport b\nx = 1") == [""]


def test_guards_fold_and_functions_that_return_do_not() -> None:
    assert kinds(f"#| export\n{GUARD}\n\n\nclass Model:\n    pass") == ["guard", ""]
    assert kinds(f"#| export\n{GUARD}\n    return name") == [""]
    assert kinds("if a:\n    raise ValueError\nelse:\n    b = 1\nc = 1\nd = 1") == [""]


def test_long_helpers_fold_and_what_uses_them_stays() -> None:
    assert kinds(f"{HELPER}\n\n\nprint(helper(1))") == ["helper", ""]
    assert kinds(f"x = 1\n{HELPER}\nprint(helper(1))") == ["", "helper", ""]
    shown = parts(f"{HELPER}\n\n\nprint(helper(1))")[1]
    assert shown.text == "print(helper(1))"


@pytest.mark.parametrize("name", ["loss_by_loop", "slow_loss", "equation_6", "share_solution"])
def test_code_that_teaches_stays(name: str) -> None:
    assert kinds(HELPER.replace("helper", name)) == [""]


def test_exported_code_methods_of_a_class_and_tagged_cells_stay() -> None:
    assert kinds(f"#| export\n{HELPER}") == [""]
    assert kinds(f"@add_to(Model)\n{HELPER}") == [""]
    assert kinds(HELPER, ["show-input"]) == [""]
    assert kinds("class Model(Module):\n" + "    x = 1\n" * 40) == [""]


def test_the_code_of_a_figure_folds_where_it_is_long() -> None:
    drawing = "\n".join(f"axes.plot({number})" for number in range(16))
    assert kinds(drawing, [], True) == ["figure"]
    assert kinds(drawing, [], False) == kinds("axes.plot(1)", [], True) == [""]


def test_what_cannot_be_parsed_is_shown() -> None:
    assert kinds("this is not python") == [""]
    assert kinds("%%bash\nls") == [""]


def test_no_line_of_any_chapter_is_lost_or_moved() -> None:
    for path in find_notebooks(ROOT):
        for cell in read_notebook(path).cells:
            if cell.cell_type == "code":
                found = [line for part in parts(cell.source, tags(cell)) for line in part.text.splitlines()]
                kept = [line for line in found if line.strip()]
                assert kept == [
                    line for line in cell.source.splitlines() if line.strip() and not line.startswith("# more")
                ]


def test_visible_lines_count_what_stands_open() -> None:
    assert visible_lines(f"{HELPER}\n\nprint(1)\n") == 1
    assert visible_lines("a = 1\n\nb = 2") == 2
    assert visible_lines("a = 1", ["hide-input"]) == 0
