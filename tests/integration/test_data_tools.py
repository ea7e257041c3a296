"""``itm data``: readers, conversion, checks and downloads, on small files made here, whole and damaged."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner, Result

from itm_lab.cli import Group
from itm_lab.data import cross_split_checks as between
from itm_lab.data import fetch as fetching
from itm_lab.data import registry as known
from itm_lab.data import scan
from itm_lab.data.bottom_up import convert
from itm_lab.data.cli import app
from itm_lab.data.coco_judgements import _numbers
from itm_lab.data.karpathy import coco_file_name, image_key, read_karpathy
from itm_lab.data.registry import Known
from itm_lab.data.selection import Wanted, wanted_from_karpathy
from itm_lab.data.tsv import LONGEST as TOO_LONG
from itm_lab.data.tsv import SIX
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError

SCRIPT = Path(__file__).resolve().parents[1] / "killed_convert.py"
REGIONS, WIDTH, SIZE = 3, 4, (64, 48)
CAPTIONS = [f"a {colour} {thing} ." for colour in ("red", "blue") for thing in ("cube", "ball", "cone", "cup", "star")]
ITM = typer.Typer(cls=Group)
ITM.add_typer(app, name="data")


@ITM.callback()
def itm_itself() -> None:
    """As the command is registered: below ``itm``, which shows errors as one line."""


def itm(*words: object) -> Result:
    return CliRunner().invoke(ITM, ["data", *map(str, words)], env={"COLUMNS": "200"})


# -- small files -----------------------------------------------------------------------------------------------------


def regions_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (r, d) and boxes (r, 4) of an image."""
    rng = np.random.default_rng(number)
    corner = rng.uniform(0, 20, size=(REGIONS, 2))
    return rng.normal(size=(REGIONS, WIDTH)), np.concatenate(
        [corner, corner + rng.uniform(1, 20, (REGIONS, 2))], axis=1
    )


def encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def tsv_row(name: object, number: int | None = None, ten: bool = False, **other: object) -> list[str]:
    """A line of a TSV file as its columns. other: columns that say something else."""
    features, boxes = regions_of(int(image_key(str(name))) if number is None else number)
    row = {"id": name, "w": SIZE[0], "h": SIZE[1], "n": REGIONS, "boxes": encoded(boxes), "features": encoded(features)}
    row |= other
    order = ["id", "h", "w", *"0000", "n", "boxes", "features"] if ten else list(row)
    return [str(row.get(column, "AAAA")) for column in order]


def write_tsv(path: Path, rows: list[list[str]], end: str = "\r\n") -> Path:
    path.write_bytes("".join("\t".join(row) + end for row in rows).encode())
    return path


def karpathy_json(path: Path, splits: dict[str, list[int]], coco: bool = False, per_image: int = 5) -> Path:
    """Karpathy's format. splits: his name of a split → numbers of images."""
    images = []
    for split, numbers in splits.items():
        for number in numbers:
            name = coco_file_name(number) if coco else f"{number}.jpg"
            texts = [f"{caption} {number}" for caption in CAPTIONS[:per_image]]
            sentences = [{"raw": text, "tokens": text.split()} for text in texts]
            record = {"filename": name, "imgid": len(images), "split": split, "sentences": sentences}
            images.append(record | ({"cocoid": number, "filepath": "val2014"} if coco else {}))
    path.write_text(json.dumps({"images": images, "dataset": "coco" if coco else "flickr"}))
    return path


def changed(path: Path, change: Callable[[dict], object]) -> Path:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Known:
    """A Flickr30K of a few images, instead of the real one."""
    images = {"train": (8,), "dev": (4,), "test": (4,)}
    few = Known("Flickr30K", "f30k_precomp", images, repeated=("dev", "test"), within={})
    coco = Known("MS-COCO", "coco_precomp", {"train": (8,), "testall": (6,), "test": (4,)}, (), {"test": "testall"})
    for name, value in {"f30k": few, "coco": coco}.items():
        monkeypatch.setitem(known.KNOWN, name, value)
    return few


@pytest.fixture(scope="session")
def whole_f30k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_toy_dataset(tmp_path_factory.mktemp("f30k"), {"train": 8, "dev": 4, "test": 4})
    (root / "toy_vocab.json").rename(root / "f30k_precomp_vocab.json")
    return root


@pytest.fixture
def f30k(small: Known, whole_f30k: Path, tmp_path: Path) -> Path:
    """The folder of that Flickr30K, whole."""
    return Path(shutil.copytree(whole_f30k, tmp_path / "data" / small.folder))


# -- Karpathy's files and ids ----------------------------------------------------------------------------------------


def test_names_of_one_picture_have_one_key() -> None:
    assert coco_file_name(391895) == "COCO_val2014_000000391895.jpg"
    names = ["391895", "000000391895", "COCO_val2014_000000391895.jpg", "val2014/COCO_val2014_000000391895"]
    assert {image_key(name) for name in names} == {"391895"}
    assert image_key("9" * 5000) == "9" * 5000 and image_key("000") == "0"
    assert image_key("1000092795.jpg") == "1000092795" and image_key("25_0ab.d.jpg") == "25_0ab.d"


def test_splits_of_coco(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "c.json", {"train": [1, 2], "restval": [3], "val": [4], "test": [5, 6]}, coco=True)
    changed(path, lambda c: c["images"][1]["sentences"].append({"raw": "one\nmore  ", "tokens": []}))
    result = itm("split-captions", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert (out / "train_ids.txt").read_text() == "1\n2\n3\n"
    assert (out / "train_names.txt").read_text().splitlines()[2] == "COCO_val2014_000000000003.jpg"
    assert np.load(out / "train_owners.npy").tolist() == [0] * 5 + [1] * 6 + [2] * 5
    assert (out / "train_caps.txt").read_text().splitlines()[10] == "one more"
    assert "1 caption with control characters, now spaces (first: COCO_val2014_000000000002.jpg)" in result.stdout
    assert (out / "testall_caps.txt").read_bytes() == (out / "test_caps.txt").read_bytes()  # fewer than 1,000
    assert not (out / "testall_owners.npy").exists()
    assert "dev: 1 image, 5 captions" in result.stdout
    assert _numbers(out / "testall_ids.txt", ["5", "6"]) == [5, 6]  # as the judgements of COCO want them
    again = itm("split-captions", path, "--out", out)
    assert again.exit_code == 0 and "written" not in again.stdout
    assert "another content" in itm("split-captions", path, "--out", out, "--most", 3).stderr
    assert read_karpathy(path).file_names()[4] == "COCO_val2014_000000000004.jpg"


def test_of_a_large_file_of_splits_only_what_is_asked_for_is_kept(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "f.json", {"train": list(range(100))})
    words = [f"word{n}" for n in range(300)]
    changed(path, lambda c: [s.update(tokens=words) for image in c["images"] for s in image["sentences"]])
    tracemalloc.start()
    splits = read_karpathy(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert splits.images_of("train")[99].captions[4] == "a red star . 99"
    assert peak < 3 * path.stat().st_size  # the file as bytes and as text; all its words would be seven times as much
    changed(path, lambda c: [s.pop("raw") for image in c["images"] for s in image["sentences"]])
    assert read_karpathy(path).images_of("train")[99].captions[4] == " ".join(words)


def dataset_of(path: Path, root: Path, split: str, pictures: int, most: int | None = None, repeat: int = 1) -> Path:
    """Captions of a Karpathy file with random features, without ids, as in the public packages."""
    root.mkdir(exist_ok=True)
    listed = read_karpathy(path).images_of(split)[:pictures]
    lines = [caption.upper().replace(".", "") for picture in listed for caption in picture.captions[:most]]
    (root / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")
    rows = np.repeat(np.random.default_rng(0).normal(size=(pictures, 2, 3)), repeat, axis=0)
    np.save(root / f"{split}_ims.npy", rows.astype(np.float32))
    return root


def test_ids_are_written_once_the_captions_agree(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "f.json", {"train": [10, 11], "val": [12, 13, 14], "test": [15, 16]})
    root = dataset_of(path, tmp_path / "f30k", "dev", pictures=2)  # cut, as validation sets often are
    result = itm("ids", root, "dev", "--karpathy", path)
    assert "dev: 2 images, every caption as in f.json" in result.stdout
    assert open_split(root, "dev").ids == ["12.jpg", "13.jpg"]
    assert itm("ids", root, "dev", "--karpathy", path).exit_code == 0
    other = itm("ids", root, "dev", "--karpathy", path, "--numbers")
    assert other.exit_code == 2 and "found a file that says 12.jpg, expected 2. Nothing was written" in other.stderr
    assert open_split(root, "dev").ids == ["12.jpg", "13.jpg"]
    assert itm("ids", root, "dev", "--karpathy", path, "--numbers", "--set-aside").exit_code == 0
    assert open_split(root, "dev").ids == ["2", "3"]
    assert (root / "dev_ids.aside.txt").read_text() == "12.jpg\n13.jpg\n"


def test_ids_of_rows_that_repeat_every_image_and_of_six_captions(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "c.json", {"restval": [7], "train": [8]}, coco=True, per_image=6)
    root = dataset_of(path, tmp_path / "coco", "train", pictures=2, most=5, repeat=5)
    (root / "train_ids.txt").write_text("7\n" * 5 + "8\n" * 5)  # the public form: says the same, and stays
    assert itm("ids", root, "train", "--karpathy", path).exit_code == 0
    assert (root / "train_ids.txt").read_text() == "7\n" * 5 + "8\n" * 5
    assert (root / "train_names.txt").read_text().count("\n") == 2
    lines = (root / "train_caps.txt").read_text().splitlines()
    (root / "train_caps.txt").write_text("\n".join(lines[5:] + lines[:5]) + "\n")  # train first, then restval
    (root / "train_ids.txt").unlink()
    (root / "train_names.txt").unlink()
    assert itm("ids", root, "train", "--karpathy", path).exit_code == 0
    assert open_split(root, "train").ids == ["8", "7"]


# -- conversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ten", [False, True])
def test_rows_stand_in_the_order_of_the_split(tmp_path: Path, ten: bool) -> None:
    path = karpathy_json(tmp_path / "c.json", {"train": [1, 2], "val": [9, 7, 8]}, coco=True)
    names = {7: "COCO_val2014_000000000007", 8: "8", 9: "9", 1: "1"}
    first = write_tsv(tmp_path / "a.tsv", [tsv_row(names[n], ten=ten) for n in (1, 7, 8)])
    second = write_tsv(tmp_path / "b.tsv", [tsv_row(names[n], ten=ten) for n in (8, 9)], end="\n")
    result = itm("convert-tsv", first, second, "--out", tmp_path / "out", "--split", "dev", "--captions", path)
    assert result.exit_code == 0, result.output
    assert "1 other image in the files" in result.stdout
    assert "1 image stood again with the same numbers, first 8: skipped" in result.stdout
    split = open_split(tmp_path / "out", "dev")
    assert split.ids == ["9", "7", "8"] and split.n_captions == 15
    for row, number in enumerate((9, 7, 8)):
        features, boxes = regions_of(number)
        np.testing.assert_array_equal(split.regions(np.array([row]))[0], features.astype(np.float32))
        np.testing.assert_array_equal(split.region_boxes(np.array([row]))[0], boxes.astype(np.float32))
    assert split.sizes.tolist() == [list(SIZE)] * 3
    before = bytes_of(tmp_path / "out")
    again = itm("convert-tsv", first, second, "--out", tmp_path / "out", "--split", "dev", "--captions", path)
    assert again.exit_code == 0 and "It was there already" in again.stdout
    other = itm("convert-tsv", second, first, "--out", tmp_path / "out", "--split", "dev", "--captions", path)
    assert other.exit_code == 2 and "a conversion of other files" in other.stderr
    assert bytes_of(tmp_path / "out") == before


def test_names_of_columns_long_fields_and_sizes_the_other_way_round(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).normal(size=(REGIONS, 20_000))  # 320,000 characters: beyond a CSV reader
    rows = [["image_id", "image_h", "image_w", "num_boxes", "boxes", "features"]]
    rows += [tsv_row(n, features=encoded(wide + n), w=SIZE[1], h=SIZE[0]) for n in (1, 2)]
    done = convert([write_tsv(tmp_path / "a.tsv", rows)], tmp_path / "out", "dev")
    assert (done.rows, done.width) == (2, 20_000)
    assert np.load(tmp_path / "out/dev_sizes.npy").tolist() == [[64, 48]] * 2
    tall = encoded(np.array([[0, 0, 40, 60]] * REGIONS))
    tsv = write_tsv(tmp_path / "b.tsv", [tsv_row(1, boxes=tall)])
    with pytest.raises(ItmError, match=r"a box \(0, 0, 40, 60\) outside its image of 64 x 48.*--swap-sizes"):
        convert([tsv], tmp_path / "out", "tall")
    convert([tsv], tmp_path / "out", "tall", swap_sizes=True)
    assert np.load(tmp_path / "out/tall_sizes.npy").tolist() == [[48, 64]]


@pytest.mark.parametrize("names", [[], [list(SIX)]], ids=["without names", "names of columns"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, names: list[list[str]]) -> None:
    tsv = write_tsv(tmp_path / "a.tsv", [*names, tsv_row(1), tsv_row(2)])
    tsv.write_bytes(b"\xef\xbb\xbf" + tsv.read_bytes())
    assert convert([tsv], tmp_path / "out", "dev", Wanted(["2", "1"])).rows == 2


def test_a_file_that_was_forgotten_can_be_given_later(tmp_path: Path) -> None:
    first = write_tsv(tmp_path / "a.tsv", [tsv_row(n) for n in (1, 2)])
    second = write_tsv(tmp_path / "b.tsv", [tsv_row(3)])
    wanted = Wanted(["3", "1", "2"])
    with pytest.raises(ItmError, match="1 of 3 images in no file, first 3"):
        convert([first], tmp_path / "out", "dev", wanted)
    assert not (tmp_path / "out/dev_ims.npy").exists()
    with pytest.raises(ItmError, match="an unfinished conversion of other files"):
        convert([second], tmp_path / "out", "dev", wanted)
    assert convert([first, second], tmp_path / "out", "dev", wanted).rows == 3
    np.testing.assert_allclose(np.load(tmp_path / "out/dev_ims.npy")[0], regions_of(3)[0], rtol=1e-6)


def test_killed_again_and_again_the_files_are_the_same_bytes(tmp_path: Path) -> None:
    numbers = [3, 1, 4, 1, 5, 9, 2, 6, 8, 7]  # one twice
    tsv = write_tsv(tmp_path / "a.tsv", [tsv_row(n) for n in numbers])
    # Dying while reading, while noting, and between the renames at the end, of which the journal's are the first.
    moments = ["_take:4", "_note:1", "_take:3", "replace:2", "_take:2", "_publish:1", "replace:2", "replace:3"]
    ran = subprocess.run(
        [sys.executable, SCRIPT, tsv, tmp_path / "killed", *moments], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split() == ["-9", "False"] * len(moments), ran.stdout + ran.stderr
    assert convert([tsv], tmp_path / "killed", "dev").repeated == ["1"]
    convert([tsv], tmp_path / "whole", "dev")
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")
    assert not (tmp_path / "killed/.dev_unfinished").exists()


def test_outputs_that_are_there_are_never_replaced(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "f.json", {"val": [1, 2]})
    tsv = write_tsv(tmp_path / "a.tsv", [tsv_row(n) for n in (1, 2)])
    out = tmp_path / "out"
    out.mkdir()
    wanted = wanted_from_karpathy(read_karpathy(path), "dev")
    for name in ("dev_caps.txt", "dev_boxes.npy", "dev_ims.npy", "dev_source.json"):
        (out / name).write_text("mine")
        with pytest.raises(ItmError, match=f"{name}: found .*Move"):
            convert([tsv], out, "dev", wanted)
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
    assert convert([tsv], out, "dev", wanted).rows == 2


# -- what is wrong with a file, said in one line ----------------------------------------------------------------------


def tsv_with(**other: object) -> Callable[[Path], list]:
    """A conversion of two images, of which the second says something else."""

    def setup(tmp_path: Path) -> list:
        tsv = write_tsv(tmp_path / "a.tsv", [tsv_row(1), tsv_row(other.get("id", 2), number=2, **other)])
        return ["convert-tsv", tsv, "--out", tmp_path / "out", "--split", "dev"]

    return setup


def tsv_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], list]:
    def setup(tmp_path: Path) -> list:
        tsv = write_tsv(tmp_path / "a.tsv", [tsv_row(1), tsv_row(2)])
        tsv.write_bytes(change(tsv.read_bytes()))
        return ["convert-tsv", tsv, "--out", tmp_path / "out", "--split", "dev"]

    return setup


def json_with(change: Callable[[dict], object]) -> Callable[[Path], list]:
    def setup(tmp_path: Path) -> list:
        path = changed(karpathy_json(tmp_path / "f.json", {"train": [1], "val": [2, 3]}), change)
        return ["split-captions", path, "--out", tmp_path / "out"]

    return setup


def json_bytes(content: bytes) -> Callable[[Path], list]:
    def setup(tmp_path: Path) -> list:
        (tmp_path / "f.json").write_bytes(content)
        return ["split-captions", tmp_path / "f.json", "--out", tmp_path / "out"]

    return setup


def loop(tmp_path: Path) -> list:
    (tmp_path / "a.tsv").symlink_to(tmp_path / "b.tsv")
    (tmp_path / "b.tsv").symlink_to(tmp_path / "a.tsv")
    return ["convert-tsv", tmp_path / "a.tsv", "--out", tmp_path / "out", "--split", "dev"]


def folder(tmp_path: Path) -> list:
    (tmp_path / "f.json").mkdir()
    return ["split-captions", tmp_path / "f.json", "--out", tmp_path / "out"]


def pipe(tmp_path: Path) -> list:
    os.mkfifo(tmp_path / "f.json")
    return ["split-captions", tmp_path / "f.json", "--out", tmp_path / "out"]


def unfinished(name: str, content: bytes) -> Callable[[Path], list]:
    """A conversion that lacks an image, with one of its files replaced."""

    def setup(tmp_path: Path) -> list:
        call = ids_with(b"1\n2\n3\n")(tmp_path)
        assert itm(*call).exit_code == 2
        (tmp_path / "out/.dev_unfinished" / name).write_bytes(content)
        return call

    return setup


def ids_with(lines: bytes) -> Callable[[Path], list]:
    def setup(tmp_path: Path) -> list:
        (tmp_path / "ids.txt").write_bytes(lines)
        return [*tsv_bytes(bytes)(tmp_path), "--ids", tmp_path / "ids.txt"]

    return setup


def captions_differ(tmp_path: Path) -> list:
    path = karpathy_json(tmp_path / "f.json", {"val": [1, 2]})
    root = dataset_of(path, tmp_path / "data", "dev", pictures=2)
    lines = (root / "dev_caps.txt").read_text().splitlines()
    (root / "dev_caps.txt").write_text("\n".join([*lines[:6], "a photograph of nothing", *lines[7:]]) + "\n")
    return ["ids", root, "dev", "--karpathy", path]


def sentence(content: dict) -> dict:
    return content["images"][1]["sentences"][2]


OUTSIDE = encoded(np.array([[0, 0, 10, 10], [1, 1, 70, 20], [0, 0, 5, 5]]))
TURNED = encoded(np.array([[0, 0, 10, 10], [9, 1, 5, 20], [0, 0, 5, 5]]))
NAN = encoded(np.full((REGIONS, WIDTH), np.nan))
ERRORS: dict[str, tuple[Callable[[Path], list], str]] = {
    "wrong base64": (tsv_with(features="?!" * 32), "a.tsv, line 2 (image 2): found damaged base64 in features"),
    "base64 cut": (tsv_with(features=encoded(regions_of(2)[0])[:-3]), "damaged base64 in features"),
    "base64 of another length": (tsv_with(features=encoded(np.zeros(WIDTH))), "16 bytes of features for 3 boxes"),
    "boxes of another number": (tsv_with(n=4), "12 numbers for 4 boxes, expected four a box"),
    "three numbers a box": (tsv_with(boxes=encoded(np.zeros((3, 3)))), "9 numbers for 3 boxes, expected four a box"),
    "no base64 at all": (tsv_with(features=""), "0 bytes of features"),
    "other width": (tsv_with(features=encoded(np.zeros((3, 5)))), "3 boxes with 5 numbers each, expected 3 boxes with 4"),
    "fewer boxes": (
        tsv_with(n=2, boxes=encoded(np.ones((2, 4))), features=encoded(np.ones((2, 4)))),
        "expected 3 boxes with 4 numbers each, as before. All images need as many boxes",
    ),
    "number of boxes is no number": (tsv_with(n="many"), "found many as num_boxes, expected a positive whole number"),
    "NaN": (tsv_with(features=NAN), "a NaN or infinity in features"),
    "box outside": (tsv_with(boxes=OUTSIDE), "a box (1, 1, 70, 20) outside its image of 64 x 48"),
    "box turned": (tsv_with(boxes=TURNED), "a box (9, 1, 5, 20) that ends before it begins"),
    "image without size": (tsv_with(w=0), "found 0 as width"),
    "endless width": (tsv_with(w="9" * 5000), "as width, expected a positive whole number of at most nine digits"),
    "width beyond its file": (tsv_with(w=10**10, h=10**10), "found 10000000000 as width"),
    "name with a bell": (tsv_with(id="2\a"), "(image 2?): found control characters in the name '2\\x07'"),
    "no line ends": (tsv_bytes(lambda c: b"\t" * (TOO_LONG + 1)), "line 1: found a line of 67 MB or more"),
    "pipe": (pipe, "f.json: found neither a file nor a folder"),
    "journal of something else": (unfinished("journal.json", b"{}"), "_unfinished: found damaged files ('sources')"),
    "unfinished features cut": (unfinished("ims.npy", b"\x93NUMPY"), "_unfinished: found damaged files (EOF"),
    "no name": (tsv_with(id=" "), "no name of an image"),
    "name in Latin-1": (tsv_bytes(lambda c: b"\xe9" + c), "no name of an image"),
    "same image, other numbers": (tsv_with(id="1"), "line 2 (image 1): found the image again, with other numbers"),
    "missing column": (tsv_bytes(lambda c: c.replace(b"\t3\t", b"\t")), "found 5 columns, expected 6 (image_id"),
    "unnamed column": (tsv_bytes(lambda c: b"image_id\timage_w\timage_h\r\n" + c), "found no column boxes"),
    "file cut": (tsv_bytes(lambda c: c[: len(c) * 3 // 5]), "line 2: found 5 columns"),
    "empty file": (tsv_bytes(lambda c: b""), "a.tsv: found no image"),
    "symbolic links in a circle": (loop, "a symbolic link that leads nowhere or in a circle"),
    "folder": (folder, "f.json: found a folder"),
    "a list": (json_bytes(b"[1, 2]"), "found a list without a list of images"),
    "JSON cut": (json_bytes(b'{"images": [{"split": "tr'), "a damaged file (Unterminated string"),
    "JSON in Latin-1": (json_bytes('{"images": "é"}'.encode("latin-1")), "bytes that are not UTF-8 at position 12"),
    "brackets without end": (json_bytes(b"[" * 200_000), "f.json: found a damaged file (maximum recursion"),
    "file name on two lines": (json_with(lambda c: c["images"][1].update(filename="a\nb")), "found 'a\\nb' as filename"),
    "no file name": (json_with(lambda c: c["images"][1].update(filename=" ")), "images[1]: found '' as filename"),
    "cocoid for some": (json_with(lambda c: c["images"][1].update(cocoid=7)), "found a cocoid in 1 of 3 images"),
    "true as number": (json_with(lambda c: c["images"][1].update(imgid=True)), "images[1]: found True as number"),
    "no images": (json_with(lambda c: c.update(images=[])), "without a list of images"),
    "no split": (json_with(lambda c: c["images"][1].pop("split")), "images[1]: found none as split"),
    "unknown split": (json_with(lambda c: c["images"][1].update(split="dev")), "images[1]: found split dev, expected"),
    "no text": (json_with(lambda c: sentence(c).clear()), "a sentence without raw text and tokens"),
    "no caption": (json_with(lambda c: c["images"][1].update(sentences=[])), "not one caption of 2.jpg"),
    "two images of a name": (json_with(lambda c: c["images"][2].update(filename="2.jpg")), "name 2.jpg of 2 images"),
    "missing image": (ids_with(b"2\n1\n3\n"), "1 of 3 images in no file, first 3"),
    "duplicated id": (ids_with(b"2\n1\n2.jpg\n"), "2.jpg twice, in rows 0 and 2"),
    "empty line": (ids_with(b"2\n\n1\n"), "an empty line 2"),
    "ids in Latin-1": (ids_with(b"2\n\xe9\n"), "ids.txt: found bytes that are not UTF-8"),
    "other captions": (captions_differ, "dev_caps.txt: found “a photograph of nothing” in line 7, expected “a red ball"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_malformed_files_are_one_clear_error(tmp_path: Path, case: str) -> None:
    setup, words = ERRORS[case]
    result = itm(*setup(tmp_path))
    assert result.exit_code == 2, result.output
    assert words in result.stderr and "expected" in result.stderr
    assert result.stderr.startswith("itm: ") and result.stderr.count("\n") == 1
    # Nothing that looks like a result is left.
    left = [path.name for path in (tmp_path / "out").glob("*")] if (tmp_path / "out").exists() else []
    assert [name for name in left if not name.startswith(".")] == []


def test_odd_captions_are_kept_or_skipped_and_reported(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "f.json", {"val": [2, 3]})
    raws = {0: "  ", 1: "word " * 500, 2: "a\x00cube\nand\ta\ud800ball"}
    for place, raw in raws.items():
        changed(path, lambda c, place=place, raw=raw: c["images"][0]["sentences"][place].update(raw=raw))
    result = itm("split-captions", path, "--out", tmp_path / "out")
    assert "1 empty caption left out (first: 2.jpg)" in result.stdout
    assert "1 caption of more than 100 words, kept" in result.stdout
    assert "1 caption with control characters, now spaces" in result.stdout
    lines = (tmp_path / "out/dev_caps.txt").read_text().split("\n")
    assert len(lines) == 10 and lines[1] == "a cube and a ball"
    assert np.load(tmp_path / "out/dev_owners.npy").tolist() == [0] * 4 + [1] * 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert-tsv", "no.tsv", "--out", "o", "--split", "dev"), "no.tsv: found no such file"),
        (("split-captions", "no.json", "--out", "o"), "no.json: found no such file"),
        (("ids", "nowhere", "dev", "--karpathy", "no.json"), "no.json: found no such file"),
        (
            ("convert-tsv", "a", "--out", "o", "--split", "d", "--captions", "c", "--ids", "i"),
            "found both, expected one",
        ),
        (("vocabulary", "nowhere"), "train_caps.txt: found no such file"),
    ],
)
def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = itm(*words)
    assert result.exit_code == 2 and message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_split_that_has_no_name(tmp_path: Path) -> None:
    path = karpathy_json(tmp_path / "f.json", {"val": [1, 2]})
    tsv = write_tsv(tmp_path / "a.tsv", [tsv_row(1)])
    for split, message in {"validation": "one of train, dev", "train": "no image of split train"}.items():
        result = itm("convert-tsv", tsv, "--out", tmp_path / "o", "--split", split, "--captions", path)
        assert result.exit_code == 2 and message in result.stderr
    with pytest.raises(ItmError, match="a plain name"):
        convert([tsv], tmp_path / "o", "../dev")
    (tmp_path / "file").write_text("")
    with pytest.raises(ItmError, match="no folder can be made here"):
        convert([tsv], tmp_path / "file", "dev")


# -- check -----------------------------------------------------------------------------------------------------------


def test_a_whole_dataset(f30k: Path) -> None:
    result = itm("check", "f30k", "--data-root", f30k.parent)
    assert result.exit_code == 0, result.output
    assert "train_ims.npy    ok    8 x 6 x 24 float32, 5 kB" in result.stdout
    assert "every number is finite" in result.stdout and "every box begins before it ends, in pixels" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert "f30k_precomp is whole: 16 images, 80 captions, fingerprint" in last
    again = itm("check", "f30k", "--data-root", f30k, "--quick")  # the dataset folder itself is as good
    assert again.stdout.splitlines()[-1] == f"{last.partition(', fingerprint')[0]}; features were not read."
    assert "finite" not in again.stdout


def test_a_dataset_that_is_not_there_and_where_to_get_it(tmp_path: Path) -> None:
    result = itm("check", "coco", "--data-root", tmp_path)
    assert result.exit_code == 1 and "no such folder" in result.stdout
    assert "about 43.7 GB of features" in result.stdout and "kuanghueilee/scan-features" in result.stdout
    (tmp_path / "f30k_precomp").mkdir()
    result = itm("check", "f30k", "--data-root", tmp_path)
    assert (
        "train_ims.npy: about 8.6 GB; data/data/f30k_precomp/train_ims.npy of https://www.kaggle.com" in result.stdout
    )
    assert "`itm data fetch f30k --data-root" in result.stdout
    assert "is not whole: 7 missing, as listed above." in result.stdout


def edit(path: Path, change: Callable[[np.ndarray], object]) -> None:
    array = np.load(path)
    change(array)
    np.save(path, array)


def put(row: object, value: object) -> Callable[[np.ndarray], object]:
    return lambda array: array.__setitem__(row, value)


def replace_line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().split("\n")
    lines[number - 1] = text
    path.write_text("\n".join(lines))


def repeat_dev(root: Path) -> None:
    """The form of the public dev and test files, with one row that is not like its image's first."""
    for kind in ("ims", "boxes", "sizes"):
        np.save(root / f"dev_{kind}.npy", np.repeat(np.load(root / f"dev_{kind}.npy"), 5, axis=0))
    names = (root / "dev_ids.txt").read_text().splitlines()
    (root / "dev_ids.txt").write_text("".join(f"{name}\n" * 5 for name in names))


def circle(root: Path) -> None:
    (root / "dev_ims.npy").unlink()
    (root / "dev_ims.npy").symlink_to(root / "dev_ims.npy")


def a_folder(root: Path) -> None:
    (root / "dev_caps.txt").unlink()
    (root / "dev_caps.txt").mkdir()


def shares_of_dev(root: Path) -> None:
    edit(root / "dev_boxes.npy", lambda a: put(..., a / 96)(a))


def dev_is_train(root: Path, images: int = 4) -> None:
    """The first images and captions of train stand in dev as well, under names of their own."""
    rows = np.load(root / "train_ims.npy")[:images]
    edit(root / "dev_ims.npy", put(slice(images), rows))
    lines = (root / "train_caps.txt").read_text().splitlines()[: 5 * images]
    own = (root / "dev_caps.txt").read_text().splitlines()[5 * images :]
    (root / "dev_caps.txt").write_text("\n".join([*lines, *own]) + "\n")


# What is done to the dataset, the exit code, and what the table says.
FOUND: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "truncated npy": (lambda r: (r / "dev_ims.npy").write_bytes((r / "dev_ims.npy").read_bytes()[:-9]), 1, "dev_ims.npy damaged a damaged file"),
    "features in a circle": (circle, 1, "a symbolic link that leads nowhere or in a circle"),
    "folder of ids": (lambda r: [(r / "dev_ids.txt").unlink(), (r / "dev_ids.txt").mkdir()], 1, "dev_ids.txt damaged a folder"),
    "ids in a circle": (lambda r: [(r / "dev_ids.txt").unlink(), (r / "dev_ids.txt").symlink_to("dev_ids.txt")], 1, "dev_ids.txt damaged a symbolic link"),
    "endless vocabulary": (lambda r: (r / "f30k_precomp_vocab.json").write_bytes(b"[" * 200_000), 1, "*_vocab.json damaged no vocabulary"),
    "folder of captions": (a_folder, 1, "dev_caps.txt damaged a folder"),
    "NaN": (lambda r: edit(r / "dev_ims.npy", put((2, 1, 3), np.nan)), 1, "1 row with NaN or infinity, first row 2"),
    "infinity": (lambda r: edit(r / "train_ims.npy", put((7, 0, 0), np.inf)), 1, "first row 7"),
    "zeros": (lambda r: edit(r / "train_ims.npy", put(5, 0)), 1, "1 row of zeros only, first row 5"),
    "twins": (lambda r: edit(r / "train_ims.npy", lambda a: put(5, a[1])(a)), 1, "1 image with the features of another, first row 5 as 1"),
    "box outside": (lambda r: edit(r / "dev_boxes.npy", put((1, 0, 2), 99)), 1, "1 row with a box outside its image, first row 1"),
    "box turned": (lambda r: edit(r / "dev_boxes.npy", put((3, 2, 0), 95)), 1, "1 row with a box that ends before it begins, first row 3"),
    "NaN box": (lambda r: edit(r / "dev_boxes.npy", put((3, 2, 0), np.nan)), 1, "dev_boxes.npy damaged 1 row with NaN"),
    "zero size": (lambda r: edit(r / "dev_sizes.npy", put((0, 0), 0)), 1, "positive widths and heights"),
    "shares of the sides": (shares_of_dev, 0, "dev_boxes.npy note shares of the image's sides (0 to 1), read as pixels by dev_sizes.npy"),
    "shares without sizes": (lambda r: [shares_of_dev(r), (r / "dev_sizes.npy").unlink()], 0, "and no dev_sizes.npy to make pixels of them"),
    "share outside": (lambda r: [shares_of_dev(r), edit(r / "dev_boxes.npy", put((1, 0, 0), -0.5))], 1, "1 row with a box outside its image, first row 1"),
    "other regions": (lambda r: [np.save(r / f"test_{k}.npy", np.load(r / f"test_{k}.npy")[:, :2]) for k in ("ims", "boxes")], 1, "test_ims.npy damaged 2 x 24 numbers an image, but 6 x 24 in train"),
    "Fortran order": (lambda r: np.save(r / "dev_ims.npy", np.asfortranarray(np.load(r / "dev_ims.npy"))), 0, "dev_ims.npy note stored in Fortran order"),
    "dev in train": (lambda r: [dev_is_train(r), (r / "dev_ids.txt").unlink()], 1, "dev_ims.npy damaged 4 images with the features of images of train, first image 0 as 0"),
    "captions of train": (dev_is_train, 1, "dev_caps.txt note 20 captions that train has too, first line 1"),
    "leak in half precision": (lambda r: [edit(r / "train_ims.npy", lambda a: put(3, np.float16(a[3]))(a)), np.save(r / "dev_ims.npy", np.float16([np.load(r / "train_ims.npy")[3], *np.load(r / "dev_ims.npy")[1:]]))], 1, "1 image with the features of images of train, first image 0 as 3"),
    "number of images": (lambda r: [np.save(r / f"dev_{k}.npy", np.load(r / f"dev_{k}.npy")[:0]) for k in ("ims",)], 1, "captions for 0 feature rows"),
    "duplicated ids": (lambda r: replace_line(r / "dev_ids.txt", 2, "dev_00000.png"), 1, "1 image several times, first dev_00000.png"),
    "image in two splits": (lambda r: replace_line(r / "dev_ids.txt", 2, "train_00003.png"), 1, "1 image also in train"),
    "numbers as ids": (lambda r: (r / "dev_ids.txt").write_text("4\n5\n6\n7\n"), 0, "4 images by number, not by file name"),
    "no ids": (lambda r: (r / "dev_ids.txt").unlink(), 0, "note none; Flickr30K Entities"),
    "control characters": (lambda r: replace_line(r / "dev_caps.txt", 3, "a\x07 ball"), 0, "1 caption with control characters, first: line 3"),
    "500 words": (lambda r: replace_line(r / "dev_caps.txt", 3, "ball " * 500), 0, "1 caption of over 100 words, first: line 3, 500 words"),
    "caption twice": (lambda r: [replace_line(r / "dev_caps.txt", n, "a ball") for n in range(1, 21)], 0, "16 captions repeated for one image, first: line 2 as 1"),
    "empty caption": (lambda r: replace_line(r / "dev_caps.txt", 3, " "), 1, "an empty caption in line 3"),
    "Latin-1": (lambda r: (r / "dev_caps.txt").write_bytes(b"caf\xe9\n" * 20), 1, "bytes that are not UTF-8 at position 3"),
    "no vocabulary": (lambda r: (r / "f30k_precomp_vocab.json").unlink(), 1, "missing no vocabulary"),
    "vocabulary of other captions": (lambda r: Vocabulary.build(["un chien court"] * 4).save(r / "f30k_precomp_vocab.json"), 1, "*_vocab.json damaged that the vocabulary knows only 0% of its frequent words"),
    "two vocabularies": (lambda r: (r / "b_vocab.json").write_text("{}"), 1, "expected exactly one vocabulary"),
    "every image five times": (repeat_dev, 0, "20 x 6 x 24 float32, 12 kB, every image 5 times"),
    "five times but for one": (lambda r: [repeat_dev(r), edit(r / "dev_ims.npy", put((0, 0, 0), 9))], 1, "3 of 4 groups of five equal"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_what_a_check_finds(f30k: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, code, words = FOUND[case]
    change(f30k)
    monkeypatch.setattr(scan, "BLOCK", 2000)  # three rows at a time
    result = itm("check", "f30k", "--data-root", f30k.parent)
    assert words in " ".join(result.stdout.split()), result.output
    assert result.exit_code == code and ("is not whole" in result.stdout.splitlines()[-1]) == bool(code)
    if case == "no vocabulary":
        assert itm("vocabulary", f30k, "--threshold", 1).exit_code == 0
        assert itm("check", "f30k", "--data-root", f30k.parent).exit_code == 0
        assert itm("vocabulary", f30k).exit_code == 2


def test_another_number_of_images_and_rows_torn_from_their_image(f30k: Path) -> None:
    write_toy_dataset(f30k, {"dev": 5})
    (f30k / "toy_vocab.json").unlink()
    assert "5 images, expected 4" in itm("check", "f30k", "--data-root", f30k.parent, "--quick").stdout
    rows = np.repeat(np.random.default_rng(0).normal(size=(100, 2, 3)), 5, axis=0)
    rows[7, 0, 0] += 1
    np.save(f30k / "big.npy", rows)
    assert scan.scan_features(f30k / "big.npy", repeat=5).torn == [7]


def test_coco_says_whether_test_is_the_first_fold(small: Known, tmp_path: Path) -> None:
    root = write_toy_dataset(tmp_path / "coco_precomp", {"train": 8, "testall": 6, "test": 4})
    assert "test is not the beginning of testall" in itm("check", "coco", "--data-root", tmp_path).stdout
    for kind in ("ims", "boxes", "sizes"):
        np.save(root / f"test_{kind}.npy", np.load(root / f"testall_{kind}.npy")[:4])
    for kind, count in {"caps": 20, "ids": 4}.items():
        lines = (root / f"testall_{kind}.txt").read_text().splitlines()[:count]
        (root / f"test_{kind}.txt").write_text("\n".join(lines) + "\n")
    result = itm("check", "coco", "--data-root", tmp_path)
    assert result.exit_code == 0, result.output
    assert "test is the beginning of testall" in result.stdout and "whole: 14 images" in result.stdout
    np.save(root / "testall_ims.npy", np.repeat(np.load(root / "testall_ims.npy"), 5, axis=0))  # as Kaggle has it
    for kind in ("boxes", "sizes"):
        np.save(root / f"testall_{kind}.npy", np.repeat(np.load(root / f"testall_{kind}.npy"), 5, axis=0))
    (root / "testall_ids.txt").unlink()
    assert itm("check", "coco", "--data-root", tmp_path).exit_code == 0
    edit(root / "test_ims.npy", lambda a: put([2, 3], a[[3, 2]])(a))  # positive captions, negative images
    result = itm("check", "coco", "--data-root", tmp_path)
    told = "test_ims.npy damaged the captions of the beginning of testall, but other features, first image 2"
    assert result.exit_code == 1 and told in " ".join(result.stdout.split())
    unread = itm("check", "coco", "--data-root", tmp_path, "--quick")
    assert unread.exit_code == 0 and "test is the beginning of testall by its captions" in unread.stdout


def test_a_few_photographs_in_two_splits_are_a_note() -> None:
    contents = {"train": np.arange(1000, dtype=np.uint64), "dev": np.arange(990, 1990, dtype=np.uint64)}
    (found,) = between._shared_features(contents)
    assert (found.what, found.state) == ("dev_ims.npy", "note")
    assert found.found == "10 images with the features of images of train, first image 0 as 990"
    (found,) = between._shared_features(contents | {"dev": contents["dev"] - 1})
    assert found.state == "damaged"
    assert list(between._shared_features(contents | {"dev": contents["dev"] + 10})) == []


BOXED = "<object><name>1</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object>"


def write_entities(f30k: Path, small: Known) -> Path:
    """Annotations of every image: the first two words of each caption are a phrase with a box."""
    folder = f30k.parent / "flickr30k_entities"
    for kind in ("Sentences", "Annotations"):
        (folder / kind).mkdir(parents=True)
    for name in small.images:
        split = open_split(f30k, name)
        for image, picture in enumerate(split.ids):
            words = [split.captions[5 * image + k].split() for k in range(5)]
            lines = [f"[/EN#1/other {' '.join(w[:2])}] {' '.join(w[2:])}" for w in words]
            (folder / f"Sentences/{Path(picture).stem}.txt").write_text("\n".join(lines))
            size = "<size><width>96</width><height>96</height></size>"
            (folder / f"Annotations/{Path(picture).stem}.xml").write_text(f"<annotation>{size}{BOXED}</annotation>")
    return folder


def test_entities(f30k: Path, small: Known) -> None:
    data = f30k.parent
    nothing = itm("check", "entities", "--data-root", data)
    assert nothing.exit_code == 1 and "2 missing" in nothing.stdout and "flickr30k_entities" in nothing.stdout
    folder = write_entities(f30k, small)
    result = itm("check", "entities", "--data-root", data)
    assert result.exit_code == 0, result.output
    assert "train        ok  8 images, 40 phrases, 40 with boxes" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("flickr30k_entities is whole: 16 images.")
    bare = folder / "Annotations/dev_00002.xml"
    bare.write_text(bare.read_text().replace(BOXED, ""))
    result = itm("check", "entities", "--data-root", data)
    assert result.exit_code == 0 and "1 image without a box, first dev_00002.png" in result.stdout
    for number in (3, 6):
        wide = folder / f"Annotations/train_{number:05d}.xml"
        wide.write_text(wide.read_text().replace("<xmax>5", "<xmax>500"))
    result = itm("check", "entities", "--data-root", data)
    told = "2 boxes that leave their image by more than a pixel (kept as they are), first in train_00003.png"
    assert result.exit_code == 0 and told in result.stdout
    bare.write_text("<annotation></annotation>")
    result = itm("check", "entities", "--data-root", data)
    assert result.exit_code == 1 and "dev, dev_00002.xml  damaged  a damaged file (no size/width)" in result.stdout
    bare.unlink()
    assert "1 image, first dev_00002" in itm("check", "entities", "--data-root", data).stdout
    (f30k / "train_ids.txt").write_text("".join(f"{n}\n" for n in range(8)))
    (f30k / "test_ids.txt").unlink()
    result = itm("check", "entities", "--data-root", data)
    assert "not one image of Entities (first 0)" in result.stdout
    assert "no file names of the images" in result.stdout and "--set-aside" in result.stdout


# -- fetch -----------------------------------------------------------------------------------------------------------


class FakeKaggle:
    """Gives files of a folder, as ``kagglehub`` would; fails in the middle of the given downloads."""

    def __init__(self, folder: Path, fail_at: tuple[int, ...] = ()) -> None:
        self.folder, self.fail_at, self.asked, self.versions = folder, fail_at, [], []

    def __call__(self, remote: str, version: int | None, cache: Path) -> Path:
        self.asked.append(remote)
        self.versions.append(version)
        source = self.folder / Path(remote).name
        if not source.exists():
            raise FileNotFoundError(remote)
        came = cache / "versions/3" / remote
        came.parent.mkdir(parents=True, exist_ok=True)
        half = len(self.asked) in self.fail_at
        came.write_bytes(source.read_bytes()[: source.stat().st_size // 2 if half else None])
        if half:
            raise ItmError("the line went dead")
        return came


@pytest.fixture
def kaggle(f30k: Path, tmp_path: Path) -> Path:
    """The dataset as Kaggle has it: without vocabulary, boxes and sizes."""
    folder = f30k.rename(tmp_path / "kaggle")
    for path in [*folder.glob("*_boxes.npy"), *folder.glob("*_sizes.npy"), *folder.glob("*_vocab.json")]:
        path.unlink()
    return folder


def test_a_fetch_that_fails_goes_on_and_the_folder_appears_at_the_end(small: Known, kaggle: Path, tmp_path) -> None:
    data, download = tmp_path / "data", FakeKaggle(kaggle, fail_at=(6, 9))
    (kaggle / "dev_ids.txt").unlink()
    for asked in (6, 9):
        with pytest.raises(ItmError, match="the line went dead"):
            fetching.fetch(small, "f30k", data, download)
        assert len(download.asked) == asked
        assert not (data / "f30k_precomp").exists()
    assert fetching.fetch(small, "f30k", data, download) == data / "f30k_precomp"
    assert len(download.asked) == 9 + 2  # two files came twice
    assert download.asked[0] == "data/data/f30k_precomp/test_caps.txt"
    assert download.versions == [None] + [3] * 10  # all of one version
    fetched = bytes_of(data / "f30k_precomp")
    assert fetched.pop("f30k_precomp_vocab.json") and fetched == bytes_of(kaggle)
    assert len(Vocabulary.of_folder(data / "f30k_precomp")) > 4
    assert sorted(path.name for path in data.iterdir()) == [".f30k_precomp.lock", "f30k_precomp"]
    assert itm("check", "f30k", "--data-root", data).exit_code == 0
    assert fetching.fetch(small, "f30k", data, download) and len(download.asked) == 11
    (data / "f30k_precomp/dev_ims.npy").unlink()
    with pytest.raises(ItmError, match="a dataset that is not whole"):
        fetching.fetch(small, "f30k", data, download)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "dev_ims.npy").write_bytes(b"\x93NUMPY"), "dev_ims.npy: found a damaged file"),
        (lambda root: replace_line(root / "dev_caps.txt", 4, ""), "dev_caps.txt: found an empty caption in line 4"),
        (lambda root: np.save(root / "dev_ims.npy", np.zeros((3, 6, 24))), "20 captions for 3 feature rows"),
        (lambda root: (root / "dev_caps.txt").unlink(), "no such file in kuanghueilee/scan-features"),
    ],
)
def test_damaged_downloads_are_fetched_again(small: Known, kaggle: Path, tmp_path, damage, message: str) -> None:
    sound = {path.name: path.read_bytes() for path in kaggle.iterdir()}
    damage(kaggle)
    with pytest.raises(ItmError, match=message):
        fetching.fetch(small, "f30k", tmp_path / "data", FakeKaggle(kaggle))
    assert not (tmp_path / "data/f30k_precomp").exists()
    for name, content in sound.items():
        (kaggle / name).write_bytes(content)
    assert fetching.fetch(small, "f30k", tmp_path / "data", FakeKaggle(kaggle)).is_dir()


def test_a_journal_of_something_else_is_one_clear_error(small: Known, kaggle: Path, tmp_path: Path) -> None:
    staging = tmp_path / "data/.f30k_precomp_unfinished"
    staging.mkdir(parents=True)
    for content in ("{}", "[]", '{"files": {}}'):
        (staging / "journal.json").write_text(content)
        with pytest.raises(ItmError, match=r"journal.json: found another content.*Remove .*_unfinished to begin anew"):
            fetching.fetch(small, "f30k", tmp_path / "data", FakeKaggle(kaggle))


def test_files_of_another_cache_are_copied_and_stay(small: Known, kaggle: Path, tmp_path: Path) -> None:
    before = bytes_of(kaggle)
    fetching.fetch(small, "f30k", tmp_path / "data", lambda remote, version, cache: kaggle / Path(remote).name)
    assert bytes_of(kaggle) == before


def test_no_space_is_said_before_the_download(small: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ItmError, match=r"1 MB of free space, expected about 14 MB for Flickr30K"):
        fetching.fetch(small, "f30k", tmp_path, FakeKaggle(tmp_path))


def test_without_kagglehub_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kagglehub", None)
    result = itm("fetch", "f30k", "--data-root", tmp_path / "data")
    assert result.exit_code == 2 and 'pip install "itm-utils[data]"' in result.stderr
    assert "A Kaggle account is needed" in result.stderr and not (tmp_path / "data").exists()


class HTTPError(Exception):
    """As those of ``kagglehub``: with the answer of the server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Client Error.\n\nmore lines")
        self.response = SimpleNamespace(status_code=status)


def test_kagglehub_is_asked_for_one_version_into_our_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dataset_download(handle: str, path: str) -> str:
        asked.append((handle, path, fetching.os.environ["KAGGLEHUB_CACHE"]))
        if path.isdigit():
            raise HTTPError(int(path))
        return str(tmp_path / path)

    monkeypatch.delenv("KAGGLEHUB_CACHE", raising=False)
    monkeypatch.setitem(sys.modules, "kagglehub", SimpleNamespace(dataset_download=dataset_download))
    download = fetching.kaggle_download()
    assert download("a/b.npy", None, tmp_path) == tmp_path / "a/b.npy"
    download("a/b.npy", 7, tmp_path)
    assert [handle for handle, _, _ in asked] == [known.KAGGLE, f"{known.KAGGLE}/versions/7"]
    assert {cache for _, _, cache in asked} == {str(tmp_path)} and "KAGGLEHUB_CACHE" not in fetching.os.environ
    with pytest.raises(FileNotFoundError):
        download("404", None, tmp_path)
    with pytest.raises(ItmError, match=r"403 Client Error.*A Kaggle account is needed"):
        download("403", None, tmp_path)
    with pytest.raises(ItmError, match=r"500 Client Error.*Run the same command again"):
        download("500", None, tmp_path)
