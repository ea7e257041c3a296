"""The dataset on disk: the precomputed format, trust in the cache, the same bytes every time."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from itm_lab.scenes import ScenesSpec, load_scenes, oracle_matrix, scenes_folder
from itm_lab.scenes.build import SHIPPED_SEED, SPLITS
from itm_lab.scenes.cli import app
from itm_lab.scenes.features import NET_SEED, WEIGHTS, WIDTH, load_net, region_features
from itm_lab.scenes.mini_bert import BERT_SEED
from itm_utils.boxes import iou
from itm_utils.cache import cache_root, is_whole, read_manifest
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.text_encoder import MINI_FOLDER
from itm_utils.data.vocabulary import Vocabulary, token_spans
from itm_utils.errors import ItmError

SMALL = ScenesSpec(seed=77, train=24, dev=8, test=12)
TINY = ScenesSpec(seed=78, train=3, dev=1, test=2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder of our own for all tests of this module."""
    before = os.environ.get("ITM_CACHE")
    os.environ["ITM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield Path(os.environ["ITM_CACHE"])
    if before is None:
        del os.environ["ITM_CACHE"]
    else:
        os.environ["ITM_CACHE"] = before


@pytest.fixture(scope="module")
def folder(cache):
    return scenes_folder(SMALL)


def test_the_files_are_those_of_the_precomputed_format(folder):
    for split, size in SMALL.sizes().items():
        opened = open_split(folder, split)
        assert (opened.n_images, opened.n_captions) == (size, 5 * size)
        assert opened.features.shape == (size, SMALL.knobs.regions, WIDTH)
        assert opened.boxes.shape == (size, SMALL.knobs.regions, 4)
        assert opened.sizes.tolist() == [[96, 96]] * size
        assert opened.ids[0] == f"{split}_00000" and len(set(opened.ids)) == size
        assert np.load(folder / f"{split}_ims.npy").dtype == np.float32
        assert np.load(folder / f"{split}_boxes.npy").dtype == np.float32
        assert np.load(folder / f"{split}_sizes.npy").dtype == np.int32
    train = open_split(folder, "train")
    vocabulary = Vocabulary.load(folder / "scenes_vocab.json")
    batch = PairDataset(train, WordCaptions(train, vocabulary)).__getitems__([0, 7, 30])
    assert batch.images.ids.tolist() == [0, 1, 6]


def test_grounding_names_characters_words_and_boxes(folder):
    data = load_scenes("test", SMALL)
    records = json.loads((folder / "test_grounding.json").read_text())
    assert len(records) == len(data.captions) == 5 * SMALL.test
    for caption, record, image in zip(data.captions, records, data.owner, strict=True):
        words = token_spans(caption.text)
        for phrase in record["phrases"]:
            start, end = phrase["chars"]
            assert caption.text[start:end] == phrase["text"]
            first, last = phrase["tokens"]
            assert (words[first][0], words[last - 1][1]) == (start, end)
            assert phrase["boxes"] == data.boxes[image][phrase["objects"]].tolist()
            assert len(phrase["boxes"]) == len(phrase["objects"]) > 0


def test_what_is_loaded_is_what_was_made(folder):
    from itm_lab.scenes.draw import draw, toy_boxes
    from itm_lab.scenes.families import sample_split

    for number, split in enumerate(SPLITS):
        data = load_scenes(split, SMALL)
        made = sample_split(SMALL.seed, number, SMALL.sizes()[split], SMALL.knobs)
        assert [m.scene for m in made] == data.scenes
        assert [c for m in made for c in m.captions] == data.captions
        assert [m.twins for m in made] == data.twins
        assert (draw(data.scenes[0]) == data.pixels[0]).all()
        assert (toy_boxes(data.scenes[0]) == data.boxes[0]).all()


def test_the_oracle_knows_the_owners(folder):
    truth = oracle_matrix("test", SMALL)
    data = load_scenes("test", SMALL)
    assert truth.shape == (SMALL.test, 5 * SMALL.test) and truth.dtype == bool
    assert truth[data.owner, np.arange(len(data.owner))].all()
    for image, twins in enumerate(data.twins):
        for twin in twins:
            assert not truth[twin, data.owner == image].any()
    with pytest.raises(ValueError, match="read-only"):
        truth[0, 0] = False


def test_features_are_what_the_network_sees(folder):
    split = open_split(folder, "dev")
    data = load_scenes("dev", SMALL)
    again = region_features(load_net(), np.asarray(data.pixels), split.region_boxes(np.arange(SMALL.dev)))
    assert np.allclose(again, split.regions(np.arange(SMALL.dev)), atol=1e-4)
    found = [
        (iou(b, t) > 0.5).any(axis=0).mean() for b, t in zip(split.region_boxes(np.arange(8)), data.boxes, strict=True)
    ]
    assert np.mean(found) > 0.75


def test_seeds_are_kept_apart():
    design, tests = {1, 5}, {77, 78, 79, 80, 81}
    assert len({SHIPPED_SEED, NET_SEED, NET_SEED + 1, BERT_SEED} | design | tests) == 4 + 7


def test_weights_are_small():
    assert WEIGHTS.stat().st_size <= 1_000_000
    assert sum(p.stat().st_size for p in MINI_FOLDER.iterdir()) <= 4_000_000


# -- trust -----------------------------------------------------------------------------------------------------


def damage_a_byte(folder: Path) -> None:
    path = folder / "train_ims.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / "test_pixels.npy"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "one bit": damage_a_byte,
    "cut short": cut_short,
    "a file is gone": lambda folder: (folder / "dev_caps.txt").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": lambda folder: (folder / "manifest.json").write_text('{"files": {'),
    "another manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_noticed_and_built_again(cache, damage, caplog):
    folder = scenes_folder(TINY)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder)
    assert not is_whole(folder)
    assert scenes_folder(TINY) == folder and is_whole(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "damaged" in caplog.text


def test_a_killed_build_leaves_nothing_behind(cache, monkeypatch):
    spec = ScenesSpec(seed=79, train=2, dev=1, test=1)
    leftover = cache / f".{spec.folder_name()}-killed"
    leftover.mkdir()
    (leftover / "train_ims.npy").write_bytes(b"half")
    monkeypatch.setattr("itm_lab.scenes.build._write_split", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        scenes_folder(spec)
    assert not list(cache.glob(f"*{spec.folder_name()}*/")) and not leftover.exists()


def _fingerprint(spec: ScenesSpec, queue) -> None:
    folder = scenes_folder(spec)
    queue.put((read_manifest(folder)["fingerprint"], read_manifest(folder)["files"]))


def test_two_processes_at_once_build_it_once(cache):
    spec = ScenesSpec(seed=77, train=3, dev=1, test=2)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    queue = context.Queue()
    workers = [context.Process(target=_fingerprint, args=(spec, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    seen = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert seen[0] == seen[1] and is_whole(cache / spec.folder_name())


def test_same_seed_same_bytes_in_another_process(cache, tmp_path):
    """Every file, features included: on one machine even the last digit is the same."""
    here = read_manifest(scenes_folder(TINY))
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from itm_lab.scenes import ScenesSpec, scenes_folder\n"
        "print(scenes_folder(ScenesSpec(seed=78, train=3, dev=1, test=2)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ITM_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == "", "no progress bar where nobody watches"
    assert read_manifest(Path(run.stdout.strip())) == here


def test_the_fingerprint_follows_what_decides_the_data(cache):
    names = {
        spec.folder_name()
        for spec in (
            TINY,
            ScenesSpec(seed=80, train=3, dev=1, test=2),
            ScenesSpec(seed=78, train=4, dev=1, test=2),
            ScenesSpec(),
        )
    }
    assert len(names) == 4
    assert TINY.folder_name() == ScenesSpec(seed=78, train=3, dev=1, test=2).folder_name()


# -- bad input and the command ---------------------------------------------------------------------------------


def test_bad_input_is_one_clear_error(cache, tmp_path, monkeypatch):
    with pytest.raises(ItmError, match="split 'val', expected one of train, dev, test"):
        load_scenes("val", TINY)
    with pytest.raises(ItmError, match="0 images, expected at least 1"):
        scenes_folder(ScenesSpec(train=0))
    with pytest.raises(ItmError, match="itm scenes train-regions"):
        load_net(tmp_path / "none.safetensors")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ITM_CACHE", str(blocked / "below"))
    with pytest.raises(ItmError, match="ITM_CACHE"):
        scenes_folder(ScenesSpec(seed=81, train=1, dev=1, test=1))


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("ITM_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("ITM_CACHE")
    assert cache_root().name == "itm_utils"


def test_the_command_builds_and_shows(cache, tmp_path, monkeypatch):
    import itm_lab.scenes.build as build

    monkeypatch.setattr(build, "ScenesSpec", lambda: SMALL)  # the full dataset would take too long here
    run = CliRunner().invoke(app, ["build"])
    fingerprints = [open_split(scenes_folder(SMALL), name).identity()["fingerprint"][:16] for name in SPLITS]
    assert run.exit_code == 0 and all(found in run.output for found in fingerprints)
    out = tmp_path / "family.png"
    run = CliRunner().invoke(app, ["show", "3", "--split", "test", "--out", str(out)])
    assert run.exit_code == 0, run.output
    assert out.stat().st_size > 20_000 and "true of 1" in run.output
    run = CliRunner().invoke(app, ["show", "900"])
    assert isinstance(run.exception, ItmError) and "0 to 11" in str(run.exception)
