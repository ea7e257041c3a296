"""Nearest vectors by inner product, through faiss: exactly (flat), by inverted lists (ivf), or by a graph (hnsw)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import faiss  # compiled search over millions of vectors: nothing of ours would come near
import numpy as np

from itm_utils.errors import input_error

KINDS = ("flat", "ivf", "hnsw")
EXACT_UP_TO = 20_000  # vectors: comparing a query with all of them takes about a millisecond
EFFORT = {"flat": 0, "ivf": 16, "hnsw": 64}  # inverted lists that are read, or width of the beam on the graph
LINKS = 16  # neighbours of a vector on the graph
BUILD_BEAM = 64  # width of the beam that looks for them
TRAIN_PER_LIST, TRAIN_ROUNDS = 64, 8  # vectors per list that k-means sees, and its iterations


def automatic_kind(rows: int) -> str:
    """Exact search where it is quick enough, else inverted lists."""
    return "flat" if rows <= EXACT_UP_TO else "ivf"


def build_nearest(vectors: np.ndarray, kind: str) -> Any:
    """A faiss index of vectors (n, d)."""
    if kind not in KINDS:
        raise input_error("kind", repr(kind), f"one of {', '.join(KINDS)}")
    vectors = checked(vectors)
    width = vectors.shape[1]
    if kind == "flat":
        index = faiss.IndexFlatIP(width)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_BEAM
    else:
        index = _trained_lists(vectors)
    index.add(vectors)
    return index


def _trained_lists(vectors: np.ndarray) -> Any:
    """An empty index of inverted lists, about as many as twice the root of the number of vectors."""
    rows, width = vectors.shape
    lists = max(1, min(round(2 * math.sqrt(rows)), rows // 39))  # faiss asks for 39 vectors per list
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid, index.cp.niter = TRAIN_PER_LIST, TRAIN_ROUNDS
    index.cp.min_points_per_centroid = 1  # of a collection that is tiny: no warning on the terminal
    index.train(vectors)
    return index


def nearest(index: Any, kind: str, queries: np.ndarray, count: int, effort: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and numbers (q, count) of the largest inner products, the best first; number -1 where fewer were found.

    effort: inverted lists that are read, or width of the beam; 0 for the default. Exact search has none.
    """
    queries = checked(queries)
    if queries.shape[1] != index.d:
        raise input_error("queries", f"vectors of width {queries.shape[1]}", f"width {index.d}, as in the index")
    library: Any = faiss  # whose stubs do not know how these are made
    effort, settings = effort or EFFORT[kind], None
    if kind == "ivf":
        settings = library.SearchParametersIVF(nprobe=min(effort, index.nlist))
    elif kind == "hnsw":
        settings = library.SearchParametersHNSW(efSearch=max(effort, count))
    return index.search(queries, min(count, index.ntotal), params=settings)


def write_nearest(index: Any, path: Path) -> None:
    """Write an index in faiss's own format."""
    faiss.write_index(index, str(path))


def read_nearest(path: Path, kind: str) -> Any:
    """Open an index without reading it: vectors stay on the disk until a search touches them."""
    try:
        index = faiss.read_index(str(path), MAPPED[kind])
    except (
        RuntimeError,
        MemoryError,
    ) as error:  # damaged bytes fail in many ways, and each concerns this one file only
        reason = str(error).rpartition("Error:")[2].strip().split(". ")[0] or type(error).__name__
        raise input_error(path, f"a damaged file ({reason})", "an index that faiss wrote", "Build it again.") from None
    return index


MAPPED = {"flat": faiss.IO_FLAG_MMAP_IFC, "ivf": faiss.IO_FLAG_MMAP, "hnsw": faiss.IO_FLAG_MMAP_IFC}


def checked(vectors: np.ndarray) -> np.ndarray:
    """The vectors as faiss takes them; a NaN or infinity would be nearest to everything or to nothing."""
    if vectors.ndim != 2 or not len(vectors):
        raise input_error("vectors", f"an array of shape {vectors.shape}", "(n, d) with at least one row")
    if not np.isfinite(vectors).all():
        raise input_error("vectors", "a NaN or infinity", "finite numbers", "The training of this model failed.")
    return np.ascontiguousarray(vectors, dtype=np.float32)
