"""Feature extraction for test_photos.py to kill, again and again, at the moments it is given.

usage: python killed_photos.py PHOTOS CAPTIONS OUT MOMENT …
(MOMENT: __call__:3, append:5, replace:2, rename:1 or rmtree:1, the call at which to die)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from killing import die_at

from itm_lab.photos import extract
from itm_lab.photos.appendable_npy import GrowingArray
from itm_utils import files


class Tiny:
    """A stand-in for a network: the mean colour of each cell."""

    name, fingerprint, side, width = "tiny", "0" * 16, 12, 3

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        return self.attention(pixels)

    @staticmethod
    def attention(pixels: np.ndarray) -> np.ndarray:
        cells = pixels.reshape(len(pixels), 6, 2, 6, 2, 3).mean(axis=(2, 4), dtype=np.float32)
        return cells.reshape(len(pixels), 36, 3)


def main(photos: Path, captions: Path, out: Path, moments: list[str]) -> None:
    extract.BATCH = 4
    places = {"__call__": Tiny, "append": GrowingArray, "replace": files.os, "rename": Path, "rmtree": extract.shutil}
    for moment in moments:
        if not (child := os.fork()):
            name, call = moment.split(":")
            die_at(places[name], name, int(call))
            extract.extract(photos, captions, out, "2,1,1", least=1, network=Tiny())
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.exists(), flush=True)


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:4]), sys.argv[4:])
