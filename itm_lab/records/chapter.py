"""What every chapter does around its model: check its parameters, open its data, save its result.

A chapter declares its parameters in one cell of typed literals; papermill puts a second cell after it. Both are
checked here, so that a misspelt name is an error at once, not a run with the wrong setting.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from itm_lab.data.opening import dataset_folder, open_splits, open_vocabulary, part_of
from itm_lab.paths import Paths
from itm_lab.records.checkout import code_of
from itm_lab.records.collapse import collapse_numbers
from itm_lab.records.parameters import INJECTED, annotated, declared_parameters, parameters_model, settings_of
from itm_lab.records.receipts import Curves
from itm_lab.records.rules import rules_for
from itm_lab.records.scores import save_scores, write_scores
from itm_lab.records.training import Trained, search_records, training_record
from itm_utils import distributed
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import PrecompSplit
from itm_utils.data.text_encoder import BertCaptions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.digests import file_digest
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher, Scores
from itm_utils.metrics.retrieval import (
    Retrieval,
    evaluate,
)
from itm_utils.scoring import score_split
from itm_utils.training import Stage, TrainConfig, TrainResult, train, train_config
from itm_utils.training.checkpoints import tensor_digest
from itm_utils.validation import validated


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
        return {"vocabulary": self.vocabulary.fingerprint, "dev": self.dev.identity()["fingerprint"]}

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what a run reads besides the split that is evaluated: the other splits, and how captions are read."""
        splits = {"train": self.train.identity()["fingerprint"], "dev": self.dev.identity()["fingerprint"]}
        texts = {"train_texts": self.pairs.texts, "dev_texts": self.dev_texts, "texts": self.test_texts}
        states = {name: text.fingerprint for name, text in texts.items() if isinstance(text, BertCaptions)}
        return splits | {"vocabulary": self.vocabulary.fingerprint} | states

    def validate(self, model: Matcher) -> dict[str, float]:
        """Recalls on dev and their sums, by which weights are chosen: of all six, and of R@1 and R@5."""
        found = evaluate(score_split(model, self.dev, self.dev_texts), self.dev.owner)
        return found.as_dict() | {"r1_r5": found.r1_r5}


def start_chapter(name: str) -> Chapter:
    """Check the parameters of the notebook that calls this, and start its run.

    name: of the chapter, ``"02_scan"``.
    """
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise input_error("start_chapter", "no notebook", "a chapter that runs in Jupyter, papermill or nbval")
    return Chapter.of_cells(name, shell.user_ns["In"], shell.user_ns)


class Chapter:
    """One run of a chapter. parameters: name → value. folder: where checkpoints, log and receipt go."""

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.name, self.parameters = name, dict(parameters)
        distributed.connect(cpu=self.parameters.get("device") == "cpu")
        if distributed.processes() > 1 and not self.parameters["run_dir"]:
            raise input_error("run_dir", "none", f"a folder that all {distributed.processes()} processes share")
        self.folder = Path(self.parameters["run_dir"] or tempfile.mkdtemp())
        # Taken now: a rule that changes while the run goes on must not count as written before it.
        self.rules = rules_for(name, self.parameters["variant"])
        self.code = code_of(Paths.find_or_none())
        self.search = search_records()
        self.data: ChapterData | None = None
        self.trained: list[Trained] = []
        self.inputs: dict[str, str] = {}

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
            raise input_error(name, "no cell of parameters", "a cell of typed literals before this one")
        given = {key: values[key] for key in (*declared, *injected)}
        return cls(name, validated(parameters_model(name, declared), given, name))

    def config(self) -> TrainConfig:
        """The settings of a run with one training."""
        return train_config(self.parameters)

    def open(self, texts: Callable[[PrecompSplit], Any] | None = None) -> ChapterData:
        """Open the dataset. texts: split → its captions as the model takes them; words of the vocabulary by default."""
        root = dataset_folder(self.parameters["dataset"])
        train, dev, test = open_splits(root, self.parameters["evaluate_on"])
        vocabulary = open_vocabulary(root, train)
        train = part_of(train, self.parameters.get("train_fraction", 1.0))
        captions = [texts(split) if texts else WordCaptions(split, vocabulary) for split in (train, dev, test)]
        pairs = PairDataset(train, captions[0])
        self.data = ChapterData(train, dev, test, vocabulary, pairs, dev_texts=captions[1], test_texts=captions[2])
        return self.data

    def uses(self, name: str, source: Any) -> None:
        """Note in the receipt what else enters the run: a file, or anything with a fingerprint; nothing for None."""
        if source is not None:
            self.inputs[name] = file_digest(source) if isinstance(source, str | Path) else source.fingerprint

    def train(
        self,
        stage: Stage,
        pairs: PairDataset | None = None,
        folder: Path | None = None,
        validate: bool = True,
        counts: bool = True,
        **known: str,
    ) -> TrainResult:
        """Train a stage, or go on with it, and note it for the receipt.

        pairs: those of ``data`` by default. folder: the run's own by default; of a stage that runs share, another.
        validate: on dev after every epoch. counts: whether the result comes from this training; False for one that
        only explains. known: what else must not change while it is trained.
        """
        if self.data is None:
            raise input_error(self.name, "training without data", "a chapter that called open() before")
        data, folder = self.data, folder or self.folder
        result = train(
            stage.model, stage.objective, pairs or data.pairs, stage.config, folder,
            (lambda _: data.validate(stage.validated)) if validate else None, data.known | known,
        )  # fmt: skip
        if counts:
            shared = not folder.resolve().is_relative_to(self.folder.resolve())
            self.trained.append(Trained(stage, result, shared))
            if shared:
                self.inputs[f"stage_{stage.name}"] = tensor_digest(stage.model.state_dict())
        return result

    def save_result(
        self,
        scores: Scores,
        result: TrainResult,
        more: Mapping[str, float] | None = None,
        curves: Curves | None = None,
    ) -> Retrieval:
        """Evaluate the scores of ``data.test`` and write the run's receipt; on COCO's ``testall`` one for each protocol.

        Of several processes, one writes.

        more: numbers besides the recalls that the chapter wants to find again. curves: what its figures are drawn from.
        """
        if self.data is None:
            raise input_error(self.name, "scores without data", "a chapter that called open() before")
        split, given = self.data.test, self.parameters
        if not distributed.is_main():
            return evaluate(scores, split.owner)
        stages = [trained.record for trained in self.trained]
        numbers = collapse_numbers(scores, result.log, result.model, split, self.data.test_texts)
        numbers |= {"dev_rsum": result.best["rsum"]} if result.best else {}
        if given["run_dir"]:  # first: the receipt marks a run as finished
            write_scores(self.folder / "scores.safetensors", scores)
        return save_scores(
            scores, split.owner, self.folder, numbers | dict(more or {}), chapter=self.name, variant=given["variant"],
            seed=given["seed"], dataset=split.identity(), parameters=settings_of(given), seconds=result.seconds,
            device=given["device"], rules=self.rules, curves=curves, inputs=self.data.inputs | self.inputs,
            training=training_record(self.data.train.n_images, stages), search=self.search, code=self.code,
        )  # fmt: skip
