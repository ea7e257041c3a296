"""SGRAF's adapter: public options and weights, published checkpoints, and its reference cases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_lab.parity.adapters import sgraf as adapter
from itm_lab.parity.published import read_published
from itm_lab.parity.reference_cases import run_folder
from itm_utils.errors import ItmError
from itm_utils.models.sgraf import SGRAF

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "sgraf"


def test_every_reference_case_is_matched() -> None:
    rows = list(run_folder(GOLDEN))
    assert {row.case.split("/")[1] for row in rows} == {p.stem for p in GOLDEN.glob("*.npz")}
    assert all(row.ok for row in rows), [str(row) for row in rows if not row.ok]


@pytest.mark.parametrize(
    ("change", "message"), [({"module_name": None}, "no module_name"), ({"sim_dim": 5}, "shape"), ({}, "no sim_enc")]
)
def test_what_cannot_be_mapped_is_refused(change: dict, message: str) -> None:
    matcher = SGRAF(12, 7, width=6, word_dim=5, sim_dim=4, dropout=0.0, region_slots=4)
    public = {ours: theirs for theirs, ours in adapter.NAMES.items()}
    weights = {
        public[prefix] + name.removeprefix(prefix): tensor
        for name, tensor in matcher.state_dict().items()
        for prefix in sorted(public, key=len)
        if name.startswith(prefix + ".")
    }
    options = {"vocab_size": 12, "img_dim": 7, "embed_size": 6, "word_dim": 5, "num_layers": 1, "bi_gru": True}
    options |= {"sim_dim": 4, "module_name": "SAF", "sgr_step": 3, "no_imgnorm": False, "no_txtnorm": False}
    loaded = adapter.load(weights, options)
    assert loaded.config["region_slots"] == 4 and loaded.config["dropout"] == 0.4
    options = {k: v for k, v in (options | change).items() if v is not None}
    with pytest.raises(ItmError, match=message):
        adapter.load(weights if change else {}, options)


def test_a_published_checkpoint_of_three_parts_is_read(tmp_path: Path) -> None:
    about = json.loads((GOLDEN / "given_sgr.json").read_text(encoding="utf-8"))
    arrays = np.load(GOLDEN / "given_sgr.npz")
    parts = [
        {k[len(f"w.{part}.") :]: torch.from_numpy(arrays[k]) for k in arrays.files if k.startswith(f"w.{part}.")}
        for part in ("img_enc", "txt_enc", "sim_enc")
    ]
    path = tmp_path / "model_best.pth.tar"
    torch.save({"model": parts, "opt": argparse.Namespace(**about["options"])}, path)
    loaded = adapter.load(*read_published(path))
    assert loaded.config["region_slots"] == 9 and len(loaded.head.steps) == 3
