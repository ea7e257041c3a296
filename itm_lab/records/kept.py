"""Kept models: a trained model in half precision, beside the receipt that was scored from these very weights.

``weights/<chapter>/<variant>.safetensors`` has the weights, ``.json`` the receipt, ``.npz`` the ranks. A chapter opens one with
``load_kept("02_scan")``; `itm keep` writes them. A text encoder that stays frozen is no part of a model, so none is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from itm_lab.data.opening import token_states
from itm_lab.finished_run import captions_of, load_matcher
from itm_lab.paths import Paths
from itm_lab.records.chapter import Chapter
from itm_lab.records.receipts import Evidence, read_evidence, read_receipt
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher
from itm_utils.metrics.retrieval import fold_ranks
from itm_utils.scoring import Captions, score_split
from itm_utils.training.checkpoints import tensor_digest

SUFFIX = ".safetensors"
HINT = "Take the files from the repository again, or write them anew with `itm keep`."


@dataclass(frozen=True)
class KeptModel:
    """A kept model, evaluating. known: what its file says of the data it was trained on. record: its receipt."""

    model: Matcher
    known: Mapping[str, Any]
    record: Mapping[str, Any]
    path: Path

    @property
    def label(self) -> str:
        """Variant and seed, as a figure names it."""
        return f"{self.record['variant']}, seed {self.record['seed']}"

    @property
    def rsum(self) -> float:
        """That of the stored weights on the test split."""
        return self.record["metrics"]["rsum"]["value"]

    @property
    def provisional(self) -> bool:
        """Whether it was kept before every planned seed had run: then it is not the median of its variant."""
        counts = self.record["metrics"]
        return counts["seeds"]["value"] < counts["seeds_planned"]["value"]

    @cached_property
    def ranks(self) -> Evidence:
        """The ranks beside the receipt."""
        return read_evidence(self.path.with_suffix(".json"))

    def captions(self, split: PrecompSplit) -> Captions:
        """The captions of any split, as the model was trained to read them."""
        if str(self.known["texts"]).startswith("bert-"):
            return token_states(self.record["parameters"])(split)
        return captions_of(split, self.known["texts"], self.path)

    def evaluate(self, split: PrecompSplit) -> Evidence:
        """The ranks that the model gives on the split of its receipt, computed now."""
        if (found := split.identity()) != self.record["dataset"]:
            recorded = self.record["dataset"]
            shown, expected = (f"{one['name']} {one['split']} ({one['fingerprint'][:12]})" for one in (found, recorded))
            raise input_error(self.path, f"the split {shown}", f"{expected}, on which it was scored")
        return ranks_of(self.model, split, self.captions(split))


def load_kept(chapter: str, variant: str = "", folder: Path | None = None) -> KeptModel:
    """The kept model of a chapter (``"02_scan"``).

    variant: which, where there are several. folder: ``weights`` of the checkout by default.
    """
    folder = Path(folder) if folder else Paths.find().weights
    record_path = find_kept(chapter, variant, folder)
    path, record = record_path.with_suffix(SUFFIX), read_receipt(record_path)
    if not path.is_file():
        raise input_error(path, "no such file", f"the weights of {record['variant']}", HINT)
    model, known = load_matcher(path)
    if tensor_digest(halved(model)) != record["inputs"].get("weights"):
        raise input_error(path, f"other weights than {record_path.name} was scored from", "those it was", HINT)
    if "rsum" not in record["metrics"] or "texts" not in known:
        raise input_error(record_path, "no rsum, or weights that say nothing of their captions", "a kept model", HINT)
    return KeptModel(model.eval(), known, record, path)


@dataclass(frozen=True)
class Inspected:
    """The model that a page inspects, evaluating. label: what to call it. parameters: those it was trained with."""

    model: Matcher
    label: str
    parameters: Mapping[str, Any]
    texts: Captions  # of the test split, as the model reads them


def inspected(run: Chapter, own: Matcher, variant: str = "") -> Inspected:
    """The chapter's kept model on Scenes; elsewhere, for a run with a folder, and where nothing is kept, the run's own.

    run: with its data open. own: the model that it trained. variant: which is meant, where several are kept.
    """
    assert run.data is not None  # opened before there was a model
    paths, of_page = Paths.find_or_none(), run.parameters["dataset"] == "scenes" and not run.parameters["run_dir"]
    if of_page and paths is not None and kept_records(paths.weights, run.name):
        kept = load_kept(run.name, variant)
        return Inspected(kept.model, kept.label, kept.record["parameters"], kept.captions(run.data.test))
    label = f"{run.parameters['variant']}, seed {run.parameters['seed']}, trained by this run"
    return Inspected(own.eval(), label, run.parameters, run.data.test_texts)


def find_kept(chapter: str, variant: str, folder: Path) -> Path:
    """The record of a kept model."""
    found = kept_records(folder, chapter)
    named = [path for path in found if path.stem == file_name(variant)] if variant else found
    if len(named) == 1:
        return named[0]
    where, names = folder / chapter, ", ".join(path.stem for path in found)
    if variant:
        raise input_error(where, f"no kept model {variant}", names or "one that `itm keep` wrote", HINT)
    if not found:
        raise input_error(where, "no kept model", "one that `itm keep` wrote", HINT)
    raise input_error(where, f"{len(found)} kept models", "the variant that is meant", f"There are {names}.")


def kept_records(folder: Path | None = None, chapter: str = "*") -> list[Path]:
    """The records of all kept models, in the order of their chapters."""
    folder = folder or Paths.find().weights
    return sorted(folder.glob(f"{chapter}/*.json"))


def file_name(variant: str) -> str:
    """The name of a variant's files, without their endings."""
    return variant.replace("/", "-").replace(" ", "-")


def ranks_of(model: Matcher, split: PrecompSplit, texts: Captions) -> Evidence:
    """The ranks of a model on a split."""
    scores = score_split(model, split, texts)
    return Evidence.of(fold_ranks(scores, split.owner, folds=1), split.owner)


def differing_ranks(one: Evidence, other: Evidence) -> int:
    """Queries of both directions whose ranks differ."""
    return int(np.sum(one.i2t != other.i2t) + np.sum(one.t2i != other.t2i))


def halved(model: Matcher) -> dict[str, Tensor]:
    """Weights by name, numbers with 16 bits; counters stay as they are."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        half = tensor.half() if tensor.is_floating_point() else tensor
        if not half.isfinite().all():
            largest = f"{tensor.abs().max():g}"
            raise input_error(name, f"weights up to {largest}", "numbers that 16 bits can hold")
        tensors[name] = half
    return tensors
