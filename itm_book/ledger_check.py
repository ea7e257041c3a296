"""Whether a receipt that somebody brings may join the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from itm_book.recipes import read_recipe
from itm_utils.chapter import settings_of
from itm_utils.errors import problem
from itm_utils.ledger import Ledger
from itm_utils.receipts import read_receipt, receipt_path


def check_receipts(root: Path, paths: list[Path]) -> Iterator[str]:
    """One line for each file; the first file that may not join raises its problem."""
    ledger = Ledger(root)
    for path in paths:
        yield check_one(ledger, path)


def check_one(ledger: Ledger, path: Path) -> str:
    """What a receipt is evidence for, once it has passed: form, seal and ranks, name, data, settings, rules."""
    receipt = read_receipt(path)
    if path.name != (name := receipt_path(receipt, "").name):
        raise problem(path, "a receipt under another name", name)
    place = ledger.place(receipt, path)
    if place is None:
        data = receipt["dataset"]
        known = f"the test split of {', '.join(ledger.datasets)} (of coco: testall)"
        raise problem(path, f"{data['name']} {data['split']}, protocol {receipt['protocol']}", known)
    check_fingerprint(ledger, receipt, path)
    check_settings(ledger, receipt, path)
    present = ledger.rules_for(receipt["chapter"], receipt["arm"])
    for claim in sorted(present.keys() | receipt["rules"].keys()):
        if receipt["rules"].get(claim) != present.get(claim):
            raise problem(path, f"another rule of {claim}", "the rule as it stands", "It changed; run again under it.")
    rsum = receipt["metrics"].get("rsum", {}).get("value", float("nan"))
    counts = ", ".join(present) or "no claim"
    return f"{path}: good; {receipt['arm']}, seed {receipt['seed']}, {place}, rsum {rsum:.1f}; counts for {counts}"


def check_fingerprint(ledger: Ledger, receipt: Mapping[str, Any], path: Path) -> None:
    """Receipts of one dataset and protocol come from the same files; the first one to come sets the mark."""
    place = ledger.place(receipt, path)
    for (_, _, dataset), runs in ledger.receipts.items():
        for known, other in runs.values() if dataset == place else ():
            if other["dataset"]["fingerprint"] != receipt["dataset"]["fingerprint"]:
                raise problem(path, "another fingerprint of its data", f"that of {known.name}", "These are other data.")


def check_settings(ledger: Ledger, receipt: Mapping[str, Any], path: Path) -> None:
    """The parameters are those of the recipe with this arm and dataset; an ensemble and its members are known ones."""
    chapter, data, arm = receipt["chapter"], receipt["dataset"]["name"], receipt["arm"]
    paths = sorted((ledger.root / "recipes").glob(f"{chapter}_*.yaml"))
    recipes = [read_recipe(ledger.root, recipe) for recipe in paths]
    here = [one for one in recipes if Path(one.values()["dataset"]).name == data]
    known = {one.values()["arm"]: one for one in here}
    where = f"recipes of {chapter} on {data}"
    if receipt["models"] > 1:
        if arm not in {*(one.ensemble for one in here), *ledger.arms.get(chapter, ())}:
            raise problem(path, f"the ensemble {arm}", f"one that {where} or rules.yaml name")
        members = [member.rpartition(", seed ")[0] for member in receipt["parameters"].get("members", [""])]
        if unknown := [member for member in members if member not in known]:
            raise problem(path, f"the member {unknown[0]!r}", f"arms of {where}")
        return
    if arm not in known:
        raise problem(path, f"the arm {arm}", f"one of {where}: {', '.join(sorted(known)) or 'there are none'}")
    wanted, found = settings_of(known[arm].values()), receipt["parameters"]
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            right = f"{wanted.get(name)!r} as in {known[arm].path.name}"
            raise problem(path, f"{name} = {found.get(name)!r}", right, "Other settings are another arm.")
