"""Open a finished run: its model from a checkpoint, and the captions it was trained on."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import itm_utils.models
from itm_lab.data.opening import token_states
from itm_utils.cache import cache_root, is_whole
from itm_utils.data.batches import WordCaptions
from itm_utils.data.precomp import PrecompSplit
from itm_utils.data.text_encoder import BertCaptions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import input_error
from itm_utils.matcher import Matcher
from itm_utils.scoring import Captions
from itm_utils.training.checkpoints import load_weights, read_checkpoint


class FinishedRun(NamedTuple):
    """The folder of a run, the parameters in its receipt, and its model with the best weights."""

    folder: Path
    settings: dict[str, Any]
    model: Matcher


def find_checkpoint(source: Path) -> Path:
    """A file, or the best weights in the folder of a run; the newest where nothing was validated."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise input_error(source, "no such file or folder", "a checkpoint, or the folder of a run")
    found = [*sorted(source.glob("step-*.safetensors")), *source.glob("best.safetensors")]
    if not found:
        below = sorted({path.parent.relative_to(source) for path in source.rglob("best.safetensors")})
        example = f", such as {', '.join(map(str, below[:3]))}" if below else ""
        raise input_error(source, "no checkpoint", f"the folder of a run{example}")
    return found[-1]


def load_matcher(path: Path) -> tuple[Matcher, dict[str, Any]]:
    """The model of a checkpoint, and what the checkpoint says of its data."""
    checkpoint = read_checkpoint(path)
    for key, kind in (("model", str), ("config", dict), ("provenance", dict)):
        if not isinstance(found := checkpoint.info.get(key), kind):
            said = f"{key} = {found!r}" if key in checkpoint.info else f"nothing about {key}"
            raise input_error(path, said, "a checkpoint that training wrote")
    name = checkpoint.info["model"]
    if (model_class := find_model(name)) is None:
        raise input_error(path, f"a model {name}", "one that a chapter of this book exports")
    try:
        model = model_class(**checkpoint.info["config"])
    except Exception as error:  # foreign arguments fail in many ways, and each concerns this one file only
        reason = str(error).partition("\n")[0]
        raise input_error(path, f"a config with which there is no {name} ({reason})", "the arguments of one") from error
    load_weights(path, model, checkpoint)
    return model, checkpoint.info["provenance"]


def find_model(name: str) -> type[Matcher] | None:
    """The class of this name; None for those on which others of their chapter are built, which are parts of a model."""
    for found in pkgutil.iter_modules(itm_utils.models.__path__):
        module = importlib.import_module(f"itm_utils.models.{found.name}")
        own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
        for kind in own:
            if kind.__name__ == name and issubclass(kind, Matcher) and not set(kind.__subclasses__()) & set(own):
                return kind
    return None


def states_of(split: PrecompSplit, fingerprint: str, path: Path) -> BertCaptions:
    """Token states: those that training kept in the cache, or computed again with the settings in the run's receipt."""
    if is_whole(cache_root() / fingerprint):
        return BertCaptions(cache_root() / fingerprint)
    if (settings := settings_in_receipt(path)) is None:
        expected = f"the captions that {path.name} was trained on ({fingerprint}), or the receipt of its run"
        raise input_error(cache_root(), "no such token states", expected, "Give the folder in which the run ended.")
    captions = token_states(settings)(split)
    if captions.fingerprint != fingerprint:
        expected = f"{fingerprint}, as {path.name} was trained on"
        raise input_error(split.root, f"token states {captions.fingerprint}", expected, "Is it the same text encoder?")
    return captions


def settings_in_receipt(path: Path) -> dict[str, Any] | None:
    """The parameters of the run that a checkpoint belongs to, if a receipt there names a text encoder."""
    return next(
        (given for folder in path.parents[:2] for given in settings_in(folder) if "text_encoder" in given), None
    )


def settings_in(folder: Path) -> Iterator[dict[str, Any]]:
    """The parameters that the receipts in a run's folder list."""
    for receipt in sorted(folder.glob("[0-9]*/**/*.json")):
        try:
            given = json.loads(receipt.read_bytes())["parameters"]
        except (ValueError, KeyError, TypeError, RecursionError):  # none of ours, or damaged
            continue
        if isinstance(given, dict):
            yield given


def runs_like(folders: Iterable[Path], settings: Mapping[str, Any], free: Iterable[str]) -> Iterator[FinishedRun]:
    """Finished runs whose settings are these, but for those that are free to differ."""
    fixed = {name: value for name, value in settings.items() if name not in set(free)}
    for folder in folders:
        given = next(settings_in(folder), None)
        if given is not None and fixed.items() <= given.items():
            yield FinishedRun(folder, given, load_matcher(find_checkpoint(folder))[0])


def captions_of(split: PrecompSplit, fingerprint: str, path: Path) -> Captions:
    """The captions as the model was trained on them: words of the data's vocabulary, or states of a text encoder."""
    if fingerprint.startswith("bert-"):
        return states_of(split, fingerprint, path)
    vocabulary = Vocabulary.of_folder(split.root)
    if vocabulary.fingerprint != fingerprint:
        where = next(split.root.glob("*_vocab.json"))
        expected = f"{fingerprint}, as {path.name} was trained with"
        raise input_error(where, f"fingerprint {vocabulary.fingerprint}", expected)
    return WordCaptions(split, vocabulary)
