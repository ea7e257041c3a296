"""The recall questions of the chapters as quizzes: a sheet of questions, and one of answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nbformat import NotebookNode

from itm_lab.notebook_io import find_notebooks, is_chapter, read_notebook
from itm_lab.publish.plain_markdown import Plain, labels_of, read_citations
from itm_utils.errors import input_error
from itm_utils.files import write_text

HEADING = re.compile(r"^## Did it stick\?", re.M)
FOLDED = re.compile(r"^`{3,}\{admonition\} Answers?\n(?::[^\n]*\n)*(?P<answers>.*?)^`{3,}", re.M | re.S)
ITEM = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", re.M | re.S)


def questions_of(notebook: NotebookNode, where: str) -> list[tuple[str, str]]:
    """Question and answer, in the order of the chapter."""
    cell = next((cell for cell in notebook.cells if cell.cell_type == "markdown" and HEADING.search(cell.source)), None)
    if cell is None:
        return []
    folded = FOLDED.search(cell.source)
    if folded is None:
        raise input_error(where, "questions without folded answers", "an admonition titled Answers")
    text = HEADING.split(cell.source[: folded.start()], maxsplit=1)[1]
    asked, answered = ([item.strip() for _, item in ITEM.findall(part)] for part in (text, folded["answers"]))
    if len(asked) != len(answered):
        raise input_error(where, f"{len(asked)} questions and {len(answered)} answers", "as many of both")
    return list(zip(asked, answered, strict=True))


def write_questions(root: Path, folder: Path, names: Iterable[str] = ()) -> list[Path]:
    """Write ``NN_name.md`` with the questions of a chapter and ``NN_name_answers.md`` with both."""
    written, citations = [], read_citations(root / "book/references.bib")
    for path in filter(is_chapter, find_notebooks(root, names)):
        notebook = read_notebook(path)
        found = questions_of(notebook, path.name)
        if not found:
            continue
        plain = Plain(citations, lambda file: Path(file).name, labels_of(notebook))
        title = re.search(r"^# (.+)$", notebook.cells[0].source, re.M)
        head = f"# {title[1] if title else path.stem}: did it stick?\n"
        sheets = {
            f"{path.stem}.md": "".join(f"\n{n}. {plain.text(asked)}\n" for n, (asked, _) in enumerate(found, start=1)),
            f"{path.stem}_answers.md": "".join(
                f"\n{n}. {plain.text(asked)}\n\n   {plain.text(answer)}\n"
                for n, (asked, answer) in enumerate(found, start=1)
            ),
        }
        for name, text in sheets.items():
            write_text(folder / name, head + text)
            written.append(folder / name)
    return written
