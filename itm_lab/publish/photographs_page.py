"""The computed part of the page on photographs: recalls on Flickr8k, and its verdicts beside those of Scenes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.evidence.ledger import OLD_PROTOCOL, Ledger, Verdict
from itm_lab.evidence.statistics import seed_interval
from itm_lab.publish.markdown import table
from itm_lab.records.receipts import is_old_protocol
from itm_lab.records.rules import RECALLS
from itm_lab.teaching.figures import method_colour

DATASET = "flickr8k"
BASELINES = ("benchmarks/results/photo_cca.json", "benchmarks/results/photo_cca_minilm.json")
MARK = "†"
HEADS = ["variant", "chapter", "text", "i2t R@1/5/10", "t2i R@1/5/10", "rsum", "seeds"]


def photographs_fragment(ledger: Ledger) -> str:
    """The generated part of the page, as MyST text."""
    return "\n".join([*recalls(ledger), *verdicts(ledger)])


def recalls(ledger: Ledger) -> Iterator[str]:
    """Every variant with receipts, best first, and a model that needs no training beside them."""
    yield "## Recalls\n"
    variants = {
        (variant, chapter): [receipt for _, receipt in runs.values()]
        for (chapter, variant, dataset), runs in ledger.receipts.items()
        if dataset == DATASET
    }
    rows = [variant_row(variant, chapter, runs) for (variant, chapter), runs in variants.items()]
    known = list(baseline_rows(ledger.root))
    if rows:
        yield from drawing({variant: runs for (variant, _), runs in variants.items()}, [rsum for rsum, _ in known])
    else:
        yield "No run on these photographs has a receipt yet.\n"
    rows = sorted([*rows, *known], key=lambda row: -row[0])
    if rows:
        yield from table(HEADS, [cells for _, cells in rows])
    for variant, seeds in never_better(variants):
        yield f"{MARK} {variant} kept the weights of its warm-up in {seeds}: its own loss never did better on dev.\n"


def never_better(variants: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Variants with runs whose loss never improved on the warm-up: what such a row shows is not its loss."""
    for (variant, _), runs in variants.items():
        if seeds := [str(run["seed"]) for run in runs if kept_warmup(run)]:
            yield variant, f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"


def kept_warmup(run: Mapping[str, Any]) -> bool:
    """Chapters that note the epoch of the kept weights tell; others do not."""
    chosen = run["metrics"].get("chosen_epoch")
    return chosen is not None and chosen["value"] <= run["parameters"]["warmup_epochs"]


def drawing(variants: Mapping[str, Sequence[Mapping[str, Any]]], known: list[float]) -> Iterator[str]:
    """The rsum of every run, a line a variant, as an inline image that fits both themes. known: those of baselines."""
    values = {variant: [run["metrics"]["rsum"]["value"] for run in runs] for variant, runs in variants.items()}
    order = sorted(values, key=lambda variant: -np.mean(values[variant]))
    ends = [*known, *(number for numbers in values.values() for number in numbers)]
    low, high = 25 * int(min(ends) // 25), 25 * int(max(ends) // 25 + 1)
    left, step, width, base = 235, 17, 640, 17 * len(order) + 16
    scale = (width - left - 20) / (high - low)
    alt = f"The sum of recalls of every run on photographs, {len(order)} variants; {order[0]} is ahead and {order[-1]} is last."
    yield "````{raw} html\n<figure>"
    yield f'<svg viewBox="0 0 {width} {base + 28}" role="img" aria-label="{escape(alt)}" font-size="11">'
    for tick in range(low, high + 1, 25):
        x = left + scale * (tick - low)
        yield f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{base - 6}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{x:.1f}" y="{base + 6}" text-anchor="middle" fill="currentColor">{tick}</text>'
    for number in known:
        x = left + scale * (number - low)
        yield f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{base - 6}" stroke="currentColor" stroke-dasharray="4 3"/>'
    for place, variant in enumerate(order):
        y, colour = step * place + 12, method_colour(variant)
        fill = "none" if text_of(variants[variant][0]["parameters"]) == "words" else colour
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="currentColor">{escape(variant)}</text>'
        for number in values[variant]:
            x = left + scale * (number - low)
            yield f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    yield f'<text x="{width - 20}" y="{base + 22}" text-anchor="end" fill="currentColor">rsum on the test set</text>'
    yield "</svg>\n<figcaption>A dot is one run of one seed. Filled: a frozen text encoder reads the captions; hollow: words "
    yield "that are learned. Dashed: the two baselines, which need no training.</figcaption>\n</figure>\n````\n"


def variant_row(variant: str, chapter: str, runs: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Mean rsum, by which rows are sorted, and the cells of a variant."""
    values = {name: [run["metrics"][name]["value"] for run in runs] for name in (*RECALLS, "rsum")}
    mean, rsum = float(np.mean(values["rsum"])), f"{np.mean(values['rsum']):.1f}"
    if len(runs) > 1:
        _, low, high = seed_interval(values["rsum"])
        rsum += f" \\[{low:.1f}, {high:.1f}\\]"
    models = "" if runs[0]["models"] == 1 else f" ({runs[0]['models']} models)"
    mark = f" {MARK}" if any(kept_warmup(run) for run in runs) else ""
    mark += f", {OLD_PROTOCOL}" if is_old_protocol(runs[0]) else ""
    shown = both_ways({name: float(np.mean(values[name])) for name in RECALLS})
    return mean, [variant + models + mark, chapter[:2], text_of(runs[0]["parameters"]), *shown, rsum, str(len(runs))]


def both_ways(recalls: Mapping[str, float]) -> list[str]:
    """The recalls of each direction in one cell: six columns of their own make the table too wide for a page."""
    return ["/".join(f"{recalls[name]:.1f}" for name in RECALLS if name.startswith(way)) for way in ("i2t", "t2i")]


def text_of(parameters: Mapping[str, Any]) -> str:
    """What reads the captions: words and a GRU that learn, or a frozen encoder."""
    frozen = "text_encoder" in parameters and parameters.get("text_backbone") != "gru"
    return Path(parameters["text_encoder"]).name if frozen else "words"


def baseline_rows(root: Path) -> Iterator[tuple[float, list[str]]]:
    """The rows of the closed-form model, as far as they were measured."""
    for path in map(root.joinpath, BASELINES):
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            test, text = found["test"], found["what"]["text"]
            yield test["rsum"], ["*regularised CCA*", "–", text, *both_ways(test), f"{test['rsum']:.1f}", "–"]


def verdicts(ledger: Ledger) -> Iterator[str]:
    """The claims that are decided on photographs, each beside its verdict on Scenes."""
    yield "## Verdicts\n"
    named = [name for name, rule in ledger.rules.items() if DATASET in rule.get("datasets", ())]
    found = {name: ledger.verdict(name, DATASET) for name in named}
    decided = {name: one for name, one in found.items() if one.verdict != "not run"}
    yield f"{len(decided)} of the {len(named)} claims whose rule speaks of Flickr8k are decided.\n"
    if decided:
        rows = [[name, one.verdict, ledger.verdict(name, "scenes").verdict, held(one)] for name, one in decided.items()]
        yield from table(["claim", "Flickr8k", "Scenes", "on Flickr8k"], rows)
    for name, one in decided.items():
        yield from reasons(one, (ledger.claims | ledger.foundations)[name]["claim"], ledger.rules[name]["words"])


def reasons(one: Verdict, claim: str, rule: str) -> Iterator[str]:
    """The claim, its rule in words, and each comparison with its interval over the seeds."""
    yield f"**{one.id}** {claim} *{one.verdict.capitalize()}* on Flickr8k. Our rule: {rule}\n"
    for finding in one.findings:
        same = " (the same number in every seed)" if finding.interval.low == finding.interval.high else ""
        yield f"- {finding.status}: {finding}{same}; expected {finding.expected}"
    yield ""


def held(one: Verdict) -> str:
    """How many comparisons of a verdict hold, fail and are open."""
    status = [finding.status for finding in one.findings]
    told = {"holds": "hold", "fails": "fail", "open": "open"}
    return ", ".join(f"{status.count(key)} {word}" for key, word in told.items() if key in status)
