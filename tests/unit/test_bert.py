"""Frozen BERT states: the shipped miniature, any other BERT, the cache, and the errors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from itm_lab.scenes.mini_bert import SPECIAL, mask
from itm_utils.cache import is_whole
from itm_utils.data import text_encoder as bert
from itm_utils.data.batches import PairDataset
from itm_utils.data.text_encoder import MINI_FOLDER, bert_captions, load_text_encoder
from itm_utils.errors import ItmError

CAPTIONS = [
    "two big striped red fish above a checkered toadstool",
    "a ball",
    "at night, an orange crescent and three tiny houses",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def encoder():
    return load_text_encoder()


def split_of(captions: list[str]) -> SimpleNamespace:
    return SimpleNamespace(captions=captions)


def test_the_default_is_a_real_bert_and_frozen(encoder):
    from transformers import BertModel

    assert isinstance(encoder.model, BertModel)
    assert encoder.model.config.num_hidden_layers == 2 and encoder.width == 64
    assert not encoder.model.training and not any(p.requires_grad for p in encoder.model.parameters())
    assert next(encoder.model.parameters()).dtype == torch.float32
    assert encoder.fingerprint == load_text_encoder(MINI_FOLDER).fingerprint


def test_states_are_those_of_the_model(encoder):
    texts = bert_captions(split_of(CAPTIONS), encoder)
    batch = texts.batch(np.array([2, 0]), spans=True)
    for row, caption in enumerate([CAPTIONS[2], CAPTIONS[0]]):
        tokens = encoder.tokenizer(caption, return_tensors="pt")
        with torch.no_grad():
            expected = encoder.model(**tokens).last_hidden_state[0]
        length = int(batch.lengths[row])
        assert length == len(expected)
        assert torch.allclose(batch.features[row, :length], expected, atol=5e-3)
        assert not batch.features[row, length:].any()
        assert batch.special[row].nonzero().flatten().tolist() == [0, length - 1]
        pieces = encoder.tokenizer.convert_ids_to_tokens(tokens["input_ids"][0])
        for piece, (start, end) in zip(pieces[1:-1], batch.spans[row, 1 : length - 1].tolist(), strict=True):
            assert caption[start:end] == piece.removeprefix("##")
    assert batch.ids.tolist() == [2, 0] and batch.words is None
    assert texts.batch(np.array([1])).spans is None


def test_padding_does_not_change_a_caption(encoder):
    together = bert_captions(split_of(CAPTIONS), encoder).batch(np.array([1])).features
    alone = bert_captions(split_of(CAPTIONS[1:2]), encoder).batch(np.array([0])).features
    assert torch.allclose(together, alone, atol=5e-3)


def test_states_under_the_padding_can_be_kept(encoder):
    plain = bert_captions(split_of(CAPTIONS), encoder, max_tokens=32)
    kept = bert_captions(split_of(CAPTIONS), encoder, max_tokens=32, padded=True)
    assert kept.fingerprint != plain.fingerprint and kept.lengths.tolist() == plain.lengths.tolist()
    rows = np.array([1, 2])
    full, short = kept.batch(rows, spans=True), plain.batch(rows, spans=True)
    assert full.features.shape[1] == 32 and full.mask.sum(dim=1).tolist() == kept.lengths[rows].tolist()
    width = short.features.shape[1]
    real = short.mask[..., None]
    assert torch.allclose(full.features[:, :width] * real, short.features, atol=5e-3)
    assert torch.equal(full.special[:, :width], short.special) and not full.special[:, width:].any()
    assert torch.equal(full.spans[:, :width], short.spans) and not full.spans[:, width:].any()
    ids = encoder.tokenizer(CAPTIONS[1], padding="max_length", max_length=32, return_tensors="pt")
    with torch.no_grad():
        expected = encoder.model(**ids).last_hidden_state[0]
    assert torch.allclose(full.features[0], expected, atol=5e-3)  # padding included, and it is not zero
    assert full.features[0, int(full.lengths[0]) :].abs().amax(dim=1).min() > 0.1


def test_no_word_of_the_dataset_is_unknown(encoder):
    from itm_lab.scenes.families import sample_split
    from itm_lab.scenes.world import Knobs

    captions = [c.text for m in sample_split(77, 0, 60, Knobs()) for c in m.captions]
    ids = encoder.tokenizer(captions)["input_ids"]
    assert encoder.tokenizer.unk_token_id not in {token for row in ids for token in row}
    rare = encoder.tokenizer("a zebra")["input_ids"]  # letters of the captions are all it has
    assert len(rare) >= 4


def test_it_has_learned_what_goes_together(encoder):
    """The state of a colour word depends on its noun, and "stripy" lies nearer to "striped" than to "two"."""

    def state(caption: str, word: str) -> torch.Tensor:
        batch = bert_captions(split_of([caption]), encoder).batch(np.array([0]), spans=True)
        start = caption.index(word)
        rows = (batch.spans[0, :, 0] >= start) & (batch.spans[0, :, 1] <= start + len(word)) & ~batch.special[0]
        return batch.features[0][rows].mean(dim=0)

    near = torch.cosine_similarity(state("a striped red fish", "striped"), state("a stripy red fish", "stripy"), dim=0)
    far = torch.cosine_similarity(state("a striped red fish", "striped"), state("two red fish", "two"), dim=0)
    assert near > far
    assert not torch.allclose(state("a red fish", "red"), state("a red house", "red"), atol=1e-2)


def test_the_cache_is_used_trusted_and_repaired(encoder, cache, monkeypatch):
    first = bert_captions(split_of(CAPTIONS), encoder)
    assert first.states.dtype == np.float16
    assert {"encoder", "name", "layers", "max_tokens", "captions", "files"} == set(first.manifest)
    before = np.array(first.states)
    calls = []
    original = bert._hidden
    monkeypatch.setattr(bert, "_hidden", lambda *a: calls.append(1) or original(*a))
    again = bert_captions(split_of(CAPTIONS), encoder)
    assert again.folder == first.folder and not calls
    path = first.folder / "states.npy"
    path.write_bytes(path.read_bytes()[:-7])
    assert not is_whole(first.folder)
    repaired = bert_captions(split_of(CAPTIONS), encoder)
    assert calls and is_whole(first.folder) and (repaired.states == before).all()


def test_the_cache_knows_what_decides_the_states(encoder):
    folders = {
        bert_captions(split_of(CAPTIONS), encoder).folder,
        bert_captions(split_of(CAPTIONS[:2]), encoder).folder,
        bert_captions(split_of(CAPTIONS), encoder, layers=(0, -1)).folder,
        bert_captions(split_of(CAPTIONS), encoder, max_tokens=6).folder,
    }
    assert len(folders) == 4


def test_layers_stand_side_by_side_and_long_captions_are_cut(encoder):
    both = bert_captions(split_of(CAPTIONS), encoder, layers=(0, -1))
    last = bert_captions(split_of(CAPTIONS), encoder)
    assert both.feature_dim == 128 and (both.states[:, 64:] == last.states).all()
    short = bert_captions(split_of(CAPTIONS), encoder, max_tokens=6)
    assert short.lengths.max() == 6 and short.special[short.starts[1] - 1]
    endless = bert_captions(split_of(["a red fish " * 60]), encoder)
    assert endless.lengths[0] == encoder.longest


def test_it_stands_where_word_captions_stand(encoder, toy_train):
    texts = bert_captions(toy_train, encoder)
    pairs = PairDataset(toy_train, texts).__getitems__([0, 6])
    assert pairs.texts.features.shape[0] == 2 and pairs.images.ids.tolist() == [0, 1]
    assert pairs.texts.mask.sum(dim=1).tolist() == pairs.texts.lengths.tolist()
    assert len(texts) == toy_train.n_captions
    assert texts.states is not None and texts.__getstate__()["_states"] is None  # workers map the file themselves


def test_any_local_bert_will_do(tmp_path, capfd):
    from transformers import BertConfig, BertModel

    folder = tmp_path / "other"
    config = BertConfig(
        vocab_size=300, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    capfd.readouterr()  # transformers draws a bar when it saves
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).write_text((MINI_FOLDER / name).read_text())
    texts = bert_captions(split_of(CAPTIONS), folder)
    assert texts.feature_dim == 24 and len(texts) == 3


def test_what_cannot_be_had_offline_is_one_clear_error(tmp_path):
    with pytest.raises(ItmError, match=r"no-such-bert-anywhere.*Offline, use 'scenes-mini'"):
        load_text_encoder("no-such-bert-anywhere")
    with pytest.raises(ItmError, match=r"config\.json, model\.safetensors and vocabulary in this folder"):
        load_text_encoder(tmp_path)


@pytest.fixture
def own_bert(tmp_path) -> Path:
    return Path(shutil.copytree(MINI_FOLDER, tmp_path / "own"))


def test_weights_as_pickle_are_not_loaded(own_bert):
    from safetensors.torch import load_file

    torch.save(load_file(own_bert / "model.safetensors"), own_bert / "pytorch_model.bin")
    (own_bert / "model.safetensors").unlink()
    with pytest.raises(ItmError, match=r"own: found no usable BERT .*Weights as pickle \(\*\.bin\) are not loaded"):
        load_text_encoder(own_bert)


def test_code_beside_an_encoder_is_not_run(own_bert, capsys):
    config = json.loads((own_bert / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModel": "mine.M"}}
    (own_bert / "config.json").write_text(json.dumps(config))
    (own_bert / "mine.py").write_text("raise SystemExit('code beside an encoder was run')")
    with pytest.raises(ItmError, match="own: found a model that asks to run code of its own"):
        load_text_encoder(own_bert)
    assert "[y/N]" not in capsys.readouterr().out  # nobody is asked whether to run it


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.txt", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, "half"], ids=["empty", "bytes", "deep", "half"])
def test_a_damaged_encoder_is_one_clear_error(own_bert, name, content, encoder):
    path = own_bert / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    try:
        assert load_text_encoder(own_bert).fingerprint != encoder.fingerprint or name == "tokenizer_config.json"
    except ItmError as error:
        assert str(error).startswith(f"{own_bert}: found") and "\n" not in str(error)
    else:
        assert name != "model.safetensors"


def test_a_full_disk_is_one_clear_error(encoder, cache, monkeypatch):
    """Not SIGBUS, with which a sparse memory map ends."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *where: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(ItmError, match=r"states\.npy: found a full disk, expected .+ GB of free space"):
        bert_captions(split_of(CAPTIONS), encoder)
    assert not list(cache.glob("bert-*/*")) and not list(cache.glob(".bert-*"))


def test_a_write_that_fails_is_one_clear_error(encoder, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("itm_utils.data.text_encoder.np.save", full)
    with pytest.raises(ItmError, match=r"cannot be written \(No space left on device\).+Set ITM_CACHE"):
        bert_captions(split_of(CAPTIONS), encoder)


def test_a_cache_that_is_emptied_before_the_first_batch_is_still_open(encoder, cache):
    texts = bert_captions(split_of(CAPTIONS), encoder)
    sent = pickle.dumps(texts)  # as to a worker that is started anew: it opens the states itself
    shutil.rmtree(cache)
    assert texts.batch(np.array([0])).features.any()
    with pytest.raises(ItmError, match=r"states\.npy: found no such file"):
        pickle.loads(sent).batch(np.array([0]))


@pytest.mark.parametrize("large", [False, True])
def test_zeroed_states_are_made_again(encoder, monkeypatch, large):
    if large:
        monkeypatch.setattr("itm_utils.cache.LARGE", 1000)
        monkeypatch.setattr("itm_utils.cache.BLOCK", 64)
    folder = bert_captions(split_of(CAPTIONS), encoder).folder
    whole = (folder / "states.npy").read_bytes()
    (folder / "states.npy").write_bytes(whole[:-200] + bytes(200))
    assert not is_whole(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    assert not is_whole(folder)
    bert_captions(split_of(CAPTIONS), encoder)
    assert is_whole(folder) and (folder / "states.npy").read_bytes() == whole


@pytest.mark.slow
def test_loading_the_default_is_silent_and_needs_no_network():
    """A socket that cannot be opened would raise."""
    script = (
        "import socket\n"
        "def refuse(*a, **k): raise RuntimeError('network')\n"
        "socket.socket.connect = refuse\n"
        "from itm_utils.data.text_encoder import load_text_encoder\n"
        "print(load_text_encoder().width)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "64", "")


def test_masking_follows_the_recipe():
    torch.manual_seed(0)
    ids = torch.randint(len(SPECIAL), 60, (200, 50))
    ids[:, 0], ids[:, -5:] = SPECIAL.index("[CLS]"), 0
    inputs, labels = mask(ids, 60)
    chosen = labels != -100
    assert not chosen[:, 0].any() and not chosen[:, -5:].any()
    assert (inputs[~chosen] == ids[~chosen]).all() and (labels[chosen] == ids[chosen]).all()
    assert chosen[:, 1:-5].float().mean() == pytest.approx(0.15, abs=0.02)
    hidden = inputs[chosen] == SPECIAL.index("[MASK]")
    assert hidden.float().mean() == pytest.approx(0.8, abs=0.04)
    config = json.loads((MINI_FOLDER / "config.json").read_text())
    assert config["model_type"] == "bert"
