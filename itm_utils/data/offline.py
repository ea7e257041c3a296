"""Offline hard negatives: lists on disk, and how a batch draws from them.

:mod:`itm_utils.mining` writes the lists. A folder of lists holds

==================  ============================================================================
``texts.npy``       (i, h_t) int32, for each image captions of other images, hardest first
``images.npy``      (c, h_i) int32, for each caption images that are not its own, hardest first
``manifest.json``   written last: model, data, lengths, and a checksum of both files
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
REDRAWS = 100  # attempts at an offline image and an offline caption that do not match
PER_IMAGE = 5  # captions per image in the public data: tied sampling divides ranks by it


@dataclass(frozen=True)
class OfflineLists:
    """Offline hard negatives of a training set.

    texts: (i, h_t) int32, memory-mapped: for each image captions of other images, hardest first.
    images: (c, h_i) int32, memory-mapped: for each caption images that are not its own, hardest first.
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
        """Raise unless these are lists of this split."""
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
    """What lists must share with a split; not the folder's name: data may be moved."""
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
        files[name] = _sha256(path)
    write_json(folder / "manifest.json", {"format": FORMAT, **manifest, "files": files})


def read_lists(folder: str | Path, split: PrecompSplit) -> OfflineLists:
    """Read the lists of a folder; an error if they are damaged or of another split."""
    manifest, path = read_lists_manifest(folder), Path(folder) / "manifest.json"
    arrays = {}
    for name in FILES:
        arrays[name] = load_array(path.with_name(f"{name}.npy"), mmap_mode="r")
        if _sha256(path.with_name(f"{name}.npy")) != manifest["files"][name]:
            expected = f"those that {path.name} describes"
            raise input_error(path.with_name(f"{name}.npy"), "other bytes than were mined", expected, AGAIN)
    lists = OfflineLists(**arrays, manifest=manifest)
    lists.check(split, path)
    return lists


def read_lists_manifest(folder: str | Path) -> dict[str, Any]:
    """Read the manifest of a folder of lists."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise input_error(path, "no such file", "finished lists in this folder", MINE)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        whole = {*FILES} <= {*manifest["files"]} and {"split", "fingerprint"} <= {*manifest["data"]}
        whole = whole and isinstance(manifest["texts_per_image"] + manifest["images_per_text"], int)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise input_error(path, f"a damaged file ({error!r})", "the manifest of lists", AGAIN) from error
    if not whole or manifest.get("format") != FORMAT:
        raise input_error(path, f"format {manifest.get('format')!r}", f"a whole manifest of format {FORMAT}", AGAIN)
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Drawn(NamedTuple):
    """Offline negatives of a batch, one of each kind per pair, all (b,) int64.

    texts: a negative caption of the pair's image. images: a negative image of its caption.
    text_images: the positive image of ``texts``. image_texts: a positive caption of ``images``.
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
    """Draw offline negatives for the pairs of ``captions`` (b,) with their images.

    owner: (c,) image of each caption of the training set, in order.
    texts, images: use only the first so many entries of each list; all by default.
    sampling: how ranks are drawn.

    * ``uniform``, the paper's: a rank of each list, independently. If image and caption are a positive pair, both are
      drawn again; after ``REDRAWS`` times the hardest image that does not match the caption is taken.
    * ``normal``: the same with a normal distribution over the ranks, its mean in the middle of the list, its standard
      deviation a sixth of the list. The paper tried one, without saying which, to draw less from the top of the lists,
      where false negatives are frequent.
    * ``tied``, the public code's: one rank n for both, the n-th caption and the (n div 5)-th image, never drawn again.
    """
    owner, captions = np.asarray(owner), np.asarray(captions)
    h_t, h_i = _list_length(lists.texts, texts, "texts"), _list_length(lists.images, images, "images")
    hard_texts = np.asarray(lists.texts[owner[captions], :h_t], dtype=np.int64)  # (b, h_t)
    hard_images = np.asarray(lists.images[captions, :h_i], dtype=np.int64)  # (b, h_i)
    if sampling == "tied":
        if (needed := -(-h_t // PER_IMAGE)) > h_i:
            raise input_error("images", f"lists of {h_i}", f"at least {needed} for {h_t} captions when ranks are tied")
        row, rank = np.arange(len(captions)), generator.integers(h_t, size=len(captions))
        t_off, i_off = hard_texts[row, rank], hard_images[row, rank // PER_IMAGE]
    else:
        t_off, i_off = _draw_independently(owner, captions, hard_texts, hard_images, generator, sampling)
    first, last = np.searchsorted(owner, i_off), np.searchsorted(owner, i_off, side="right")
    return Drawn(t_off, i_off, owner[t_off], first + generator.integers(last - first))


def _draw_independently(
    owner: np.ndarray,
    captions: np.ndarray,
    hard_texts: np.ndarray,
    hard_images: np.ndarray,
    generator: np.random.Generator,
    sampling: str,
) -> tuple[np.ndarray, np.ndarray]:
    """(b,) captions of (b, h_t) and (b,) images of (b, h_i) that do not match."""
    t_off, i_off = hard_texts[:, 0].copy(), hard_images[:, 0].copy()
    sides = [(drawn, table, rank_probabilities(table.shape[1], sampling))
             for drawn, table in ((t_off, hard_texts), (i_off, hard_images))]  # fmt: skip
    again = np.arange(len(captions))
    for _ in range(REDRAWS):
        for drawn, table, probabilities in sides:
            drawn[again] = table[again, generator.choice(len(probabilities), size=len(again), p=probabilities)]
        again = again[owner[t_off[again]] == i_off[again]]
        if not len(again):
            return t_off, i_off
    negative = hard_images[again] != owner[t_off[again]][:, None]  # (remaining, h_i)
    if not negative.any(axis=1).all():
        caption = int(captions[again[~negative.any(axis=1)]][0])
        found = f"caption {caption} with one offline image, and only captions of that image"
        raise input_error("offline lists", found, "a negative pair to draw", "Use longer lists of images.")
    i_off[again] = hard_images[again, negative.argmax(axis=1)]
    return t_off, i_off


def rank_probabilities(length: int, sampling: str) -> np.ndarray:
    """(length,) probability of each rank of a list, hardest first."""
    rank = np.arange(length)
    weights = {
        "uniform": np.ones(length),
        "normal": np.exp(-0.5 * ((rank - (length - 1) / 2) / (length / 6)) ** 2),
    }
    if sampling not in weights:
        raise input_error("sampling", repr(sampling), f"one of {', '.join([*weights, 'tied'])}")
    return weights[sampling] / weights[sampling].sum()


def _list_length(table: np.ndarray, wanted: int | None, what: str) -> int:
    """How many entries of each list are used."""
    length = table.shape[1] if wanted is None else wanted
    if not 1 <= length <= table.shape[1]:
        raise input_error(what, str(length), f"1 to {table.shape[1]}, the length of the lists")
    return length
