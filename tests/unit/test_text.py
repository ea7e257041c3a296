"""Tokens and vocabulary: the public ones, as text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from itm_lab.data.opening import check_covers
from itm_utils.data.vocabulary import (
    SPECIAL,
    Vocabulary,
    _token_spans_with_nltk,
    _tokenize_with_nltk,
    token_spans,
    tokenize,
)
from itm_utils.errors import ItmError

CAPTIONS = ["A man rides a horse.", "Two men ride horses.", "A man's horse isn't tired."] * 4


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A man's dog.", ["a", "man", "'s", "dog", "."]),
        ("It runs. It jumps.", ["it", "runs", ".", "it", "jumps", "."]),
        ("Mr. Smith, aged 3.5", ["mr.", "smith", ",", "aged", "3.5"]),
        ('A "stop" sign', ["a", "``", "stop", "''", "sign"]),
        ("don't", ["do", "n't"]),
        ("A dog\rand a cat.", ["a", "dog", "and", "a", "cat", "."]),  # control characters that are spaces part words
        ("Ein CAFÉ", ["ein", "cafÉ"]),  # the public code lower-cases bytes: letters outside ASCII keep their case
    ],
)
def test_tokens(caption: str, words: list[str]) -> None:
    assert tokenize(caption) == words


def test_bytes_are_refused_and_their_print_never_reaches_a_vocabulary() -> None:
    with pytest.raises(ItmError, match="Decode it first"):
        tokenize(b"a man")
    # what ports of the public loaders read: the damage this refusal prevents
    assert tokenize(str(b"a man runs")) != tokenize("a man runs")


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60))
def test_spans_belong_to_tokens_and_never_overlap(caption: str) -> None:
    spans = token_spans(caption)
    assert len(spans) == len(tokenize(caption))
    assert all(0 <= a < b <= len(caption) for a, b in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_vocabulary_round_trip_in_the_public_format(tmp_path: Path) -> None:
    vocabulary = Vocabulary.build(CAPTIONS, threshold=4)
    vocabulary.save(tmp_path / "v.json")
    content = json.loads((tmp_path / "v.json").read_text())
    assert set(content) == {"word2idx", "idx2word", "idx"}
    assert content["idx"] == len(vocabulary)
    assert content["idx2word"]["0"] == "<pad>"
    again = Vocabulary.load(tmp_path / "v.json")
    assert again == vocabulary
    assert again.fingerprint == vocabulary.fingerprint
    assert [again.word2idx[symbol] for symbol in SPECIAL] == [0, 1, 2, 3]


def test_encode_wraps_and_marks_unknown_words() -> None:
    vocabulary = Vocabulary.build(CAPTIONS)
    ids = vocabulary.encode("A zebra rides.")
    assert vocabulary.decode(ids) == ["<start>", "a", "<unk>", "rides", ".", "<end>"]


def test_the_vocabulary_of_another_dataset_is_refused() -> None:
    vocabulary = Vocabulary.build(CAPTIONS)
    check_covers(vocabulary, CAPTIONS, "train_caps.txt")
    with pytest.raises(ItmError, match=r"train_caps\.txt: found that the vocabulary knows only .*another dataset"):
        check_covers(vocabulary, ["A plane lands near a tower."] * 5, "train_caps.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "word2idx"),
        ("[1]", "no vocabulary"),
        ("not json", "no vocabulary"),
        (json.dumps({"word2idx": {"a": 0, "b": 0}}), "repeat or leave gaps"),
        (json.dumps({"word2idx": {"a": 0, "b": 1, "c": 2, "d": 3}}), "as ids 0 to 3"),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "v.json"
    path.write_text(content)
    with pytest.raises(ItmError, match=message) as caught:
        Vocabulary.load(path)
    assert "v.json" in str(caught.value)


def test_missing_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ItmError, match="no such file"):
        Vocabulary.load(tmp_path / "none.json")


WORDS = ("a", "A", "dog", "Dogs", "cannot", "gonna", "wanna", "lemme", "mr", "etc", "st", "i", "isn", "ll", "two")


ENDS = ("", ".", " .", ",", "!", " . ", "..")


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=6),
    st.sampled_from((" ", ", ", " , ", ",", "  ")),
    st.sampled_from(ENDS),
)
def test_the_short_way_through_plain_captions_gives_what_nltk_gives(words: list[str], between: str, end: str) -> None:
    caption = " ".join(words[:-1]) + (between if len(words) > 1 else "") + words[-1] + end
    assert tokenize(caption) == _tokenize_with_nltk(caption)
    assert token_spans(caption) == _token_spans_with_nltk(caption)
