# Generated from notebooks/11_ccr_ccs.ipynb by `itm export`: edit the notebook, not this file.

"""CCR and CCS: two constraints on the attention of any matcher that has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from itm_utils.errors import input_error
from itm_utils.fast_attention import EPS, full_precision, vector_norm
from itm_utils.matcher import Attention, Images, Matcher, PairBatch, Texts
from itm_utils.models import bfan, pfan, scan, sgraf
from itm_utils.models.vsepp import HingeTriplet
from itm_utils.training import Objective, Stage, train_config


# cell similarity
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Cosine along the last axis, with the epsilon of SCAN's public code."""
    # F.cosine_similarity divides by each norm apart, and differs in the last digit
    norms = vector_norm(x) * vector_norm(y)
    return (x * y).sum(dim=-1) / norms[..., 0].clamp_min(EPS)


def attended_features(attention: Attention) -> Tensor:
    """Weighted sum of the keys per query: (b, q, d). Padding is never a key."""
    return (attention.weights * attention.key_mask[:, None]) @ attention.keys


# cell reversed-weights
def reversed_weights(weights: Tensor, key_mask: Tensor) -> Tensor:
    """Eq. 5: one minus each weight (b, q, k), normalised over the keys; 0 at padding.

    key_mask: (b, k). A single key has no reverse: its weight is left finite, and
    ``ccr_values`` masks such pairs.
    """
    rest = (1 - weights) * key_mask[:, None]
    single = key_mask.sum(dim=-1) < 2
    return rest / rest.sum(dim=-1, keepdim=True).masked_fill(single[:, None, None], 1)


# cell ccr-values
def ccr_values(attention: Attention, margin: float) -> Tensor:
    """CCR hinge per query (b, q): attended against reversed attended feature.

    0 where there are fewer than two keys.
    """
    keys, key_mask = attention.keys, attention.key_mask
    reversed_attended = reversed_weights(attention.weights, key_mask) @ keys
    positive = cosine_similarity(attention.queries, attended_features(attention))
    negative = cosine_similarity(attention.queries, reversed_attended)
    several = key_mask.sum(dim=-1, keepdim=True) > 1
    return (negative - positive + margin).relu() * several


# cell ccs-values
def ccs_values(attention: Attention, swapped_query: Tensor, margin: float) -> Tensor:
    """CCS hinge per query (b, q): own query against a swapped one.

    swapped_query: (b, q, d), one other query of the same pair for each.
    """
    attended = attended_features(attention)
    positive = cosine_similarity(attention.queries, attended)
    negative = cosine_similarity(swapped_query, attended)
    return (negative - positive + margin).relu()


# cell sample-queries
def sample_queries(mask: Tensor, number: int) -> Tensor:
    """Sample different True positions per row of mask (b, q), each with one to swap.

    Returns (b, number, 2), -1 if missing. The random numbers come from the CPU: a seed
    gives the same positions on every device.
    """
    noise = torch.rand(mask.shape).to(mask.device, non_blocking=True)
    noise = torch.nn.functional.pad(noise.masked_fill(~mask, -1), (0, number), value=-1)
    largest = noise.topk(number + 1, dim=1)
    order = largest.indices.masked_fill(largest.values < 0, -1)
    query, swapped, first = order[:, :-1], order[:, 1:], order[:, :1]
    # the last of a short caption is swapped with the first
    ends = (swapped < 0) & (query >= 0) & (query != first)
    return torch.stack([query, torch.where(ends, first, swapped)], dim=2)


def sample_two_queries(mask: Tensor) -> Tensor:
    """Sample one query of each pair and one to swap it with: (b, 2), -1 if missing."""
    return sample_queries(mask, 1)[:, 0]


# cell sample-across
def sample_across_phrases(mask: Tensor, phrases: Tensor) -> Tensor:
    """Sample a query of each pair, and one of another phrase: (b, 1, 2), -1 if missing.

    phrases: (b, q), -1 for words outside every phrase, which are swapped with any.
    """
    noise = torch.rand(mask.shape).to(mask.device, non_blocking=True)
    query = noise.masked_fill(~mask, -1).argmax(dim=1, keepdim=True)
    own = phrases.gather(1, query)
    others = mask & ((phrases != own) | (phrases < 0)).scatter(1, query, False)
    largest, swapped = noise.masked_fill(~others, -1).max(dim=1, keepdim=True)
    query = query.masked_fill(~mask.any(dim=1, keepdim=True), -1)
    return torch.stack([query, swapped.masked_fill(largest < 0, -1)], dim=2)


def select_query(attention: Attention, position: Tensor) -> Attention:
    """Attention of one query per pair: the one at position (b,)."""
    rows = torch.arange(len(position), device=position.device)
    return Attention(
        attention.weights[rows, position][:, None],
        attention.queries[rows, position][:, None],
        attention.keys,
        attention.query_mask[rows, position][:, None],
        attention.key_mask,
    )


# cell one-query
class ConstraintTerms(NamedTuple):
    """Both constraints per pair, (b,); 0 where one is skipped."""

    ccr: Tensor
    ccs: Tensor


def one_query_terms(
    attention: Attention, sampled: Tensor, ccr_margin: float, ccs_margin: float
) -> ConstraintTerms:
    """Both terms of the query sampled[:, 0] of each pair, swapped with sampled[:, 1].

    sampled: (b, 2), -1 if missing. CCR needs a query and two keys, CCS two queries.
    """
    query, swapped = sampled.clamp_min(0).unbind(dim=1)
    one = select_query(attention, query)
    swapped_query = select_query(attention, swapped).queries
    ccr = ccr_values(one, ccr_margin)[:, 0] * (sampled[:, 0] >= 0)
    ccs = ccs_values(one, swapped_query, ccs_margin)[:, 0] * (sampled[:, 1] >= 0)
    return ConstraintTerms(ccr, ccs)


def sampled_query_terms(
    attention: Attention, sampled: Tensor, ccr_margin: float, ccs_margin: float
) -> ConstraintTerms:
    """Both terms averaged over the sampled queries (b, n, 2) of each pair: (b,) each."""
    margins = ccr_margin, ccs_margin
    terms = [one_query_terms(attention, two, *margins) for two in sampled.unbind(dim=1)]
    counts = (sampled >= 0).sum(dim=1).clamp_min(1).unbind(dim=1)
    sums = (torch.stack(values).sum(dim=0) for values in zip(*terms, strict=True))
    return ConstraintTerms(*(s / count for s, count in zip(sums, counts, strict=True)))


# cell all-queries
def all_query_terms(
    attention: Attention, mask: Tensor, ccr_margin: float, ccs_margin: float
) -> ConstraintTerms:
    """Both terms averaged over every query of mask (b, q) and every swap: (b,) each."""
    attended = attended_features(attention)
    norms = vector_norm(attention.queries) * vector_norm(attended).mT  # (b, p, q)
    # p: the swapped query, q: the query that attends
    cosines = attention.queries @ attended.mT / norms.clamp_min(EPS)
    positive = cosines.diagonal(dim1=1, dim2=2)[:, None]
    different = ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    swaps = mask[:, :, None] & mask[:, None] & different
    ccr = ccr_values(attention, ccr_margin) * mask
    ccs = (cosines - positive + ccs_margin).relu() * swaps
    return ConstraintTerms(
        ccr.sum(dim=1) / mask.sum(dim=1).clamp_min(1),
        ccs.sum(dim=(1, 2)) / swaps.sum(dim=(1, 2)).clamp_min(1),
    )


# cell attention-of
DIRECTIONS = ("all", "t2i", "i2t")


def attention_by_direction(
    model: Matcher, images: Images, texts: Texts, directions: str
) -> dict[str, Attention]:
    """The attention to constrain, by direction; a matcher without it is refused."""
    offered, name = model.attention(images, texts), type(model).__name__
    if not offered:
        hint = "CCR and CCS need a matcher with cross-attention."
        raise input_error(name, "no attention", "weights, queries and keys", hint)
    if directions == "all":
        return offered
    if directions not in offered:
        found = f"attention {' and '.join(offered)}"
        raise input_error(
            name, found, f"attention {directions}, which the constraints ask for"
        )
    return {directions: offered[directions]}


def eligible_queries(attention: Attention, direction: str, batch: PairBatch) -> Tensor:
    """Mask (b, q) of the queries to sample from: no padding, no start or end token."""
    special = batch.texts.special
    if direction == "i2t" or special is None:  # regions are all real
        return attention.query_mask
    return attention.query_mask & ~special


# cell logit-gradients
def logit_gradients(
    attention: Attention, swapped_query: Tensor, ccr_margin: float, ccs_margin: float
) -> list[Tensor]:
    """Gradient of CCR and of CCS with respect to the attention logits: (b, q, k) each.

    Queries and keys are constants here.
    """
    fixed = attention._map(Tensor.detach)
    weights = fixed.weights.requires_grad_()
    with torch.enable_grad():
        values = (
            ccr_values(fixed, ccr_margin),
            ccs_values(fixed, swapped_query.detach(), ccs_margin),
        )
        grads = [torch.autograd.grad(value.sum(), weights)[0] for value in values]
    weights = weights.detach()
    means = [(weights * grad).sum(dim=-1, keepdim=True) for grad in grads]
    return [weights * (grad - mean) for grad, mean in zip(grads, means, strict=True)]


def gradient_cosine(
    attention: Attention, sampled: Tensor, ccr_margin: float, ccs_margin: float
) -> Tensor:
    """Cosine of the two logit gradients of each sampled query: (b,), negative in conflict.

    0 where one of the two is zero.
    """
    query, swapped = sampled.clamp_min(0).unbind(dim=1)
    one = select_query(attention, query)
    swapped_query = select_query(attention, swapped).queries
    gradients = logit_gradients(one, swapped_query, ccr_margin, ccs_margin)
    # normalised first: products of such small gradients would underflow
    ccr, ccs = (gradient / vector_norm(gradient) for gradient in gradients)
    return (ccr * ccs).sum(dim=-1)[:, 0] * (sampled >= 0).all(dim=1)


# cell constraint-loss
@dataclass
class AttentionConstraintLoss:
    """Any ranking loss of the book, plus CCR and CCS on the matched pairs.

    directions: the direction of attention to constrain, or all that the matcher has.
    queries: number of sampled queries per pair; 0 for every query and every swap.
    swap_within_phrase: False if CCS swaps a word with words of other phrases only, which
    needs the phrases of the batch and takes one sampled query.
    mean: for ranking losses that are means over the batch; those of this book are sums.
    conflicts_every: log how often the gradients of the two conflict, in about one batch
    of so many (it costs two backward passes through the terms); 0 for never.
    """

    ranking_loss: Objective
    ccr_weight: float = 1.0
    ccs_weight: float = 1.0
    ccr_margin: float = 0.2
    ccs_margin: float = 0.2
    directions: str = "all"
    queries: int = 1
    swap_within_phrase: bool = True
    mean: bool = False
    conflicts_every: int = 0

    def __post_init__(self) -> None:
        if self.directions not in DIRECTIONS:
            expected = f"one of {', '.join(DIRECTIONS)}"
            raise input_error("directions", repr(self.directions), expected)
        if not self.swap_within_phrase and self.queries != 1:
            expected = "1, where CCS swaps no two words of one phrase"
            raise input_error("queries", str(self.queries), expected)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch, counted from 0, on to the ranking loss."""
        if hasattr(self.ranking_loss, "set_epoch"):
            self.ranking_loss.set_epoch(epoch)

    def logs_conflicts(self, batch: PairBatch) -> bool:
        """Whether this batch is one of those whose conflicts are logged.

        Decided by its caption lengths, which are on the CPU: no step waits for the
        device, and a resumed run decides as one that was not interrupted.
        """
        words = int(batch.texts.lengths.sum())
        return bool(self.conflicts_every) and words % self.conflicts_every == 0

    def phrases_of(self, batch: PairBatch) -> Tensor | None:
        """The phrase of each word (b, w), if swaps depend on it; regions have none."""
        if self.swap_within_phrase:
            return None
        if batch.texts.phrases is None:
            hint = "WordCaptions.add_phrases takes the phrases of the training captions."
            raise input_error("captions", "no phrases", "annotated phrases", hint)
        return batch.texts.phrases

    def direction_terms(
        self,
        attention: Attention,
        mask: Tensor,
        log_conflicts: bool,
        phrases: Tensor | None = None,
    ) -> tuple[ConstraintTerms, dict[str, Tensor]]:
        """Both terms (b,) of one direction, and their logs. mask: the eligible queries.

        phrases: (b, q), if a query is swapped with those of other phrases only.

        Logs are tensors without axes: reading a number would wait for the device.
        """
        margins = self.ccr_margin, self.ccs_margin
        with full_precision(attention.keys):
            if phrases is None:
                sampled = sample_queries(mask, self.queries or 1)
            else:
                sampled = sample_across_phrases(mask, phrases)
            if self.queries:
                terms = sampled_query_terms(attention, sampled, *margins)
            else:
                terms = all_query_terms(attention, mask, *margins)
            logs = {name: term.detach().mean() for name, term in terms._asdict().items()}
            if log_conflicts:
                cosines = gradient_cosine(attention, sampled[:, 0], *margins)
                logs["conflict"] = (cosines < 0).float().mean()
                logs["both_active"] = (cosines != 0).float().mean()
        return terms, logs

    def weighted_losses(
        self, model: Matcher, images: Images, texts: Texts, batch: PairBatch
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weighted losses summed over the directions, and the mean of their logs."""
        losses, logs, log_conflicts = {}, {}, self.logs_conflicts(batch)
        constrained = attention_by_direction(model, images, texts, self.directions)
        for direction, attention in constrained.items():
            mask = eligible_queries(attention, direction, batch)
            phrases = self.phrases_of(batch) if direction == "t2i" else None
            terms, numbers = self.direction_terms(attention, mask, log_conflicts, phrases)
            for name, value in terms._asdict().items():
                if weight := getattr(self, f"{name}_weight"):
                    total = weight * (value.mean() if self.mean else value.sum())
                    losses[name] = losses.get(name, 0.0) + total
            for name, number in numbers.items():
                logs[name] = logs.get(name, 0.0) + number / len(constrained)
        return losses, logs

    def __call__(self, model: Matcher, batch: PairBatch) -> tuple[Tensor, dict[str, Any]]:
        """Ranking loss and weighted constraints, from one encoding of the batch."""
        constraint_logs = []

        def constraints(*encoded_batch: Any) -> dict[str, Tensor]:
            losses, logs = self.weighted_losses(model, *encoded_batch)
            constraint_logs.append(logs)
            return losses

        with model.with_loss_term(constraints):
            loss, logs = self.ranking_loss(model, batch)
        if len(constraint_logs) != 1:
            found = f"one that asked for extra_losses {len(constraint_logs)} times"
            raise input_error("ranking_loss", found, "one that adds extra_losses once")
        return loss, logs | constraint_logs[0]


# cell build
BASE_MODELS = {
    "scan": scan.build,
    "bfan": bfan.build,
    "pfan": pfan.build,
    "sgraf": sgraf.build,
}


def build(
    parameters: Mapping[str, Any], vocabulary_size: int, image_dim: int
) -> Matcher:
    """Build the base model that the parameters describe, as its own chapter builds it."""
    name = parameters["base_model"]
    if name not in BASE_MODELS:
        raise input_error("base_model", repr(name), f"one of {', '.join(BASE_MODELS)}")
    return BASE_MODELS[name](parameters, vocabulary_size, image_dim)


CONFLICTS_EVERY = 20  # batches between two whose conflicts are logged, on average


def stages(parameters: Mapping[str, Any], model: Matcher) -> list[Stage]:
    """List the one training: hinge loss, and the constraints that have a weight."""
    margin, warmup = parameters["margin"], parameters["warmup_epochs"]
    objective = HingeTriplet(margin, hardest=True, warmup_epochs=warmup)
    weights = parameters["ccr_weight"], parameters["ccs_weight"]
    if any(weights):
        names = ("ccr_margin", "ccs_margin", "directions", "queries")
        names += ("swap_within_phrase",)
        chosen = {name: parameters[name] for name in names}
        chosen["conflicts_every"] = CONFLICTS_EVERY if all(weights) else 0
        objective = AttentionConstraintLoss(objective, *weights, **chosen)
    return [Stage("train", model, objective, train_config(parameters))]
