"""Judgements of pairs: what the files say, what is refused, and an audit that agrees with slow loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_lab.evidence.judgements import (
    CROWD,
    EXPERTS,
    PairJudgements,
    above_chance,
    audit,
    audit_runs,
    called_right,
    negative_pairs,
    numbering,
    own_pairs,
    read_judgements,
    wilson,
)
from itm_lab.publish.judgements_page import RESULT, judgements_fragment
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.errors import ItmError
from itm_utils.matcher import Scores

IMAGES = 12


@pytest.fixture
def split(tmp_path: Path) -> PrecompSplit:
    """Twelve images a.jpg, b.jpg, … of five captions each."""
    np.save(tmp_path / "test_ims.npy", np.zeros((IMAGES, 2, 3), dtype=np.float32))
    (tmp_path / "test_caps.txt").write_text("".join(f"caption {c}\n" for c in range(5 * IMAGES)))
    (tmp_path / "test_ids.txt").write_text("".join(f"{name(i)}\n" for i in range(IMAGES)))
    return open_split(tmp_path, "test")


def name(image: int) -> str:
    return f"{chr(ord('a') + image)}.jpg"


def write(folder: Path, experts: list[str], crowd: list[str]) -> None:
    for file, lines in ((EXPERTS, experts), (CROWD, crowd)):
        text = "".join("\t".join(line.split()) + "\n" for line in lines)
        (folder / file).write_text(text, encoding="utf-8")


GOOD = (["b.jpg a.jpg#2 1 3 4"], ["c.jpg a.jpg#2 0.667 2 1"])


def test_each_definition_reads_its_file(split: PrecompSplit) -> None:
    experts = ["b.jpg a.jpg#2 3 3 1", "c.jpg a.jpg#2 4 4 1", "d.jpg a.jpg#2 2 2 4", "a.jpg a.jpg#2 4 4 4"]
    crowd = ["b.jpg a.jpg#2 0.333 1 2", "e.jpg b.jpg#0 1 3 0", "f.jpg b.jpg#0 0.5 2 2", "z.jpg b.jpg#0 1 3 0"]
    write(split.root, experts, crowd)
    found = read_judgements(split.root, split)
    right = {key: {tuple(map(int, pair)) for pair in np.argwhere(one.right)} for key, one in found.items()}
    assert right["expert"] == {(1, 2), (2, 2), (0, 2)}
    assert right["expert strict"] == {(2, 2), (0, 2)}
    assert right["crowd"] == {(4, 5)}  # two of four is no majority, and z.jpg is of another split
    assert right["either"] == right["expert"] | right["crowd"]
    assert found["either"].judged.sum() == 6
    counted = negative_pairs(found["expert"], split.owner)  # the own pair of a.jpg is not among them
    assert (counted["right"], counted["of"]) == (2, 3)
    counted = called_right(found["expert"], own_pairs(found["expert"], split.owner))  # but here it is alone
    assert (counted["right"], counted["of"]) == (1, 1)


@pytest.mark.parametrize(
    ("experts", "crowd", "message"),
    [
        (["b.jpg a.jpg#2 1 1"], GOOD[1], r"line 1: found 'b.jpg\\ta.jpg#2\\t1\\t1', expected .* three grades"),
        (["b.jpg a.jpg#2 1 1 5"], GOOD[1], "three grades from 1 to 4"),
        (GOOD[0], ["b.jpg a.jpg#2 yes 1 2"], "three numbers"),
        (GOOD[0], ["b.jpg a.jpg 1 3 0"], "line 1: found the caption 'a.jpg'"),
        (GOOD[0], ["b.jpg a.jpg#5 1 3 0"], "one of the 5 captions of a.jpg"),
        (GOOD[0], ["b.jpg a.jpg#2 1 3 0"] * 2, "line 2: found b.jpg and a.jpg#2 again"),
        (GOOD[0], ["y.jpg z.jpg#2 1 3 0"], "no pair of two images of test"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(
    split: PrecompSplit, experts: list[str], crowd: list[str], message: str
) -> None:
    write(split.root, experts, crowd)
    with pytest.raises(ItmError, match=message):
        read_judgements(split.root, split)


def test_missing_files_are_named(split: PrecompSplit) -> None:
    with pytest.raises(ItmError, match=rf"{CROWD}: found No such file.* beside the captions"):
        read_judgements(split.root, split)
    write(split.root, *GOOD)
    (split.root / "test_ids.txt").unlink()
    with pytest.raises(ItmError, match=r"test_ids.txt: found no such file, expected the file names"):
        read_judgements(split.root, open_split(split.root, "test"))


def random_case(seed: int) -> tuple[Scores, np.ndarray, PairJudgements]:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(IMAGES), 5)
    scores = Scores(*(torch.from_numpy(rng.random((IMAGES, 5 * IMAGES))) for _ in "ab"))
    judged = np.zeros((IMAGES, 5 * IMAGES), dtype=bool)
    judged[:, 2::5] = rng.random((IMAGES, IMAGES)) < 0.6  # one caption of each image, as in Flickr8k
    return scores, owner, PairJudgements(judged, judged & (rng.random(judged.shape) < 0.5))


def slow_query(scored: dict[int, float], own: set[int], judged: set[int], right: set[int], k: int) -> tuple[int, ...]:
    """One query, candidate by candidate: errors, judged ones, right ones, and the three ways to count a hit."""
    first = sorted(scored, key=lambda one: -scored[one])[:k]
    errors = [one for one in first if one not in own]
    seen = [one for one in errors if one in judged]
    good = [one for one in seen if one in right]
    hit = len(errors) < len(first)
    return len(errors), len(seen), len(good), hit, hit or bool(good), hit or bool(good) or len(seen) < len(errors)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 5])
def test_the_audit_agrees_with_loops(seed: int, k: int) -> None:
    scores, owner, grade = random_case(seed)
    captions = [c for c in range(len(owner)) if grade.judged[:, c].any()]
    loops = {
        "i2t": [
            slow_query(
                {c: float(scores.i2t[i, c]) for c in captions},
                {c for c in captions if owner[c] == i},
                {c for c in captions if grade.judged[i, c]},
                {c for c in captions if grade.right[i, c]},
                k,
            )
            for i in range(IMAGES)
        ],
        "t2i": [
            slow_query(
                {i: float(scores.t2i[i, c]) for i in range(IMAGES)},
                {int(owner[c])},
                {i for i in range(IMAGES) if grade.judged[i, c]},
                {i for i in range(IMAGES) if grade.right[i, c]},
                k,
            )
            for c in captions
        ],
    }
    found = audit(scores, owner, grade, np.array(captions))
    for way, queries in loops.items():
        errors, judged, right, split, least, most = map(sum, zip(*queries, strict=True))
        told, recall = found[way]["errors"][str(k)], found[way]["recall"][str(k)]
        assert (told["errors"], told["of"], told["right"]) == (errors, judged, right)
        counts = [recall[key]["right"] for key in ("split", "at_least", "at_most")]
        assert counts == [split, least, most]
        assert split <= least <= most <= recall["split"]["of"] == len(queries)


def test_the_hardest_wrong_pair_is_of_rank_one() -> None:
    scores, owner, grade = random_case(0)
    found = audit(scores, owner, grade, np.arange(2, 5 * IMAGES, 5))
    for bands in (found["i2t"]["by_rank"], found["t2i"]["by_rank"]):
        assert bands[0]["first"] == bands[0]["last"] == 1 and bands[0]["pairs"] == IMAGES
        assert sum(band["pairs"] for band in bands) == IMAGES * (IMAGES - 1)
    own = grade.judged & (owner[None] == np.arange(IMAGES)[:, None])
    assert sum(band["of"] for band in found["i2t"]["by_rank"]) == grade.judged.sum() - own.sum()


def test_scores_of_another_split_are_refused() -> None:
    scores, owner, grade = random_case(0)
    with pytest.raises(ItmError, match=r"shape \(11, 60\), expected \(12, 60\)"):
        audit(Scores.same(scores.i2t[:11]), owner, grade, np.arange(5))


def test_the_true_caption_number_tells_best(split: PrecompSplit) -> None:
    _, _, grade = random_case(3)
    noise = np.random.default_rng(0).normal(size=grade.right.shape)
    by_number = numbering(Scores.same(torch.from_numpy(grade.right + 0.5 * noise)), split, grade)
    assert max(by_number, key=by_number.get) == "2" and len(by_number) == 5
    assert by_number["2"] > 0.8


def test_the_chance_to_stand_above_by_pairs() -> None:
    rng = np.random.default_rng(1)
    scores, right = rng.integers(0, 6, 60), rng.random(60) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in scores[right] for b in scores[~right]]
    assert above_chance(scores, right) == pytest.approx(np.mean(pairs))
    with pytest.raises(ItmError, match="right and negative pairs"):
        above_chance(scores, np.zeros(60, dtype=bool))


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"), [(8, 10, 49.02, 94.33), (0, 10, 0.0, 27.75), (5, 5, 56.55, 100)]
)
def test_wilson_as_in_tables(hits: int, of: int, low: float, high: float) -> None:
    assert wilson(hits, of) == pytest.approx((100 * hits / of, low, high), abs=0.01)


def test_wilson_wants_cases() -> None:
    with pytest.raises(ItmError, match="0 of 0"):
        wilson(0, 0)


def test_the_page_shows_what_was_counted(split: PrecompSplit) -> None:
    assert "benchmarks.judgements" in judgements_fragment(split.root)  # no audit yet: how to make one
    grade = [("0 0 3", "1 3 0")[(i + j) % 2] for i in range(6) for j in range(6)]
    lines = [f"{name(k // 6)} {name(k % 6)}#2 {answer}" for k, answer in enumerate(grade)]
    write(split.root, ["b.jpg a.jpg#2 3 3 4"], lines)
    scores, _, _ = random_case(7)
    found = audit_runs(split, split.root, {"SCAN | one": scores})
    found["runs"]["SCAN | one"]["recalls"] = {"i2t_r1": 12.5, "t2i_r1": 6.25, "rsum": 100.0}
    path = split.root / RESULT
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    text = judgements_fragment(split.root)
    crowd = found["pairs"]["by_definition"]["crowd"]
    assert f"| {crowd['of']} | {crowd['right']} |" in text
    told = found["runs"]["SCAN | one"]["audit"]["either"]["t2i"]["errors"]["1"]
    assert f"| {told['errors']} | {told['of']} |" in text
    own = found["pairs"]["own"]
    assert own["crowd"]["of"] == 6 and f"the crowd calls {own['crowd']['right']} of 6 right" in text
    assert "SCAN / one" in text and text.count('role="img"') == 1
