"""How many retrieval errors are right? An audit of runs on Flickr8k by its human judgements.

Give the dataset folder, with ExpertAnnotations.txt and CrowdFlowerAnnotations.txt in it, and the scores that runs
kept in their folders:

    python -m benchmarks.judgements --data data/flickr8k \\
        --scores "SCAN t2i AVG=runs/02_scan_flickr8k_t2i_avg/s0/scores.safetensors"

(seconds a run; writes results/judgements.json, which the page on false negatives shows)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness import RESULTS, finish
from itm_lab.evidence.judgements import audit_runs
from itm_lab.records.scores import read_scores
from itm_utils.data.precomp import open_split
from itm_utils.errors import ItmError
from itm_utils.metrics.retrieval import evaluate


def labelled(text: str) -> tuple[str, Path]:
    """``label=file``; a label may hold spaces."""
    label, equals, path = text.partition("=")
    if not (label and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not label=file")
    return label, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the dataset and of the judgements")
    parser.add_argument("--scores", type=labelled, action="append", required=True, help="label=scores.safetensors")
    parser.add_argument("--out", type=Path, default=RESULTS / "judgements.json")
    args = parser.parse_args()
    try:
        split = open_split(args.data, "test")
        runs = {label: read_scores(path) for label, path in args.scores}
        found = audit_runs(split, args.data, runs)
    except ItmError as error:
        parser.exit(1, f"{error}\n")
    for label, scores in runs.items():
        found["runs"][label]["recalls"] = evaluate(scores, split.owner).as_dict()
    finish(args, found | {"dataset": split.identity()})


if __name__ == "__main__":
    main()
