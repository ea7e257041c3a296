"""Read Flickr30K Entities: the phrases of a split's captions with the boxes they name."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree  # entities are refused before  # nosec B405

import numpy as np

from itm_lab.data.disk import read_json
from itm_utils.data.phrases import Grounding, Phrase
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.files import check_file, read_text
from itm_utils.progress import bar

# What is left out of Flickr30K Entities or, in the last case, only counted; ``Grounding.skipped`` has the numbers.
UNMATCHED = "captions unlike every sentence of their image"
UNBALANCED = "captions whose sentence has brackets that do not match"
NOT_VISUAL = "phrases that name nothing visible (EN#0)"
NO_LETTERS = "phrases without a letter or digit"
OUT_OF_IMAGE = "boxes that leave their image by more than a pixel (kept as they are)"
MARK = re.compile(r"\[/EN#(\d+)/[^\s\[\]]*|[\[\]]")  # a phrase begins; any other bracket
MAX_ASPECT_CHANGE = 0.02  # two sizes of one image agree in width / height up to rounding
PHRASES = "phrases.json"  # <split>_phrases.json: what was read once, kept beside a dataset


def entities_grounding(folder: str | Path, split: PrecompSplit, image_names: Sequence[str] | None = None) -> Grounding:
    """Read phrases and boxes of Flickr30K Entities for the captions of a split.

    folder: the annotations, with ``Sentences/<image>.txt`` and ``Annotations/<image>.xml``; or a dataset whose phrases
    were read before, with ``<split>_phrases.json``.
    image_names: file name of each image of the split, with or without folder and ``.jpg``; else ``split.ids``.

    A caption is matched with the five sentences of its image by letters and digits alone: case, accents, spaces and
    punctuation may differ, as they do after tokenising. A caption without a match has no phrases and is counted. Boxes
    are those of the published loader (one less than in the file, which counts pixels from 1); where the split has
    another size of the image they are scaled to it.
    """
    folder = Path(folder)
    if (kept := folder / f"{split.name}_{PHRASES}").is_file():
        return read_phrases(kept, split)
    names = split.ids if image_names is None else image_names
    if names is None or len(names) != split.n_images:
        found = "none" if names is None else f"{len(names):,}"
        raise input_error("image_names", found, f"the file names of {split.n_images:,} images, in order")
    cuts = np.searchsorted(split.owner, np.arange(split.n_images + 1))
    phrases: list[list[Phrase]] = []
    skipped: Counter[str] = Counter()
    for image in bar(range(split.n_images), "read phrases", "image"):
        name = entities_name(str(names[image]))
        sentences = _read_sentences(folder / "Sentences" / f"{name}.txt")
        size = None if split.sizes is None else split.sizes[image]
        boxes = read_boxes(folder / "Annotations" / f"{name}.xml", size, skipped)
        for number, caption in enumerate(split.captions[cuts[image] : cuts[image + 1]]):
            phrases.append(_find_phrases(caption, number, sentences, boxes, skipped))
    if not any(phrases):
        found = f"not one caption of split {split.name} among the sentences of its image"
        hint = "Are image_names in the order of the split?"
        raise input_error(folder, found, "annotations of these captions", hint)
    return Grounding(phrases, {reason: number for reason, number in skipped.items() if number})


def entities_name(image: str) -> str:
    """How the annotations call an image: by its file name, of which Flickr8k's have more than the number.

    >>> entities_name("1000092795.jpg"), entities_name("flickr8k/1000268201_693b08cb0e.jpg")
    ('1000092795', '1000268201')
    """
    stem = Path(image).stem
    number = stem.partition("_")[0]
    return number if number.isdigit() else stem


def phrases_bytes(grounding: Grounding) -> bytes:
    """The content of ``<split>_phrases.json``: start, end and boxes of every phrase, to a hundredth of a pixel."""
    phrases = [[[p.start, p.end, p.boxes.round(2).tolist()] for p in own] for own in grounding.phrases]
    return json.dumps({"phrases": phrases, "skipped": grounding.skipped}, separators=(",", ":")).encode() + b"\n"


def read_phrases(path: Path, split: PrecompSplit) -> Grounding:
    """The phrases of a split from the file that :func:`phrases_bytes` wrote. A split may be cut to its first images."""
    hint = "Make the dataset again."
    content = read_json(path, "the phrases of a split")
    try:
        phrases = [
            [Phrase(*_span(start, end), _boxes(boxes)) for start, end, boxes in own] for own in content["phrases"]
        ]
        skipped = {str(reason): int(number) for reason, number in content["skipped"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise input_error(path, f"no list of phrases ({error})", "start, end and boxes of each", hint) from error
    if len(phrases) < split.n_captions:
        raise input_error(path, f"phrases of {len(phrases):,} captions", f"those of {split.n_captions:,}", hint)
    phrases = phrases[: split.n_captions]
    for number, (caption, own) in enumerate(zip(split.captions, phrases, strict=True)):
        if any(phrase.end > len(caption) for phrase in own):
            found = f"a phrase that ends behind caption {number + 1}"
            raise input_error(path, found, f"phrases of {split.root / split.name}_caps.txt", hint)
    return Grounding(phrases, skipped)


def _span(start: int, end: int) -> tuple[int, int]:
    if not (type(start) is type(end) is int and 0 <= start < end):
        raise ValueError(f"characters {start} to {end}")
    return start, end


def _boxes(boxes: list[list[float]]) -> np.ndarray:
    found = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    if not np.isfinite(found).all() or (found[:, 2:] < found[:, :2]).any():
        raise ValueError("a box that ends before it begins")
    return found


@dataclass(frozen=True)
class _Sentence:
    """Letters and digits of a sentence, and its phrases as (chain id, first letter, one past the last letter)."""

    letters: str
    marked: list[tuple[str, int, int]]


def _find_phrases(
    caption: str, number: int, sentences: list[_Sentence | None], boxes: dict[str, np.ndarray], skipped: Counter[str]
) -> list[Phrase]:
    """The phrases of the ``number``-th caption of an image, from the sentence with the same letters."""
    letters, positions = _letters(caption)
    own = sentences[number] if number < len(sentences) else None
    sentence = next((s for s in (own, *sentences) if s is not None and s.letters == letters), None)
    if sentence is None:
        skipped[UNBALANCED if own is None and number < len(sentences) else UNMATCHED] += 1
        return []
    phrases = []
    for chain, first, end in sentence.marked:
        if chain == "0":
            skipped[NOT_VISUAL] += 1
        elif first == end:
            skipped[NO_LETTERS] += 1
        else:
            named = boxes.get(chain, np.zeros((0, 4)))
            phrases.append(Phrase(positions[first], positions[end - 1] + 1, named))
    return phrases


def _letters(text: str) -> tuple[str, list[int]]:
    """Letters and digits without case and accents, and the position of each in the text."""
    kept = [
        (letter, position)
        for position, character in enumerate(text)
        for letter in (character.lower() if character.isascii() else _plain(character))
        if letter.isalnum()
    ]
    return "".join(letter for letter, _ in kept), [position for _, position in kept]


def _plain(character: str) -> str:
    """A character without its accents, possibly as several: "é" is "e" and a mark, "½" is 1, a stroke and 2."""
    return unicodedata.normalize("NFKD", character).casefold()


def _read_sentences(path: Path) -> list[_Sentence | None]:
    """Read one sentence per line; None for a line whose brackets do not match."""
    lines = read_text(path, "the sentences of an image, as in Flickr30K Entities").split("\n")
    sentences = [_parse(line) for line in lines if line.strip()]
    if not sentences:
        raise input_error(
            path, "no sentence", "lines such as “[/EN#1/people Two men] run .”", "Copy or download it again."
        )
    return sentences


def _parse(line: str) -> _Sentence | None:
    """Parse a sentence: ``[/EN#<chain>/<type>/<type> words]`` is a phrase, other brackets are text."""
    letters, marked, at = "", [], 0
    opened: list[tuple[str, int] | None] = []  # None for a bracket that is part of the text
    for mark in MARK.finditer(line):
        letters += _letters(line[at : mark.start()])[0]
        at = mark.end()
        if mark[0] != "]":
            opened.append((mark[1], len(letters)) if mark[1] else None)
        elif not opened:
            return None
        elif (phrase := opened.pop()) is not None:
            marked.append((*phrase, len(letters)))
    if opened:
        return None
    return _Sentence(letters + _letters(line[at:])[0], sorted(marked, key=lambda phrase: phrase[1]))


def read_boxes(path: Path, size: np.ndarray | None, skipped: Counter[str]) -> dict[str, np.ndarray]:
    """Read chain id → boxes (n, 4), scaled to the given size; those that leave the image are counted in ``skipped``.

    Objects without a box (``scene``, ``nobndbox``) have no entry.
    """
    check_file(path, "the boxes of an image, as in Flickr30K Entities")
    try:
        if b"<!ENTITY" in (content := path.read_bytes()):
            raise ValueError("entities of its own, which may unpack to any size")
        root = ElementTree.fromstring(content)  # nosec B314
        width, height = (_number(root, f"size/{side}") for side in ("width", "height"))
        found: dict[str, list[list[float]]] = {}
        for thing in root.iter("object"):
            chains = [(name.text or "").strip() for name in thing.iter("name")]
            if not chains or not all(chains):
                raise ValueError("an object without a name")
            if thing.find("bndbox") is None:
                continue
            box = [_number(thing, f"bndbox/{side}") - 1 for side in ("xmin", "ymin", "xmax", "ymax")]
            if box[0] > box[2] or box[1] > box[3]:
                raise ValueError(f"a box of object {chains[0]} that ends before it begins")
            skipped[OUT_OF_IMAGE] += min(box) < -1 or box[2] > width or box[3] > height
            for chain in chains:
                found.setdefault(chain, []).append(box)
        if width < 1 or height < 1:
            raise ValueError(f"an image of {width:g} x {height:g} pixels")
    # LookupError: an unknown encoding; OverflowError: a number with hundreds of digits.
    except (ElementTree.ParseError, ValueError, LookupError, OverflowError) as error:
        expected = "size and objects with names, and a box or scene/nobndbox"
        raise input_error(path, f"a damaged file ({error})", expected, "Copy or download it again.") from error
    return {chain: np.array(boxes) * _scale(path, (width, height), size) for chain, boxes in found.items()}


def _number(element: ElementTree.Element, name: str) -> float:
    """The integer of a child element, as a float."""
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"no {name}")
    return float(int(text))


def _scale(path: Path, annotated: tuple[float, float], size: np.ndarray | None) -> np.ndarray:
    """Factors (4,) from the annotated size of an image to its size in the split."""
    if size is None:
        return np.ones(4)
    scale = np.asarray(size, dtype=np.float64) / annotated
    if abs(scale[0] / scale[1] - 1) > MAX_ASPECT_CHANGE:
        found = f"an image of {annotated[0]:g} x {annotated[1]:g} pixels"
        raise input_error(path, found, f"the aspect ratio of {size[0]} x {size[1]}, its size in the split")
    return np.tile(scale, 2)
