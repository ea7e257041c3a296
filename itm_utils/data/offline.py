"""Offline hard negatives: candidate lists on disk, and how a batch draws from them.

:mod:`itm_utils.mining` writes the lists. A folder of lists holds

==================  ============================================================================
``texts.npy``       (i, h_t) int32, for each image captions of other images, best first
``images.npy``      (c, h_i) int32, for each caption images that are not its own, best first
``manifest.json``   written last: which model scored which data, and a checksum of both files
==================  ============================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from itm_utils.data.precomp import PrecompSplit, load_array
from itm_utils.errors import input_error
from itm_utils.files import atomic, write_json

FORMAT = "itm-offline-lists-1"
FILES = ("texts", "images")
MINE = "Mine lists for this data with `itm mine`, or give the folder of such lists."
AGAIN = "Copy the folder again, or delete it and mine the lists again."
REDRAWS = 100  # attempts at a negative image and a negative caption that are no positive pair
PER_IMAGE = 5  # captions of an image in the public data: tied sampling divides ranks by it


@dataclass(frozen=True)
class OfflineLists:
    """Hard negatives of a training set.

    texts: (i, h_t) int32, memory-mapped: for each image captions of other images, best first.
    images: (c, h_i) int32, memory-mapped: for each caption images that are not its own, best first.
    manifest: model, data, lengths and checksums, as in ``manifest.json``.
    """

    texts: np.ndarray
    images: np.ndarray
    manifest: dict[str, Any]

    def __reduce__(self) -> tuple:
        # A worker process maps the files itself: pickling a map would send all it holds.
        if isinstance(self.texts, np.memmap) and isinstance(self.images, np.memmap):
            return _map_again, (str(self.texts.filename), str(self.images.filename), self.manifest)
        return OfflineLists, (self.texts, self.images, self.manifest)

    @property
    def fingerprint(self) -> str:
        """Hash of both lists, whatever their folder is called."""
        return hashlib.sha256("".join(self.manifest["files"][name] for name in FILES).encode()).hexdigest()[:16]

    def check(self, split: PrecompSplit, where: str | Path = "offline lists") -> None:
        """They are lists of this split."""
        for name, expected in data_facts(split).items():
            if (found := self.manifest["data"].get(name)) != expected:
                whose = f"{name} {expected} as in {split.root.name}, split {split.name}"
                raise input_error(where, f"lists of data with {name} {found}", whose, MINE)
        lengths = self.manifest["texts_per_image"], self.manifest["images_per_text"]
        sizes = split.n_images, split.n_captions
        for name, array, rows, length, items in zip(
            FILES, (self.texts, self.images), sizes, lengths, sizes[::-1], strict=True
        ):
            if array.shape != (rows, length) or array.dtype != np.int32:
                expected = f"int32 of shape {(rows, length)}"
                raise input_error(f"{where}, {name}", f"{array.dtype} of shape {array.shape}", expected, AGAIN)
            if not 0 <= int(array.min()) <= int(array.max()) < items:
                found = f"numbers from {array.min()} to {array.max()}"
                raise input_error(f"{where}, {name}", found, f"0 to {items - 1}", AGAIN)


def _map_again(texts: str, images: str, manifest: dict[str, Any]) -> OfflineLists:
    return OfflineLists(load_array(Path(texts), "r"), load_array(Path(images), "r"), manifest)


def data_facts(split: PrecompSplit) -> dict[str, Any]:
    """What lists must share with a split. The folder's name is no part of it: data may be moved."""
    known = split.identity()
    facts = {"split": known["split"], "fingerprint": known["fingerprint"]}
    return facts | {"images": split.n_images, "captions": split.n_captions}


def write_lists(folder: Path, texts: np.ndarray, images: np.ndarray, manifest: Mapping[str, Any]) -> None:
    """Write both lists, then the manifest: without it there are no lists."""
    files = {}
    for name, array in zip(FILES, (texts, images), strict=True):
        path = folder / f"{name}.npy"
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.save(file, array.astype(np.int32, copy=False), allow_pickle=False)
        files[name] = _checksum(path)
    write_json(folder / "manifest.json", {"format": FORMAT, **manifest, "files": files})


def read_lists(folder: str | Path, split: PrecompSplit) -> OfflineLists:
    """The lists of a folder; an error where they are not whole, or not of this split."""
    manifest, path = read_manifest(folder), Path(folder) / "manifest.json"
    arrays = []
    for name in FILES:
        arrays.append(load_array(path.with_name(f"{name}.npy"), mmap_mode="r"))
        if _checksum(path.with_name(f"{name}.npy")) != manifest["files"][name]:
            expected = f"those that {path.name} describes"
            raise input_error(path.with_name(f"{name}.npy"), "other bytes than were mined", expected, AGAIN)
    texts, images = arrays
    lists = OfflineLists(texts, images, manifest)
    lists.check(split, path)
    return lists


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """What a folder says of its lists."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise input_error(path, "no such file", "finished lists in this folder", MINE)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        whole = {*FILES} <= {*manifest["files"]} and {"split", "fingerprint"} <= {*manifest["data"]}
        whole = whole and isinstance(manifest["texts_per_image"] + manifest["images_per_text"], int)
    except (ValueError, KeyError, TypeError) as error:
        raise input_error(path, f"a damaged file ({error!r})", "the manifest of lists", AGAIN) from error
    if not whole or manifest.get("format") != FORMAT:
        raise input_error(path, f"format {manifest.get('format')!r}", f"a whole manifest of format {FORMAT}", AGAIN)
    return manifest


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Drawn(NamedTuple):
    """One offline negative of each kind for every pair of a batch, all (b,) int64.

    texts: a negative caption for the pair's image. images: a negative image for its caption.
    text_images: the true image of ``texts``. image_texts: a true caption of ``images``.
    """

    texts: np.ndarray
    images: np.ndarray
    text_images: np.ndarray
    image_texts: np.ndarray


def draw_offline(
    lists: OfflineLists,
    owner: np.ndarray,
    captions: np.ndarray,
    generator: np.random.Generator,
    sampling: str = "uniform",
    texts: int | None = None,
    images: int | None = None,
) -> Drawn:
    """Offline negatives for the pairs of ``captions`` (b,) with their images.

    owner: (c,) image of each caption of the training set, in order.
    texts, images: use only the first so many entries of each list; all by default.
    sampling: how ranks are drawn.

    * ``uniform``, the paper's: a rank of each list, independently. If the negative image owns the negative caption, the
      two are a positive pair, and both are drawn again; after ``REDRAWS`` times the best image that does not own the
      caption is taken.
    * ``normal``: the same with a bell over the ranks, its middle in the middle of the list, its standard deviation a
      sixth of the list. The paper tried a normal distribution, without saying which, to see less of the top of the
      lists, where captions stand that are right and not marked so.
    * ``tied``, the public code's: one rank n for both, the n-th caption and the (n div 5)-th image, and nothing is
      drawn again.
    """
    owner, captions = np.asarray(owner), np.asarray(captions)
    h_t, h_i = _used(lists.texts, texts, "texts"), _used(lists.images, images, "images")
    negative_texts = np.asarray(lists.texts[owner[captions], :h_t], dtype=np.int64)  # (b, h_t)
    negative_images = np.asarray(lists.images[captions, :h_i], dtype=np.int64)  # (b, h_i)
    if sampling == "tied":
        if (needed := -(-h_t // PER_IMAGE)) > h_i:
            raise input_error("images", f"lists of {h_i}", f"at least {needed} for {h_t} captions when ranks are tied")
        row, rank = np.arange(len(captions)), generator.integers(h_t, size=len(captions))
        t_off, i_off = negative_texts[row, rank], negative_images[row, rank // PER_IMAGE]
    else:
        t_off, i_off = _draw_apart(owner, captions, negative_texts, negative_images, generator, sampling)
    first, last = np.searchsorted(owner, i_off), np.searchsorted(owner, i_off, side="right")
    return Drawn(t_off, i_off, owner[t_off], first + generator.integers(last - first))


def _draw_apart(
    owner: np.ndarray,
    captions: np.ndarray,
    negative_texts: np.ndarray,
    negative_images: np.ndarray,
    generator: np.random.Generator,
    sampling: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(b,) captions of (b, h_t) and (b,) images of (b, h_i) that do not belong together."""
    t_off, i_off = negative_texts[:, 0].copy(), negative_images[:, 0].copy()
    kinds = [(kind, table, rank_chances(table.shape[1], sampling))
             for kind, table in ((t_off, negative_texts), (i_off, negative_images))]  # fmt: skip
    again = np.arange(len(captions))
    for _ in range(REDRAWS):
        for drawn, table, chances in kinds:
            drawn[again] = table[again, generator.choice(len(chances), size=len(again), p=chances)]
        again = again[owner[t_off[again]] == i_off[again]]
        if not len(again):
            return t_off, i_off
    apart = negative_images[again] != owner[t_off[again]][:, None]  # (left over, h_i)
    if not apart.any(axis=1).all():
        caption = int(captions[again[~apart.any(axis=1)]][0])
        found = f"caption {caption} with one candidate image, and no caption that is not of that image"
        raise input_error("offline lists", found, "a negative pair to draw", "Use longer lists of images.")
    i_off[again] = negative_images[again, apart.argmax(axis=1)]
    return t_off, i_off


def rank_chances(length: int, sampling: str) -> np.ndarray:
    """(length,) probability of each rank of a list, the best first."""
    rank = np.arange(length)
    weights = {
        "uniform": np.ones(length),
        "normal": np.exp(-0.5 * ((rank - (length - 1) / 2) / (length / 6)) ** 2),
    }
    if sampling not in weights:
        raise input_error("sampling", repr(sampling), f"one of {', '.join([*weights, 'tied'])}")
    return weights[sampling] / weights[sampling].sum()


def _used(table: np.ndarray, wanted: int | None, what: str) -> int:
    """How many entries of each list are used."""
    used: int = table.shape[1] if wanted is None else wanted
    if not 1 <= used <= table.shape[1]:
        raise input_error(what, str(used), f"1 to {table.shape[1]}, the length of the lists")
    return used
