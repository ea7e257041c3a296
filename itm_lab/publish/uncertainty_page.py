"""The computed part of the page on intervals: printed gaps beside their intervals, and our runs beside theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.evidence.ledger import OLD_PROTOCOL, Ledger
from itm_lab.evidence.statistics import (
    binomial_halfwidth,
    largest_disagreement,
    paired_bootstrap,
    paired_seeds,
    seed_interval,
)
from itm_lab.evidence.verdicts import row_name
from itm_lab.publish.markdown import table
from itm_lab.records.receipts import is_old_protocol, read_evidence
from itm_lab.records.rules import RECALLS
from itm_utils.metrics.retrieval import Ranks

PAPERS = {"MMCA": "MMCA", "DCPA": "DCPA", "AOQ": "AOQ", "CCR_CCS": "CCR/CCS"}
SIDES = {"i2t_r1": "image to text R@1", "t2i_r1": "text to image R@1"}


@dataclass(frozen=True)
class Gap:
    """A paper's method and what it is compared with, both from the same table."""

    paper: str
    data: str
    images: int
    method: str
    rival: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]

    @property
    def added(self) -> str:
        """What the paper adds to a base model, or its method where there is none."""
        return self.ours.get("training") or self.ours.get("constraints") or self.method

    def points(self, metric: str) -> float:
        return self.ours[metric] - self.theirs[metric]

    def halfwidth(self, metric: str) -> float:
        """Of the method's own printed number; for captions this counts images, which can only make it wider."""
        return binomial_halfwidth(self.ours[metric], self.images)

    def inside(self, metric: str) -> bool:
        return abs(self.points(metric)) <= self.halfwidth(metric)

    def allowed(self, metric: str) -> str:
        """On how many queries the two models may disagree if the gap is to stand out of its paired interval.

        Two recalls of p and q percent disagree on at least |p - q| of the queries, and at most on what both leave.
        """
        one, other = self.ours[metric], self.theirs[metric]
        limit = largest_disagreement(one - other, self.images)
        if limit >= min(one + other, 200 - one - other):
            return "any"
        if limit <= abs(one - other):
            return "none"
        return f"{limit:.1f}\N{NO-BREAK SPACE}%" if limit < 1 else f"{limit:.0f}\N{NO-BREAK SPACE}%"

    @property
    def rsum_bound(self) -> float:
        """The interval of a sum is at most the sum of the six intervals, reached if all six rise and fall together."""
        return sum(self.halfwidth(metric) for metric in RECALLS)


def uncertainty_fragment(root: Path | Ledger) -> str:
    """The generated part of the page, as MyST text."""
    ledger = Ledger(root) if isinstance(root, Path) else root
    return "\n".join([*widths(), *published(ledger), *our_runs(ledger)])


# ---------------------------------------------------------------------------------------------- from tables alone


def widths() -> Iterator[str]:
    """Half-widths of a recall by its size and the number of images."""
    recalls = (50, 75, 90, 95)
    yield "## How wide is it?\n"
    yield "A recall on so many images, taken alone, may move by this many points either way (95 %):\n"
    rows = [[f"{n:,} images", *(f"± {binomial_halfwidth(r, n):.1f}" for r in recalls)] for n in (500, 1000, 5000)]
    yield from table(["test set", *(f"recall {r} %" for r in recalls)], rows)


def published_gaps(results: Mapping[str, Any]) -> Iterator[Gap]:
    """Method against closest competitor in every comparison table of the papers.

    Where a paper adds something to base models, each of them is its own competitor; else it is the row with the highest sum of
    recalls among those that the paper does not set apart for using external knowledge.
    """
    for paper in PAPERS:
        for body in results[paper]["tables"].values():
            for block in body["blocks"] if body["kind"] == "retrieval" else ():
                for ours, theirs in pairs(block["rows"]):
                    single = block["dataset"] == "Flickr30K" or ours.get("single_1k_split")
                    data = (
                        "F30K"
                        if block["dataset"] == "Flickr30K"
                        else f"COCO {'5K' if '5K' in block['protocol'] else '1K'}"
                    )
                    yield Gap(
                        PAPERS[paper], data, 1000 if single else 5000, row_name(ours), row_name(theirs), ours, theirs
                    )


def pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(method, competitor) rows of one table."""
    complete = [row for row in rows if all(row.get(metric) is not None for metric in RECALLS)]
    final = [row for row in complete if row.get("ours") or row.get("constraints") == "CCR+CCS"]
    bases = {
        row["method"]: row
        for row in complete
        if row.get("training") == "online triplet" or row.get("constraints") == "none"
    }
    if bases:
        yield from ((row, bases[row["method"]]) for row in final)
        return
    others = [row for row in complete if not row.get("ours") and not row.get("external_knowledge")]
    yield max(final, key=total), max(others, key=total)


def total(row: Mapping[str, Any]) -> float:
    return sum(row[metric] for metric in RECALLS)


def published(ledger: Ledger) -> Iterator[str]:
    """Which printed gaps lie inside the interval of a single number."""
    gaps = list(published_gaps(ledger.results))
    yield "## Which published gaps lie inside?\n"
    for metric, name in SIDES.items():
        inside = sum(gap.inside(metric) for gap in gaps)
        yield f"- **{name}**: {inside} of {len(gaps)} gaps are smaller than the interval of the number they belong to."
    inside = sum(abs(total(gap.ours) - total(gap.theirs)) <= gap.rsum_bound for gap in gaps)
    yield f"- **rsum**: {inside} of {len(gaps)} are smaller than the widest interval that six recalls allow.\n"
    yield from drawing(gaps)
    for paper in dict.fromkeys(gap.paper for gap in gaps):
        of = [gap for gap in gaps if gap.paper == paper]
        yield f"### {paper}\n"
        yield f"The method: {', '.join(dict.fromkeys(gap.added for gap in of))}.\n"
        rows = [
            [gap.data, gap.theirs["method"], *(cell for metric in SIDES for cell in cells(gap, metric)), rsum_cell(gap)]
            for gap in of
        ]
        heads = ["data", "against", "i2t R@1", "may differ on", "t2i R@1", "may differ on", "rsum"]
        yield from table(heads, rows)


def cells(gap: Gap, metric: str) -> tuple[str, str]:
    """The gap (bold if it lies outside) with the interval of the number, and how often the two models may disagree."""
    return bold(gap.points(metric), gap.halfwidth(metric)), gap.allowed(metric)


def rsum_cell(gap: Gap) -> str:
    return bold(total(gap.ours) - total(gap.theirs), gap.rsum_bound, "at most ±")


def bold(points: float, halfwidth: float, sign: str = "±") -> str:
    shown = signed(points) if abs(points) <= halfwidth else f"**{signed(points)}**"
    return f"{shown} ({sign}\N{NO-BREAK SPACE}{halfwidth:.1f})"


def signed(number: float) -> str:
    return f"{number:+.1f}".replace("-", "−")


def drawing(gaps: list[Gap]) -> Iterator[str]:
    """Every image-to-text gap as a dot over the interval of its number, as an inline image that fits both themes."""
    metric, left, step, width = "i2t_r1", 215, 17, 640
    longest = max(max(abs(gap.points(metric)), gap.halfwidth(metric)) for gap in gaps)
    scale = (width - left - 20) / (longest + 0.5)
    outside = sum(not gap.inside(metric) for gap in gaps)
    alt = (f"{len(gaps)} published gaps in image-to-text R@1, each a dot over a bar as long as the interval of its number; "
           f"{outside} dots lie beyond their bar, the others on it.")  # fmt: skip
    yield "````{raw} html\n<figure>"
    yield f'<svg viewBox="0 0 {width} {step * len(gaps) + 42}" role="img" aria-label="{escape(alt)}" font-size="11">'
    for place, gap in enumerate(sorted(gaps, key=lambda gap: gap.points(metric) / gap.halfwidth(metric))):
        y, x = step * place + 12, left + scale * abs(gap.points(metric))
        name = escape(f"{gap.paper}, {gap.data}: {gap.ours['method']}")
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="currentColor">{name}</text>'
        bar = scale * gap.halfwidth(metric)
        yield f'<rect x="{left}" y="{y - 5}" width="{bar:.1f}" height="10" fill="currentColor" opacity="0.18"/>'
        fill = "none" if gap.inside(metric) else "currentColor"
        yield f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{fill}" stroke="currentColor" stroke-width="1.5"/>'
    base = step * len(gaps) + 16
    for points in range(int(longest + 0.5) + 1):
        x = left + scale * points
        yield f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{base - 6}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{x:.1f}" y="{base + 6}" text-anchor="middle" fill="currentColor">{points}</text>'
    yield f'<text x="{width - 20}" y="{base + 22}" text-anchor="end" fill="currentColor">gap in points</text>'
    yield "</svg>\n<figcaption>Dots: how far apart method and competitor are in image-to-text R@1. Bars: how far the method's "
    yield "number alone may move with other test images. Filled dots lie beyond their bar.</figcaption>\n</figure>\n````\n"


# ---------------------------------------------------------------------------------------------- from receipts


def our_runs(ledger: Ledger) -> Iterator[str]:
    """Both intervals of every variant with several seeds, and of the two best variants of each chapter."""
    yield "## Both intervals, where we have the ranks\n"
    variants = {key: runs for key, runs in ledger.receipts.items() if len(runs) > 1}
    if not variants:
        yield "No variant has receipts of two seeds or more yet. When there are some, this section fills by itself.\n"
        return
    yield (
        "Half-widths of the 95 % interval of rsum. *Over seeds*: of the mean over training runs. *Over images*: of one "
        "run, over test images drawn again, the mean over its seeds.\n"
    )
    rows = []
    for (chapter, variant, dataset), runs in sorted(variants.items()):
        found = [receipt["metrics"]["rsum"] for _, receipt in runs.values()]
        seeds = seed_interval([metric["value"] for metric in found])
        drawn = [(metric["high"] - metric["low"]) / 2 for metric in found if "low" in metric]
        images = f"± {np.mean(drawn):.1f}" if drawn else "not kept"
        shown = variant + f" ({OLD_PROTOCOL})" * of_old_protocol(runs)
        rows.append([chapter, shown, dataset, len(runs), f"{seeds.value:.1f}", f"± {seeds.halfwidth:.1f}", images])
    yield from table(["chapter", "variant", "data", "seeds", "rsum", "over seeds", "over images"], rows)
    yield from differences(variants)


def differences(variants: Mapping[tuple[str, str, str], Mapping[int, tuple[Path, dict]]]) -> Iterator[str]:
    """The two best variants of each chapter: what each interval says of their difference, and how often they disagree.

    Two protocols are never compared: where there are two variants of today's, those of the old one are left out.
    """
    rows = []
    for chapter, dataset in sorted({(chapter, dataset) for chapter, _, dataset in variants}):
        every = {variant: runs for (c, variant, d), runs in variants.items() if (c, d) == (chapter, dataset)}
        new = {variant: runs for variant, runs in every.items() if not of_old_protocol(runs)}
        of = new if len(new) > 1 else {variant: runs for variant, runs in every.items() if variant not in new}
        ranked = sorted(
            of, key=lambda variant: -np.mean([r["metrics"]["rsum"]["value"] for _, r in of[variant].values()])
        )
        for first, second in list(combinations(ranked, 2))[:1]:
            shared = sorted(of[first].keys() & of[second].keys())
            if len(shared) < 2:
                continue
            values = [
                [of[variant][seed][1]["metrics"]["rsum"]["value"] for seed in shared] for variant in (first, second)
            ]
            one, other = (read_evidence(of[variant][shared[0]][0]) for variant in (first, second))
            drawn = paired_bootstrap(Ranks(one.i2t, one.t2i), Ranks(other.i2t, other.t2i), one.owner)
            disagree = 100 * np.mean((one.i2t < 1) != (other.i2t < 1))
            seeds = paired_seeds(values[0], values[1])
            where = dataset + f" ({OLD_PROTOCOL})" * of_old_protocol(of[first])
            rows.append([chapter, where, first, second, interval(seeds), interval(drawn), f"{disagree:.0f} %"])
    if rows:
        yield "The two best variants of each chapter, first minus second in rsum. Images: the models of the first shared seed.\n"
        heads = ["chapter", "data", "first", "second", "over seeds", "over images", "disagree on (i2t R@1)"]
        yield from table(heads, rows)


def of_old_protocol(runs: Mapping[int, tuple[Path, dict]]) -> bool:
    """Whether the runs of a variant are too old to be checked."""
    return any(is_old_protocol(receipt) for _, receipt in runs.values())


def interval(found: tuple[float, float, float]) -> str:
    value, low, high = map(signed, found)
    return f"{value} \\[{low}, {high}\\]"
