"""The fingerprint of data: every byte of every file counts, nothing beside the data is believed, nothing is read twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from toy_dataset import write_toy_dataset

from itm_lab.scenes import ScenesSpec, scenes_folder
from itm_lab.scenes import identity as scenes_identity
from itm_utils import digests
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.digests import file_digest
from itm_utils.errors import ItmError
from itm_utils.models.keeping_score import InBatchSoftmax, MeanPool
from itm_utils.training import TrainConfig, train

IMAGES = 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = write_toy_dataset(tmp_path / "toy", {"train": IMAGES, "dev": 5, "test": 5})
    np.save(root / "train_owners.npy", np.repeat(np.arange(IMAGES), 5))
    age(root)
    return root


def age(folder: Path) -> None:
    """Files that were written a minute ago; notes of younger ones are not kept."""
    for path in folder.iterdir():
        back = path.stat().st_mtime_ns - 60 * 10**9
        os.utime(path, ns=(back, back))


def fingerprint(root: Path, split: str = "train") -> str:
    return open_split(root, split).identity()["fingerprint"]


def change_row(path: Path, row: int) -> None:
    """The last number of one row, a little."""
    array = np.load(path)
    array.reshape(len(array), -1)[row, -1] += 1
    np.save(path, array)


@pytest.mark.parametrize("kind", ["ims", "boxes", "sizes"])
@pytest.mark.parametrize("row", range(IMAGES))
def test_every_changed_row_of_an_array_changes_the_fingerprint(data: Path, kind: str, row: int) -> None:
    """The old fingerprint read five rows: 23 of 40 changed images had the old fingerprint."""
    before = fingerprint(data)
    change_row(data / f"train_{kind}.npy", row)
    assert fingerprint(data) != before


def test_every_changed_word_name_and_owner_changes_the_fingerprint(data: Path) -> None:
    known = {fingerprint(data)}
    for name, old, new in (("train_caps.txt", b"red", b"pink"), ("train_ids.txt", b"00007", b"00107")):
        path = data / name
        path.write_bytes(path.read_bytes().replace(old, new, 1))
        known.add(fingerprint(data))
    owners = np.repeat(np.arange(IMAGES), 5)
    owners[5] = 0  # the sixth caption speaks of the first image
    np.save(data / "train_owners.npy", owners)
    known.add(fingerprint(data))
    (data / "train_boxes.npy").unlink()
    known.add(fingerprint(data))
    assert len(known) == 5


def test_a_fingerprint_is_that_of_its_own_split(data: Path) -> None:
    before = fingerprint(data, "test")
    change_row(data / "train_ims.npy", 3)
    assert fingerprint(data, "test") == before


@pytest.mark.parametrize("claim", [{"fingerprint": "0" * 64}, {}, {"files": {}, "fingerprint": 1}])
def test_a_manifest_beside_the_data_changes_nothing(data: Path, claim: dict) -> None:
    before = open_split(data, "train").identity()
    (data / "manifest.json").write_text(json.dumps(claim))
    assert open_split(data, "train").identity() == before


def test_captions_that_were_changed_in_memory_are_other_captions(data: Path) -> None:
    split = open_split(data, "train")
    before = split.identity()["fingerprint"]
    split.captions[7] = "a cat"
    assert split.identity()["fingerprint"] != before


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that were read to be digested."""
    names: list[str] = []
    read = digests._read
    monkeypatch.setattr(digests, "_read", lambda path, size: names.append(path.name) or read(path, size))
    yield names


def test_the_second_time_nothing_is_read(data: Path, opened: list[str]) -> None:
    first = fingerprint(data)
    assert sorted(opened) == [f"train_{kind}" for kind in ("boxes.npy", "caps.txt", "ids.txt", "ims.npy", "owners.npy", "sizes.npy")]  # fmt: skip
    opened.clear()
    assert fingerprint(data) == first and not opened


@pytest.mark.parametrize("how", ["time", "size", "content with its old time"])
def test_a_file_that_changed_is_read_again(data: Path, opened: list[str], how: str) -> None:
    path = data / "train_caps.txt"
    before, stat = file_digest(path), path.stat()
    opened.clear()
    if how == "time":
        os.utime(path)
    elif how == "size":
        path.write_bytes(path.read_bytes() + b"\n")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        path.write_bytes(path.read_bytes().replace(b"red", b"rad", 1))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file_digest(path) == before) == (how == "time")
    assert opened == ["train_caps.txt"]


def test_a_file_that_was_just_written_is_not_remembered(data: Path, opened: list[str]) -> None:
    """It may be written again within one tick of the clock."""
    path = data / "train_caps.txt"
    path.write_bytes(b"one\n")
    os.utime(path, ns=(2**62, path.stat().st_mtime_ns))
    first = file_digest(path)
    path.write_bytes(b"two\n")
    assert file_digest(path) != first and opened == ["train_caps.txt"] * 2


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"state": 1}', "\x00"])
def test_a_damaged_note_is_no_digest(data: Path, own_cache: Path, note: str) -> None:
    before = file_digest(data / "train_ims.npy")
    (found,) = (own_cache / "digests").iterdir()
    found.write_text(note)
    assert file_digest(data / "train_ims.npy") == before


def test_only_so_many_files_are_remembered(data: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "NOTES", 4)
    for path in sorted(data.iterdir()):
        file_digest(path)
    assert len(list((own_cache / "digests").iterdir())) == 4


def test_without_a_cache_files_are_read_every_time(data: Path, own_cache: Path, opened: list[str]) -> None:
    own_cache.write_text("a file in the way")
    assert file_digest(data / "train_ims.npy") == file_digest(data / "train_ims.npy")
    assert opened == ["train_ims.npy"] * 2


def test_it_is_blake2_of_all_bytes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCK", 1000)
    path = data / "train_ims.npy"
    told = (
        subprocess.run(["b2sum", "--length=256", path], capture_output=True, text=True)
        if shutil.which("b2sum")
        else None
    )
    if told is not None:
        assert told.stdout.split()[0] == file_digest(path)
    with pytest.raises(ItmError, match="a file that cannot be read"):
        file_digest(data / "none.npy")


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    "change",
    [
        lambda root: change_row(root / "train_ims.npy", 17),
        lambda root: change_row(root / "train_boxes.npy", 17),
        lambda root: (root / "train_caps.txt").write_bytes(
            (root / "train_caps.txt").read_bytes().replace(b"red", b"rad")
        ),
    ],
)
def test_a_run_refuses_to_go_on_with_other_data_under_its_path(data: Path, tmp_path: Path, change: Callable) -> None:
    def fit(epochs: int) -> None:
        split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
        model = MeanPool(len(vocabulary), split.feature_dim, 4)
        config = TrainConfig(epochs=epochs, batch_size=50, device="cpu", checkpoint_every=1)
        train(model, InBatchSoftmax(), PairDataset(split, WordCaptions(split, vocabulary)), config, tmp_path / "run")

    fit(1)
    fit(1)
    change(data)
    with pytest.raises(ItmError, match="found dataset = "):
        fit(1)


# ---------------------------------------------------------------------------------------------- Scenes


@pytest.fixture
def scenes(own_cache: Path) -> Path:
    return scenes_folder(ScenesSpec(seed=79, train=3, dev=1, test=4))


def test_last_digits_of_features_do_not_identify_scenes(scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor's features: the fingerprint stays, once they are known to be those of the pixels."""
    before = open_split(scenes, "test").identity()
    assert before["name"] == "scenes"
    path = scenes / "test_ims.npy"
    np.save(path, np.load(path) * np.float32(1 + 1e-6))
    assert open_split(scenes, "test").identity() == before
    monkeypatch.setattr(scenes_identity, "check_features", lambda split: 1 / 0)  # never again
    assert open_split(scenes, "test").identity() == before


@pytest.mark.parametrize("image", range(4))
def test_features_of_scenes_that_its_pixels_do_not_give_are_refused(scenes: Path, image: int) -> None:
    change_row(scenes / "test_ims.npy", image)
    with pytest.raises(
        ItmError, match=f"test_ims.npy: found other features in row {image}, expected those of its pixels"
    ):
        open_split(scenes, "test").identity()


@pytest.mark.parametrize("kind", ["boxes", "sizes"])
def test_what_is_the_same_on_every_machine_identifies_scenes(scenes: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(scenes_identity, "check_features", lambda split: None)
    before = fingerprint(scenes, "test")
    change_row(scenes / f"test_{kind}.npy", 2)
    assert fingerprint(scenes, "test") != before


def test_pixels_and_the_frozen_network_identify_scenes(scenes: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scenes_identity, "check_features", lambda split: None)
    known = {fingerprint(scenes, "test")}
    change_row(scenes / "test_pixels.npy", 3)
    known.add(fingerprint(scenes, "test"))
    other = tmp_path / "regions.safetensors"
    other.write_bytes(scenes_identity.WEIGHTS.read_bytes() + b" ")
    monkeypatch.setattr(scenes_identity, "WEIGHTS", other)
    known.add(fingerprint(scenes, "test"))
    manifest = scenes / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"fingerprint": "0" * 64}))
    known.add(fingerprint(scenes, "test"))  # a claim: changes nothing
    assert len(known) == 3


def test_the_page_says_what_the_benchmark_measured() -> None:
    root = Path(__file__).resolve().parents[2]
    found = json.loads((root / "benchmarks/results/digests.json").read_text(encoding="utf-8"))
    page = (root / "book/datasets.md").read_text(encoding="utf-8")
    assert f"at {found['bytes_per_second'] / 1e9:.2f} GB per second" in page
    assert f"take {found['coco_seconds']:.0f} s of it" in page
    assert found["again_seconds"] < 1e-3
