"""The house: imports in one direction, every room known, the words of the field, one page per module."""

from __future__ import annotations

import json
import pkgutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml
from importlinter.cli import lint_imports

import itm_lab
import itm_utils
from itm_lab.publish.architecture import (
    INIT,
    TARGET,
    Room,
    against_target,
    drawing,
    fragment,
    line_kinds,
    rooms,
    unlisted,
)
from itm_lab.publish.vocabulary import denied_words, read_vocabulary

ROOT = Path(__file__).resolve().parents[2]


@cache
def found_rooms() -> list[Room]:
    return rooms(ROOT)


def test_imports_follow_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename=str(ROOT / ".importlinter"), no_cache=True) == 0


def test_every_room_is_drawn_and_none_imports_upwards() -> None:
    assert unlisted(ROOT) == set()
    found = found_rooms()
    order = [room.name for room in found]
    shown = drawing(found)
    for number, room in enumerate(found):
        assert room.name.partition(".")[2] in (*shown.replace("<", ">").split(">"), INIT)
        assert not set(room.imports) & set(order[:number]) - {"itm_utils.models"} or room.name.startswith("itm_utils")


def test_every_line_of_both_packages_is_counted_once() -> None:
    text = "\n".join(fragment(found_rooms()))
    for package in ("itm_utils", "itm_lab"):
        paths = [path for path in (ROOT / package).rglob("*.py") if path.parent.name != "models"]
        lines = sum(path.read_bytes().count(b"\n") for path in paths)
        assert f"{lines:,} hand-written lines" in text


def test_lines_are_told_apart_by_kind() -> None:
    source = '"""A module."""\n\nx = """\n# no comment\n"""  # behind code\n\n\ndef f():\n    """Two\n    lines."""\n    # why\n    return x\n'
    assert line_kinds(source) == {"docstring": 3, "blank": 3, "code": 5, "comment": 1}
    assert "met by 2" in against_target(Counter(code=TARGET - 2))
    assert "missed by 3. Code alone is 3,001 lines" in against_target(Counter(code=TARGET + 1, blank=2))


def test_no_module_finds_the_repository_by_climbing_from_its_own_file() -> None:
    for package in ("itm_utils", "itm_lab"):
        for path in (ROOT / package).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not ("__file__" in line and ("parents[" in line or ".parent.parent" in line)), path


def test_no_denied_word_in_packages_and_pages() -> None:
    assert list(denied_words(ROOT)) == []
    assert all(any(ROOT.glob(pattern)) for pattern in read_vocabulary()["checked"])


def test_a_denied_word_is_found_and_its_replacement_named(tmp_path: Path) -> None:
    for folder in ("itm_utils/data", "book/companions"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "itm_utils/new.py").write_text("# a dearer pair\nfirst_look = 1\nclear = 2\n")
    (tmp_path / "itm_utils/data/deep.py").write_text("# two dice\n")
    (tmp_path / "book/companions/page.md").write_text("A clear page.\nIn the little world.\n")
    (tmp_path / "README.md").write_text("A golden case.\n")
    found = list(denied_words(tmp_path))
    places = ("itm_utils/data/deep.py:1:", "book/companions/page.md:2:", "README.md:1:")
    assert [sum(line.startswith(place) for line in found) for place in places] == [1, 1, 1] and len(found) == 5
    found = [line for line in found if line.startswith("itm_utils/new.py")]
    assert found[0].startswith("itm_utils/new.py:1:") and "expensive" in found[0]
    assert found[1].startswith("itm_utils/new.py:2:") and "attention" in found[1]


def test_every_module_of_the_library_has_a_page_of_reference() -> None:
    names = [module.name for module in pkgutil.walk_packages(itm_utils.__path__, "itm_utils.") if not module.ispkg]
    pages = {f"book/api/{name.removeprefix('itm_utils.').replace('.', '-')}" for name in names}
    listed = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter for part in listed["parts"] for chapter in part["chapters"]]
    (api,) = (chapter for chapter in chapters if chapter["file"] == "book/api/index")
    assert {section["file"] for section in api["sections"]} == pages
    for page, name in zip(sorted(pages), sorted(names), strict=True):
        assert f".. automodule:: {name}\n" in (ROOT / f"{page}.md").read_text(encoding="utf-8").replace("-", "-")


def test_versions_agree() -> None:
    assert itm_utils.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f'version = "{itm_utils.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert itm_lab.__doc__


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_every_chapter_links_the_page_of_its_code(path: Path) -> None:
    pages = {"12_scoring_fast": "fast_attention"}  # exports nothing: its code is a module of the library
    page = f"book/api/{pages.get(path.stem, 'models-' + path.stem.partition('_')[2])}"
    assert (ROOT / f"{page}.md").is_file()
    assert f"<../{page}>`" in path.read_text(encoding="utf-8")


def test_a_chapter_is_read_cell_by_cell_without_its_outputs(tmp_path: Path) -> None:
    code = {
        "cell_type": "code",
        "metadata": {},
        "source": ["x = 1\n", "# ask the host"],
        "outputs": [{"text": ["the host"]}],
    }
    text = {"cell_type": "markdown", "metadata": {}, "source": ["An image and a caption."]}
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/01_toy.ipynb").write_text(json.dumps({"cells": [text, code]}), encoding="utf-8")
    assert list(denied_words(tmp_path)) == ["notebooks/01_toy.ipynb, cell 1:2: “the host”: write base model"]
