"""What this book adds to Sphinx: the execution table, the ledger's pages, and buttons that appear with an address."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

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
        text = "\n".join(import_module(f"itm_lab.publish.{self.module}").fragment(root))
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
    app.add_directive("teaching-times", TeachingTimes)
    app.add_directive("kept-tables", KeptTables)
    app.connect("config-inited", set_buttons)
    app.connect("builder-inited", set_source_branch, priority=900)  # after the theme set its branch
    return {"parallel_read_safe": True, "parallel_write_safe": True}
