"""VSE++ as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from itm_lab.parity.comparison import Arrays, batches, load_public
from itm_utils.errors import input_error
from itm_utils.matcher import TextBatch
from itm_utils.models.keeping_score import masked_mean
from itm_utils.models.vsepp import VSEPP, GRUTextEncoder

NAMES = {
    "img_enc.fc": "image_proj",
    "txt_enc.embed": "text_encoder.word_embedding",
    "txt_enc.rnn": "text_encoder.gru",
}
OPTIONS = {
    "vocab_size": "vocabulary_size",
    "img_dim": "image_dim",
    "embed_size": "width",
    "word_dim": "word_dim",
    "num_layers": "layers",
    "measure": "measure",
    "use_abs": "absolute",
    "no_imgnorm": "image_norm",  # the other way round
}


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> VSEPP:
    """Our VSE++ with public weights."""
    return load_public(VSEPP(**config(options)), state_dict, NAMES)


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    for name in OPTIONS:
        if name not in options:
            raise input_error("public options", f"no {name}", f"all of {', '.join(OPTIONS)}")
    ours = {name: options[public] for public, name in OPTIONS.items()}
    for name in ("absolute", "image_norm"):
        if not isinstance(ours[name], bool):
            raise input_error("public options", f"{ours[name]!r} for a switch", "true or false")
    return ours | {"image_norm": not ours["image_norm"]}


def values(model: VSEPP, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    images, texts = batches(arrays)
    found = {
        "mid.img_fc": model.image_proj(masked_mean(images.regions, images.mask)),
        "mid.img_emb": model.encode_images(images).pooled,
        "mid.gru_states": gru_states(model.text_encoder, texts),
        "mid.cap_emb": model.encode_texts(texts).pooled,
    }
    return {name: value for name, value in found.items() if name in arrays}


def gru_states(encoder: GRUTextEncoder, texts: TextBatch) -> Tensor:
    """GRU state after each word (c, w, d); zero at padding."""
    return encoder.gru(encoder.word_embedding(texts.words))[0] * texts.mask[..., None]
