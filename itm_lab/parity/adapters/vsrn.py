"""VSRN as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from itm_lab.parity.adapters import vsepp
from itm_lab.parity.comparison import Arrays, Table, batches, compare_metrics, load_public, our_name, to_device
from itm_utils.errors import input_error
from itm_utils.matcher import PairBatch, Scores
from itm_utils.metrics.retrieval import ensemble
from itm_utils.models.vsepp import hinge_loss
from itm_utils.models.vsrn import VSRN, ReasoningStep, encode_regions, normalize_regions

STEP_NAMES = {"theta": "q_proj", "phi": "k_proj", "g": "v_proj", "W.0": "out_proj", "W.1": "norm"}
DECODER_NAMES = {
    "encoder.vid2hid": "input_proj",
    "encoder.rnn": "encoder",
    "decoder.embedding": "word_embedding",
    "decoder.attention.linear1": "attention_proj",
    "decoder.attention.linear2": "attention_score",
    "decoder.rnn.weight_ih_l0": "decoder.weight_ih",
    "decoder.rnn.weight_hh_l0": "decoder.weight_hh",
    "decoder.rnn.bias_ih_l0": "decoder.bias_ih",
    "decoder.rnn.bias_hh_l0": "decoder.bias_hh",
    "decoder.out": "out_proj",
}
NAMES = {
    "img_enc.fc": "reasoning.region_proj",
    "img_enc.img_rnn": "region_gru",
    "img_enc.bn": "gru_norm",
    "txt_enc.embed": "text_encoder.word_embedding",
    "txt_enc.rnn": "text_encoder.gru",
    **{
        f"img_enc.Rs_GCN_{n + 1}.{public}": f"reasoning.steps.{n}.{name}"
        for n in range(4)
        for public, name in STEP_NAMES.items()
    },
    **{f"caption_model.{public}": f"caption_decoder.{name}" for public, name in DECODER_NAMES.items()},
}
OPTIONS = {
    "dim_hidden": "caption_width",
    "dim_word": "caption_word_dim",
    "input_dropout_p": "caption_dropout",
    "max_len": "max_len",
}
FLICKR = "f30k_precomp"  # the dataset whose name changes the public model


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> VSRN:
    """Our VSRN with public weights; published checkpoints hold no caption decoder.

    1x1 convolutions there are linear layers here.
    """
    has_decoder = any(name.startswith("caption_model.") for name in state_dict)
    model = VSRN(**config(options), caption_weight=float(has_decoder))
    flat = {name: value[..., 0] if value.dim() == 3 else value for name, value in state_dict.items()}
    return load_public(model, flat, NAMES)


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    needed = (*OPTIONS, "data_name", "bidirectional", "rnn_type")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "all of VSRN's")
    if options["bidirectional"] or options["rnn_type"].lower() != "gru":
        raise input_error("public options", "another caption decoder", "a unidirectional GRU")
    ours = vsepp.config(options) | {name: options[public] for public, name in OPTIONS.items()}
    architecture = "f30k" if options["data_name"] == FLICKR else "coco"
    return ours | {"architecture": architecture, "norm_axis": "regions"}


def values(model: VSRN, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    images, texts = batches(arrays)
    reasoning, steps = model.reasoning, cast(Sequence[ReasoningStep], model.reasoning.steps)
    regions = reasoning.project(images)
    found = {"mid.fc": reasoning.region_proj(images.regions), "mid.gcn_input": regions}
    found["mid.affinity_gcn1_img0"] = steps[0].relations(regions, images.mask)[0]
    for n, step in enumerate(steps):
        found[f"mid.gcn{n + 1}"] = regions = step(regions, images.mask)
    found["mid.regions"] = regions = normalize_regions(regions, reasoning.norm_axis)
    found["mid.img_gru_last"] = encode_regions(model.region_gru, regions, images.mask)[2]
    found["mid.words"] = vsepp.gru_states(model.text_encoder, texts)
    found["out.img_emb"] = model.encode_images(images).pooled
    found["out.cap_emb"] = model.encode_texts(texts).pooled
    if model.caption_decoder is not None and "in.caption_labels" in arrays:
        tokens = to_device(arrays["in.caption_labels"])[:1, : model.max_len - 1]
        logits = model.caption_decoder(regions[:1], images.mask[:1], tokens)
        found["mid.regions_caption_logprobs0"] = logits[0].log_softmax(dim=-1)
    return {name: value for name, value in found.items() if name in arrays}


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """What only VSRN's reference cases hold; True where nothing else is left to compare."""
    if "in.img_embs_a" in arrays:
        compare_ensemble(table, arrays)
        return True
    weights = {name[2:]: to_device(array) for name, array in arrays.items() if name.startswith("w.")}
    model = load(weights, about["options"]).eval()
    margin = about["options"]["margin"]
    compare_losses(table, model, margin, arrays, "out.")
    if "out.clip_norm_unique" in arrays:
        compare_clipping(table, model, arrays)
    compare_losses(table, model.train(), margin, arrays, "out.train.")
    return False


def compare_losses(table: Table, model: VSRN, margin: float, arrays: Arrays, prefix: str) -> None:
    """Ranking loss, captioning loss, the gradients of their sum, and what the batch norms remember."""
    images, texts = batches(arrays)
    batch = PairBatch(images, texts[torch.from_numpy(arrays["in.pair_cap"])])
    encoded = model.encode_images(batch.images), model.encode_texts(batch.texts)
    scores = model.score(*encoded)
    losses = {kind: hinge_loss(scores, margin, kind == "hard") for kind in ("hard", "sum")}
    losses["caption"] = sum(model.extra_losses(*encoded, batch).values(), torch.zeros(()))
    total = losses["hard"] + losses["caption"]
    named = {f"{prefix}loss_{kind}": loss for kind, loss in losses.items()}
    for key, loss in (named | {f"{prefix}total_loss": total}).items():
        if key in arrays:
            table.add("losses", key, loss, arrays[key], relative=True)
    model.zero_grad()
    total.backward()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for key in arrays:
        if key.startswith(gradient := f"{prefix}grad_total."):
            ours = parameters[our_name(NAMES, key.removeprefix(gradient))].grad
            table.add("gradients", key, ours, arrays[key], relative=True)
        elif key.startswith(buffer := f"{prefix}buffer."):
            table.add("values", key, buffers[our_name(NAMES, key.removeprefix(buffer))], arrays[key])


def compare_clipping(table: Table, model: VSRN, arrays: Arrays) -> None:
    """Gradient norms: the public optimiser lists the caption decoder twice, so its clip norm counts it twice."""
    squares = {name: p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}
    once = sum(squares.values(), torch.zeros(()))
    decoder = [square for name, square in squares.items() if name.startswith("caption_decoder.")]
    again = sum(decoder, torch.zeros(()))
    for name, total in (("unique", once), ("official", once + again)):
        key = f"out.clip_norm_{name}"
        table.add("gradients", key, total.sqrt(), arrays[key], relative=True)


def compare_ensemble(table: Table, arrays: Arrays) -> None:
    """Recalls of one model, and of the mean of two models' scores, from their embeddings."""
    sims = [arrays[f"in.img_embs_{x}"].astype(float) @ arrays[f"in.cap_embs_{x}"].astype(float).T for x in "ab"]
    mean = ensemble([Scores.same(torch.from_numpy(s)) for s in sims]).i2t.numpy()
    for prefix, scores in (("out.", sims[0]), ("out.ens_", mean)):
        expected = {f"out.{direction}": arrays[f"{prefix}{direction}"] for direction in ("i2t", "t2i")}
        compare_metrics(table, {"in.sims": scores} | expected)
