"""The rules every committed notebook keeps, one line a finding."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from itm_lab.notebook_io import CELL_METADATA, KERNELSPEC, clean, read_notebook, tags, write_notebook

MAX_BYTES = 2_000_000
MIN_CHECKED = 8  # cells whose stored output nbval compares
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users|mnt|opt|var|private)/|\b[A-Z]:\\")
FIX = "run `itm notebooks lint --fix`"
RERUN = "run `itm notebooks run --in-place`"


def lint_file(path: Path, fix: bool = False) -> list[str]:
    """Findings in one notebook; with ``fix``, what is mechanical is repaired first."""
    notebook = read_notebook(path)
    if fix:
        before = nbformat.v4.writes(notebook)
        if nbformat.v4.writes(clean(notebook)) != before:
            write_notebook(path, notebook)
    findings = [f"{path.name}: {text}" for text in check_notebook(notebook, path.stat().st_size)]
    for number, cell in enumerate(notebook.cells, start=1):
        where = f"{path.name}: cell {number} ({cell.get('id', 'no id')})"
        findings += [f"{where}: {text}" for text in check_cell(cell)]
    return findings


def check_notebook(notebook: NotebookNode, size: int) -> Iterator[str]:
    """What concerns the notebook as a whole."""
    if size > MAX_BYTES:
        yield f"{size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB: save smaller figures"
    if notebook.get("nbformat_minor", 0) < 5:
        yield f"format 4.{notebook.get('nbformat_minor', 0)}, not 4.5: {FIX}"
    elif (error := schema_error(notebook)) is not None:
        yield f"not a valid notebook ({error}): save it again from JupyterLab"
    if notebook.metadata != {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}:
        yield f"stray or missing notebook metadata: {FIX}"
    ids = Counter(cell["id"] for cell in notebook.cells if "id" in cell)
    for repeated in (name for name, count in ids.items() if count > 1):
        yield f"the id {repeated} stands on several cells: {FIX}"
    first = notebook.cells[0] if notebook.cells else NotebookNode(cell_type="none", source="")
    if first.cell_type != "markdown" or not re.search(r"^# \S", first.source, re.MULTILINE):
        yield "the first cell is not Markdown with a level-1 heading: start with `# Title`"
    tagged = sum("parameters" in tags(cell) for cell in notebook.cells)
    if tagged != 1:
        yield f"{tagged} cells tagged `parameters`, expected exactly one: tag the cell papermill may override"
    checked = sum(is_checked(cell) for cell in notebook.cells)
    if checked < MIN_CHECKED:
        yield (
            f"{checked} cells checked by nbval, at least {MIN_CHECKED} expected: "
            "add `# NBVAL_CHECK_OUTPUT` to cells that print rounded toy values"
        )


def schema_error(notebook: NotebookNode) -> str | None:
    """What the official notebook schema objects to first; missing ids have a finding of their own."""
    if any("id" not in cell for cell in notebook.cells):
        return None
    error = next(nbformat.validator.iter_validate(notebook), None)
    return str(error).splitlines()[0] if error else None


def is_checked(cell: NotebookNode) -> bool:
    """Whether nbval compares this cell's stored output in lax mode."""
    marked = re.search(r"^\s*#+\s*NBVAL_CHECK_OUTPUT\s*$", cell.source, re.MULTILINE)
    return cell.cell_type == "code" and (bool(marked) or "nbval-check-output" in tags(cell))


def check_cell(cell: NotebookNode) -> Iterator[str]:
    """What concerns one cell."""
    if not cell.get("id"):
        yield f"no cell id: {FIX}"
    if stray := sorted(set(cell.metadata) - CELL_METADATA):
        yield f"stray metadata {', '.join(stray)}: {FIX}"
    if "injected-parameters" in tags(cell):
        yield "a cell injected by papermill: delete it"
    if "raises-exception" in tags(cell):
        yield "tagged `raises-exception`, which papermill cannot run: catch the error and print it"
    if cell.cell_type == "markdown":
        yield from check_images(cell.source)
    elif cell.cell_type == "code":
        yield from check_outputs(cell)
        if "parameters" in tags(cell):
            yield from check_parameters(cell.source)


def check_alt(alt: str) -> Iterator[str]:
    """Alt text is there and says what is shown instead of that it is an image."""
    if not alt.strip():
        yield "an image without alt text: say what it shows"
    elif alt.strip().lower().startswith("image of"):
        yield 'alt text starts with "image of": say what it shows'


def check_images(source: str) -> Iterator[str]:
    """Every image in Markdown has alt text, whichever way it is written."""
    for alt in re.findall(r"!\[([^\]]*)\]\(", source):
        yield from check_alt(alt)
    for tag in re.findall(r"<img\b[^>]*>", source):
        found = re.search(r"""\balt=(["'])(.*?)\1""", tag)
        yield from check_alt(found[2] if found else "")
    for _, body in re.findall(r"^(`{3,}|:{3,})\{(?:figure|image)\}(.*?)^\1", source, re.DOTALL | re.MULTILINE):
        found = re.search(r"^:?alt:(.*)$", body, re.MULTILINE)
        yield from check_alt(found[1] if found else "")


def check_outputs(cell: NotebookNode) -> Iterator[str]:
    """Outputs that are stored: no counts, errors, warnings or paths of a machine, and figures that explain themselves."""
    outputs = cell.get("outputs", [])
    if cell.get("execution_count") or any(output.get("execution_count") for output in outputs):
        yield f"an execution count: {FIX}"
    for output in outputs:
        if output.output_type == "error":
            yield f"a stored error ({output.get('ename')}): mend the cell and {RERUN}"
        elif output.get("name") == "stderr":
            yield f"stored stderr ({output.text.strip()[:60]!r}): remove its cause and {RERUN}"
        if found := MACHINE_PATH.search(text_of(output)):
            yield f"a path of one machine in the output ({found[0]}…): print a relative one and {RERUN}"
    if any(kind.startswith("image/") for output in outputs for kind in output.get("data", {})):
        shown = cell.metadata.get("mystnb", {})
        if not str(shown.get("figure", {}).get("caption", "")).strip():
            yield "a figure without a caption: set metadata mystnb.figure.caption"
        for text in check_alt(str(shown.get("image", {}).get("alt", ""))):
            yield f"{text} (metadata mystnb.image.alt)"


def text_of(output: NotebookNode) -> str:
    """All an output says in words; images are left out."""
    data = output.get("data", {})
    words = [str(value) for kind, value in data.items() if not kind.startswith("image/")]
    return "\n".join([output.get("text", ""), *words, *output.get("traceback", [])])


def check_parameters(source: str) -> Iterator[str]:
    """Parameters are typed literals with a comment each: papermill shows all three to the reader."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"parameters are not Python (line {error.lineno})"
        return
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for statement in tree.body:
        line = ast.unparse(statement).splitlines()[0]
        if not is_typed_literal(statement):
            yield f"parameter `{line}` is not a typed literal: write `name: type = value  # meaning`"
        elif statement.end_lineno not in comments:
            yield f"parameter `{line}` has no comment: write `{line}  # meaning`"


def is_typed_literal(statement: ast.stmt) -> bool:
    """Whether a statement reads ``name: type = literal``."""
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        return False
    try:
        ast.literal_eval(statement.value or "")
    except (ValueError, TypeError, SyntaxError):
        return False
    return True
