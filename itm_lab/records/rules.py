"""Rules of the claims: which comparisons each asks for, and the digest that a receipt holds of it.

``book/data/rules.yaml`` explains the fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from itm_lab.paths import Paths
from itm_lab.records.nested_yaml import load_yaml
from itm_utils.errors import input_error

RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
DECLARED = {  # what a rule may say of the protocol of a comparison → the values it may take, the default first
    "budget": ("equal", "last stage", "unequal"),
    "data": ("equal", "unequal"),
    "search": ("equal", "unequal"),
    "checks": ("all", "none"),
}
Term = tuple[str, str]  # variant, metric


@dataclass(frozen=True)
class Comparison:
    """One number per seed: ``plus`` added, ``minus`` taken away, and the largest of ``best`` taken away.

    With ``correlated`` it is Pearson's r of the metrics of ``plus`` and ``minus`` over all runs instead, each number less
    the mean of its seed over the variants. declared: what the rule says of the protocol, such as ``budget: unequal``.
    level_within: the margin within which a difference counts as none; None where the protocol's is meant.
    """

    plus: tuple[Term, ...]
    minus: tuple[Term, ...]
    best: tuple[Term, ...]
    expected: Mapping[str, Any]
    correlated: bool = False
    declared: Mapping[str, str] = field(default_factory=dict)
    level_within: float | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.plus + self.minus + self.best

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants it compares, each once."""
        return tuple(dict.fromkeys(variant for variant, _ in self.terms))

    def __str__(self) -> str:
        if self.correlated:
            return (
                f"r of {self.plus[0][1]} and {self.minus[0][1]} over {', '.join(variant for variant, _ in self.plus)}"
            )
        metrics = {metric for _, metric in self.terms}
        plus, minus, best = (
            [variant if len(metrics) == 1 else f"{variant} {metric}" for variant, metric in side]
            for side in (self.plus, self.minus, self.best)
        )
        taken = [*minus, f"the better of {' and '.join(best)}"] if best else minus
        return (f"{metrics.pop()}: " if len(metrics) == 1 else "") + " − ".join([" + ".join(plus), *taken])


def rule_digest(rule: Mapping[str, Any]) -> str:
    """sha256 of a rule, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(rule, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def comparisons(rule: Mapping[str, Any], dataset: str) -> list[Comparison]:
    """A rule's comparisons on one dataset, base models and metrics written out."""
    found = []
    for entry in rule["comparisons"]:
        if dataset not in entry.get("only", (dataset,)):
            continue
        pair = entry.get("correlate")
        declared = {key: said for key in DECLARED if (said := entry.get(key, rule.get(key)))}
        margin = entry.get("level_within", rule.get("level_within"))
        for metric in ("",) if pair else metrics_of(entry, rule):
            if pair:
                sides = [[f"{variant} @ {pair[axis]}" for variant in pair["variants"]] for axis in "xy"] + [[]]
            else:
                sides = [entry.get(key, []) for key in ("a", "b", "b_best")]
            for base in rule["base_models"][dataset] if "{base}" in str(entry) else ("",):
                plus, minus, best = (
                    tuple(_term(text.replace("{base}", base), metric) for text in side) for side in sides
                )
                found.append(Comparison(plus, minus, best, _expected(entry), bool(pair), declared, margin))
    return found


def metrics_of(entry: Mapping[str, Any], rule: Mapping[str, Any] | None = None) -> list[str]:
    """The metrics an entry asks for; ``R`` stands for the six recalls."""
    wanted = listed(entry.get("metric", (rule or {}).get("metric", "rsum")))
    return [name for metric in wanted for name in (RECALLS if metric == "R" else (metric,))]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _term(text: str, metric: str) -> Term:
    variant, _, own = text.partition(" @ ")
    return variant, own or metric


def _expected(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("above", "below", "within") if key in entry} or {"above": 0}


class RuleBook:
    """The claims' rules and the variants they ask for, from ``book/data`` of a checkout."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        rules, own = self.read("rules"), self.read("foundations")
        self.foundations = {claim["id"]: claim for claim in own["claims"]}
        self.variants, self.datasets, self.checks = rules["variants"], rules["datasets"], rules["tables"]
        self.protocol = rules["protocol"]
        every = rules["rules"] | {name: claim["rule"] for name, claim in self.foundations.items()}
        self.rules = {name: rule | {"protocol": self.protocol} for name, rule in every.items()}

    def read(self, name: str) -> dict[str, Any]:
        """One of the files in ``book/data``, by its name."""
        path = self.paths.book_data / f"{name}.yaml"
        try:
            return load_yaml(path.read_bytes())
        except (OSError, yaml.YAMLError) as error:
            raise input_error(path, " ".join(str(error).split()), "the book's data") from error

    def rules_for(self, chapter: str, variant: str) -> dict[str, str]:
        """Claim → digest of its rule as it stands now, for every claim that a run of this variant is evidence for."""
        asked = [name for name, rule in self.rules.items() if variant in self.variants_of(rule)]
        return {name: rule_digest(self.rules[name]) for name in asked if self.chapter_of(variant) == chapter}

    def variants_of(self, rule: Mapping[str, Any]) -> set[str]:
        """Every variant a rule asks for, on any dataset."""
        wanted = (comparison for dataset in rule.get("datasets", ()) for comparison in comparisons(rule, dataset))
        return {variant for comparison in wanted for variant, _ in comparison.terms}

    def chapter_of(self, variant: str) -> str:
        """The chapter whose list of variants has this one."""
        for chapter, names in self.variants.items():
            if variant in names or "{base} " + variant.partition(" ")[2] in names:
                return chapter
        raise input_error("rules.yaml", f"the variant {variant}", "one of the variants listed at its top")


def rules_for(chapter: str, variant: str, paths: Paths | None = None) -> dict[str, str]:
    """Digests of the rules that a run of this variant is evidence for; none where the package is used without the book."""
    paths = paths or Paths.find_or_none()
    if paths is None or not (paths.book_data / "rules.yaml").is_file():
        return {}
    return RuleBook(paths).rules_for(chapter, variant)
