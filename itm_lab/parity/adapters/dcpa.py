"""DCPA has no public code: names of weights and values in its reference cases, a second implementation of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from itm_lab.parity.comparison import Arrays, Table, batches, compare_gradients, load_public, to_device
from itm_utils.matcher import Images, Scores, Texts
from itm_utils.models.dcpa import DCPA, decode_pairs
from itm_utils.models.vsepp import hinge_loss, l2_normalize

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
FEED_FORWARD = {"ffn1": "linear1", "ffn2": "linear2"}
ENCODER = FEED_FORWARD | {"norm1": "attn_norm", "norm2": "ffn_norm"}
DECODER = FEED_FORWARD | {"norm1": "self_attn_norm", "norm2": "attn_norm", "norm3": "ffn_norm"}
ATTENTIONS = {"self": "self_attention", "cross": "attention"}
NAMES = {
    "region_fc": "intra.region_proj",
    "region_fc2": "inter.region_proj",
    "text_fc": "inter.token_proj",
    "text_cnn.fc": "intra.text_proj",
    **{f"text_cnn.conv{n}": f"intra.text_cnn.convs.{n - 1}" for n in (1, 2, 3)},
    **{f"encoder.{public}": f"intra.encoder.attention.{ours}" for public, ours in PROJECTIONS.items()},
    **{f"encoder.{public}": f"intra.encoder.{ours}" for public, ours in ENCODER.items()},
    **{
        f"decoder_{direction}.{kind}.{public}": f"inter.{direction}.{attention}.{ours}"
        for direction in ("i2t", "t2i")
        for kind, attention in ATTENTIONS.items()
        for public, ours in PROJECTIONS.items()
    },
    **{
        f"decoder_{direction}.{public}": f"inter.{direction}.{ours}"
        for direction in ("i2t", "t2i")
        for public, ours in DECODER.items()
    },
}
# Scores of a case by our name: the keys of their i2t and t2i matrices there.
SCORES = {
    "intra": ("intra", None),
    "intra_globalave": ("intra_globalave", None),
    "nodecoupled": ("nodecoupled", None),
    "inter": ("i2t", "t2i"),
    "fused": ("fused_i2t", "fused_t2i"),
    "nolocalagg": ("i2t_nolocalagg", "t2i_nolocalagg"),
}
# Losses of a case: the scores that they are taken of.
LOSSES = {
    "stage1": "intra",
    "stage1_globalave": "intra_globalave",
    "stage2": "inter",
    "stage2_nodecoupled": "nodecoupled",
    "stage2_nolocalagg": "nolocalagg",
}


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> DCPA:
    """Our DCPA with the weights of a reference case."""
    width, image_dim = state_dict["region_fc.weight"].shape
    both = {"token_dim": state_dict["text_fc.weight"].shape[1], "width": width}
    both |= {"heads": options["h"], "feed_forward": options["f"], "top_k": options["K"]}
    model = DCPA(image_dim, both | {"channels": options["filters"]}, both, intra_weight=options["w1"])
    return load_public(model, state_dict, NAMES)


def compare_case(table: Table, about: Mapping[str, Any], arrays: Arrays) -> bool:
    """One reference case: vectors, attention weights, scores with every switch, losses, gradients."""
    weights = {k[2:]: to_device(v) for k, v in arrays.items() if k[:2] == "w."}
    model = load(weights, about["options"]).eval()
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    pair = arrays["mid.pair"].tolist()
    for name, value in pair_values(model, images, texts, pair).items():
        table.add("values", name, value, arrays[name])
    scores = all_switches(model, images, texts)
    for name, (i2t, t2i) in SCORES.items():
        for ours, key in ((scores[name].i2t, i2t), (scores[name].t2i, t2i)):
            if key:
                table.add("values", key, ours, arrays[f"out.sims.{key}"])
    own = torch.from_numpy(arrays["in.pair_cap"])
    for name, source in LOSSES.items():
        paired = Scores(scores[source].i2t[:, own], scores[source].t2i[:, own])
        loss = hinge_loss(paired, float(about["options"]["margin"]), hardest=True)
        table.add("losses", name, loss, arrays[f"out.loss_hard.{name}"], relative=True)
        prefix = f"out.grad.{name}."
        if any(key.startswith(prefix) for key in arrays):
            compare_gradients(table, model, arrays, prefix, loss, NAMES)
    return True


def pair_values(model: DCPA, images: Images, texts: Texts, pair: list[int]) -> dict[str, Tensor]:
    """Our values for the ``mid.*`` arrays of a case; pair: image and caption."""
    i, c = (slice(place, place + 1) for place in pair)
    image, text = images[i], texts[c]
    n = int(text.mask.sum())
    regions_as_text = decode_pairs(model.inter.i2t, image, text)[0]
    words_as_image = decode_pairs(model.inter.t2i, text, image)[0, :n]
    regions, words = image.local[0], text.local[0, :n]
    return {
        "mid.visual_phrases": images.extra_local["visual_phrase"],
        "mid.sentence": texts.extra["intra"],
        "mid.pair_iP": image.extra_local["phrase"][0],
        "mid.pair_cP": text.extra_local["phrase"][0, :n],
        "mid.pair_iT": regions_as_text,
        "mid.pair_cV": words_as_image,
        "mid.pair_A": l2_normalize(regions_as_text) @ words.T,
        "mid.pair_A_t2i": l2_normalize(words_as_image) @ regions.T,
        "mid.pair_att_i2t": model.head_weights(image, text)[0, :, :, :n],
        "mid.pair_att_t2i": model.head_weights(text, image)[0, :, :n],
    }


def all_switches(model: DCPA, images: Images, texts: Texts) -> dict[str, Scores]:
    """Every score matrix of a case, by the names of ``SCORES``."""
    sides = model.intra_encodings(images, texts)
    intra, inter = model.intra.score(*sides), model.inter.score(images, texts)
    found = {"intra": intra, "inter": inter, "fused": model.fuse(intra, inter)}
    found["nodecoupled"] = Scores.same((inter.i2t + inter.t2i) / 2)
    model.intra.similarity = model.inter.similarity = "global"
    found["intra_globalave"], found["nolocalagg"] = model.intra.score(*sides), model.inter.score(images, texts)
    model.intra.similarity = model.inter.similarity = "local"
    return found
