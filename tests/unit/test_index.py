"""The index on disk: what faiss finds, what re-ranking keeps, what is refused, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from small_models import small, whole_matchers
from toy_dataset import write_toy_dataset
from typer.testing import CliRunner, Result

from itm_lab.cli import Group
from itm_lab.index import store
from itm_lab.index.collection import new_captions
from itm_lab.index.nearest import KINDS, build_nearest, nearest, read_nearest, write_nearest
from itm_lab.index.store import MANIFEST, Encoder, Source, create_index, open_index
from itm_lab.photos.cli import app as photos
from itm_lab.photos.retrieve import caption_vectors, image_vectors, request_of
from itm_lab.photos.search import find_captions, find_images, open_run
from itm_utils.data.batches import PairDataset, WordCaptions, image_batch
from itm_utils.data.precomp import open_split
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError
from itm_utils.models.scan import SCAN
from itm_utils.models.search_at_scale import candidate_lists, rerank, score_candidates, summary_vectors
from itm_utils.models.vsepp import VSEPP
from itm_utils.scoring import encode_split, evaluating, score_all, score_split
from itm_utils.training.checkpoints import save_model

app = typer.Typer(cls=Group)
app.add_typer(photos)
ENCODER = Encoder("run", "0" * 8, "SCAN")


def itm(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def random_vectors(rows: int, width: int = 16, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def source(name: str) -> Source:
    return Source("data", name, f"print of {name}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_toy_dataset(tmp_path / "toy", {"train": 10, "dev": 4, "test": 12})


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    """The folder of a run with a SCAN that nobody trained."""
    split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
    torch.manual_seed(0)
    model = SCAN(len(vocabulary), split.feature_dim, width=8, word_dim=8)
    pairs = PairDataset(split, WordCaptions(split, vocabulary))
    save_model(tmp_path / "run/best.safetensors", model, pairs.identity())
    return tmp_path / "run"


# -- nearest vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_the_largest_inner_products(kind: str, tmp_path: Path) -> None:
    vectors, queries = random_vectors(900), random_vectors(5, seed=1)
    index = build_nearest(vectors, kind)
    write_nearest(index, tmp_path / "index")
    mapped = read_nearest(tmp_path / "index", kind)
    scores, numbers = nearest(mapped, kind, queries, 10, effort=10_000)
    exact = queries @ vectors.T
    assert np.array_equal(numbers, np.argsort(-exact, axis=1)[:, :10])
    assert np.allclose(scores, np.take_along_axis(exact, numbers, 1), atol=1e-6)


def test_less_effort_finds_less_and_never_what_is_not_there() -> None:
    vectors, queries = random_vectors(3000), random_vectors(40, seed=1)
    index = build_nearest(vectors, "ivf")
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    recall = [np.mean([len(np.intersect1d(a, b)) for a, b in zip(nearest(index, "ivf", queries, 10, effort)[1], exact, strict=True)])
              for effort in (1, 4, 10_000)]  # fmt: skip
    assert recall[0] < recall[1] < recall[2] == 10


def test_fewer_vectors_than_asked_for() -> None:
    index = build_nearest(random_vectors(3), "flat")
    assert nearest(index, "flat", random_vectors(2, seed=1), 10)[1].shape == (2, 3)


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (np.full((2, 3), np.nan), "a NaN or infinity"),
        (np.zeros((0, 3)), r"shape \(0, 3\)"),
        (np.zeros(3), r"shape \(3,\)"),
    ],
)
def test_vectors_that_mean_nothing_are_refused(vectors: np.ndarray, said: str) -> None:
    with pytest.raises(ItmError, match=said):
        build_nearest(vectors, "flat")


def test_queries_of_another_width_are_refused() -> None:
    with pytest.raises(ItmError, match="width 4, expected width 16"):
        nearest(build_nearest(random_vectors(3), "flat"), "flat", random_vectors(1, 4), 1)


# -- the folder ------------------------------------------------------------------------------------------------------


def test_segments_together_are_one_collection(tmp_path: Path) -> None:
    parts = [random_vectors(rows, seed=rows) for rows in (50, 7, 90)]
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER)
    for name, part in zip("abc", parts, strict=True):
        index = index.add(source(name), part, "flat")
    again, vectors, queries = open_index(tmp_path / "shelf"), np.concatenate(parts), random_vectors(4, seed=1)
    assert again == index and again.rows == 147
    scores, numbers = again.search(queries, 12)
    exact = queries @ vectors.T
    assert np.array_equal(numbers, np.argsort(-exact, axis=1)[:, :12])
    assert np.allclose(scores, -np.sort(-exact, axis=1)[:, :12], atol=1e-6)
    segments, rows = again.locate(np.array([0, 49, 50, 56, 57, 146]))
    assert segments.tolist() == [0, 0, 1, 1, 2, 2] and rows.tolist() == [0, 49, 0, 6, 0, 89]


def test_adding_touches_nothing_that_is_there(tmp_path: Path) -> None:
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(20))
    file = tmp_path / "shelf" / index.segments[0].file
    before = file.stat().st_mtime_ns, file.read_bytes()
    index.add(source("b"), random_vectors(20, seed=1))
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


def test_two_that_opened_the_same_index_lose_nothing(tmp_path: Path) -> None:
    first = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))
    first.add(source("b"), random_vectors(6))
    grown = first.add(source("c"), random_vectors(7))  # knows nothing of b
    assert [one.source.split for one in grown.segments] == ["a", "b", "c"] and open_index(grown.folder).rows == 18


def test_a_kill_between_segment_and_manifest_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "write_json", killed)
        index.add(source("b"), random_vectors(6))
    assert (index.folder / "segment-00001.faiss").exists()
    assert open_index(index.folder) == index
    assert open_index(index.folder).add(source("c"), random_vectors(7)).rows == 12


def test_a_first_build_that_was_killed_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(store, "write_json", lambda *_: (_ for _ in ()).throw(OSError("full")))
        create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))
    with pytest.raises(ItmError, match="no such file"):
        open_index(tmp_path / "shelf")
    assert create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5)).rows == 5


def test_a_flipped_bit_in_a_segment_is_seen_before_faiss_reads_it(tmp_path: Path) -> None:
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(50))
    path = index.folder / index.segments[0].file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ItmError, match="other bytes than were written"):
        open_index(index.folder).search(random_vectors(1), 3)
    path.unlink()
    with pytest.raises(ItmError, match="no such file"):
        open_index(index.folder).search(random_vectors(1), 3)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"items": "sounds"},
        {"width": "16"},
        {"segments": []},
        {"segments": [{"file": "../../etc/passwd"}]},
        {"encoder": None},
        {"encoder": {"run": 1, "digest": "", "name": "", "trained_on": ""}},
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_one_clear_error(change: dict, tmp_path: Path) -> None:
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))
    found = json.loads((index.folder / MANIFEST).read_text())
    (index.folder / MANIFEST).write_text(json.dumps(found | change))
    with pytest.raises(ItmError, match=r"index\.json: found "):
        open_index(index.folder)


def test_a_segment_outside_its_folder_is_refused(tmp_path: Path) -> None:
    index = create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))
    found = json.loads((index.folder / MANIFEST).read_text())
    found["segments"][0]["file"] = "../segment-00000.faiss"
    (index.folder / MANIFEST).write_text(json.dumps(found))
    with pytest.raises(ItmError, match="no manifest of an index"):
        open_index(index.folder)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").touch()
    create_index(tmp_path / "shelf", "images", 16, ENCODER).add(source("a"), random_vectors(5))
    for place, said in {"full": "other files", "full/thesis.txt": "found a file", "shelf": "found an index"}.items():
        with pytest.raises(ItmError, match=said):
            create_index(tmp_path / place, "images", 16, ENCODER)


# -- vectors, candidates, re-ranking ---------------------------------------------------------------------------------


@pytest.mark.parametrize("matcher", whole_matchers(), ids=lambda matcher: matcher.__name__)
def test_every_matcher_has_one_unit_vector_an_item(
    matcher: type, any_pairs: PairDataset, toy_vocabulary: Vocabulary
) -> None:
    model, batch = small(matcher, len(toy_vocabulary), 24).eval(), any_pairs[[0, 3, 7]]
    with torch.inference_mode():
        for encoded in (model.encode_images(batch.images), model.encode_texts(batch.texts)):
            vectors = summary_vectors(encoded)
            assert len(vectors) == 3 and torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)


def test_a_mean_ignores_padding(toy_pairs: PairDataset, toy_vocabulary: Vocabulary) -> None:
    torch.manual_seed(0)
    model = SCAN(len(toy_vocabulary), 24, width=8, word_dim=8).eval()
    with torch.inference_mode():
        together = summary_vectors(model.encode_texts(toy_pairs.texts.batch(np.arange(6))))
        alone = [summary_vectors(model.encode_texts(toy_pairs.texts.batch(np.array([n])))) for n in range(6)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-6)


def test_scores_of_candidate_lists_are_entries_of_all_scores(
    toy_pairs: PairDataset, toy_vocabulary: Vocabulary
) -> None:
    torch.manual_seed(0)
    model = SCAN(len(toy_vocabulary), 24, width=8, word_dim=8)
    images, texts = encode_split(model, toy_pairs.split, toy_pairs.texts)
    full = score_all(model, images, texts, progress=False)
    cheap = summary_vectors(images) @ summary_vectors(texts).T
    lists = candidate_lists(cheap, 0.3)
    found = score_candidates(model, images, texts, lists)
    wanted = lists[0] | lists[1]
    assert torch.allclose(found.i2t[wanted], full.i2t[wanted], atol=1e-6) and wanted.float().mean() < 0.7
    assert (found.i2t[~wanted] == -torch.inf).all()
    ranked = rerank(cheap, found, lists)
    for of, scores, listed in ((ranked.i2t, found.i2t, lists[0]), (ranked.t2i.T, found.t2i.T, lists[1].T)):
        beside = cheap if of is ranked.i2t else cheap.T
        for row in range(len(of)):
            first, rest = of[row][listed[row]], of[row][~listed[row]]
            assert first.min() > rest.max()  # the list stands first,
            assert torch.equal(
                first, scores[row][listed[row]]
            )  # by the full score; all others as the cheap one has them
            assert torch.allclose(rest.diff(), beside[row][~listed[row]].diff(), atol=1e-6)
    assert torch.equal(rerank(cheap, full, candidate_lists(cheap, 1.0)).t2i, full.t2i)


# -- from a run to an answer -----------------------------------------------------------------------------------------


def test_with_every_candidate_the_answer_is_that_of_scoring_everything(data: Path, run: Path, tmp_path: Path) -> None:
    opened = open_run(run, str(data), "test")
    for items in ("images", "captions"):
        assert itm("index", "build", tmp_path / items, "--data", data, "--model", run, "--of", items).exit_code == 0
    request = request_of(tmp_path / "images", opened, "images", 12)
    from itm_lab.photos.retrieve import nearest_captions, nearest_images

    for query in opened.split.captions[:6]:
        whole, found = find_images(opened, query, 12), nearest_images(opened, request, query, 12)
        assert np.array_equal(found.numbers, whole.numbers) and np.allclose(found.scores, whole.scores, atol=1e-5)
        assert "retrieved 12 of 12 images" in found.notes[-1]
    request = request_of(tmp_path / "captions", opened, "captions", 60)
    for image in range(4):
        whole, found = find_captions(opened, image, 60), nearest_captions(opened, request, image, 60)
        assert np.allclose(found.scores, whole.scores, atol=1e-5)
        assert [opened.split.captions[n] for n in found.numbers[:3]] == [
            opened.split.captions[n] for n in whole.numbers[:3]
        ]
        assert found.texts.captions[found.place(0)] == opened.split.captions[found.numbers[0]]


def test_the_vectors_of_a_split_do_not_depend_on_blocks(data: Path, run: Path) -> None:
    opened = open_run(run, str(data), "test")
    with evaluating(opened.model):
        images = opened.model.encode_images(image_batch(opened.split, np.arange(12)))
    assert np.allclose(image_vectors(opened.model, opened.split), summary_vectors(images), atol=1e-6)
    texts = opened.texts(opened.split.captions)
    turned = opened.texts(opened.split.captions[::-1])
    assert np.allclose(caption_vectors(opened.model, texts), caption_vectors(opened.model, turned)[::-1], atol=1e-6)


def test_an_index_grows_and_answers_from_both_parts(data: Path, run: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    assert "12 images, flat" in itm("index", "build", shelf, "--data", data, "--model", run).output
    added = itm("index", "add", shelf, "--data", data, "--split", "train", "--kind", "hnsw")
    assert added.exit_code == 0 and "10 added, 22 images in 2 segments" in added.output, added.output
    train, test = open_split(data, "train"), open_split(data, "test")
    opened, query = open_run(run, str(data), "test"), test.captions[0]
    scores = []
    for split in (test, train):
        asked = replace(split, captions=[query], owner=np.zeros(1, dtype=np.int64))
        scores.append(score_split(opened.model, asked, opened.texts([query])).t2i[:, 0].numpy())
    names = [*(test.ids or ()), *(train.ids or ())]
    best = np.argsort(-np.concatenate(scores), kind="stable")[:5]
    told = itm("index", "search", shelf, query, "--top", "5")
    assert [line.split()[-1] for line in told.output.splitlines()] == [names[n] for n in best], told.output


def test_search_takes_its_candidates_from_an_index(data: Path, run: Path, tmp_path: Path) -> None:
    itm("index", "build", tmp_path / "shelf", "--data", data, "--model", run)
    given = ("search", "a red cube", "--data", data, "--model", run, "--top", 3, "--out", tmp_path / "sheet.png")
    plain, indexed = itm(*given), itm(*given, "--index", tmp_path / "shelf", "--candidates", 12)
    assert plain.exit_code == indexed.exit_code == 0, indexed.output
    lines = [line for line in indexed.output.splitlines() if not line.startswith("note: the index")]
    assert lines == plain.output.splitlines() and "retrieved 12 of 12 images" in indexed.output
    few = itm(*given, "--index", tmp_path / "shelf", "--candidates", 5)
    assert "retrieved 5 of 12 images" in few.output
    other = itm("index", "build", tmp_path / "texts", "--data", data, "--model", run, "--of", "captions")
    assert other.exit_code == 0
    image = ("search", "--image", "test_00003.png", "--data", data, "--model", run, "--out", tmp_path / "sheet.png")
    assert itm(*image, "--index", tmp_path / "texts").exit_code == 0


def test_other_weights_and_changed_files_are_refused(data: Path, run: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    itm("index", "build", shelf, "--data", data, "--model", run)
    split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
    torch.manual_seed(1)
    pairs = PairDataset(split, WordCaptions(split, vocabulary))
    save_model(
        tmp_path / "newer/best.safetensors",
        SCAN(len(vocabulary), split.feature_dim, width=8, word_dim=8),
        pairs.identity(),
    )
    for given in (("index", "add", shelf, "--data", data, "--split", "dev"), ("index", "search", shelf, "a red cube")):
        told = itm(*given, "--model", tmp_path / "newer")
        assert told.exit_code == 2 and "found other weights" in told.output
    shutil.move(run, tmp_path / "moved")
    assert itm("index", "search", shelf, "a red cube").exit_code == 2
    assert itm("index", "search", shelf, "a red cube", "--model", tmp_path / "moved").exit_code == 0
    features = np.load(data / "test_ims.npy")
    features[0] += 1
    np.save(data / "test_ims.npy", features)
    told = itm("index", "search", shelf, "a red cube", "--model", tmp_path / "moved")
    assert told.exit_code == 2 and "files that changed" in told.output


ERRORS = {
    "nothing asked": (("search", "{shelf}"), "found neither of a sentence and --image"),
    "no such index": (("search", "{folder}/none", "a cube"), "none: found no such folder"),
    "no index": (("search", "{folder}/toy", "a cube"), "index.json: found no such file"),
    "the other side": (("search", "{shelf}", "--image", "x"), "found an index of images"),
    "unknown words": (("search", "{shelf}", "zzz"), "none of whose words is in the vocabulary"),
    "unknown kind": (("build", "{folder}/new", "--data", "{folder}/toy", "--model", "{folder}/run", "--kind", "tree"), "--kind: found 'tree'"),
    "unknown items": (("build", "{folder}/new", "--data", "{folder}/toy", "--model", "{folder}/run", "--of", "sounds"), "--of: found 'sounds'"),
    "already there": (("build", "{shelf}", "--data", "{folder}/toy", "--model", "{folder}/run"), "found an index, expected a new folder"),
    "added twice": (("add", "{shelf}", "--data", "{folder}/toy"), "already added"),
    "no such split": (("add", "{shelf}", "--data", "{folder}/toy", "--split", "nosuch"), "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_clear_error(case: str, data: Path, run: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    itm("index", "build", shelf, "--data", data, "--model", run)
    before = sorted(os.listdir(tmp_path))
    words, said = ERRORS[case]
    told = itm("index", *(word.format(shelf=shelf, folder=tmp_path) for word in words))
    assert told.exit_code == 2 and said in told.output and "Traceback" not in told.output, told.output
    assert sorted(os.listdir(tmp_path)) == before


def test_order_embeddings_have_no_direction(data: Path, tmp_path: Path) -> None:
    split, vocabulary = open_split(data, "train"), Vocabulary.of_folder(data)
    pairs = PairDataset(split, WordCaptions(split, vocabulary))
    save_model(
        tmp_path / "order/best.safetensors",
        VSEPP(len(vocabulary), split.feature_dim, width=8, word_dim=8, measure="order"),
        pairs.identity(),
    )
    told = itm("index", "build", tmp_path / "shelf", "--data", data, "--model", tmp_path / "order")
    assert told.exit_code == 2 and "does not score by cosines" in told.output and not (tmp_path / "shelf").exists()


# -- a collection ----------------------------------------------------------------------------------------------------


def test_generated_captions_are_new_and_the_same_everywhere() -> None:
    found = list(new_captions(500))
    assert len(set(found)) == 500 and found[:3] == list(new_captions(3))
    known = set(found[:100])
    assert not known & set(new_captions(500, known))
    assert list(new_captions(0)) == []
