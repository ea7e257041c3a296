"""PFAN's adapter: public options and weights, and its reference cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_lab.parity.adapters import pfan as adapter
from itm_lab.parity.comparison import batches
from itm_lab.parity.reference_cases import run_folder
from itm_utils.errors import ItmError
from itm_utils.matcher import Texts
from itm_utils.models.pfan import PFAN

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "pfan"


def golden(name: str) -> tuple[PFAN, dict, dict]:
    about = json.loads((GOLDEN / f"{name}.json").read_text())
    arrays = dict(np.load(GOLDEN / f"{name}.npz"))
    weights = {key[2:]: torch.from_numpy(value) for key, value in arrays.items() if key.startswith("w.")}
    return adapter.load(weights, about["options"]), about, arrays


def test_every_reference_case_is_matched() -> None:
    rows = list(run_folder(GOLDEN))
    assert {row.case for row in rows} == {f"pfan/{path.stem}" for path in GOLDEN.glob("*.npz")}
    assert all(row.ok for row in rows)


def test_a_wrong_choice_of_blocks_would_be_noticed(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "given_boxes.npz"))
    clear = int(np.flatnonzero(arrays["out.selection_is_tied"] == 0)[0])
    arrays["out.block_index"][clear, 0] = (arrays["out.block_index"][clear, 0] + 16) % 256
    np.savez(tmp_path / "case.npz", **arrays)
    (tmp_path / "case.json").write_text((GOLDEN / "given_boxes.json").read_text())
    (row,) = run_folder(tmp_path)
    assert not row.ok and row.worst == "out.block_index"


@pytest.mark.parametrize("name", ["given_t2i", "given_i2t", "given_t2i_lse"])
def test_attention_of_a_probed_caption_is_the_public_one(name: str) -> None:
    public, about, arrays = golden(name)
    probe = slice(about["case"]["probe_cap"], about["case"]["probe_cap"] + 1)
    image_batch, text_batch = batches(arrays)
    images = public.encode_images(image_batch)
    texts = public.encode_texts(text_batch[probe])
    many = Texts(local=texts.local.expand(len(images), -1, -1), mask=texts.mask.expand(len(images), -1))
    found = public.attention(images, many)[public.direction]
    weights = found.weights[:, found.query_mask[0]][..., found.key_mask[0]].detach()  # (i, q, k)
    np.testing.assert_allclose(weights.mT, arrays["mid.probe_attn"], atol=2e-6)
    np.testing.assert_allclose(weights.amax(dim=2), arrays["mid.probe_max_attn"], atol=2e-6)
    context = weights @ found.keys[:, found.key_mask[0]].detach()
    np.testing.assert_allclose(context, arrays["mid.probe_context"], atol=2e-6)


def test_every_stored_layer_is_compared() -> None:
    public, _, arrays = golden("given_t2i")
    stored = {key for key in arrays if key.startswith("mid.") and "probe" not in key}
    assert set(adapter.values(public, arrays)) == stored


def test_public_options_choose_the_public_switches() -> None:
    for name in ("given_t2i", "given_i2t"):
        public, _, _ = golden(name)
        assert public.config["position"] == "public"
        assert public.config["bonus"] == adapter.BONUS[public.direction]
        assert PFAN(**public.config).config == public.config  # a checkpoint can be built again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split_size": None}, "no split_size"),
        ({"split_size": 8}, "shape"),
        ({"position_embed_size": 5}, "shape"),
        ({"precomp_enc_type": "weight_norm"}, "no weight"),
        ({"agg_func": "Average"}, "pooling"),
    ],
)
def test_what_cannot_be_mapped_is_refused(change: dict, message: str) -> None:
    _, about, arrays = golden("given_t2i")
    weights = {key[2:]: torch.from_numpy(value) for key, value in arrays.items() if key.startswith("w.")}
    options = {k: v for k, v in (about["options"] | change).items() if v is not None}
    with pytest.raises(ItmError, match=message):
        adapter.load(weights, options)
