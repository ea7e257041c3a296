"""Which lines of a code cell a page folds away. Notebooks stay as they are: papermill, exports and tests see whole cells.

Below a line ``# more`` everything is folded, in the parameters cell and in any other. Without one, four things fold by
themselves: imports, guards (functions that only refuse bad input), helpers of an analysis and the code of a
figure, the last two where they are longer than fifteen lines. Exported classes, loops that explain a kernel, new
modules and cells tagged ``show-input`` stay open.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

MORE = re.compile(r"^# more\b.*$", re.MULTILINE)
EXPORT = re.compile(r"\s*#\s*\|\s*export\b")
LONG = 15  # lines of a helper or of a figure that a reader still sees
FEW_IMPORTS = 3  # lines that need no fold
TEACHING = re.compile(r"_by_loop$|^slow_|^loop_|^equation_|_solution$")  # functions that a reader is meant to read
OPEN = "show-input"  # tag of a cell that stays open
KINDS = {
    "parameters": "All other parameters",
    "more": "More of this cell",
    "imports": "Imports",
    "guard": "Checks of the input",
    "helper": "Helper code",
    "figure": "The code of this figure",
    "hidden": "The code of this cell",  # tagged hide-input
}


@dataclass(frozen=True)
class Part:
    """Lines of a cell. kind: why they are folded, one of ``KINDS``; empty where they are shown."""

    text: str
    kind: str = ""

    @property
    def title(self) -> str:
        """What stands on the fold."""
        lines = len(self.text.splitlines())
        return f"{KINDS[self.kind]} ({lines} line{'s' * (lines > 1)})"


def parts(source: str, tags: Sequence[str] = (), has_figure: bool = False) -> list[Part]:
    """A cell as parts that are shown and parts that are folded, in their order; one part if nothing is folded."""
    if mark := MORE.search(source):
        shown, rest = source[: mark.start()].rstrip("\n"), source[mark.end() :].strip("\n")
        kind = "parameters" if "parameters" in tags else "more"
        return [part for part in (Part(shown), Part(rest, kind)) if part.text]
    if OPEN in tags or "parameters" in tags:
        return [Part(source)]
    try:
        body = ast.parse(re.sub(r"^[%!]", "#", source, flags=re.MULTILINE)).body
    except SyntaxError:
        return [Part(source)]
    exported = bool(EXPORT.match(source))
    if has_figure and not exported and len(source.splitlines()) > LONG:
        return [Part(source, "figure")]
    return list(_cut(source, body, exported))


def visible_lines(source: str, tags: Sequence[str] = (), has_figure: bool = False) -> int:
    """Lines of code that a page shows of a cell before anything is unfolded; empty lines do not count."""
    if {"hide-input", "hide-cell", "remove-input", "remove-cell"} & set(tags):
        return 0
    shown = (part.text for part in parts(source, tags, has_figure) if not part.kind)
    return sum(bool(line.strip()) for text in shown for line in text.splitlines())


def _cut(source: str, body: Sequence[ast.stmt], exported: bool) -> Iterator[Part]:
    """Runs of statements of one kind; short imports and short helpers stay with what surrounds them."""
    lines = source.splitlines()
    runs: list[tuple[str, int, int]] = []  # kind, first line, behind the last
    start = 0
    for kind, group in groupby(body, lambda one: kind_of(one, exported)):
        end = list(group)[-1].end_lineno or 0
        runs.append((kind, start, end))
        start = end
    if not runs:
        yield Part(source)
        return
    runs[-1] = (*runs[-1][:2], len(lines))  # what follows the last statement are comments
    kept = [(kind if is_folded(kind, end - first) else "", first, end) for kind, first, end in runs]
    for kind, group in groupby(kept, lambda run: run[0]):
        held = list(group)
        text = "\n".join(lines[held[0][1] : held[-1][2]]).strip("\n")
        if text:
            yield Part(text, kind)


def is_folded(kind: str, length: int) -> bool:
    """Whether a run of statements is long enough to be in the way."""
    least = {"imports": FEW_IMPORTS, "guard": FEW_IMPORTS, "helper": LONG}
    return kind in least and length > least[kind]


def kind_of(statement: ast.stmt, exported: bool) -> str:
    """What a statement is to a reader: imports, a guard, a helper, or an empty text for the matter itself."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return "imports"
    if is_guard(statement):
        return "guard"
    if exported:
        return ""
    if isinstance(statement, ast.FunctionDef) and not TEACHING.search(statement.name) and not added_to(statement):
        return "helper"
    return ""


def added_to(statement: ast.FunctionDef) -> bool:
    """Whether a function is a method that a cell adds to a class."""
    return any(isinstance(one, ast.Call) and ast.unparse(one.func) == "add_to" for one in statement.decorator_list)


def is_guard(statement: ast.stmt) -> bool:
    """A function that raises and returns nothing, or a condition under which something is raised."""
    inner = list(ast.walk(statement))
    raises = any(isinstance(one, ast.Raise) for one in inner)
    gives = any(isinstance(one, ast.Return | ast.Yield | ast.YieldFrom) and one.value for one in inner)
    if isinstance(statement, ast.If):
        return isinstance(statement.body[-1], ast.Raise) and not statement.orelse
    return isinstance(statement, ast.FunctionDef) and raises and not gives
