"""SCAN with public weights and options: what is loaded, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from itm_lab.parity.adapters import scan as adapter
from itm_utils.errors import ItmError
from itm_utils.models.scan import SCAN

PUBLIC = {
    "vocab_size": 12,
    "img_dim": 7,
    "embed_size": 6,
    "word_dim": 5,
    "num_layers": 1,
    "bi_gru": True,
    "cross_attn": "i2t",
    "raw_feature_norm": "softmax",
    "agg_func": "Mean",
    "lambda_softmax": 4.0,
    "lambda_lse": 5.0,
    "no_imgnorm": False,
    "no_txtnorm": True,
    "precomp_enc_type": "basic",
}


def public_weights() -> dict[str, Tensor]:
    names = {"region_proj": "img_enc.fc", "word_embedding": "txt_enc.embed", "gru": "txt_enc.rnn"}
    return {
        name.replace(ours, public): tensor
        for name, tensor in SCAN(12, 7, width=6, word_dim=5).state_dict().items()
        for ours, public in names.items()
        if name.startswith(ours + ".")
    }


def test_public_weights_and_options_load() -> None:
    weights = public_weights()
    loaded = adapter.load(weights, PUBLIC)
    assert loaded.config["direction"] == "i2t" and not loaded.config["text_norm"]
    torch.testing.assert_close(loaded.gru.weight_hh_l0_reverse, weights["txt_enc.rnn.weight_hh_l0_reverse"])
    assert SCAN(**loaded.config).config == loaded.config  # a checkpoint can be built again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precomp_enc_type": "attention"}, "precomp_enc_type"),
        ({"embed_size": 8}, "shape"),
        ({"num_layers": 2}, "no weight"),
        ({"bi_gru": False}, "no place"),
        ({"agg_func": "Average"}, "pooling"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        adapter.load(public_weights(), PUBLIC | change)


def test_missing_options_and_stray_weights_are_refused() -> None:
    with pytest.raises(ItmError, match="no bi_gru"):
        adapter.load(public_weights(), {k: v for k, v in PUBLIC.items() if k != "bi_gru"})
    with pytest.raises(ItmError, match=r"txt_enc\.head"):
        adapter.load(public_weights() | {"txt_enc.head.weight": torch.zeros(1)}, PUBLIC)
