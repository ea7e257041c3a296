"""Weights and training state on disk: one safetensors file each, written atomically, without pickle.

Tensors (weights, optimiser state, random-number generators) are safetensors entries; everything else is JSON in
the file's metadata. One file means one atomic rename: a checkpoint is whole or it is not there. The metadata also
has a digest of the JSON and of each group of tensors (``model``, ``optimizer``, …), checked on reading: disks forget.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.files import atomic
from itm_utils.matcher import Matcher

FORMAT = "itm-checkpoint-2"
ADAM = ("step", "exp_avg", "exp_avg_sq")  # what the optimiser remembers of a parameter
GENERATORS = ("torch", "numpy", "python", "gauss")  # on every device
HINT = "Give the same settings, or another folder for another run."


@dataclass
class Checkpoint:
    """tensors: by name, prefixed ``model.``, ``optimizer.`` or ``rng.``; info: plain JSON."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of one prefix, without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write one checkpoint file, atomically."""
    # Copies: safetensors refuses tensors that share memory, and tied weights do.
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    described = json.dumps(dict(info))
    metadata = {"format": FORMAT, "info": described, "digests": json.dumps(_digests(plain, described))}
    with atomic(path) as temporary:
        try:
            save_file(plain, temporary, metadata=metadata)
        except SafetensorError as error:  # its own name for a full disk or a folder that cannot be written
            raise OSError(str(error)) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of :func:`write_checkpoint`; one bit that differs from what was written is an error."""
    path = Path(path)
    if not path.is_file():
        raise input_error(path, "no such file", "a checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except SafetensorError as error:
        raise input_error(path, f"no safetensors file ({error})", "a checkpoint of this book") from error
    if metadata.get("format") != FORMAT:
        hint = "`itm eval` loads published weights."
        raise input_error(path, f"format {metadata.get('format')}", FORMAT, hint)
    _check_digests(path, metadata, _digests(tensors, metadata.get("info", "")))
    try:
        info = json.loads(metadata.get("info", ""))
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        raise input_error(path, f"metadata {str(metadata.get('info'))[:60]!r}", "the JSON that this book writes")
    return Checkpoint(tensors, info)


def _digests(tensors: Mapping[str, Tensor], info: str) -> dict[str, str]:
    """Hashes of the JSON and of the tensors of each prefix."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.partition(".")[0], {})[name] = tensor
    return {"info": hashlib.sha256(info.encode()).hexdigest()} | {k: tensor_digest(v) for k, v in groups.items()}


def _check_digests(path: Path, metadata: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise at the first group of tensors that is not what was written."""
    try:
        written = dict(json.loads(metadata.get("digests", "")))
    except (ValueError, TypeError, RecursionError):
        written = {}
    for group in ("info", *sorted(written.keys() | found.keys())):
        if written.get(group) is None or written[group] != found.get(group):
            raise input_error(path, f"{group} other than was written", "an undamaged checkpoint")


def model_info(model: Matcher, provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """What must agree before weights are loaded: the class, its arguments and, if given, where the data came from."""
    data = {} if provenance is None else {"provenance": dict(provenance)}
    return {"model": type(model).__name__, "config": model.config} | data


def fingerprint_of(model: Matcher) -> str:
    """Short hash of a model's weights by name, wherever they are."""
    return tensor_digest(model.state_dict())[:16]


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash of tensors by name, with their types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_model(path: Path, model: Matcher, provenance: Mapping[str, Any], **more: Any) -> None:
    """Weights only, with what is needed to build the model again."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    write_checkpoint(path, tensors, model_info(model, provenance) | more)


def load_model(path: Path, model: Matcher, provenance: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Load weights into ``model``; refuse those of another model or of other data. Returns the file's JSON."""
    checkpoint = read_checkpoint(path)
    check_same(path, checkpoint.info, model_info(model, provenance))
    load_weights(path, model, checkpoint)
    return checkpoint.info


def load_weights(path: Path, model: Matcher, checkpoint: Checkpoint) -> None:
    """Copy the ``model.`` tensors into ``model``, naming the first that does not fit."""
    weights = checkpoint.part("model.")
    check_weights(path, model, weights)
    model.load_state_dict(weights)


def check_weights(path: Path, model: Matcher, weights: Mapping[str, Tensor]) -> None:
    """Raise at the first weight that is missing, too many or of another shape than the model's."""
    for name, tensor in model.state_dict().items():
        if name not in weights:
            raise input_error(path, f"no weight {name}", f"the weights of {type(model).__name__}")
        if weights[name].shape != tensor.shape:
            raise input_error(path, f"{name} of shape {tuple(weights[name].shape)}", f"shape {tuple(tensor.shape)}")
    for name in sorted(set(weights) - set(model.state_dict())):
        raise input_error(path, f"a weight {name}", f"only those of {type(model).__name__}")


def check_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], whole: bool = False) -> None:
    """Raise at the first entry of ``expected`` that ``found`` states differently; nested entries must agree whole."""
    for name in sorted(set(found) - set(expected)) if whole else ():
        raise input_error(path, f"{name} = {found[name]!r}", f"no {name}", HINT)
    for name, value in expected.items():
        if isinstance(value, Mapping):
            nested = found.get(name)
            check_same(path, nested if isinstance(nested, Mapping) else {}, value, whole=True)
        elif found.get(name) != _as_json(value):
            raise input_error(path, f"{name} = {found.get(name)!r}", f"{name} = {value!r}", HINT)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimiser state as named tensors: ``optimizer.<parameter number>.<entry>``."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{key}": torch.as_tensor(value) for index, s in state.items() for key, value in s.items()
    }


def check_complete(
    path: Path, checkpoint: Checkpoint, model: Matcher, trained: Sequence[Tensor], last_step: int
) -> None:
    """Raise unless a checkpoint holds all that a run of ``last_step`` steps needs to go on. trained: what the optimiser has."""
    step, best, seconds = (checkpoint.info.get(key) for key in ("step", "best", "seconds"))
    if type(step) is not int or not 0 < step <= last_step or path.stem != f"step-{step:08d}":
        raise input_error(path, f"step = {step!r}", f"a step from 1 to {last_step:,}, as in the file's name")
    if not isinstance(best, dict) or not isinstance(seconds, int | float):
        raise input_error(path, f"best = {best!r}, seconds = {seconds!r}", "what training writes")
    check_weights(path, model, checkpoint.part("model."))
    if best:
        check_weights(path, model, checkpoint.part("best."))
    _check_optimizer(path, checkpoint, trained)
    for name in ("log.records", *(f"rng.{name}" for name in GENERATORS)):
        if name not in checkpoint.tensors:
            raise input_error(path, f"no {name}", "the log, and the state of every random-number generator")


def _check_optimizer(path: Path, checkpoint: Checkpoint, trained: Sequence[Tensor]) -> None:
    """Raise at the first entry that is missing or misshapen; what never had a gradient has none, so the count decides."""
    state = checkpoint.part("optimizer.")
    count = checkpoint.info.get("optimizer_tensors", len(state))
    if not state or len(state) != count:
        raise input_error(path, f"{len(state)} tensors of the optimiser", f"{count or 'more'}")
    shapes = {str(number): parameter.shape for number, parameter in enumerate(trained)}
    for name, tensor in state.items():
        number, _, entry = name.partition(".")
        if number not in shapes or (entry != "step" and tensor.shape != shapes[number]):
            raise input_error(path, f"optimizer.{name} of shape {tuple(tensor.shape)}", "the state of this optimiser")
        if missing := {f"{number}.{entry}" for entry in ADAM} - state.keys():
            raise input_error(path, f"no optimizer.{min(missing)}", "the state of this optimiser")


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Put the tensors of :func:`optimizer_tensors` back; learning rates and the like belong to the settings."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.part("optimizer.").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator that training on ``device`` may draw from."""
    _, keys, position, has_gauss, gauss = cast(tuple, np.random.get_state())  # noqa: NPY002 - the global generator is what needs saving
    version, words, next_gauss = random.getstate()
    states = {"torch": torch.get_rng_state(), "numpy": torch.tensor([position, has_gauss, *keys.tolist()])}
    states["python"] = torch.tensor([version, next_gauss is not None, *words])
    states["gauss"] = torch.tensor([gauss, next_gauss or 0.0], dtype=torch.float64)
    if device.type in ("cuda", "mps"):
        states[device.type] = getattr(torch, device.type).get_rng_state()
    return {f"rng.{name}": state for name, state in states.items()}


def restore_rng(checkpoint: Checkpoint, device: torch.device) -> None:
    """Set every generator to where :func:`rng_tensors` found it."""
    states = checkpoint.part("rng.")
    torch.set_rng_state(states["torch"])
    gauss, next_gauss = states["gauss"].tolist()
    position, has_gauss, *keys = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, has_next, *words = states["python"].tolist()
    random.setstate((version, tuple(words), next_gauss if has_next else None))
    if device.type in states:  # a run that moved here from another kind of device starts this generator anew
        getattr(torch, device.type).set_rng_state(states[device.type])


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
