"""What stands for the features of Scenes in its fingerprint: what they were computed from.

Every machine computes them itself, and their last digits differ between processors, so their own bytes identify
nothing; pixels, boxes and the frozen network do. Features that these do not give are refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from itm_lab.scenes.features import WEIGHTS, load_net, region_features
from itm_utils.cache import cache_root
from itm_utils.data.precomp import PrecompSplit, load_array
from itm_utils.digests import digest_of, file_digest
from itm_utils.errors import input_error
from itm_utils.files import write_text
from itm_utils.progress import bar

WAY = 1  # from pixels and boxes to features: raise it when the network or its crops are computed differently
NEAR = 1e-4  # of the largest feature: processors differ by less
IMAGES = 50  # computed at once


def source_digest(split: PrecompSplit) -> str:
    """Digest of pixels, boxes and network, once the features are known to be computed from them.

    The builder knows; for other bytes of features they are computed again and compared, once.
    """
    if not (note := _note(split.root, split.name)).is_file():
        check_features(split)
        write_text(note, "")
    return _source(split.root, split.name)


def computed_here(folder: Path, split: str) -> None:
    """Remember that the features in a folder were computed from its pixels: the builder says so of its own."""
    write_text(_note(folder, split), "")


def check_features(split: PrecompSplit) -> None:
    """Raise at the first image whose features are not what the frozen network gives for its pixels and boxes."""
    pixels = load_array(split.root / f"{split.name}_pixels.npy", "r")
    boxes = load_array(split.root / f"{split.name}_boxes.npy", "r")
    net = load_net()
    for first in bar(range(0, len(split.features), IMAGES), f"compare the features of {split.name}", "batch"):
        rows = np.arange(first, min(first + IMAGES, len(split.features)))
        stored, computed = split.features.rows(rows), region_features(net, pixels[rows], boxes[rows].astype(np.int64))
        differing = np.abs(stored - computed).max(axis=(1, 2)) > NEAR * computed.max()
        if differing.any():
            image = rows[np.argmax(differing)]
            hint = "Delete the folder, and it is built again."
            raise input_error(split.features.path, f"other features in row {image}", "those of its pixels", hint)


def _source(folder: Path, split: str) -> str:
    files = {kind: file_digest(folder / f"{split}_{kind}.npy") for kind in ("pixels", "boxes")}
    return digest_of(files | {"weights": file_digest(WEIGHTS), "way": WAY})


def _note(folder: Path, split: str) -> Path:
    """A file that is there once features of these bytes were seen to come from this source."""
    seen = digest_of([_source(folder, split), file_digest(folder / f"{split}_ims.npy")])
    return cache_root() / "digests" / f"made-{seen[:32]}"
