"""The architecture page: the packages drawn from the import graph, and how many lines each has."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

from itm_lab.publish.markdown import table

# What each room is for; the order is that of the layers, from the top.
LAB = {
    "cli": "the `itm` command, one function per command",
    "doctor": "whether a machine, its data and its GPU are ready",
    "publish": "export, notebook rules, copies for classes and GPUs, generated pages, the book",
    "evidence": "statistics, verdicts, the ledger, tables from receipts",
    "experiments": "experiment files, the runner, ensembles, the cost estimate",
    "records": "receipts, ranks, digests of rules, starting and saving a run of a chapter",
    "parity": "reference cases, adapters for published checkpoints",
    "photos": "features of your own photographs, search",
    "finished_run": "the model and the captions of a finished run",
    "data": "check, fetch, convert and open datasets",
    "scenes": "the synthetic dataset",
    "teaching": "figures in one style, the toy tensor, classes written method by method",
    "notebook_io": "notebooks as files",
    "paths": "where things lie in a checkout",
}
LIBRARY = {
    "models": "generated from the chapters",
    "mining": "offline hard negatives over a whole training set",
    "metrics": "recall and ranks, several positives, attention precision, recall and F1",
    "training": "the loop, schedules, stages, checkpoints",
    "scoring": "all pairs within a memory budget",
    "distributed": "several processes as one: shares of a batch, gathered with gradients",
    "data": "precomputed features, captions, text encoders, phrases with boxes, batches",
    "matcher": "the types that models, objectives and metrics share",
    "digests": "what files hold, remembered",
    "cache": "folders that are made once",
    "boxes": "overlap of boxes",
    "files": "files in and out",
    "progress": "one progress bar",
    "validation": "typed settings, checked with one clear error",
    "errors": "one exception for bad input",
}
ROOMS = {"itm_lab": LAB, "itm_utils": LIBRARY}
INIT = "__init__"  # of a package itself
TARGET = 3_000  # hand-written lines of itm_utils, as the design of the book has it
KINDS = ("code", "docstring", "comment", "blank")
WIDTH, ROW, GAP = 760, 30, 6  # pixels of the drawing


@dataclass(frozen=True)
class Room:
    """A module or sub-package: its lines by kind, its files and the rooms it imports."""

    name: str
    kinds: Counter[str]
    files: int
    imports: tuple[str, ...]

    @property
    def lines(self) -> int:
        """All lines, as ``wc -l`` counts them."""
        return self.kinds.total()


def rooms(root: Path) -> list[Room]:
    """Every room of both packages, top layer first."""
    graph = grimp.build_graph("itm_lab", "itm_utils")
    found = []
    for package, names in ROOMS.items():
        for name in (*names, INIT):
            module = f"{package}.{name}"
            paths = _files(root, module)
            kinds = sum((line_kinds(path.read_text(encoding="utf-8")) for path in paths), Counter())
            found.append(Room(module, kinds, len(paths), _imports(graph, module) if name != INIT else ()))
    return found


def line_kinds(source: str) -> Counter[str]:
    """How many lines of a module are code, docstring, comment or blank; together they are all of its lines."""
    lines = source.split("\n")[:-1]
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            kinds[token.start[0] - 1] = "comment"
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            text = node.body[0]
            for number in range(text.lineno - 1, text.end_lineno or text.lineno):
                kinds[number] = "docstring"
    return Counter(kinds)


def unlisted(root: Path) -> set[str]:
    """Rooms that this page does not know yet."""
    there = {
        f"{package}.{path.stem}"
        for package in ROOMS
        for path in (root / package).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    known = {f"{package}.{name}" for package, names in ROOMS.items() for name in names}
    return there - known - {f"{package}.__init__" for package in ROOMS}


def _files(root: Path, module: str) -> list[Path]:
    place = root / module.replace(".", "/")
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def _imports(graph: grimp.ImportGraph, module: str) -> tuple[str, ...]:
    """The other rooms that a room imports directly."""
    own = {module, *graph.find_descendants(module)}
    imported = {target for one in own for target in graph.find_modules_directly_imported_by(one)} - own
    return tuple(sorted({".".join(target.split(".")[:2]) for target in imported if "." in target}))


def drawing(found: list[Room]) -> str:
    """An SVG of the layers: one row per room, its lines as a bar, and what it imports of its own package."""
    rows = []
    for package in ROOMS:
        rows.append((package, None))
        own_rooms = (room for room in found if room.name.startswith(f"{package}."))
        rows += [(room.name, room) for room in own_rooms if not room.name.endswith(INIT)]
    height = len(rows) * (ROW + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">'
    ]
    for number, (name, room) in enumerate(rows):
        y = 10 + number * (ROW + GAP)
        if room is None:
            parts.append(f'<text x="10" y="{y + 20}" font-weight="bold" fill="#4a5568">{name}</text>')
            continue
        package, _, short = name.partition(".")
        colour = "#cfe3f1" if package == "itm_lab" else "#d8ecd9"
        own = [one.partition(".")[2] for one in room.imports if one.startswith(package)]
        into = [
            f"itm_utils.{one.partition('.')[2]}" for one in room.imports if package == "itm_lab" and "itm_utils" in one
        ]
        parts.append(f'<rect x="20" y="{y}" width="150" height="{ROW}" rx="4" fill="{colour}" stroke="#718096"/>')
        parts.append(f'<text x="30" y="{y + 20}" fill="#22303c">{short}</text>')
        parts.append(f'<text x="160" y="{y + 20}" fill="#4a5568" text-anchor="end">{room.lines:,}</text>')
        shown = "→ " + ", ".join(own) if own else ""
        shown += f" · {len(into)} of itm_utils" if into else ""
        parts.append(f'<text x="184" y="{y + 20}" fill="#4a5568">{shown.strip(" ·")}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def fragment(found: list[Room]) -> Iterator[str]:
    """Tables of both packages as MyST text, with their totals and the target of the library."""
    for package, names in ROOMS.items():
        of = [room for room in found if room.name.startswith(f"{package}.")]
        by_hand = sum((room.kinds for room in of if room.name != "itm_utils.models"), Counter())
        yield f"## {package}\n"
        yield f"{_totals(by_hand)}\n"
        if package == "itm_utils":
            yield f"{against_target(by_hand)}\n"
        concerns = names | {INIT: "the package itself: its version or what it is"}
        rows = [
            [f"`{short}`", concerns[short], room.files, *(f"{room.kinds[kind]:,}" for kind in KINDS), f"{room.lines:,}"]
            for room in of
            for short in [room.name.partition(".")[2]]
        ]
        yield from table(["module", "concern", "files", *KINDS, "lines"], rows)


def _totals(kinds: Counter[str]) -> str:
    parts = ", ".join(f"{kinds[kind]:,} {kind}" for kind in KINDS)
    return f"{kinds.total():,} hand-written lines, every `__init__.py` included: {parts}."


def against_target(kinds: Counter[str]) -> str:
    """Whether the library is as thin as it should be, by how much, and what the lines are."""
    over = kinds.total() - TARGET
    if over <= 0:
        return f"The target is {TARGET:,} lines at most, all kinds together; it is met by {-over:,}."
    return (
        f"The target is {TARGET:,} lines at most, all kinds together; it is missed by {over:,}. Code alone is {kinds['code']:,} lines: "
        "docstrings, of which the API reference is made, comments and blank lines are the rest. Beside what a chapter calls the library "
        "holds what a run of days needs: a training and a mining that resume where they were, and damaged files refused in one line."
    )
