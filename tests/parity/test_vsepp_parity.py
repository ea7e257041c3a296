"""VSE++ with public weights and options: what is loaded, and what is refused."""

from __future__ import annotations

import pytest
import torch

from itm_lab.parity.adapters import vsepp as adapter
from itm_utils.errors import ItmError
from itm_utils.matcher import ImageBatch, TextBatch
from itm_utils.models.vsepp import VSEPP

PUBLIC = {
    "vocab_size": 9,
    "img_dim": 4,
    "embed_size": 5,
    "word_dim": 3,
    "num_layers": 1,
    "measure": "cosine",
    "use_abs": False,
    "no_imgnorm": False,
    "learning_rate": 0.0002,
}


def build() -> VSEPP:
    torch.manual_seed(0)
    return VSEPP(vocabulary_size=9, image_dim=4, width=5, word_dim=3)


def public_weights() -> dict[str, torch.Tensor]:
    ours = build().state_dict()
    return {
        public + name.removeprefix(prefix): value
        for public, prefix in adapter.NAMES.items()
        for name, value in ours.items()
        if name.startswith(f"{prefix}.")
    }


def test_public_weights_go_in_and_give_the_same_scores() -> None:
    model = adapter.load(public_weights(), PUBLIC)
    assert model.config["width"] == 5
    images = ImageBatch(torch.randn(2, 1, 4), mask=torch.ones(2, 1, dtype=torch.bool), ids=torch.arange(2))
    words = torch.tensor([[1, 4, 2], [1, 2, 0]])
    texts = TextBatch(lengths=torch.tensor([3, 2]), ids=torch.arange(2), words=words)
    ours = build()
    expected = ours.score(ours.encode_images(images), ours.encode_texts(texts)).i2t
    torch.testing.assert_close(model.score(model.encode_images(images), model.encode_texts(texts)).i2t, expected)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"img_enc.cnn.weight": torch.zeros(2)}, {}, r"img_enc\.cnn\.weight"),
        ({"img_enc.fc.weight": torch.zeros(2, 2)}, {}, r"\(2, 2\)"),
        ({"img_enc.fc.bias": None}, {}, "image_proj.bias: found no weight"),
        ({}, {"measure": "l2"}, "measure: found 'l2'"),
        ({}, {"use_abs": "no"}, "'no'"),
        ({}, {"word_dim": None}, "no word_dim"),
    ],
)
def test_public_things_without_a_place_are_refused(weights: dict, options: dict, message: str) -> None:
    state = {name: value for name, value in (public_weights() | weights).items() if value is not None}
    chosen = {name: value for name, value in (PUBLIC | options).items() if value is not None}
    with pytest.raises(ItmError, match=message):
        adapter.load(state, chosen)
