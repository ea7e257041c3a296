"""Open the dataset of a run: its folder, its splits and its captions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import BertCaptions, bert_captions, load_text_encoder
from itm_utils.data.vocabulary import Vocabulary, tokenize
from itm_utils.errors import input_error

VALIDATION_IMAGES = (
    1000  # of dev, as the public code and the papers choose their weights: COCO's 5,000 cost 25 times the pairs
)

COVERED = 10_000  # captions of train whose frequent words a vocabulary must know: enough to tell, and quick


def dataset_folder(dataset: str) -> Path:
    """``scenes`` is Scenes; all else is a folder."""
    if dataset == "scenes":
        from itm_lab.scenes import scenes_folder

        return scenes_folder()
    return Path(dataset)


def open_splits(root: Path, evaluated: str) -> list[PrecompSplit]:
    """Train, the part of dev that validates, and the split that is judged.

    Features of another shape would fail only after the training.
    """
    splits = [open_split(root, name) for name in ("train", "dev", evaluated)]
    splits[1] = splits[1].first(min(VALIDATION_IMAGES, splits[1].n_images))
    train, *others = (split.features for split in splits)
    for other in others:
        if other.shape[1:] != train.shape[1:]:
            raise input_error(other.path, f"images of shape {other.shape[1:]}", f"{train.shape[1:]}, as in train")
    return splits


def open_vocabulary(root: Path, train: PrecompSplit) -> Vocabulary:
    """The vocabulary of a dataset folder; one that was made for other captions would read them all as ``<unk>``."""
    vocabulary = Vocabulary.of_folder(root)
    check_covers(vocabulary, train.captions[:COVERED], root / f"{train.name}_caps.txt")
    return vocabulary


def check_covers(vocabulary: Vocabulary, captions: Iterable[str], source: str | Path, at_least: float = 0.9) -> None:
    """Refuse the vocabulary of another dataset.

    A vocabulary made for these captions knows every word that is frequent in them. Known *tokens* would be
    no test: two caption datasets share most of what is said, and differ in their less frequent words.
    """
    counts = Counter(word for caption in captions for word in tokenize(caption))
    frequent = [word for word, count in counts.items() if count >= 4] or list(counts)
    missing = [word for word in frequent if word not in vocabulary.word2idx]
    known = 1 - len(missing) / max(1, len(frequent))
    if known < at_least:
        raise input_error(
            source,
            f"that the vocabulary knows only {known:.0%} of its frequent words (not {', '.join(missing[:3])})",
            f"at least {at_least:.0%}",
            "It was built for another dataset: use the vocabulary that came with these captions.",
        )


def part_of(split: PrecompSplit, part: float) -> PrecompSplit:
    """The first images of a split, for runs on less data (parameter ``train_fraction``)."""
    if not 0 < part <= 1:
        raise input_error("train_fraction", repr(part), "a number above 0, at most 1")
    return split if part == 1 else split.first(max(1, round(part * split.n_images)))


def token_states(parameters: Mapping[str, Any]) -> Callable[[PrecompSplit], BertCaptions]:
    """How a chapter that reads a frozen text encoder opens its captions: ``run.open(token_states(run.parameters))``.

    Reads ``text_encoder``, ``text_layers`` (``"0,-1"``: these hidden layers side by side), ``token_dim`` (the width
    that must come out) and, where the chapter has them, ``max_tokens`` and ``public_padding``.
    """
    try:
        layers = tuple(int(number) for number in parameters["text_layers"].split(","))
    except ValueError:
        raise input_error("text_layers", repr(parameters["text_layers"]), "whole numbers such as 0,-1") from None
    encoder = load_text_encoder(parameters["text_encoder"])
    if (width := len(layers) * encoder.width) != parameters["token_dim"]:
        found, hint = f"{len(layers)} layer(s) of {encoder.width} numbers", f"Set token_dim to {width}."
        raise input_error(encoder.name, found, f"token_dim = {parameters['token_dim']}", hint)
    if parameters.get("device") in ("auto", "cuda") and torch.cuda.is_available():
        encoder.model.cuda()  # a processor takes hours for the captions of COCO
    kept = {"max_tokens": parameters.get("max_tokens"), "padded": parameters.get("public_padding", False)}
    return lambda split: bert_captions(split, encoder, layers, **kept)
