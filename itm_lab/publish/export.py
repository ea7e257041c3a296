"""Copy the chapters' ``#| export`` cells to ``itm_utils/models/``: the notebook stays the one source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from nbformat import NotebookNode

from itm_lab.notebook_io import NUMBER, find_notebooks, is_chapter, read_notebook
from itm_lab.publish.folding import MORE
from itm_utils.errors import ItmError, input_error
from itm_utils.files import write_text

MODELS = Path("itm_utils/models")
MARK = re.compile(r"#\s?\|\s*export[ \t]*(?:\n|$)")
GENERATED = "# Generated from "
LINE_LENGTH = 88  # as in notebooks/ruff.toml: a module reads like its chapter


# Calls that may stand in a constant or a class attribute.
QUIET_CALLS = {"frozenset", "tuple", "dict", "set", "float", "range", "field", "re.compile", "math.sqrt", "math.log"}


@dataclass
class ClassPlace:
    """A class in the module: the cell it stands in, and the names defined in its body."""

    cell: int
    names: set[str]


@dataclass
class Module:
    """What one notebook exports, collected cell by cell."""

    source: str  # the notebook, as named in messages and in the header
    docstring: str = ""
    plain: set[str] = field(default_factory=set)  # import x [as y]
    named: dict[str, set[str]] = field(default_factory=dict)  # from x import ...
    cells: list[list[str]] = field(default_factory=list)  # lines of each cell
    classes: dict[str, ClassPlace] = field(default_factory=dict)  # where later cells may add methods
    names: dict[str, tuple[str, str]] = field(default_factory=dict)  # top-level name -> (cell, its import)

    def add(self, cell: NotebookNode) -> None:
        """Check one exported cell and take it in: imports go to the top, the rest is copied as it stands."""
        where = f"{self.source}, cell {cell.get('id')}"
        code = MARK.sub("", cell.source, count=1)
        try:
            statements = ast.parse(code).body
        except SyntaxError as error:
            raise input_error(where, f"a syntax error ({error.msg})", "plain Python in exported cells") from None
        lines_of_code = code.splitlines()
        moved: set[int] = set()  # numbers of the lines that do not stay in their place
        defined: list[ast.ClassDef] = []
        last_line = 0
        for statement in statements:
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            if lines[0] <= last_line:
                raise input_error(where, f"`{shown(statement)}` behind a semicolon", "one statement a line")
            last_line = lines[-1]
            if isinstance(statement, ast.Import | ast.ImportFrom):
                if not is_teaching(statement):
                    self.add_import(where, statement)
                moved.update(lines)
            elif is_string(statement) and not (self.docstring or self.names):
                self.docstring = "\n".join(lines_of_code[lines[0] - 1 : lines[-1]])
                moved.update(lines)
            elif isinstance(statement, ast.FunctionDef) and (owner := owner_of(statement)):
                start = statement.decorator_list[0].lineno
                self.fold(where, owner, statement, lines_of_code)
                moved.update(range(start, lines[-1] + 1))
            else:
                self.define(defined_name(where, statement), where)
                defined += [statement] if isinstance(statement, ast.ClassDef) else []
        kept = [
            line for number, line in enumerate(lines_of_code, start=1) if number not in moved and not MORE.match(line)
        ]
        if body := "\n".join(kept).strip():
            for statement in defined:
                names = {ast_name for part in statement.body for ast_name in names_in(part)}
                self.classes[statement.name] = ClassPlace(len(self.cells), names)
            self.cells.append([f"# cell {cell.get('id')}", *body.split("\n")])

    def fold(self, where: str, owner: str, method: ast.FunctionDef, lines: list[str]) -> None:
        """Move a method that a later cell adds with ``@add_to(Owner)`` into the class itself."""
        if owner not in self.classes:
            raise input_error(where, f"a method of {owner}", "a class that an earlier exported cell defines")
        place = self.classes[owner]
        if method.name in place.names:
            raise input_error(where, f"a second {owner}.{method.name}", "one definition of each method")
        place.names.add(method.name)
        decorators = [f"    {lines[d.lineno - 1]}" for d in method.decorator_list[1:]]
        body = [f"    {line}" if line else line for line in lines[method.lineno - 1 : method.end_lineno]]
        cell = self.cells[place.cell]
        tree = ast.parse("\n".join(cell))
        end = next(part.end_lineno for part in tree.body if isinstance(part, ast.ClassDef) and part.name == owner)
        cell[end:end] = ["", *decorators, *body]

    def add_import(self, where: str, statement: ast.Import | ast.ImportFrom) -> None:
        """Take an import in once, however many cells repeat it."""
        for alias in statement.names:
            text = ast.unparse(alias)
            bound = alias.asname or alias.name.split(".")[0]
            if isinstance(statement, ast.Import):
                self.plain.add(text)
                self.define(bound, where, f"import {text if alias.asname else bound}")
            elif statement.level or alias.name == "*":
                raise input_error(where, f"`{shown(statement)}`", "an absolute import of named objects")
            else:
                self.named.setdefault(statement.module or "", set()).add(text)
                self.define(bound, where, f"from {statement.module} import {text}")

    def define(self, name: str, where: str, imported: str = "") -> None:
        """Note a top-level name: only the same import may come twice."""
        if name in self.names:
            earlier, meaning = self.names[name]
            if not imported or imported != meaning:
                raise input_error(where, f"a second `{name}`", f"only the one of {earlier}")
        else:
            self.names[name] = (where, imported)

    def render(self) -> str:
        """The module's text."""
        header = f"{GENERATED}{self.source} by `itm export`: edit the notebook, not this file.\n"
        docstring = self.docstring or f'"""What {self.source} exports."""'
        imports = "".join(f"\n{group}" for group in import_groups(self.plain, self.named))
        return f"{header}\n{docstring}\n{imports}" + "".join("\n\n" + "\n".join(cell) + "\n" for cell in self.cells)


def owner_of(statement: ast.FunctionDef) -> str:
    """The class that ``@add_to(Class)`` names, if the function has this decorator; it comes first."""
    match statement.decorator_list:
        case [ast.Call(func=ast.Name(id="add_to"), args=[ast.Name(id=owner)], keywords=[]), *_]:
            return owner
    return ""


def is_teaching(statement: ast.Import | ast.ImportFrom) -> bool:
    """Whether an import is there for the cells alone: the module has whole classes."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "itm_lab.teaching.cells"


def names_in(statement: ast.stmt) -> set[str]:
    """What a statement in the body of a class defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {ast.unparse(target) for target in targets}
        case ast.AnnAssign(target=target):
            return {ast.unparse(target)}
    return set()


def shown(statement: ast.stmt) -> str:
    """The first line of a statement, for messages."""
    return ast.unparse(statement).splitlines()[0]


def is_string(statement: ast.stmt) -> bool:
    """Whether a statement is a bare string, as a docstring is."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_quiet(statement: ast.stmt) -> bool:
    """Whether a definition does nothing but define: no call but of a few harmless constructors."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Pass():
            return True
        case ast.Assign() | ast.AnnAssign():
            calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
            return all(ast.unparse(call.func) in QUIET_CALLS for call in calls)
    return is_string(statement) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def defined_name(where: str, statement: ast.stmt) -> str:
    """The one name a statement defines; everything else would run when the module is imported."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.ClassDef(name=name, body=body) if all(is_quiet(part) for part in body):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            if is_quiet(statement) and (name == "__all__" or re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name)):
                return name
    raise input_error(
        where,
        f"`{shown(statement)}`",
        "only imports, functions, classes and UPPER_CASE constants in exported cells",
        "Move it to a cell without `#| export`.",
    )


def import_groups(plain: set[str], named: dict[str, set[str]]) -> Iterator[str]:
    """Merged imports in the usual order: future, standard library, third party, this package."""
    lines = [(name.split()[0], f"import {name}") for name in plain]
    lines += [(module, import_from(module, sorted(names))) for module, names in named.items()]
    groups: dict[int, list[str]] = {}
    for module, line in sorted(lines, key=lambda item: (item[1].startswith("from"), item)):
        groups.setdefault(import_rank(module.split(".")[0]), []).append(line)
    for rank in sorted(groups):
        yield "\n".join(groups[rank]) + "\n"


def import_rank(package: str) -> int:
    """Which block of imports a package stands in."""
    if package == "__future__":
        return 0
    if package in sys.stdlib_module_names:
        return 1
    return 3 if package == "itm_utils" else 2


def import_from(module: str, names: list[str]) -> str:
    """``from module import names``, over several lines when it is long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def render_all(root: Path) -> dict[Path, str]:
    """Path and text of every module the notebooks give, ``__init__.py`` included."""
    modules: dict[Path, str] = {}
    listing = []
    for path in find_notebooks(root):
        module = Module(f"notebooks/{path.name}")
        exported = [cell for cell in read_notebook(path).cells if cell.cell_type == "code" and MARK.match(cell.source)]
        for cell in exported:
            module.add(cell)
        if not exported:
            continue
        if not is_chapter(path):
            raise input_error(module.source, "an exported cell", "exported cells in numbered chapters only")
        name = NUMBER.sub("", path.stem)
        target = root / MODELS / f"{name}.py"
        if not name.isidentifier() or target in modules:
            raise input_error(module.source, f"the module name {name!r}", "a Python name no other notebook has")
        modules[target] = module.render()
        listing.append(f"* ``{name}`` from ``{module.source}``\n")
    about = "".join(listing) or "No chapter exports anything yet.\n"
    modules[root / MODELS / "__init__.py"] = (
        f"{GENERATED}notebooks/ by `itm export`: edit the notebooks, not this file.\n\n"
        f'"""The models of the book, one module a chapter.\n\n{about}"""\n'
    )
    return modules


def stale_modules(root: Path, wanted: dict[Path, str]) -> dict[Path, str]:
    """Modules that are not what the notebooks say, each with what differs."""
    stale = {path: "no notebook exports it" for path in (root / MODELS).glob("*.py") if path not in wanted}
    for path, text in wanted.items():
        if not path.exists():
            stale[path] = "it is missing"
        elif (found := path.read_text(encoding="utf-8")) != text:
            stale[path] = first_difference(found, text)
    return stale


def first_difference(found: str, wanted: str) -> str:
    """The first line in which two texts differ."""
    pairs = zip_longest(found.splitlines(), wanted.splitlines(), fillvalue="(end of file)")
    for number, (old, new) in enumerate(pairs, start=1):
        if old != new:
            return f"line {number} is {old!r}, the notebook says {new!r}"
    return "it differs in line endings"


def export(root: Path) -> list[Path]:
    """Bring ``itm_utils/models/`` up to date; returns what was written or removed."""
    wanted = render_all(root)
    stale = sorted(stale_modules(root, wanted))
    for path in stale:
        if path in wanted:
            write_text(path, wanted[path])
        elif path.read_text(encoding="utf-8").startswith(GENERATED):
            path.unlink()
        else:
            raise ItmError(f"{path.relative_to(root)}: hand-written, but this folder is generated. Move it.")
    return stale
