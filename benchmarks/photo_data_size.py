"""How much data does a search need? SCAN on the first 100, 500 and 2,000 training pictures of a dataset, or more.

Every run has the same recipe, epochs, dev pictures and test pictures; its vocabulary comes from its own captions. Made
for Flickr8k with grid features of EfficientNet-Lite0, reduced to 128 numbers a cell; any dataset folder does.

    python -m benchmarks.photo_data_size --data DIR --work DIR

(half an hour of one core that does nothing else; interrupted, it goes on; writes results/photo_data_size.json)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, finish
from itm_lab.records.receipts import read_receipt
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary

ROOT = Path(__file__).parent.parent
RECIPE = "scan/scenes/t2i_avg"
SETTINGS = {"epochs": 12, "batch_size": 64, "learning_rate": 0.002, "width": 256, "word_dim": 128, "warmup_epochs": 2}
DEV = 200


def write_split(split: PrecompSplit, folder: Path, images: int) -> list[str]:
    """The first pictures of a split, with their captions, as a dataset of its own; returns the captions."""
    part = split.first(images)
    np.save(folder / f"{part.name}_ims.npy", split.features.rows(np.arange(images) * split.repeat))
    np.save(folder / f"{part.name}_owners.npy", part.owner)
    (folder / f"{part.name}_caps.txt").write_text("\n".join(part.captions) + "\n", encoding="utf-8")
    return part.captions


def run(data: Path, pictures: int, root: Path) -> dict[str, float]:
    """Train on so many pictures; returns the metrics of the receipt, and the minutes of training."""
    folder = root / f"first{pictures}"
    folder.mkdir(parents=True, exist_ok=True)
    captions = write_split(open_split(data, "train"), folder, pictures)
    captions += write_split(open_split(data, "dev"), folder, DEV)
    write_split(test := open_split(data, "test"), folder, test.n_images)
    Vocabulary.build(captions).save(folder / "words_vocab.json")
    given = [f"{name}={value}" for name, value in SETTINGS.items()]
    given += [f"dataset={folder}", f"run_dir={root / 'runs'}", "arm=SCAN"]
    itm = [sys.executable, "-c", "from itm_lab.cli import app; app()"]
    call = [*itm, "run", RECIPE, "--seeds", "0", "--receipts", str(root / "results")]
    subprocess.run([*call, *(word for pair in given for word in ("-p", pair))], cwd=ROOT, check=True)
    receipt = read_receipt(next((root / "results").rglob(f"*first{pictures}_*.json")))
    values = {name: found["value"] for name, found in receipt["metrics"].items()}
    return {name: values[name] for name in ("i2t_r1", "i2t_r10", "t2i_r1", "t2i_r10", "rsum")} | {
        "minutes_of_training": receipt["run"]["seconds"] / 60,
        "words": len(Vocabulary.of_folder(folder)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where parts of the data and runs are kept")
    parser.add_argument("--pictures", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--out", type=Path, default=RESULTS / "photo_data_size.json")
    args = parser.parse_args()
    found = {}
    for pictures in args.pictures:
        found[str(pictures)] = run(args.data.resolve(), pictures, args.work.resolve() / str(pictures))
        print(pictures, found[str(pictures)], flush=True)
    test = open_split(args.data, "test")
    what = {
        "recipe": RECIPE,
        "settings": SETTINGS,
        "seed": 0,
        "dataset": test.identity(),
        "test_pictures": test.n_images,
        "test_captions": test.n_captions,
        "minutes": "by the wall, with other work on the machine",
    }
    finish(args, {"what": what, "pictures": found})


if __name__ == "__main__":
    main()
