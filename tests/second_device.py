"""A second device without a GPU: it computes on the CPU, behaves like CUDA, and counts where the host would wait.

``import second_device`` registers the device type ``echo``. A tensor on it is a :class:`EchoTensor`, whose numbers lie
in a CPU tensor that only :func:`run` touches. As on a GPU

* tensors of two devices do not mix, except CPU numbers (0-dim) and positions that index a device tensor;
* ``.numpy()`` and ``numpy.asarray`` fail;
* an operation whose result, or whose result's shape, the host must know waits for all that was asked before
  (``.item()``, ``if tensor``, ``nonzero``, ``unique``, ``x[mask]``, a copy to the CPU, a blocking copy from it). Inside
  ``with counting() as syncs`` each of them is noted with the line of this project that asked for it.

What happens to CPU tensors is free: caption lengths are read on the host at no cost. A GPU's own waits that depend on
the size of its memory or on the driver are not modelled.

tests/contract/test_no_host_sync.py asks it of every model; ``python -m benchmarks.host_syncs`` prints the table.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "echo"
ROOT = Path(__file__).resolve().parents[1]


class _Backend(_DummyBackendModule):
    """What ``torch.echo`` is: one device, with half precision."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, _Backend())
DEVICE = torch.device(NAME, 0)

aten = torch.ops.aten
# PyTorch itself tags operations whose result, or its size, the host must know; these wait as well.
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
WAITING = {aten.multinomial, aten._unique, aten.unique_dim, aten.linalg_eig, aten.linalg_eigh}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
HOST_LENGTHS = {aten._pack_padded_sequence, aten._pack_padded_sequence_backward, aten._pad_packed_sequence}
JOINING = {aten.cat, aten.stack}  # these do not take even a CPU number beside device tensors


@dataclass(frozen=True)
class Sync:
    """One wait of the host. where: the innermost line of the project, as ``file:line function``."""

    operation: str
    where: str


_counters: list[list[Sync]] = []


@contextmanager
def counting() -> Iterator[list[Sync]]:
    """Note every wait of the host inside the block."""
    syncs: list[Sync] = []
    _counters.append(syncs)
    try:
        yield syncs
    finally:
        _counters.remove(syncs)


def _note(operation: str) -> None:
    if _counters:
        sync = Sync(operation, _asking_line())
        for counter in _counters:
            counter.append(sync)


def _asking_line() -> str:
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/") and "/.venv/" not in path and path != __file__:
            return f"{Path(path).relative_to(ROOT)}:{line} {frame.f_code.co_name}"
    return "outside the project's code"


class EchoTensor(torch.Tensor):
    """A tensor on the second device. numbers: the CPU tensor that holds them."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> EchoTensor:
        with torch.inference_mode(False):  # else a view of a tensor that was made before inference mode fails
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=DEVICE,
            )
        tensor.numbers = numbers
        return tensor

    def __repr__(self) -> str:
        return f"EchoTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """Read the values on the host: a copy, and a wait."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run(func, args, kwargs or {})


def run(operation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what was asked of the device; note a wait, refuse what a GPU refuses."""
    if (
        parts := operation.decompose(*args, **kwargs)
    ) is not NotImplemented:  # what is made of others comes back as they
        return parts
    _check_devices(operation, args, kwargs)
    if waits(operation, args, kwargs):
        _note(operation.overloadpacket.__name__)
    asked_device = kwargs.get("device")
    inside_args, inside = changed((args, kwargs), EchoTensor, lambda tensor: tensor.numbers)
    if asked_device is not None:
        inside = inside | {"device": torch.device("cpu")}
    result = OWN.get(operation.overloadpacket, operation)(*inside_args, **inside)
    if asked_device is not None and torch.device(asked_device).type == "cpu":
        return result
    returned = operation._schema.returns
    if returned and returned[0].alias_info is not None and returned[0].alias_info.is_write:  # in place
        if torch.Tag.inplace_view in operation.tags:  # what has another shape inside has it outside too
            with no_dispatch():
                operation(*args, **kwargs)
        return kwargs["out"] if "out" in kwargs else args[0]
    if operation.overloadpacket is aten._pack_padded_sequence:  # the number of captions at each step stays on the host
        return EchoTensor(result[0]), result[1]
    return changed(result, Tensor, EchoTensor)


def changed(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """What an operation is given or gives, its tensors of a kind changed; PyTorch's own trees take longer than the operations."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([changed(part, kind, change) for part in value])
    if isinstance(value, dict):
        return {name: changed(part, kind, change) for name, part in value.items()}
    return value


def waits(operation: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True where the host of a GPU would wait for it (as ``torch.cuda.set_sync_debug_mode`` would warn)."""
    name = operation.overloadpacket
    if name in INDEXING:
        return _index_waits(name, args)
    if name is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if name in WAITING or WAITING_TAGS & set(operation.tags):
        return True
    if name is aten._to_copy:  # to the host, whose values are wanted at once; on the device it is free
        return _kind(kwargs.get("device"), DEVICE.type) != DEVICE.type and not kwargs.get("non_blocking")
    if name is aten.copy_:
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return isinstance(args[0], EchoTensor) != isinstance(args[1], EchoTensor) and blocking
    return False


def _kind(device: torch.device | str | None, default: str) -> str:
    return default if device is None else torch.device(device).type


def _index_waits(name: Any, args: tuple) -> bool:
    """Indexing copies positions from the host first, and must count what a mask selects."""
    positions = [index for index in args[1] if index is not None]
    if any(index.device.type == "cpu" and index.dim() > 0 for index in positions):
        return True
    masked = any(index.dtype in (torch.bool, torch.uint8) for index in positions)
    fills = name is not aten.index and args[2].numel() == 1  # is done as masked_fill
    return masked and not fills


def _check_devices(operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise where CUDA raises: a CPU tensor among device tensors."""
    name = operation.overloadpacket
    leaves: list[Tensor] = []
    changed((args, kwargs), Tensor, leaves.append)
    strangers = [leaf for leaf in leaves if not isinstance(leaf, EchoTensor)]
    if not strangers or len(strangers) == len(leaves) or name is aten.copy_ or name in HOST_LENGTHS:
        return
    if name in INDEXING and isinstance(args[0], EchoTensor):
        strangers = [leaf for leaf in strangers if not any(leaf is index for index in args[1])]
    if name not in JOINING:
        strangers = [leaf for leaf in strangers if leaf.dim() > 0]
    if strangers:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in strangers)
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name.__name__} got cpu {shapes} and {DEVICE}"
        )


# ---------------------------------------------------------------- operations that only accelerators have


def _gru_cell(inputs: Tensor, hiddens: Tensor, state: Tensor, input_bias: Any = None, hidden_bias: Any = None) -> tuple:
    """A GRU's step from its gates (b, 3d): the next state, and what the backward pass needs."""
    inputs = inputs if input_bias is None else inputs + input_bias
    hiddens = hiddens if hidden_bias is None else hiddens + hidden_bias
    (ir, iz, inew), (hr, hz, hnew) = inputs.chunk(3, dim=1), hiddens.chunk(3, dim=1)
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + reset * hnew).tanh()
    return (state - new) * update + new, torch.cat([reset, update, new, state, hnew], dim=1)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple:
    reset, update, new, state, hnew = workspace.chunk(5, dim=1)
    to_new = grad * (1 - update) * (1 - new**2)
    to_update = grad * (state - new) * update * (1 - update)
    to_reset = to_new * hnew * reset * (1 - reset)
    inputs = torch.cat([to_reset, to_update, to_new], dim=1)
    hiddens = torch.cat([to_reset, to_update, to_new * reset], dim=1)
    biases = (inputs.sum(dim=0), hiddens.sum(dim=0)) if has_bias else (None, None)
    return inputs, hiddens, grad * update, *biases


OWN = {aten._thnn_fused_gru_cell: _gru_cell, aten._thnn_fused_gru_cell_backward: _gru_cell_backward}

# Tensors that are made on the device from nothing come here; all others have an EchoTensor that catches them.
_factories = torch.library.Library("_", "IMPL")
_factories.fallback(lambda operation, *args, **kwargs: run(operation, args, kwargs), "PrivateUse1")
# torch.tensor(…, device=…) copies past EchoTensor; sequences would else be written into an empty tensor that grows
_past = torch.library.Library("aten", "IMPL")
for _name in ("copy_", "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm"):
    _packet, _, _overload = _name.partition(".")
    _operation = getattr(getattr(aten, _packet), _overload or "default")
    _past.impl(_name, lambda *args, _operation=_operation, **kwargs: run(_operation, args, kwargs), "PrivateUse1")
