"""Whether a receipt that somebody brings may join the ledger, and whether those that are there belong there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from itm_lab.evidence.ledger import Ledger
from itm_lab.evidence.protocol import is_old
from itm_lab.evidence.rank_check import check_circumstances, check_intervals, check_ranks
from itm_lab.experiments.experiment_files import read_experiments
from itm_lab.records.parameters import settings_of
from itm_lab.records.receipts import Identities, read_evidence, read_named_receipt, read_receipt, receipt_path
from itm_utils.errors import input_error

SET_ASIDE = "set_aside"  # receipts that no table or verdict reads, with the reason beside them
SAMPLED = 40  # of so many committed receipts one has its intervals computed again: 50 ms each


def check_folder(root: Path) -> str:
    """One line about all receipts of a checkout; the first that may not be there raises its problem.

    Each lies where its content says, once; it fits its seal and its ranks; no two seeds of a variant have the same ranks.
    """
    ledger, identities = Ledger(root), Identities()
    folder = ledger.paths.receipts
    paths = [path for path in sorted(folder.rglob("*.json")) if SET_ASIDE not in path.relative_to(folder).parts]
    for number, path in enumerate(paths):
        receipt = read_named_receipt(path, folder)
        identities.add(receipt, path)
        if receipt["ranks"] is not None:
            check_ranks(receipt, evidence := read_evidence(path), path)
            if number % SAMPLED == 0:
                check_intervals(receipt, evidence, path)
    counted = sum(len(runs) for runs in ledger.receipts.values())  # reading them checks data and number of images
    return f"{folder}: {len(paths)} receipts good; {counted} of them on a test split that verdicts speak of"


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
            if (
                is_old(other) == is_old(receipt)
                and other["dataset"]["fingerprint"] != receipt["dataset"]["fingerprint"]
            ):
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
    if variant not in known:
        raise input_error(
            path, f"the variant {variant}", f"one of {where}: {', '.join(sorted(known)) or 'there are none'}"
        )
    wanted, found = settings_of(known[variant].values()), receipt["parameters"]
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            right = f"{wanted.get(name)!r} as in {known[variant].name}"
            raise input_error(path, f"{name} = {found.get(name)!r}", right, "Other settings are another variant.")
