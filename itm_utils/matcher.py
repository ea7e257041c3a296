"""The types that every model, objective, metric and miner of the book agrees on.

Axis letters, the same in every shape comment and einsum of the book:
``i`` images, ``c`` captions, ``r`` regions, ``w`` words, ``d`` width, ``h`` heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from itm_utils.errors import ItmError

# Default of fields that not every dataset or model fills. They are declared as tensors, because whoever reads one knows
# that it is there; where it may be missing, ``is None`` is asked.
ABSENT: Any = None


# Metadata of fields that stay on the CPU when their batch moves: what decides shapes must not wait for a GPU.
HOST = {"host": True}


@dataclass
class TensorBatch:
    """A small dataclass of tensors that share their first axis: it can be sliced and moved as one.

    Fields may be tensors, None, a dictionary of tensors, or another such dataclass. Those with the
    metadata HOST stay on the CPU.
    """

    def _map(self, change, change_host=None) -> Self:
        """Apply ``change`` to every tensor, and ``change_host`` to those that stay on the CPU (default: nothing)."""

        def apply(value: Any, is_host: bool) -> Any:
            if isinstance(value, TensorBatch):
                return value._map(change, change_host)
            if is_host:
                return value if change_host is None or value is None else change_host(value)
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, dict):
                return {name: change(tensor) for name, tensor in value.items()}
            return value

        return replace(self, **{f.name: apply(getattr(self, f.name), "host" in f.metadata) for f in fields(self)})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on another device; HOST fields stay where they are."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory, from which a GPU copies faster. (Data loaders call this.)"""
        return self._map(lambda tensor: tensor.pin_memory())

    def __getitem__(self, index: slice | Tensor) -> Self:
        """Rows ``index`` (a slice, or a tensor of positions or booleans) of every tensor.

        Positions on the CPU serve every device. Where they are on another one, rows of HOST fields are not known
        without waiting for it, and become None.
        """
        if not isinstance(index, Tensor):
            return self._map(lambda tensor: tensor[index], lambda tensor: tensor[index])
        on_host = index.device.type == "cpu"

        def rows(tensor: Tensor) -> Tensor:
            own = index.to(tensor.device, non_blocking=True) if on_host else index
            # index_select has a cheaper backward pass than indexing
            return tensor.index_select(0, own) if index.dtype == torch.long else tensor[own]

        return self._map(rows, rows if on_host else lambda tensor: None)

    def __len__(self) -> int:
        for f in fields(self):
            value = getattr(self, f.name)
            first = next(iter(value.values()), None) if isinstance(value, dict) else value
            if isinstance(first, Tensor | TensorBatch):
                return len(first)
        raise ItmError(f"{type(self).__name__} holds no tensor, so it has no length")

    @classmethod
    def cat(cls, batches: list[Self]) -> Self:
        """Join batches along the first axis, padding the second (regions or words) to the longest."""
        if not batches:
            raise ItmError(f"cannot join an empty list of {cls.__name__}")
        if len(batches) == 1:
            return batches[0]
        parts = {f.name: [getattr(batch, f.name) for batch in batches] for f in fields(cls)}
        return replace(batches[0], **{name: _cat(values) for name, values in parts.items()})


def _cat(parts: list[Any]) -> Any:
    """Join one field of several batches; what one of them does not know, the whole does not."""
    if any(part is None for part in parts):
        return None
    if isinstance(parts[0], Tensor):
        return _cat_padded(parts)
    if isinstance(parts[0], TensorBatch):
        return type(parts[0]).cat(parts)
    if isinstance(parts[0], dict):
        return {name: _cat_padded([part[name] for part in parts]) for name in parts[0]}
    return parts[0]


def _cat_padded(parts: list[Tensor]) -> Tensor:
    """Concatenate along axis 0; where axis 1 differs, fill the shorter ones with zeros (False)."""
    if parts[0].dim() < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    total = sum(len(part) for part in parts)
    joined = parts[0].new_zeros((total, longest, *parts[0].shape[2:]))
    row = 0
    for part in parts:
        joined[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return joined


@dataclass
class ImageBatch(TensorBatch):
    """Images as they leave the loader.

    regions: (i, r, d) frozen region features.
    mask: (i, r) True where there is a region.
    ids: (i,) row of the image in its split.
    boxes: (i, r, 4) x1 y1 x2 y2 in pixels, or whatever the dataset's box file holds; None if it has none.
    sizes: (i, 2) width and height in pixels, or None.
    lengths: (i,) on the CPU: each image has its first so many regions; None where only ``mask`` knows.
    """

    regions: Tensor
    mask: Tensor
    ids: Tensor
    boxes: Tensor = ABSENT
    sizes: Tensor = ABSENT
    lengths: Tensor = field(default=ABSENT, metadata=HOST)


@dataclass
class TextBatch(TensorBatch):
    """Captions as they leave the loader: word ids, or cached states of a frozen text encoder.

    lengths: (c,) number of tokens, special ones included; on the CPU, wherever the rest is.
    ids: (c,) row of the caption in its split.
    words: (c, w) vocabulary ids padded with 0, or None.
    features: (c, w, d) frozen token states padded with 0, or None.
    special: (c, w) True at tokens that are no words (start, end, CLS, SEP); False at padding.
    spans: (c, w, 2) first and one-past-last character of each token in the caption; (0, 0) if it has none.
    phrases: (c, w) number of the annotated phrase of each token, -1 outside every phrase and at padding, or None.
    """

    lengths: Tensor = field(metadata=HOST)
    ids: Tensor
    words: Tensor = ABSENT
    features: Tensor = ABSENT
    special: Tensor = ABSENT
    spans: Tensor = ABSENT
    phrases: Tensor = ABSENT

    @property
    def mask(self) -> Tensor:
        """(c, w) True where there is a token."""
        tokens = self.words if self.words is not None else self.features
        return length_mask(self.lengths, tokens.shape[1]).to(tokens.device, non_blocking=True)


@dataclass
class PairBatch(TensorBatch):
    """One training batch: image b matches caption b.

    Equal ``images.ids`` mean that the same image stands twice in the batch.
    offline: hard negatives from lists that were mined beforehand, or None.
    """

    images: ImageBatch
    texts: TextBatch
    offline: OfflineNegatives = ABSENT


@dataclass
class OfflineNegatives(TensorBatch):
    """Offline negatives of a batch, one of each kind for every pair: row b belongs to pair b.

    first: a negative image for the caption, beside a negative caption for the image.
    second: the true image of that negative caption, beside a true caption of that negative image; None where the loss
    derives no pairs from them.
    """

    first: PairBatch
    second: PairBatch = ABSENT


@dataclass
class Encoded(TensorBatch):
    """One side after its encoder. Attention models fill ``local`` and ``mask``, embedding models ``pooled``.

    local: (n, k, d) one vector per region or word.
    mask: (n, k) True where there is one.
    pooled: (n, d) one vector per item.
    extra: (n, …) whatever a model computes once per item instead of once per pair.
    extra_local: (n, k, …) the same for each region or word; cut to shorter captions together with ``local``.
    lengths: (n,) on the CPU: item n has nothing after its first lengths[n] positions; None if that is not known.
    """

    local: Tensor = ABSENT
    mask: Tensor = ABSENT
    pooled: Tensor = ABSENT
    extra: dict[str, Tensor] = field(default_factory=dict)
    extra_local: dict[str, Tensor] = field(default_factory=dict)
    lengths: Tensor = field(default=ABSENT, metadata=HOST)


class Images(Encoded):
    """Encoded images."""


class Texts(Encoded):
    """Encoded captions."""


@dataclass
class Scores(TensorBatch):
    """What a model thinks of pairs: (i, c) for all pairs, or (b,) for given pairs.

    ``i2t`` ranks captions for an image, ``t2i`` ranks images for a caption. They are the same tensor
    unless the model is decoupled. ``models`` says how many models' scores were averaged.
    """

    i2t: Tensor
    t2i: Tensor
    models: int = 1

    @classmethod
    def same(cls, scores: Tensor) -> Scores:
        """Scores of a model with one similarity for both directions."""
        return cls(i2t=scores, t2i=scores)

    @property
    def decoupled(self) -> bool:
        """True when the two directions have matrices of their own."""
        return self.i2t is not self.t2i

    def _map(self, change, change_host=None) -> Self:
        i2t = change(self.i2t)
        return replace(self, i2t=i2t, t2i=change(self.t2i) if self.decoupled else i2t)

    @classmethod
    def cat(cls, batches: list[Self]) -> Self:
        """Join scores of more images (or pairs)."""
        joined = super().cat(batches)
        return joined if any(batch.decoupled for batch in batches) else replace(joined, t2i=joined.i2t)


@dataclass
class Attention(TensorBatch):
    """Attention weights of matched pairs, inside the autograd graph.

    weights: (b, q, k) what query q gives to key k; rows of real queries sum to 1 over real keys.
    queries: (b, q, d), keys: (b, k, d) the vectors that were compared.
    query_mask: (b, q), key_mask: (b, k) True where there is one.
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor
    query_mask: Tensor
    key_mask: Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """(c, w) True at the first ``lengths[c]`` positions, on the device of ``lengths``."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def uses_batch_statistics(model: nn.Module) -> bool:
    """Whether what a model makes of an item depends, in training, on the rest of its batch."""
    return any(isinstance(part, _BatchNorm) for part in model.modules())


LossTerm = Callable[[Images, Texts, PairBatch], dict[str, Tensor]]


class Matcher(nn.Module):
    """The one interface of every model in the book.

    ``config`` holds the constructor's arguments (plain JSON values). They travel with checkpoints, so that a saved
    model can be built again without pickle.

    tile: bytes of pairs that are best worked on at once on a CPU, where what a pair leaves in the cache is read again;
    None if a model does not care.
    compiles: methods of encoded images and captions that the parameter ``compiled`` sends through torch.compile; none if
    it is an error for this model, because compiling would not end.
    """

    tile: ClassVar[int | None] = None
    compiles: ClassVar[tuple[str, ...]] = ("score", "score_pairs")

    config: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the constructor's arguments, whatever the subclass; copies bring theirs with their state."""
        matcher = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(matcher, *args, **kwargs)
        bound.apply_defaults()
        config = dict(list(bound.arguments.items())[1:])  # without self
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                config |= config.pop(name, {})
        # a caller may change its list or dictionary afterwards
        config = {name: deepcopy(value) if isinstance(value, dict | list) else value for name, value in config.items()}
        matcher.__dict__["config"] = config
        return matcher

    def __init__(self) -> None:
        super().__init__()

    def encode_images(self, batch: ImageBatch) -> Images:
        """Everything that can be computed once per image."""
        raise ItmError(f"{type(self).__name__} does not define encode_images")

    def encode_texts(self, batch: TextBatch) -> Texts:
        """Everything that can be computed once per caption."""
        raise ItmError(f"{type(self).__name__} does not define encode_texts")

    def encode_image_batches(self, batches: list[ImageBatch]) -> Images:
        """Encode several batches and join them, as if each were encoded alone; in one pass if nothing forbids it.

        Batch norm does, whose statistics are those of a batch. A model that knows more, as which of its layers are
        affected, overrides this.
        """
        if len(batches) > 1 and uses_batch_statistics(self):
            return Images.cat([self.encode_images(batch) for batch in batches])
        return self.encode_images(ImageBatch.cat(batches))

    def encode_text_batches(self, batches: list[TextBatch]) -> Texts:
        """The same for captions."""
        if len(batches) > 1 and uses_batch_statistics(self):
            return Texts.cat([self.encode_texts(batch) for batch in batches])
        return self.encode_texts(TextBatch.cat(batches))

    def score(self, images: Images, texts: Texts) -> Scores:
        """All pairs: (i, c)."""
        raise ItmError(f"{type(self).__name__} does not define score")

    def score_pairs(self, images: Images, texts: Texts) -> Scores:
        """Image b with caption b only: (b,)."""
        raise ItmError(f"{type(self).__name__} does not define score_pairs")

    def attention(self, images: Images, texts: Texts) -> dict[str, Attention]:
        """Attention of matched pairs by direction (``"t2i"``: words attend to regions); empty if there is none."""
        return {}

    def extra_losses(self, images: Images, texts: Texts, batch: PairBatch) -> dict[str, Tensor]:
        """A model's own loss terms on the matched pairs; every objective adds them."""
        return {}

    @contextmanager
    def with_loss_term(self, term: LossTerm) -> Iterator[None]:
        """Temporarily add the losses of ``term(images, texts, batch)`` to those that ``extra_losses`` returns.

        So an objective adds a loss to any other one: ``term`` sees the images and texts that the other has encoded.
        """
        own, outer = self.extra_losses, vars(self).get("extra_losses")  # outer: with the term of an enclosing objective

        def extra_losses(images: Images, texts: Texts, batch: PairBatch) -> dict[str, Tensor]:
            added = term(images, texts, batch)
            return own(images, texts, batch) | added

        self.extra_losses = extra_losses  # of this instance only, whatever its class defines
        try:
            yield
        finally:
            del self.extra_losses
            if outer is not None:
                self.extra_losses = outer

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0: own losses may change over time."""

    def bytes_per_pair(self, images: Images, texts: Texts) -> int:
        """Working memory of ``score`` for one pair, so that blocks can be cut to fit a budget.

        The default is right for a single product of embeddings, and generous to one attention map.
        """
        regions = 1 if images.local is None else images.local.shape[1]
        words = 1 if texts.local is None else texts.local.shape[1]
        return 4 * 6 * regions * words
