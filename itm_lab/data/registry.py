"""What is known of the public datasets: their splits, their files, where to get them and how big they are.

Numbers of images are those of Karpathy's splits; sizes of feature files follow from their shape. SCAN's package on
Kaggle holds one folder a dataset; by what its users report (kuanghuei/SCAN#65) its dev and test files repeat every
image five times, its train files do not, so sizes are given as "about".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from itm_utils.errors import input_error
from itm_utils.metrics.retrieval import Retrieval

KAGGLE = "kuanghueilee/scan-features"
KAGGLE_PAGE = f"https://www.kaggle.com/datasets/{KAGGLE}"
KAGGLE_FOLDER = "data/data"  # inside the Kaggle dataset
KARPATHY_PAGE = "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip"
ENTITIES_PAGE = "https://github.com/BryanPlummer/flickr30k_entities (annotations.zip)"
ENTITIES_FOLDER = "flickr30k_entities"
ENTITIES_IMAGES = 31_783
REGIONS, WIDTH = 36, 2048
ROW_BYTES = 4 * REGIONS * WIDTH
PER_IMAGE = 5
NEEDED = ("ims.npy", "caps.txt")


@dataclass(frozen=True)
class Known:
    """A dataset of the papers.

    images: for each split the numbers of images that are right; the first is that of Karpathy's split.
    repeated: splits whose feature file in SCAN's package has every image five times.
    within: a split that is the beginning of another.
    """

    title: str
    folder: str
    images: Mapping[str, tuple[int, ...]]
    repeated: tuple[str, ...]
    within: Mapping[str, str]

    def root(self, data_root: Path) -> Path:
        """Its folder below ``data_root``; or ``data_root`` itself where that holds the files."""
        inside = data_root / self.folder
        return data_root if not inside.is_dir() and any(data_root.glob("*_ims.npy")) else inside

    def files(self) -> Iterator[str]:
        """What SCAN's package has of it, small files first: a wrong place shows before gigabytes have come."""
        for kind in ("caps.txt", "ids.txt", "ims.npy"):
            yield from (f"{split}_{kind}" for split in reversed([*self.images]))

    def remote(self, name: str) -> str:
        """Path of a file inside the Kaggle dataset."""
        return f"{KAGGLE_FOLDER}/{self.folder}/{name}"

    def feature_bytes(self, split: str) -> int:
        """Size of a feature file of SCAN's package."""
        smallest = min(self.images[split])
        return ROW_BYTES * smallest * (PER_IMAGE if split in self.repeated else 1)

    def size(self) -> int:
        """Bytes of all feature files; the texts are small beside them."""
        return sum(self.feature_bytes(split) for split in self.images)


KNOWN = {
    "f30k": Known(
        title="Flickr30K",
        folder="f30k_precomp",
        images={"train": (29_000,), "dev": (1_014,), "test": (1_000,)},
        repeated=("dev", "test"),
        within={},
    ),
    "coco": Known(
        title="MS-COCO",
        folder="coco_precomp",
        # SCAN's package validates on the first 1,000 of Karpathy's 5,000.
        images={"train": (113_287,), "dev": (5_000, 1_000), "testall": (5_000,), "test": (1_000,)},
        repeated=("dev", "testall", "test"),
        within={"test": "testall"},
    ),
}


def coco_protocol(result: Retrieval, split: str) -> Retrieval:
    """Give a result on COCO's ``testall`` the papers' name: 1K for five folds of 1,000, 5K for all 5,000.

    Size alone does not earn the name: COCO's validation split has 5,000 images too.
    """
    names = {"5 folds of 1000": "1K", "all 5000": "5K"}
    if split != "testall" or result.protocol not in names:
        raise input_error(
            "protocol", f"{result.protocol} of split {split}", "all 5,000 images of testall, whole or in 5 folds"
        )
    return replace(result, protocol=names[result.protocol])
