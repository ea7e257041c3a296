"""How a rule is read: from its text to comparisons, from their numbers to a word.

``book/data/rules.yaml`` explains the fields. Nothing here knows where receipts lie; that is :mod:`itm_lab.evidence.ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from scipy import stats

from itm_lab.evidence.chance import chance_level
from itm_lab.evidence.statistics import Interval, seed_interval
from itm_lab.records.rules import Comparison, _expected, listed, metrics_of
from itm_utils.errors import input_error


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison gave. runs: how many seeds (0: a printed number). status: holds, fails or open.

    chance: the chance level of the metric that is compared, where it is an attention F1.
    """

    comparison: str
    interval: Interval
    expected: str
    status: str
    runs: int
    chance: float | None = None

    def __str__(self) -> str:
        value, low, high = (f"{number:+.3g}" if abs(number) < 1 else f"{number:+.1f}" for number in self.interval)
        seeds = f" [{low}, {high}], n = {self.runs}" if self.runs else ""
        return f"{self.comparison}: {value}{seeds}" + (
            "" if self.chance is None else f"; every region {self.chance:.1f}"
        )


def evaluate(
    comparison: Comparison, runs: Mapping[str, Mapping[int, Mapping[str, Any]]], level: float
) -> ComparisonResult:
    """The comparison's number over the seeds, with its interval. runs: variant → seed → receipt, the same seeds each."""
    seeds = list(next(iter(runs.values())))
    value = {term: [_metric(runs[term[0]][seed], term[1]) for seed in seeds] for term in comparison.terms}
    if comparison.correlated:
        x, y = (_centred([value[term] for term in side]) for side in (comparison.plus, comparison.minus))
        return _finding(str(comparison), pearson_interval(x, y, level, len(seeds) - 1), comparison.expected, len(x))
    numbers = [
        sum(value[term][k] for term in comparison.plus)
        - sum(value[term][k] for term in comparison.minus)
        - max((value[term][k] for term in comparison.best), default=0.0)
        for k in range(len(seeds))
    ]
    found = _finding(str(comparison), seed_interval(numbers, level), comparison.expected, len(seeds))
    metrics = {metric for _, metric in comparison.terms}
    every = [receipt for of in runs.values() for receipt in of.values()]
    return replace(found, chance=chance_level(metrics.pop(), every)) if len(metrics) == 1 else found


def verdict_of(findings: Sequence[ComparisonResult]) -> str:
    """The verdict that findings give together."""
    status = {finding.status for finding in findings}
    if status == {"holds"}:
        return "reproduced"
    return "partly" if "holds" in status else "not reproduced" if "fails" in status else "inconclusive"


def pearson_interval(x: Sequence[float], y: Sequence[float], level: float = 0.95, taken: int = 0) -> Interval:
    """Pearson's r with Fisher's interval. taken: degrees of freedom that were used up before, as by centring."""
    found: Any = stats.pearsonr(x, y)  # scipy makes its attributes at run time
    r = float(found.statistic)
    half = float(stats.norm.interval(level)[1]) / math.sqrt(len(x) - taken - 3)  # scipy's own knows no ``taken``
    z = math.atanh(max(-0.999999, min(0.999999, r)))
    return Interval(r, math.tanh(z - half), math.tanh(z + half))


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
                        yield _finding(text, Interval(value, value, value), _expected(check), 0)


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


def _finding(text: str, interval: Interval, expected: Mapping[str, Any], runs: int) -> ComparisonResult:
    """Holds if the whole interval is where it should be, fails if none of it is."""
    (word, bound), (_, low, high) = next(iter(expected.items())), interval
    if word == "within":
        holds, fails = bound[0] <= low and high <= bound[1], high < bound[0] or low > bound[1]
        return ComparisonResult(text, interval, f"within {bound[0]} to {bound[1]}", _status(holds, fails), runs)
    holds, fails = (low > bound, high < bound) if word == "above" else (high < bound, low > bound)
    return ComparisonResult(text, interval, f"{word} {bound}", _status(holds, fails), runs)


def _status(holds: bool, fails: bool) -> str:
    return "holds" if holds else "fails" if fails else "open"
