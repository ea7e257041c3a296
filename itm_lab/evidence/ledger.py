"""From claims, rules and receipts to verdicts.

A rule is written before its runs, and each receipt holds the hash of the rule as it stood when the run began: receipts
of another wording do not count. So a verdict can be changed neither by editing a number, which breaks the receipt's
seal and does not fit its ranks, nor by bending the rule afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from itm_lab.evidence.planned import planned_seeds, seeds_of, variant_of_experiment
from itm_lab.evidence.protocol import DOUBLED, ModelControl, Runs, check_protocol, collapsed, model_of
from itm_lab.evidence.rank_check import check_ranks
from itm_lab.evidence.statistics import image_contributions
from itm_lab.evidence.verdicts import (
    NOT_COMPARABLE,
    VERDICTS,
    ComparisonResult,
    after_holm,
    evaluate,
    printed_findings,
    verdict_of,
)
from itm_lab.paths import Paths
from itm_lab.records.receipts import (
    Identities,
    counts_as_evidence,
    is_old_protocol,
    read_evidence,
    read_named_receipt,
)
from itm_lab.records.rules import Comparison, RuleBook, comparisons, rule_digest
from itm_utils.errors import input_error
from itm_utils.metrics.retrieval import Ranks

__all__ = ["TABLES", "VERDICTS", "Ledger", "Verdict", "verdict"]

TABLES = "paper's tables"
NEAREST_FIRST = (TABLES, "f30k", "coco", "coco 5K", "flickr8k", "scenes")  # to what the papers measured
OLD_PROTOCOL = "old protocol"  # what tables say of receipts that are too old to be checked
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
        told = (
            f"{one.status:5}  {one}; expected {one.expected}" + "".join(f"; {remark}" for remark in one.remarks())
            for one in self.findings
        )
        lines = ("\n" + fill(line, 84, initial_indent="   ", subsequent_indent=" " * 10) for line in told)
        return f"{self.id} on {self.dataset}: {self.verdict}" + f" ({self.reason})" * bool(self.reason) + "".join(lines)


def verdict(claim: str, dataset: str = "scenes") -> Verdict:
    """The verdict on a claim as the ledger page shows it, for chapters."""
    return _the_book().verdict(claim, dataset)


@cache
def _the_book() -> Ledger:
    """The ledger of this repository, read once: a chapter asks for several verdicts."""
    return Ledger()


def _of_one_protocol(runs: dict[int, Run]) -> dict[int, Run]:
    """The runs that can be checked, where there are any; else those of the old protocol."""
    return {seed: run for seed, run in runs.items() if not is_old_protocol(run[1])} or runs


def _contributions(path: Path, receipt: Mapping[str, Any], metric: str) -> np.ndarray:
    """(i,) what each test image gives to a recall of a run."""
    return _of_ranks(path, receipt["ranks"], metric)


@lru_cache(maxsize=4096)
def _of_ranks(path: Path, digest: str, metric: str) -> np.ndarray:
    """The same, once for all comparisons. digest: that of the ranks beside the receipt."""
    evidence = read_evidence(path)
    return image_contributions(Ranks(evidence.i2t, evidence.t2i), evidence.owner, metric)


def _numbers(seeds: Iterable[int]) -> str:
    """Seeds as text: 5-9 where they follow each other."""
    seeds = sorted(seeds)
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


class Ledger(RuleBook):
    """Claims, their rules and their receipts."""

    def __init__(self, paths: Paths | Path | None = None) -> None:
        super().__init__(paths if isinstance(paths, Paths) else Paths(Path(paths)) if paths else Paths.find())
        self.root = self.paths.root
        self.claims = {claim["id"]: claim for claim in self.read("claims")["claims"]}
        self._alone: dict[tuple[str, str], tuple[tuple[ComparisonResult, ...], tuple[str, ...]] | str] = {}
        self._families: dict[tuple[str, str], dict[str, tuple[ComparisonResult, ...]]] = {}

    @cached_property
    def results(self) -> dict[str, Any]:
        """Paper → its tables, as in published_tables.yaml."""
        return self.read("published_tables")["papers"]

    @cached_property
    def plan(self) -> Mapping[tuple[str, str, str], tuple[int, ...]]:
        """(chapter, variant, dataset) → the seeds that the experiment files plan."""
        return planned_seeds(self.root)

    @cached_property
    def receipts(self) -> dict[tuple[str, str, str], dict[int, Run]]:
        """(chapter, variant, dataset) → seed → path and receipt, each of them checked and of its own identity.

        Where a variant has receipts of the protocol that can be checked, those of the old one are left out.
        """
        found: dict[tuple[str, str, str], dict[int, Run]] = {}
        identities = Identities()
        for path in sorted(self.paths.receipts.glob("*/*.json")):
            receipt = read_named_receipt(path, self.paths.receipts)
            if place := self.place(receipt, path):
                identities.add(receipt, path)
                self.check_seed(receipt, place, path)
                runs = found.setdefault((receipt["chapter"], receipt["variant"], place), {})
                if (known := runs.setdefault(receipt["seed"], (path, receipt))[0]) != path:
                    expected = f"one receipt for each variant, dataset and seed ({known.name} is this one's)"
                    raise input_error(path, "a second receipt of one run", expected, "Remove one of them.")
        return {key: _of_one_protocol(runs) for key, runs in found.items()}

    def check_seed(self, receipt: Mapping[str, Any], place: str, path: Path) -> None:
        """Refuse a seed that the experiment files do not plan: whoever may add seeds may choose among them."""
        planned = seeds_of(self.plan, receipt["chapter"], receipt["variant"], place)
        if planned is not None and not is_old_protocol(receipt) and receipt["seed"] not in planned:
            where = f"experiments/{receipt['chapter'].partition('_')[2]}.yaml"
            expected = f"a seed that {where} plans for {receipt['variant']} ({_numbers(planned)})"
            raise input_error(path, f"seed {receipt['seed']}", expected, "Plan it before its run, or remove it.")

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
        if rule["kind"] == "identity":
            return Verdict(claim, "not run", dataset, "it holds for any model, so no run decides it")
        if dataset not in rule.get("datasets", ()):
            return Verdict(claim, "not run", dataset, "the rule does not speak of this dataset")
        found = self._found(claim, dataset)
        if isinstance(found, str):
            return Verdict(claim, "not run", dataset, found)
        findings, used = self._corrected(self.paper_of(claim), dataset)[claim], found[1]
        word = verdict_of(findings)
        reason = "; ".join(dict.fromkeys(why for one in findings for why in one.checks.failed))
        return Verdict(claim, word, dataset, reason if word == NOT_COMPARABLE else "", findings, used)

    def paper_of(self, claim: str) -> str:
        """The paper that makes a claim."""
        return (self.claims | self.foundations)[claim]["paper"]

    def _corrected(self, paper: str, dataset: str) -> dict[str, tuple[ComparisonResult, ...]]:
        """Claim → comparisons of all decided claims of a paper on a dataset, after Holm's correction over all it asks."""
        if (paper, dataset) not in self._families:
            asked = [
                c for c, rule in self.rules.items() if self.paper_of(c) == paper and dataset in rule.get("datasets", ())
            ]
            found = {claim: self._found(claim, dataset) for claim in asked}
            decided = {claim: one[0] for claim, one in found.items() if not isinstance(one, str)}
            self._families[paper, dataset] = after_holm(decided, len(asked), self.protocol["level"])
        return self._families[paper, dataset]

    def _found(self, claim: str, dataset: str) -> tuple[tuple[ComparisonResult, ...], tuple[str, ...]] | str:
        """The comparisons of a claim, each alone, and the receipts they rest on; or why there are none."""
        if (claim, dataset) not in self._alone:
            self._alone[claim, dataset] = self._compare(claim, dataset)
        return self._alone[claim, dataset]

    def _compare(self, claim: str, dataset: str) -> tuple[tuple[ComparisonResult, ...], tuple[str, ...]] | str:
        findings, used = [], set()
        for comparison in comparisons(self.rules[claim], dataset):
            runs, lacking = self._runs(claim, comparison, dataset)
            if lacking:
                return lacking
            used |= {path.relative_to(self.root).as_posix() for of in runs.values() for path, _ in of.values()}
            findings.append(self._evaluate(comparison, runs, dataset))
        return tuple(findings), tuple(sorted(used))

    def _evaluate(
        self, comparison: Comparison, runs: Mapping[str, Mapping[int, Run]], dataset: str
    ) -> ComparisonResult:
        """One comparison with its checks; not comparable where one of them fails."""
        receipts = {variant: {seed: receipt for seed, (_, receipt) in of.items()} for variant, of in runs.items()}
        found = evaluate(
            comparison, receipts, self.protocol, lambda variant, seed, name: _contributions(*runs[variant][seed], name)
        )  # fmt: skip
        trained, doubled = self._trained(receipts, dataset), self._doubled(receipts, dataset)
        models = self._models(trained, dataset)
        checks = check_protocol(comparison, trained, doubled, self.protocol, self._baselines(trained), models)
        names = tuple(collapsed(receipts, self.protocol))
        status = NOT_COMPARABLE if checks.failed else found.status
        return replace(found, checks=checks, collapsed=names, status=status)

    def _trained(self, runs: Runs, dataset: str) -> dict[str, dict[int, Mapping[str, Any]]]:
        """The runs whose training is to be checked: the members of an ensemble instead of the ensemble itself."""
        found: dict[str, dict[int, Mapping[str, Any]]] = {}
        for variant, of in runs.items():
            for seed, receipt in of.items():
                for member, own in [m.rpartition(", seed ")[::2] for m in receipt["parameters"].get("members", ())]:
                    known = self.receipts.get((receipt["chapter"], member, dataset), {})
                    if own.isdigit() and int(own) in known:
                        found.setdefault(member, {})[int(own)] = known[int(own)][1]
                if receipt["models"] == 1 or "members" not in receipt["parameters"]:
                    found.setdefault(variant, {})[seed] = receipt
        return found

    def _baselines(self, runs: Runs) -> dict[str, str]:
        """Record of a search → the variant that got as many runs beside it, as the record says."""
        found: dict[str, str] = {}
        for search in (one for of in runs.values() for receipt in of.values() for one in receipt.get("search", ())):
            path = self.paths.receipts / search["record"]
            if search["record"] in found or not path.is_file():
                continue
            record = json.loads(path.read_text(encoding="utf-8"))
            variant = variant_of_experiment(self.root, record["select"].get("baseline", ""))
            if variant and len(record.get("baseline_runs", ())) == search["runs"]:
                found[search["record"]] = variant
        return found

    def _doubled(self, runs: Runs, dataset: str) -> dict[str, Mapping[str, Any]]:
        """Variant → its control with twice the captions, where there is one: of a seed it shares, if any."""
        found = {}
        for variant, of in self._trained(runs, dataset).items():
            known = self._current(next(iter(of.values()))["chapter"], DOUBLED.format(variant), dataset)
            if known:
                found[variant] = known[min(known, key=lambda seed: (seed not in of, seed))]
        return found

    def _models(self, runs: Runs, dataset: str) -> dict[str, ModelControl]:
        """Variant → the control of its model, where it has one: the rules say which variant that is."""
        found = {}
        for variant, of in runs.items():
            chapter = next(iter(of.values()))["chapter"]
            model = model_of(variant, self.protocol["doubled_controls"].get(chapter, {}))
            own = self._current(chapter, model, dataset) if model else {}
            if model and own and (control := self._doubled({model: own}, dataset)):
                found[variant] = ModelControl(model, own, control[model])
        return found

    def _current(self, chapter: str, variant: str, dataset: str) -> dict[int, Mapping[str, Any]]:
        """Seed → receipt of a variant, of the protocol that can be checked."""
        every = self.receipts.get((chapter, variant, dataset), {})
        return {seed: receipt for seed, (_, receipt) in every.items() if not is_old_protocol(receipt)}

    def _runs(self, claim: str, comparison: Comparison, dataset: str) -> tuple[dict[str, dict[int, Run]], str]:
        """Variant → seed → run at all seeds that are planned for its variants; and, if one is missing, why."""
        need = self.needed(comparison, dataset, self.rules[claim]["datasets"][dataset])
        seeds = self.seeds(comparison, dataset, need)
        for variant in comparison.variants:
            there = self.receipts.get((self.chapter_of(variant), variant, dataset), {})
            if there and all(is_old_protocol(receipt) for _, receipt in there.values()):
                return {}, f"{variant} has receipts of the {OLD_PROTOCOL} only"
        if len(seeds) < need:
            return {}, f"the experiment files plan {len(seeds)} of the {need} seeds that the rule asks for"
        digest, runs = rule_digest(self.rules[claim]), {}
        for variant, metric in comparison.terms:
            there = self.receipts.get((self.chapter_of(variant), variant, dataset), {})
            there = {s: run for s, run in there.items() if set(metric.split("-")) <= set(run[1]["metrics"])}
            new = {s: run for s, run in there.items() if not is_old_protocol(run[1])}
            valid = {
                s: run
                for s, run in new.items()
                if not counts_as_evidence(run[1]) and run[1]["rules"].get(claim) == digest
            }
            if missing := [seed for seed in seeds if seed not in valid]:
                if unclean := [why for seed in missing if seed in new and (why := counts_as_evidence(new[seed][1]))]:
                    return {}, f"runs of {variant} do not count: {unclean[0]}"
                if any(seed in new for seed in missing):
                    return {}, "the rule is younger than its receipts"
                return {}, f"{variant} lacks {'all' if len(missing) == len(seeds) else 'the'} seeds {_numbers(missing)}"
            runs[variant] = {seed: valid[seed] for seed in seeds}
        return runs, ""

    def needed(self, comparison: Comparison, dataset: str, least: int) -> int:
        """How many seeds a comparison must have: those of its rule, more where the protocol asks so of all its variants."""
        more = self.protocol["more_seeds"].get(dataset, {})
        return max([least, *(number for number, of in more.items() if set(comparison.variants) <= set(of))])

    def seeds(self, comparison: Comparison, dataset: str, need: int) -> list[int]:
        """The seeds of a comparison: those that the experiment files plan for all its variants.

        A variant of which they say nothing takes those of the others; where none is planned, the first that are needed.
        """
        known = [seeds_of(self.plan, self.chapter_of(variant), variant, dataset) for variant in comparison.variants]
        planned = [set(seeds) for seeds in known if seeds is not None]
        return sorted(set.intersection(*planned)) if planned else list(range(need))

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
