# Generated from notebooks/11_ccr_ccs.ipynb by `itm export`: edit the notebook, not this file.

"""CCR and CCS: two demands on attention, for any matcher that has one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from itm_lab.parity.comparison import Table
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.matcher import Attention, Images, Matcher, PairBatch, Texts, length_mask
from itm_utils.models import bfan, pfan, scan, sgraf
from itm_utils.models.scan import (
    EPS,
    TINY,
    attend,
    full_precision,
    pair_attention,
    vector_norm,
)


# cell similarity
def similarity(x: Tensor, y: Tensor) -> Tensor:
    """Cosine along the last axis."""
    return (x * y).sum(dim=-1) / (vector_norm(x) * vector_norm(y))[..., 0].clamp_min(
        EPS
    )


# cell attend
def attended_of(attention: Attention) -> Tensor:
    """What the queries find: (b, q, d). Padding is no key, whatever its weight."""
    return (attention.weights * attention.key_mask[:, None]) @ attention.keys


# cell reversed-weights
def reversed_weights(weights: Tensor, key_mask: Tensor) -> Tensor:
    """What queries give to keys (b, q, k) when they look away; 0 at padding.

    key_mask: (b, k). One key alone has no reverse: its weight becomes a harmless number,
    and ``ccr_values`` leaves such pairs out.
    """
    left = (1 - weights) * key_mask[:, None]
    alone = key_mask.sum(dim=-1) < 2
    return left / left.sum(dim=-1, keepdim=True).masked_fill(alone[:, None, None], 1)


# cell ccr-values
def ccr_values(attention: Attention, margin: float) -> Tensor:
    """Hinge of every query (b, q): what it finds must beat what it finds looking away.

    0 where there are fewer than two keys.
    """
    keys, key_mask = attention.keys, attention.key_mask
    reversed_attended = reversed_weights(attention.weights, key_mask) @ keys
    right = similarity(attention.queries, attended_of(attention))
    wrong = similarity(attention.queries, reversed_attended)
    several = key_mask.sum(dim=-1, keepdim=True) > 1
    return (wrong - right + margin).relu() * several


# cell ccs-values
def ccs_values(attention: Attention, swapped_query: Tensor, margin: float) -> Tensor:
    """Hinge of every query (b, q): what it finds must fit it better than another query.

    swapped_query: (b, q, d), one other query for each.
    """
    attended = attended_of(attention)
    right = similarity(attention.queries, attended)
    wrong = similarity(swapped_query, attended)
    return (wrong - right + margin).relu()


# cell draw
def draw_two(mask: Tensor) -> Tensor:
    """Two different positions of each row of mask (b, q), drawn among its True ones: (b, 2).

    -1 where there is none left. Drawn on the processor, so that a seed means the same on
    every device.
    """
    luck = torch.rand(mask.shape).to(mask.device).masked_fill(~mask, -1)
    luck = torch.nn.functional.pad(luck, (0, 1), value=-1)  # a row of one has a second
    found = luck.topk(2, dim=1)
    return found.indices.masked_fill(found.values < 0, -1)


def ask(attention: Attention, position: Tensor) -> Attention:
    """The same attention with one query a pair: that at position (b,)."""
    rows = torch.arange(len(position), device=position.device)
    return Attention(
        attention.weights[rows, position][:, None],
        attention.queries[rows, position][:, None],
        attention.keys,
        attention.query_mask[rows, position][:, None],
        attention.key_mask,
    )


# cell one-query
class Terms(NamedTuple):
    """Both constraints of each pair, (b,); 0 where one was skipped."""

    ccr: Tensor
    ccs: Tensor


def one_query(
    attention: Attention, drawn: Tensor, ccr_margin: float, ccs_margin: float
) -> Terms:
    """Both terms for the query drawn[:, 0] of each pair, swapped with drawn[:, 1].

    drawn: (b, 2), -1 for nobody. CCR needs a query and two keys, CCS two queries.
    """
    asks, swaps = drawn.clamp_min(0).unbind(dim=1)
    one = ask(attention, asks)
    swapped_query = ask(attention, swaps).queries
    ccr = ccr_values(one, ccr_margin)[:, 0] * (drawn[:, 0] >= 0)
    ccs = ccs_values(one, swapped_query, ccs_margin)[:, 0] * (drawn[:, 1] >= 0)
    return Terms(ccr, ccs)


# cell every-query
def every_query(
    attention: Attention, mask: Tensor, ccr_margin: float, ccs_margin: float
) -> Terms:
    """Both terms averaged over every query of mask (b, q) and every swap: (b,) each."""
    attended = attended_of(attention)
    sizes = vector_norm(attention.queries) * vector_norm(attended).mT  # (b, p, q)
    # p: who is swapped in, q: who asked
    fit = attention.queries @ attended.mT / sizes.clamp_min(EPS)
    right = fit.diagonal(dim1=1, dim2=2)[:, None]
    different = ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    swaps = mask[:, :, None] & mask[:, None] & different
    ccr = ccr_values(attention, ccr_margin) * mask
    ccs = (fit - right + ccs_margin).relu() * swaps
    return Terms(
        ccr.sum(dim=1) / mask.sum(dim=1).clamp_min(1),
        ccs.sum(dim=(1, 2)) / swaps.sum(dim=(1, 2)).clamp_min(1),
    )


# cell taught
class Taught:
    """A matcher as it is, with more among its own losses, which every objective adds.

    more: model, images, texts, batch -> losses by name, and numbers for the log.
    """

    def __init__(self, model: Matcher, more: Callable[..., tuple[dict, dict]]) -> None:
        self.model, self.more, self.asked, self.logs = model, more, 0, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def extra_losses(
        self, images: Images, texts: Texts, batch: PairBatch
    ) -> dict[str, Tensor]:
        losses, self.logs = self.more(self.model, images, texts, batch)
        self.asked += 1
        return self.model.extra_losses(images, texts, batch) | losses


# cell attention-of
WAYS = ("all", "t2i", "i2t")


def attention_of(
    model: Matcher, images: Images, texts: Texts, directions: str
) -> dict[str, Attention]:
    """The attention to be constrained, by direction; a matcher without it is refused."""
    offered, name = model.attention(images, texts), type(model).__name__
    if not offered:
        hint = "CCR and CCS need a matcher in which one side looks at the other."
        raise input_error(name, "no attention", "weights, queries and keys", hint)
    if directions == "all":
        return offered
    if directions not in offered:
        found = f"attention {' and '.join(offered)}"
        raise input_error(
            name, found, f"attention {directions}, which the constraints ask for"
        )
    return {directions: offered[directions]}


def askers(attention: Attention, way: str, batch: PairBatch) -> Tensor:
    """(b, q) who may ask or be swapped in: no padding, no start or end token."""
    special = batch.texts.special
    if way == "i2t" or special is None:  # regions ask, and all of them are real
        return attention.query_mask
    return attention.query_mask & ~special


# cell pulls
def pulls(
    attention: Attention, swapped_query: Tensor, ccr_margin: float, ccs_margin: float
) -> list[Tensor]:
    """Slope of CCR and of CCS along the attention logits: (b, q, k) each.

    Queries and keys stand still: only where one looks may change.
    """
    still = attention._map(Tensor.detach)
    weights = still.weights.requires_grad_()
    with torch.enable_grad():
        values = (
            ccr_values(still, ccr_margin),
            ccs_values(still, swapped_query.detach(), ccs_margin),
        )
        slopes = [torch.autograd.grad(value.sum(), weights)[0] for value in values]
    weights = weights.detach()
    means = [(weights * slope).sum(dim=-1, keepdim=True) for slope in slopes]
    return [weights * (slope - mean) for slope, mean in zip(slopes, means, strict=True)]


# cell agreement
def agreement(
    attention: Attention, drawn: Tensor, ccr_margin: float, ccs_margin: float
) -> Tensor:
    """Cosine of the two pulls on each drawn query: (b,), below 0 where they conflict.

    0 where one of the two is silent.
    """
    asks, swaps = drawn.clamp_min(0).unbind(dim=1)
    one, swapped_query = ask(attention, asks), ask(attention, swaps).queries
    both = pulls(one, swapped_query, ccr_margin, ccs_margin)
    # scaled before they are compared: pulls are often tiny
    scaled = [pull / vector_norm(pull).clamp_min(TINY) for pull in both]
    return (scaled[0] * scaled[1]).sum(dim=-1)[:, 0] * (drawn >= 0).all(dim=1)


# cell constrained
@dataclass
class Constraints:
    """How much CCR and CCS count, and how they are computed.

    ways: the direction of attention to constrain, or all that the matcher has.
    all_queries: every query and every swap instead of one drawn for each pair.
    mean: for objectives that are means over the batch; those of this book are sums.
    watch: log how often the two constraints pull a look in opposite directions.
    """

    ccr_weight: float = 1.0
    ccs_weight: float = 1.0
    ccr_margin: float = 0.2
    ccs_margin: float = 0.2
    directions: str = "all"
    all_queries: bool = False
    mean: bool = False
    watch: bool = False

    def __post_init__(self) -> None:
        if self.directions not in WAYS:
            raise input_error(
                "directions", repr(self.directions), f"one of {', '.join(WAYS)}"
            )

    def of_attention(self, attention: Attention, mask: Tensor) -> tuple[Terms, dict]:
        """Both terms (b,) of one direction, and numbers for the log. mask: who may ask."""
        margins = self.ccr_margin, self.ccs_margin
        with full_precision(attention.keys):
            drawn = draw_two(mask)
            if self.all_queries:
                terms = every_query(attention, mask, *margins)
            else:
                terms = one_query(attention, drawn, *margins)
            means = (term.detach().mean() for term in terms)
            logs = {
                name: float(mean)
                for name, mean in zip(terms._fields, means, strict=True)
            }
            if self.watch:
                cosines = agreement(attention, drawn, *margins)
                logs["conflict"] = float((cosines < 0).float().mean())
                logs["both_pull"] = float((cosines != 0).float().mean())
        return terms, logs


# cell constrained-class
class Constrained(Constraints):
    """Any objective of the book, and beside it CCR and CCS on the matched pairs."""

    def __init__(self, objective: Callable, **settings: Any) -> None:
        super().__init__(**settings)
        self.objective = objective

    def set_epoch(self, epoch: int) -> None:
        """The training loop calls this at the start of each epoch, counted from 0."""
        if hasattr(self.objective, "set_epoch"):
            self.objective.set_epoch(epoch)

    def terms(
        self, model: Matcher, images: Images, texts: Texts, batch: PairBatch
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The weighted losses of all directions together, and the mean of their logs."""
        losses, logs = {}, {}
        offered = attention_of(model, images, texts, self.directions)
        for way, attention in offered.items():
            terms, said = self.of_attention(attention, askers(attention, way, batch))
            for name, value in terms._asdict().items():
                if weight := getattr(self, f"{name}_weight"):
                    total = weight * (value.mean() if self.mean else value.sum())
                    losses[name] = losses.get(name, 0.0) + total
            for name, number in said.items():
                logs[name] = logs.get(name, 0.0) + number / len(offered)
        return losses, logs

    def __call__(
        self, model: Matcher, batch: PairBatch
    ) -> tuple[Tensor, dict[str, float]]:
        taught = Taught(model, self.terms)
        loss, logs = self.objective(taught, batch)
        if taught.asked != 1:
            found = f"one that asked a model for its own losses {taught.asked} times"
            raise input_error("objective", found, "one that adds extra_losses once")
        return loss, logs | taught.logs


# cell build
BASE_MODELS = {
    "scan": scan.build,
    "bfan": bfan.build,
    "pfan": pfan.build,
    "sgraf": sgraf.build,
}


def build(parameters: Mapping, vocabulary_size: int, image_dim: int) -> Matcher:
    """The host that the parameters of this chapter describe, as its own chapter builds it."""
    base_model = parameters["base_model"]
    if base_model not in BASE_MODELS:
        raise input_error(
            "base_model", repr(base_model), f"one of {', '.join(BASE_MODELS)}"
        )
    return BASE_MODELS[base_model](parameters, vocabulary_size, image_dim)


# cell golden-values
def golden_attention(
    way: str, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[Attention, dict[str, Tensor]]:
    """The attention of a golden case, and the tensors whose gradients it stores."""
    names = ("weights", "queries", "keys") if way == "" else ("regions", "words")
    given = {n: torch.from_numpy(arrays[f"in.{n}"]).double() for n in names}
    for tensor in given.values():
        tensor.requires_grad_()
    counts = ("n_queries", "n_keys") if way == "" else ("n_regions", "lengths")
    counts = [torch.from_numpy(arrays[f"in.{name}"]) for name in counts]
    if way == "":
        weights, queries, keys = given.values()
        sides = (queries, keys)
        masks = [length_mask(n, x.shape[1]) for n, x in zip(counts, sides, strict=True)]
        return Attention(weights, queries, keys, *masks), given
    images, texts = (
        side(local=x, mask=length_mask(n, x.shape[1]))
        for side, x, n in zip((Images, Texts), given.values(), counts, strict=True)
    )
    temperature = about["options"][f"lambda_{way}"]
    look = partial(attend, first_norm="clipped_l2norm", temperature=temperature)
    sides = (images, texts) if way == "t2i" else (texts, images)
    return pair_attention(*sides, look), given


# cell golden-middle
def golden_middle(attention: Attention, drawn: Tensor) -> dict[str, Tensor]:
    """Every intermediate value of the drawn queries; 0 where a constraint is skipped."""
    asks, swaps = drawn.clamp_min(0).unbind(dim=1)
    one, swapped_query = ask(attention, asks), ask(attention, swaps).queries[:, 0]
    reverse = reversed_weights(one.weights, one.key_mask)[:, 0]
    attended = attended_of(one)[:, 0]
    several = (one.key_mask.sum(dim=1) > 1)[:, None]
    reversed_attended = (reverse[:, None] @ one.keys)[:, 0]
    query, there = one.queries[:, 0], drawn[:, 1] >= 0
    return {
        "attended": attended,
        "reversed_weights": reverse * several,
        "reversed_attended": reversed_attended * several,
        "sim_pos": similarity(query, attended),
        "sim_rev": similarity(query, reversed_attended) * several[:, 0],
        "sim_neg": similarity(swapped_query, attended) * there,
    }


# cell compare-case
def add_loss(table: Table, key: str, ours: Tensor, arrays: Mapping[str, Any]) -> None:
    """Relative to its size, or to 0.1 if it is smaller than that."""
    scale = max(float(abs(arrays[key])), 0.1)
    table.add("losses", key, ours / scale, arrays[key] / scale)


def compare_way(
    table: Table, way: str, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Tensor]:
    """One direction of a golden case; returns the sum of each term."""
    dot = f"{way}." if way else ""
    attention, given = golden_attention(way, about, arrays)
    numbers = [arrays[f"in.{dot}{name}"] for name in ("query", "neg_query")]
    drawn = torch.stack([torch.from_numpy(x) for x in numbers], dim=1)
    middle = golden_middle(attention, drawn) | {"weights": attention.weights}
    for name, value in middle.items():
        if f"mid.{dot}{name}" in arrays:
            key = f"mid.{dot}{name}"
            table.add("values", key, value, arrays[key])
    terms = one_query(attention, drawn, *(about["options"][f"gamma{n}"] for n in "23"))
    skipped = {"ccr": attention.key_mask.sum(dim=1) < 2, "ccs": drawn[:, 1] < 0}
    for name, term in terms._asdict().items():
        key, alone = f"out.{dot}{name}", skipped[name]
        table.add("values", f"{key}.per_pair", term, arrays[f"{key}.per_pair"])
        table.add("metrics", f"{key}.skipped", alone, arrays[f"{key}.skipped"])
        kept = term.sum() / (~alone).sum()
        sums = {"sum": term.sum(), "mean": term.mean(), "mean_kept": kept}
        for how, value in sums.items():
            add_loss(table, f"{key}.{how}", value, arrays)
        start = f"out.grad.{dot}{name}.sum."
        slopes = torch.autograd.grad(term.sum(), given.values(), retain_graph=True)
        floor = 0.01 * max(
            abs(arrays[start + given_name]).max() for given_name in given
        )
        for given_name, slope in zip(given, slopes, strict=True):
            expected = arrays[start + given_name]
            scale = max(abs(expected).max(), floor, 1e-6)
            table.add("gradients", start + given_name, slope / scale, expected / scale)
    return {name: term.sum() for name, term in terms._asdict().items()}


# cell compare-both
def compare_case(
    table: Table, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> bool:
    """One golden case: given weights, or both directions of SCAN's attention."""
    if about["kind"] == "weights":
        compare_way(table, "", about, arrays)
        return True
    options, total = about["options"], 0.0
    for way in ("t2i", "i2t"):
        found = compare_way(table, way, about, arrays)
        total += options["lambda_ccr"] * found["ccr"]
        total += options["lambda_ccs"] * found["ccs"]
    for name, value in (("sum", total), ("mean", total / len(arrays["in.words"]))):
        add_loss(table, f"out.total.{name}", value, arrays)
    return True
