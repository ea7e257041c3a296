"""Conversion for test_data_tools.py to kill, again and again, at the moments it is given.

usage: python killed_convert.py TSV OUT MOMENT …      (MOMENT: _take:7, _note:2 or replace:5, the call at which to die)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from killing import die_at

from itm_lab.data import bottom_up


def main(tsv: Path, out: Path, moments: list[str]) -> None:
    for moment in moments:
        if not (child := os.fork()):
            name, call = moment.split(":")
            die_at(os if name == "replace" else bottom_up._Conversion, name, int(call))
            bottom_up.convert([tsv], out, "dev", note_seconds=0)  # a note after every image
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (out / "dev_ims.npy").exists(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
