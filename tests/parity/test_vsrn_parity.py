"""VSRN: the numbers, weights and options of the public code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from itm_lab.parity.adapters import vsrn
from itm_lab.parity.reference_cases import run_case, run_folder
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, TextBatch
from itm_utils.models.vsrn import IGNORE_INDEX, VSRN, teacher_forcing

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "vsrn"
PUBLIC = {
    "vocab_size": 30,
    "img_dim": 6,
    "embed_size": 8,
    "word_dim": 5,
    "num_layers": 1,
    "measure": "cosine",
    "use_abs": False,
    "no_imgnorm": False,
    "data_name": "f30k_precomp",
    "dim_hidden": 7,
    "dim_word": 4,
    "input_dropout_p": 0.2,
    "max_len": 9,
    "bidirectional": False,
    "rnn_type": "gru",
}


def model(**options) -> VSRN:
    """A small VSRN whose reasoning does something (its norms start at zero)."""
    torch.manual_seed(0)
    small = {"width": 8, "word_dim": 5, "caption_width": 7, "caption_word_dim": 4, "max_len": 9}
    made = VSRN(vocabulary_size=30, image_dim=6, **(small | options))
    for step in made.reasoning.steps:
        torch.nn.init.uniform_(step.norm.weight, 0.2, 0.8)
    return made.eval()


def public_weights(ours: VSRN) -> dict[str, Tensor]:
    """Our weights under public names; linear layers of the reasoning are 1x1 convolutions there."""
    weights = {}
    for name, value in ours.state_dict().items():
        public, prefix = max(
            ((p, o) for p, o in vsrn.NAMES.items() if name == o or name.startswith(f"{o}.")),
            key=lambda pair: len(pair[1]),
        )
        is_linear = name.startswith("reasoning.steps.") and name.endswith(".weight") and value.dim() == 2
        weights[public + name.removeprefix(prefix)] = value[..., None] if is_linear else value
    return weights


def test_the_public_numbers() -> None:
    rows = list(run_folder(GOLDEN))
    assert len(rows) == 10
    assert all(row.ok for row in rows), [str(row) for row in rows if not row.ok]
    compared = {row.kind for row in rows}
    assert compared == {"values", "losses", "gradients", "metrics"}


def test_parity_fails_where_the_norm_runs_over_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    load = vsrn.load

    def wrong(weights, options):
        made = load(weights, options)
        made.reasoning.norm_axis = "width"
        return made

    monkeypatch.setattr(vsrn, "load", wrong)
    assert not all(row.ok for row in run_case(GOLDEN / "given_coco.npz"))


def test_teacher_forcing_has_the_public_labels() -> None:
    for name in ("given_coco", "given_f30k", "given_f30k_sorted"):
        arrays = np.load(GOLDEN / f"{name}.npz")
        texts = TextBatch(
            lengths=torch.from_numpy(arrays["in.lengths"]),
            ids=torch.arange(len(arrays["in.tokens"])),
            words=torch.from_numpy(arrays["in.tokens"]),
        )[torch.from_numpy(arrays["in.pair_cap"])]
        inputs, targets = teacher_forcing(texts, max_len=9)
        labels, masks = arrays["in.caption_labels"], arrays["in.caption_masks"]
        assert (inputs.numpy() == labels[:, :8]).all()
        assert (targets.numpy() == np.where(masks[:, 1:9] > 0, labels[:, 1:9], IGNORE_INDEX)).all()


def test_public_options() -> None:
    def loaded(**changed) -> VSRN:
        options = PUBLIC | changed
        ours = model(architecture="f30k" if options["data_name"] == "f30k_precomp" else "coco")
        return vsrn.load(public_weights(ours), options)

    assert loaded().reasoning.norm_axis == "regions"
    assert loaded().reasoning.architecture == "f30k"
    assert loaded(data_name="coco_precomp").reasoning.architecture == "coco"
    for wrong in ({"bidirectional": True}, {"rnn_type": "lstm"}):
        with pytest.raises(ItmError, match="another caption decoder"):
            loaded(**wrong)
    with pytest.raises(ItmError, match="no max_len"):
        vsrn.load({}, {k: v for k, v in PUBLIC.items() if k != "max_len"})


def test_a_published_checkpoint_has_no_caption_decoder() -> None:
    ours = model(architecture="coco", caption_weight=0.0)
    loaded = vsrn.load(public_weights(ours), PUBLIC | {"data_name": "coco_precomp"}).eval()
    assert loaded.caption_decoder is None
    loaded.reasoning.norm_axis = ours.reasoning.norm_axis
    torch.manual_seed(1)
    mask = torch.ones(4, 5, dtype=torch.bool)
    images = ImageBatch(regions=torch.randn(4, 5, 6), mask=mask, ids=torch.arange(4))
    torch.testing.assert_close(loaded.encode_images(images).pooled, ours.encode_images(images).pooled)
