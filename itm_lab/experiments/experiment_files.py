"""Experiments: ``experiments/<chapter>.yaml`` describes every run of a chapter, and this module expands the files.

An experiment is named ``<chapter>/<dataset>/<variant>``. Its settings are collected from the file in this order, and
what comes later replaces what came before:

1. ``base``: settings of every experiment of the chapter
2. ``datasets: <dataset>: base``: settings of every experiment on a dataset
3. what the variant ``extends``: one or several groups or variants, each collected the same way (a ``base`` may extend
   groups too)
4. ``groups`` or ``variants: <name>``, and then the same below ``datasets: <dataset>``

Only what stands below ``datasets: <dataset>: variants`` can be run. Besides parameters of the notebook there are
``about`` and ``note`` (for people, not taken over by ``extends``), ``table`` (where its row stands), ``ensemble`` (whose scores are averaged with
whose), ``twins`` (the name of the mean of two of its runs that differ in their seed alone), ``seeds`` (which seeds a
reproduction takes), ``select`` (settings that a search on dev chooses first) with
its ``search_baseline``, ``choice_of`` (experiments whose searched settings it takes), and ``same_ranks_as`` (variants whose
test ranks may equal this one's, such as another collapsed control: elsewhere equal ranks mean a setting that changes
nothing). ``{dataset}`` in a folder's name is filled in here, ``{seed}`` by the notebook. The folder of a run follows from
its name: ``runs/<chapter>/<dataset>/<variant>/s<seed>``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.parameters import ASIDE, notebook_model
from itm_utils.errors import ItmError, input_error
from itm_utils.files import read_text
from itm_utils.validation import Settings, validated

ABOUT = ("about", "note", "table", "ensemble", "twins", "seeds", "search_baseline", "choice_of", "same_ranks_as")
MOST_SEEDS = 10_000  # in one range
SECTIONS = ("base", "groups", "variants", "datasets")


@dataclass(frozen=True)
class Select:
    """Settings that a search on dev chooses. grid: setting → values. seeds: runs of each combination.

    baseline: the variant that gets as many runs, if any. settings: the combinations that are tried, where these are not
    all of the grid; one of them is chosen as a whole. shorter: settings of the search alone, such as fewer epochs.
    """

    grid: dict[str, list[Any]]
    seeds: int
    baseline: str
    settings: tuple[dict[str, Any], ...] = ()
    shorter: dict[str, Any] = field(default_factory=dict)

    @property
    def ladder(self) -> str:
        """The one setting of the grid if it is a number: its values rise by a factor, and the search follows them."""
        names = [name for name, values in self.grid.items() if is_ladder(values)]
        return names[0] if len(self.grid) == 1 and names and not self.settings else ""


def is_ladder(values: list[Any]) -> bool:
    """At least three numbers above zero, each as many times larger than the one before."""
    if len(values) < 3 or not all(type(value) in (int, float) and value > 0 for value in values):
        return False
    factors = [after / before for before, after in pairwise(values)]
    return factors[0] > 1 and all(abs(factor / factors[0] - 1) < 1e-6 for factor in factors)


@dataclass(frozen=True)
class Experiment:
    """One row of a table. settings: the parameters that its file gives. model: all parameters of its notebook."""

    name: str
    path: Path
    notebook: Path
    settings: dict[str, Any]
    model: type[Settings]
    about: str = ""
    note: str = ""
    table: str = ""
    ensemble: str = ""
    twins: str = ""
    seeds: str = ""
    search_baseline: str = ""
    choice_of: str = ""
    same_ranks_as: str = ""
    select: Select | None = None
    records: tuple[str, ...] = ()  # where the searches are recorded that chose some of the settings

    @property
    def chapter(self) -> str:
        return self.notebook.stem

    @property
    def tables(self) -> list[str]:
        return [table for table in re.split(r"\s*,\s*", self.table) if table]

    @property
    def chosen_elsewhere(self) -> list[str]:
        """Full names of the experiments whose searched settings it takes, in that order."""
        named = [name for name in re.split(r"\s*,\s*", self.choice_of) if name]
        return [name if "/" in name else f"{self.name.rpartition('/')[0]}/{name}" for name in named]

    @property
    def alike(self) -> list[str]:
        """Full names of the experiments whose ranks may equal this one's."""
        named = [name for name in re.split(r"\s*,\s*", self.same_ranks_as) if name]
        return [f"{self.name.rpartition('/')[0]}/{name}" for name in named]

    def values(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every parameter of a run: the notebook's defaults, the experiment's settings, then ``overrides``.

        A run with other settings is another variant: its name says what was changed.
        """
        overrides = dict(overrides or {})
        defaults = {name: field.default for name, field in self.model.model_fields.items()}
        values = validated(self.model, defaults | self.settings | overrides, self.name)
        for name, value in values.items():
            check_placeholders(f"{self.name}, {name}", value)
        changed = [f"{name}={overrides[name]}" for name in overrides if name not in ASIDE]
        if changed and "variant" not in overrides:
            values["variant"] = " ".join([values["variant"], *changed])
        return values


def read_experiments(root: Path, chapter: str = "") -> dict[str, Experiment]:
    """Name → experiment, of one chapter (``dcpa``) or of all; in the order of the notebooks and of the files."""
    found: dict[str, Experiment] = {}
    for notebook in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        path = root / "experiments" / f"{notebook.stem.partition('_')[2]}.yaml"
        if path.is_file() and chapter in ("", path.stem):
            stamps = path.stat().st_mtime_ns, notebook.stat().st_mtime_ns
            found |= {experiment.name: experiment for experiment in _read_file(path, notebook, stamps)}
    return found


def find_experiment(root: Path, name: str) -> Experiment:
    """An experiment by its name."""
    known = read_experiments(root, name.partition("/")[0]) or read_experiments(root)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)
        hint = "`itm recipe --list` shows all."
        raise input_error(name, "no such experiment", f"one of experiments/, such as {', '.join(close[:3])}", hint)
    return known[name]


def experiments_of_table(root: Path, table: str) -> list[Experiment]:
    """The rows of a table, in the order of their files."""
    known = read_experiments(root).values()
    if not (found := [one for one in known if table in one.tables]):
        tables = sorted({table for one in known for table in one.tables})
        raise input_error("table", repr(table), f"one of {', '.join(tables)}")
    return found


@cache
def _read_file(path: Path, notebook: Path, stamps: tuple[int, ...]) -> list[Experiment]:
    """The experiments of a file; read again only if it or its notebook has changed (``stamps``)."""
    found = [make_experiment(path, notebook, *place) for place in expand(path)]
    plain = {one.name for one in found if one.select is None or one.select.ladder}
    for one in found:
        needed = one.select is not None and not (one.select.ladder and not one.search_baseline)
        if needed and (baseline_name(one) not in plain or baseline_name(one) == one.name):
            expected = "a variant of the same dataset that selects nothing, or one number alone"
            raise input_error(one.name, f"search_baseline: {one.search_baseline or 'none'}", expected)
    return found


def baseline_name(experiment: Experiment) -> str:
    """Full name of the experiment that gets as many runs as a search."""
    return f"{experiment.name.rpartition('/')[0]}/{experiment.search_baseline}"


def make_experiment(path: Path, notebook: Path, dataset: str, variant: str, given: dict[str, Any]) -> Experiment:
    """One experiment from all that its file says of it; every parameter is checked against the notebook."""
    about: dict[str, Any] = {name: str(given[name]) for name in ABOUT if name in given}
    settings = {name: value for name, value in given.items() if name not in (*ABOUT, "select")}
    settings = {name: fill_in(value, dataset) for name, value in settings.items()}
    name = f"{path.stem}/{dataset}/{variant}"
    settings["run_dir"] = f"runs/{name}"
    experiment = Experiment(name, path, notebook, settings, notebook_model(notebook), **about)
    experiment.values()
    if given.get("select") is None:
        return experiment
    return replace(experiment, select=read_select(experiment, given["select"]))


def read_select(experiment: Experiment, given: Any) -> Select:
    """The ``select`` of an experiment, checked: every value must be one that its notebook takes."""
    where, form = f"{experiment.name}, select", "{grid: {setting: [value, …], …}, on: dev, seeds: 1}"
    form += " (or settings: [{setting: value, …}, …] instead of grid; shorter: {setting: value} for the search alone)"
    if isinstance(given, dict):  # in YAML a bare ``on`` is true
        given = {"on" if name is True else name: value for name, value in given.items()}
    wanted = {"on", "settings" if isinstance(given, dict) and "settings" in given else "grid"}
    if not isinstance(given, dict) or not wanted <= given.keys() <= wanted | {"seeds", "shorter"}:
        raise input_error(where, repr(given), form)
    settings = listed_settings(where, given["settings"], form) if "settings" in given else ()
    grid = values_of(settings) if settings else given["grid"]
    seeds = given.get("seeds", 1)
    if given["on"] != "dev" or type(seeds) is not int or seeds < 1:
        raise input_error(where, f"on: {given['on']}, seeds: {seeds}", f"{form}, with one seed or more")
    if not isinstance(grid, dict) or not grid:
        raise input_error(where, f"grid: {grid!r}", form)
    for name, values in grid.items():
        if not isinstance(values, list) or len(values) < 1 or len(set(map(str, values))) < len(values):
            raise input_error(where, f"{name}: {values!r}", "a list of different values")
        if name in ASIDE:
            raise input_error(where, f"the parameter {name}", "a setting of the model or of its training")
        for value in values:
            experiment.values({name: value})
    shorter = given.get("shorter") or {}
    if not isinstance(shorter, dict) or shorter.keys() & {*grid, *ASIDE}:
        raise input_error(
            where, f"shorter: {shorter!r}", "settings that the search does not choose, such as {epochs: 4}"
        )
    experiment.values(shorter)
    return Select(grid, seeds, experiment.search_baseline, settings, shorter)


def listed_settings(where: str, given: Any, form: str) -> tuple[dict[str, Any], ...]:
    """Combinations that a search tries one by one: different ones, all of the same settings."""
    fine = isinstance(given, list) and len(given) > 0 and all(isinstance(one, dict) and one for one in given)
    if not fine or any(one.keys() != given[0].keys() or given.count(one) > 1 for one in given):
        raise input_error(where, f"settings: {given!r}", f"{form}, each with the same settings and only once")
    return tuple(given)


def values_of(settings: tuple[dict[str, Any], ...]) -> dict[str, list[Any]]:
    """Setting → the values it takes in some combinations, each once."""
    return {name: list(dict.fromkeys(one[name] for one in settings)) for name in settings[0]}


def fill_in(value: Any, dataset: str) -> Any:
    """A value with the dataset's name in it where it asks for it."""
    return value.replace("{dataset}", dataset) if isinstance(value, str) else value


def check_placeholders(where: str, value: Any) -> None:
    """Only ``{seed}`` may be left to the notebook."""
    if isinstance(value, str) and re.search("[{}]", value.replace("{seed}", "")):
        raise input_error(where, repr(value), "no braces but {seed} and, in a file of experiments, {dataset}")


def expand(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """(dataset, variant, all that is said of it) of each experiment of a file."""
    try:
        content = load_yaml(read_text(path, "the form of experiments/README.md"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ItmError):
            raise
        raise input_error(
            path, f"no YAML ({str(error).splitlines()[0]})", "the form of experiments/README.md"
        ) from None
    check_section(path, content, SECTIONS)
    found = []
    for dataset, body in section(content, "datasets").items():
        check_section(f"{path}, {dataset}", body, SECTIONS[:-1])
        base = section(content, "base") | extended(path, [content, body], section(body, "base"))
        for variant in section(body, "variants"):
            found.append((dataset, variant, base | collect(path, [content, body], variant)))
    return found


def section(content: dict[str, Any], name: str) -> dict[str, Any]:
    """One section of a file; an empty one where it is absent or has nothing in it."""
    return content.get(name) or {}


def check_section(where: Path | str, content: Any, allowed: tuple[str, ...]) -> None:
    """A section is a mapping with known names."""
    if not isinstance(content, dict) or not content.keys() <= set(allowed):
        wrong = (
            ", ".join(map(str, content.keys() - set(allowed))) if isinstance(content, dict) else type(content).__name__
        )
        raise input_error(
            where, wrong if isinstance(content, dict) else f"a {wrong}", f"a mapping of {', '.join(allowed)}"
        )
    for name, value in content.items():
        within = value.items() if isinstance(value, dict) and name in ("groups", "variants") else ()
        for key, found in ((name, value), *within):
            if found is not None and not isinstance(found, dict):
                raise input_error(f"{where}, {key}", repr(found)[:60], "a mapping")


def collect(path: Path, levels: list[dict[str, Any]], name: str, inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """What is said of a variant or group, after what it extends. levels: the file, and its part of one dataset."""
    if name in inside:
        raise input_error(path, f"{' extends '.join((*inside, name))}", "no circle")
    said = [
        section(level, kind)[name] or {} for level in levels for kind in SECTIONS[1:3] if name in section(level, kind)
    ]
    if not said:
        raise input_error(path, f"extends: {name}", "the name of a group or variant")
    return extended(path, levels, {key: value for layer in said for key, value in layer.items()}, (*inside, name))


def extended(
    path: Path, levels: list[dict[str, Any]], own: dict[str, Any], inside: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Settings with those they extend before them; what is written for people is not taken over."""
    parents = own.get("extends") or []
    if not isinstance(parents, str | list) or not all(isinstance(parent, str) for parent in parents):
        raise input_error(path, f"extends: {parents!r}"[:80], "the name of a group or variant, or a list of them")
    settings: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        settings |= collect(path, levels, parent, inside)
    taken = {key: value for key, value in settings.items() if key not in ABOUT[:2]}
    return taken | {key: value for key, value in own.items() if key != "extends"}


def read_overrides(experiment: Experiment, pairs: list[str]) -> dict[str, Any]:
    """``["width=32"]`` as values of the types that the notebook declares."""
    overrides = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not pair.isprintable():  # nor are bytes of a command line that are no UTF-8
            raise input_error("-p", repr(pair), "name=value, in printable characters")
        overrides[name] = read_value(experiment, name, text)
    return overrides


def read_value(experiment: Experiment, name: str, text: str) -> Any:
    """A value from the command line."""
    if name not in experiment.model.model_fields:
        validated(experiment.model, {name: text}, experiment.name)  # says which name is close
    kind: Any = experiment.model.model_fields[name].annotation
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise input_error(f"parameter {name}", repr(text), "true or false")
        return text.lower() == "true"
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        raise input_error(f"parameter {name}", repr(text), f"an {kind.__name__}") from None


def twin_seeds(seeds: Sequence[int]) -> dict[int, int]:
    """Seed → that of its twin: the first half of the seeds against the second. A mean of twins has the seed of the first."""
    half = len(seeds) // 2
    return dict(zip(seeds[:half], seeds[half : 2 * half], strict=True))


def read_seeds(text: str) -> list[int]:
    """``"0-4"``, ``"7"`` or ``"1,3,5-7"`` as numbers."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())  # a generator takes 32 bits
        drawn = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not 0 < len(drawn) <= MOST_SEEDS:
            raise input_error("--seeds", repr(text), "numbers and ranges such as 0-4 or 1,3,5-7")
        seeds += drawn
    return seeds
