"""Whether a receipt that somebody brings may join the ledger, and whether those that are there belong there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.rank_check import check_circumstances, check_intervals, check_ranks
from itm_lab.experiments.experiment_files import Experiment, read_experiments
from itm_lab.experiments.plan import plan
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import (
    Identities,
    counts_as_evidence,
    is_old_protocol,
    read_evidence,
    read_named_receipt,
    read_receipt,
    receipt_path,
)
from itm_utils.errors import input_error
from itm_utils.files import read_text

SET_ASIDE = "set_aside"  # receipts that no table or verdict reads, with the reason beside them
CHOICES = "choices"  # records of what searches chose: checked against the receipts of their runs
SAMPLED = 40  # of so many receipts of the old protocol one has its intervals computed again: 50 ms each


def check_folder(root: Path) -> str:
    """One line about all receipts of a checkout; the first that may not be there raises its problem.

    Each lies where its content says, once; it fits its seal and its ranks; no two seeds of a variant have the same ranks.
    Those of today's protocol also have the intervals of their ranks, the settings of their experiment, a commit of this
    repository, and ranks that no other variant has.
    """
    ledger, identities, variants = Ledger(root), Identities(), VariantRanks(root)
    folder, seals = ledger.paths.receipts, {}
    apart = {SET_ASIDE, CHOICES}
    paths = [path for path in sorted(folder.rglob("*.json")) if apart.isdisjoint(path.relative_to(folder).parts)]
    for number, path in enumerate(paths):
        receipt = read_named_receipt(path, folder)
        identities.add(receipt, path)
        seals[receipt["seal"]] = receipt
        new = not is_old_protocol(receipt)
        if receipt["ranks"] is not None:
            check_ranks(receipt, evidence := read_evidence(path), path)
            if new or number % SAMPLED == 0:
                check_intervals(receipt, evidence, path)
        if new:
            variants.add(receipt, path)
            check_circumstances(root, receipt, path)
            check_settings(ledger, receipt, path)
    for path in sorted(folder.glob(f"*/{CHOICES}/*.json")):
        check_choice(path, seals)
    counted = sum(len(runs) for runs in ledger.receipts.values())  # reading them checks data and number of images
    return f"{folder}: {len(paths)} receipts good; {counted} of them on a test split that verdicts speak of"


def check_choice(path: Path, seals: Mapping[str, Mapping[str, Any]]) -> None:
    """Every run that a recorded choice speaks of has its receipt, by its seal, with that seed and that number on dev."""
    record = json.loads(read_text(path, "the record of a choice, as `itm run` writes it"))
    for run in [*record["runs"], *record["baseline_runs"]]:
        where = f"the receipt of seed {run['seed']}, {run['setting']}"
        if (receipt := seals.get(run["seal"])) is None:
            raise input_error(path, "a run without a receipt", where)
        known = {"seed": receipt["seed"], "rsum": receipt["metrics"]["rsum"]["value"]}
        if differing := [name for name, value in known.items() if run[name] != value]:
            raise input_error(path, f"{differing[0]} {run[differing[0]]}", f"{known[differing[0]]}, as in {where}")


def check_receipts(root: Path, paths: list[Path]) -> Iterator[str]:
    """One line for each file; the first file that may not join raises its problem."""
    ledger = Ledger(root)
    for path in paths:
        yield check_one(ledger, path)


def check_one(ledger: Ledger, path: Path) -> str:
    """What a receipt is evidence for, once it has passed: form, seal and ranks, name, data, settings, rules."""
    receipt = read_receipt(path)
    if path.name != (name := receipt_path(receipt, "").name):
        raise input_error(path, "a receipt under another name", name)
    place = ledger.place(receipt, path)
    if place is None:
        data = receipt["dataset"]
        known = f"the test split of {', '.join(ledger.datasets)} (of coco: testall)"
        raise input_error(path, f"{data['name']} {data['split']}, protocol {receipt['protocol']}", known)
    check_intervals(receipt, read_evidence(path), path)
    check_circumstances(ledger.root, receipt, path)
    check_fingerprint(ledger, receipt, path)
    check_settings(ledger, receipt, path)
    ledger.check_seed(receipt, place, path)
    if reason := counts_as_evidence(receipt):
        raise input_error(path, f"a run that verdicts do not count: {reason}", "a run from a clean checkout")
    present = ledger.rules_for(receipt["chapter"], receipt["variant"])
    for claim in sorted(present.keys() | receipt["rules"].keys()):
        if receipt["rules"].get(claim) != present.get(claim):
            raise input_error(
                path, f"another rule of {claim}", "the rule as it stands", "It changed; run again under it."
            )
    rsum = receipt["metrics"].get("rsum", {}).get("value", float("nan"))
    counts = ", ".join(present) or "no claim"
    return f"{path}: good; {receipt['variant']}, seed {receipt['seed']}, {place}, rsum {rsum:.1f}; counts for {counts}"


def check_fingerprint(ledger: Ledger, receipt: Mapping[str, Any], path: Path) -> None:
    """Receipts of one dataset and protocol come from the same files; the first one to come sets the mark."""
    place = ledger.place(receipt, path)
    for (_, _, dataset), runs in ledger.receipts.items():
        for known, other in runs.values() if dataset == place else ():
            if is_old_protocol(other) != is_old_protocol(receipt):
                continue  # their fingerprints were computed in different ways
            if other["dataset"]["fingerprint"] != receipt["dataset"]["fingerprint"]:
                raise input_error(
                    path, "another fingerprint of its data", f"that of {known.name}", "These are other data."
                )


def check_settings(ledger: Ledger, receipt: Mapping[str, Any], path: Path) -> None:
    """The parameters are those of the experiment with this variant and dataset; of an ensemble its members are known."""
    chapter, data, variant = receipt["chapter"], receipt["dataset"]["name"], receipt["variant"]
    experiments = read_experiments(ledger.root, chapter.partition("_")[2]).values()
    here = [one for one in experiments if Path(one.settings["dataset"]).name == data]
    known = {one.settings["variant"]: one for one in here}
    where = f"experiments of {chapter} on {data}"
    if receipt["models"] > 1:
        if variant not in {*(one.ensemble for one in here), *ledger.variants.get(chapter, ())}:
            raise input_error(path, f"the ensemble {variant}", f"one that {where} or rules.yaml name")
        members = [member.rpartition(", seed ")[0] for member in receipt["parameters"].get("members", [""])]
        if unknown := [member for member in members if member not in known]:
            raise input_error(path, f"the member {unknown[0]!r}", f"variants of {where}")
        return
    plain, changes = named_changes(receipt)
    if plain not in known:
        raise input_error(
            path, f"the variant {plain}", f"one of {where}: {', '.join(sorted(known)) or 'there are none'}"
        )
    wanted, found = settings_asked(ledger, known[plain], receipt["seed"], changes), receipt["parameters"]
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            right = f"{wanted.get(name)!r} as in {known[plain].name}"
            raise input_error(path, f"{name} = {found.get(name)!r}", right, "Other settings are another variant.")


def named_changes(receipt: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The variant of a run, and what its name says was changed: ``SCAN t2i AVG learning_rate=0.01`` on dev.

    On a test split nothing may be: a changed variant is none of an experiment.
    """
    if receipt["dataset"]["split"] != "dev":
        return receipt["variant"], []
    plain, *changes = re.split(r" (?=[a-z][a-z0-9_]*=)", receipt["variant"])
    return plain, [*changes, "evaluate_on=dev"]


def settings_asked(ledger: Ledger, experiment: Experiment, seed: int, changes: list[str]) -> dict[str, Any]:
    """The parameters that `itm run` gives a run of an experiment, with what searches chose for it."""
    (job,) = plan(ledger.root, [experiment.name], "", str(seed), changes, [], None, ledger.paths.receipts)
    return settings_of(job.parameters)


class VariantRanks:
    """Ranks seen so far: no two variants of a chapter have the same on one dataset, or a setting changes nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: dict[tuple[Any, ...], tuple[Mapping[str, Any], Path]] = {}

    def add(self, receipt: Mapping[str, Any], path: Path) -> None:
        """Refuse ranks that another variant has, unless its experiment says so, or both are one run on dev.

        A search names a run by what it tries, also where that is the default.
        """
        data = receipt["dataset"]
        place = receipt["chapter"], data["name"], data["split"], receipt["protocol"], receipt["ranks"]
        other, known = self._seen.setdefault(place, (receipt, path))
        if receipt["ranks"] is None or other["variant"] == receipt["variant"]:
            return
        if data["split"] == "dev" and other["parameters"] == receipt["parameters"]:
            return
        if not self.allowed(receipt, other):
            hint = "A setting that changes nothing? Run it again, or name the variant under same_ranks_as."
            raise input_error(path, f"the ranks of {known.name}", "other ranks for another variant", hint)

    def allowed(self, receipt: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether the experiment of one of two receipts names that of the other."""
        known = read_experiments(self.root, receipt["chapter"].partition("_")[2])
        names = [
            {name for name, one in known.items() if one.settings["variant"] == named_changes(found)[0]}
            for found in (receipt, other)
        ]
        return any(set(known[name].alike) & theirs for mine, theirs in (names, names[::-1]) for name in mine)
