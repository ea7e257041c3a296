"""The computed part of the page on benchmarks: every ratio with its target, growth curves, waits of a GPU's host."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from itm_lab.publish.markdown import table
from itm_lab.records.nested_yaml import load_yaml

BENCH, SYNCS = "benchmarks/results/bench.json", "benchmarks/results/host_syncs.json"
PROFILES, NOTES = "benchmarks/results/profiles.json", "book/data/benchmark_notes.yaml"
HEADS = ["work", "ratio", "now", "rounds", "before", "target", "peak memory"]
MISSED_HEADS = [
    "case",
    "now",
    "target",
    "largest operators of ours",
    "products of ours",
    "ratio with products alone",
    "remark",
]
SIZES = ("pairs", "scores", "rows")  # facts of a case that say how much work it is
COLOURS = {"ours": "#0072b2", "product": "#999999", "bare gather": "#999999"}
FLAT = 1.1  # peak memory that grows less between two points
PANEL, GAP, HEIGHT = 150, 45, 120  # of a growth curve, in pixels


def fragment(root: Path) -> Iterator[str]:
    """The generated part of the page, as MyST text."""
    bench = json.loads((root / BENCH).read_text(encoding="utf-8"))
    notes = load_yaml((root / NOTES).read_text(encoding="utf-8"))
    cases = bench["cases"]
    yield "## Ratios\n"
    yield f"{summary(cases)} Measured on {machine(bench['machine'])}.\n"
    for group in dict.fromkeys(case["group"] for case in cases.values()):
        yield f"### {group.capitalize()}\n"
        yield from table(HEADS, [row for case in cases.values() if case["group"] == group for row in rows(case)])
    yield "## Targets that are not reached, and why\n"
    profiles = json.loads((root / PROFILES).read_text(encoding="utf-8"))["profiles"]
    yield from table(MISSED_HEADS, missed_rows(cases, notes, profiles))
    yield "## Growth\n"
    yield from growth(cases)
    yield "## Waits of a GPU's host\n"
    yield from host_syncs(json.loads((root / SYNCS).read_text(encoding="utf-8"))["host_syncs"])


def machine(found: Mapping[str, Any]) -> str:
    return f"{found['threads']} thread of {found['cores']} cores ({found['processor']}), torch {found['torch']}"


def reached(ratio: Mapping[str, Any]) -> bool | None:
    """Whether a ratio reaches its target as the table prints both; None without one."""
    if ratio["target"] is None:
        return None
    now, target = round(ratio["ratio"], 2), ratio["target"]
    return now <= target if ratio["lower_is_better"] else now >= target


def missed(cases: Mapping[str, Any]) -> list[str]:
    """Names of the cases with a ratio that does not reach its target."""
    return [name for name, case in cases.items() if any(reached(one) is False for one in case["ratios"].values())]


def summary(cases: Mapping[str, Any]) -> str:
    """How many ratios reach their targets."""
    outcomes = [reached(one) for case in cases.values() for one in case["ratios"].values()]
    aimed = [one for one in outcomes if one is not None]
    return f"{len(outcomes)} ratios; of the {len(aimed)} with a target, {sum(aimed)} reach it."


def rows(case: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each ratio of a case; peak memory of ours beyond the inputs, and of what it is compared with."""
    if "absent" in case:
        yield [case["what"], f"not measured: {case['absent']}", *["–"] * (len(HEADS) - 2)]
    for name, one in case["ratios"].items():
        outcome = {True: " ✓", False: " ✗", None: ""}[reached(one)]
        before = f"{one['first']:.2f}" if "first" in one else "–"
        target = "–" if one["target"] is None else f"{'≤' if one['lower_is_better'] else '≥'} {one['target']:g}"
        other = next(way for way in (one["over"], one["under"]) if way != "ours")
        peak = " / ".join(megabytes(case["peak_bytes"].get(way)) for way in ("ours", other))
        spread = f"{one['lowest']:.2f} … {one['highest']:.2f}"
        yield [case["what"], name, f"**{one['ratio']:.2f}**{outcome}", spread, before, target, peak]


def megabytes(found: int | None) -> str:
    return "–" if found is None else f"{found / 1e6:.0f} MB"


def missed_rows(
    cases: Mapping[str, Any], notes: Mapping[str, str], profiles: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[str]]:
    """What is slower than we aimed at: a remark, and where a profile found the time."""
    for name in missed(cases):
        for one in cases[name]["ratios"].values():
            if reached(one) is False:
                profile = profile_cells(profiles[name], one) if name in profiles else ["–"] * 3
                yield [f"`{name}`", f"{one['ratio']:.2f}", f"{one['target']:g}", *profile, notes.get(name, "").strip()]


def profile_cells(found: Mapping[str, Any], ratio: Mapping[str, Any]) -> list[str]:
    """Largest operators of ours, the share of all its products, and the ratio if ours did nothing but these.

    Only shares within a run of ours are used: the profiler reads a wall clock, and another run may be disturbed more.
    """
    share = found["product_seconds"]["ours"] / found["seconds"]["ours"]
    largest = sorted(found["largest"].items(), key=lambda item: -item[1])
    alone = ratio["ratio"] * share if ratio["lower_is_better"] else ratio["ratio"] / share
    return [", ".join(f"`{operator}` {part:.0%}" for operator, part in largest), f"{share:.0%}", f"{alone:.2f}"]


# ---------------------------------------------------------------------------------------------- growth


def growth(cases: Mapping[str, Any]) -> Iterator[str]:
    """Seconds and peak memory of growing work: two panels for each case with a curve."""
    grown = {name: points(case) for name, case in cases.items() if case.get("growth")}
    if not grown:
        yield "No growth curve has been measured.\n"
        return
    width, height = len(grown) * (PANEL + GAP) + GAP, 2 * (HEIGHT + GAP) + 20
    alt = f"Seconds and peak memory against the amount of work for {', '.join(grown)}: ours beside the bare work."
    yield "````{raw} html\n<figure>"
    yield f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}" font-size="10">'
    for place, (name, found) in enumerate(grown.items()):
        left = GAP + place * (PANEL + GAP)
        yield from panel(found, "seconds", f"{name}: seconds", left, 20)
        yield from panel(found, "peak_bytes", "peak bytes", left, 20 + HEIGHT + GAP)
    yield "</svg>\n<figcaption>Both axes are logarithmic: work that grows linearly rises as the dashed line does. Blue: ours; "
    yield "grey: the bare product or gather. Across: pairs, scores or rows (of a training step: pairs of its batch).</figcaption>\n</figure>\n````\n"
    lines = [
        [name, f"{work:,}", *(seconds(one, way) for way in COLOURS), megabytes(one["peak_bytes"].get("ours"))]
        for name, of in grown.items()
        for work, one in of
    ]
    yield from table(["case", "work", *COLOURS, "peak memory of ours"], lines)
    yield "Peak memory between the last two points: " + "; ".join(map(last_rise, grown, grown.values())) + ".\n"


def last_rise(name: str, found: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Whether peak memory is flat between the last two points, or how it grows."""
    (before, smaller), (work, larger) = found[-2:]
    peaks = [one["peak_bytes"].get("ours") for one in (smaller, larger)]
    if None in peaks or not peaks[0]:
        return f"{name}, not known"
    rise = peaks[1] / peaks[0]
    how = "flat" if rise < FLAT else f"grows {rise:.1f} times"
    return f"{name}, {how} while the work grows {work / before:.1f} times"


def seconds(found: Mapping[str, Any], way: str) -> str:
    return f"{found['seconds'][way]:.3g} s" if way in found["seconds"] else "–"


def points(case: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Amount of work and what was measured, smallest first."""
    found = [*case["growth"], case]
    sized = [(next(one["facts"][fact] for fact in SIZES if fact in one["facts"]), one) for one in found]
    return sorted(sized, key=lambda point: point[0])


def panel(
    found: Sequence[tuple[int, Mapping[str, Any]]], field: str, title: str, left: float, top: float
) -> Iterator[str]:
    """One logarithmic chart of the ways that every point measured."""
    ways = [way for way in COLOURS if all(one[field].get(way) for _, one in found)]
    values = [one[field][way] for _, one in found for way in ways]
    if not values:
        return
    first, last = math.log10(found[0][0]), math.log10(found[-1][0])
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def place(work: float, value: float) -> str:
        x = left + PANEL * (math.log10(work) - first) / (last - first)
        return f"{x:.1f},{top + HEIGHT * (high - math.log10(value)) / (high - low):.1f}"

    yield f'<text x="{left}" y="{top - 6}" fill="currentColor">{escape(title)}</text>'
    yield (f'<rect x="{left}" y="{top}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="currentColor" '
           'opacity="0.3"/>')  # fmt: skip
    for power in range(low, high + 1):
        y = top + HEIGHT * (high - power) / (high - low)
        yield f'<text x="{left - 4}" y="{y + 3:.1f}" text-anchor="end" fill="currentColor">1e{power}</text>'
    for work, anchor in ((found[0][0], "start"), (found[-1][0], "end")):
        x = left if anchor == "start" else left + PANEL
        yield f'<text x="{x}" y="{top + HEIGHT + 12}" text-anchor="{anchor}" fill="currentColor">{work:,}</text>'
    start = found[0][1][field][ways[0]]
    end = min(start * found[-1][0] / found[0][0], 10.0**high)
    line = f"{place(found[0][0], start)} {place(found[0][0] * end / start, end)}"
    yield f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-dasharray="3 3" opacity="0.5"/>'
    for way in ways:
        line = " ".join(place(work, one[field][way]) for work, one in found)
        yield f'<polyline points="{line}" fill="none" stroke="{COLOURS[way]}" stroke-width="2"/>'


# ---------------------------------------------------------------------------------------------- host synchronisations


def host_syncs(found: Mapping[str, Mapping[str, int | None]]) -> Iterator[str]:
    """A row for each matcher: waits of one training step with each objective, and of scoring."""
    heads = list(next(iter(found.values())))
    yield from table(["matcher", *heads], ([name, *(count(of[head]) for head in heads)] for name, of in found.items()))


def count(waits: int | None) -> str:
    return "–" if waits is None else str(waits)
