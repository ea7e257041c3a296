"""What every chapter does around its model: check its parameters, open its data, leave a receipt.

A chapter declares its parameters in one cell of typed literals; papermill puts a second cell after it. Both are
checked here, so that a misspelt name is an error at once, not a run with the wrong setting.
"""

from __future__ import annotations

import ast
import difflib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from itm_utils.batches import PairDataset, WordCaptions
from itm_utils.bert import BertCaptions, bert_captions, load_text_encoder
from itm_utils.errors import problem
from itm_utils.files import atomic
from itm_utils.matcher import Matcher, Scores
from itm_utils.metrics import Retrieval, bootstrap_intervals, coco_protocol, evaluate, fold_ranks, summarise_folds
from itm_utils.precomp import PrecompSplit, open_split
from itm_utils.receipts import Evidence, make_receipt, write_receipt
from itm_utils.scoring import score_split
from itm_utils.text import Vocabulary
from itm_utils.training import TrainConfig, TrainResult

TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}
# Not settings of the experiment: a receipt has its own place for them, or they change nothing in its numbers.
ASIDE = ("arm", "seed", "dataset", "evaluate_on", "run_dir", "teach", "device", "compiled", "num_workers")
INJECTED = "# Parameters"  # how papermill marks its cell


def declared_parameters(source: str) -> dict[str, tuple[str, Any]]:
    """Name → (type, default) of a cell of typed literals; empty where the cell is none."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a cell with a magic
        return {}
    if not statements or not all(isinstance(line, ast.AnnAssign) and line.value for line in statements):
        return {}
    return {ast.unparse(one.target): (ast.unparse(one.annotation), ast.literal_eval(one.value)) for one in statements}


def annotated(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Name → (type, value) of what a notebook has annotated so far; from Python 3.14 on a function knows it."""
    found = values.get("__annotations__") or values.get("__annotate__", lambda _: {})(1)
    return {name: (getattr(kind, "__name__", kind), values[name]) for name, kind in found.items() if name in values}


def check_parameters(values: Mapping[str, Any], declared: Mapping[str, tuple[str, Any]], where: str) -> None:
    """Every value has a declared name and the declared type."""
    for name, value in values.items():
        if name not in declared:
            close = difflib.get_close_matches(name, declared, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(declared)}."
            raise problem(where, f"the parameter {name}", "one that the chapter has", hint)
        kind = declared[name][0]
        if kind not in TYPES:
            raise problem(where, f"{name} of type {kind}", f"one of {', '.join(TYPES)}")
        if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise problem(where, f"{name} = {value!r}", f"a value of type {kind}")


def settings_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a receipt lists: those that make two runs of one seed differ."""
    return {name: value for name, value in parameters.items() if name not in ASIDE}


@dataclass(frozen=True)
class ChapterData:
    """The three splits of a run with their captions. ``test`` is the split that ``evaluate_on`` names."""

    train: PrecompSplit
    dev: PrecompSplit
    test: PrecompSplit
    vocabulary: Vocabulary
    pairs: PairDataset
    dev_texts: Any
    test_texts: Any

    @property
    def known(self) -> dict[str, str]:
        """What a checkpoint remembers of the data besides the splits themselves."""
        return {"vocabulary": self.vocabulary.fingerprint}

    def validate(self, model: Matcher) -> dict[str, float]:
        """Recalls on dev, for :func:`itm_utils.training.train`."""
        return evaluate(score_split(model, self.dev, self.dev_texts), self.dev.owner).as_dict()


def start_chapter(name: str) -> Chapter:
    """Check the parameters of the notebook that calls this, and start its run.

    name: of the chapter, ``"02_scan"``.
    """
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise problem("start_chapter", "no notebook", "a chapter that runs in Jupyter, papermill or nbval")
    return Chapter.of_cells(name, shell.user_ns["In"], shell.user_ns)


class Chapter:
    """One run of a chapter. parameters: name → value. folder: where checkpoints, log and receipt go."""

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        from itm_utils.ledger import rules_for

        self.name, self.parameters = name, dict(parameters)
        self.folder = Path(self.parameters["run_dir"] or tempfile.mkdtemp())
        # Taken now: a rule that changes while the run goes on must not count as written before it.
        self.rules = rules_for(name, self.parameters["arm"])
        self.data: ChapterData | None = None

    @classmethod
    def of_cells(cls, name: str, cells: list[str], values: Mapping[str, Any]) -> Chapter:
        """From the cells that ran so far and the values they left."""
        declared: dict[str, tuple[str, Any]] = {}
        injected: set[str] = set()
        for source in cells:
            if found := declared_parameters(source):
                declared = found
            elif source.startswith(INJECTED):
                targets = [line.targets[0] for line in ast.parse(source).body if isinstance(line, ast.Assign)]
                injected |= {ast.unparse(target) for target in targets}
        declared = declared or annotated(values)  # nbval keeps no history of cells
        if not declared:
            raise problem(name, "no cell of parameters", "a cell of typed literals before this one")
        parameters = {key: values[key] for key in declared}
        check_parameters(parameters | {key: values[key] for key in injected}, declared, name)
        return cls(name, parameters)

    def config(self) -> TrainConfig:
        """At lab size the rate falls along one smooth curve; else by steps, half way unless ``decay_every`` says."""
        given, lab = self.parameters, self.parameters["size"] == "lab"
        taken = ("epochs", "batch_size", "learning_rate", "seed", "device", "precision", "num_workers")
        return TrainConfig(
            **{name: given[name] for name in taken},
            schedule="cosine" if lab else "step",
            decay_every=given["epochs"] if lab else given.get("decay_every", max(1, given["epochs"] // 2)),
            clip_norm=given.get("clip_norm", TrainConfig.clip_norm),
            validate_every=given.get("validate_every", TrainConfig.validate_every),
            compiled=given.get("compiled", TrainConfig.compiled),
        )

    def open(self, texts: Callable[[PrecompSplit], Any] | None = None) -> ChapterData:
        """Open the dataset. texts: split → its captions as the model takes them; words of the vocabulary by default."""
        root = dataset_folder(self.parameters["dataset"])
        vocabulary = Vocabulary.of_folder(root)
        splits = open_splits(root, self.parameters["evaluate_on"])
        splits[0] = part_of(splits[0], self.parameters.get("train_part", 1.0))
        train, dev, test = (texts(s) if texts else WordCaptions(s, vocabulary) for s in splits)
        self.data = ChapterData(*splits, vocabulary, PairDataset(splits[0], train), dev, test)
        return self.data

    def keep(self, scores: Scores, result: TrainResult, more: Mapping[str, float] | None = None) -> Retrieval:
        """Evaluate the scores of ``data.test`` and write the run's receipt; on COCO's ``testall`` one for each protocol.

        more: numbers besides the recalls that the chapter wants to find again.
        """
        split, given = self.data.test, self.parameters
        best = {"dev_rsum": result.best["rsum"]} if result.best else {}
        found = keep_scores(
            scores, split.owner, self.folder, best | dict(more or {}), chapter=self.name, arm=given["arm"],
            seed=given["seed"], dataset=split.identity(), parameters=settings_of(given), seconds=result.seconds,
            device=given["device"], rules=self.rules,
        )  # fmt: skip
        if given["run_dir"]:
            write_scores(self.folder / "scores.safetensors", scores)
        return found


def open_splits(root: Path, evaluated: str) -> list[PrecompSplit]:
    """Train, dev and the split that is judged. Features of another shape would fail only after the training."""
    splits = [open_split(root, name) for name in ("train", "dev", evaluated)]
    train, *others = (split.features for split in splits)
    for other in others:
        if other.shape[1:] != train.shape[1:]:
            raise problem(other.path, f"pictures of shape {other.shape[1:]}", f"{train.shape[1:]}, as in train")
    return splits


def part_of(split: PrecompSplit, part: float) -> PrecompSplit:
    """The first pictures of a split, for runs on less data (parameter ``train_part``)."""
    if not 0 < part <= 1:
        raise problem("train_part", repr(part), "a number above 0, at most 1")
    return split if part == 1 else split.first(max(1, round(part * split.n_images)))


def token_states(parameters: Mapping[str, Any]) -> Callable[[PrecompSplit], BertCaptions]:
    """How a chapter that reads a frozen text encoder opens its captions: ``run.open(token_states(run.parameters))``.

    Reads ``text_encoder``, ``text_layers`` (``"0,-1"``: these hidden layers side by side), ``token_dim`` (the width
    that must come out) and, where the chapter has them, ``max_tokens`` and ``public_padding``.
    """
    try:
        layers = tuple(int(number) for number in parameters["text_layers"].split(","))
    except ValueError:
        raise problem("text_layers", repr(parameters["text_layers"]), "whole numbers such as 0,-1") from None
    encoder = load_text_encoder(parameters["text_encoder"])
    if (width := len(layers) * encoder.width) != parameters["token_dim"]:
        found, hint = f"{len(layers)} layer(s) of {encoder.width} numbers", f"Set token_dim to {width}."
        raise problem(encoder.name, found, f"token_dim = {parameters['token_dim']}", hint)
    if parameters.get("device") in ("auto", "cuda") and torch.cuda.is_available():
        encoder.model.cuda()  # a processor takes hours for the captions of COCO
    kept = {"max_tokens": parameters.get("max_tokens"), "padded": parameters.get("public_padding", False)}
    return lambda split: bert_captions(split, encoder, layers, **kept)


def dataset_folder(dataset: str) -> Path:
    """``scenes`` is the embedded dataset; all else is a folder."""
    if dataset == "scenes":
        from itm_utils.scenes import scenes_folder

        return scenes_folder()
    return Path(dataset)


def keep_scores(scores: Scores, owner: np.ndarray, folder: Path, more: Mapping[str, float], **about: Any) -> Retrieval:
    """Write the receipt of scores and print its line; on COCO's ``testall`` first the papers' 1K, then their 5K.

    owner: (c,) image of each caption. about: what :func:`itm_utils.receipts.make_receipt` wants to know of the run.
    """
    split = about["dataset"]["split"]
    for folds in (5, 1) if split == "testall" else (1,):
        evidence = Evidence.of(fold_ranks(scores, owner, folds), owner)
        result = summarise_folds(evidence, owner, folds, scores.models)
        if split == "testall" and len(scores.i2t) == 5000:
            result = coco_protocol(result, split)
        spread = bootstrap_intervals(evidence, owner)
        measured = {"metrics": result.as_dict() | dict(more), "intervals": spread, "evidence": evidence}
        receipt = make_receipt(**about, **measured, models=result.models, protocol=result.protocol)
        path = write_receipt(receipt, folder, evidence)
        low, high = spread["rsum"]
        print(f"{result.label}: rsum {result.rsum:.1f} [{low:.1f}, {high:.1f}], receipt {path.name}")
    return result


def write_scores(path: Path, scores: Scores) -> None:
    """The score matrices of a run, for ensembles: one where both directions share it."""
    matrices = {"i2t": scores.i2t} | ({"t2i": scores.t2i} if scores.decoupled else {})
    with atomic(path) as temporary:
        save_file({k: v.detach().cpu().contiguous() for k, v in matrices.items()}, temporary)


def read_scores(path: Path) -> Scores:
    """What :func:`write_scores` wrote."""
    if not path.is_file():
        raise problem(path, "no such file", "the scores of a finished run")
    try:
        matrices = load_file(path)
    except SafetensorError as error:
        raise problem(path, f"a damaged file ({error})", "the scores of a finished run") from error
    if "i2t" not in matrices:
        raise problem(path, f"only {', '.join(matrices) or 'nothing'}", "i2t among the scores of a finished run")
    return Scores(i2t=matrices["i2t"], t2i=matrices.get("t2i", matrices["i2t"]))
