"""Several processes that train, score and mine as one, under ``torchrun`` or ``accelerate launch``.

Every process has the same weights and a share of the rows of each batch. What belongs to an item or a pair is computed
where its row is, and gathered; what compares a whole batch, such as a loss, is computed by every process from the same
numbers. The gradient of a gather sums what all processes have for a row, so the mean over the processes of their
gradients, which is what DistributedDataParallel computes, is the gradient of one process with the whole batch. Shares
may differ in size. With one process nothing here does anything.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from itm_utils.matcher import Attention, ImageBatch, Images, Matcher, PairBatch, Scores, TensorBatch, TextBatch, Texts

Batch = TypeVar("Batch", bound=TensorBatch)
Item = TypeVar("Item")

LEAST = 2  # rows of a share: a batch norm of one row alone has no variance
DIMENSIONS = 4  # that a tensor of a batch may have


def connect(cpu: bool) -> None:
    """Join the other processes, if a launcher started several and this one has not yet. cpu: though there are GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        from accelerate.state import PartialState  # here: whatever opens data would wait for it

        PartialState(cpu=cpu)


def processes() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if processes() > 1 else 0


def is_main() -> bool:
    """Whether this is the one process that writes."""
    return rank() == 0


def share(count: int, number: int, of: int) -> slice:
    """The rows of process ``number``: shares lie one after the other, the first ones a row longer where it does not divide."""
    short, longer = divmod(count, of)
    start = number * short + min(number, longer)
    return slice(start, start + short + (number < longer))


def own_share(count: int) -> slice:
    """The rows of this process."""
    return share(count, rank(), processes())


def wait_for_all() -> None:
    """Return when every process has come here."""
    if processes() > 1:
        dist.barrier(group=_host_group())


def agreed(value: int) -> int:
    """The number that the main process has."""
    if processes() == 1:
        return value
    number = torch.tensor([value])
    dist.broadcast(number, 0, group=_host_group())
    return int(number)


def collected(tensor: Tensor) -> list[Tensor]:
    """This tensor of every process, in the main one; elsewhere nothing. All have one shape."""
    if processes() == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(processes())] if is_main() else None
    dist.gather(tensor.contiguous(), found, group=_group(tensor))
    return found or []


@cache
def _host_group() -> Any:
    """For what lies on the CPU, wherever the model is: lengths decide shapes, and must not wait for a GPU."""
    return dist.new_group(backend="gloo")


@cache
def _device_group() -> Any:
    """A group of its own: reductions of DistributedDataParallel run meanwhile, and must not be mistaken for ours."""
    return dist.new_group()


def _group(tensor: Tensor) -> Any:
    return _host_group() if tensor.device.type == "cpu" else _device_group()


# ---------------------------------------------------------------- gathering


def gather(batch: Batch, keep_features: bool = False) -> Batch:
    """Join the shares of all processes to the whole, with gradients, padded as ``TensorBatch.cat`` does.

    keep_features: floating-point tensors with an entry per region or word, which are large, stay where they are; the
    rows of others are NaN.
    """
    return type(batch).cat(gather_parts(batch, keep_features))


def gather_parts(batch: Batch, keep_features: bool = False) -> list[Batch]:
    """The batches of all processes, with gradients. All must have the same fields."""
    if processes() == 1:
        return [batch]
    tensors: list[Tensor] = []
    note = lambda tensor: tensors.append(tensor) or tensor  # noqa: E731 - maps twice, over both kinds of fields
    batch._map(note, note)
    shapes = _gather_shapes(tensors)
    kept = [n for n, one in enumerate(tensors) if keep_features and one.is_floating_point() and one.dim() > 2]
    parts = [_others_as_nan(tensors, kept, of, number == rank()) for number, of in enumerate(shapes)]
    for together in _same_kind(tensors, kept):  # few collectives: each waits for the slowest process
        found = _exchange([tensors[n] for n in together], [[of[n] for n in together] for of in shapes])
        for part, exchanged in zip(parts, found, strict=True):
            part |= dict(zip(together, exchanged, strict=True))
    return [_with_tensors(batch, [part[n] for n in range(len(tensors))]) for part in parts]


def _others_as_nan(
    tensors: Sequence[Tensor], kept: Sequence[int], shapes: Sequence[tuple[int, ...]], own: bool
) -> dict[int, Tensor]:
    """The tensors that stay where they are, by their number, and NaN for those of other processes."""
    return {n: tensors[n] if own else tensors[n].new_full(shapes[n], math.nan) for n in kept}


def _same_kind(tensors: Sequence[Tensor], kept: Sequence[int]) -> list[list[int]]:
    """The numbers of the tensors that are sent, those of one type and device together."""
    kinds: dict[Any, list[int]] = {}
    for n, tensor in enumerate(tensors):
        if n not in kept:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(n)
    return list(kinds.values())


def _with_tensors(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    """A batch with other tensors, in the order of its own."""
    following = iter(tensors)
    change = lambda _: next(following)  # noqa: E731
    return batch._map(change, change)


def _gather_shapes(tensors: Sequence[Tensor]) -> list[list[tuple[int, ...]]]:
    """The shapes of these tensors in every process."""
    sizes = torch.zeros(len(tensors), DIMENSIONS, dtype=torch.long)
    for row, tensor in zip(sizes, tensors, strict=True):
        row[: tensor.dim()] = torch.tensor(tensor.shape)
    found = [torch.empty_like(sizes) for _ in range(processes())]
    dist.all_gather(found, sizes, group=_host_group())
    return [[tuple(row[: tensor.dim()]) for row, tensor in zip(one.tolist(), tensors, strict=True)] for one in found]


def _exchange(tensors: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
    """These tensors, of one type, of every process. shapes: what each process has."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sizes = [[math.prod(shape) for shape in of] for of in shapes]
    most = max(map(sum, sizes))  # a collective wants equal sizes
    sent = nn.functional.pad(flat.byte() if flat.dtype == torch.bool else flat, (0, most - len(flat)))
    found = _AllGather.apply(_group(sent), sent)
    whole = [part.bool() if flat.dtype == torch.bool else part for part in found]
    return [
        [part.view(shape) for part, shape in zip(one[: sum(size)].split(size), of, strict=True)]
        for one, size, of in zip(whole, sizes, shapes, strict=True)
    ]


class _AllGather(torch.autograd.Function):
    """The tensors of all processes; the gradient of one is the sum of what every process has for it.

    torch.distributed.nn.functional has the same, and is deprecated; what stands in for it is not in older versions.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        found = tuple(torch.empty_like(tensor) for _ in range(processes()))
        dist.all_gather(list(found), tensor.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        together = torch.stack(gradients)
        if dist.get_backend(ctx.group) == "gloo":  # cannot scatter sums
            dist.all_reduce(together, group=ctx.group)
            return None, together[rank()]
        own = torch.empty_like(gradients[0])
        dist.reduce_scatter_tensor(own, together, group=ctx.group)
        return None, own


class _AllReduce(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: Tensor) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return None, total


def in_turns(items: Sequence[Item], work: Callable[[Item], Batch]) -> Iterator[Batch]:
    """What ``work`` makes of every item, in order: each is done by one process, and sent to all."""
    for start in range(0, len(items), processes()):
        turn = items[start : start + processes()]
        made = work(turn[min(rank(), len(turn) - 1)])  # in the last turn some do what another does, too
        yield from gather_parts(made)[: len(turn)]


# ---------------------------------------------------------------- batch norm


@contextmanager
def whole_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Temporarily give every batch norm in training the statistics of the rows of all processes.

    torch's SyncBatchNorm does so for its own layers, on GPUs alone. Here the sums are replaced, so that layers that
    mask rows, or normalise each caption, are served, too.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    with ExitStack() as stack:
        if norms and processes() > 1:
            stack.enter_context(_replaced(nn.functional, "batch_norm", _batch_norm))
            for module in sorted({type(norm).__module__ for norm in norms}):
                if hasattr(sys.modules[module], "masked_moments"):  # the sums of chapter 07
                    stack.enter_context(_replaced(sys.modules[module], "masked_moments", masked_moments))
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


_batch_norm_of_torch = nn.functional.batch_norm


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of the tensors of all processes, with gradients."""
    return _AllReduce.apply(_group(tensor), tensor)


def masked_moments(x: Tensor, mask: Tensor | None, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of the real entries of x over ``dims``, in all processes.

    mask: True at real entries, broadcast to x; None if all are real.
    """
    real = x.new_ones((), dtype=torch.bool) if mask is None else mask
    real = real.expand_as(x)
    count = sum_over_processes(real.sum(dim=dims, keepdim=True))
    mean = sum_over_processes(x.masked_fill(~real, 0).sum(dim=dims, keepdim=True)) / count
    square = (x - mean).masked_fill(~real, 0).square()
    return mean, sum_over_processes(square.sum(dim=dims, keepdim=True)) / count, count


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` over the rows of all processes; x is (n, d) or (n, d, l)."""
    if not training:
        return _batch_norm_of_torch(x, running_mean, running_var, weight, bias, training, momentum, eps)
    values = x if weight is None else x.to(weight.dtype)
    mean, var, count = masked_moments(values, None, tuple(n for n in range(x.dim()) if n != 1))
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
            running_var.lerp_((var * count / (count - 1)).flatten().to(running_var.dtype), momentum)
    rows = (values - mean) * (var + eps).rsqrt()
    if weight is not None and bias is not None:
        rows = rows * weight.view_as(mean) + bias.view_as(mean)
    return rows.to(x.dtype)


# ---------------------------------------------------------------- a model under an objective


def gathered(model: Matcher) -> Matcher:
    """The matcher that an objective is given in each of several processes, with the whole batch; ``model`` if there is one."""
    if processes() == 1:
        return model
    named = type(type(model).__name__, (GatheredMatcher,), {})  # errors of objectives name the model
    return named(model)


class GatheredMatcher(Matcher):
    """A matcher that encodes and scores the share of this process, and gathers what the others have.

    Whatever an objective does with it and the whole batch gives the numbers and gradients of one process. Only the
    features of its own rows are there (``gather`` with ``keep_features``).
    """

    def __init__(self, model: Matcher) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def own_part(self, count: int, work: Callable[[slice], Batch]) -> Batch:
        """The work on the own share of so many rows, which sees the whole batch where it takes statistics."""
        with self.own_noise(), whole_batch_statistics(self.model):
            return work(own_share(count))

    def shared(self, count: int, work: Callable[[slice], Batch]) -> Batch:
        """The work on so many rows, gathered; if these are too few to share, every process does it all."""
        if count < LEAST * processes():
            return work(slice(None))
        return gather(self.own_part(count, work))

    @contextmanager
    def own_noise(self) -> Iterator[None]:
        """Draw other random numbers than the other processes, as for dropout; afterwards the same ones again."""
        seed = int(torch.randint(2**62, ()))
        parameter = next(self.model.parameters(), None)
        devices = [parameter.device] if parameter is not None and parameter.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed + rank())
            yield

    def encode_images(self, batch: ImageBatch) -> Images:
        return gather(self.own_part(len(batch), lambda rows: self.model.encode_images(batch[rows])))

    def encode_texts(self, batch: TextBatch) -> Texts:
        return gather(self.own_part(len(batch), lambda rows: self.model.encode_texts(batch[rows])))

    def encode_image_batches(self, batches: list[ImageBatch]) -> Images:
        return self._batches(batches, self.model.encode_image_batches)

    def encode_text_batches(self, batches: list[TextBatch]) -> Texts:
        return self._batches(batches, self.model.encode_text_batches)

    def _batches(self, batches: list[Any], encode: Callable[[list[Any]], Batch]) -> Batch:
        """Encode the own share of each batch in one call, and join the whole batches."""
        own = [batch[own_share(len(batch))] for batch in batches]
        with self.own_noise(), whole_batch_statistics(self.model):
            joined = encode(own)
        ends = [sum(map(len, own[: n + 1])) for n in range(len(own))]
        parts = [joined[end - len(one) : end] for end, one in zip(ends, own, strict=True)]
        return type(joined).cat([gather(part) for part in parts])

    def score(self, images: Images, texts: Texts) -> Scores:
        return self.shared(len(images), lambda rows: self.model.score(images[rows], texts))

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        if any(getattr(module, "per_caption", False) for module in self.model.modules()):
            return self.model.score_pairs(images, texts)  # what the norm remembers depends on the order of all captions
        return self.shared(len(images), lambda rows: self.model.score_pairs(images[rows], texts[rows]))

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        return self.model.attention(images, texts)

    def extra_losses(self, images: Images, texts: Texts, batch: PairBatch) -> dict[str, Tensor]:
        return self.model.extra_losses(images, texts, batch)

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        return self.model.bytes_per_pair(images, texts)
