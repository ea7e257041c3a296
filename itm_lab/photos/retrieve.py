"""Retrieve and re-rank: an index of one vector per item finds candidates, the model's full score orders them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from itm_lab.data.opening import dataset_folder
from itm_lab.index.store import Encoder, Index, Source, check_free, create_index, open_index
from itm_lab.photos.search import Found, Opened, check_query, image_number, open_run
from itm_utils.data.batches import image_batch
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.errors import input_error
from itm_utils.matcher import Encoded, Images, Matcher, Texts
from itm_utils.models.search_at_scale import summary_vectors
from itm_utils.progress import bar
from itm_utils.scoring import BATCH, Captions, evaluating, score_all
from itm_utils.training.checkpoints import tensor_digest

CANDIDATES = 200  # items that the full score orders


@dataclass(frozen=True)
class Match:
    """One line of an answer. number: in the index. name: of the image, or the caption. cheap, full: its two scores."""

    number: int
    name: str
    cheap: float
    full: float
    source: Source


def source_of(split: PrecompSplit) -> Source:
    """How an index names a split."""
    return Source(str(split.root), split.name, split.identity()["fingerprint"])


def image_vectors(model: Matcher, split: PrecompSplit) -> np.ndarray:
    """(i, d) vectors of all images of a split, encoded block by block."""
    with evaluating(model) as device:
        blocks = [
            summary_vectors(model.encode_images(image_batch(split, some).to(device))).cpu().numpy()
            for some in blocks_of(split.n_images, "encode images")
        ]
    return np.concatenate(blocks)


def caption_vectors(model: Matcher, texts: Captions) -> np.ndarray:
    """(c, d) vectors of captions, encoded in order of length."""
    order = np.argsort(texts.lengths, kind="stable")
    with evaluating(model) as device:
        blocks = [
            summary_vectors(model.encode_texts(texts.batch(order[some]).to(device))).cpu().numpy()
            for some in blocks_of(len(order), "encode captions")
        ]
    found = np.empty((len(order), blocks[0].shape[1]), dtype=np.float32)
    found[order] = np.concatenate(blocks)
    return found


def blocks_of(items: int, what: str) -> Iterator[np.ndarray]:
    for start in bar(range(0, items, BATCH), what, "block"):
        yield np.arange(start, min(start + BATCH, items))


def vectors_of(opened: Opened, items: str) -> np.ndarray:
    """Vectors of the images, or of the captions, of the opened split."""
    if getattr(opened.model, "measure", "cosine") != "cosine":
        raise input_error(opened.path, "a model that does not score by cosines", "one whose vectors have a direction")
    if items == "images":
        return image_vectors(opened.model, opened.split)
    return caption_vectors(opened.model, opened.texts(opened.split.captions))


def build_index(opened: Opened, run: Path, folder: Path, items: str, kind: str, trained_on: str = "") -> Index:
    """A new index of a split's images or captions. run: where the model was opened from."""
    check_free(folder)
    vectors = vectors_of(opened, items)
    words = str(dataset_folder(trained_on).resolve()) if trained_on else ""
    encoder = Encoder(str(run.resolve()), tensor_digest(opened.model.state_dict()), type(opened.model).__name__, words)
    index = create_index(folder, items, vectors.shape[1], encoder)
    return index.add(source_of(opened.split), vectors, kind)


def add_to_index(folder: Path, data: str, split: str, model: Path | None, kind: str) -> Index:
    """Add another split to an index. model: its run, where that has moved."""
    index = open_index(folder)
    opened = open_encoder(index, data, split, model)
    index.check_new(source := source_of(opened.split))  # before the work, not after it
    return index.add(source, vectors_of(opened, index.items), kind)


def open_encoder(index: Index, data: str, split: str, model: Path | None = None) -> Opened:
    """The model that made an index, beside a split: other weights would make vectors that mean something else."""
    opened = open_run(model or Path(index.encoder.run), data, split, index.encoder.trained_on)
    check_encoder(index, opened)
    return opened


def check_encoder(index: Index, opened: Opened) -> None:
    """Refuse a model whose weights are not those that made the index."""
    if tensor_digest(opened.model.state_dict()) != index.encoder.digest:
        expected = f"the weights that made {index.folder}"
        raise input_error(opened.path, "other weights", expected, "Give that run, or build the index again.")


def segment_of(index: Index, split: PrecompSplit) -> int:
    """Which segment of an index holds a split."""
    wanted = split.identity()["fingerprint"]
    for number, segment in enumerate(index.segments):
        if segment.source.fingerprint == wanted:
            return number
    held = ", ".join(f"{one.source.split} of {one.source.data}" for one in index.segments)
    hint = "`itm index add` adds it; files that changed since count as another split."
    raise input_error(index.folder, f"an index of {held}", f"one that holds {split.name} of {split.root}", hint)


@dataclass(frozen=True)
class Request:
    """The segment of an index that holds the opened split, and how many of its items the model orders."""

    part: Index
    candidates: int

    @property
    def note(self) -> str:
        """What one should know about an answer."""
        scored = min(self.candidates, self.part.rows)
        return f"the index retrieved {scored:,} of {self.part.rows:,} {self.part.items}; the model ordered these"


def request_of(folder: Path, opened: Opened, items: str, candidates: int) -> Request:
    """Open an index for one split; it must hold that split, made by the same weights."""
    index = open_index(folder)
    check_items(index, items)
    check_encoder(index, opened)
    part = replace(index, segments=(index.segments[segment_of(index, opened.split)],))
    return Request(part, candidates)


def nearest_images(opened: Opened, request: Request, query: str, top: int) -> Found:
    """The images of the opened split that fit a sentence best, among those that the index retrieves."""
    texts = opened.texts([query])
    notes = check_query(opened, query)
    encoded = encode_query(opened, texts)
    numbers = retrieved(request, encoded, top)
    full = score_images(opened, encoded, numbers)
    best = np.argsort(-full, kind="stable")[:top]
    return Found(numbers[best], full[best], texts, (*notes, request.note))


def nearest_captions(opened: Opened, request: Request, image: int, top: int) -> Found:
    """The captions of the opened split that fit one of its images best, among those that the index retrieves."""
    encoded = encode_image(opened, image)
    numbers = retrieved(request, encoded, top)
    texts = opened.texts([opened.split.captions[number] for number in numbers])
    full = score_captions(opened, encoded, texts, numbers)
    best = np.argsort(-full, kind="stable")[:top]
    return Found(numbers[best], full[best], texts, (request.note,), best)


def retrieved(request: Request, encoded: Encoded, top: int) -> np.ndarray:
    """Numbers of the items that are nearest to one encoded query."""
    vector = summary_vectors(encoded).cpu().numpy()
    _, numbers = request.part.search(vector, max(top, request.candidates))
    return numbers[0][numbers[0] >= 0]


def encode_query(opened: Opened, texts: Captions) -> Texts:
    """One sentence through the text encoder."""
    with evaluating(opened.model) as device:
        return opened.model.encode_texts(texts.batch(np.zeros(1, dtype=np.int64)).to(device))


def encode_image(opened: Opened, image: int) -> Images:
    """One image of the opened split through the image encoder."""
    with evaluating(opened.model) as device:
        return opened.model.encode_images(image_batch(opened.split, np.array([image])).to(device))


def score_images(opened: Opened, text: Texts, numbers: np.ndarray) -> np.ndarray:
    """(k,) full scores of some images of the opened split for one encoded caption."""

    def block(some: np.ndarray) -> np.ndarray:
        images = opened.model.encode_images(image_batch(opened.split, some).to(device))
        return score_all(opened.model, images, text, progress=False).t2i[:, 0].numpy()

    with evaluating(opened.model) as device:
        return _in_blocks(block, numbers)


def score_captions(opened: Opened, image: Images, texts: Captions, numbers: np.ndarray) -> np.ndarray:
    """(k,) full scores of some captions for one encoded image. texts: those captions alone, in this order."""

    def block(some: np.ndarray) -> np.ndarray:
        encoded = opened.model.encode_texts(texts.batch(some).to(device))
        return score_all(opened.model, image, encoded, progress=False).i2t[0].numpy()

    with evaluating(opened.model) as device:
        return _in_blocks(block, np.arange(len(numbers)))


def _in_blocks(block: Callable[[np.ndarray], np.ndarray], numbers: np.ndarray) -> np.ndarray:
    starts = range(0, len(numbers), BATCH)
    return np.concatenate([np.empty(0, np.float32), *(block(numbers[start : start + BATCH]) for start in starts)])


def check_items(index: Index, wanted: str) -> None:
    """Refuse an index of the other side."""
    if index.items != wanted:
        asked = "a sentence" if wanted == "images" else "--image"
        raise input_error(index.folder, f"an index of {index.items}", f"one of {wanted}, which {asked} searches")


def ask_for_images(
    index: Index, query: str, top: int, candidates: int, effort: int = 0, model: Path | None = None
) -> tuple[list[Match], tuple[str, ...]]:
    """The best images of all segments for a sentence, and notes about it."""
    check_items(index, "images")
    first = open_segment(index, 0, model)
    texts = first.texts([query])
    notes = check_query(first, query)
    encoded = encode_query(first, texts)

    def full(opened: Opened, rows: np.ndarray) -> tuple[np.ndarray, list[str]]:
        ids = opened.split.ids
        names = [ids[row] if ids is not None else f"{opened.split.name} {row}" for row in rows]
        return score_images(opened, encoded, rows), names

    return _ask(index, first, encoded, top, candidates, effort, full), notes


def ask_for_captions(
    index: Index, image: str, top: int, candidates: int, effort: int = 0, model: Path | None = None
) -> list[Match]:
    """The best captions of all segments for an image of the first segment's split."""
    check_items(index, "captions")
    first = open_segment(index, 0, model)
    encoded = encode_image(first, image_number(first.split, image))

    def full(opened: Opened, rows: np.ndarray) -> tuple[np.ndarray, list[str]]:
        captions = [opened.split.captions[row] for row in rows]
        return score_captions(opened, encoded, opened.texts(captions), rows), captions

    return _ask(index, first, encoded, top, candidates, effort, full)


def open_segment(index: Index, segment: int, model: Path | None = None) -> Opened:
    """The index's model beside the split of one of its segments, which must be as it was."""
    source = index.segments[segment].source
    opened = open_encoder(index, source.data, source.split, model)
    check_unchanged(opened.split, source)
    return opened


def check_unchanged(split: PrecompSplit, source: Source) -> None:
    """Refuse a split whose files changed since its vectors were made."""
    if split.identity()["fingerprint"] != source.fingerprint:
        where = f"{source.data}, split {source.split}"
        raise input_error(where, "files that changed", "those that the index was made of", "Build the index again.")


def _ask(
    index: Index,
    first: Opened,
    encoded: Encoded,
    top: int,
    candidates: int,
    effort: int,
    full: Callable[[Opened, np.ndarray], tuple[np.ndarray, list[str]]],
) -> list[Match]:
    """Retrieve from all segments, score in the split of each, order. full: scores and names of rows of a split."""
    vector = summary_vectors(encoded).cpu().numpy()
    cheap, numbers = (part[0] for part in index.search(vector, max(top, candidates), effort))
    segments, rows = index.locate(numbers)
    matches = []
    for segment in np.unique(segments[numbers >= 0]):
        here = np.flatnonzero((segments == segment) & (numbers >= 0))
        source = index.segments[segment].source
        split = first.split if segment == 0 else open_split(source.data, source.split)
        check_unchanged(split, source)
        scores, names = full(replace(first, split=split), rows[here])
        found = zip(numbers[here], names, cheap[here], scores, strict=True)
        matches += [Match(int(n), name, float(c), float(s), source) for n, name, c, s in found]
    return sorted(matches, key=lambda match: -match.full)[:top]
