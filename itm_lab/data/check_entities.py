"""``itm data check entities``: Flickr30K Entities against the images of the Flickr30K folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from itm_lab.data.disk import counted
from itm_lab.data.entities import OUT_OF_IMAGE, entities_grounding, entities_name, read_boxes
from itm_lab.data.registry import ENTITIES_FOLDER, ENTITIES_IMAGES, ENTITIES_PAGE, KARPATHY_PAGE, KNOWN
from itm_lab.data.report import DAMAGED, MISSING, NOTE, OK, CheckResult, conclusion, damaged
from itm_utils.data.phrases import Grounding
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.errors import ItmError

KINDS = {"Sentences": ".txt", "Annotations": ".xml"}


def check_entities(data_root: Path) -> tuple[list[CheckResult], str, bool]:
    """Findings about the annotations, a sentence, and whether they are whole."""
    folder = data_root / ENTITIES_FOLDER
    names_of = {kind: {path.stem for path in (folder / kind).glob(f"*{ending}")} for kind, ending in KINDS.items()}
    findings = [_count(folder, kind, names_of[kind]) for kind in KINDS]
    if all(names_of.values()):
        findings += _against_splits(KNOWN["f30k"].root(data_root), folder, names_of)
    common = names_of["Sentences"] & names_of["Annotations"]
    return findings, *conclusion(f"Flickr30K Entities in {folder}", findings, f"{counted(len(common), 'image')}")


def _count(folder: Path, kind: str, names_of: set[str]) -> CheckResult:
    """How many images have a file of one kind."""
    if not names_of:
        there = "an empty folder" if (folder / kind).is_dir() else "no such folder"
        advice = f"text; {ENTITIES_PAGE}, unpacked so that {folder / kind} holds one file per image."
        return CheckResult(kind, MISSING, there, advice)
    of_all = f" of {ENTITIES_IMAGES:,}" if len(names_of) != ENTITIES_IMAGES else ""
    return CheckResult(kind, OK, f"{len(names_of):,}{of_all} images")


def _against_splits(root: Path, folder: Path, names_of: dict[str, set[str]]) -> list[CheckResult]:
    """Each split of Flickr30K that is there."""
    findings = []
    for name in KNOWN["f30k"].images:
        try:
            split = open_split(root, name)
        except ItmError as error:
            advice = "the annotations are compared with the captions of Flickr30K: `itm data check f30k` says more."
            findings.append(
                CheckResult(name, MISSING, f"no split of Flickr30K ({str(error).split(', expected')[0]})", advice)
            )
            continue
        findings += _against_split(split, folder, names_of)
    return findings


def _against_split(split: PrecompSplit, folder: Path, names_of: dict[str, set[str]]) -> list[CheckResult]:
    """Files for every image, then every file through the reader that the chapters use."""
    if split.ids is None:
        advice = f"`itm data ids {split.root} {split.name} --karpathy FILE`, with Karpathy's JSON of {KARPATHY_PAGE}."
        return [CheckResult(f"{split.name}_ids.txt", MISSING, "no file names of the images", advice)]
    wanted = [entities_name(name) for name in split.ids]
    missing = {kind: [name for name in wanted if name not in there] for kind, there in names_of.items()}
    if all(len(names) == len(wanted) for names in missing.values()):
        advice = f"`itm data ids {split.root} {split.name} --karpathy FILE --set-aside` writes file names."
        return [CheckResult(f"{split.name}_ids.txt", DAMAGED, f"not one image of Entities (first {wanted[0]})", advice)]
    gone = [
        CheckResult(
            f"{split.name}, {kind}",
            MISSING,
            f"{counted(len(names), 'image')}, first {names[0]}",
            f"from {ENTITIES_PAGE}.",
        )
        for kind, names in missing.items()
        if names
    ]
    if gone:
        return gone
    try:
        grounding = entities_grounding(folder, split)
        return [*_described(split, grounding), *_left_out(split, grounding, folder)]
    except ItmError as error:
        where = Path(str(error).split(": found ")[0]).name
        return [damaged(f"{split.name}, {where}", error)]


def _described(split: PrecompSplit, grounding: Grounding) -> list[CheckResult]:
    """Phrases and boxes, and images without any."""
    boxed = [any(len(phrase.boxes) for phrase in phrases) for phrases in grounding.phrases]
    phrases = sum(map(len, grounding.phrases))
    with_box = sum(bool(len(phrase.boxes)) for of_one in grounding.phrases for phrase in of_one)
    findings = [
        CheckResult(
            split.name,
            OK,
            f"{counted(split.n_images, 'image')}, {counted(phrases, 'phrase')}, {with_box:,} with boxes",
        )
    ]
    bare = np.flatnonzero(np.bincount(split.owner, weights=boxed, minlength=split.n_images) == 0)
    if len(bare):
        assert split.ids is not None  # phrases are found by them
        findings.append(
            CheckResult(split.name, NOTE, f"{counted(len(bare), 'image')} without a box, first {split.ids[bare[0]]}")
        )
    return findings


def _left_out(split: PrecompSplit, grounding: Grounding, folder: Path) -> Iterator[CheckResult]:
    """What the reader counted; of boxes that leave their image also where the first one is."""
    for reason, number in grounding.skipped.items():
        first = f", first in {_first_beyond(split, folder)}" if reason == OUT_OF_IMAGE else ""
        yield CheckResult(split.name, NOTE, f"{number:,} {reason}{first}")


def _first_beyond(split: PrecompSplit, folder: Path) -> str:
    """The first image with such a box. Counts do not say it, so the files are read again, up to that one."""
    assert split.ids is not None  # phrases are found by them
    for name in split.ids:
        odd: Counter[str] = Counter()
        read_boxes(folder / "Annotations" / f"{entities_name(name)}.xml", None, odd)
        if odd[OUT_OF_IMAGE]:
            return name
    return "none"
