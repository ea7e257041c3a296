"""Whether the numbers of a receipt can be: what follows from ranks is computed again, the rest has bounds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from itm_lab.records.bootstrap import bootstrap_intervals
from itm_lab.records.checkout import git
from itm_lab.records.receipts import Evidence, is_old_protocol
from itm_utils.errors import input_error
from itm_utils.metrics.retrieval import Ranks, five_captions_each

CLOCKS = timedelta(hours=1)  # how far another machine's clock may be ahead


def check_ranks(receipt: Mapping[str, Any], evidence: Evidence, path: Path) -> None:
    """Five captions for each image, ranks below the number of candidates, and every recall stated."""
    images, owner = len(evidence.i2t), evidence.owner
    if len(owner) != 5 * images or not np.array_equal(owner, five_captions_each(images)):
        raise input_error(
            path, f"{len(owner)} captions, owners not five each", f"five captions for each of {images} images"
        )
    folds = 5 if receipt["protocol"] == "1K" else 1
    for way, queries, candidates in (("i2t", images, 5 * images // folds), ("t2i", 5 * images, images // folds)):
        ranks = getattr(evidence, way)
        if ranks.shape != (queries,) or ranks.dtype.kind not in "iu":
            raise input_error(path, f"{way} ranks {ranks.dtype} of shape {ranks.shape}", f"{queries} whole numbers")
        if ranks.min() < 0 or ranks.max() >= candidates:
            found = f"{way} ranks from {ranks.min()} to {ranks.max()}"
            raise input_error(path, found, f"ranks from 0 to {candidates - 1}")
    if missing := sorted(evidence.recalls(receipt["protocol"]).keys() - receipt["metrics"].keys()):
        raise input_error(path, f"no {missing[0]}", "every recall and rank statistic of its ranks")


def check_intervals(receipt: Mapping[str, Any], evidence: Evidence, path: Path) -> None:
    """The intervals that a receipt states are those that resampling its test images gives."""
    for name, ends in bootstrap_intervals(Ranks(evidence.i2t, evidence.t2i), evidence.owner).items():
        metric = receipt["metrics"][name]
        stated = tuple(metric.get(end, value) for end, value in zip(("low", "high"), ends, strict=True))
        if not np.allclose(stated, ends, rtol=0, atol=1e-6):
            found, expected = (f"[{low:g}, {high:g}]" for low, high in (stated, ends))
            raise input_error(path, f"{name} in {found}", f"{expected}, which its ranks give")


def check_circumstances(root: Path, receipt: Mapping[str, Any], path: Path) -> None:
    """The run is over, and its commit is one of the repository's, where there is a history to ask."""
    finished = receipt["run"]["finished"]
    try:
        when = datetime.fromisoformat(finished)
    except ValueError:
        raise input_error(path, f"finished: {finished!r}", "a date such as 2026-01-31T12:00:00+00:00") from None
    if (when if when.tzinfo else when.replace(tzinfo=UTC)) > datetime.now(UTC) + CLOCKS:
        raise input_error(path, f"finished: {finished}", "a date that is not in the future")
    commit = (receipt["run"]["commit"] or "").removesuffix("+")
    if not commit and not is_old_protocol(receipt) and git(root, "rev-parse", "HEAD"):
        raise input_error(path, "no commit", "that of the code it was made with", "Run it inside a checkout with git.")
    if commit and git(root, "rev-parse", "--is-shallow-repository") == "false":
        known = len(commit) == 40 and commit.isalnum() and git(root, "cat-file", "-t", commit) == "commit"
        if not known:
            hint = "Fetch the branch that it was run on."
            raise input_error(path, f"commit {commit[:12]}", "a commit of this repository", hint)
