"""MyST Markdown as Markdown that any notebook viewer shows well: one converter for all copies of the chapters.

Written by hand: no tool turns MyST's directives and roles into the Markdown of JupyterLab and Colab.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from nbformat import NotebookNode, v4
from pybtex.database import parse_file

# The opening line of a fenced block: fence, directive name if it is one, the rest.
FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,}|:{3,})(?:\{(?P<name>[\w:-]+)\})? *(?P<rest>.*)$")
# Running text: a role, a code span, a formula or a link, whichever begins first.
INLINE = re.compile(
    r"\{(?P<role>[\w:-]+)\}(?P<ticks>`+)(?P<words>.+?)(?P=ticks)"
    r"|(?P<code>`+).+?(?P=code)|\$\$.+?\$\$|\$[^$\n]+\$"
    r"|(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL,
)
DROPPED = {"bibliography", "tableofcontents", "index", "execution-table"}
BARE = {"table", "list-table", "div", "margin", "epigraph", "grid", "card"}
Locate = Callable[[str], str]  # path of a file from the root of the repository → where a copy finds it


def read_citations(bibliography: Path) -> dict[str, str]:
    """Key -> "Faghri et al., 2018", for every entry with an author and a year."""
    if not bibliography.is_file():
        return {}
    citations = {}
    for key, entry in parse_file(bibliography, bib_format="bibtex").entries.items():
        people, year = entry.persons.get("author", []), entry.fields.get("year")
        if people and year:
            family = re.sub(r"[{}\\]", "", " ".join(people[0].last_names))
            citations[key] = f"{family}{' et al.' if len(people) > 1 else ''}, {year}"
    return citations


def convert(notebook: NotebookNode, citations: Mapping[str, str], locate: Locate) -> NotebookNode:
    """Convert every Markdown cell in place; captions of figures, which JupyterLab does not show, follow their cells."""
    plain, cells = Plain(citations, locate, labels_of(notebook)), []
    for cell in notebook.cells:
        figure = cell.metadata.pop("mystnb", {}).get("figure", {})
        if cell.cell_type == "markdown":
            cell.source = plain.text(cell.source)
        cells.append(cell)
        if cell.cell_type == "code" and figure.get("caption"):
            caption = plain.inline(figure["caption"])
            cells.append(v4.new_markdown_cell(f"*Figure: {caption}*", id=f"{cell['id'][:56]}-caption"))
    notebook.cells = [cell for cell in cells if cell.source]  # closing gates leave nothing
    return notebook


def labels_of(notebook: NotebookNode) -> dict[str, str]:
    """Label → the words that name what it stands on, in one notebook."""
    found = {}
    for cell in notebook.cells:
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        if figure.get("name"):
            found[figure["name"]] = "the figure “" + opening_words(figure.get("caption", "")) + "”"
        for kind, title, name in re.findall(r"^[`:]{3,}\{([\w-]+)\} *(.*)\n:(?:name|label): *(\S+)", cell.source, re.M):
            found[name] = f"the {kind}" if kind in ("figure", "table") else title
        for name, title in re.findall(r"^\(([\w:.-]+)\)=\s*\n+#+ *(.+)$", cell.source, re.M):
            found[name] = title
    return found


def opening_words(text: str) -> str:
    return re.split(r"(?<=\w)[.:](?:\s|$)", text, maxsplit=1)[0]


class Plain:
    """Turn MyST Markdown into Markdown that any notebook viewer shows well."""

    def __init__(self, citations: Mapping[str, str], locate: Locate, labels: Mapping[str, str] | None = None) -> None:
        self.citations = citations
        self.locate = locate
        self.labels = labels or {}

    def text(self, source: str) -> str:
        """Convert a whole cell: prose here, fenced blocks one by one."""
        lines, done, prose = source.splitlines(), [], []
        position = 0
        while position < len(lines):
            opening = FENCE.match(lines[position])
            if not opening:
                prose.append(lines[position])
                position += 1
                continue
            end = closing_line(lines, position, opening["fence"])
            block = lines[position + 1 : end]
            done.append(self.inline("\n".join(prose)))
            if opening["name"]:
                done.append(self.directive(opening["name"], opening["rest"].strip(), block))
            else:
                done.append("\n".join(lines[position : end + 1]))
            prose, position = [], end + 1
        done.append(self.inline("\n".join(prose)))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(done)).strip("\n")

    def inline(self, prose: str) -> str:
        """Roles and links in running text; labels and comments go, code and formulas stay."""
        prose = re.sub(r"^\([\w:.-]+\)=\s*$|^%.*$|^\+\+\+.*$", "", prose, flags=re.MULTILINE)
        prose = re.sub(r"(\$\$) *\([\w:.-]+\)\s*$", r"\1", prose, flags=re.MULTILINE)
        return INLINE.sub(self.replace, prose)

    def replace(self, match: re.Match) -> str:
        """What stands for one role or link."""
        if match["role"]:
            return self.role(match["role"], match["words"])
        return self.link(match) if match["target"] else match[0]

    def role(self, name: str, text: str) -> str:
        """The words a role shows."""
        if name == "math":
            return f"${text}$"
        if name.startswith("cite"):
            cited = "; ".join(self.citations.get(key.strip(), key.strip()) for key in text.split(","))
            return re.sub(r", (\d{4})", r" (\1)", cited) if name == "cite:t" else f"({cited})"
        explicit = re.fullmatch(r"(.+?)\s*<[^<>]+>", text, re.DOTALL)
        if explicit:
            return explicit[1]
        if name in {"ref", "numref", "eq"}:
            return self.labels.get(text, text)
        return Path(text).name.replace("_", " ") if name == "doc" else text

    def link(self, match: re.Match) -> str:
        """A link that still leads somewhere when the notebook stands alone."""
        text, target = match["text"], match["target"]
        if re.match(r"\w+:|//", target):
            return match[0]
        if target.startswith("#"):
            return text or target[1:]
        # Chapters stand in notebooks/: ../book/x.png is book/x.png from the root.
        path = target.removeprefix("../") if target.startswith("../") else f"notebooks/{target}"
        return f"{match['image']}[{text or Path(path).stem}]({self.locate(path)})"

    def directive(self, name: str, title: str, block: list[str]) -> str:
        """One directive as plain Markdown; folded ones become ``<details>``."""
        options, body = split_options(block)
        if name in DROPPED or name.endswith("-end"):
            return ""
        if name in {"code", "code-block", "code-cell"}:
            return "\n".join([f"```{title}", *body, "```"])
        if name == "math":
            return "\n".join(["$$", *body, "$$"])
        text = self.text("\n".join(body))
        if name in {"figure", "image"}:
            return self.inline(f"![{options.get('alt', '')}]({title})") + (f"\n\n*{text}*" if text else "")
        if name in BARE:
            return "\n\n".join(part for part in (title and f"**{self.inline(title)}**", text) if part)
        heading = heading_of(name, self.inline(title))
        folded = name in {"dropdown", "toggle"} or "dropdown" in options.get("class", "")
        if folded and not name.endswith("-start"):  # a gated block goes on in other cells
            return f"<details>\n<summary>{heading}</summary>\n\n{text}\n\n</details>\n"
        quoted = f"**{heading}**\n\n{text}".strip().splitlines()
        return "\n".join(f"> {line}".rstrip() for line in quoted) + "\n"


def closing_line(lines: list[str], start: int, fence: str) -> int:
    """Number of the line that closes the fence opened in line ``start``."""
    for number in range(start + 1, len(lines)):
        line = lines[number].strip()
        if len(line) >= len(fence) and set(line) == {fence[0]}:
            return number
    return len(lines)


def split_options(block: list[str]) -> tuple[dict[str, str], list[str]]:
    """A directive's ``:key: value`` lines, and its body."""
    options = {}
    for number, line in enumerate(block):
        found = re.match(r":([\w-]+): *(.*)$", line)
        if not found:
            return options, block[number:]
        options[found[1]] = found[2].strip()
    return options, []


def heading_of(name: str, title: str) -> str:
    """What stands above an admonition: its kind, its title, or both."""
    kind = name.removesuffix("-start").split(":")[-1].replace("-", " ").capitalize()
    if name in {"admonition", "dropdown", "toggle"}:
        return title or "Details"
    if name.startswith("solution"):  # its title is the label of the exercise
        return kind
    return f"{kind}: {title}" if title else kind
