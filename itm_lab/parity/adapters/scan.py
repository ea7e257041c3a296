"""SCAN as its authors published it: options, names of weights, and what its reference cases hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from itm_lab.parity.comparison import Arrays, batches, load_public
from itm_utils.errors import input_error
from itm_utils.matcher import Images, Texts
from itm_utils.models.scan import SCAN, RegionsAndWords, encode_words

NAMES = {
    "img_enc.fc": "region_proj",
    "img_enc.fc.weight_g": "region_proj.parametrizations.weight.original0",
    "img_enc.fc.weight_v": "region_proj.parametrizations.weight.original1",
    "txt_enc.embed": "word_embedding",
    "txt_enc.rnn": "gru",
}
ENCODERS = {  # options of both encoders, which later public code took over
    "vocab_size": "vocabulary_size",
    "img_dim": "image_dim",
    "embed_size": "width",
    "word_dim": "word_dim",
    "num_layers": "layers",
    "bi_gru": "bidirectional",
}
OPTIONS = ENCODERS | {
    "cross_attn": "direction",
    "raw_feature_norm": "first_norm",
    "agg_func": "pooling",
    "lambda_softmax": "temperature",
    "lambda_lse": "lse",
}


def load(state_dict: Mapping[str, Tensor], options: Mapping[str, Any]) -> SCAN:
    """Our SCAN with public weights."""
    return load_public(SCAN(**config(options)), state_dict, NAMES)


def config(options: Mapping[str, Any]) -> dict[str, Any]:
    """The public options that shape the model, as arguments of ours."""
    needed = (*OPTIONS, "no_imgnorm", "no_txtnorm", "precomp_enc_type")
    if missing := [name for name in needed if name not in options]:
        raise input_error("public options", f"no {', '.join(missing)}", "all options of SCAN")
    encoder = options["precomp_enc_type"]
    if encoder not in ("basic", "weight_norm"):
        raise input_error("precomp_enc_type", repr(encoder), "basic or weight_norm")
    ours = {name: options[public] for public, name in OPTIONS.items()}
    norms = {"image_norm": not options["no_imgnorm"], "text_norm": not options["no_txtnorm"]}
    return ours | norms | {"weight_norm": encoder == "weight_norm"}


def encoder_values(model: RegionsAndWords, arrays: Arrays) -> tuple[Images, Texts, dict[str, Tensor]]:
    """Both sides of a case encoded, and the intermediate arrays of the encoders, which BFAN shares."""
    image_batch, text_batch = batches(arrays)
    images, texts = model.encode_images(image_batch), model.encode_texts(text_batch)
    words = model.word_embedding(text_batch.words)
    found = {
        "mid.img_emb": images.local,
        "mid.cap_gru": encode_words(model.gru, words, text_batch.lengths),
        "mid.cap_emb": texts.local,
    }
    return images, texts, found


def values(model: SCAN, arrays: Arrays) -> dict[str, Tensor]:
    """Our values for the intermediate arrays of a case, where it has them."""
    images, texts, found = encoder_values(model, arrays)
    if "mid.pair" in arrays:
        i, c = (slice(int(n), int(n) + 1) for n in arrays["mid.pair"])
        attention = model.attention(images[i], texts[c])[model.direction]
        weights = attention.weights[0][attention.query_mask[0]]  # (q, k)
        queries = attention.queries[0][attention.query_mask[0]]
        attended = weights @ attention.keys[0]  # (q, d)
        found["mid.pair_attn"] = weights[:, attention.key_mask[0]].T
        found["mid.pair_context"] = attended
        found["mid.pair_rowsim"] = nn.functional.cosine_similarity(queries, attended)
    return {name: value for name, value in found.items() if name in arrays}
