"""The precomputed format: what is read, what is refused, and what it costs."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from itm_lab.photos.search import image_of_id
from itm_utils.data import precomp
from itm_utils.data.precomp import FeatureFile, open_split, read_captions
from itm_utils.errors import ItmError


def write(
    root: Path, rows: int = 4, captions: int | None = None, shape: tuple[int, ...] = (3, 5), dtype=np.float32
) -> Path:
    root.mkdir(exist_ok=True)
    features = np.random.default_rng(0).normal(size=(rows, *shape)).astype(dtype)
    np.save(root / "dev_ims.npy", features)
    lines = [f"caption number {n}" for n in range(5 * rows if captions is None else captions)]
    (root / "dev_caps.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_five_captions_a_row(tmp_path: Path) -> None:
    split = open_split(write(tmp_path), "dev")
    assert (split.n_images, split.n_captions, split.feature_dim) == (4, 20, 5)
    assert split.owner.tolist() == [n // 5 for n in range(20)]
    features = np.load(tmp_path / "dev_ims.npy")
    np.testing.assert_array_equal(split.regions(np.array([3, 0, 3])), features[[3, 0, 3]])


def test_files_that_repeat_every_image_five_times(tmp_path: Path) -> None:
    write(tmp_path, rows=20, captions=20)
    once = np.random.default_rng(1).normal(size=(4, 3, 5)).astype(np.float32)
    np.save(tmp_path / "dev_ims.npy", np.repeat(once, 5, axis=0))
    np.save(tmp_path / "dev_sizes.npy", np.arange(1, 41).reshape(20, 2))
    (tmp_path / "dev_ids.txt").write_text("\n".join(f"p{n // 5}" for n in range(20)))
    split = open_split(tmp_path, "dev")
    assert (split.n_images, split.repeat) == (4, 5)
    assert split.owner.tolist() == [n // 5 for n in range(20)]
    np.testing.assert_array_equal(split.regions(np.arange(4)), once)
    assert image_of_id(split) == {"p0": 0, "p1": 1, "p2": 2, "p3": 3}
    assert len(split.sizes) == 4


def test_one_caption_an_image_is_no_repetition(tmp_path: Path) -> None:
    split = open_split(write(tmp_path, rows=20, captions=20), "dev")
    assert (split.n_images, split.repeat) == (20, 1)


def last_bits(rows: np.ndarray) -> np.ndarray:
    rows[1::5] *= 1 + 1e-7
    return rows


def half_precision(rows: np.ndarray) -> np.ndarray:
    rows[2::5] = rows[2::5].astype(np.float16)
    return rows


@pytest.mark.parametrize("change", [last_bits, half_precision])
def test_copies_that_are_only_almost_equal_are_not_taken_for_pictures(tmp_path: Path, change) -> None:
    write(tmp_path, rows=20, captions=20)
    once = np.maximum(np.random.default_rng(1).normal(size=(4, 3, 5)), 0).astype(np.float32)
    np.save(tmp_path / "dev_ims.npy", change(np.repeat(once, 5, axis=0)))
    with pytest.raises(ItmError, match=r"0 of 4 groups of five equal, 4 almost, .* add dev_owners\.npy"):
        open_split(tmp_path, "dev")
    np.save(tmp_path / "dev_owners.npy", np.arange(20))  # who says that they are images is believed
    assert open_split(tmp_path, "dev").n_images == 20


def test_names_in_fives_beside_rows_that_differ(tmp_path: Path) -> None:
    write(tmp_path, rows=20, captions=20)
    (tmp_path / "dev_ids.txt").write_text("".join(f"{n // 5}\n" for n in range(20)))
    with pytest.raises(ItmError, match=r"dev_ids\.txt: found every name five times \(0 in lines 1 to 5\)"):
        open_split(tmp_path, "dev")
    (tmp_path / "dev_ids.txt").write_text("".join(f"{n}\n" for n in range(20)))
    assert open_split(tmp_path, "dev").ids[-1] == "19"


def write_boxes(root: Path, repeat: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Boxes (i, r, 4) as shares and sizes (i, 2) of the images that :func:`write` makes."""
    rng = np.random.default_rng(2)
    corner = rng.uniform(0, 0.5, size=(4, 3, 2))
    shares = np.concatenate([corner, corner + rng.uniform(0, 0.5, size=(4, 3, 2))], axis=2).astype(np.float32)
    shares[0, 0] = 0, 0, 1, np.float32(1.0000002)  # the whole image, rounded
    sizes = rng.integers(100, 640, size=(4, 2))
    np.save(root / "dev_boxes.npy", np.repeat(shares, repeat, axis=0))
    np.save(root / "dev_sizes.npy", np.repeat(sizes, repeat, axis=0))
    return shares, sizes


@pytest.mark.parametrize("repeat", [1, 5])
def test_boxes_as_shares_of_the_sides_are_read_as_pixels(tmp_path: Path, repeat: int) -> None:
    write(tmp_path, captions=20)
    np.save(tmp_path / "dev_ims.npy", np.repeat(np.load(tmp_path / "dev_ims.npy"), repeat, axis=0))
    shares, sizes = write_boxes(tmp_path, repeat)
    pixels = shares * np.concatenate([sizes, sizes], axis=1)[:, None]
    split, some = open_split(tmp_path, "dev"), np.array([3, 0, 2])
    assert split.box_shares and split.region_boxes(some).dtype == np.float32
    np.testing.assert_allclose(split.region_boxes(some), pixels[some], rtol=1e-6)
    np.testing.assert_allclose(split.first(2).region_boxes(np.array([1])), pixels[1:2], rtol=1e-6)
    np.testing.assert_array_equal(split.region_boxes(some), split.region_boxes(some))  # each time from the file
    (tmp_path / "dev_sizes.npy").unlink()
    alone = open_split(tmp_path, "dev")
    np.testing.assert_array_equal(alone.region_boxes(some), shares[some])  # nobody knows how large a side is
    assert alone.box_shares


def test_boxes_in_pixels_and_codes_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path)
    write_boxes(tmp_path)
    boxes = np.tile(np.float32([0, 0, 0.5, 0.5]), (4, 3, 1))
    boxes[3, 2] = 0, 0, 90, 60  # one box says that the others are small, not shares
    np.save(tmp_path / "dev_boxes.npy", boxes)
    split = open_split(tmp_path, "dev")
    np.testing.assert_array_equal(split.region_boxes(np.arange(4)), boxes)
    np.save(tmp_path / "dev_boxes.npy", np.full((4, 3, 6), 0.5))
    coded = open_split(tmp_path, "dev")
    assert not split.box_shares and not coded.box_shares
    assert (coded.region_boxes(np.arange(4)) == 0.5).all()


def test_captions_per_image_is_data(tmp_path: Path) -> None:
    write(tmp_path, rows=3, captions=18)
    owner = np.repeat([0, 1, 2], [5, 6, 7])
    np.save(tmp_path / "dev_owners.npy", owner)
    split = open_split(tmp_path, "dev")
    assert split.n_images == 3
    np.testing.assert_array_equal(split.owner, owner)
    assert split.first(2).n_captions == 11


def test_a_dev_split_of_1014_images_is_read_whole_and_can_be_cut(tmp_path: Path) -> None:
    split = open_split(write(tmp_path, rows=1014, shape=(1, 2)), "dev")
    assert (split.n_images, split.n_captions) == (1014, 5070)
    cut = split.first(1000)
    assert (cut.n_images, cut.n_captions, cut.owner[-1]) == (1000, 5000, 999)


def test_single_vectors_count_as_one_region(tmp_path: Path) -> None:
    split = open_split(write(tmp_path, shape=(7,)), "dev")
    assert split.regions(np.array([1, 2])).shape == (2, 1, 7)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_precisions_become_float32(tmp_path: Path, dtype) -> None:
    assert open_split(write(tmp_path, dtype=dtype), "dev").regions(np.array([0])).dtype == np.float32


def test_captions_are_text_from_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "dev_caps.txt"
    path.write_bytes("\ufeffA man’s café\n  two dogs\u2028here \n".encode())
    assert read_captions(path) == ["A man’s café", "two dogs\u2028here"]


@pytest.mark.parametrize(
    ("content", "captions"),
    [
        (b"a dog\r and a cat\ntwo dogs\n", ["a dog\r and a cat", "two dogs"]),
        (b"a dog\r and a cat\r\ntwo dogs\r\n", ["a dog\r and a cat", "two dogs"]),
        (b"a dog\rtwo dogs\r", ["a dog", "two dogs"]),  # every line of an old Mac ends so
    ],
)
def test_a_carriage_return_within_a_line_ends_none(tmp_path: Path, content: bytes, captions: list[str]) -> None:
    (tmp_path / "dev_caps.txt").write_bytes(content)
    assert read_captions(tmp_path / "dev_caps.txt") == captions


def test_a_copy_for_a_worker_does_not_carry_the_features(tmp_path: Path) -> None:
    split = open_split(write(tmp_path, rows=2000, shape=(10, 10)), "dev")
    sent = pickle.dumps(split.features)
    assert len(sent) < 2000
    np.testing.assert_array_equal(pickle.loads(sent).rows(np.array([7])), split.features.rows(np.array([7])))


def broken(tmp_path: Path, how: str) -> None:
    """Damage one thing in a good dataset."""
    write(tmp_path)
    if how == "no features":
        (tmp_path / "dev_ims.npy").unlink()
    elif how == "no captions":
        (tmp_path / "dev_caps.txt").unlink()
    elif how == "captions":
        write(tmp_path, captions=19)
    elif how == "empty line":
        lines = [f"caption {n}" for n in range(20)]
        lines[12] = "  "
        (tmp_path / "dev_caps.txt").write_text("\n".join(lines))
    elif how == "bytes":
        (tmp_path / "dev_caps.txt").write_text("\n".join(repr(f"a man {n}".encode()) for n in range(20)))
    elif how == "latin-1":
        (tmp_path / "dev_caps.txt").write_bytes("caf\xe9\n".encode("latin-1") * 20)
    elif how == "dtype":
        write(tmp_path, dtype=np.int64)
    elif how == "rank":
        write(tmp_path, shape=(3, 5, 2))
    elif how == "truncated":
        content = (tmp_path / "dev_ims.npy").read_bytes()
        (tmp_path / "dev_ims.npy").write_bytes(content[:-40])
    elif how == "no npy":
        (tmp_path / "dev_ims.npy").write_text("hello")
    elif how == "empty":
        (tmp_path / "dev_ims.npy").write_bytes(b"")
    elif how == "archive":
        np.savez(tmp_path / "a.npz", a=np.zeros(3), b=np.zeros(3))
        (tmp_path / "a.npz").rename(tmp_path / "dev_ims.npy")
    elif how == "empty owners":
        (tmp_path / "dev_owners.npy").write_bytes(b"")
    elif how == "garbage sizes":
        (tmp_path / "dev_sizes.npy").write_text("hello")
    elif how == "latin-1 ids":
        (tmp_path / "dev_ids.txt").write_bytes("\xe9\n".encode("latin-1") * 4)
    elif how == "boxes":
        np.save(tmp_path / "dev_boxes.npy", np.zeros((4, 2, 4)))
    elif how == "sizes":
        np.save(tmp_path / "dev_sizes.npy", np.zeros((3, 2)))
    elif how == "ids":
        (tmp_path / "dev_ids.txt").write_text("a\nb\n")
    elif how == "owners":
        np.save(tmp_path / "dev_owners.npy", np.array([0] * 10 + [2] * 10))
    elif how.startswith("shape "):
        about = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {how.removeprefix('shape ')}, }}\n".encode()
        (tmp_path / "dev_ims.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(about)) + about + bytes(99))
    elif how == "open brackets":
        (tmp_path / "dev_ims.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 16)
    elif how == "no regions":
        np.save(tmp_path / "dev_ims.npy", np.zeros((4, 0, 5)))
    elif how == "words as sizes":
        np.save(tmp_path / "dev_sizes.npy", np.array([["wide", "high"]] * 4))
    elif how == "NaN as sizes":
        np.save(tmp_path / "dev_sizes.npy", np.full((4, 2), np.nan))
    elif how == "empty id":
        (tmp_path / "dev_ids.txt").write_text("a\n\nb\nc\n")
    elif how == "folder of ids":
        (tmp_path / "dev_ids.txt").mkdir()
    elif how == "pipe":
        (tmp_path / "dev_caps.txt").unlink()
        os.mkfifo(tmp_path / "dev_caps.txt")


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning beside the error would be a second thing to read
@pytest.mark.parametrize(
    ("how", "file", "message"),
    [
        ("no features", "dev_ims.npy", "no such file"),
        ("no captions", "dev_caps.txt", "no such file"),
        ("captions", "dev_caps.txt", "19 captions for 4 feature rows"),
        ("empty line", "dev_caps.txt", "empty caption in line 13"),
        ("bytes", "dev_caps.txt", "printed bytes"),
        ("latin-1", "dev_caps.txt", "not UTF-8"),
        ("dtype", "dev_ims.npy", "int64"),
        ("rank", "dev_ims.npy", r"shape \(4, 3, 5, 2\)"),
        ("truncated", "dev_ims.npy", "damaged"),
        ("no npy", "dev_ims.npy", "damaged"),
        ("empty", "dev_ims.npy", "damaged"),
        ("archive", "dev_ims.npy", "an archive of 2 arrays"),
        ("empty owners", "dev_owners.npy", "damaged"),
        ("garbage sizes", "dev_sizes.npy", "damaged"),
        ("latin-1 ids", "dev_ids.txt", "not UTF-8"),
        ("boxes", "dev_boxes.npy", r"\(4, 2\)"),
        ("sizes", "dev_sizes.npy", r"\(3, 2\)"),
        ("ids", "dev_ids.txt", "2 names"),
        ("owners", "dev_owners.npy", "jump"),
        (f"shape ({10**16}, 36, 2048)", "dev_ims.npy", "damaged"),
        (f"shape ({10**30}, 36, 2048)", "dev_ims.npy", "damaged"),
        ("shape (-4, 3, 5)", "dev_ims.npy", "damaged"),
        ("open brackets", "dev_ims.npy", "damaged"),
        ("no regions", "dev_ims.npy", r"shape \(4, 0, 5\), expected features with at least one number"),
        ("words as sizes", "dev_sizes.npy", "<U4 that are no finite numbers"),
        ("NaN as sizes", "dev_sizes.npy", "float64 that are no finite numbers"),
        ("empty id", "dev_ids.txt", "an empty line 2"),
        ("folder of ids", "dev_ids.txt", "found a folder"),
        ("pipe", "dev_caps.txt", "neither a file nor a folder"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, how: str, file: str, message: str) -> None:
    broken(tmp_path, how)
    with pytest.raises(ItmError, match=message) as caught:
        open_split(tmp_path, "dev")
    assert file in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.fixture(params=[1, 10**9], ids=["one row at a time", "all rows at once"])
def long_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which rows are read, whatever their length."""
    monkeypatch.setattr(precomp, "LONG_ROW", request.param)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_is_found_in_the_batch_that_reads_it(tmp_path: Path, value: float, long_row: None) -> None:
    write(tmp_path)
    features = np.load(tmp_path / "dev_ims.npy")
    features[2, 1, 4] = value
    np.save(tmp_path / "dev_ims.npy", features)
    split = open_split(tmp_path, "dev")
    split.regions(np.array([0, 3]))
    with pytest.raises(ItmError, match=r"dev_ims\.npy: found a NaN or infinity in row 2"):
        split.regions(np.array([3, 2]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_keep_the_order_asked_for_and_may_repeat(tmp_path: Path, dtype: type, long_row: None) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 3, 4)).astype(dtype)
    np.save(tmp_path / "rows.npy", rows)
    file = FeatureFile(tmp_path / "rows.npy", (3,), "features")
    for index in (np.array([5, 0, 5, 6, 1, 1]), np.array([], dtype=np.int64)):
        found = file.rows(index)
        np.testing.assert_array_equal(found, rows[index].astype(np.float32))
        assert found.flags.writeable


def test_large_finite_numbers_are_no_infinity(tmp_path: Path, long_row: None) -> None:
    rows = np.full((3, 2), 3e38, dtype=np.float32)  # their squares are beyond float32
    np.save(tmp_path / "rows.npy", rows)
    found = FeatureFile(tmp_path / "rows.npy", (2,), "features").rows(np.arange(3))
    np.testing.assert_array_equal(found, rows)


def test_a_number_beyond_float32_is_an_infinity(tmp_path: Path, long_row: None) -> None:
    np.save(tmp_path / "rows.npy", np.array([[1.0, 2.0], [1.0, 1e300]]))
    with pytest.raises(ItmError, match="infinity in row 1"):
        FeatureFile(tmp_path / "rows.npy", (2,), "features").rows(np.arange(2))


def test_identity_tells_datasets_and_cuts_apart(tmp_path: Path) -> None:
    split = open_split(write(tmp_path), "dev")
    other = open_split(write(tmp_path / "other", rows=5), "dev")
    assert split.identity()["fingerprint"] != other.identity()["fingerprint"]
    assert split.identity() == open_split(tmp_path, "dev").identity()
    assert split.first(2).identity()["split"] == "dev, first 2"
    assert split.first(2).identity()["fingerprint"] != split.identity()["fingerprint"]


def test_unknown_split_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ItmError, match="a split of this folder: dev"):
        open_split(write(tmp_path), "testall")
    with pytest.raises(ItmError, match="no such folder"):
        open_split(tmp_path / "nowhere", "dev")


def test_two_pictures_of_one_name(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "dev_ids.txt").write_text("a\nb\na\nc\n")
    with pytest.raises(ItmError, match="a twice"):
        image_of_id(open_split(tmp_path, "dev"))


def test_names_may_stand_once_a_caption_as_in_the_public_files(tmp_path: Path) -> None:
    write(tmp_path)
    names = [f"{n // 5}" for n in range(20)]
    (tmp_path / "dev_ids.txt").write_text("\n".join(names))
    assert open_split(tmp_path, "dev").ids == ["0", "1", "2", "3"]
    (tmp_path / "dev_ids.txt").write_text("\n".join([*names[:7], "3", *names[8:]]))
    with pytest.raises(ItmError, match="3 in line 8, between the captions of 1"):
        open_split(tmp_path, "dev")


MEASURE = """
import resource, sys
import numpy as np
from itm_utils.data.precomp import open_split

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

before = resident()
split = open_split(sys.argv[1], "train")
rows = np.random.default_rng(0).choice(split.n_images, 128, replace=False)
batch = split.regions(rows)
assert batch.shape == (128, 36, 2048)
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_ten_gigabyte_file_costs_its_rows_only(tmp_path: Path) -> None:
    rows = 10 * 10**9 // (36 * 2048 * 4)
    np.lib.format.open_memmap(tmp_path / "train_ims.npy", mode="w+", dtype=np.float32, shape=(rows, 36, 2048))
    (tmp_path / "train_caps.txt").write_text("a dog\n" * (5 * rows))
    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 150, "megabytes of resident memory"
