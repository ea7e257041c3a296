"""The generated blocks of README: the table of chapters with their verdicts, the counts of claims, the findings.

A block stands between two comments, ``<!-- generated: NAME -->`` and ``<!-- end -->``. `itm book front` writes them,
`itm book front --check` and a test say when receipts or benchmarks have moved on. The image at its top is the figure of
attention that chapter 02 holds; `itm book front` takes it anew.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from itm_lab.evidence.ledger import VERDICTS, Ledger
from itm_lab.notebook_io import read_notebook
from itm_lab.publish.chapters_table import chapters, verdicts
from itm_lab.publish.ledger_pages import open_ledger
from itm_lab.publish.markdown import joined, table
from itm_utils.errors import input_error
from itm_utils.files import atomic, read_text, write_text

FILE = "README.md"
FIGURE, SHOWN_IN, IMAGE_FILE = "fig-scan-attention", "notebooks/02_scan.ipynb", "book/img/readme_attention.jpg"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(root: Path) -> str:
    """README as it should be: every block from receipts and results as they are."""
    text, ledger = read_text(root / FILE, "the front page"), open_ledger(root)
    if missing := set(BLOCKS) - {found[2] for found in BLOCK.finditer(text)}:
        raise input_error(
            root / FILE, f"no block {', '.join(sorted(missing))}", "<!-- generated: NAME -->, <!-- end -->"
        )

    def block(found: re.Match[str]) -> str:
        if found[2] not in BLOCKS:
            raise input_error(root / FILE, f"the block {found[2]}", f"one of {', '.join(BLOCKS)}")
        return found[1] + BLOCKS[found[2]](root, ledger).strip() + "\n" + found[3]

    return BLOCK.sub(block, text)


def is_current(root: Path) -> bool:
    """Whether README says what receipts and results say."""
    return refreshed(root) == read_text(root / FILE, "the front page")


def refresh(root: Path) -> bool:
    """Write the blocks and the image; returns whether anything changed."""
    image, known = attention_image(root), root / IMAGE_FILE
    same = known.is_file() and known.read_bytes() == image
    if not same:
        with atomic(known) as path:
            path.write_bytes(image)
    if not (current := is_current(root)):
        write_text(root / FILE, refreshed(root))
    return not (same and current)


def attention_image(root: Path) -> bytes:
    """The stored figure of what words attend to, as JPEG."""
    for cell in read_notebook(root / SHOWN_IN).cells:
        if cell.metadata.get("mystnb", {}).get("figure", {}).get("name") == FIGURE:
            for output in cell.get("outputs", []):
                for kind in ("image/jpeg", "image/png"):
                    if kind in output.get("data", {}):
                        return as_jpeg(base64.b64decode(output.data[kind]))
    raise input_error(root / SHOWN_IN, f"no stored image of {FIGURE}", "the figure that README shows")


def as_jpeg(image: bytes) -> bytes:
    """The image itself if it is a JPEG, else converted."""
    opened = Image.open(io.BytesIO(image))
    if opened.format == "JPEG":
        return image
    written = io.BytesIO()
    opened.convert("RGB").save(written, "JPEG", quality=88, optimize=True)
    return written.getvalue()


def chapter_block(root: Path, ledger: Ledger) -> str:
    """A row for each chapter: what it is about, how its claims stand."""
    rows = []
    for chapter, about in chapters(root).items():
        counted = ", ".join(f"{number} {word}" for word, number in verdicts(ledger, chapter).items())
        link = f"[{about['name']}](notebooks/{chapter}.ipynb)"
        said = f"{chapter[:2]} {link}: {about['about']}" if "about" in about else f"{chapter[:2]} {link}"
        rows.append([said, counted or "–"])
    return "\n".join(table(["chapter", "its claims"], rows))


def claims_block(root: Path, ledger: Ledger) -> str:
    """How all claims stand, in one line."""
    every = ledger.claims | ledger.foundations
    words = Counter(ledger.verdict(name).verdict for name in every)
    told = joined([f"{words[word]} {word}" for word in VERDICTS if words[word]])
    return f"**Verdicts today:** of {len(every)} claims, {told}."


def findings_block(root: Path, ledger: Ledger) -> str:
    """Three findings, each with the data it was found on."""
    audit, probe = (read_result(root, name) for name in ("judgements", "scenes_probe"))
    shares = [first_errors(run) for run in audit["runs"].values()]
    pool, attention = (mean(probe[name]["rsum"]) for name in ("mean pool", "attention"))
    return "\n".join(
        (
            f"- *Photographs (Flickr8k).* Of first errors that people judged, {min(shares):.0f} to {max(shares):.0f} % describe their image "
            f"({len(shares)} models; [how](book/false-negatives.md)).",
            f"- *Synthetic (Scenes).* A caption fits {probe['ambiguity']:.1f} images on average, so a perfect matcher reaches text-to-image "
            f"R@1 {probe['ceiling']['t2i_r1']:.0f} ([why](book/little-world.md)).",
            f"- *Synthetic (Scenes).* Attention reaches rsum {attention:.0f}, mean pooling {pool:.0f}: small probes, "
            f"{len(probe['attention']['rsum'])} seeds.",
        )
    )  # fmt: skip


def first_errors(run: dict[str, Any]) -> float:
    """The share of a model's judged first errors, captions for an image, that the crowd or the experts call right."""
    return run["audit"]["either"]["i2t"]["by_rank"][0]["percent"]


def read_result(root: Path, name: str) -> dict[str, Any]:
    return json.loads(read_text(root / f"benchmarks/results/{name}.json", "a result of the benchmarks"))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


BLOCKS: dict[str, Callable[[Path, Ledger], str]] = {
    "chapters": chapter_block,
    "claims": claims_block,
    "findings": findings_block,
}
