"""Weights of DCPA's reference cases in our model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_lab.parity.adapters.dcpa import NAMES, load
from itm_lab.parity.comparison import our_name
from itm_utils.errors import ItmError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dcpa"


@pytest.mark.parametrize("case", ["given_base", "given_k2", "given_short"])
def test_public_weights_arrive_at_their_places(case: str) -> None:
    """Every weight of a reference case, unchanged; sizes and options are read."""
    about, arrays = json.loads((GOLDEN / f"{case}.json").read_text()), np.load(GOLDEN / f"{case}.npz")
    weights = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays if name.startswith("w.")}
    options = about["options"] | {"w1": 0.25}  # not the default
    made = load(weights, options)
    state = made.state_dict()
    assert {our_name(NAMES, name) for name in weights} == state.keys() and len(weights) == len(state)
    assert all(torch.equal(state[our_name(NAMES, name)], value) for name, value in weights.items())
    assert made.intra.top_k == made.inter.top_k == options["K"] and made.intra_weight == options["w1"]
    assert made.inter.i2t.self_attention.heads == made.intra.encoder.attention.heads == options["h"]
    for name in ("encoder.k.bias", "decoder_t2i.norm3.weight", "region_fc2.weight"):
        left = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(ItmError, match=our_name(NAMES, name).replace(".", r"\.") + ": found no weight"):
            load(left, options)
