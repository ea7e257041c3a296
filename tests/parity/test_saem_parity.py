"""SAEM: the numbers, weights and options of the public code, and the BERT inside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from itm_lab.parity.adapters import saem
from itm_lab.parity.adapters.saem import Bert, PublicSAEM
from itm_lab.parity.comparison import our_name
from itm_lab.parity.reference_cases import run_case
from itm_utils.data.text_encoder import load_text_encoder
from itm_utils.errors import ItmError
from itm_utils.matcher import TextBatch
from itm_utils.training.checkpoints import load_model, save_model

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "saem"


def test_our_bert_is_bert() -> None:
    encoder = load_text_encoder()
    config, theirs = encoder.model.config, encoder.model.state_dict()
    ours = Bert(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.intermediate_size,
        config.max_position_embeddings,
    )
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = {}
    for name, value in theirs.items():
        if name.startswith("pooler."):
            continue
        for new, public in old.items():
            name = name.replace(new, public)
        weights[our_name(saem.NAMES, f"txt_enc.bert.{name}").removeprefix("bert.")] = value
    ours.load_state_dict(weights)
    assert not any(p.requires_grad for p in ours.parameters())
    cut = encoder.tokenizer(["a red fish", "two large blue toys above a small star"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = encoder.model(**cut, output_hidden_states=True).hidden_states[1:]
        for mine, state in zip(ours(cut["input_ids"], cut["attention_mask"].bool()), expected, strict=True):
            torch.testing.assert_close(mine, state, atol=2e-5, rtol=0)  # padding included


@pytest.fixture(params=["given_cnn", "given_train5", "given_rnn_bigru_EXTRA", "given_pooling_EXTRA"])
def case(request) -> Path:
    return GOLDEN / f"{request.param}.npz"


def test_the_public_code_computes_the_same(case: Path) -> None:
    rows = run_case(case)
    assert rows and all(row.ok for row in rows), [str(row) for row in rows if not row.ok]


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "given_cnn.npz"))
    arrays["out.loss_total_epoch5"] = arrays["out.loss_total_epoch5"] * np.float32(1.001)
    arrays["out.gradangular.txt_enc.mapping.bias"] = arrays["out.gradangular.txt_enc.mapping.bias"] * np.float32(1.01)
    np.savez(tmp_path / "case.npz", **arrays)
    (tmp_path / "case.json").write_text((GOLDEN / "given_cnn.json").read_text())
    worst = {row.kind: row.worst for row in run_case(tmp_path / "case.npz") if not row.ok}
    assert worst == {"losses": "loss_total_epoch5", "gradients": "out.gradangular.txt_enc.mapping.bias"}


def public() -> tuple[dict[str, Tensor], dict]:
    about = json.loads((GOLDEN / "given_cnn.json").read_text())
    arrays = np.load(GOLDEN / "given_cnn.npz")
    weights = {name[2:]: torch.from_numpy(arrays[name]) for name in arrays.files if name.startswith("w.")}
    return weights, about["options"] | {name: about[name] for name in ("trans_cfg", "bert_config")}


def test_public_weights_must_fit(tmp_path: Path) -> None:
    weights, options = public()
    with pytest.raises(ItmError, match=r"img_enc\.layer|layers\.0|no weight|has no place"):
        saem.load({k: v for k, v in weights.items() if "intermediate" not in k}, options)
    with pytest.raises(ItmError, match="no bert_config"):
        saem.load(weights, {k: v for k, v in options.items() if k != "bert_config"})
    with pytest.raises(ItmError, match="the name of a file"):
        saem.load(weights, options | {"trans_cfg": "t_cfg.json"})
    with pytest.raises(ItmError, match="the same number"):
        saem.load(weights, options | {"final_dims": 12})
    with pytest.raises(ItmError, match="one of cnn, pooling, rnn"):
        saem.load(weights, options | {"txt_stru": "trans"})


def test_a_public_model_can_be_saved_and_built_again(tmp_path: Path) -> None:
    matcher = saem.load(*public()).eval()
    words = torch.randint(3, 50, (3, 12), generator=torch.Generator().manual_seed(5))
    batch = TextBatch(lengths=torch.tensor([12, 4, 7]), ids=torch.arange(3), words=words)
    save_model(tmp_path / "saem.safetensors", matcher, {})
    again = PublicSAEM(**json.loads(json.dumps(matcher.config))).eval()  # what a checkpoint remembers is plain JSON
    load_model(tmp_path / "saem.safetensors", again)
    torch.testing.assert_close(again.encode_texts(batch).pooled, matcher.encode_texts(batch).pooled)
