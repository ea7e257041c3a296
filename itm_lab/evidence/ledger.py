"""From claims, rules and receipts to verdicts.

A rule is written before its runs, and each receipt holds the hash of the rule as it stood when the run began: receipts
of another wording do not count. So a verdict can be changed neither by editing a number, which breaks the receipt's
seal and does not fit its ranks, nor by bending the rule afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from textwrap import fill
from typing import Any

from itm_lab.evidence.rank_check import check_ranks
from itm_lab.evidence.verdicts import ComparisonResult, evaluate, printed_findings, verdict_of
from itm_lab.paths import Paths
from itm_lab.records.receipts import Identities, is_old_protocol, read_evidence, read_named_receipt
from itm_lab.records.rules import Comparison, RuleBook, comparisons, rule_digest
from itm_utils.errors import input_error

__all__ = ["TABLES", "VERDICTS", "Ledger", "Verdict", "verdict"]

VERDICTS = ("reproduced", "partly", "not reproduced", "inconclusive", "not run")
TABLES = "paper's tables"
NEAREST_FIRST = (TABLES, "f30k", "coco", "coco 5K", "flickr8k", "scenes")  # to what the papers measured
Run = tuple[Path, dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """A word, the dataset it speaks for and what it rests on. receipts: paths below the repository.

    reason: why there is no run; empty where there is one.
    """

    id: str
    verdict: str
    dataset: str
    reason: str = ""
    findings: tuple[ComparisonResult, ...] = ()
    receipts: tuple[str, ...] = ()

    @property
    def evidence(self) -> str:
        return "; ".join(map(str, self.findings)) or self.reason

    def __str__(self) -> str:
        return f"{self.id} on {self.dataset}: {self.verdict} ({self.evidence})"

    def report(self) -> str:
        """Line by line: the word, then what each comparison gave, whether it holds and what it should be."""
        told = (f"{one.status:5}  {one}; expected {one.expected}" for one in self.findings)
        lines = ("\n" + fill(line, 84, initial_indent="   ", subsequent_indent=" " * 10) for line in told)
        return f"{self.id} on {self.dataset}: {self.verdict}" + f" ({self.reason})" * bool(self.reason) + "".join(lines)


def verdict(claim: str, dataset: str = "scenes") -> Verdict:
    """The verdict on a claim as the ledger page shows it, for chapters."""
    return _the_book().verdict(claim, dataset)


@cache
def _the_book() -> Ledger:
    """The ledger of this repository, read once: a chapter asks for several verdicts."""
    return Ledger()


class Ledger(RuleBook):
    """Claims, their rules and their receipts."""

    def __init__(self, paths: Paths | Path | None = None) -> None:
        super().__init__(paths if isinstance(paths, Paths) else Paths(Path(paths)) if paths else Paths.find())
        self.root = self.paths.root
        self.claims = {claim["id"]: claim for claim in self.read("claims")["claims"]}

    @cached_property
    def results(self) -> dict[str, Any]:
        """Paper → its tables, as in published_tables.yaml."""
        return self.read("published_tables")["papers"]

    @cached_property
    def receipts(self) -> dict[tuple[str, str, str], dict[int, Run]]:
        """(chapter, variant, dataset) → seed → path and receipt, each of them checked and of its own identity."""
        found: dict[tuple[str, str, str], dict[int, Run]] = {}
        identities = Identities()
        for path in sorted(self.paths.receipts.glob("*/*.json")):
            receipt = read_named_receipt(path, self.paths.receipts)
            if place := self.place(receipt, path):
                identities.add(receipt, path)
                runs = found.setdefault((receipt["chapter"], receipt["variant"], place), {})
                if (known := runs.setdefault(receipt["seed"], (path, receipt))[0]) != path:
                    expected = f"one receipt for each variant, dataset and seed ({known.name} is this one's)"
                    raise input_error(path, "a second receipt of one run", expected, "Remove one of them.")
        return found

    def place(self, receipt: Mapping[str, Any], path: Path) -> str | None:
        """The dataset a receipt speaks for, None if for none; other data under a known name are refused."""
        of, protocol = receipt["dataset"], receipt["protocol"]
        name = of["name"].removesuffix("_precomp")
        if name not in self.datasets or of["split"] not in ("test", "testall"):
            return None
        known = self.datasets[name]
        mark = "old_fingerprint" if is_old_protocol(receipt) else "fingerprint"
        if of["fingerprint"] != (wanted := known.get(mark, of["fingerprint"])):
            raise input_error(
                path, f"{name} with fingerprint {of['fingerprint'][:12]}", wanted[:12], "These are other data."
            )
        if name == "coco" and protocol not in ("1K", "5K"):
            return None
        if receipt["ranks"] is None:
            raise input_error(path, "no ranks", "a receipt whose recalls can be computed again")
        evidence = read_evidence(path)
        if (images := len(evidence.i2t)) != known["images"]:
            raise input_error(path, f"ranks of {images} images", f"the {known['images']} of {name}'s test split")
        if name != "coco" and protocol != f"all {images}":
            raise input_error(path, f"protocol {protocol} on {name}", f"all {images}: only COCO is scored in folds")
        check_ranks(receipt, evidence, path)
        return "coco 5K" if protocol == "5K" else name

    def verdict(self, claim: str, dataset: str | None = None) -> Verdict:
        """The verdict on one dataset; without one, on the dataset nearest to the paper's that has one."""
        if claim not in self.rules:
            raise input_error("ledger", f"the claim {claim}", f"one of {', '.join(self.rules)}")
        if dataset is not None:
            return self._judge(claim, dataset)
        every = self.verdicts(claim)
        decided = [one for one in every if one.verdict != "not run"]
        return min(decided, key=lambda one: NEAREST_FIRST.index(one.dataset)) if decided else every[0]

    def verdicts(self, claim: str) -> list[Verdict]:
        """One verdict for each dataset the rule names."""
        return [self._judge(claim, dataset) for dataset in self.rules[claim].get("datasets", (TABLES,))]

    def printed(self, claim: str) -> list[ComparisonResult]:
        """What the paper's own tables say about a claim; empty where they do not speak of it."""
        return list(printed_findings(self.checks.get(claim, ()), self.results))

    def _judge(self, claim: str, dataset: str) -> Verdict:
        rule = self.rules[claim]
        if rule["kind"] == "table" and dataset == TABLES:
            findings = self.printed(claim)
            return Verdict(
                claim, verdict_of(findings), TABLES, "", tuple(findings), ("book/data/published_tables.yaml",)
            )
        if dataset not in rule.get("datasets", ()):
            return Verdict(claim, "not run", dataset, "the rule does not speak of this dataset")
        findings, used = [], set()
        for comparison in comparisons(rule, dataset):
            runs, lacking = self._runs(claim, comparison, dataset)
            if lacking:
                return Verdict(claim, "not run", dataset, lacking)
            used |= {
                path.relative_to(self.root).as_posix() for variant in runs.values() for path, _ in variant.values()
            }
            receipts = {variant: {seed: receipt for seed, (_, receipt) in of.items()} for variant, of in runs.items()}
            findings.append(evaluate(comparison, receipts, rule["test"]["level"]))
        return Verdict(claim, verdict_of(findings), dataset, "", tuple(findings), tuple(sorted(used)))

    def _runs(self, claim: str, comparison: Comparison, dataset: str) -> tuple[dict[str, dict[int, Run]], str]:
        """Variant → seed → run at the seeds that all variants have; and, if these do not suffice, why."""
        rule, runs, stale = self.rules[claim], {}, False
        digest, need = rule_digest(rule), rule["datasets"][dataset]
        for variant, metric in comparison.terms:
            there = self.receipts.get((self.chapter_of(variant), variant, dataset), {})
            there = {s: run for s, run in there.items() if set(metric.split("-")) <= set(run[1]["metrics"])}
            valid = {s: run for s, run in there.items() if run[1]["rules"].get(claim) == digest}
            stale |= len(valid) < len(there)
            runs[variant] = {s: run for s, run in valid.items() if s in runs.get(variant, valid)}
        shared = sorted(set.intersection(*map(set, runs.values())))
        if len(shared) >= need:
            return {variant: {seed: of[seed] for seed in shared} for variant, of in runs.items()}, ""
        if stale:
            return {}, "the rule is younger than its receipts"
        fewest = min(runs, key=lambda variant: len(runs[variant]))
        who, number = (fewest, len(runs[fewest])) if len(runs[fewest]) < need else ("every variant", len(shared))
        return {}, f"{who} has {number} of {need} seeds"

    def entry(self, claim: str) -> dict[str, Any]:
        """One claim for ``itm ledger --json``; ``verdicts`` has every dataset, the rest the one nearest to the paper."""
        chosen, rule = self.verdict(claim), self.rules[claim]
        every = [
            {"dataset": one.dataset, "verdict": one.verdict, "evidence": one.evidence, "receipts": list(one.receipts)}
            for one in self.verdicts(claim)
        ]
        return {
            "id": claim,
            "claim": (self.claims | self.foundations)[claim]["claim"],
            "verdict": chosen.verdict,
            "dataset": chosen.dataset,
            "rule": rule | {"sha256": rule_digest(rule)},
            "receipts": list(chosen.receipts),
            "verdicts": every,
        }

    def lines(self, claims: Mapping[str, Any]) -> Iterator[str]:
        """The ledger as text: a line a claim and dataset with a verdict, or one that says what is missing."""
        for claim in claims:
            every = self.verdicts(claim)
            for one in [v for v in every if v.verdict != "not run"] or [every[0]]:
                held = sum(finding.status == "holds" for finding in one.findings)
                why = one.reason or f"{held} of {len(one.findings)} comparisons hold"
                yield f"{claim:9} {one.verdict:15} {one.dataset:15} {why}"
