"""How a rule is read: from its text to comparisons, from their numbers to a word.

``book/data/rules.yaml`` explains the fields. Nothing here knows where receipts lie; that is :mod:`itm_lab.evidence.ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import scipy  # its parts come when they are used: they take most of a second

from itm_lab.evidence.chance import chance_level
from itm_lab.evidence.protocol import Checks
from itm_lab.evidence.statistics import Estimate, Interval, holm, seed_estimate, smallest_effect, two_way_estimate
from itm_lab.records.rules import RECALLS, Comparison, _expected, listed, metrics_of
from itm_utils.errors import input_error

VERDICTS = ("reproduced", "partly", "level", "not reproduced", "inconclusive", "not comparable", "not run")
NOT_COMPARABLE = "not comparable"
Contributions = Callable[[str, int, str], np.ndarray]  # variant, seed, recall → (i,) what each test image gives to it


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison gave. runs: how many seeds (0: a printed number).

    status: holds, fails, level (no difference beyond the margin), open or not comparable. chance: the chance level of
    the metric that is compared, where it is an attention F1. p: that the number is the bound (0: a printed number).
    smallest: the smallest effect that so many seeds find four times in five. checks: those of the protocol that failed
    or could not be made. collapsed: runs that rank hardly better than chance. metric: what is compared. margin: within
    which a difference counts as none.
    """

    comparison: str
    interval: Interval
    expected: str
    status: str
    runs: int
    chance: float | None = None
    p: float = 0.0
    smallest: float | None = None
    checks: Checks = field(default_factory=Checks)
    collapsed: tuple[str, ...] = ()
    metric: str = ""
    margin: float | None = None

    @property
    def is_level(self) -> bool:
        """Whether the whole interval lies within the margin that counts as no difference."""
        return self.margin is not None and -self.margin <= self.interval.low and self.interval.high <= self.margin

    def __str__(self) -> str:
        value, low, high = map(signed, self.interval)
        seeds = f" [{low}, {high}], n = {self.runs}" if self.runs else ""
        return f"{self.comparison}: {value}{seeds}" + (
            "" if self.chance is None else f"; every region {self.chance:.1f}"
        )

    def remarks(self) -> Iterator[str]:
        """What a reader must know beside the number, a clause each."""
        if self.status == "open" and self.smallest is not None:
            yield f"{self.runs} seeds see effects of {signed(self.smallest).lstrip('+')} and more"
        if self.collapsed:
            yield f"{len(self.collapsed)} collapsed: {', '.join(self.collapsed)}"
        yield from self.checks.failed
        yield from self.checks.missing


def signed(number: float) -> str:
    """A number with its sign; small ones with three digits."""
    return f"{number:+.3g}" if abs(number) < 1 else f"{number:+.1f}"


def evaluate(
    comparison: Comparison,
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]],
    protocol: Mapping[str, Any],
    contributions: Contributions | None = None,
) -> ComparisonResult:
    """The comparison's number over the seeds, with its interval. runs: variant → seed → receipt, the same seeds each.

    contributions: where they are known, recalls have an interval over seeds and test images together.
    """
    seeds, level = list(next(iter(runs.values()))), protocol["level"]
    value = {term: [_metric(runs[term[0]][seed], term[1]) for seed in seeds] for term in comparison.terms}
    metrics = {metric for _, metric in comparison.terms}
    if comparison.correlated:
        x, y = (_centred([value[term] for term in side]) for side in (comparison.plus, comparison.minus))
        found = pearson_interval(x, y, level, len(seeds) - 1)
        bound = next(iter(comparison.expected.values()))
        return replace(
            _finding(str(comparison), found, comparison.expected, len(x)), p=pearson_p(found.value, bound, len(x), len(seeds) - 1)
        )  # fmt: skip
    if contributions and all(set(metric.split("-")) <= {*RECALLS, "rsum"} for metric in metrics):
        estimate = two_way_estimate(_by_image(comparison, seeds, value, contributions), level)
    else:
        estimate = seed_estimate(_by_seed(comparison, seeds, value), level)
    margin = level_margin(comparison, protocol["level_within"])
    found = _finding(str(comparison), estimate.interval, comparison.expected, len(seeds), margin)
    every = [receipt for of in runs.values() for receipt in of.values()]
    alone = metrics.pop() if len(metrics) == 1 else ""
    spread = estimate.error * math.sqrt(len(seeds))
    return replace(
        found,
        chance=chance_level(alone, every) if alone else None,
        p=_p(estimate, comparison.expected),
        smallest=smallest_effect(spread, len(seeds), level) if spread and math.isfinite(spread) else None,
        metric=alone,
    )


def level_margin(comparison: Comparison, margins: Mapping[str, float]) -> float | None:
    """The margin within which a difference counts as none: the rule's, or the protocol's for such a metric.

    None where the comparison asks for something else than a difference above or below zero.
    """
    differs = bool(comparison.minus or comparison.best) or any("-" in metric for _, metric in comparison.terms)
    if not differs or comparison.expected not in ({"above": 0}, {"below": 0}):
        return None
    if comparison.level_within is not None:
        return comparison.level_within
    metric = comparison.terms[0][1].split("-")[0]
    kinds = (kind for kind, fits in KINDS.items() if fits(metric))
    return margins.get(next(kinds, ""))


KINDS: dict[str, Callable[[str], bool]] = {
    "rsum": lambda metric: metric == "rsum",
    "recall": lambda metric: metric in RECALLS,
    "attention": lambda metric: metric.startswith(("att_f1", "att_precision", "att_recall", "att_pr_area")),
}


def _by_seed(comparison: Comparison, seeds: Sequence[int], value: Mapping[Any, Sequence[float]]) -> list[float]:
    return [
        sum(value[term][k] for term in comparison.plus)
        - sum(value[term][k] for term in comparison.minus)
        - max((value[term][k] for term in comparison.best), default=0.0)
        for k in range(len(seeds))
    ]


def _by_image(
    comparison: Comparison, seeds: Sequence[int], value: Mapping[Any, Sequence[float]], contributions: Contributions
) -> np.ndarray:
    """(s, i) the comparison for each seed and test image; the mean of a row is its number at that seed."""

    def of(term: tuple[str, str], seed: int) -> np.ndarray:
        first, *rest = (contributions(term[0], seed, name) for name in term[1].split("-"))
        return first - sum(rest)

    rows = []
    for k, seed in enumerate(seeds):
        taken = list(comparison.minus)
        if comparison.best:
            taken.append(max(comparison.best, key=lambda term: value[term][k]))
        rows.append(sum(of(term, seed) for term in comparison.plus) - sum(of(term, seed) for term in taken))
    return np.array(rows)


def after_holm(
    findings: Mapping[str, Sequence[ComparisonResult]], claims: int, level: float
) -> dict[str, tuple[ComparisonResult, ...]]:
    """Comparisons that hold only while nobody counts how many claims were asked are open.

    findings: claim → its comparisons, of one paper and dataset. claims: how many the paper's rules ask there, run or
    not. A claim's p is that of the weakest of its comparisons that hold, for all of them must; Holm's correction of it
    is that of each of its comparisons.
    """
    weakest = {
        claim: max((one.p for one in of if one.status == "holds"), default=1.0) for claim, of in findings.items()
    }
    corrected = holm([*weakest.values(), *[1.0] * (claims - len(weakest))])
    done = {}
    for (claim, p), now in zip(weakest.items(), corrected, strict=False):
        factor = now / p if p else 1.0
        done[claim] = tuple(
            replace(one, status="level" if one.is_level else "open")
            if one.status == "holds" and one.p * factor > 1 - level
            else one
            for one in findings[claim]
        )
    return done


def verdict_of(findings: Sequence[ComparisonResult]) -> str:
    """The verdict that findings give together."""
    status = {finding.status for finding in findings}
    told = status - {NOT_COMPARABLE}
    if not told:
        return NOT_COMPARABLE
    if status == {"holds"}:
        return "reproduced"
    if "holds" in told:
        return "partly"
    if "fails" in told:
        return "not reproduced"
    return "level" if status == {"level"} else "inconclusive"


def pearson_interval(x: Sequence[float], y: Sequence[float], level: float = 0.95, taken: int = 0) -> Interval:
    """Pearson's r with Fisher's interval. taken: degrees of freedom that were used up before, as by centring."""
    found: Any = scipy.stats.pearsonr(x, y)  # scipy makes its attributes at run time
    r = float(found.statistic)
    half = float(scipy.stats.norm.interval(level)[1]) / math.sqrt(len(x) - taken - 3)  # scipy's own knows no ``taken``
    z = math.atanh(max(-0.999999, min(0.999999, r)))
    return Interval(r, math.tanh(z - half), math.tanh(z + half))


def pearson_p(r: float, bound: float, pairs: int, taken: int = 0) -> float:
    """Two-sided p of "the correlation is ``bound``", by Fisher's transformation."""
    z = math.atanh(max(-0.999999, min(0.999999, r))) - math.atanh(bound)
    return float(2 * scipy.stats.norm.sf(abs(z) * math.sqrt(pairs - taken - 3)))


def _centred(variants: Sequence[Sequence[float]]) -> list[float]:
    """All numbers (variants, seeds) in one row, less the mean of their seed: a seed that fails everywhere decides nothing."""
    means = [fmean(of) for of in zip(*variants, strict=True)]
    return [number - mean for variant in variants for number, mean in zip(variant, means, strict=True)]


def printed_findings(checks: Sequence[Mapping[str, Any]], papers: Mapping[str, Any]) -> Iterator[ComparisonResult]:
    """What printed tables say. checks: entries of ``tables`` in rules.yaml; papers: those of published_tables.yaml."""
    for check in checks:
        rows, others = (_block(papers, at)["rows"] for at in (check["at"], check.get("b_at", check["at"])))
        field = check.get("per")
        for group in {row[field]: {field: row[field]} for row in rows}.values() if field else ({},):
            plus = [_the_row(rows, wanted | group) for wanted in listed(check["a"])]
            rest = check.get("b")
            if isinstance(rest, list):
                minus = [[_the_row(others, wanted | group) for wanted in rest]]
            else:
                minus = [[row] for row in _matching(others, rest | group)] if rest else [[]]
            for metric in metrics_of(check):
                for taken in minus:
                    printed = [_printed(row, metric) for row in plus + taken]
                    numbers = [number for number in printed if number is not None]
                    if len(numbers) == len(printed):
                        value = round(sum(numbers[: len(plus)]) - sum(numbers[len(plus) :]), 6)
                        names = [" + ".join(map(row_name, side)) for side in (plus, taken) if side]
                        text = f"{_place(papers, check['at'])}, {metric}: {' − '.join(names)}"
                        found = _finding(text, Interval(value, value, value), _expected(check), 0)
                        yield replace(found, metric=metric)


def row_name(row: Mapping[str, Any]) -> str:
    """What a table's row is called: its method and whatever tells it from its neighbours."""
    named = ("method", "variant", "text_backbone", "training", "constraints")
    numbered = ("batch_size", "d", "alpha", "beta", "h_text")
    parts = [str(row[key]) for key in named if row.get(key) not in (None, "none")]
    return " ".join(parts + [f"{key} {row[key]}" for key in numbered if key in row])


def _metric(receipt: Mapping[str, Any], metric: str) -> float:
    first, *rest = (receipt["metrics"][name]["value"] for name in metric.split("-"))
    return first - sum(rest)


def _printed(row: Mapping[str, Any], metric: str) -> float | None:
    values: list[Any] = [
        row[name] if row.get(name) is not None else row.get(f"{name}_computed") for name in metric.split("-")
    ]
    return None if None in values else values[0] - sum(values[1:])


def _block(papers: Mapping[str, Any], at: str) -> dict[str, Any]:
    paper, table, number = at.split()
    return papers[paper]["tables"][table]["blocks"][int(number)]


def _place(papers: Mapping[str, Any], at: str) -> str:
    block = _block(papers, at)
    return f"{at.split()[1].replace('_', ' ')}, {block['dataset']}{' 5K' if '5K' in block['protocol'] else ''}"


def _matching(rows: Sequence[dict[str, Any]], wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in rows if all(row.get(key) in listed(value) for key, value in wanted.items())]


def _the_row(rows: Sequence[dict[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    if len(found := _matching(rows, wanted)) != 1:
        raise input_error("rules.yaml", f"{len(found)} rows with {dict(wanted)}", "one row of the paper's table")
    return found[0]


def _p(estimate: Estimate, expected: Mapping[str, Any]) -> float:
    """p that the number is the bound; that of the nearer one where two are given."""
    return max(estimate.p(bound) for bound in listed(next(iter(expected.values()))))


def _finding(
    text: str, interval: Interval, expected: Mapping[str, Any], runs: int, margin: float | None = None
) -> ComparisonResult:
    """Holds if the whole interval is where it should be, else level if it is within the margin; fails if none of it is."""
    (word, bound), (_, low, high) = next(iter(expected.items())), interval
    if word == "within":
        holds, fails = bound[0] <= low and high <= bound[1], high < bound[0] or low > bound[1]
        return ComparisonResult(text, interval, f"within {bound[0]} to {bound[1]}", _status(holds, fails), runs)
    holds, fails = (low > bound, high < bound) if word == "above" else (high < bound, low > bound)
    found = ComparisonResult(text, interval, f"{word} {bound}", _status(holds, fails), runs, margin=margin)
    return replace(found, status="level") if found.is_level and not holds else found


def _status(holds: bool, fails: bool) -> str:
    return "holds" if holds else "fails" if fails else "open"
