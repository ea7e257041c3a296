"""Offline hard negatives of a whole training set: every pair is scored once, the top-k of each row and column stay.

    lists = mine(model, train, captions, "runs/vsrn/lists")      # resumes after an interruption
    lists = read_lists("runs/vsrn/lists", train)

The scores of a training set do not fit into memory (29,000 x 145,000 are 17 GB), nor do the regions and words of an
attention model. So images are encoded in blocks that fit a budget, captions stream past each block, and each tile of
scores updates a running top-k.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from itm_utils import distributed, scoring
from itm_utils.data.batches import image_batch
from itm_utils.data.offline import (
    Drawn,
    OfflineLists,
    data_facts,
    draw_offline,
    read_lists,
    read_lists_manifest,
    write_lists,
)
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import ItmError, input_error
from itm_utils.matcher import Encoded, Images, Matcher, Scores, Texts
from itm_utils.progress import bar
from itm_utils.scoring import Captions, block_shape, evaluating, score_all, trim
from itm_utils.training.checkpoints import check_same, fingerprint_of, read_checkpoint, write_checkpoint

__all__ = ["Drawn", "OfflineLists", "draw_offline", "mine", "read_lists"]

BUDGET = 2**30  # bytes for encodings and one tile of scores
SAVE_EVERY = 60  # seconds between two checkpoints
STATE = "unfinished.safetensors"
BLOCK = 4096  # captions that are held at once, at most; mining can be resumed after each block
TILE = 256  # images and captions of one tile of scores, at least: a tile has a fixed cost
MANY = 2**21  # candidates that are merged at once; more are taken in parts
INDEX = 2**32 - 1  # the lower half of a key


def mine(
    model: Matcher,
    split: PrecompSplit,
    captions: Captions,
    folder: str | Path,
    texts_per_image: int = 300,
    images_per_text: int = 60,
    budget: int = BUDGET,
    described: Mapping[str, Any] | None = None,
) -> OfflineLists:
    """Mine the hardest negative captions of each image (by ``i2t``) and negative images of each caption (by ``t2i``).

    Called again after an interruption, it resumes, and the lists are the same byte for byte. Finished lists are read.
    Equal scores are ordered by index, the lower first. Several processes that call it together share the pairs, and one
    writes; an interrupted call may go on with another number of them.

    captions: those of ``split``, as the model takes them.
    folder: receives the lists; until they are finished, a checkpoint.
    budget: bytes for encodings and scores. Where all images do not fit into a quarter of it, they are taken in
    blocks, and the captions are encoded once per block. In addition, 8 bytes per entry of the lists, twice while a
    checkpoint is written.
    described: what else the manifest records of the model, such as its run.
    """
    folder = Path(folder)
    if len(captions.lengths) != split.n_captions:
        raise input_error(
            "captions", f"{len(captions.lengths)} of them", f"the {split.n_captions} of split {split.name}"
        )
    _check_lengths(split, texts_per_image, images_per_text)
    facts = {
        "model": type(model).__name__,
        "config": model.config,
        "weights": fingerprint_of(model),
        "text_source": getattr(captions, "fingerprint", ""),
        "data": data_facts(split),
        "texts_per_image": texts_per_image,
        "images_per_text": images_per_text,
    }
    folder.mkdir(parents=True, exist_ok=True)
    main = distributed.is_main()
    # A second process waits, and reads the lists of the first; those that mine together are behind one lock.
    with FileLock(folder / ".lock") if main else nullcontext():
        found = _finished(folder, split, facts) if main else None
        if not distributed.agreed(found is not None):
            work = _Mining(model, split, captions, facts | {"budget": budget}, folder / STATE)
            name = {"dataset": split.identity()["name"], "described": dict(described or {})}
            work.finish()
            if main:
                write_lists(folder, *work.lists(), facts | name | {"seconds": work.seconds})
        if main:
            (folder / STATE).unlink(missing_ok=True)
    distributed.wait_for_all()
    return read_lists(folder, split) if found is None else found


def _finished(folder: Path, split: PrecompSplit, facts: Mapping[str, Any]) -> OfflineLists | None:
    """The lists of a folder, if they are there and whole; those of other facts are an error."""
    if not (folder / "manifest.json").exists():
        return None
    check_same(folder / "manifest.json", read_lists_manifest(folder), facts)
    try:
        return read_lists(folder, split)
    except ItmError as error:  # they are of these facts, and a disk damaged them
        print(f"{error} Mining begins again.")
        (folder / "manifest.json").unlink()
        return None


def longest_lists(split: PrecompSplit) -> tuple[int, int]:
    """How many negative captions there are for every image, and how many negative images for every caption."""
    return split.n_captions - int(np.bincount(split.owner).max()), split.n_images - 1


def _check_lengths(split: PrecompSplit, texts: int, images: int) -> None:
    """Check that there are enough negatives to fill every list."""
    wanted_lengths = {"texts_per_image": texts, "images_per_text": images}
    for (name, wanted), available in zip(wanted_lengths.items(), longest_lists(split), strict=True):
        if not 1 <= wanted <= available:
            raise input_error(name, str(wanted), f"1 to {available}: split {split.name} has no more negatives for each")


class _Mining:
    """One call of :func:`mine`. facts: what the checkpoint of an interrupted call must agree with."""

    def __init__(
        self, model: Matcher, split: PrecompSplit, captions: Captions, facts: dict[str, Any], checkpoint: Path
    ) -> None:
        self.model, self.split, self.captions, self.facts, self.checkpoint = model, split, captions, facts, checkpoint
        order = np.argsort(captions.lengths, kind="stable")  # captions of one length need no padding
        with evaluating(model) as device:
            self.device = device
        self.order = torch.from_numpy(order).to(device)
        self.owner = torch.from_numpy(split.owner[order]).to(device)
        self.texts = _TopK(split.n_images, facts["texts_per_image"], device)
        self.images = _TopK(split.n_captions, facts["images_per_text"], device)  # rows as in ``order``
        self.seconds = 0.0  # of all calls that worked on these lists, without what a killed one had not saved

    def finish(self) -> None:
        """Score all pairs from the last checkpoint on; the main process then has what to list."""
        began = time.monotonic()
        with evaluating(self.model):
            steps = self._steps()
            first, images, done, saved = -1, None, self._resume(), time.monotonic()
            began -= self.seconds
            missing = [step for step in range(len(steps)) if step not in done]
            # Neighbours for each process: they share a block of images. A turn is a step of every process.
            count = distributed.processes()
            turns = list(zip_longest(*(missing[distributed.share(len(missing), n, count)] for n in range(count))))
            before = len(done) // count
            progress = bar(turns, "mine", "block", initial=before, total=before + len(turns))
            for number, turn in enumerate(progress, start=1):
                if (step := turn[distributed.rank()]) is not None:
                    image, caption = steps[step]
                    if images is None or image.start != first:
                        images = None  # free one block before the next is encoded
                        first, images = image.start, Images.cat(self._encode_images(image))
                    self._compare(images, Texts.cat(self._encode_texts(caption)), image.start, caption.start)
                done |= {step for step in turn if step is not None}
                self.seconds = time.monotonic() - began
                if number < len(turns) and distributed.agreed(time.monotonic() - saved >= SAVE_EVERY):
                    self._save(done)
                    saved = time.monotonic()
            self.images.merge()
            self.texts.merge()
            self.seconds = time.monotonic() - began

    def lists(self) -> tuple[np.ndarray, np.ndarray]:
        """(i, h_t) and (c, h_i): both lists, hardest first."""
        by_index = np.empty((len(self.order), self.images.length), dtype=np.int32)
        by_index[self.order.cpu().numpy()] = self.images.ranked(type(self.model).__name__)
        return self.texts.ranked(type(self.model).__name__), by_index

    def _steps(self) -> list[tuple[range, range]]:
        """Blocks of images and of captions, sized by what the first images and the longest captions need.

        A side is held twice while its batches are joined: images may take a quarter of the budget, captions an eighth.
        """
        images, captions = self.split.n_images, self.split.n_captions
        first = self._encode_images(range(min(scoring.BATCH, images)))[0]
        longest = self._encode_texts(range(max(0, captions - scoring.BATCH), captions))[0]
        rows = _fitting(self.facts["budget"] // 4, first)
        columns = min(BLOCK, _fitting(self.facts["budget"] // 8, longest))
        return [(range(i, min(i + rows, images)), range(c, min(c + columns, captions)))
                for i in range(0, images, rows) for c in range(0, captions, columns)]  # fmt: skip

    def _encode_images(self, images: range) -> list[Images]:
        batches = (image_batch(self.split, np.array(part)) for part in _batches(images))
        return [self.model.encode_images(batch.to(self.device)) for batch in batches]

    def _encode_texts(self, positions: range) -> list[Texts]:
        batches = (
            self.captions.batch(self.order[part.start : part.stop].cpu().numpy()) for part in _batches(positions)
        )
        return [self.model.encode_texts(batch.to(self.device)) for batch in batches]

    def _compare(self, images: Images, texts: Texts, first_image: int, first_caption: int) -> None:
        """Score a block of images against a block of captions, a tile at a time."""
        rows, columns = (max(size, TILE) for size in block_shape(self.model, images, texts, self.facts["budget"] // 4))
        for column in range(0, len(texts), columns):
            block = trim(texts[column : column + columns])
            there = slice(first_caption + column, first_caption + column + len(block))
            for row in range(0, len(images), rows):
                part = images[row : row + rows]
                here = slice(first_image + row, first_image + row + len(part))
                scores = self._mask_positives(self._score(part, block), here, there)
                indices = torch.arange(here.start, here.stop, device=self.device)
                self.texts.update(scores.i2t, here, self.order[there], axis=0)
                self.images.update(scores.t2i, there, indices, axis=1)

    def _score(self, images: Images, texts: Texts) -> Scores:
        """Score a tile: at once if it fits the budget, else in smaller blocks."""
        budget = self.facts["budget"] // 4
        if block_shape(self.model, images, texts, budget) == (len(images), len(texts)):
            return self.model.score(images, texts)
        return score_all(self.model, images, texts, budget, progress=False, device=self.device)

    def _mask_positives(self, scores: Scores, here: slice, there: slice) -> Scores:
        """The scores of a tile with minus infinity at the positive pairs."""
        owner = self.owner[there]
        column = ((owner >= here.start) & (owner < here.stop)).nonzero()[:, 0]
        parts = [scores.i2t, scores.t2i] if scores.decoupled else [scores.i2t]
        parts = [part.float().contiguous() for part in parts]
        for part in parts:
            if not bool(part.amax() < torch.inf):  # nor is NaN
                raise input_error(type(self.model).__name__, "a score that is NaN or infinite", "finite scores")
            part[owner[column] - here.start, column] = -torch.inf
        return Scores(parts[0], parts[-1])

    def _save(self, done: set[int]) -> None:
        """Write what all processes have found; the main one keeps that, the others go on from nothing."""
        self.texts.merge()
        self.images.merge()
        if distributed.is_main():
            tensors = {"texts": self.texts.keys, "images": self.images.keys}
            info = {"mining": self.facts, "done": sorted(done), "steps": len(done), "seconds": self.seconds}
            write_checkpoint(self.checkpoint, tensors, info)

    def _resume(self) -> set[int]:
        """Load the checkpoint of an interrupted call; returns the steps that are done."""
        if distributed.is_main():
            for left_over in self.checkpoint.parent.glob(f".{self.checkpoint.name}.*.tmp"):  # killed while writing
                left_over.unlink()
        if not distributed.agreed(self.checkpoint.exists()):
            return set()
        try:
            known = read_checkpoint(self.checkpoint)
        except ItmError as error:
            print(f"{error} Mining begins again.")
            return set()
        check_same(self.checkpoint, known.info, {"mining": self.facts})
        if distributed.is_main():
            self.texts.keys.copy_(known.tensors["texts"])
            self.images.keys.copy_(known.tensors["images"])
        self.seconds = known.info.get("seconds", 0.0)
        return set(known.info["done"] if "done" in known.info else range(known.info["steps"]))  # of earlier versions


def _fitting(budget: int, encoded: Encoded) -> int:
    """How many items of this size fit into ``budget``, in whole batches."""
    sizes: list[int] = []
    encoded._map(lambda tensor: sizes.append(tensor.nbytes) or tensor)
    return max(1, budget * len(encoded) // sum(sizes) // scoring.BATCH) * scoring.BATCH


def _batches(items: range) -> Iterator[range]:
    return (items[start : start + scoring.BATCH] for start in range(0, len(items), scoring.BATCH))


class _TopK:
    """A running top-k of each row. A key is one integer: the score in its upper half, the candidate in its lower.

    The larger of two keys has the higher score or, of equal scores, the lower candidate. So the largest keys do not
    depend on the order of updates. keys: (rows, length) int64, unordered.
    """

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.length = length
        self.empty = int(_keys(torch.tensor([-torch.inf]), torch.tensor([INDEX])))
        self.keys = torch.full((rows, length), self.empty, dtype=torch.int64, device=device)

    def merge(self) -> None:
        """Give the main process what all have found, and empty the others."""
        for keys in distributed.collected(self.keys)[1:]:
            self.keys = torch.cat([self.keys, keys], dim=1).topk(self.length, sorted=False).values
        if not distributed.is_main():
            self.keys.fill_(self.empty)

    def update(self, scores: Tensor, rows: slice, candidates: Tensor, axis: int) -> None:
        """Merge a tile into the top-k of its rows.

        scores: a tile, its rows along ``axis`` (1: they are columns). candidates: (n,) indices along the other axis.
        """
        kept, across = self.keys[rows], 1 - axis
        floor = _scores(kept.amin(dim=1))
        if len(candidates) > self.length and bool(floor.isneginf().any()):
            # A lower bound while the lists are not full: k group maxima are above it. Cheaper than sorting all.
            fold = max(1, len(candidates) // (4 * self.length))
            groups = scores.narrow(across, 0, len(candidates) // fold * fold).unflatten(across, (fold, -1))
            best = groups.amax(dim=across).topk(self.length, dim=across, sorted=False).values
            floor = torch.maximum(floor, best.amin(dim=across))
        # Nearly all are below the lowest that is kept. An equal one may still win by its index.
        found = (scores >= floor.unsqueeze(across)).nonzero()
        if len(found) > MANY and len(kept) > 1:
            for part in (slice(0, len(kept) // 2), slice(len(kept) // 2, len(kept))):
                half = slice(rows.start + part.start, rows.start + part.stop)
                self.update(scores[part] if axis == 0 else scores[:, part], half, candidates, axis)
        elif len(found):
            if axis == 1:  # sort by row, as they are if images are the rows
                found = found[found[:, 1].argsort(stable=True)]
            row = found[:, axis]
            keys = _keys(scores[found[:, 0], found[:, 1]], candidates[found[:, across]])
            counts = torch.bincount(row, minlength=len(kept))
            place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
            added = kept.new_full((len(kept), int(counts.max())), torch.iinfo(torch.int64).min)
            added[row, place] = keys
            self.keys[rows] = torch.cat([kept, added], dim=1).topk(self.length, sorted=False).values

    def ranked(self, model: str) -> np.ndarray:
        """(rows, length) int32 candidates, hardest first. model: its name, for an error."""
        found = np.empty(self.keys.shape, dtype=np.int32)
        for start in range(0, len(found), BLOCK):
            keys = self.keys[start : start + BLOCK].sort(dim=1, descending=True).values
            if not bool(_scores(keys[:, -1]).isfinite().all()):
                raise input_error(model, "scores of minus infinity", "finite scores")
            found[start : start + BLOCK] = (INDEX - (keys & INDEX)).cpu().numpy()
        return found


def _keys(scores: Tensor, candidates: Tensor) -> Tensor:
    """int64 keys of float32 scores, whose bits are in order as integers once those of negative scores are flipped."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 is 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (INDEX - candidates)


def _scores(keys: Tensor) -> Tensor:
    """The scores of keys."""
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
