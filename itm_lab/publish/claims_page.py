"""Claims as MyST text: the paper's effect beside ours, and what a verdict rests on, folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from itm_lab.evidence.ledger import OLD_PROTOCOL, TABLES, VERDICTS, Ledger, Verdict
from itm_lab.evidence.verdicts import NOT_COMPARABLE, ComparisonResult, signed
from itm_lab.publish.forest import Row, forest
from itm_lab.publish.markdown import badge, escape, joined, table
from itm_lab.records.rules import RECALLS

SHOWN = {"CCR_CCS": "CCR/CCS"}
CHAPTERS = {"MMCA": "08_mmca", "DCPA": "09_dcpa", "AOQ": "10_aoq", "CCR_CCS": "11_ccr_ccs"}
DATASETS = {
    "scenes": "Scenes",
    "flickr8k": "Flickr8k",
    "f30k": "Flickr30K",
    "coco": "COCO 1K",
    "coco 5K": "COCO 5K",
    TABLES: "the paper's tables",
}
STATUS = {
    "supported": "its own numbers carry the claim",
    "partly": "its own numbers carry part of the claim",
    "contradicted": "its own numbers speak against the claim",
    "text_only": "stated in the text, without a number",
    "analytic": "derived, not measured",
}
STATUSES = {"holds": "held", "fails": "failed", "open": "open", "level": "level", NOT_COMPARABLE: NOT_COMPARABLE}
MARKS = {"holds": "✓", "fails": "✗", "open": "?", "level": "=", NOT_COMPARABLE: "≠"}
HEADS = ["claim", "what it says", "the paper's effect", "ours", "verdict", "on"]
WHOLE = "\N{NON-BREAKING HYPHEN}"  # a claim's name stays on one line
IN_A_CELL = 3  # effects in one cell of the table
IN_A_ROW = 4  # effects in one row of the drawing
POINTS = ("att_f1", "att_precision", "att_recall", "att_pr_area")  # metrics in points, besides rsum and recalls


@dataclass(frozen=True)
class Effects:
    """What a claim is about, in one metric: as the paper's tables have it, and as our runs do."""

    metric: str
    paper: tuple[ComparisonResult, ...]
    ours: tuple[ComparisonResult, ...]


def effects_of(ledger: Ledger, one: Verdict) -> Effects:
    """The comparisons of a claim's first metric that ask for the same as the first, ours and printed.

    Where nothing was run, the metric is the paper's first.
    """
    printed = ledger.printed(one.id)
    ours = () if one.dataset == TABLES else one.findings
    metric = next((finding.metric for finding in (*ours, *printed)), "")
    same = [finding for finding in printed if base_metric(finding.metric) == base_metric(metric)]
    return Effects(metric, alike(same), alike([finding for finding in ours if finding.metric == metric]))


def alike(findings: Sequence[ComparisonResult]) -> tuple[ComparisonResult, ...]:
    """Those that ask for the same as the first: a gain is not shown among differences that should be none."""
    return tuple(finding for finding in findings if finding.expected == findings[0].expected)


def base_metric(metric: str) -> str:
    """A metric without the range of thresholds or the overlap it was measured with."""
    return metric.replace("_to_one_tenth", "").partition("_iou_")[0]


# ---------------------------------------------------------------------------------------------- pages


def overview(ledger: Ledger) -> Iterator[str]:
    """How many claims of each paper have which verdict, then paper by paper every claim, folded."""
    papers = papers_of(ledger.claims)
    yield from at_a_glance(ledger, papers)
    for paper, names in papers.items():
        yield f"## {SHOWN.get(paper, paper)}\n"
        page = f"results-{paper.lower().replace('_', '-')}"
        yield f"Effects as a drawing, beside the paper's tables: {{doc}}`/book/{page}`.\n"
        for name in names:
            yield from claim_details(ledger, name, ledger.claims[name])


def foundations(ledger: Ledger, about: Mapping[str, str]) -> Iterator[str]:
    """The claims of part I on one page, folded. about: paper → who wrote it."""
    papers = papers_of(ledger.foundations)
    yield from at_a_glance(ledger, papers)
    for paper, names in papers.items():
        yield f"## {paper}\n"
        yield about[paper]
        for name in names:
            yield from claim_details(ledger, name, ledger.foundations[name])


def paper_claims(ledger: Ledger, paper: str) -> Iterator[str]:
    """The claims of one paper: all effects as a drawing, a row for each claim."""
    yield "## The claims\n"
    yield from drawing(ledger, paper)
    yield from claim_table(ledger, papers_of(ledger.claims)[paper])


@lru_cache(maxsize=4)
def titles(ledger: Ledger) -> dict[str, str]:
    """Claim → its name in contents and tables."""
    return ledger.read("claim_titles")


def chapter_of(claim: Mapping[str, Any]) -> str:
    """The chapter that a claim belongs to."""
    return claim.get("chapter") or CHAPTERS[claim["paper"]]


def papers_of(claims: Mapping[str, Any]) -> dict[str, list[str]]:
    """Paper → its claims, in their order."""
    found: dict[str, list[str]] = {}
    for name, claim in claims.items():
        found.setdefault(claim["paper"], []).append(name)
    return found


def at_a_glance(ledger: Ledger, papers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """How many claims of each paper have which verdict."""
    words = {paper: [ledger.verdict(name).verdict for name in names] for paper, names in papers.items()}
    yield "## At a glance\n"
    lines: list[list[Any]] = [[badge(word), *(of.count(word) or "–" for of in words.values())] for word in VERDICTS]
    lines.append(["claims", *map(len, words.values())])
    yield from table(["verdict", *(SHOWN.get(paper, paper) for paper in papers)], lines)


# ---------------------------------------------------------------------------------------------- a row for each claim


def claim_table(ledger: Ledger, names: Iterable[str]) -> Iterator[str]:
    """Claim, the paper's effect, ours with its interval, verdict, dataset."""
    lines = []
    for name in names:
        one = ledger.verdict(name)
        dataset = "–" if one.verdict == "not run" else DATASETS[one.dataset]
        link = f"{{ref}}`{name.replace('-', WHOLE)} <claim-{name.lower()}>`"
        paper, ours = cells(ledger, one)
        lines.append([link, titles(ledger)[name], paper, ours, badge(one.verdict), dataset])
    yield from table(HEADS, lines)


def cells(ledger: Ledger, one: Verdict) -> tuple[str, str]:
    """The paper's effect and ours."""
    effects = effects_of(ledger, one)
    return paper_cell(effects), OLD_PROTOCOL if OLD_PROTOCOL in one.reason else our_cell(effects)


def paper_cell(effects: Effects) -> str:
    """The effects that the paper's tables have: one, or from the smallest to the largest."""
    values = sorted(finding.interval.value for finding in effects.paper)
    if not values:
        return "–"
    ends = signed(values[0]) if len(values) == 1 else f"{signed(values[0])} to {signed(values[-1])}"
    return f"{ends} {label(effects.metric)}"


def our_cell(effects: Effects) -> str:
    """Our effects, each with its interval."""
    told = [f"{signed(one.interval.value)} {bracket(one)}" for one in effects.ours[:IN_A_CELL]]
    more = len(effects.ours) - len(told)
    return "; ".join(told) + f" and {more} more" * bool(more) if told else "–"


def bracket(one: ComparisonResult) -> str:
    return f"\\[{signed(one.interval.low)}, {signed(one.interval.high)}\\]"


# ---------------------------------------------------------------------------------------------- folded details


def claim_details(ledger: Ledger, name: str, claim: Mapping[str, Any]) -> Iterator[str]:
    """One claim under a heading of its own, which contents show; everything about it folded."""
    rule, verdicts = ledger.rules[name], ledger.verdicts(name)
    decided = [one for one in verdicts if one.verdict != "not run"] or verdicts[:1]
    paper, ours = cells(ledger, ledger.verdict(name))
    yield f"(claim-{name.lower()})=\n### {name}: {titles(ledger)[name]}\n"
    yield " ".join(f"{badge(one.verdict)} on {DATASETS[one.dataset]}" for one in decided) + "\n"
    yield "````{dropdown} The claim, the paper's evidence and our rule"
    yield f"{escape(claim['claim'])}\n"
    status = STATUS.get(claim["in_paper_status"])
    yield f"- **The paper's evidence.** {escape(claim['evidence'])}" + (f" ({status})." if status else ".")
    if rule["kind"] != "table" and (printed := ledger.printed(name)):
        yield f"- **Its tables, checked by us.** {printed_held(printed)}"
    if "contradicts_itself" in rule:
        yield f"- **The paper contradicts itself.** {escape(rule['contradicts_itself'])}"
    if "caveat" in claim:
        yield f"- **Note.** {escape(claim['caveat'])}"
    yield f"- **Our rule.** {escape(rule['words'])} {needed(rule)}"
    if (paper, ours) != ("–", "–"):
        yield f"- **Effect.** The paper's: {paper}. Ours: {ours}."
    for one in decided:
        yield from our_evidence(one, chapter_of(claim))
    for one in verdicts:
        if one not in decided:
            yield f"- **Not run** on {DATASETS[one.dataset]}: {escape(one.reason)}."
    yield "````\n"


def our_evidence(one: Verdict, chapter: str) -> Iterator[str]:
    """What a verdict rests on: how many comparisons came out how, and where all of them stand."""
    where = DATASETS[one.dataset]
    if one.verdict == "not run":
        yield f"- **Our evidence.** None on {where}: {escape(one.reason)}."
        return
    link = (
        f"{{ref}}`Every comparison <evidence-{one.id.lower()}>` stands on the companion page of chapter {chapter[:2]}."
    )
    if one.dataset == TABLES:
        yield f"- **Our evidence.** {printed_held(one.findings)} {link}"
        return
    counted = Counter(finding.status for finding in one.findings)
    told = joined([f"{number} {STATUSES[status]}" for status, number in counted.items()])
    number = len(one.findings)
    yield (
        f"- **Our evidence on {where}**, from {len(one.receipts)} receipts. Of {number} comparison{'s' * (number > 1)}: {told}. {link}"
    )


def comparison_table(findings: Iterable[ComparisonResult]) -> Iterator[str]:
    """Every comparison with its interval, what it should be, and what a reader must know beside it."""
    rows = []
    for one in findings:
        told, expected = escape(str(one)), one.expected
        rows.append([MARKS[one.status], told, expected, escape("; ".join(one.remarks())) or "–"])
    yield from table(["", "comparison", "expected", "remarks"], rows)


def printed_held(findings: Iterable[ComparisonResult]) -> str:
    """How many comparisons of printed numbers hold, and which do not."""
    findings = list(findings)
    others = [escape(str(finding)) for finding in findings if finding.status != "holds"]
    held = f"{len(findings) - len(others)} of {len(findings)} comparisons hold."
    return held + (f" Not: {'; '.join(others[:6])}{' …' if len(others) > 6 else ''}." if others else "")


def needed(rule: Mapping[str, Any]) -> str:
    if rule["kind"] != "runs":
        return "No run needed."
    seeds = joined([f"{DATASETS[name]} ({number})" for name, number in rule["datasets"].items()])
    return f"Seeds at least: {seeds}."


# ---------------------------------------------------------------------------------------------- the drawing


def drawing(ledger: Ledger, paper: str) -> Iterator[str]:
    """The figure of :func:`figures`, with what it shows and does not show."""
    rows = forest_rows(ledger, paper)
    if not rows:
        return
    ours = sum(bool(row.ours) for row in rows)
    shown = SHOWN.get(paper, paper)
    alt = f"Effects in points for {len(rows)} claims of {shown}: a diamond for each number of the paper's tables, "
    alt += f"a dot with its interval for each of ours; {ours} of the claims have runs of ours."
    yield f"```{{figure}} /book/img/{figure_name(paper)}\n:alt: {alt}\n"
    yield "Effects in points, a line for each claim. Diamonds: the paper's tables. Dots: ours with their 95 % intervals over seeds "
    yield "and test images, coloured by verdict. Beyond five points the axis is logarithmic. Claims in other units, or without a number on either side, are in the table only."
    yield "```\n"


def figures(ledger: Ledger, paper: str) -> dict[str, str]:
    """File name → SVG of the drawings of a paper's page; none for other pages."""
    rows = forest_rows(ledger, paper) if paper in ledger.results else []
    return {figure_name(paper): forest(rows)} if rows else {}


def figure_name(paper: str) -> str:
    return f"forest-{paper.lower().replace('_', '-')}.svg"


def forest_rows(ledger: Ledger, paper: str) -> list[Row]:
    """Every claim of a paper with an effect in points, the paper's or ours."""
    rows = []
    for name in papers_of(ledger.claims)[paper]:
        one = ledger.verdict(name)
        effects = effects_of(ledger, one)
        if in_points(effects.metric) and (effects.paper or effects.ours):
            printed = [finding.interval.value for finding in effects.paper]
            ours = [finding.interval for finding in effects.ours[:IN_A_ROW]]
            rows.append(Row(name, label(effects.metric), one.verdict, printed, ours))
    return rows


def in_points(metric: str) -> bool:
    return all(part in (*RECALLS, "rsum") or part.startswith(POINTS) for part in metric.split("-"))


def label(metric: str) -> str:
    """A metric's name for readers: i2t R@1."""
    shown = [
        part.replace("_r", " R@") if part in RECALLS else part.removesuffix("_computed") for part in metric.split("-")
    ]
    return " − ".join(part.replace("_", " ") for part in shown)
