"""MMCA: no public code was found; its reference cases come from a second implementation of the paper as we read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from itm_lab.parity.comparison import Arrays, Table, all_scores, batches, compare_gradients, load_public, to_device
from itm_utils.matcher import Scores
from itm_utils.models.mmca import MMCA
from itm_utils.models.vsepp import hinge_loss

LAYER_NAMES = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.out_proj",
    "ffn1": "linear1",
    "ffn2": "linear2",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
}
NAMES = {
    "region_fc": "self_attention.region_proj",
    "text_fc": "cross_attention.token_proj",
    "text_cnn0.fc": "self_attention.text_proj",
    "text_cnn1.fc": "cross_attention.text_proj",
    **{f"text_cnn0.conv{n}": f"self_attention.text_cnn.convs.{n - 1}" for n in (1, 2, 3)},
    **{f"text_cnn1.conv{n}": f"cross_attention.text_cnn.convs.{n - 1}" for n in (1, 2, 3)},
    **{f"self_unit.{name}": f"self_attention.transformer.{ours}" for name, ours in LAYER_NAMES.items()},
    **{f"cross_unit.{name}": f"cross_attention.transformer.{ours}" for name, ours in LAYER_NAMES.items()},
}


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> MMCA:
    """Our MMCA with weights named as in the reference cases."""
    width, image_dim = state_dict["region_fc.weight"].shape
    model = MMCA(
        image_dim,
        token_dim=state_dict["text_fc.weight"].shape[1],
        width=width,
        heads=options["h"],
        feed_forward=len(state_dict["cross_unit.ffn1.weight"]),
        channels=len(state_dict["text_cnn0.conv1.weight"]),
        cross_weight=options["alpha"],
    )
    return load_public(model, state_dict, NAMES)


def values(model: MMCA, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    i1, c1 = model.cross_attention.encode_all_pairs(images, texts)
    i, c = arrays["mid.pair"].tolist()
    joint = model.cross_attention.joint_attention(images[i : i + 1], texts[c : c + 1])[0]
    real = images.mask.shape[1] + int(text_batch.lengths[c])
    return {
        "mid.regions": images.local,
        "mid.i0": images.pooled,
        "mid.c0": texts.pooled,
        "mid.i1": i1,
        "mid.c1": c1,
        "mid.pair_attn": joint[:, :real, :real],
    }


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """Compare vectors, attention, scores and losses at several weights of the second score, and gradients."""
    weights = {k[2:]: to_device(v) for k, v in arrays.items() if k[:2] == "w."}
    model = load(weights, about["options"]).eval()
    for name, value in values(model, arrays).items():
        table.add("values", name, value, arrays[name])
    captions = torch.from_numpy(arrays["in.pair_cap"])  # of the pairs of the loss
    margin = float(about["options"]["margin"])
    for weight in (*about["options"]["alphas"], about["options"]["alpha"]):
        model.cross_weight = weight
        scores, name = all_scores(model, arrays).i2t, f".alpha{weight:g}"
        loss = hinge_loss(Scores.same(scores[:, captions]), margin, hardest=True)
        table.add("values", f"out.sims{name}", scores, arrays[f"out.sims{name}"])
        expected = arrays[f"out.loss_hard{name}"]
        table.add("losses", f"out.loss_hard{name}", loss, expected, relative=True)
    compare_gradients(table, model, arrays, "out.grad.", loss, NAMES)
    return True
