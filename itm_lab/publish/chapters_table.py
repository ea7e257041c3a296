"""Tables of chapters with what each asks and how its claims stand, for the pages of the parts and for README."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from itm_lab.evidence.ledger import VERDICTS, Ledger
from itm_lab.notebook_io import NUMBER, read_notebook
from itm_lab.publish.claims_page import chapter_of
from itm_lab.publish.ledger_pages import open_ledger
from itm_lab.publish.markdown import badge, table
from itm_lab.records.nested_yaml import load_yaml
from itm_utils.errors import input_error
from itm_utils.files import read_text

CHAPTERS = "book/data/chapters.yaml"
PARTS = {"1": range(8), "2": range(8, 12), "3": range(12, 100)}  # part → numbers of its chapters


def fragment(root: Path, part: str) -> Iterator[str]:
    """The chapters of a part (1, 2 or 3) as MyST text."""
    if part not in PARTS:
        raise input_error("chapter-table", part, f"one of {', '.join(PARTS)}")
    ledger, rows = open_ledger(root), []
    for chapter, about in chapters(root).items():
        if int(chapter[:2]) in PARTS[part]:
            paper = f"{{cite:t}}`{about['paper']}`" if "paper" in about else "–"
            counted = " ".join(f"{badge(word)} {number}" for word, number in verdicts(ledger, chapter).items())
            rows.append([chapter[:2], f"{{doc}}`/notebooks/{chapter}`", paper, about.get("asks", "–"), counted or "–"])
    if not rows:
        yield "This copy of the book has no chapter of this part.\n"
    else:
        yield from table(["no.", "chapter", "paper", "the question it answers", "its claims"], rows)


def chapters(root: Path) -> dict[str, dict[str, Any]]:
    """Chapter → what is said about it; every numbered notebook, in order."""
    known = load_yaml(read_text(root / CHAPTERS, "the list of chapters"))
    found = {}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if NUMBER.match(path.stem):
            found[path.stem] = known.get(path.stem) or {"name": title(path)}
    return found


def title(path: Path) -> str:
    """The heading of a notebook, up to its colon."""
    source = read_notebook(path).cells[0].source
    heading = re.search(r"^# (.+)$", source, re.MULTILINE)
    return heading[1].partition(":")[0] if heading else path.stem


def verdicts(ledger: Ledger, chapter: str) -> dict[str, int]:
    """Verdict → number of the chapter's claims that have it, in the order of the ledger's words."""
    every = ledger.claims | ledger.foundations
    words = Counter(ledger.verdict(name).verdict for name, one in every.items() if chapter_of(one) == chapter)
    return {word: words[word] for word in VERDICTS if words[word]}
