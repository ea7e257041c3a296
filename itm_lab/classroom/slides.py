"""Slides of a chapter: reveal.js through nbconvert, one file a chapter and a folder of scripts, no network.

Cells that carry ``slideshow`` metadata are shown as it says. A chapter without any is cut by its structure: a slide
for each section with its first paragraph and what it asks to predict, one below it for each figure.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode, v4

from itm_lab.notebook_io import KERNELSPEC, read_notebook
from itm_lab.publish.plain_markdown import convert, read_citations
from itm_lab.publish.student_copies import GIVEN_AWAY, UNFOLD, Images
from itm_utils.files import write_text

VENDOR = Path("book/_static/vendor")
# nbconvert's own template loads jQuery, require.js, MathJax and mermaid from elsewhere; these blocks load what is here.
TEMPLATE = """\
{%- extends 'reveal/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}
<script>MathJax = {tex: {inlineMath: [["$", "$"]], displayMath: [["$$", "$$"]], processEscapes: true}};</script>
<script defer src="reveal/tex-chtml-full.js"></script>
{%- endblock -%}
{%- block footer_js -%}
<script src="reveal/dist/reveal.js"></script>
<script src="reveal/plugin/notes/notes.js"></script>
<script>Reveal.initialize({hash: true, slideNumber: true, width: 1200, height: 800, plugins: [RevealNotes]});</script>
{%- endblock -%}
"""
FIGURE = ("image/png", "image/jpeg", "image/svg+xml")
PROMPT = re.compile(r"^(`{3,})\{admonition\} Predict.*?^\1", re.M | re.S)


def write_slides(root: Path, chapter: Path, folder: Path) -> Path:
    """Write ``folder/NN_name.html`` and, once, the scripts it needs."""
    from nbconvert.exporters import SlidesExporter

    notebook, images = read_notebook(chapter), Images(root)
    title = next(iter(re.findall(r"^# (.+)$", notebook.cells[0].source, re.M)), chapter.stem)
    cut = v4.new_notebook(cells=list(marked(notebook)), metadata={"title": title, "kernelspec": KERNELSPEC})
    convert(cut, read_citations(root / "book/references.bib"), images)
    exporter = SlidesExporter(
        raw_template=TEMPLATE, reveal_url_prefix="reveal", exclude_input_prompt=True, exclude_output_prompt=True
    )
    html, _ = exporter.from_notebook_node(cut)
    write_text(folder / f"{chapter.stem}.html", html)
    images.write(folder)
    shutil.copytree(root / VENDOR / "reveal", folder / "reveal", dirs_exist_ok=True)
    shutil.copyfile(root / VENDOR / "tex-chtml-full.js", folder / "reveal/tex-chtml-full.js")
    shutil.copytree(root / VENDOR / "output", folder / "reveal/output", dirs_exist_ok=True)  # the fonts of formulas
    return folder / f"{chapter.stem}.html"


def marked(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """The cells of the slides, each with nbconvert's metadata."""
    if any("slideshow" in cell.metadata for cell in notebook.cells):
        yield from (cell for cell in notebook.cells if cell.metadata.get("slideshow", {}).get("slide_type", "-") != "-")
        return
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield from text_slides(cell)
        elif figures := [output for output in cell.get("outputs", []) if set(FIGURE) & set(output.get("data", {}))]:
            alone = v4.new_code_cell("", outputs=figures, id=f"{cell['id'][:50]}-figure")
            alone.metadata = NotebookNode({**cell.metadata, "slideshow": {"slide_type": "subslide"}})
            yield alone


def text_slides(cell: NotebookNode) -> Iterator[NotebookNode]:
    """A slide for the section that a cell begins: its heading and first paragraph, and its questions whole."""
    if re.match(r"(exercise|solution)", cell["id"]):
        return
    source = UNFOLD.sub("", GIVEN_AWAY.sub("", cell.source))
    heading = re.search(r"^#{1,2} .+$", source, re.M)
    parts = [match[0] for match in PROMPT.finditer(source)]
    if heading:
        rest = PROMPT.sub("", source[heading.end() :]).strip()
        whole = heading[0].endswith("stick?")
        parts = [heading[0], rest.split("\n## ")[0] if whole else first_paragraph(rest), *parts]
    if parts:
        slide = v4.new_markdown_cell("\n\n".join(filter(None, parts)), id=f"{cell['id'][:50]}-slide")
        slide.metadata["slideshow"] = {"slide_type": "slide" if heading else "subslide"}
        yield slide


def first_paragraph(text: str) -> str:
    """The first paragraph of running text."""
    return next((part for part in re.split(r"\n\s*\n", text) if re.match(r"[A-Za-z*$]", part)), "")
