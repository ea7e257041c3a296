"""``itm keep``: of an experiment's finished runs the one in the middle, its weights in half precision, scored as stored."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from itm_lab.data.opening import dataset_folder
from itm_lab.experiments.experiment_files import Experiment, find_experiment, read_experiments, read_seeds
from itm_lab.experiments.plan import plan
from itm_lab.finished_run import load_matcher
from itm_lab.paths import Paths
from itm_lab.photos.stages import open_model
from itm_lab.records.bootstrap import bootstrap_intervals
from itm_lab.records.checkout import Code, code_of
from itm_lab.records.kept import SUFFIX, KeptModel, differing_ranks, file_name, halved, ranks_of
from itm_lab.records.nested_yaml import load_yaml
from itm_lab.records.parameters import notebook_model, settings_of
from itm_lab.records.receipts import (
    Evidence,
    counts_as_evidence,
    is_old_protocol,
    make_receipt,
    read_evidence,
    read_receipt,
    receipt_path,
    variant_receipts,
    write_receipt,
)
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError, input_error
from itm_utils.files import read_text
from itm_utils.matcher import Matcher
from itm_utils.metrics.retrieval import Ranks, summarise_folds
from itm_utils.training.checkpoints import model_info, read_checkpoint, tensor_digest, write_checkpoint
from itm_utils.validation import validated

LIST = "kept.yaml"  # in experiments/: what is kept
LARGEST = 2**20  # bytes of one file: the repository is cloned with all of them
ASK = "--provisional keeps it all the same, and its record says so."


@dataclass(frozen=True)
class Places:
    """Where runs and receipts lie, and where kept models go. root: of the checkout."""

    root: Path
    runs: Path
    receipts: Path
    out: Path


def listed(root: Path) -> list[str]:
    """The experiments of ``experiments/kept.yaml``."""
    path = root / "experiments" / LIST
    try:
        names = load_yaml(read_text(path, "a list of experiments"))
    except (yaml.YAMLError, RecursionError) as error:
        raise input_error(path, f"no YAML ({str(error).splitlines()[0]})", "a list of experiments") from None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise input_error(path, repr(names)[:60], "a list of experiments, such as scan/scenes/t2i_avg")
    return [find_experiment(root, name).name for name in names]


def keep_all(places: Places, names: list[str], provisional: bool, replace: bool) -> Iterator[tuple[bool, str]]:
    """Keep what is named, or all of ``experiments/kept.yaml``: whether it could be, and one line about it, for each."""
    code = code_of(Paths(places.root))  # once: what is replaced here is a change of the checkout
    if code.clean is False and not provisional:
        raise input_error(places.root, "uncommitted changes", "a clean checkout, whose commit the record names", ASK)
    for name in names or listed(places.root):
        try:
            yield True, keep(places, name, code, provisional, replace)
        except ItmError as error:  # others may be finished
            yield False, str(error)


def keep(places: Places, name: str, code: Code, provisional: bool = False, replace: bool = False) -> str:
    """Keep the median run of an experiment, or the run in a folder; returns one line about it.

    provisional: also with fewer seeds than are planned, or a run that no verdict counts. replace: another kept model.
    """
    if (folder := Path(name)).is_dir():
        experiment, receipt = experiment_of_run(places.root, folder)
        found = [receipt]
    else:
        experiment = find_experiment(places.root, name)
        found = receipts_of(experiment, places.receipts)
        for one in found:
            check_settings(places, experiment, one)
        receipt = median(found, experiment)
        folder = places.runs / experiment.name / f"s{receipt['seed']}"
    planned = read_seeds(experiment.seeds) if experiment.seeds else [receipt["seed"]]
    if len(found) < len(planned) and not provisional:
        have = f"{len(found)} of {len(planned)} planned seeds"
        raise input_error(experiment.name, have, "a receipt of each, for the one in the middle", ASK)
    if (reason := counts_as_evidence(receipt)) and not provisional:
        raise input_error(folder, f"a run that verdicts do not count: {reason}", "one that they do", ASK)
    counts = {"seeds": float(len(found)), "seeds_planned": float(len(planned))}
    return keep_run(places, experiment, folder, receipt, counts, code, replace)


def receipts_of(experiment: Experiment, results: Path) -> list[dict[str, Any]]:
    """The receipts of an experiment's planned seeds under today's protocol."""
    dataset, seeds = Path(experiment.settings["dataset"]).name, read_seeds(experiment.seeds or "0")
    known = variant_receipts(experiment.chapter, experiment.settings["variant"], dataset, results)
    found = [receipt for receipt in known if not is_old_protocol(receipt) and receipt["seed"] in seeds]
    if not found:
        raise input_error(results / experiment.chapter, f"no receipt of {experiment.name}", "that of a finished run")
    return found


def check_settings(places: Places, experiment: Experiment, receipt: Mapping[str, Any]) -> None:
    """The run had the settings that its experiment has now, with what searches chose for it."""
    (job,) = plan(places.root, [experiment.name], "", str(receipt["seed"]), [], [], None, places.receipts)
    wanted, found = settings_of(job.parameters), receipt["parameters"]
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            said = f"{name} = {found.get(name)!r} in the receipt of seed {receipt['seed']}"
            raise input_error(
                experiment.name, said, f"{wanted.get(name)!r}", "The experiment has changed: run it again."
            )


def median(receipts: list[dict[str, Any]], experiment: Experiment) -> dict[str, Any]:
    """The receipt in the middle by its rsum on test, the lower one of two in the middle."""
    ordered = sorted(receipts, key=lambda receipt: (receipt["metrics"]["rsum"]["value"], receipt["seed"]))
    return ordered[(len(ordered) - 1) // 2]


def experiment_of_run(root: Path, folder: Path) -> tuple[Experiment, dict[str, Any]]:
    """The experiment that a run's folder belongs to, by the receipt in it."""
    paths = sorted(folder.glob("[0-9]*/*.json"))
    if len(paths) != 1:
        raise input_error(folder, f"{len(paths)} receipts on a test split", "the folder of one finished run")
    receipt = read_receipt(paths[0])
    chapter, dataset = receipt["chapter"].partition("_")[2], receipt["dataset"]["name"]
    experiments = read_experiments(root, chapter).values()
    here = [one for one in experiments if Path(one.settings["dataset"]).name == dataset]
    plain = [one for one in here if receipt["variant"] == one.settings["variant"]]
    # a run with changed settings says so behind the name of its variant
    changed = [one for one in here if receipt["variant"].startswith(f"{one.settings['variant']} ")]
    if not (plain or changed):
        raise input_error(
            folder, f"the variant {receipt['variant']}", f"one of experiments/{chapter}.yaml on {dataset}"
        )
    return max(plain or changed, key=lambda one: len(one.settings["variant"])), receipt


def keep_run(
    places: Places,
    experiment: Experiment,
    folder: Path,
    receipt: dict[str, Any],
    counts: Mapping[str, float],
    code: Code,
    replace: bool,
) -> str:
    """Store the weights of a finished run, score them from there, and write their record."""
    split = evaluated_split(places.root, experiment, receipt)
    model, known, checkpoint = open_model(folder)
    check_same_run(model, checkpoint, receipt)
    check_same_model(model, experiment, receipt, split)
    target = places.out / receipt["chapter"] / f"{file_name(receipt['variant'])}{SUFFIX}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".keep-", dir=places.out) as temporary:
        stored = Path(temporary) / target.name
        tensors = {f"model.{name}": tensor for name, tensor in halved(model).items()}
        write_checkpoint(stored, tensors, model_info(model, known))
        if (size := stored.stat().st_size) > LARGEST:
            raise input_error(folder, f"{size:,} bytes of weights", f"at most {LARGEST:,}", "Keep a smaller model.")
        made = score_stored(stored, split, receipt, read_evidence(receipt_in(folder, receipt)), counts, code)
        record = read_receipt(made)
        state = put_in_place(stored, made, target, record, replace)
    metrics = {name: record["metrics"][name]["value"] for name in ("rsum", "receipt_rsum", "same_ranks")}
    return (
        f"{experiment.name}, seed {record['seed']} of {counts['seeds']:.0f} (planned {counts['seeds_planned']:.0f}): "
        f"rsum {metrics['rsum']:.1f}, of its run {metrics['receipt_rsum']:.1f}, {metrics['same_ranks']:.1f} % of the "
        f"ranks the same; {size:,} bytes; {state}"
    )


def receipt_in(folder: Path, receipt: Mapping[str, Any]) -> Path:
    """The receipt that a run left in its own folder, which must be the given one."""
    path = receipt_path(receipt, folder)
    if not path.is_file() or read_receipt(path)["seal"] != receipt["seal"]:
        raise input_error(path, "another receipt, or none", f"that of {receipt['variant']}, seed {receipt['seed']}")
    return path


def evaluated_split(root: Path, experiment: Experiment, receipt: Mapping[str, Any]) -> PrecompSplit:
    """The split that a run was scored on, with the same data."""
    name = experiment.settings["dataset"]
    folder = dataset_folder(name if name == "scenes" else str(root / name))
    split = open_split(folder, receipt["dataset"]["split"])
    if split.identity() != receipt["dataset"]:
        raise input_error(folder, "another fingerprint of its data", "that of the receipt", "These are other data.")
    return split


def check_same_run(model: Matcher, checkpoint: Path, receipt: Mapping[str, Any]) -> None:
    """The weights are those that the run of this receipt chose on dev, and those of a stage that it shares."""
    best, last = read_checkpoint(checkpoint).info.get("best", {}), receipt["training"]["stages"][-1]
    captions = best.get("step", 0) * last["captions_seen"] // max(1, last["steps"])
    if [captions, best.get("rsum")] not in last["dev"]:
        found = f"weights with rsum {best.get('rsum')} on dev at step {best.get('step')}"
        raise input_error(checkpoint, found, "those that the receipt's curve on dev has", "Another run left them.")
    for name, digest in receipt["inputs"].items():
        part = getattr(model, name.removeprefix("stage_"), None) if name.startswith("stage_") else None
        if isinstance(part, nn.Module) and tensor_digest(part.state_dict()) != digest:
            raise input_error(checkpoint, f"other weights of the shared stage {name}", "those of the receipt")


def check_same_model(model: Matcher, experiment: Experiment, receipt: Mapping[str, Any], split: PrecompSplit) -> None:
    """Built again from the parameters of the receipt, the model is of the same class with the same arguments."""
    given = validated(notebook_model(experiment.notebook), receipt["parameters"], experiment.name)
    sizes = len(Vocabulary.of_folder(split.root)), split.feature_dim
    module = importlib.import_module("itm_utils.models." + experiment.chapter.partition("_")[2])
    with torch.random.fork_rng(devices=[]):
        built = module.stages(given, module.build(given, *sizes))[-1].validated
    if model_info(built, None) != model_info(model, None):
        found = f"a checkpoint of {type(model).__name__} with {model.config}"
        raise input_error(experiment.name, found, f"{type(built).__name__} with {built.config}, as its receipt says")


def score_stored(
    stored: Path,
    split: PrecompSplit,
    receipt: Mapping[str, Any],
    before: Evidence,
    counts: Mapping[str, float],
    code: Code,
) -> Path:
    """Load the stored weights, score them, and write the record beside them. before: the ranks of the run."""
    began = time.perf_counter()
    model, known = load_matcher(stored)
    opened = KeptModel(model.eval(), known, receipt, stored)
    with one_thread():
        evidence = ranks_of(model, split, opened.captions(split))
    result = summarise_folds(ranks := Ranks(evidence.i2t, evidence.t2i), evidence.owner, 1)
    queries = len(evidence.i2t) + len(evidence.t2i)
    more = {"receipt_rsum": receipt["metrics"]["rsum"]["value"]} | dict(counts)
    more["same_ranks"] = 100 * (1 - differing_ranks(evidence, before) / queries)
    about = {name: receipt[name] for name in ("chapter", "variant", "seed", "dataset", "parameters", "search")}
    record = make_receipt(
        **about, training=receipt["training"], metrics=result.as_dict() | more,
        intervals=bootstrap_intervals(ranks, evidence.owner), protocol=result.protocol, evidence=evidence,
        inputs=receipt["inputs"] | {"receipt": receipt["seal"], "weights": tensor_digest(halved(model))},
        seconds=time.perf_counter() - began, device="cpu", code=code,
    )  # fmt: skip
    return write_receipt(record, stored.parent, evidence)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: a sum has one order then, and ranks are the same again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def put_in_place(stored: Path, made: Path, target: Path, record: Mapping[str, Any], replace: bool) -> str:
    """Move the three files to where they are kept, the record last; returns what became of them."""
    path = target.with_suffix(".json")
    if path.exists() and not replace:
        known = read_receipt(path)
        if all(known[name] == record[name] for name in ("ranks", "inputs", "metrics")):
            return "kept before, unchanged"
        found = f"a kept model of seed {known['seed']} with rsum {known['metrics']['rsum']['value']:.1f}"
        raise input_error(path, found, "none, or the same one", "--replace puts this one in its place.")
    path.unlink(missing_ok=True)  # weights beside the record of others would pass for theirs
    for source, place in ((stored, target), (made.with_suffix(".npz"), target.with_suffix(".npz")), (made, path)):
        shutil.move(source, place)
    return f"written to {target}"
