"""Recipes: papermill parameter files, one for each row of a table.

A recipe's name begins with its chapter (``02_scan_f30k_t2i_avg.yaml`` belongs to ``notebooks/02_scan.ipynb``). Lines
``# table: …``, ``# ensemble: …`` and ``# seeds: …`` above its parameters say where its row stands (in several tables:
``# table: mmca/table_1, mmca/table_4``), whose scores are averaged with whose, and which seeds a reproduction takes.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from itm_lab.notebook_io import read_notebook, tags
from itm_lab.records.parameters import ASIDE, check_parameters, declared_parameters
from itm_utils.errors import input_error

HEADER = re.compile(r"^# (table|ensemble|seeds): *(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """One recipe. parameters: as the file has them. declared: name → (type, default) in its notebook."""

    path: Path
    notebook: Path
    parameters: dict[str, Any]
    declared: dict[str, tuple[str, Any]]
    table: str = ""
    ensemble: str = ""
    seeds: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def chapter(self) -> str:
        return self.notebook.stem

    def values(self, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        """Every parameter of a run: the notebook's defaults, the recipe's values, then ``overrides``.

        A run with other settings is another arm: its name says what was changed.
        """
        overrides = overrides or {}
        check_parameters(overrides, self.declared, self.name)
        values = {name: default for name, (_, default) in self.declared.items()} | self.parameters | overrides
        changed = [f"{name}={overrides[name]}" for name in overrides if name not in ASIDE]
        if changed and "variant" not in overrides:
            values["variant"] = " ".join([values["variant"], *changed])
        return values


def find_recipe(root: Path, name: str) -> Path:
    """The file of a recipe, by its name or its path."""
    known = {path.stem: path for path in sorted((root / "recipes").glob("*.yaml"))}
    for path in (Path(name), root / name):
        if path.suffix == ".yaml" and path.is_file():
            return path
    if Path(name).name.removesuffix(".yaml") in known:
        return known[Path(name).name.removesuffix(".yaml")]
    close = difflib.get_close_matches(Path(name).stem, known, n=3, cutoff=0.3) or list(known)
    raise input_error(name, "no such recipe", f"one of recipes/, such as {', '.join(close[:3])}")


def read_recipe(root: Path, path: Path) -> Recipe:
    """Read one recipe and check every parameter against its notebook."""
    text = path.read_text(encoding="utf-8")
    try:
        parameters = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise input_error(path, f"no YAML ({str(error).splitlines()[0]})", "lines of `name: value`") from error
    if not isinstance(parameters, dict):
        raise input_error(path, f"a {type(parameters).__name__}", "lines of `name: value`")
    chapters = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    notebook = next((book for book in chapters if path.stem.startswith(f"{book.stem}_")), None)
    if notebook is None:
        raise input_error(
            path, "a name of no chapter", f"one that begins with {', '.join(book.stem for book in chapters)}"
        )
    cells = [cell.source for cell in read_notebook(notebook).cells if "parameters" in tags(cell)]
    declared = declared_parameters(cells[0]) if cells else {}
    check_parameters(parameters, declared, path.name)
    return Recipe(path, notebook, parameters, declared, **dict(HEADER.findall(text)))


def tables_of(path: Path) -> set[str]:
    """The tables in which a recipe's row stands."""
    named = dict(HEADER.findall(path.read_text(encoding="utf-8"))).get("table", "")
    return set(filter(None, re.split(r"\s*,\s*", named)))


def recipes_of_table(root: Path, table: str) -> list[Recipe]:
    """The rows of a table, in the order of their names."""
    paths = sorted((root / "recipes").glob("*.yaml"))
    tables = {path: tables_of(path) for path in paths}
    found = [read_recipe(root, path) for path in paths if table in tables[path]]
    if not found:
        raise input_error("table", repr(table), f"one of {', '.join(sorted(set().union(*tables.values())))}")
    return found


def read_overrides(recipe: Recipe, pairs: list[str]) -> dict[str, Any]:
    """``["width=32"]`` as values of the types that the notebook declares."""
    overrides = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise input_error("-p", repr(pair), "name=value")
        if name not in recipe.declared:
            check_parameters({name: text}, recipe.declared, recipe.name)  # says which name is close
        overrides[name] = read_value(recipe.declared[name][0], name, text)
    return overrides


def read_value(kind: str, name: str, text: str) -> Any:
    """A value from the command line."""
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise input_error(f"parameter {name}", repr(text), "true or false")
        return text.lower() == "true"
    try:
        return {"int": int, "float": float, "str": str}[kind](text)
    except ValueError:
        raise input_error(f"parameter {name}", repr(text), f"an {kind}") from None


def read_seeds(text: str) -> list[int]:
    """``"0-4"``, ``"7"`` or ``"1,3,5-7"`` as numbers."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise input_error("--seeds", repr(text), "numbers and ranges such as 0-4 or 1,3,5-7")
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    return seeds
