"""What this book adds to Sphinx: generated parts of pages, folds in code cells, and buttons that appear with an address."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

# The one value that says where the book lives. Unset, no button leads into the void.
REPOSITORY_VARIABLE = "BOOK_REPOSITORY_URL"
SOURCE_BRANCH, LAUNCH_BRANCH = "main", "launch"
COLAB = "https://colab.research.google.com"
RECORDS = "book/data/executions"
HEADINGS = ("Chapter", "Last run (UTC)", "Seconds", "Slowest sections", "On")


class ExecutionTable(SphinxDirective):
    """``{execution-table}``: when each chapter last ran, how long, where the time went and on what."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # records change without this page changing
        site = self.env.external_site_map
        pages = [name.removesuffix(".ipynb") for name in site]
        chapters = [page for page in pages if self.env.doc2path(page).endswith(".ipynb")]
        records = {page: self.read_record(page) for page in chapters}
        seconds = sum(record["seconds"] for record in records.values() if record)
        rows = [HEADINGS, *(row(page, record) for page, record in records.items())]
        rows.append(("All chapters", "", f"{seconds:.0f}", "", ""))
        # MyST parses the table, so that headings with formulas and links to chapters come out right.
        text = ["````{list-table} Every chapter's last run", ":header-rows: 1", ":stub-columns: 1", ""]
        for cells in rows:
            text += [f"{'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(cells)]
        parent = nodes.Element()
        self.state.nested_parse(StringList([*text, "````"]), self.content_offset, parent)
        return parent.children

    def read_record(self, page: str) -> dict | None:
        """The record of the run whose outputs the page shows."""
        path = Path(self.env.srcdir, RECORDS, f"{Path(page).name}.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


class LedgerPage(SphinxDirective):
    """``{ledger-page} NAME``: claims with their verdicts, or tables of results, from the receipts as they are now."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from itm_lab.publish.ledger_pages import figures, open_ledger, page

        self.env.note_reread()  # receipts change without this page changing
        folders = (Path(self.env.srcdir), *Path(self.env.srcdir).parents)
        root = next(folder for folder in folders if (folder / "pyproject.toml").is_file())
        ledger, images = open_ledger(root), Path(self.env.srcdir, "book/img")
        images.mkdir(parents=True, exist_ok=True)
        for name, drawn in figures(ledger, self.arguments[0]).items():
            (images / name).write_text(drawn, encoding="utf-8")
        parent = nodes.Element()
        text = StringList(page(ledger, self.arguments[0]).splitlines())
        self.state.nested_parse(text, self.content_offset, parent, match_titles=True)
        return parent.children


class Architecture(SphinxDirective):
    """``{architecture}``: the packages as a drawing and as tables, from the import graph as it is now."""

    def run(self) -> list[nodes.Node]:
        from itm_lab.publish.architecture import drawing, fragment, rooms

        self.env.note_reread()
        folders = (Path(self.env.srcdir), *Path(self.env.srcdir).parents)
        found = rooms(next(folder for folder in folders if (folder / "pyproject.toml").is_file()))
        image = Path(self.env.srcdir, "book/img/architecture.svg")
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_text(drawing(found), encoding="utf-8")
        alt = (
            "Every module of itm_lab and of itm_utils in the order of their layers, with its lines and what it imports."
        )
        # a heading first: Sphinx would put what stands before one to the end
        text = [
            "## Layers",
            "",
            "```{figure} /book/img/architecture.svg",
            f":alt: {alt}",
            "",
            CAPTION,
            "```",
            "",
            *fragment(found),
        ]
        parent = nodes.Element()
        self.state.nested_parse(
            StringList("\n".join(text).splitlines()), self.content_offset, parent, match_titles=True
        )
        return parent.children


class MadeTables(SphinxDirective):
    """What a module of ``itm_lab.publish`` writes about a checkout, as part of a page."""

    module: str

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        folders = (Path(self.env.srcdir), *Path(self.env.srcdir).parents)
        root = next(folder for folder in folders if (folder / "pyproject.toml").is_file())
        text = "\n".join(import_module(f"itm_lab.publish.{self.module}").fragment(root, *self.arguments))
        parent = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines()), self.content_offset, parent, match_titles=True)
        return parent.children


class TrustTables(MadeTables):
    """``{trust-tables}``: what became of faults and damaged inputs, as the last campaign counted them, and attacks."""

    module = "trust_page"


class PhotoRegions(MadeTables):
    """``{photo-regions}``: which regions of photographs were measured, and what those of the dataset cover."""

    module = "regions_page"


class BenchmarkTables(MadeTables):
    """``{benchmark-tables}``: every committed ratio with its target, growth curves and host synchronisations."""

    module = "benchmarks_page"


class RequirementsTables(MadeTables):
    """``{requirements-tables}``: what every table of the papers needs, takes and leaves on disk."""

    module = "requirements_page"


class Companion(MadeTables):
    """``{companion} CHAPTER``: readings, parity, searches, comparisons, parameters and costs of a chapter."""

    module = "companion_page"
    required_arguments = 1


class StatusTables(MadeTables):
    """``{status-tables}``: what is correct, fast, shown by runs and not run, and every capability."""

    module = "status_page"


class ChapterTable(MadeTables):
    """``{chapter-table} PART``: the chapters of a part, what each asks and how its claims stand."""

    module = "chapters_table"
    required_arguments = 1


class FoldedCode(nodes.Element):
    """Code of a cell behind a line that says what it is."""


def open_fold(self: HTML5Translator, node: FoldedCode) -> None:
    self.body.append(f'<details class="code-fold"><summary>{self.encode(node["title"])}</summary>\n')


def close_fold(self: HTML5Translator, node: FoldedCode) -> None:
    self.body.append("</details>\n")


class FoldCells(SphinxTransform):
    """Fold what a page need not show of its code cells; ``itm_lab.publish.folding`` says which lines."""

    default_priority = 900  # after MyST-NB has made the cells

    def apply(self, **kwargs: object) -> None:
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") == "cell_code" and cell.get("hide_mode") in (None, "input"):
                self.fold(cell)

    def fold(self, cell: nodes.container) -> None:
        from itm_lab.publish.folding import Part, parts

        if not cell.children or cell.children[0].get("nb_element") != "cell_code_source":
            return
        source, output = cell.children[0], cell.children[1:]
        (code,) = source.findall(nodes.literal_block)
        figure = any(
            str(one.get("mime_type")).startswith("image/") for part in output for one in part.findall(nodes.container)
        )
        text, tags = code.astext(), cell.get("cell_metadata", {}).get("tags", [])
        hidden = cell.attributes.pop("hide_mode", None)
        found = [Part(text, "hidden")] if hidden else parts(text, tags, figure)
        cell.children = [self.shown(source, code, part) for part in found] + output

    def shown(self, source: nodes.container, code: nodes.literal_block, part: Any) -> nodes.Element:
        """One part as a block of code, behind a fold if it is folded."""
        block = source.copy()
        block += nodes.literal_block(part.text, part.text, **code.attributes)
        return FoldedCode("", block, title=part.title) if part.kind else block


class TeachingTimes(MadeTables):
    """``{teaching-times}``: how long every chapter takes to read and to practise."""

    module = "teaching_page"


class KeptTables(MadeTables):
    """``{kept-tables}``: every kept model with its seed, its rsum and its size."""

    module = "kept_page"


CAPTION = "The layers, top first: a module imports only what stands below it. The numbers are lines."


def row(page: str, record: dict | None) -> tuple[str, ...]:
    """One line of the table, as MyST text."""
    title = f"{{doc}}`/{page}`"
    if record is None:
        return title, "no record", "", "", ""
    sections: dict[str, float] = defaultdict(float)
    for cell in record["cells"]:
        sections[cell["section"]] += cell["seconds"]
    slowest = sorted(sections, key=sections.__getitem__, reverse=True)[:3]
    return (
        title,
        record["finished"][:10],
        f"{record['seconds']:.1f}",
        "; ".join(f"{section} ({sections[section]:.1f})" for section in slowest),
        f"{record['cpu_count']} cores, {record['machine']}, Python {record['python']}, torch {record['torch']}",
    )


def set_buttons(app: Sphinx, config: Config) -> None:
    """Show the repository, issue, edit and launch buttons if there is a repository, else none of them."""
    url = os.environ.get(REPOSITORY_VARIABLE, "").rstrip("/")
    buttons = ("use_repository_button", "use_issues_button", "use_edit_page_button")
    config.html_theme_options |= dict.fromkeys(buttons, bool(url))
    config.html_theme_options |= {
        "repository_url": url,
        "repository_branch": LAUNCH_BRANCH,
        "launch_buttons": {"colab_url": COLAB} if "github" in url else {},
    }


def set_source_branch(app: Sphinx) -> None:
    """The theme knows one branch for launching and editing alike; edits belong to the sources."""
    for key in list(app.config.html_context):
        if key.endswith("_version"):
            app.config.html_context[key] = SOURCE_BRANCH


def silence_thebe(app: Sphinx) -> None:
    """Jupyter Book always loads sphinx-thebe, which declares its constants twice on each page; nothing here uses it."""
    for listeners in app.events.listeners.values():
        for listener in list(listeners):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)
    app.registry.css_files = [file for file in app.registry.css_files if file[0] != "sphinx-thebe.css"]


ICON = re.compile(r"fa-[a-z0-9-]+")
ICON_RULE = re.compile(
    r'(?:\.fa-[\w-]+:before,?)+\{content:"[^"]*"\}'
)  # of the theme's style sheet, one for each of 1,900 icons


SEARCH = re.compile(r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js[^"]*"></script>')


def without_unused_formulas(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Load no MathJax (1.3 MB) on a page without formulas: Sphinx does where any page below it has some."""
    if 'class="math' not in str(context.get("body", "")):
        context["script_files"] = [
            one for one in context.get("script_files", []) if "tex-chtml" not in str(one.filename)
        ]


def slim(app: Sphinx, exception: Exception | None) -> None:
    """Drop what the theme loads and no page uses: icons as JavaScript (1.5 MB), unused icons, the index of the search.

    The style sheet has the icons as a font. The index (0.4 MB) is for results while one types, which are off; the page
    of search results loads it itself.
    """
    script = Path(app.outdir, "_static/scripts/fontawesome.js")
    if exception is not None or not script.is_file():
        return
    script.write_text("// Icons come from the font of the style sheet.\n", encoding="utf-8")
    used: set[str] = set()
    for path in (path for kind in ("*.html", "*.js") for path in Path(app.outdir).rglob(kind)):
        text = path.read_text(encoding="utf-8")
        used.update(ICON.findall(text))
        if path.suffix == ".html" and path.stem != "search" and SEARCH.search(text):
            path.write_text(SEARCH.sub("", text), encoding="utf-8")
    style = Path(app.outdir, "_static/styles/pydata-sphinx-theme.css")
    rules = style.read_text(encoding="utf-8")
    kept = ICON_RULE.sub(lambda rule: rule[0] if used & set(ICON.findall(rule[0])) else "", rules)
    style.write_text(kept, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register everything with Sphinx."""
    silence_thebe(app)
    app.add_directive("execution-table", ExecutionTable)
    app.add_directive("ledger-page", LedgerPage)
    app.add_directive("photo-regions", PhotoRegions)
    app.add_directive("architecture", Architecture)
    app.add_directive("trust-tables", TrustTables)
    app.add_directive("benchmark-tables", BenchmarkTables)
    app.add_directive("requirements-tables", RequirementsTables)
    app.add_directive("companion", Companion)
    app.add_directive("status-tables", StatusTables)
    app.add_directive("chapter-table", ChapterTable)
    app.add_node(FoldedCode, html=(open_fold, close_fold))
    app.add_transform(FoldCells)
    app.add_directive("teaching-times", TeachingTimes)
    app.add_directive("kept-tables", KeptTables)
    app.connect("config-inited", set_buttons)
    app.connect("html-page-context", without_unused_formulas, priority=900)
    app.connect("build-finished", slim)
    app.connect("builder-inited", set_source_branch, priority=900)  # after the theme set its branch
    return {"parallel_read_safe": True, "parallel_write_safe": True}
