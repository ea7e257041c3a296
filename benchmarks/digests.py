"""What the fingerprint of data costs: bytes per second when a file is read for the first time, and the time afterwards.

    python -m benchmarks.digests

(seconds, and 2 GB of disk; writes results/digests.json, which the page on datasets quotes)
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.harness import finish, start, timed
from itm_utils.digests import file_digest

BLOCK = 2**26  # bytes, written at once
COCO = 33e9  # bytes of COCO's features


def main() -> None:
    args = start(__doc__, "digests.json", gigabytes=2)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ITM_CACHE"] = f"{folder}/cache"
        path = Path(folder) / "train_ims.npy"
        with path.open("wb") as file:
            for _ in range(args.gigabytes * 2**30 // BLOCK):
                file.write(os.urandom(BLOCK))
        os.utime(path, ns=(0, time.time_ns() - 60 * 10**9))  # one that was just written is not remembered
        size, first = path.stat().st_size, timed(lambda: file_digest(path))
        again = min(timed(lambda: file_digest(path)) for _ in range(5))
    rate = size / first
    found = {"bytes": size, "first_seconds": first, "again_seconds": again, "bytes_per_second": rate}
    finish(args, found | {"coco_seconds": COCO / rate})


if __name__ == "__main__":
    main()
