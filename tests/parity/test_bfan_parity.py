"""BFAN's adapter: public options and weights, and its reference cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from itm_lab.parity.adapters import bfan as adapter
from itm_lab.parity.reference_cases import run_folder
from itm_utils.errors import ItmError
from itm_utils.models.bfan import BFAN

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "bfan"
PUBLIC = {
    "vocab_size": 12,
    "img_dim": 7,
    "embed_size": 6,
    "word_dim": 5,
    "num_layers": 1,
    "lambda_softmax": 9.0,
    "focal_type": "prob",
    "no_imgnorm": False,
    "no_txtnorm": True,
    "precomp_enc_type": "basic",
}


def public_weights() -> dict[str, Tensor]:
    names = {"region_proj": "img_enc.fc", "word_embedding": "txt_enc.embed", "gru": "txt_enc.rnn"}
    return {
        name.replace(ours, public): tensor
        for name, tensor in BFAN(12, 7, temperature=7.0, width=6, word_dim=5).state_dict().items()
        for ours, public in names.items()
        if name.startswith(ours + ".")
    }


def test_public_weights_and_options_load() -> None:
    loaded = adapter.load(public_weights(), PUBLIC)
    assert (loaded.config["focal"], loaded.config["temperature"], loaded.config["ties"]) == ("prob", 9.0, "keep")
    assert loaded.gru.bidirectional and not loaded.config["text_norm"]
    assert BFAN(**loaded.config).config == loaded.config  # a checkpoint can be built again
    assert adapter.load(public_weights(), PUBLIC | {"ties": "drop"}).config["ties"] == "drop"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precomp_enc_type": "attention"}, "precomp_enc_type"),
        ({"embed_size": 8}, "shape"),
        ({"focal_type": "x"}, "focal"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        adapter.load(public_weights(), PUBLIC | change)


@pytest.mark.parametrize("missing", ["focal_type", "lambda_softmax"])
def test_missing_options_are_refused(missing: str) -> None:
    with pytest.raises(ItmError, match=f"no {missing}"):
        adapter.load(public_weights(), {k: v for k, v in PUBLIC.items() if k != missing})


def test_every_reference_case_is_matched() -> None:
    rows = list(run_folder(GOLDEN))
    assert {row.case for row in rows} == {f"bfan/{path.stem}" for path in GOLDEN.glob("*.npz")}
    assert all(row.ok for row in rows)
