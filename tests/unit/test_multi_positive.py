"""Metrics with many right answers: against an obvious loop, against ``eccv_caption``, and against the oracle."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from itm_lab.data.coco_judgements import coco_extended, coco_ids, coco_judgements
from itm_utils.data.precomp import FeatureFile, PrecompSplit
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores
from itm_utils.metrics.multi_positive import Judged, Judgements, extended_metrics

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from eccv_caption import Metrics

PACKAGE = Metrics()
CAPTION_IDS = PACKAGE.coco_ids
IMAGE_IDS = np.array([PACKAGE.coco_gts["t2i"][c][0] for c in CAPTION_IDS.tolist()[::5]])


def slow(scores: np.ndarray, right: list[set[int]]) -> dict[str, float]:
    """One query after the other, by the definitions: wrong ones first among equals, NaN right ones nowhere."""
    rows = []
    for row, good in zip(scores, right, strict=True):
        if not good:
            continue
        there = [c for c in range(len(row)) if not (c in good and np.isnan(row[c]))]
        order = sorted(there, key=lambda c: (-np.inf if np.isnan(row[c]) else -row[c], c in good))
        hits = [c in good for c in order] + [False] * len(good)
        size = len(good)
        precision = [np.mean(hits[: place + 1]) if hits[place] else 0.0 for place in range(size)]
        rows.append([np.mean(precision), np.mean(hits[:size]), any(hits[:1]), any(hits[:5]), any(hits[:10])])
    return dict(zip(("map_at_r", "r_precision", "r1", "r5", "r10"), 100 * np.mean(rows, axis=0), strict=True))


def slow_both(scores: Scores, truth: np.ndarray) -> dict[str, float]:
    sides = {"i2t": (scores.i2t, truth), "t2i": (scores.t2i.T, truth.T)}
    found = {side: slow(matrix, [set(np.flatnonzero(r)) for r in good]) for side, (matrix, good) in sides.items()}
    return {f"{side}_{name}": value for side, values in found.items() for name, value in values.items()}


@pytest.mark.parametrize("kind", ["tie-free", "ties", "nan", "decoupled", "infinite", "few candidates"])
def test_equal_to_a_loop_over_queries(kind: str) -> None:
    rng = np.random.default_rng(3)
    truth = rng.random((7, 9) if kind == "few candidates" else (23, 60)) < 0.1
    truth[4] = False  # an image that no caption fits is no query
    truth[0, 0] = True
    i2t = rng.normal(size=truth.shape) + truth
    if kind in ("ties", "infinite"):
        i2t = np.round(i2t)
    if kind in ("nan", "few candidates"):
        i2t[rng.random(truth.shape) < 0.2] = np.nan
    if kind == "infinite":
        i2t[i2t < -1], i2t[i2t > 1] = -np.inf, np.inf
    scores = Scores(i2t, rng.normal(size=truth.shape)) if kind == "decoupled" else Scores.same(i2t)
    found = extended_metrics(scores, Judgements.from_truth(truth))
    assert found == pytest.approx(slow_both(scores, truth))
    assert len(set(found.values())) > 4  # the case says something


def test_a_model_that_scores_everything_alike_gets_nothing() -> None:
    truth = np.eye(12, dtype=bool)
    assert set(extended_metrics(Scores.same(np.zeros((12, 12))), Judgements.from_truth(truth)).values()) == {0.0}
    perfect = extended_metrics(Scores.same(truth.astype(float)), Judgements.from_truth(truth))
    assert set(perfect.values()) == {100.0}


def test_right_candidates_outside_the_split_count_and_cannot_be_found() -> None:
    judged = Judged.of({0: [10, 11]}, {10: 0, 12: 1})
    assert (judged.relevant.tolist(), judged.pair_candidate.tolist()) == ([2], [0])
    found = extended_metrics(Scores.same(np.array([[1.0, 0.0]])), Judgements(judged, Judged.of({0: [0]})))
    assert (found["i2t_r1"], found["i2t_r_precision"], found["i2t_map_at_r"]) == (100, 50, 50)


def smaller_package(images: int) -> tuple[Metrics, np.ndarray, np.ndarray]:
    """The package with its judgements cut to the first images that ECCV asks about, so that a test takes seconds."""
    small = Metrics()
    keep = [n for n in IMAGE_IDS.tolist() if n in PACKAGE.eccv_gts["i2t"]][:images]
    captions = [c for c in CAPTION_IDS.tolist() if PACKAGE.coco_gts["t2i"][c][0] in set(keep)]
    for name in ("eccv_gts", "cxc_gts"):
        whole = getattr(PACKAGE, name)
        known = {"i2t": set(keep), "t2i": set(captions)}
        setattr(small, name, {side: {q: r for q, r in whole[side].items() if q in known[side]} for side in known})
    return small, np.array(keep), np.array(captions)


def test_equal_to_the_package_on_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 images and their 1,500 captions; right candidates outside them stay in the package's lists."""
    package, image_ids, caption_ids = smaller_package(300)
    monkeypatch.setattr("itm_lab.data.coco_judgements._package", lambda: package)
    scores = np.random.default_rng(5).permutation(300 * 1500).reshape(300, 1500).astype(float)
    own = np.repeat(np.arange(300), 5), np.arange(1500)
    scores[own] += 0.9 * 300 * 1500 + 0.5  # half numbers: still no ties
    items = {
        "i2t": {int(q): caption_ids[np.argsort(-row)].tolist() for q, row in zip(image_ids, scores, strict=True)},
        "t2i": {int(q): image_ids[np.argsort(-row)].tolist() for q, row in zip(caption_ids, scores.T, strict=True)},
    }
    eccv = package.eccv_metrics(items, "all")
    cxc = {k: package.cxc_recalls(items, "all", K=k) for k in (1, 5, 10)}
    found = coco_extended(Scores.same(scores), image_ids, caption_ids)
    assert len(found) == 12
    for side in ("i2t", "t2i"):
        for ours, theirs in (("map_at_r", "map_at_r"), ("r_precision", "rprecision"), ("r1", "r1")):
            assert found[f"eccv_{side}_{ours}"] == pytest.approx(100 * eccv[f"eccv_{theirs}"][side], abs=1e-9)
        for k in (1, 5, 10):
            assert found[f"cxc_{side}_r{k}"] == pytest.approx(100 * cxc[k][side], abs=1e-9)


def test_the_judgements_are_those_of_the_package() -> None:
    eccv, cxc = (coco_judgements(kind, IMAGE_IDS, CAPTION_IDS) for kind in ("eccv", "cxc"))
    assert [len(j.queries) for j in (eccv.i2t, eccv.t2i, cxc.i2t, cxc.t2i)] == [1261, 1332, 5000, 24972]
    assert int(eccv.i2t.relevant.sum() - len(eccv.i2t.pair_query)) == 2  # two captions that testall leaves out
    with pytest.raises(ItmError, match="eccv or cxc"):
        coco_judgements("flickr", IMAGE_IDS, CAPTION_IDS)


def coco_split(root: Path, ids: list[str] | None, images: int = 5000) -> PrecompSplit:
    np.save(root / "testall_ims.npy", np.zeros((images, 1), dtype=np.float32))
    features = FeatureFile(root / "testall_ims.npy", (2,), "features")
    return PrecompSplit(root, "testall", images, features, ["a"] * 5 * images, np.arange(5 * images) // 5, ids=ids)


def test_coco_numbers_follow_the_order_of_the_split(tmp_path: Path) -> None:
    names = [str(n) for n in IMAGE_IDS]
    image_ids, caption_ids = coco_ids(coco_split(tmp_path, names))
    assert (image_ids == IMAGE_IDS).all() and (caption_ids == CAPTION_IDS).all()
    _, turned = coco_ids(coco_split(tmp_path, names[::-1]))
    assert (turned == CAPTION_IDS.reshape(-1, 5)[::-1].ravel()).all()
    other = CAPTION_IDS.reshape(-1, 5)[:, ::-1].ravel()
    (tmp_path / "testall_capids.txt").write_text("\n".join(map(str, other)))
    assert (coco_ids(coco_split(tmp_path, names))[1] == other).all()


@pytest.mark.parametrize(
    ("ids", "images", "captions", "message"),
    [
        (None, 5000, None, "testall_ids.txt: found no such file.*one a line.*public COCO package"),
        (["p1"] * 5000, 5000, None, "testall_ids.txt.*p1"),
        (["1"] * 5000, 5000, None, "testall_ids.txt: found 1, expected the 5,000 images of Karpathy"),
        ([str(IMAGE_IDS[0])] * 5000, 5000, None, "an image twice"),
        (["1"] * 1000, 1000, None, "1,000 images and 5,000 captions, expected COCO's testall"),
        ([str(n) for n in IMAGE_IDS], 5000, np.roll(CAPTION_IDS, 5), "testall_capids.txt: found other numbers"),
        ([str(n) for n in IMAGE_IDS], 5000, CAPTION_IDS[:10], "testall_capids.txt: found other numbers"),
    ],
)
def test_missing_or_strange_numbers_get_one_clear_line(tmp_path: Path, ids, images, captions, message: str) -> None:
    if captions is not None:
        (tmp_path / "testall_capids.txt").write_text("\n".join(map(str, captions)))
    with pytest.raises(ItmError, match=message):
        coco_ids(coco_split(tmp_path, ids, images))


def test_judgements_must_fit_the_scores() -> None:
    judgements = Judgements.from_truth(np.eye(5, dtype=bool))
    with pytest.raises(ItmError, match="i2t scores: found 4 queries and 5 candidates, expected at least 5 and 5"):
        extended_metrics(Scores.same(np.zeros((4, 5))), judgements)
    with pytest.raises(ItmError, match="no right candidate"):
        extended_metrics(Scores.same(np.zeros((4, 5))), Judgements.from_truth(np.zeros((4, 5))))


def test_on_scenes_the_oracle_judges_itself() -> None:
    """A matcher that knows what is true ranks all true captions first; one that knows only pairs does not."""
    from itm_lab.scenes import oracle_matrix

    truth = oracle_matrix("test")
    judgements = Judgements.from_truth(truth)
    knows = truth + np.random.default_rng(0).random(truth.shape) / 2
    assert list(extended_metrics(Scores.same(knows), judgements).values()) == pytest.approx([100.0] * 10)
    pairs = np.zeros(truth.shape)
    pairs[np.arange(truth.shape[1]) * len(truth) // truth.shape[1], np.arange(truth.shape[1])] = 1
    found = extended_metrics(Scores.same(pairs), judgements)
    assert found["t2i_r1"] == 100.0 > found["t2i_r_precision"]
