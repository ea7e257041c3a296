"""Fewer numbers per region: principal components of some training images, kept beside the features they made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from itm_utils.data.precomp import load_array
from itm_utils.errors import input_error

FILE = "regions_pca.npy"  # (d + 1, k): a matrix, and in the last row what is added to its product
BLOCK = 2**12  # regions that are held in double precision at once
FIT_IMAGES = 1000  # that components are computed from


def project(features: np.ndarray, components: np.ndarray) -> np.ndarray:
    """(i, r, k) from features (i, r, d)."""
    return features @ components[:-1] + components[-1]


def fit(regions: np.ndarray, widths: Sequence[int], count: int) -> np.ndarray:
    """(d + 1, count) float32 principal components of regions (n, d).

    widths: channels of each layer. A layer counts by its number of channels and not by the scale of its values.
    """
    total, squares, n = _sums(regions)
    mean = total / n
    covariance = squares / n - np.outer(mean, mean)
    layers = np.split(np.diag(covariance), np.cumsum(widths)[:-1])
    scale = np.concatenate([np.full(len(layer), max(float(layer.mean()), 1e-12) ** -0.5) for layer in layers])
    _, vectors = np.linalg.eigh(covariance * np.outer(scale, scale))
    vectors = vectors[:, ::-1][:, :count]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(count)])  # signs are free: fixed here
    matrix = scale[:, None] * vectors
    return np.concatenate([matrix, -(mean @ matrix)[None]]).astype(np.float32)


def _sums(regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Sums of rows and of their outer products, block by block, and how many there were."""
    width = regions.shape[-1]
    total, squares = np.zeros(width), np.zeros((width, width))
    for block in _blocks(regions):
        total += block.sum(axis=0)
        squares += block.T @ block
    return total, squares, len(regions)


def _blocks(regions: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(regions), BLOCK):
        yield regions[start : start + BLOCK].astype(np.float64)


def read_components(path: Path, width: int) -> np.ndarray:
    """The components of a dataset, for images that are to be compared with it. width: numbers a region has before."""
    folder = path if path.is_dir() else path.parent
    path = folder / FILE
    if not path.is_file():
        raise input_error(
            path, "no such file", f"the components of a dataset that was made with --pca; {folder} has none"
        )
    components = load_array(path)
    if components.dtype != np.float32 or components.ndim != 2 or len(components) != width + 1:
        found = f"{components.dtype} of shape {components.shape}"
        raise input_error(
            path, found, f"float32 of shape ({width + 1}, k)", "Take the same network as for that dataset."
        )
    if not np.isfinite(components).all():
        raise input_error(path, "a NaN or infinity", "finite numbers", "Make that dataset again.")
    return components
