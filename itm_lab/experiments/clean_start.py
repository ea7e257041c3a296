"""Evidence comes from committed code: whoever wants to check a number must be able to get the code that gave it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from itm_lab.experiments.experiment_files import read_seeds
from itm_lab.experiments.runner import Job, expected_receipt
from itm_lab.records.checkout import changed_files
from itm_utils.errors import input_error


def check_clean(root: Path, jobs: Iterable[Job], results: Path) -> None:
    """Refuse to start runs for the ledger from a checkout that is not its commit."""
    if results.resolve() != (root / "receipts").resolve():
        return  # they join no ledger
    if not any(is_evidence(job) and not expected_receipt(job, results).exists() for job in jobs):
        return
    if changed := changed_files(root):
        found = f"uncommitted changes ({', '.join(changed[:3])}{', …' if len(changed) > 3 else ''})"
        hint = "Commit or stash them; with --dirty the runs start, and no verdict counts them."
        raise input_error(root, found, "a clean checkout for runs that verdicts count", hint)


def is_evidence(job: Job) -> bool:
    """Whether a run is one that its experiment plans: its variant, on a test split, with one of its seeds."""
    experiment, given = job.experiment, job.parameters
    planned = read_seeds(experiment.seeds) if experiment.seeds else [experiment.values()["seed"]]
    unchanged = given["variant"] == experiment.settings["variant"]
    return given["evaluate_on"] != "dev" and unchanged and job.seed in planned
