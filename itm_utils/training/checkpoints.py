"""Weights and training state on disk: one safetensors file each, written atomically, without pickle.

Tensors (weights, optimiser state, random-number generators) are safetensors entries; everything else is JSON in
the file's metadata. One file means one atomic rename: a checkpoint is whole or it is not there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
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

FORMAT = "itm-checkpoint-1"
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
    with atomic(path) as temporary:
        try:
            save_file(plain, temporary, metadata={"format": FORMAT, "info": json.dumps(dict(info))})
        except SafetensorError as error:  # its own name for a full disk or a folder that cannot be written
            raise OSError(str(error)) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of :func:`write_checkpoint`."""
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
        raise input_error(
            path,
            f"format {metadata.get('format')}",
            f"{FORMAT}",
            "`itm eval` and itm_lab.parity.adapters load published weights.",
        )
    try:
        info = json.loads(metadata.get("info", ""))
    except json.JSONDecodeError:
        info = None
    if not isinstance(info, dict):
        raise input_error(path, f"metadata {str(metadata.get('info'))[:60]!r}", "the JSON that this book writes")
    return Checkpoint(tensors, info)


def model_info(model: Matcher, provenance: Mapping[str, Any] | None) -> dict[str, Any]:
    """What must agree before weights are loaded: the class, its arguments and, if given, where the data came from."""
    data = {} if provenance is None else {"provenance": dict(provenance)}
    return {"model": type(model).__name__, "config": model.config} | data


def fingerprint_of(model: Matcher) -> str:
    """Short hash of a model's weights by name, wherever they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


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
    for name, tensor in model.state_dict().items():
        if name not in weights:
            raise input_error(path, f"no weight {name}", f"the weights of {type(model).__name__}")
        if weights[name].shape != tensor.shape:
            raise input_error(path, f"{name} of shape {tuple(weights[name].shape)}", f"shape {tuple(tensor.shape)}")
    for name in sorted(set(weights) - set(model.state_dict())):
        raise input_error(path, f"a weight {name}", f"only those of {type(model).__name__}")
    model.load_state_dict(weights)


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
