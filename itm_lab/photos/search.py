"""Ask a trained model: which images of a split fit a sentence, and which captions fit an image."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_lab.data.opening import dataset_folder, token_states
from itm_lab.finished_run import captions_of, settings_in_receipt
from itm_lab.photos.stages import open_model
from itm_utils.cache import cache_root, read_manifest
from itm_utils.data.batches import image_batch
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import BertCaptions, bert_captions
from itm_utils.data.vocabulary import Vocabulary, tokenize
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher
from itm_utils.progress import bar
from itm_utils.scoring import BATCH, Captions, evaluating, score_all, score_split


@dataclass(frozen=True, eq=False)
class Opened:
    """A trained model beside a split. path: its checkpoint. known: what that says of its data.

    words: the folder whose vocabulary the model was trained with.
    """

    model: Matcher
    split: PrecompSplit
    path: Path
    known: Mapping[str, Any]
    words: Path

    @property
    def reads_words(self) -> bool:
        """Whether captions come as words of a vocabulary; else as states of a frozen text encoder."""
        return not self.known.get("texts", "").startswith("bert-")

    def texts(self, captions: list[str]) -> Captions:
        """Any sentences, as the model was trained to read them."""
        owner = np.zeros(len(captions), dtype=np.int64)
        said = replace(self.split, root=self.words, captions=captions, owner=owner)
        if self.reads_words:
            return captions_of(said, self.known.get("texts", ""), self.path)
        return states_of(said, self.known["texts"], self.path)


@dataclass(frozen=True, eq=False)
class Found:
    """The best first. numbers: (k,) images or captions of the split. scores: (k,). texts: what was read for it.

    notes: what one should know about the answer. places: (k,) where each caption stands in texts, if those are not all
    captions of the split.
    """

    numbers: np.ndarray
    scores: np.ndarray
    texts: Captions
    notes: tuple[str, ...] = ()
    places: np.ndarray | None = None

    def place(self, match: int) -> int:
        """Where the caption of a match stands in texts."""
        return int((self.numbers if self.places is None else self.places)[match])


def open_run(run: Path, data: str, split: str, trained_on: str = "") -> Opened:
    """The best weights of a run, and the split to search in. trained_on: the run's own data, where it is another."""
    model, known, path = open_model(run)
    opened = open_split(dataset_folder(data), split)
    wanted = model.config.get("image_dim", opened.feature_dim)
    if wanted != opened.feature_dim:
        expected = f"{wanted}, as {path.name} was trained on"
        hint = "Both must come from the same network; features.json of each dataset says which."
        raise input_error(opened.features.path, f"{opened.feature_dim} numbers a region", expected, hint)
    if torch.cuda.is_available():
        model.cuda()
    return Opened(model, opened, path, known, dataset_folder(trained_on) if trained_on else opened.root)


def trained_here(opened: Opened) -> bool:
    """Whether the run was trained on the training split of the folder that is searched."""
    try:
        return open_split(opened.split.root, "train").identity()["fingerprint"] == opened.known.get("dataset")
    except ValueError:  # a folder to search in needs no training split
        return False


def states_of(said: PrecompSplit, fingerprint: str, path: Path) -> BertCaptions:
    """Token states of any captions, by the encoder and layers that the model was trained with.

    What training kept in the cache says which; where it is gone, the run's receipt does.
    """
    if (cache_root() / fingerprint / "manifest.json").is_file():
        facts = read_manifest(cache_root() / fingerprint)
        settings = tuple(facts["layers"]), facts["max_tokens"]
        states = bert_captions(said, facts["name"], *settings, padded=facts.get("padded", False))
        if states.manifest["encoder"] != facts["encoder"]:
            expected = f"{facts['encoder']}, with which {path.name} was trained"
            raise input_error(facts["name"], f"a text encoder {states.manifest['encoder']}", expected)
        return states
    if (given := settings_in_receipt(path)) is None:
        hint = "Give the folder in which the run ended."
        raise input_error(path.parent, "no receipt that names a text encoder", "the folder of a finished run", hint)
    return token_states(given)(said)


@contextmanager
def passing_cache() -> Iterator[None]:
    """States of one question are worth no place in the cache: they are kept in a folder that goes again."""
    before = os.environ.get("ITM_CACHE")
    with tempfile.TemporaryDirectory(prefix="itm-search-", ignore_cleanup_errors=True) as folder:
        cached = cache_root()
        for known in cached.glob("bert-*/manifest.json"):  # the settings of trainings, without their states
            target = Path(folder) / known.parent.name
            target.mkdir()
            (target / known.name).write_bytes(known.read_bytes())
        os.environ["ITM_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("ITM_CACHE", None)
            else:
                os.environ["ITM_CACHE"] = before


def check_query(opened: Opened, query: str) -> tuple[str, ...]:
    """Notes about a sentence that the model can read in part; one it cannot read at all is an error."""
    words = [word for word in tokenize(query) if any(c.isalnum() for c in word)]
    if not words:
        raise input_error("the query", repr(query), 'a sentence, such as "two dogs on a beach"')
    if not opened.reads_words:
        return ()
    vocabulary = Vocabulary.of_folder(opened.words)
    unknown = [word for word in dict.fromkeys(words) if word not in vocabulary.word2idx]
    if len(unknown) == len(set(words)):
        raise input_error(
            "the query",
            f"{query!r}, none of whose words is in the vocabulary",
            f"words that occur in the captions of {opened.words}",
            f"It knows {len(vocabulary):,} words, such as {', '.join(_common(vocabulary))}.",
        )
    return (f"not in the vocabulary, and read as unknown: {', '.join(unknown)}",) if unknown else ()


def _common(vocabulary: Vocabulary, count: int = 5) -> list[str]:
    """Some longer words, spread over the alphabet, for an error message."""
    words = sorted(word for word in vocabulary.word2idx if len(word) > 3 and word.isalpha())
    return words[:: max(1, len(words) // count)][:count]


def find_images(opened: Opened, query: str, top: int) -> Found:
    """The images of the split that fit a sentence best."""
    texts = opened.texts([query])  # first: a vocabulary that is not the model's has no say about words
    notes = check_query(opened, query)
    asked = replace(opened.split, captions=[query], owner=np.zeros(1, dtype=np.int64))
    scores = score_split(opened.model, asked, texts).t2i[:, 0].numpy()
    return _best(scores, top, texts, notes)


def find_captions(opened: Opened, image: int, top: int) -> Found:
    """The captions of the split that fit one of its images best. Captions are encoded a block at a time."""
    split, texts = opened.split, opened.texts(opened.split.captions)
    scores = np.empty(split.n_captions, dtype=np.float32)
    order = np.argsort(texts.lengths, kind="stable")
    with evaluating(opened.model) as device:
        encoded_image = opened.model.encode_images(image_batch(split, np.array([image])).to(device))
        for start in bar(range(0, split.n_captions, BATCH), "score", "block"):
            some = order[start : start + BATCH]
            encoded = opened.model.encode_texts(texts.batch(some).to(device))
            scores[some] = score_all(opened.model, encoded_image, encoded, progress=False).i2t[0].numpy()
    return _best(scores, top, texts, ())


def _best(scores: np.ndarray, top: int, texts: Captions, notes: tuple[str, ...]) -> Found:
    """Equal scores stay in the order of the split."""
    if not np.isfinite(scores).all():
        raise input_error("scores", "a NaN or infinity", "finite numbers", "The training of this model failed.")
    order = np.argsort(-scores, kind="stable")[:top]
    return Found(order, scores[order], texts, notes)


def image_of_id(split: PrecompSplit) -> dict[str, int]:
    """Image name → image number."""
    path = split.root / f"{split.name}_ids.txt"
    if split.ids is None:
        raise input_error(path, "no such file", "one image name a line")
    numbers = {name: image for image, name in enumerate(split.ids)}
    if len(numbers) < len(split.ids):
        twice = next(name for image, name in enumerate(split.ids) if numbers[name] != image)
        raise input_error(path, f"{twice} twice", "a name of its own for every image")
    return numbers


def image_number(split: PrecompSplit, name: str) -> int:
    """Which image of the split has this name, or this last part of a name."""
    known = image_of_id(split)
    if name in known:
        return known[name]
    alike = [other for other in known if Path(other).name == name or Path(other).stem == name]
    if len(alike) == 1:
        return known[alike[0]]
    close = alike or difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)
    where = f"{split.root}, split {split.name}"
    raise input_error(where, f"{'several images' if alike else 'no image'} {name}", f"one of {', '.join(close[:3])}, …")
