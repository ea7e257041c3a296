"""Ensembles: the mean of the scores of finished runs, with a receipt that names its members and their ranks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from itm_lab.experiments.runner import Job, TableRow, ensemble_variant, expected_receipt
from itm_lab.paths import Paths
from itm_lab.records.checkout import Code, code_of
from itm_lab.records.receipts import Evidence, is_old_protocol, read_evidence, read_receipt, receipt_path
from itm_lab.records.scores import read_scores, save_scores
from itm_lab.records.training import joint_training
from itm_utils.errors import input_error
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import ensemble, fold_ranks

# An ensemble has no attention of its own: it gets the mean of its members' for what chapter 11 measures.
ATTENTION_METRICS = ("att_", "recall_gain_", "precision_gain_", "gradient_conflict_")


def run_ensembles(jobs: list[Job], results: Path) -> list[TableRow]:
    """Average the scores of jobs that name one ensemble and share settings, data and seed; returns the rows of all."""
    rows = [TableRow(job.experiment.chapter, job.parameters["variant"], job.facts.identity) for job in jobs]
    groups: dict[Path, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.experiment.ensemble:
            groups[expected_receipt(job, results, variant=ensemble_variant(job))].append(job)
    for path, (first, *others) in groups.items():
        if not others:
            continue
        name, paths = ensemble_variant(first), [expected_receipt(job, results) for job in (first, *others)]
        if is_averaged(path, [read_receipt(one) for one in paths]):
            tqdm.write(f"{name}, seed {first.seed}: receipt is there, kept")
        else:
            ensemble_of([job.folder for job in (first, *others)], name, results, paths)
        rows.append(TableRow(first.experiment.chapter, name, first.facts.identity))
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def noted_members(receipts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What the receipt of an ensemble says of its members: who they are, and the digests of their ranks."""
    names = [f"{receipt['variant']}, seed {receipt['seed']}" for receipt in receipts]
    return {"members": names, "ranks": [receipt["ranks"] for receipt in receipts]}


def is_averaged(path: Path, receipts: list[dict[str, Any]]) -> bool:
    """Whether the receipt of an ensemble is there; one of other members or data under the same name is an error.

    The first ensembles did not note the ranks of their members: theirs are not compared. A mean has no order.
    """
    if not path.exists():
        return False
    known, wanted = read_receipt(path), noted_members(receipts)
    if is_old_protocol(known) and not all(map(is_old_protocol, receipts)):
        return False  # it is replaced
    noted = {"ranks": wanted["ranks"]} | known["parameters"]
    same = {name: sorted(noted.get(name, [])) == sorted(wanted[name]) for name in wanted}
    same["data"] = all(receipt["dataset"] == known["dataset"] for receipt in receipts)
    if differing := [name for name in same if not same[name]]:
        found, hint = f"an ensemble with other {differing[0]}", "Move it away, or give this ensemble another name."
        raise input_error(path, found, "none, or one of these very runs", hint)
    return True


def mean_curves(curves: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Mean of the members' curves, point by point, of the figures that all of them have."""
    shared = [name for name in curves[0] if all(name in one for one in curves)]
    return {
        name: {line: np.mean([one[name][line] for one in curves], axis=0).tolist() for line in curves[0][name]}
        for name in shared
    }


class Member(NamedTuple):
    """A finished run as part of an ensemble. owner: (c,) image of each caption."""

    receipt: dict[str, Any]
    owner: np.ndarray
    scores: Scores


def member_of(folder: Path, paths: list[Path]) -> Member:
    """A run with the one of these receipts that its scores give.

    Runs on test and on dev share a folder, and the scores are those of the last: only ranks tell whose they are.
    """
    scores = read_scores(folder / "scores.safetensors")
    for path in paths:
        receipt, evidence = read_receipt(path), read_evidence(path)
        if scores.i2t.shape == (len(evidence.i2t), len(evidence.t2i)):
            ranks = Evidence.of(fold_ranks(scores, evidence.owner, folds=1), evidence.owner)
            if ranks.digest == receipt["ranks"]:
                return Member(receipt, evidence.owner, scores)
    found = f"scores with other ranks than {', '.join(path.name for path in paths)}"
    hint = "A later run left them, perhaps on another split. Move the receipt away, here and in results, and run again."
    raise input_error(folder / "scores.safetensors", found, "the scores that it was made from", hint)


def receipts_in(folder: Path) -> list[Path]:
    """The receipts of a run in its folder, without those of five folds: each of them has one of the whole beside it."""
    protocols = {path: read_receipt(path)["protocol"] for path in sorted(folder.glob("[0-9]*/**/*.json"))}
    whole = [path for path, protocol in protocols.items() if protocol != "1K" and "folds" not in protocol]
    if not whole:
        raise input_error(folder, "no receipt", "the folder of a finished run")
    return whole


def shared_inputs(receipts: list[dict[str, Any]]) -> dict[str, str]:
    """What all members read alike; each says the rest of its own."""
    inputs = [receipt.get("inputs", {}) for receipt in receipts]
    return {name: value for name, value in inputs[0].items() if all(one.get(name) == value for one in inputs)}


def joint_code(receipts: list[dict[str, Any]]) -> Code:
    """The code of this averaging; clean only if that of every member was, too."""
    code = code_of(Paths.find_or_none())
    clean = [code.clean, *(receipt["run"].get("clean") for receipt in receipts)]
    return Code(code.commit, None if None in clean else all(clean))


def ensemble_of(folders: list[Path], variant: str, results: Path, paths: list[Path] | None = None) -> dict[str, Any]:
    """Average the scores of finished runs, given by their folders, and write the receipt of the ensemble.

    paths: the receipt of each run; otherwise those in its folder are tried.
    """
    from itm_lab.records.rules import rules_for

    tried = [[path] for path in paths] if paths else [receipts_in(folder) for folder in folders]
    members = [member_of(folder, known) for folder, known in zip(folders, tried, strict=True)]
    receipts = [member.receipt for member in members]
    first = receipts[0]
    for receipt in receipts[1:]:
        if receipt["dataset"] != first["dataset"]:
            raise input_error(variant, f"runs on {receipt['dataset']} and {first['dataset']}", "runs on one dataset")
    about = {
        "chapter": first["chapter"],
        "variant": variant,
        "seed": first["seed"],
        "dataset": first["dataset"],
        "parameters": noted_members(receipts),
        "seconds": sum(receipt["run"]["seconds"] for receipt in receipts),
        "device": first["run"]["device"],
        "rules": rules_for(first["chapter"], variant),
        "inputs": shared_inputs(receipts),
        "training": joint_training(receipts),
        "code": joint_code(receipts),
    }
    known = receipt_path(about | {"protocol": first["protocol"]}, results)
    if is_averaged(known, receipts):  # it may have its members in another order, or no digests of their ranks
        about["parameters"] = read_receipt(known)["parameters"]
    shared = set.intersection(*(set(receipt["metrics"]) for receipt in receipts))
    means = {
        name: float(np.mean([receipt["metrics"][name]["value"] for receipt in receipts]))
        for name in sorted(shared)
        if name.startswith(ATTENTION_METRICS)
    }
    about["curves"] = mean_curves([receipt.get("curves", {}) for receipt in receipts])
    save_scores(ensemble([member.scores for member in members]), members[0].owner, results, means, **about)
    return about
