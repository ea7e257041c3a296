"""Hard negatives of a whole training set: every pair is scored once, and only the best of each row and column stay.

    lists = mine(model, train, captions, "runs/vsrn/lists")      # goes on where it was interrupted
    lists = read_lists("runs/vsrn/lists", train)

The scores of a training set do not fit into memory (29,000 x 145,000 are 17 GB), nor do the regions and words of an
attention model. So images are encoded in shelves that fit a budget, captions stream past each shelf, and of every tile
of scores only those are kept that are among the best so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from itm_utils import scoring
from itm_utils.data.batches import image_batch
from itm_utils.data.offline import Drawn, OfflineLists, data_facts, draw_offline, read_lists, read_manifest, write_lists
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import ItmError, input_error
from itm_utils.matcher import ABSENT, Encoded, Images, Matcher, Scores, Texts
from itm_utils.progress import bar
from itm_utils.scoring import Captions, block_shape, evaluating, score_all, trim
from itm_utils.training.checkpoints import check_same, fingerprint_of, read_checkpoint, write_checkpoint

__all__ = ["Drawn", "OfflineLists", "draw_offline", "mine", "read_lists"]

BUDGET = 2**30  # bytes for encodings and one tile of scores
SAVE_EVERY = 60  # seconds between two notes of how far mining has come
STATE = "unfinished.safetensors"
BLOCK = 4096  # captions that are held at once, at most: after each block mining can be interrupted
TILE = 256  # images and captions of one tile of scores, at least: looking at a tile costs more than its numbers
MANY = 2**21  # candidates that are sorted in at once; more are taken in parts
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
    """For each image its hardest negative captions (by ``i2t``), for each caption its hardest negative images (by ``t2i``).

    Called again after an interruption, it goes on, and the lists are the same byte for byte. Finished lists are read.
    Equal scores are ordered by number, the lower first.

    captions: those of ``split``, as the model takes them.
    folder: receives the lists; until they are finished, a note of how far mining has come.
    budget: bytes for encodings and scores. Where all images do not fit into a quarter of it, they are taken in
    shelves, and the captions are encoded once for each. Beside it stand 8 bytes for every entry of the lists, twice
    while a note is written.
    described: what else the manifest shall say of the model, such as its run.
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
    with FileLock(folder / ".lock"):  # a second process waits, and finds the lists of the first
        if (folder / "manifest.json").exists():
            check_same(folder / "manifest.json", read_manifest(folder), facts)
        else:
            work = _Mining(model, split, captions, facts | {"budget": budget}, folder / STATE)
            name = {"dataset": split.identity()["name"], "described": dict(described or {})}
            write_lists(folder, *work.finish(), facts | name)
        (folder / STATE).unlink(missing_ok=True)
    return read_lists(folder, split)


def _check_lengths(split: PrecompSplit, texts: int, images: int) -> None:
    """Every list can be filled."""
    most = {"texts_per_image": split.n_captions - int(np.bincount(split.owner).max()),
            "images_per_text": split.n_images - 1}  # fmt: skip
    for (name, available), wanted in zip(most.items(), (texts, images), strict=True):
        if not 1 <= wanted <= available:
            raise input_error(name, str(wanted), f"1 to {available}: split {split.name} has no more negatives for each")


class _Mining:
    """One call of :func:`mine`. facts: what a note of an interrupted call must agree with."""

    def __init__(
        self, model: Matcher, split: PrecompSplit, captions: Captions, facts: dict[str, Any], note: Path
    ) -> None:
        self.model, self.split, self.captions, self.facts, self.note = model, split, captions, facts, note
        order = np.argsort(captions.lengths, kind="stable")  # captions of one length need no padding
        with evaluating(model) as device:
            self.device = device
        self.order = torch.from_numpy(order).to(device)
        self.owner = torch.from_numpy(split.owner[order]).to(device)
        self.texts = _Best(split.n_images, facts["texts_per_image"], device)
        self.images = _Best(split.n_captions, facts["images_per_text"], device)  # rows as in ``order``

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """(i, h_t) and (c, h_i): both lists, from where the note stands to the end."""
        with evaluating(self.model):
            steps = self._steps()
            images: Images = ABSENT
            shelf, done, saved = -1, self._resume(), time.monotonic()
            for step in bar(range(done, len(steps)), "mine", "block", initial=done, total=len(steps)):
                image, caption = steps[step]
                if image.start != shelf:
                    images = ABSENT  # forget one shelf before the next is filled
                    shelf, images = image.start, Images.cat(self._encode_images(image))
                self._compare(images, Texts.cat(self._encode_texts(caption)), image.start, caption.start)
                if time.monotonic() - saved >= SAVE_EVERY and step + 1 < len(steps):
                    self._save(step + 1)
                    saved = time.monotonic()
            by_number = np.empty((len(self.order), self.images.length), dtype=np.int32)
            by_number[self.order.cpu().numpy()] = self.images.ranked(type(self.model).__name__)
            return self.texts.ranked(type(self.model).__name__), by_number

    def _steps(self) -> list[tuple[range, range]]:
        """Shelves of images and blocks of captions, sized by what the first images and the longest captions need.

        A side is held twice while its batches are joined: a shelf may take a quarter of the budget, a block an eighth.
        """
        images, captions = self.split.n_images, self.split.n_captions
        first = self._encode_images(range(min(scoring.BATCH, images)))[0]
        longest = self._encode_texts(range(max(0, captions - scoring.BATCH), captions))[0]
        shelf = _fitting(self.facts["budget"] // 4, first)
        block = min(BLOCK, _fitting(self.facts["budget"] // 8, longest))
        return [(range(i, min(i + shelf, images)), range(c, min(c + block, captions)))
                for i in range(0, images, shelf) for c in range(0, captions, block)]  # fmt: skip

    def _encode_images(self, images: range) -> list[Images]:
        batches = (image_batch(self.split, np.array(part)) for part in _batches(images))
        return [self.model.encode_images(batch.to(self.device)) for batch in batches]

    def _encode_texts(self, positions: range) -> list[Texts]:
        batches = (
            self.captions.batch(self.order[part.start : part.stop].cpu().numpy()) for part in _batches(positions)
        )
        return [self.model.encode_texts(batch.to(self.device)) for batch in batches]

    def _compare(self, images: Images, texts: Texts, first_image: int, first_caption: int) -> None:
        """Score a shelf against a block of captions, a tile at a time."""
        rows, columns = (max(size, TILE) for size in block_shape(self.model, images, texts, self.facts["budget"] // 4))
        for column in range(0, len(texts), columns):
            block = trim(texts[column : column + columns])
            there = slice(first_caption + column, first_caption + column + len(block))
            for row in range(0, len(images), rows):
                part = images[row : row + rows]
                here = slice(first_image + row, first_image + row + len(part))
                scores = self._without_own(self._score(part, block), here, there)
                numbers = torch.arange(here.start, here.stop, device=self.device)
                self.texts.offer(scores.i2t, here, self.order[there], axis=0)
                self.images.offer(scores.t2i, there, numbers, axis=1)

    def _score(self, images: Images, texts: Texts) -> Scores:
        """The scores of a tile: at once if that fits the budget, else in smaller blocks."""
        budget = self.facts["budget"] // 4
        if block_shape(self.model, images, texts, budget) == (len(images), len(texts)):
            return self.model.score(images, texts)
        return score_all(self.model, images, texts, budget, progress=False, device=self.device)

    def _without_own(self, scores: Scores, here: slice, there: slice) -> Scores:
        """The scores of a tile, positive pairs below all others."""
        owner = self.owner[there]
        column = ((owner >= here.start) & (owner < here.stop)).nonzero()[:, 0]
        parts = [scores.i2t, scores.t2i] if scores.decoupled else [scores.i2t]
        parts = [part.float().contiguous() for part in parts]
        for part in parts:
            if not bool(part.amax() < torch.inf):  # nor is NaN
                raise input_error(type(self.model).__name__, "a score that is NaN or infinite", "finite scores")
            part[owner[column] - here.start, column] = -torch.inf
        return Scores(parts[0], parts[-1])

    def _save(self, steps: int) -> None:
        tensors = {"texts": self.texts.keys, "images": self.images.keys}
        write_checkpoint(self.note, tensors, {"mining": self.facts, "steps": steps})

    def _resume(self) -> int:
        """How many steps are done, by the note of an interrupted call."""
        for left_over in self.note.parent.glob(f".{self.note.name}.*.tmp"):  # of a process killed while writing
            left_over.unlink()
        if not self.note.exists():
            return 0
        try:
            known = read_checkpoint(self.note)
        except ItmError as error:
            print(f"{error} Mining begins again.")
            return 0
        check_same(self.note, known.info, {"mining": self.facts})
        self.texts.keys.copy_(known.tensors["texts"])
        self.images.keys.copy_(known.tensors["images"])
        return known.info["steps"]


def _fitting(budget: int, encoded: Encoded) -> int:
    """How many items of this size fit, in whole batches."""
    sizes: list[int] = []
    encoded._map(lambda tensor: sizes.append(tensor.nbytes) or tensor)
    return max(1, budget * len(encoded) // sum(sizes) // scoring.BATCH) * scoring.BATCH


def _batches(items: range) -> Iterator[range]:
    return (items[start : start + scoring.BATCH] for start in range(0, len(items), scoring.BATCH))


class _Best:
    """The best candidates of each row so far. A key is one whole number: the score above, the candidate below.

    The larger of two keys has the higher score or, of equal scores, the lower candidate. So the largest keys are the
    same whatever the order in which they come. keys: (rows, length) int64, in no order.
    """

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.length = length
        nothing = int(_keys(torch.tensor([-torch.inf]), torch.tensor([INDEX])))
        self.keys = torch.full((rows, length), nothing, dtype=torch.int64, device=device)

    def offer(self, scores: Tensor, rows: slice, candidates: Tensor, axis: int) -> None:
        """Keep what is among the best of its row.

        scores: a tile, its rows along ``axis`` (1: they are columns). candidates: (n,) numbers along the other axis.
        """
        kept, across = self.keys[rows], 1 - axis
        floor = _scores(kept.amin(dim=1))
        if len(candidates) > self.length and bool(floor.isneginf().any()):
            # A floor for the first that come: of enough groups the best is above it. Cheaper than sorting them all.
            fold = max(1, len(candidates) // (4 * self.length))
            groups = scores.narrow(across, 0, len(candidates) // fold * fold).unflatten(across, (fold, -1))
            best = groups.amax(dim=across).topk(self.length, dim=across, sorted=False).values
            floor = torch.maximum(floor, best.amin(dim=across))
        # Nearly all are below the worst that is kept. An equal one may still win by its number.
        found = (scores >= floor.unsqueeze(across)).nonzero()
        if len(found) > MANY and len(kept) > 1:
            for part in (slice(0, len(kept) // 2), slice(len(kept) // 2, len(kept))):
                half = slice(rows.start + part.start, rows.start + part.stop)
                self.offer(scores[part] if axis == 0 else scores[:, part], half, candidates, axis)
        elif len(found):
            if axis == 1:  # row by row, as they are if images are the rows
                found = found[found[:, 1].argsort(stable=True)]
            row = found[:, axis]
            keys = _keys(scores[found[:, 0], found[:, 1]], candidates[found[:, across]])
            counts = torch.bincount(row, minlength=len(kept))
            place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
            offered = kept.new_full((len(kept), int(counts.max())), torch.iinfo(torch.int64).min)
            offered[row, place] = keys
            self.keys[rows] = torch.cat([kept, offered], dim=1).topk(self.length, sorted=False).values

    def ranked(self, whose: str) -> np.ndarray:
        """(rows, length) int32 candidates, best first. whose: the model, for an error."""
        found = np.empty(self.keys.shape, dtype=np.int32)
        for start in range(0, len(found), BLOCK):
            keys = self.keys[start : start + BLOCK].sort(dim=1, descending=True).values
            if not bool(_scores(keys[:, -1]).isfinite().all()):
                raise input_error(whose, "scores of minus infinity", "finite scores")
            found[start : start + BLOCK] = (INDEX - (keys & INDEX)).cpu().numpy()
        return found


def _keys(scores: Tensor, numbers: Tensor) -> Tensor:
    """int64 keys of float32 scores: as whole numbers, their bits are in order once negative ones are turned round."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 is 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (INDEX - numbers)


def _scores(keys: Tensor) -> Tensor:
    """The scores of keys."""
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
