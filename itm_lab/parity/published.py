"""Load the checkpoints that the public repositories distribute, without running anything that is inside them."""

from __future__ import annotations

import argparse
import pickle  # for the name of an exception  # nosec B403
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from itm_lab.data.opening import check_covers
from itm_lab.data.registry import coco_protocol
from itm_lab.parity.adapters import adapter_for
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError, input_error
from itm_utils.metrics.retrieval import Retrieval, evaluate, evaluate_folds
from itm_utils.scoring import score_split

# The state dictionaries of a public checkpoint, in this order; SGRAF has the third.
ENCODERS = ("img_enc", "txt_enc", "sim_enc")


def read_published(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by public name, and the options the model was trained with."""
    path = Path(path)
    if not path.is_file():
        raise input_error(path, "no such file", "a published checkpoint")
    try:
        # The options are an argparse.Namespace: plain values, and the one class that is let in.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
        parts, options = content["model"], vars(content["opt"])
    except Exception as error:  # foreign files fail in many ways, and each concerns this one file only
        found = f"nothing that loads safely ({_reason(error)})"
        raise input_error(path, found, "a checkpoint with model and opt, of tensors and plain values") from error
    if not isinstance(parts, list | tuple) or len(parts) not in (2, 3):
        found = f"{len(parts)} parts" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
        raise input_error(path, f"{found} under model", f"2 or 3 state dictionaries: {', '.join(ENCODERS)}")
    weights = {}
    for encoder, part in zip(ENCODERS, parts, strict=False):
        entries = part.items() if isinstance(part, Mapping) else [(type(part).__name__, part)]
        for name, tensor in entries:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise input_error(path, f"{name!r} in {encoder}, a {type(tensor).__name__}", "tensors by name")
            weights[f"{encoder}.{name.removeprefix('module.')}"] = tensor  # "module.": trained on several GPUs
    return weights, options


def _reason(error: Exception) -> str:
    """Why a file did not load, without torch's advice to load it unsafely."""
    if global_name := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
        return f"it asks for {global_name[1]}, which is not on the list of what may be loaded"
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or holds more than tensors and plain values"
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def evaluate_published(
    path: str | Path, model: str, data: str | Path, vocabulary: str | Path, split: str, folds: int = 1
) -> Retrieval:
    """Recalls of published weights on a dataset folder; 5 folds of COCO's ``testall`` are the papers' 1K."""
    weights, options = read_published(path)
    words = Vocabulary.load(vocabulary)
    options.setdefault("vocab_size", len(words))
    if options["vocab_size"] != len(words):
        raise input_error(
            vocabulary, f"{len(words)} words", f"{options['vocab_size']}, as {Path(path).name} was trained with"
        )
    opened = open_split(data, split)
    if options.get("img_dim", opened.feature_dim) != opened.feature_dim:
        expected = f"{options['img_dim']}, as {Path(path).name} was trained with"
        raise input_error(opened.features.path, f"features of width {opened.feature_dim}", expected)
    check_covers(words, opened.captions, opened.root / f"{split}_caps.txt")
    try:
        matcher = adapter_for(model, path).load(weights, options)
        if torch.cuda.is_available():
            matcher.cuda()
        scores = score_split(matcher, opened, WordCaptions(opened, words))  # some odd options fail only here
    except (ItmError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # foreign options fail in many ways, and each concerns this one file only
        found = f"weights or options with which there is no {model} ({_reason(error)})"
        raise input_error(path, found, "those that its public code writes") from error
    result = evaluate(scores, opened.owner) if folds == 1 else evaluate_folds(scores, opened.owner, folds)
    return coco_protocol(result, split) if split == "testall" else result
