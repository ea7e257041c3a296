"""Mining and drawing offline negatives: the lists of a plain sort, whatever the blocks and however often it is killed."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_mining import SETTINGS, Counting, open_toy
from small_models import small
from torch import Tensor
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner

from itm_lab.cli import app
from itm_utils import mining, scoring
from itm_utils.data.batches import OfflinePairs, PairDataset, WordCaptions
from itm_utils.data.offline import FILES, rank_probabilities
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.matcher import Images, Matcher, PairBatch, Scores, Texts
from itm_utils.mining import Drawn, OfflineLists, draw_offline, mine, read_lists
from itm_utils.models.keeping_score import MeanPool
from itm_utils.models.scan import SCAN
from itm_utils.models.vsepp import VSEPP, HingeTriplet
from itm_utils.scoring import score_split
from itm_utils.training.checkpoints import model_info, read_checkpoint, save_model, write_checkpoint
from itm_utils.training.loop import TrainConfig, train

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "aoq"
SCRIPT = Path(__file__).resolve().parents[1] / "killed_mining.py"
NAMES = ("texts.npy", "images.npy", "manifest.json")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BATCH", 16)
    monkeypatch.setattr(mining, "BLOCK", 16)
    monkeypatch.setattr(mining, "TILE", 1)


@pytest.fixture(scope="module")
def irregular(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images with one to nine captions each."""
    root = tmp_path_factory.mktemp("irregular")
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(30), rng.integers(1, 10, size=30))
    words = rng.choice(list("abcdefgh"), size=(len(owner), 6))
    lines = [" ".join(row[: rng.integers(1, 7)]) for row in words]
    np.save(root / "train_ims.npy", rng.normal(scale=1.5, size=(30, 4, 5)).astype(np.float32))
    np.save(root / "train_owners.npy", owner)
    (root / "train_caps.txt").write_text("\n".join(lines) + "\n")
    Vocabulary.build(lines, threshold=1).save(root / "some_vocab.json")
    return root


@pytest.fixture(scope="module")
def mined(toy_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mined")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "BATCH", 16)
        patched.setattr(mining, "BLOCK", 16)
        patched.setattr(mining, "TILE", 1)
        mine(*open_toy(toy_root), folder, **SETTINGS)
    return folder


@pytest.fixture
def toy_lists(mined: Path, toy_train: PrecompSplit, tmp_path: Path) -> OfflineLists:
    """Lists of the toy data, in ``tmp_path / "lists"``."""
    return read_lists(shutil.copytree(mined, tmp_path / "lists"), toy_train)


def by_sorting(scores: Scores, owner: np.ndarray, h_t: int, h_i: int) -> tuple[np.ndarray, np.ndarray]:
    """The obvious way: all scores, positive pairs at the bottom, everything sorted, the lower index first if equal."""
    own = owner == np.arange(len(scores.i2t))[:, None]
    i2t, t2i = (np.where(own, -np.inf, part.numpy()) for part in (scores.i2t, scores.t2i))
    texts = np.argsort(-i2t, axis=1, kind="stable")[:, :h_t]
    return texts, np.argsort(-t2i.T, axis=1, kind="stable")[:, :h_i]


@pytest.mark.parametrize(("budget", "block"), [(400_000, 16), (2**30, mining.BLOCK)])
@pytest.mark.parametrize("kind", ["product", "attention", "decoupled"])
def test_lists_are_those_of_a_plain_sort(
    irregular: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, budget: int, block: int
) -> None:
    monkeypatch.setattr(mining, "BLOCK", block)
    monkeypatch.setattr(mining, "TILE", block)
    model, split, captions = open_toy(irregular, kind)
    scores = score_split(model, split, captions)
    assert (np.diff(np.sort(scores.i2t.numpy(), axis=1)) == 0).mean() > 0.1  # there are ties
    for lengths in ((5, 2), (40, 25)):
        lists = mine(model, split, captions, tmp_path / str(lengths), *lengths, budget)
        texts, images = by_sorting(scores, split.owner, *lengths)
        np.testing.assert_array_equal(lists.texts, texts)
        np.testing.assert_array_equal(lists.images, images)
        assert lists.texts.dtype == lists.images.dtype == np.int32
    if kind == "decoupled":
        swapped = by_sorting(Scores(scores.t2i, scores.i2t), split.owner, 40, 25)
        assert (swapped[0] != texts).any() and (swapped[1] != images).any()


@pytest.mark.parametrize(("budget", "many"), [(8192, mining.MANY), (30_000, mining.MANY), (30_000, 20)])
def test_blocks_do_not_change_the_order_of_equal_scores(
    toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, many: int
) -> None:
    model, split, captions = open_toy(toy_root)
    model.table.data.clamp_(-1, 0)  # few different scores
    whole = mine(model, split, captions, tmp_path / "whole", 30, 9)
    monkeypatch.setattr(mining, "MANY", many)
    parts = mine(model, split, captions, tmp_path / "parts", 30, 9, budget)
    np.testing.assert_array_equal(parts.texts, whole.texts)
    np.testing.assert_array_equal(parts.images, whole.images)
    texts, _ = by_sorting(score_split(model, split, captions), split.owner, 30, 9)
    np.testing.assert_array_equal(whole.texts, texts)


@pytest.mark.parametrize("tile", [1, 12])
def test_every_pair_is_scored_once_within_the_budget(
    toy_root: Path, toy_lists: OfflineLists, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    monkeypatch.setattr(mining, "TILE", tile)  # 12: tiles that do not fit, and are scored in parts
    shapes, score = [], Counting.score
    monkeypatch.setattr(Counting, "score", lambda *a: (shapes.append((len(a[1]), len(a[2]))), score(*a))[1])
    lists = mine(*open_toy(toy_root), tmp_path / "again", **SETTINGS)
    assert lists.fingerprint == toy_lists.fingerprint
    assert sum(rows * columns for rows, columns in shapes) == 40 * 200
    assert max(rows * columns for rows, columns in shapes) <= SETTINGS["budget"] // 4 // 24  # bytes of a pair
    assert max(rows for rows, _ in shapes) <= 16  # images of a block


def test_one_image_may_own_nearly_all(tmp_path: Path) -> None:
    """Tiles in which every pair is a positive one, and lists as long as they can be."""
    np.save(tmp_path / "train_ims.npy", np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32))
    np.save(tmp_path / "train_owners.npy", np.repeat([0, 1, 2], [40, 1, 2]))
    (tmp_path / "train_caps.txt").write_text("a b\n" * 43)
    Vocabulary.build(["a b"], threshold=1).save(tmp_path / "a_vocab.json")
    model, split, captions = open_toy(tmp_path)
    lists = mine(model, split, captions, tmp_path / "lists", 3, 2, 8192)
    assert lists.texts[0].tolist() == [40, 41, 42]
    assert sorted(lists.images[41].tolist()) == [0, 1]
    for wanted in ((4, 2), (3, 3), (0, 2), (3, 0)):
        name = "texts_per_image" if wanted[0] != 3 else "images_per_text"
        with pytest.raises(ItmError, match=f"{name}: found {4 if 4 in wanted else 3 if wanted == (3, 3) else 0}, "):
            mine(model, split, captions, tmp_path / "other", *wanted)
    assert not (tmp_path / "other").exists()


def test_keys_are_in_the_order_of_scores_and_then_of_numbers() -> None:
    scores = torch.tensor([-torch.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38])
    first, last = (mining._keys(scores, torch.full((8,), number)) for number in (0, 2**31 - 1))
    assert (last[1:] > first[:-1]).tolist() == [True, True, True, False, True, True, True]  # 0.0 is not above -0.0
    assert torch.equal(first[3], first[4])
    assert torch.equal(mining._scores(first), scores) and torch.equal(mining._scores(last), scores)
    assert (mining._keys(torch.ones(4), torch.tensor([9, 8, 1, 0])).diff() > 0).all()


def test_captions_of_another_split_are_refused(toy_root: Path, toy_vocabulary, tmp_path: Path) -> None:
    model, split, _ = open_toy(toy_root)
    with pytest.raises(ItmError, match="captions: found 60 of them, expected the 200 of split train"):
        mine(model, split, WordCaptions(open_split(toy_root, "test"), toy_vocabulary), tmp_path, 5, 5)


@pytest.mark.parametrize("matcher", [MeanPool, SCAN])
def test_real_models_are_mined(matcher: type[Matcher], toy_train: PrecompSplit, toy_vocabulary, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = small(matcher, len(toy_vocabulary), toy_train.feature_dim).train()
    captions = WordCaptions(toy_train, toy_vocabulary)
    lists = mine(model, toy_train, captions, tmp_path, 50, 12, budget=300_000)
    assert model.training  # mined in evaluation mode, and put back
    scores = score_split(model, toy_train, captions).i2t.clone()
    own = torch.from_numpy(toy_train.owner) == torch.arange(40)[:, None]
    scores[own] = -torch.inf
    for found, table in ((lists.texts, scores), (lists.images, scores.T)):
        found = torch.from_numpy(np.array(found)).long()
        assert all(len(set(row)) == len(row) for row in found.tolist())
        torch.testing.assert_close(table.gather(1, found), table.topk(found.shape[1]).values)


@pytest.mark.parametrize(
    ("wrong", "where", "found"),
    [
        (torch.nan, (2, 3), "a score that is NaN or infinite"),
        (-torch.nan, (2, 3), "a score that is NaN or infinite"),
        (torch.inf, (2, 3), "a score that is NaN or infinite"),
        (-torch.inf, (2, slice(None)), "scores of minus infinity"),  # a whole list of them
    ],
)
def test_scores_that_are_no_numbers_are_refused(
    toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, where: tuple, found: str
) -> None:
    def score(self, images: Images, texts: Texts) -> Scores:
        scores = images.pooled @ texts.pooled.T
        scores[where] = wrong
        return Scores.same(scores)

    monkeypatch.setattr(Counting, "score", score)
    with pytest.raises(ItmError, match=f"Counting: found {found}, expected finite scores"):
        mine(*open_toy(toy_root), tmp_path, **SETTINGS)
    assert not (tmp_path / "manifest.json").exists()


def test_the_public_lists_come_out(tmp_path: Path) -> None:
    case, about = np.load(GOLDEN / "given_toplists.npz"), json.loads((GOLDEN / "given_toplists.json").read_text())
    np.save(tmp_path / "train_ims.npy", case["in.img_embs"])
    (tmp_path / "train_caps.txt").write_text("word\n" * len(case["in.cap_embs"]))
    split = open_split(tmp_path, "train")
    captions = Vectors(case["in.cap_embs"])
    for budget in (3000, 2**30):
        lists = mine(Product(), split, captions, tmp_path / str(budget), about["h_text"], about["h_image"], budget)
        np.testing.assert_array_equal(lists.texts, case["out.i2t_top"])
        np.testing.assert_array_equal(lists.images, case["out.t2i_top"])


class Vectors:
    """Captions that are vectors already."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors, self.lengths = torch.from_numpy(vectors), np.ones(len(vectors), dtype=np.int64)

    def batch(self, captions: np.ndarray) -> Texts:
        return Texts(pooled=self.vectors[captions])


class Product(Matcher):
    """Scores given vectors."""

    def encode_images(self, batch) -> Images:
        return Images(pooled=batch.regions[:, 0])

    def encode_texts(self, batch) -> Texts:
        return batch

    def score(self, images: Images, texts: Texts) -> Scores:
        return Scores.same(images.pooled @ texts.pooled.T)


@pytest.mark.slow
def test_killed_again_and_again_the_lists_are_the_same_bytes(
    toy_root: Path, toy_lists: OfflineLists, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first block, later, between a checkpoint and its rename, and between the lists and their manifest."""
    moments = ["score:2", "replace:1", "score:40", "replace:4", "score:30", "write_json:1"]
    command = [sys.executable, SCRIPT, toy_root, tmp_path / "killed", *moments]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    states = [line.split() for line in run.stdout.splitlines()]
    assert [state[0] for state in states] == ["-9"] * len(moments), run.stderr
    assert [state[1] for state in states] == ["False"] * 2 + ["True"] * 4
    assert read_checkpoint(tmp_path / "killed" / mining.STATE).info["steps"] == 38  # of 39
    assert not (tmp_path / "killed" / "manifest.json").exists()
    with pytest.raises(ItmError, match=r"manifest\.json: found no such file, expected finished lists"):
        read_lists(tmp_path / "killed", open_split(toy_root, "train"))
    calls, score = [], Counting.score
    monkeypatch.setattr(Counting, "score", lambda *a: (calls.append(1), score(*a))[1])
    lists = mine(*open_toy(toy_root), tmp_path / "killed", **SETTINGS)
    assert 0 < len(calls) < 10
    for name in FILES:
        path = Path(f"{name}.npy")
        assert (tmp_path / "killed" / path).read_bytes() == (tmp_path / "lists" / path).read_bytes()
    spent = [one.manifest.pop("seconds") for one in (lists, toy_lists)]
    assert lists.manifest == toy_lists.manifest and min(spent) > 0
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == [".lock", *sorted(NAMES)]
    assert lists.fingerprint == toy_lists.fingerprint


def interrupt(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    left, score = [calls], Counting.score

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(Counting, "score", interrupted)
    monkeypatch.setattr(mining, "SAVE_EVERY", 0)


def test_an_interrupted_call_goes_on_only_with_the_same_settings(
    toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, toy_lists: OfflineLists
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, 60)
        mine(*open_toy(toy_root), tmp_path / "run", **SETTINGS)
    model, split, captions = open_toy(toy_root)
    model.table.data[4, 0] += 1
    for changed, settings in ((model, SETTINGS), (open_toy(toy_root)[0], SETTINGS | {"budget": 9000})):
        with pytest.raises(ItmError, match=r"unfinished\.safetensors: found (weights|budget) = "):
            mine(changed, split, captions, tmp_path / "run", **settings)
    checkpoint = tmp_path / "run" / mining.STATE
    known = read_checkpoint(checkpoint)
    write_checkpoint(checkpoint, known.tensors, known.info | {"seconds": 1000.0})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, 8)
        mine(*open_toy(toy_root), tmp_path / "run", **SETTINGS)
    assert read_checkpoint(checkpoint).info["seconds"] > 1000  # the time of all calls together
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    again = mine(*open_toy(toy_root), tmp_path / "run", **SETTINGS)
    assert "Mining begins again." in capsys.readouterr().out
    assert again.fingerprint == toy_lists.fingerprint
    assert not checkpoint.exists()


def test_finished_lists_are_read_and_not_mined_again(
    toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_lists: OfflineLists
) -> None:
    model, split, captions = open_toy(toy_root)
    monkeypatch.setattr(Counting, "score", None)
    assert mine(model, split, captions, tmp_path / "lists", **SETTINGS).fingerprint == toy_lists.fingerprint
    with pytest.raises(ItmError, match=r"manifest\.json: found texts_per_image = 20, expected texts_per_image = 21"):
        mine(model, split, captions, tmp_path / "lists", 21, 6)
    model.table.data[4, 0] += 1
    with pytest.raises(ItmError, match=r"manifest\.json: found weights = "):
        mine(model, split, captions, tmp_path / "lists", **SETTINGS)


def test_the_manifest_says_who_mined_what(toy_root: Path, tmp_path: Path) -> None:
    model, split, captions = open_toy(toy_root)
    lists = mine(model, split, captions, tmp_path, **SETTINGS, described={"run": "vsrn, seed 0"})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == lists.manifest
    assert manifest["model"] == "Counting" and manifest["config"] == model.config
    assert manifest["described"] == {"run": "vsrn, seed 0"}
    assert manifest["data"]["fingerprint"] == split.identity()["fingerprint"]
    assert manifest["text_source"] == captions.fingerprint


def test_foreign_lists_are_refused(toy_root: Path, toy_lists: OfflineLists, tmp_path: Path) -> None:
    folder, split = tmp_path / "lists", open_split(toy_root, "train")
    other = open_split(write_toy_dataset(tmp_path / "data", {"train": 40}, seed=9), "train")
    for foreign, match in (
        (other, r"lists/manifest\.json: found lists of data with fingerprint .*expected fingerprint .* as in data"),
        (split.first(20), "found lists of data with split train, expected split train, first 20 as in .*`itm mine`"),
    ):
        with pytest.raises(ItmError, match=match):
            read_lists(folder, foreign)
        with pytest.raises(ItmError, match="found lists of data with"):
            OfflinePairs(foreign, None, toy_lists, seed=0)
    moved = replace(split, root=write_toy_dataset(tmp_path / "moved", {"train": 40}))
    assert read_lists(folder, moved).fingerprint == toy_lists.fingerprint  # a folder may have another name


def damaged_shape(folder: Path) -> None:
    np.save(folder / "texts.npy", np.load(folder / "texts.npy")[:, :-1])
    _adjust_checksum(folder)


def damaged_range(folder: Path) -> None:
    texts = np.load(folder / "texts.npy")
    texts[3, 3] = 200
    np.save(folder / "texts.npy", texts)
    _adjust_checksum(folder)


def _adjust_checksum(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["texts"] = mining.read_lists.__globals__["_sha256"](folder / "texts.npy")
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut(name: str, keep: float):
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(keep * len(content))])

    return damage


def flip(folder: Path) -> None:
    content = bytearray((folder / "images.npy").read_bytes())
    content[-2] ^= 1
    (folder / "images.npy").write_bytes(content)


def rewrite(**changes):
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | changes))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("texts.npy", 0.5), r"texts\.npy: found a damaged file"),
        (cut("images.npy", 0), r"images\.npy: found a damaged file"),
        (lambda folder: (folder / "images.npy").unlink(), r"images\.npy: found no such file"),
        (flip, r"images\.npy: found other bytes than were mined"),
        (cut("manifest.json", 0.7), r"manifest\.json: found a damaged file .* mine the lists again"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), r"manifest\.json: found a damaged file"),
        (rewrite(files={}), r"manifest\.json: found format"),
        (rewrite(format="itm-offline-lists-9"), "found format 'itm-offline-lists-9'"),
        (rewrite(texts_per_image="20"), r"manifest\.json: found a damaged file"),
        (damaged_shape, r"texts: found int32 of shape \(40, 19\)"),
        (damaged_range, "texts: found numbers from 0 to 200, expected 0 to 199"),
    ],
)
def test_damaged_lists_are_refused(toy_root: Path, toy_lists, tmp_path: Path, damage, message: str) -> None:
    damage(tmp_path / "lists")
    with pytest.raises(ItmError, match=message):
        read_lists(tmp_path / "lists", open_split(toy_root, "train"))


def given_lists(texts: np.ndarray, images: np.ndarray) -> OfflineLists:
    return OfflineLists(np.asarray(texts, dtype=np.int32), np.asarray(images, dtype=np.int32), {})


OWNER = np.repeat(np.arange(20), 5)


def many_lists(h_t: int = 40, h_i: int = 12) -> OfflineLists:
    """Random lists of 20 images with five captions each."""
    rng = np.random.default_rng(0)
    texts = [rng.permutation(np.flatnonzero(image != OWNER))[:h_t] for image in range(20)]
    images = [rng.permutation(np.flatnonzero(np.arange(20) != OWNER[c]))[:h_i] for c in range(100)]
    return given_lists(np.stack(texts), np.stack(images))


@pytest.mark.parametrize("sampling", ["uniform", "normal", "tied"])
def test_what_is_drawn_is_a_negative_of_the_lists(sampling: str) -> None:
    lists, captions = many_lists(), np.random.default_rng(1).integers(100, size=3000)
    drawn = draw_offline(lists, OWNER, captions, np.random.default_rng(2), sampling)
    assert all(part.dtype == np.int64 and part.shape == (3000,) for part in drawn)
    assert (drawn.texts[:, None] == lists.texts[OWNER[captions]]).any(axis=1).all()
    assert (drawn.images[:, None] == lists.images[captions]).any(axis=1).all()
    assert (OWNER[drawn.texts] != OWNER[captions]).all() and (drawn.images != OWNER[captions]).all()
    assert (drawn.text_images == OWNER[drawn.texts]).all()
    assert (OWNER[drawn.image_texts] == drawn.images).all()
    assert len(set(drawn.image_texts % 5)) == 5  # any of its captions
    together = (drawn.text_images == drawn.images).mean()
    assert together > 0.01 if sampling == "tied" else together == 0


def test_only_the_first_entries_are_used() -> None:
    lists, captions = many_lists(), np.arange(100)
    drawn = draw_offline(lists, OWNER, np.tile(captions, 50), np.random.default_rng(0), "uniform", 7, 3)
    assert {int(np.flatnonzero(lists.texts[OWNER[c % 100]] == t)[0]) for c, t in enumerate(drawn.texts)} == set(
        range(7)
    )
    assert {int(np.flatnonzero(lists.images[c % 100] == i)[0]) for c, i in enumerate(drawn.images)} == {0, 1, 2}
    for texts, images, message in ((41, 3, "texts: found 41, expected 1 to 40"), (7, 0, "images: found 0")):
        with pytest.raises(ItmError, match=message):
            draw_offline(lists, OWNER, captions, np.random.default_rng(0), "uniform", texts, images)
    with pytest.raises(ItmError, match="at least 8 for 40 captions"):
        draw_offline(lists, OWNER, captions, np.random.default_rng(0), "tied", 40, 7)
    with pytest.raises(ItmError, match="sampling: found 'best', expected one of uniform, normal, tied"):
        draw_offline(lists, OWNER, captions, np.random.default_rng(0), "best")


@pytest.mark.parametrize("sampling", ["uniform", "normal"])
def test_drawing_again_gives_the_probabilities_of_all_negative_pairs(sampling: str) -> None:
    """Every pair (caption, image) of the lists as often as its probability says, positive pairs never."""
    owner = np.repeat(np.arange(4), 3)
    lists = given_lists(np.tile([3, 4, 6, 9], (4, 1)), np.tile([1, 2, 3], (12, 1)))  # owners 1, 1, 2, 3
    drawn = draw_offline(lists, owner, np.zeros(60_000, dtype=int), np.random.default_rng(0), sampling)
    probabilities = np.outer(rank_probabilities(4, sampling), rank_probabilities(3, sampling))
    probabilities[owner[[3, 4, 6, 9]][:, None] == np.array([1, 2, 3])] = 0
    seen = np.zeros((4, 3))
    np.add.at(seen, (np.searchsorted([3, 4, 6, 9], drawn.texts), drawn.images - 1), 1)
    np.testing.assert_allclose(seen / 60_000, probabilities / probabilities.sum(), atol=0.01)
    assert (seen[probabilities == 0] == 0).all()


def test_the_shapes_of_the_rank_probabilities() -> None:
    bell, flat = rank_probabilities(300, "normal"), rank_probabilities(300, "uniform")
    assert all(abs(probabilities.sum() - 1) < 1e-9 for probabilities in (bell, flat))
    assert bell.argmax() in (149, 150) and bell[0] < bell.max() / 50
    assert np.ptp(flat) == 0
    assert abs(bell[50:250].sum() - 0.9545) < 0.005  # two standard deviations


def test_lists_in_which_all_belong_together() -> None:
    owner, captions = np.repeat(np.arange(4), 5), np.arange(5)
    texts, generator = np.tile([5, 6, 7, 8, 9], (4, 1)), np.random.default_rng(0)
    drawn = draw_offline(given_lists(texts, np.tile([1, 3], (20, 1))), owner, captions, generator, "normal")
    assert set(drawn.images) == {3}
    with pytest.raises(ItmError, match=r"found caption 0 with one offline image.*Use longer lists"):
        draw_offline(given_lists(texts, np.full((20, 1), 1)), owner, captions, generator)


def test_after_many_attempts_the_best_other_image_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("itm_utils.data.offline.REDRAWS", 1)
    owner = np.repeat(np.arange(5), 5)
    lists = given_lists(np.tile([5, 6], (5, 1)), np.tile([1, 3, 4], (25, 1)))
    drawn = draw_offline(lists, owner, np.zeros(3000, dtype=int), np.random.default_rng(0))
    share = (drawn.images == 3).mean()
    assert set(drawn.images) == {3, 4} and abs(share - 2 / 3) < 0.04


class Recorded:
    """A generator that gives what the public code drew."""

    def __init__(self, *draws: np.ndarray) -> None:
        self.draws = list(draws)

    def integers(self, high: int | np.ndarray, size: int | None = None) -> np.ndarray:
        drawn = self.draws.pop(0)
        assert (drawn < high).all()
        return drawn


def test_tied_ranks_are_those_of_the_public_code() -> None:
    case = np.load(GOLDEN / "given_sampling.npz")
    lists = given_lists(case["in.i2t_top"], case["in.t2i_top"])
    owner = np.repeat(np.arange(len(lists.texts)), 5)
    generator = Recorded(case["in.draw_n"], case["in.draw_n2"])
    drawn = draw_offline(lists, owner, case["in.caption_index"], generator, "tied")
    for ours, theirs in zip(Drawn._fields, ("t_off", "i_off", "i2", "t2"), strict=True):
        np.testing.assert_array_equal(getattr(drawn, ours), case[f"out.{theirs}"])
    np.testing.assert_array_equal(drawn.text_images == drawn.images, case["out.ioff_matches_toff"])
    apart = draw_offline(lists, owner, case["in.caption_index"], np.random.default_rng(0))
    assert (apart.text_images != apart.images).all()  # the paper's way has none of them


def ids(batch: PairBatch) -> list[list[int]]:
    return [side.ids.tolist() for pair in (batch, batch.offline.first, batch.offline.second)
            for side in (pair.images, pair.texts)]  # fmt: skip


@pytest.fixture
def offline_pairs(toy_pairs: PairDataset, toy_lists: OfflineLists) -> OfflinePairs:
    return OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, seed=4)


def test_a_batch_brings_its_offline_negatives(offline_pairs: OfflinePairs, toy_pairs: PairDataset) -> None:
    captions = [7, 0, 199, 30]
    batch = offline_pairs[captions]
    drawn, owner = offline_pairs.draw(np.array(captions)), toy_pairs.split.owner
    first, second = batch.offline.first, batch.offline.second
    expected = [owner[captions], captions, drawn.images, drawn.texts, drawn.text_images, drawn.image_texts]
    assert ids(batch) == [list(part) for part in expected]
    assert torch.equal(batch.texts.words, toy_pairs[captions].texts.words)
    regions = toy_pairs.split.regions(drawn.images)
    np.testing.assert_array_equal(first.images.regions.numpy(), regions)
    assert torch.equal(second.texts.words, toy_pairs.texts.batch(drawn.image_texts).words)
    assert ids(offline_pairs.__getitems__(captions)) == ids(batch)  # what a loader calls
    assert len(batch.offline) == 4
    assert toy_pairs[captions].offline is None


def test_no_offline_negatives_are_loaded_before_the_warm_up_ends(
    toy_pairs: PairDataset, toy_lists: OfflineLists, tmp_path: Path
) -> None:
    """The training loop tells the data its epoch; what is drawn afterwards is what would have been drawn."""
    pairs = OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, seed=4, warmup_epochs=2)
    always = OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, seed=4)
    some, seen = [0, 7, 12], []
    for epoch in (0, 1):
        pairs.set_epoch(epoch)
        assert pairs[some].offline is None
    pairs.set_epoch(2)
    assert torch.equal(pairs[some].offline.second.images.ids, always[some].offline.second.images.ids)
    assert pairs.identity() == always.identity()  # a run that began without this setting resumes

    def objective(model: VSEPP, batch: PairBatch) -> tuple[torch.Tensor, dict[str, float]]:
        seen.append(batch.offline is not None)
        return HingeTriplet(0.2)(model, batch)

    config = TrainConfig(epochs=3, batch_size=len(pairs) // 2, learning_rate=0.001, device="cpu")
    model = VSEPP(len(Vocabulary.of_folder(toy_pairs.split.root)), toy_pairs.split.feature_dim, width=8, word_dim=5)
    train(model, objective, pairs, config, tmp_path / "run")
    assert seen == [False] * 4 + [True] * 2


def test_what_a_loss_does_not_derive_is_not_loaded(
    offline_pairs: OfflinePairs, toy_pairs: PairDataset, toy_lists: OfflineLists, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the features; what is loaded is the same, and a run may go on whichever way it began."""
    fewer = OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, seed=4, derived=False)
    rows, read = [], type(toy_pairs.split).regions
    monkeypatch.setattr(type(toy_pairs.split), "regions", lambda *given: rows.append(len(given[1])) or read(*given))
    batches = [pairs[[7, 0, 199, 30]] for pairs in (offline_pairs, fewer)]
    assert rows == [4] * 3 + [4] * 2
    assert batches[1].offline.second is None and ids(batches[0])[2:4] == [
        batches[1].offline.first.images.ids.tolist(),
        batches[1].offline.first.texts.ids.tolist(),
    ]
    assert len(batches[1].to("meta")[1:3].offline) == 2
    assert fewer.identity() == offline_pairs.identity()


def test_offline_negatives_are_moved_and_cut_with_their_batch(offline_pairs: OfflinePairs) -> None:
    batch = offline_pairs[[7, 0, 199, 30]]
    assert ids(batch[1:3]) == [part[1:3] for part in ids(batch)]
    away = batch.to("meta")
    for pair in (away, away.offline.first, away.offline.second):
        assert pair.images.regions.device.type == pair.texts.words.device.type == "meta"
    assert ids(PairBatch.cat([batch[:2], batch[2:]])) == ids(batch)


def test_draws_depend_on_seed_and_captions_alone(
    offline_pairs: OfflinePairs, toy_pairs: PairDataset, toy_lists: OfflineLists
) -> None:
    captions = [7, 0, 199, 30]
    first = ids(offline_pairs[captions])
    np.random.default_rng().random()
    sent = pickle.dumps(offline_pairs)  # as to a worker, which opens the lists itself
    assert toy_lists.texts.tobytes()[:200] not in sent
    assert ids(pickle.loads(sent)[captions]) == first
    assert ids(OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, seed=5)[captions]) != first
    with_others = ids(offline_pairs[[7, 0, 30, 199]])  # another epoch puts them into another batch
    assert with_others[2][:2] != first[2][:2] or with_others[3][:2] != first[3][:2]


def test_settings_that_cannot_be_drawn_are_refused_at_once(toy_pairs: PairDataset, toy_lists: OfflineLists) -> None:
    for settings in ({"sampling": "best"}, {"texts_per_image": 21}, {"images_per_text": 3, "sampling": "tied"}):
        with pytest.raises(ItmError):
            OfflinePairs(toy_pairs.split, toy_pairs.texts, toy_lists, 0, **settings)


def far_from_offline(model: Matcher, batch: PairBatch) -> tuple[Tensor, dict[str, float]]:
    """Any loss in which every offline item has a part."""
    pairs = [batch, batch.offline.first, batch.offline.second]
    positive, *negatives = (
        model.score_pairs(model.encode_images(p.images), model.encode_texts(p.texts)).i2t for p in pairs
    )
    return sum((0.2 - positive + other).relu().mean() for other in negatives), {}


def test_training_with_offline_negatives_goes_on_bit_for_bit(
    offline_pairs: OfflinePairs, toy_pairs: PairDataset, toy_lists: OfflineLists, tmp_path: Path
) -> None:
    config = TrainConfig(epochs=1, batch_size=32, learning_rate=0.01, device="cpu", checkpoint_every=2)

    def run(folder: str, pairs: PairDataset, dies: bool = False) -> MeanPool:
        torch.manual_seed(1)
        model = MeanPool(1 + int(pairs.texts.ids.max()), pairs.split.feature_dim, 8)
        left = [6] if dies else [1000]

        def objective(model: Matcher, batch: PairBatch) -> tuple[Tensor, dict[str, float]]:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("the lights went out")
            return far_from_offline(model, batch)

        objective.__qualname__ = "objective"
        train(model, objective, pairs, config, tmp_path / folder)
        return model

    whole = run("whole", offline_pairs)
    with pytest.raises(RuntimeError, match="lights"):
        run("cut", offline_pairs, dies=True)
    again = run("cut", offline_pairs)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    changed = given_lists(toy_lists.texts[:, ::-1], toy_lists.images)
    changed.manifest.update(toy_lists.manifest, files=toy_lists.manifest["files"] | {"texts": "other"})
    split, texts = toy_pairs.split, toy_pairs.texts
    for pairs, message in (
        (OfflinePairs(split, texts, changed, seed=4), "found lists = "),
        (OfflinePairs(split, texts, toy_lists, seed=4, sampling="normal"), "found sampling = 'uniform'"),
        (OfflinePairs(split, texts, toy_lists, seed=4, texts_per_image=9), "found texts_per_image = None"),
        (toy_pairs, "found offline = "),
    ):
        with pytest.raises(ItmError, match=message):
            run("cut", pairs)


def itm(*words: object) -> object:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_mines_what_a_run_left(toy_pairs: PairDataset, toy_root: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    split, texts = toy_pairs.split, toy_pairs.texts
    model = MeanPool(1 + int(texts.ids.max()), split.feature_dim, 8)
    run, out = tmp_path / "run", tmp_path / "lists"
    save_model(run / "best.safetensors", model, toy_pairs.identity())
    settings = ("--data", toy_root, "--out", out, "--texts", 30, "--images", 9)
    result = itm("mine", run, *settings)
    assert result.exit_code == 0, result.output
    assert "30 captions for each of 40 images, 9 images for each of 200 captions" in result.output
    found = read_lists(out, split)
    assert found.fingerprint == mine(model, split, texts, tmp_path / "here", 30, 9).fingerprint
    assert found.manifest["described"] == {"checkpoint": "run/best.safetensors", "provenance": toy_pairs.identity()}
    assert itm("mine", run / "best.safetensors", *settings).exit_code == 0  # finished already
    half = itm("mine", run, "--data", toy_root, "--out", tmp_path / "half", "--part", 0.5, "--texts", 9, "--images", 9)
    assert half.exit_code == 2 and "fingerprint" in half.stderr


def test_token_states_are_computed_again_by_the_receipt(
    toy_pairs: PairDataset, toy_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ITM_CACHE", str(tmp_path / "cache"))
    states = copy.copy(toy_pairs.texts)
    monkeypatch.setattr(
        "itm_lab.finished_run.token_states", lambda given: lambda split: states if given["text_encoder"] else 0
    )
    model = MeanPool(1 + int(states.ids.max()), toy_pairs.split.feature_dim, 8)
    save_model(tmp_path / "run/stage/best.safetensors", model, toy_pairs.identity() | {"texts": "bert-1"})
    for name, parameters in (("a", {}), ("b", {"text_encoder": "some"})):
        (tmp_path / f"run/09_x/search/{name}.json").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"run/09_x/search/{name}.json").write_text(json.dumps({"parameters": parameters}))
    where = ("--data", toy_root, "--out", tmp_path / "lists", "--texts", 9, "--images", 9)
    for states.fingerprint in ("bert-2", "bert-1"):
        result = itm("mine", tmp_path / "run/stage", *where)
        assert (result.exit_code == 0) == (states.fingerprint == "bert-1"), result.output
        assert result.exit_code == 0 or "found token states bert-2, expected bert-1" in result.stderr
    assert read_lists(tmp_path / "lists", toy_pairs.split).manifest["text_source"] == "bert-1"


def refused(message: str, *words: object) -> None:
    result = itm("mine", *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_the_command_says_what_is_wrong(toy_pairs: PairDataset, toy_root: Path, tmp_path: Path) -> None:
    model = MeanPool(1 + int(toy_pairs.texts.ids.max()), toy_pairs.split.feature_dim, 8)
    known = toy_pairs.identity()
    where = ("--data", toy_root, "--out", tmp_path / "lists")
    refused("found no such file or folder, expected a checkpoint", tmp_path / "nothing", *where)
    (tmp_path / "empty").mkdir()
    refused("found no checkpoint, expected the folder of a run", tmp_path / "empty", *where)
    for number, (provenance, message) in enumerate((
        (known | {"dataset": "abc"}, "expected fingerprint abc"),
        (known | {"texts": "abc"}, "toy_vocab.json: found fingerprint"),
        (known | {"texts": "bert-0000000000000000"}, "trained on (bert-0000000000000000), or the receipt of its run"),
    )):  # fmt: skip
        save_model(tmp_path / f"{number}" / "stage" / "best.safetensors", model, provenance)
        refused(message, tmp_path / f"{number}" / "stage", *where)
        refused("expected the folder of a run, such as stage", tmp_path / f"{number}", *where)
    save_model(tmp_path / "unknown.safetensors", Counting(30, 24), known)
    refused("found a model Counting, expected one that a chapter", tmp_path / "unknown.safetensors", *where)
    for number, (changes, message) in enumerate((
        ({"model": 3}, "found model = 3, expected a checkpoint that training wrote"),
        ({"model": "Matcher"}, "found a model Matcher, expected one that a chapter"),
        ({"model": "CrossAttention"}, "found a model CrossAttention, expected one that a chapter"),
        ({"config": None}, "found config = None"),
        ({"config": [1, 2]}, "found config = [1, 2]"),
        ({"config": {}}, "found a config with which there is no MeanPool"),
        ({"config": model.config | {"depth": 2}}, "found a config with which there is no MeanPool"),
        ({"config": model.config | {"width": "8"}}, "found a config with which there is no MeanPool"),
        ({"config": model.config | {"width": -8}}, "found a config with which there is no MeanPool"),
        ({"provenance": ["toy"]}, "found provenance = ['toy']"),
    )):  # fmt: skip
        path = tmp_path / f"foreign_{number}.safetensors"
        weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        write_checkpoint(path, weights, model_info(model, known) | changes)
        refused(message, path, *where)
    write_checkpoint(path, weights, {"model": "MeanPool", "config": model.config})
    refused("found nothing about provenance", path, *where)
    save_model(tmp_path / "good.safetensors", model, known)
    refused("texts_per_image: found 300, expected 1 to 195", tmp_path / "good.safetensors", *where)
    assert not (tmp_path / "lists").exists()
