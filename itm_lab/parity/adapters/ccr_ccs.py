"""Reference cases of CCR and CCS: a second implementation of the paper, as slow loops in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from itm_lab.parity.comparison import Arrays, Table, to_device
from itm_utils.fast_attention import pair_attention
from itm_utils.matcher import Attention, Images, Texts, length_mask
from itm_utils.models import ccr_ccs
from itm_utils.models.scan import scan_attention


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """Compare one case: given weights, or both directions of SCAN's attention."""
    if about["kind"] == "weights":
        compare_direction(table, "", about, arrays)
        return True
    options, total = about["options"], torch.zeros(())
    for direction in ("t2i", "i2t"):
        sums = compare_direction(table, direction, about, arrays)
        total = total + options["lambda_ccr"] * sums["ccr"] + options["lambda_ccs"] * sums["ccs"]
    for name, value in (("sum", total), ("mean", total / len(arrays["in.words"]))):
        add_loss(table, f"out.total.{name}", value, arrays)
    return True


def compare_direction(table: Table, direction: str, about: Mapping[str, Any], arrays: Arrays) -> dict[str, Tensor]:
    """Compare one direction ("" for given weights); return the sum of each term."""
    dot = f"{direction}." if direction else ""
    attention, inputs = case_attention(direction, about, arrays)
    sampled = torch.stack([to_device(arrays[f"in.{dot}{name}"]) for name in ("query", "neg_query")], dim=1)
    for name, value in intermediate_values(attention, sampled).items():
        if (key := f"mid.{dot}{name}") in arrays:
            table.add("values", key, value, arrays[key])
    terms = ccr_ccs.one_query_terms(attention, sampled, about["options"]["gamma2"], about["options"]["gamma3"])
    skipped = {"ccr": attention.key_mask.sum(dim=1) < 2, "ccs": sampled[:, 1] < 0}
    for name, term in terms._asdict().items():
        key = f"out.{dot}{name}"
        table.add("values", f"{key}.per_pair", term, arrays[f"{key}.per_pair"])
        table.add("metrics", f"{key}.skipped", skipped[name], arrays[f"{key}.skipped"])
        add_loss(table, f"{key}.sum", term.sum(), arrays)
        add_loss(table, f"{key}.mean", term.mean(), arrays)
        add_loss(table, f"{key}.mean_kept", term.sum() / (~skipped[name]).sum(), arrays)
        add_gradients(table, f"out.grad.{dot}{name}.sum.", term.sum(), inputs, arrays)
    return {name: term.sum() for name, term in terms._asdict().items()}


def case_attention(direction: str, about: Mapping[str, Any], arrays: Arrays) -> tuple[Attention, dict[str, Tensor]]:
    """The attention of a case, and the inputs whose gradients it stores."""
    names = ("regions", "words") if direction else ("weights", "queries", "keys")
    counts = ("n_regions", "lengths") if direction else ("n_queries", "n_keys")
    inputs = {name: to_device(arrays[f"in.{name}"]).double().requires_grad_() for name in names}
    sides = list(inputs.values())[-2:]
    lengths = (to_device(arrays[f"in.{name}"]) for name in counts)
    masks = [length_mask(n, side.shape[1]) for n, side in zip(lengths, sides, strict=True)]
    if not direction:
        return Attention(inputs["weights"], *sides, *masks), inputs
    images, texts = Images(local=sides[0], mask=masks[0]), Texts(local=sides[1], mask=masks[1])
    weights = partial(scan_attention, first_norm="clipped_l2norm", temperature=about["options"][f"lambda_{direction}"])
    keys_and_queries = (images, texts) if direction == "t2i" else (texts, images)
    return pair_attention(*keys_and_queries, weights), inputs


def intermediate_values(attention: Attention, sampled: Tensor) -> dict[str, Tensor]:
    """Intermediate values of the sampled queries; 0 where a constraint is skipped."""
    query, swapped = sampled.clamp_min(0).unbind(dim=1)
    one = ccr_ccs.select_query(attention, query)
    own, other = one.queries[:, 0], ccr_ccs.select_query(attention, swapped).queries[:, 0]
    attended = ccr_ccs.attended_features(one)[:, 0]
    reversed_weights = ccr_ccs.reversed_weights(one.weights, one.key_mask)
    reversed_attended = (reversed_weights @ one.keys)[:, 0]
    several = (one.key_mask.sum(dim=1) > 1)[:, None]
    return {
        "weights": attention.weights,
        "attended": attended,
        "reversed_weights": reversed_weights[:, 0] * several,
        "reversed_attended": reversed_attended * several,
        "sim_pos": ccr_ccs.cosine_similarity(own, attended),
        "sim_rev": ccr_ccs.cosine_similarity(own, reversed_attended) * several[:, 0],
        "sim_neg": ccr_ccs.cosine_similarity(other, attended) * (sampled[:, 1] >= 0),
    }


def add_loss(table: Table, key: str, ours: Tensor, arrays: Arrays) -> None:
    """Compare a loss relative to its size, or to 0.1 if it is smaller than that."""
    scale = max(float(abs(arrays[key])), 0.1)
    table.add("losses", key, ours / scale, arrays[key] / scale)


def add_gradients(table: Table, start: str, loss: Tensor, inputs: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Compare gradients relative to their largest entry, or to a hundredth of the largest of all inputs."""
    gradients = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True)
    floor = 0.01 * max(abs(arrays[start + name]).max() for name in inputs)
    for name, gradient in zip(inputs, gradients, strict=True):
        expected = arrays[start + name]
        scale = max(abs(expected).max(), floor, 1e-6)
        table.add("gradients", start + name, gradient / scale, expected / scale)
