"""Mine hard negatives with a checkpoint of this book: build its model again, open its data, hand both to the miner."""

from __future__ import annotations

from pathlib import Path

import torch

from itm_lab.data.opening import dataset_folder, part_of
from itm_lab.finished_run import captions_of, find_checkpoint, load_matcher
from itm_utils.data.precomp import open_split
from itm_utils.errors import input_error
from itm_utils.mining import OfflineLists, mine


def mine_checkpoint(
    source: Path, data: str, out: Path, texts: int, images: int, part: float, megabytes: int
) -> OfflineLists:
    """The lists of a run's best weights (or of a checkpoint) over the training set in the folder ``data``."""
    path = find_checkpoint(source)
    model, known = load_matcher(path)
    split = part_of(open_split(dataset_folder(data), "train"), part)
    if (found := split.identity()["fingerprint"]) != known.get("dataset"):
        expected = f"fingerprint {known.get('dataset')}: what {path.name} was trained on"
        raise input_error(
            split.features.path, f"data with fingerprint {found}", expected, "Give that data, and its --part."
        )
    if torch.cuda.is_available():
        model.cuda()
    described = {"checkpoint": f"{path.parent.name}/{path.name}", "provenance": known}
    captions = captions_of(split, known.get("texts", ""), path)
    return mine(model, split, captions, out, texts, images, megabytes * 2**20, described)
