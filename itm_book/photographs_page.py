"""The computed part of the page on photographs: recalls on Flickr8k, and its verdicts beside those of the little world."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from itm_book.uncertainty_page import table
from itm_utils.ledger import Ledger, Verdict
from itm_utils.rules import RECALLS
from itm_utils.uncertainty import seed_interval

DATASET = "flickr8k"
YARDSTICK = "benchmarks/results/photo_cca.json"
HEADS = ["arm", "chapter", "text", "i2t R@1/5/10", "t2i R@1/5/10", "rsum", "seeds"]


def photographs_fragment(ledger: Ledger) -> str:
    """The generated part of the page, as MyST text."""
    return "\n".join([*recalls(ledger), *verdicts(ledger)])


def recalls(ledger: Ledger) -> Iterator[str]:
    """Every arm with receipts, best first, and a model that needs no training beside them."""
    yield "## Recalls\n"
    rows = [
        arm_row(arm, chapter, [receipt for _, receipt in runs.values()])
        for (chapter, arm, dataset), runs in ledger.receipts.items()
        if dataset == DATASET
    ]
    if not rows:
        yield "No run on these photographs has left a receipt yet.\n"
    rows += yardstick(ledger.root)
    rows.sort(key=lambda row: -row[0])
    if rows:
        yield from table(HEADS, [cells for _, cells in rows])


def arm_row(arm: str, chapter: str, runs: list[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Mean rsum, by which rows are sorted, and the cells of an arm."""
    values = {name: [run["metrics"][name]["value"] for run in runs] for name in (*RECALLS, "rsum")}
    mean, rsum = float(np.mean(values["rsum"])), f"{np.mean(values['rsum']):.1f}"
    if len(runs) > 1:
        _, low, high = seed_interval(values["rsum"])
        rsum += f" \\[{low:.1f}, {high:.1f}\\]"
    models = "" if runs[0]["models"] == 1 else f" ({runs[0]['models']} models)"
    shown = both_ways({name: float(np.mean(values[name])) for name in RECALLS})
    return mean, [arm + models, chapter[:2], text_of(runs[0]["parameters"]), *shown, rsum, str(len(runs))]


def both_ways(recalls: Mapping[str, float]) -> list[str]:
    """The recalls of each direction in one cell: six columns of their own make the table too wide for a page."""
    return ["/".join(f"{recalls[name]:.1f}" for name in RECALLS if name.startswith(way)) for way in ("i2t", "t2i")]


def text_of(parameters: Mapping[str, Any]) -> str:
    """What reads the sentences: words and a GRU that learn, or a frozen encoder."""
    frozen = "text_encoder" in parameters and parameters.get("reader") != "gru"
    return Path(parameters["text_encoder"]).name if frozen else "words"


def yardstick(root: Path) -> Iterator[tuple[float, list[str]]]:
    """The row of the closed-form model, if it was measured."""
    if (path := root / YARDSTICK).is_file():
        found = json.loads(path.read_text(encoding="utf-8"))["test"]
        yield found["rsum"], ["*regularised CCA*", "–", "bag of words", *both_ways(found), f"{found['rsum']:.1f}", "–"]


def verdicts(ledger: Ledger) -> Iterator[str]:
    """The claims that are decided on photographs, each beside its verdict on the little world."""
    yield "## Verdicts\n"
    named = [name for name, rule in ledger.rules.items() if DATASET in rule.get("datasets", ())]
    found = {name: ledger.verdict(name, DATASET) for name in named}
    decided = {name: one for name, one in found.items() if one.verdict != "not run"}
    yield f"{len(decided)} of the {len(named)} claims whose rule speaks of Flickr8k are decided.\n"
    if decided:
        rows = [[name, one.verdict, ledger.verdict(name, "scenes").verdict, held(one)] for name, one in decided.items()]
        yield from table(["claim", "Flickr8k", "little world", "on Flickr8k"], rows)
    for name, one in decided.items():
        yield from reasons(one, (ledger.claims | ledger.foundations)[name]["claim"])


def reasons(one: Verdict, claim: str) -> Iterator[str]:
    """The claim in words, and each comparison with its interval over the seeds."""
    yield f"**{one.id}** {claim} *{one.verdict.capitalize()}* on Flickr8k:\n"
    yield from (f"- {finding.status}: {finding}; expected {finding.expected}" for finding in one.findings)
    yield ""


def held(one: Verdict) -> str:
    """How many comparisons of a verdict hold, fail and are open."""
    status = [finding.status for finding in one.findings]
    told = {"holds": "hold", "fails": "fail", "open": "open"}
    return ", ".join(f"{status.count(key)} {word}" for key, word in told.items() if key in status)
