"""What people say about pairs that a split counts as wrong: Flickr8k's two files of judgements, and an audit by them.

Two groups judged pairs of a test image and a caption of another. Experts graded them from 1 (does not describe it)
to 4 (describes it without errors), three a pair; workers of a crowd said yes or no. A retrieval result that is wrong
by the split and right by such a judgement is a *false negative*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from itm_lab.evidence.statistics import Interval
from itm_utils.data.precomp import PrecompSplit
from itm_utils.errors import input_error
from itm_utils.matcher import Scores
from itm_utils.metrics.retrieval import score_matrix

EXPERTS, CROWD = "ExpertAnnotations.txt", "CrowdFlowerAnnotations.txt"
# What counts as right: a file, and when its three numbers say so.
DEFINITIONS: dict[str, tuple[str, Callable[[Sequence[float]], bool]]] = {
    "crowd": (CROWD, lambda grade: grade[1] > grade[2]),
    "expert": (EXPERTS, lambda grades: sum(grade >= 3 for grade in grades) >= 2),
    "expert strict": (EXPERTS, lambda grades: sum(grade == 4 for grade in grades) >= 2),
}
RANKS = ((1, 1), (2, 5), (6, 20), (21, 100), (101, None))  # of negative pairs, hardest first
TOPS = (1, 5)


@dataclass(frozen=True)
class PairJudgements:
    """Pairs of a split by one definition. judged, right: (i, c) bool; what is right was judged."""

    judged: np.ndarray
    right: np.ndarray

    def __or__(self, other: PairJudgements) -> PairJudgements:
        """Judged by either, right if either says so."""
        return PairJudgements(self.judged | other.judged, self.right | other.right)


def read_judgements(folder: str | Path, split: PrecompSplit) -> dict[str, PairJudgements]:
    """Every definition, and ``either``: right by the crowd or by the experts' majority."""
    pairs = {name: read_pairs(Path(folder) / name, split) for name in (CROWD, EXPERTS)}
    shape = (split.n_images, split.n_captions)
    found = {}
    for name, (file, says_right) in DEFINITIONS.items():
        judged, right = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for pair, grade in pairs[file].items():
            judged[pair], right[pair] = True, says_right(grade)
        found[name] = PairJudgements(judged, right)
    return found | {"either": found["crowd"] | found["expert"]}


def read_pairs(path: Path, split: PrecompSplit) -> dict[tuple[int, int], tuple[float, ...]]:
    """(image, caption) → the three numbers of its line; lines about images of other splits are left out.

    A line is ``image, caption, three numbers`` between tabs; a caption is ``dogs.jpg#2``, the third of dogs.jpg.
    """
    if split.ids is None:
        raise input_error(split.root / f"{split.name}_ids.txt", "no such file", "the file names of the images")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = "It comes with Flickr8k's text files, beside the captions."
        raise input_error(path, error.strerror or str(error), "Flickr8k's judgements", hint) from error
    image_of = {name: image for image, name in enumerate(split.ids)}
    captions_of = _captions_of(split)
    grades = set("1234") if path.name == EXPERTS else None
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for number, line in enumerate(lines, start=1):
        image, caption, grade = _fields(line, f"{path}, line {number}", grades)
        owner, _, place = caption.partition("#")
        if not place.isdigit():
            raise input_error(
                f"{path}, line {number}", f"the caption {caption!r}", "a name and a number, such as dogs.jpg#2"
            )
        if image not in image_of or owner not in image_of:
            continue
        own = captions_of[image_of[owner]]
        if int(place) >= len(own):
            raise input_error(f"{path}, line {number}", caption, f"one of the {len(own)} captions of {owner}")
        pair = image_of[image], int(own[int(place)])
        if pair in found:
            raise input_error(f"{path}, line {number}", f"{image} and {caption} again", "each pair once")
        found[pair] = grade
    if not found:
        raise input_error(
            path, f"no pair of two images of {split.name}", "judgements of this split", "Is it Flickr8k's?"
        )
    return found


def _fields(line: str, where: str, allowed: set[str] | None) -> tuple[str, str, tuple[float, ...]]:
    """Image, caption and three numbers of a line; allowed: what a number may be, if not any."""
    parts = line.split("\t")
    try:
        image, caption, *grade = parts
        numbers = tuple(float(text) for text in grade)
    except ValueError:
        numbers = ()
    if len(numbers) != 3 or (allowed and not set(parts[2:]) <= allowed):
        expected = "image, caption and three grades from 1 to 4" if allowed else "image, caption and three numbers"
        raise input_error(where, repr(line), f"{expected}, between tabs")
    return image, caption, numbers


def _captions_of(split: PrecompSplit) -> list[np.ndarray]:
    order = np.argsort(split.owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(np.asarray(split.owner)[order])) + 1)


# ---------------------------------------------------------------------------------------------- counting


def wilson(hits: int, of: int, level: float = 0.95) -> Interval:
    """A share in percent with Wilson's interval, which behaves for few cases and near 0 and 100."""
    if not 0 <= hits <= of or of == 0:
        raise input_error("wilson", f"{hits} of {of}", "a number of cases and how many of them hit")
    z, share = NormalDist().inv_cdf((1 + level) / 2), hits / of
    middle, scale = (share + z**2 / (2 * of)) / (1 + z**2 / of), z / (1 + z**2 / of)
    half = scale * (share * (1 - share) / of + z**2 / (4 * of**2)) ** 0.5
    return Interval(100 * share, max(0.0, 100 * (middle - half)), min(100.0, 100 * (middle + half)))


def share(hits: int, of: int) -> dict[str, float | int | None]:
    """Counts and, where there are cases, their share in percent with its interval."""
    value, low, high = wilson(hits, of) if of else (None, None, None)
    return {"right": int(hits), "of": int(of), "percent": value, "low": low, "high": high}


def negative_pairs(judgements: PairJudgements, owner: np.ndarray) -> dict[str, float | int | None]:
    """Of the judged pairs that the split counts as wrong: how many are right."""
    return called_right(judgements, ~own_pairs(judgements, owner))


def own_pairs(judgements: PairJudgements, owner: np.ndarray) -> np.ndarray:
    """(i, c) True where a caption was written for the image."""
    return np.asarray(owner)[None, :] == np.arange(len(judgements.judged))[:, None]


def called_right(judgements: PairJudgements, pairs: np.ndarray) -> dict[str, float | int | None]:
    """Of these pairs, as far as they were judged, how many are right. pairs: (i, c) True for those asked about."""
    judged = judgements.judged & pairs
    return share(int((judged & judgements.right).sum()), int(judged.sum()))


def audit(scores: Scores, owner: np.ndarray, judgements: PairJudgements, columns: np.ndarray) -> dict[str, dict]:
    """Both directions, among some captions: see :func:`audit_ranking`.

    columns: the captions that somebody judged. Others are no queries and no candidates: nobody could say of their
    errors whether they are errors.
    """
    i2t, t2i = score_matrix(scores.i2t, "i2t"), score_matrix(scores.t2i, "t2i")
    if i2t.shape != judgements.judged.shape:
        raise input_error("scores", f"shape {i2t.shape}", f"{judgements.judged.shape}, the split that was judged")
    own = np.asarray(owner)[None, columns] == np.arange(len(i2t))[:, None]
    judged, right = judgements.judged[:, columns], judgements.right[:, columns]
    return {
        "i2t": audit_ranking(i2t[:, columns], own, judged, right),
        "t2i": audit_ranking(t2i[:, columns].T, own.T, judged.T, right.T),
    }


def audit_ranking(scores: np.ndarray, own: np.ndarray, judged: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """One direction; all arrays (q, n), a query a row. Own pairs are right by the split, whatever the judges say.

    errors: of the wrong results among the first k, how many were judged, and how many of these are right.
    recall: R@k by the split; ``at_least`` with judged-right results as right; ``at_most`` with unjudged ones too.
    by_rank: the same question for negative pairs of every rank, the hardest first.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    own, judged, right = (np.take_along_axis(flags, order, axis=1) for flags in (own, judged, right))
    right = right & judged & ~own
    found: dict[str, Any] = {"errors": {}, "recall": {}}
    for k in TOPS:
        wrong = ~own[:, :k]
        errors = share(int(right[:, :k].sum()), int((wrong & judged[:, :k]).sum()))
        found["errors"][str(k)] = errors | {"errors": int(wrong.sum())}
        found["recall"][str(k)] = {
            name: share(int(hit[:, :k].any(axis=1).sum()), len(hit))
            for name, hit in (("split", own), ("at_least", own | right), ("at_most", own | right | ~judged))
        }
    found["by_rank"] = list(_by_rank(own, judged, right))
    return found


def _by_rank(own: np.ndarray, judged: np.ndarray, right: np.ndarray) -> list[dict]:
    """For bands of ranks among the negative pairs of a query: how many were judged, and how many of these are right."""
    rank = np.where(own, 0, np.cumsum(~own, axis=1))
    bands = []
    for first, last in RANKS:
        band = (rank >= first) & (rank <= (last or rank.shape[1]))
        here = share(int((band & right).sum()), int((band & judged).sum()))
        bands.append({"first": first, "last": last, "pairs": int(band.sum())} | here)
    return bands


def numbering(scores: Scores, split: PrecompSplit, judgements: PairJudgements) -> dict[str, float]:
    """Whether ``#2`` is the third caption here too: how well scores tell right from wrong judged pairs, by number.

    For each number, the judgements are laid on the captions with that number, and the chance is given that a pair
    called right scores above one called wrong (area under the curve). The true number should have the highest.
    """
    table, captions_of = score_matrix(scores.i2t, "i2t"), _captions_of(split)
    images, columns = np.nonzero(judgements.judged)
    other = np.asarray(split.owner)[columns] != images
    images, columns = images[other], columns[other]
    grade = judgements.right[images, columns]
    owners = np.asarray(split.owner)[columns]
    found = {}
    for number in range(min(map(len, captions_of))):
        of_number = np.array([captions_of[image][number] for image in owners])
        found[str(number)] = above_chance(table[images, of_number], grade)
    return found


def above_chance(scores: np.ndarray, right: np.ndarray) -> float:
    """The chance that a positive scores above a negative, ties counted half."""
    if right.all() or not right.any():
        raise input_error("judgements", f"{right.sum()} right of {len(right)}", "right and negative pairs")
    values, place = np.unique(scores, return_inverse=True)
    rights, wrongs = (np.bincount(place[flags], minlength=len(values)) for flags in (right, ~right))
    below = np.cumsum(wrongs) - wrongs
    return float((rights * (below + wrongs / 2)).sum() / (rights.sum() * wrongs.sum()))


def audit_runs(split: PrecompSplit, folder: str | Path, runs: Mapping[str, Scores]) -> dict[str, Any]:
    """The whole audit. runs: name → scores of the split."""
    judgements = read_judgements(folder, split)
    columns = np.flatnonzero(judgements["either"].judged.any(axis=0))
    pairs = {name: negative_pairs(one, split.owner) for name, one in judgements.items()}
    own = {name: called_right(one, own_pairs(one, split.owner)) for name, one in judgements.items()}
    wrong = (split.n_images - 1) * len(columns)
    return {
        "pairs": {"by_definition": pairs, "own": own, "wrong": wrong, "agreement": agreement(judgements, split.owner)},
        "judged_captions": len(columns),
        "runs": {
            label: {
                "numbering": numbering(scores, split, judgements["crowd"]),
                "audit": {name: audit(scores, split.owner, one, columns) for name, one in judgements.items()},
            }
            for label, scores in runs.items()
        },
    }


def agreement(judgements: Mapping[str, PairJudgements], owner: np.ndarray) -> dict[str, int]:
    """Negative pairs that both groups judged, by who calls them right."""
    crowd, expert = judgements["crowd"], judgements["expert"]
    both = crowd.judged & expert.judged & ~own_pairs(crowd, owner)
    names = {"neither": (False, False), "crowd": (True, False), "expert": (False, True), "both": (True, True)}
    return {name: int((both & (crowd.right == c) & (expert.right == e)).sum()) for name, (c, e) in names.items()}
