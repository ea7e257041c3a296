"""The computed part of the page on false negatives, from the audit that ``benchmarks/judgements.py`` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from itm_lab.publish.markdown import table

RESULT = "benchmarks/results/judgements.json"
COMMAND = "python -m benchmarks.judgements --data data/flickr8k --scores LABEL=runs/…/scores.safetensors"
MEANING = {
    "crowd": "crowd: more *yes* than *no*",
    "expert": "experts: at least two of three give 3 or 4",
    "expert strict": "experts, strict: at least two of three give 4",
    "either": "the crowd or the experts",
}
WAYS = {"i2t": "image → caption", "t2i": "caption → image"}


def judgements_fragment(root: Path) -> str:
    """The generated part of the page, as MyST text; where there is no audit yet, how to make one."""
    path = Path(root) / RESULT
    if not path.is_file():
        return f"There is no audit yet. With the data and the scores of a run, `{COMMAND}` makes one.\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    parts = (
        of_pairs(found),
        of_errors(found["runs"]),
        of_recalls(found["runs"]),
        of_ranks(found["runs"]),
        check(found),
    )
    return "\n".join(line for part in parts for line in part)


def of_pairs(found: Mapping[str, Any]) -> Iterator[str]:
    """How many of the judged negative pairs are right, by each definition."""
    pairs = found["pairs"]
    yield "## Of the pairs that count as wrong\n"
    rows = [
        [MEANING[name], f"{one['of']}", f"{one['right']}", percent(one)] for name, one in pairs["by_definition"].items()
    ]
    yield from table(["right means", "negative pairs judged", "called right", "share"], rows)
    share = 100 * pairs["by_definition"]["either"]["of"] / pairs["wrong"]
    both = pairs["agreement"]
    yield (
        f"The {found['judged_captions']:,} captions that anybody judged have {pairs['wrong']:,} negative images, of which "
        f"{share:.1f} % were judged. "
        f"The two groups judged {sum(both.values()):,} in common: {both['both']:,} are right to both, {both['neither']:,} "
        f"to neither, {both['expert']:,} to the experts alone and {both['crowd']:,} to the crowd alone.\n"
    )
    own = {name: f"{one['right']:,} of {one['of']:,}" for name, one in pairs["own"].items()}
    yield (
        "Can the judges be trusted? They also saw pairs that do belong together. Of these the crowd calls "
        f"{own['crowd']} right, the experts {own['expert']}, or {own['expert strict']} by the strict definition.\n"
    )


def of_errors(runs: Mapping[str, Any]) -> Iterator[str]:
    """What was blamed on each run: wrong results at the top, and how many of those that were judged are right."""
    yield "## Of the errors of a model\n"
    yield (
        "Results among the first one or five that were not written for the query, and of those that were judged, the "
        "share that is right: to the crowd or the experts' majority (*either*), or to the crowd, of those that the crowd "
        "judged. One run of each model is audited, so its recalls differ a little from means over seeds.\n"
    )

    def cells(run: Mapping[str, Any], way: str) -> Iterator[list[Any]]:
        for k in ("1", "5"):
            crowd, either = (run["audit"][name][way]["errors"][k] for name in ("crowd", "either"))
            yield [k, either["errors"], either["of"], percent(either), percent(crowd)]

    heads = ["first", "wrong by the split", "of these judged by anyone", "right (either)", "right (crowd)"]
    yield from by_search(runs, heads, cells)


def of_recalls(runs: Mapping[str, Any]) -> Iterator[str]:
    """R@1 by the split, and between which bounds it lies once judged-right results count."""
    yield "## Recall, corrected\n"
    yield (
        "*At least* counts a first result as right if it was judged right, *at most* also if nobody judged it; by either "
        "group, or (*strict*) only where two experts gave the best grade.\n"
    )

    def cells(run: Mapping[str, Any], way: str) -> Iterator[list[Any]]:
        strict, either = (run["audit"][name][way]["recall"]["1"] for name in ("expert strict", "either"))
        split, *bounds = (percent(either[name]) for name in ("split", "at_least", "at_most"))
        yield [f"{run['recalls'][f'{way}_r1']:.1f}", split, f"{strict['at_least']['percent']:.1f}", *bounds]

    heads = ["R@1, five captions", "R@1, judged captions", "at least (strict)", "at least", "at most"]
    yield from by_search(runs, heads, cells)


def by_search(
    runs: Mapping[str, Any], heads: list[str], cells: Callable[[Mapping[str, Any], str], Iterable[list[Any]]]
) -> Iterator[str]:
    """A table with the rows that ``cells`` gives for each run and direction of search."""
    rows = [
        [label, words, *row] for label, run in runs.items() for way, words in WAYS.items() for row in cells(run, way)
    ]
    yield from table(["model", "search", *heads], rows)


def of_ranks(runs: Mapping[str, Any]) -> Iterator[str]:
    """The harder a negative pair is for a model, the likelier it is right: the figure and its numbers."""
    yield "## The harder, the truer\n"
    yield "All negative pairs of a query, ordered by the model's score: the first is the one that a miner would take.\n"
    bands = {(label, way): run["audit"]["either"][way]["by_rank"] for label, run in runs.items() for way in WAYS}
    yield from drawing({label: bands[label, "t2i"] for label in runs})
    rows = [
        [label, WAYS[way], ranks(band), band["of"], percent(band)] for (label, way), of in bands.items() for band in of
    ]
    yield from table(["model", "search", "rank among negative pairs", "judged", "right (either)"], rows)


def check(found: Mapping[str, Any]) -> Iterator[str]:
    """Whether caption numbers mean here what they mean in the files of judgements."""
    yield "## Is the third caption the third?\n"
    yield (
        "A check of our own bookkeeping. Captions are lines in our files and numbers in the judges' files; if line and number "
        "did not match, everything above would be noise. So the crowd's judgements are laid on the captions with each number "
        "in turn, and the table gives the chance, in percent, that a pair called right scores above a pair called wrong. The "
        "judged number, #2, should win.\n"
    )
    rows = [
        [label, *(f"{100 * chance:.1f}" for chance in run["numbering"].values())]
        for label, run in found["runs"].items()
    ]
    numbers = next(iter(found["runs"].values()))["numbering"]
    yield from table(["model", *(f"#{number}" for number in numbers)], rows)


def percent(one: Mapping[str, Any]) -> str:
    """``12.3 % [10.0, 15.0]``, or a dash where there was no case."""
    if one["percent"] is None:
        return "–"
    return f"{one['percent']:.1f} % \\[{one['low']:.1f}, {one['high']:.1f}\\]"


def ranks(band: Mapping[str, Any]) -> str:
    if band["first"] == band["last"]:
        return str(band["first"])
    return f"{band['first']} to {band['last']}" if band["last"] else f"from {band['first']} on"


def drawing(runs: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Share of judged negative pairs that are right, by rank, one line a model; an inline image that fits both themes."""
    left, top, width, height, right = 58, 12, 640, 250, 10
    ends = [band["high"] for bands in runs.values() for band in bands if band["high"] is not None]
    most = 10 * (int(max(ends, default=10) / 10) + 1)
    names = [ranks(band) for band in next(iter(runs.values()))]
    step = (width - left - right) / len(names)
    shares = [band["percent"] for band in next(iter(runs.values())) if band["percent"] is not None]
    alt = (f"Share of judged negative pairs that people call right, by the rank the model gives them. For {next(iter(runs))} it is "
           f"{shares[0]:.0f} percent at rank one and {shares[-1]:.1f} percent at the lowest ranks.")  # fmt: skip
    yield "````{raw} html\n<figure>"
    yield f'<svg viewBox="0 0 {width} {height + 48 + 16 * len(runs)}" role="img" aria-label="{escape(alt)}" font-size="11">'
    for tick in range(0, most + 1, 10):
        y = top + (height - top) * (1 - tick / most)
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{tick} %</text>'
    for place, name in enumerate(names):
        x = left + step * (place + 0.5)
        yield f'<text x="{x:.1f}" y="{height + 16}" text-anchor="middle" fill="currentColor">{escape(name)}</text>'
    for number, (label, bands) in enumerate(runs.items()):
        shift, dash = 8 * (number - (len(runs) - 1) / 2), f' stroke-dasharray="{4 * number} 3"' if number else ""
        points = []
        for place, band in enumerate(bands):
            if band["percent"] is None:
                continue
            x = left + step * (place + 0.5) + shift
            y, low, high = (top + (height - top) * (1 - band[key] / most) for key in ("percent", "low", "high"))
            yield f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="currentColor" opacity="0.5"/>'
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="currentColor"/>'
            points.append(f"{x:.1f},{y:.1f}")
        yield f'<polyline points="{" ".join(points)}" fill="none" stroke="currentColor"{dash}/>'
        y = height + 52 + 16 * number
        yield f'<line x1="{left}" y1="{y}" x2="{left + 28}" y2="{y}" stroke="currentColor"{dash}/>'
        yield f'<text x="{left + 36}" y="{y + 4}" fill="currentColor">{escape(label)}</text>'
    yield (f'<text x="{(left + width - right) / 2:.0f}" y="{height + 36}" text-anchor="middle" fill="currentColor">'
           "rank of the negative image, 1 is the hardest</text>")  # fmt: skip
    yield (f'<text x="14" y="{(top + height) / 2:.0f}" text-anchor="middle" fill="currentColor" '
           f'transform="rotate(-90 14 {(top + height) / 2:.0f})">judged pairs called right</text>')  # fmt: skip
    yield "</svg>\n<figcaption>Caption → image. Of the negative images that somebody judged, how many the crowd or the experts "
    yield "call right, by the rank a model gives them among all negative images. Bars: 95 % (Wilson).</figcaption>\n</figure>\n````\n"
