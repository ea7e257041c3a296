"""MMCA against the reference cases of a second implementation, and the names of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmca_weights import IMAGE_DIM, TOKEN_DIM, WIDTH, public_weights

from itm_lab.parity.adapters.mmca import NAMES, load
from itm_lab.parity.comparison import our_name
from itm_lab.parity.reference_cases import run_folder
from itm_utils.errors import ItmError


def test_reference_cases_agree() -> None:
    """Vectors, attention, scores, losses and gradients of a second implementation."""
    folder = Path(__file__).resolve().parents[1] / "golden" / "mmca"
    rows = list(run_folder(folder))
    assert {row.case.split("/")[1] for row in rows} == {p.stem for p in folder.glob("*.npz")}
    assert all(row.ok for row in rows), [str(row) for row in rows if not row.ok]


@pytest.mark.parametrize("feed_forward", [WIDTH, 11])
def test_public_names_go_there_and_back(feed_forward: int) -> None:
    """Every public weight arrives, unchanged, at the place that its name says; sizes and options are read."""
    public = public_weights(feed_forward)
    made = load(public, {"h": 4, "alpha": 0.7})
    assert (
        made.cross_attention.transformer.attention.heads,
        made.self_attention.transformer.attention.heads,
        made.cross_weight,
    ) == (4, 4, 0.7)
    assert (made.config["width"], made.config["image_dim"], made.config["token_dim"]) == (WIDTH, IMAGE_DIM, TOKEN_DIM)
    assert made.config["feed_forward"] == feed_forward
    state = made.state_dict()
    assert {our_name(NAMES, name) for name in public} == state.keys()
    for name, value in public.items():
        assert torch.equal(state[our_name(NAMES, name)], value)


def test_public_weights_must_fit() -> None:
    public = public_weights()
    with pytest.raises(ItmError, match=r"cross_attention\.transformer\.attention\.k_proj\.bias: found no weight"):
        load({k: v for k, v in public.items() if k != "cross_unit.k.bias"}, {"h": 2, "alpha": 0.2})
    with pytest.raises(ItmError, match="heads: found 3"):
        load(public, {"h": 3, "alpha": 0.2})
    with pytest.raises(ItmError, match="shape"):
        load(public | {"text_cnn1.fc.bias": torch.zeros(3)}, {"h": 2, "alpha": 0.2})
