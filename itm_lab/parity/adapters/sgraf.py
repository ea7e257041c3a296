"""SGRAF as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from itm_lab.parity.adapters.scan import ENCODERS
from itm_lab.parity.comparison import Arrays, batches, load_public
from itm_utils.errors import input_error
from itm_utils.matcher import Images, Texts
from itm_utils.models.sgraf import SAF, SGRAF, GraphReasoningStep, unit_norm_attention

STEP_NAMES = {"graph_query_w": "q_proj", "graph_key_w": "k_proj", "sim_graph_w": "out_proj"}
NAMES = {
    "img_enc.fc": "region_proj",
    "txt_enc.embed": "word_embedding",
    "txt_enc.cap_rnn": "gru",
    "sim_enc.v_global_w.embedding_local.0": "image_pool.local_proj",
    "sim_enc.v_global_w.embedding_local.1": "image_pool.local_norm",
    "sim_enc.v_global_w.embedding_global.0": "image_pool.mean_proj",
    "sim_enc.v_global_w.embedding_global.1": "image_pool.mean_norm",
    "sim_enc.v_global_w.embedding_common.0": "image_pool.logit_proj",
    "sim_enc.t_global_w.embedding_local.0": "text_pool.local_proj",
    "sim_enc.t_global_w.embedding_global.0": "text_pool.mean_proj",
    "sim_enc.t_global_w.embedding_common.0": "text_pool.logit_proj",
    "sim_enc.sim_tranloc_w": "similarity.local_proj",
    "sim_enc.sim_tranglo_w": "similarity.global_proj",
    "sim_enc.sim_eval_w": "score_proj",
    "sim_enc.SAF_module.attn_sim_w": "head.gate",
    "sim_enc.SAF_module.bn": "head.norm",
} | {
    f"sim_enc.SGR_module.{step}.{theirs}": f"head.steps.{step}.{ours}"
    for step in range(16)  # as many steps as anyone may have trained
    for theirs, ours in STEP_NAMES.items()
}
OPTIONS = ENCODERS | {"sim_dim": "sim_dim", "module_name": "head", "sgr_step": "steps"}
SLOTS = "sim_enc.v_global_w.embedding_local.1.weight"  # one number per region slot


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> SGRAF:
    """Our SGRAF with public weights, batch norms as in the public code."""
    return load_public(SGRAF(**config(state_dict, options)), state_dict, NAMES)


def config(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, and what only its weights tell, as arguments of ours."""
    needed = (*OPTIONS, "no_imgnorm", "no_txtnorm")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "all options of SGRAF")
    if SLOTS not in state_dict:
        raise input_error("public weights", f"no {SLOTS}", "the weights of SGRAF")
    ours = {name: options[public] for public, name in OPTIONS.items()}
    return ours | {
        "image_norm": not options["no_imgnorm"],
        "text_norm": not options["no_txtnorm"],
        "dropout": options.get("dropout", 0.4),  # fixed in the public code
        "region_slots": len(state_dict[SLOTS]),
    }


def values(model: SGRAF, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    found = {
        "mid.img_emb": images.local,
        "mid.words": texts.local,
        "mid.img_selfattn": model.image_pool.weights(images.local, images.mask),
        "mid.img_glo": images.pooled,
        "mid.cap_glo": texts.pooled,
    }
    if "in.probe_cap" in arrays:
        probe = int(arrays["in.probe_cap"])
        found |= probe_values(model, images, texts[probe : probe + 1])
    return {name: value for name, value in found.items() if name in arrays}


def probe_values(model: SGRAF, images: Images, text: Texts) -> dict[str, Tensor]:
    """One caption with every image, layer by layer."""
    words = text.local[text.mask]
    repeated = text[torch.zeros(len(images), dtype=torch.long)]
    attention = model.attention(images, repeated)["t2i"].weights[:, : len(words)]
    weights = unit_norm_attention(images.local, words, [(len(words), 1)], model.similarity.temperature)
    (batch,) = model.similarity(images, text)
    ((_, vector),) = model.head([batch])
    nodes = batch.nodes[:, 0]
    found = {
        "mid.probe_attn": attention,
        "mid.probe_context": weights.mT @ images.local,
        "mid.probe_sim_emb": nodes,
        "mid.probe_vec": vector[:, 0],
    }
    if isinstance(model.head, SAF):
        return found | {"mid.probe_saf_attn": model.head.weights([batch])[0][:, 0]}
    for number, step in enumerate(cast(Sequence[GraphReasoningStep], model.head.steps)):
        fused = step.fused_projections()
        found[f"mid.probe_edge{number}"] = step.edges(nodes, nodes, fused)
        nodes = found[f"mid.probe_nodes{number}"] = step(nodes, nodes, fused)
    return found
