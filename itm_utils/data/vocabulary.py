"""Captions to word ids: the public tokens and the public vocabulary format, as text from the first byte."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from itm_utils.errors import input_error
from itm_utils.files import check_file, write_text

PAD, START, END, UNK = "<pad>", "<start>", "<end>", "<unk>"
SPECIAL = (PAD, START, END, UNK)  # ids 0, 1, 2, 3 in every public vocabulary
# Words with single spaces or a comma and a space between them, and at most one full stop at the end: splitting there is
# what NLTK does, several times faster.
PLAIN = re.compile(r"([A-Za-z]+(?:,? [A-Za-z]+)*)(?: ?(\.))?")
PLAIN_PIECE = re.compile(r"[A-Za-z]+|[,.]")
SPLIT_BY_NLTK = frozenset(("cannot", "gimme", "gonna", "gotta", "lemme", "wanna"))  # "can not", "gim me", …
SENTENCE_END_INSIDE = re.compile(r"[.!?]\S*\s+\S")
# Words that keep their full stop. NLTK's own list comes with a download; captions need only a few.
ABBREVIATIONS = set(
    ["mr", "mrs", "ms", "dr", "st", "jr", "sr", "vs", "no", "u.s", "ft", "etc", "e.g", "i.e", "a.m", "p.m"]
)


@cache
def _tokenizers() -> tuple[Any, Any]:
    """NLTK's sentence and word tokenizers."""
    # Imported here: it takes a second, and plain captions do without.
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = ABBREVIATIONS
    return PunktSentenceTokenizer(parameters), NLTKWordTokenizer()


def _sentences(caption: str) -> list[tuple[str, int]]:
    """Lower-cased sentences of a caption, each with the position it starts at."""
    if isinstance(caption, bytes):
        raise input_error("caption", f"bytes ({caption[:20]!r} …)", "text", "Decode it first: caption.decode('utf-8').")
    # Only ASCII letters, as the public code does: it lower-cases bytes; other alphabets keep their case.
    lowered = caption.lower() if caption.isascii() else re.sub("[A-Z]", lambda m: m[0].lower(), caption)
    if not SENTENCE_END_INSIDE.search(lowered):
        return [(lowered, 0)]  # nearly every caption: the sentence splitter would cost most of the time
    return [(lowered[a:b], a) for a, b in _tokenizers()[0].span_tokenize(lowered)]


def tokenize(caption: str) -> list[str]:
    """Lower-cased words as in the public code: sentences first, then NLTK's word tokenizer in each.

    >>> tokenize("Two dogs aren't barking. One sleeps.")
    ['two', 'dogs', 'are', "n't", 'barking', '.', 'one', 'sleeps', '.']
    """
    if isinstance(caption, str) and (plain := PLAIN.fullmatch(caption)):
        words = plain[1].lower().replace(",", " ,").split(" ")
        if SPLIT_BY_NLTK.isdisjoint(words):
            return [*words, "."] if plain[2] else words
    return _tokenize_with_nltk(caption)


def _tokenize_with_nltk(caption: str) -> list[str]:
    words = _tokenizers()[1]
    return [word for sentence, _ in _sentences(caption) for word in words.tokenize(sentence)]


def token_spans(caption: str) -> list[tuple[int, int]]:
    """First and one-past-last character of each word of :func:`tokenize`."""
    if isinstance(caption, str) and PLAIN.fullmatch(caption):
        spans = [piece.span() for piece in PLAIN_PIECE.finditer(caption)]
        if SPLIT_BY_NLTK.isdisjoint(caption[a:b].lower() for a, b in spans):
            return spans
    return _token_spans_with_nltk(caption)


def _token_spans_with_nltk(caption: str) -> list[tuple[int, int]]:
    words = _tokenizers()[1]
    return [(start + a, start + b) for sentence, start in _sentences(caption) for a, b in words.span_tokenize(sentence)]


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids, in the JSON of the public repositories (``word2idx``, ``idx2word``, ``idx``)."""

    word2idx: dict[str, int]

    def __len__(self) -> int:
        return len(self.word2idx)

    @classmethod
    def build(cls, captions: Iterable[str], threshold: int = 4) -> Vocabulary:
        """Special symbols, then every word that occurs at least ``threshold`` times, in order of the alphabet.

        The public files list words in the order of a Python 2 dictionary: use the distributed file with
        published weights, never a rebuilt one.
        """
        counts = Counter(word for caption in captions for word in tokenize(caption))
        words = sorted(word for word, count in counts.items() if count >= threshold and word not in SPECIAL)
        return cls({word: index for index, word in enumerate([*SPECIAL, *words])})

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read the public JSON and check that ids are 0 … n-1 with the special symbols in front."""
        path = check_file(path, "a vocabulary JSON with the key word2idx")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            word2idx = {str(word): int(index) for word, index in content["word2idx"].items()}
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise input_error(
                path, f"no vocabulary ({error!r})", "JSON with the keys word2idx, idx2word and idx"
            ) from error
        if sorted(word2idx.values()) != list(range(len(word2idx))):
            raise input_error(path, "ids that repeat or leave gaps", f"every id from 0 to {len(word2idx) - 1} once")
        front = [word for word, index in sorted(word2idx.items(), key=lambda item: item[1])[:4]]
        if front != list(SPECIAL):
            raise input_error(path, f"{front} as ids 0 to 3", f"{list(SPECIAL)}")
        return cls(word2idx)

    @classmethod
    def of_folder(cls, root: str | Path) -> Vocabulary:
        """The one ``*_vocab.json`` of a dataset folder."""
        found = sorted(Path(root).glob("*_vocab.json"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise input_error(Path(root) / "*_vocab.json", names, "exactly one vocabulary")
        return cls.load(found[0])

    def save(self, path: str | Path) -> None:
        """Write the public JSON."""
        idx2word = {str(index): word for word, index in self.word2idx.items()}
        content = {"word2idx": self.word2idx, "idx2word": idx2word, "idx": len(self)}
        write_text(path, json.dumps(content, ensure_ascii=False))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of words and ids; a checkpoint remembers it."""
        listed = "\n".join(word for word, _ in sorted(self.word2idx.items(), key=lambda item: item[1]))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def encode(self, caption: str) -> np.ndarray:
        """(w,) ids of the words between the start and the end symbol; words it does not know become ``<unk>``."""
        unknown = self.word2idx[UNK]
        words = [self.word2idx.get(word, unknown) for word in tokenize(caption)]
        return np.array([self.word2idx[START], *words, self.word2idx[END]], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of the given ids."""
        idx2word = list(self.word2idx)
        idx2word.sort(key=self.word2idx.__getitem__)
        return [idx2word[index] for index in ids]
