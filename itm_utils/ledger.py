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

import yaml

from itm_utils.errors import problem
from itm_utils.receipts import read_evidence, read_receipt
from itm_utils.rules import Comparison, Finding, comparisons, printed_findings, rule_digest, weigh, word_for

__all__ = ["TABLES", "WORDS", "Ledger", "Verdict", "rule_digest", "rules_for", "verdict"]

WORDS = ("reproduced", "partly", "not reproduced", "inconclusive", "not run")
TABLES = "paper's tables"
NEAREST_FIRST = (TABLES, "f30k", "coco", "coco 5K", "flickr8k", "scenes")  # to what the papers measured
ROOT = Path(__file__).resolve().parent.parent
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
    findings: tuple[Finding, ...] = ()
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


def rules_for(chapter: str, arm: str) -> dict[str, str]:
    """Claim → digest of its rule as it stands now, for every claim that a run of this arm is evidence for."""
    if not (ROOT / "book/data/rules.yaml").is_file():  # the package without the book
        return {}
    return _the_book().rules_for(chapter, arm)


def verdict(claim: str, dataset: str = "scenes") -> Verdict:
    """The verdict on a claim as the ledger page shows it, for chapters."""
    return _the_book().verdict(claim, dataset)


@cache
def _the_book() -> Ledger:
    """The ledger of this repository, read once: a chapter asks for several verdicts."""
    return Ledger()


class Ledger:
    """Claims, their rules and their receipts. root: a folder with ``book/data`` and ``results``."""

    def __init__(self, root: str | Path = ROOT) -> None:
        self.root = Path(root)
        rules, own = self.read("rules"), self.read("foundations")
        self.claims = {claim["id"]: claim for claim in self.read("claims")["claims"]}
        self.foundations = {claim["id"]: claim for claim in own["claims"]}
        self.arms, self.datasets, self.checks = rules["arms"], rules["datasets"], rules["tables"]
        self.rules = {name: rule | {"test": rules["test"]} for name, rule in rules["rules"].items()}
        self.rules |= {name: claim["rule"] | {"test": own["test"]} for name, claim in self.foundations.items()}

    def read(self, name: str) -> dict[str, Any]:
        """One of the files in ``book/data``, by its name."""
        path = self.root / f"book/data/{name}.yaml"
        try:
            return yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, yaml.YAMLError) as error:
            raise problem(path, " ".join(str(error).split()), "the book's data") from error

    @cached_property
    def results(self) -> dict[str, Any]:
        """Paper → its tables, as in results.yaml."""
        return self.read("results")["papers"]

    @cached_property
    def receipts(self) -> dict[tuple[str, str, str], dict[int, Run]]:
        """(chapter, arm, dataset) → seed → path and receipt, each of them checked."""
        found: dict[tuple[str, str, str], dict[int, Run]] = {}
        for path in sorted((self.root / "results").glob("*/*.json")):
            receipt = read_receipt(path)
            if place := self.place(receipt, path):
                found.setdefault((receipt["chapter"], receipt["arm"], place), {})[receipt["seed"]] = (path, receipt)
        return found

    def place(self, receipt: Mapping[str, Any], path: Path) -> str | None:
        """The dataset a receipt speaks for, None if for none; other data under a known name are refused."""
        of, protocol = receipt["dataset"], receipt["protocol"]
        name = of["name"].removesuffix("_precomp")
        if name not in self.datasets or of["split"] not in ("test", "testall"):
            return None
        known = self.datasets[name]
        if of["fingerprint"] != (wanted := known.get("fingerprint", of["fingerprint"])):
            raise problem(
                path, f"{name} with fingerprint {of['fingerprint'][:12]}", wanted[:12], "These are other data."
            )
        if name == "coco" and protocol not in ("1K", "5K"):
            return None
        if receipt["ranks"] is None:
            raise problem(path, "no ranks", "a receipt whose recalls can be computed again")
        if (pictures := len(read_evidence(path).i2t)) != known["images"]:
            raise problem(path, f"ranks of {pictures} pictures", f"the {known['images']} of {name}'s test split")
        return "coco 5K" if protocol == "5K" else name

    def rules_for(self, chapter: str, arm: str) -> dict[str, str]:
        """See :func:`rules_for`."""
        asked = [name for name, rule in self.rules.items() if arm in self.arms_of(rule)]
        return {name: rule_digest(self.rules[name]) for name in asked if self.chapter_of(arm) == chapter}

    def arms_of(self, rule: Mapping[str, Any]) -> set[str]:
        """Every arm a rule asks for, on any dataset."""
        wanted = (comparison for dataset in rule.get("datasets", ()) for comparison in comparisons(rule, dataset))
        return {arm for comparison in wanted for arm, _ in comparison.terms}

    def chapter_of(self, arm: str) -> str:
        """The chapter whose list of arms has this one."""
        for chapter, names in self.arms.items():
            if arm in names or "{host} " + arm.partition(" ")[2] in names:
                return chapter
        raise problem("rules.yaml", f"the arm {arm}", "one of the arms listed at its top")

    def verdict(self, claim: str, dataset: str | None = None) -> Verdict:
        """The verdict on one dataset; without one, on the dataset nearest to the paper's that has one."""
        if claim not in self.rules:
            raise problem("ledger", f"the claim {claim}", f"one of {', '.join(self.rules)}")
        if dataset is not None:
            return self._judge(claim, dataset)
        every = self.verdicts(claim)
        decided = [one for one in every if one.verdict != "not run"]
        return min(decided, key=lambda one: NEAREST_FIRST.index(one.dataset)) if decided else every[0]

    def verdicts(self, claim: str) -> list[Verdict]:
        """One verdict for each dataset the rule names."""
        return [self._judge(claim, dataset) for dataset in self.rules[claim].get("datasets", (TABLES,))]

    def printed(self, claim: str) -> list[Finding]:
        """What the paper's own tables say about a claim; empty where they do not speak of it."""
        return list(printed_findings(self.checks.get(claim, ()), self.results))

    def _judge(self, claim: str, dataset: str) -> Verdict:
        rule = self.rules[claim]
        if rule["kind"] == "table" and dataset == TABLES:
            findings = self.printed(claim)
            return Verdict(claim, word_for(findings), TABLES, "", tuple(findings), ("book/data/results.yaml",))
        if dataset not in rule.get("datasets", ()):
            return Verdict(claim, "not run", dataset, "the rule does not speak of this dataset")
        findings, used = [], set()
        for comparison in comparisons(rule, dataset):
            runs, lacking = self._runs(claim, comparison, dataset)
            if lacking:
                return Verdict(claim, "not run", dataset, lacking)
            used |= {path.relative_to(self.root).as_posix() for arm in runs.values() for path, _ in arm.values()}
            receipts = {arm: {seed: receipt for seed, (_, receipt) in of.items()} for arm, of in runs.items()}
            findings.append(weigh(comparison, receipts, rule["test"]["level"]))
        return Verdict(claim, word_for(findings), dataset, "", tuple(findings), tuple(sorted(used)))

    def _runs(self, claim: str, comparison: Comparison, dataset: str) -> tuple[dict[str, dict[int, Run]], str]:
        """Arm → seed → run at the seeds that all arms have; and, if these do not suffice, why."""
        rule, runs, stale = self.rules[claim], {}, False
        digest, need = rule_digest(rule), rule["datasets"][dataset]
        for arm, metric in comparison.terms:
            there = self.receipts.get((self.chapter_of(arm), arm, dataset), {})
            there = {s: run for s, run in there.items() if set(metric.split("-")) <= set(run[1]["metrics"])}
            valid = {s: run for s, run in there.items() if run[1]["rules"].get(claim) == digest}
            stale |= len(valid) < len(there)
            runs[arm] = {s: run for s, run in valid.items() if s in runs.get(arm, valid)}
        shared = sorted(set.intersection(*map(set, runs.values())))
        if len(shared) >= need:
            return {arm: {seed: of[seed] for seed in shared} for arm, of in runs.items()}, ""
        if stale:
            return {}, "the rule is younger than its receipts"
        fewest = min(runs, key=lambda arm: len(runs[arm]))
        who, number = (fewest, len(runs[fewest])) if len(runs[fewest]) < need else ("every arm", len(shared))
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
