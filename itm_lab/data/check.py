"""``itm data check``: what a dataset folder holds, what is missing or damaged, and where to get it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from itm_lab.data.cross_split_checks import FEW, check_between
from itm_lab.data.disk import check_file, counted, gigabytes
from itm_lab.data.karpathy import BREAKS, MANY_WORDS
from itm_lab.data.opening import open_vocabulary
from itm_lab.data.registry import KAGGLE_PAGE, KARPATHY_PAGE, NEEDED, PER_IMAGE, Known
from itm_lab.data.report import DAMAGED, MISSING, NOTE, OK, CheckResult, conclusion, damaged
from itm_lab.data.scan import Scanned, scan_boxes, scan_features
from itm_utils.data.precomp import LARGEST_SHARE, PrecompSplit, load_array, open_split, read_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.digests import digest_of
from itm_utils.errors import ItmError

OPTIONAL = {
    "boxes.npy": "none; only PFAN, attention metrics and drawings of attention need boxes",
    "sizes.npy": "none; only needed with boxes",
    "ids.txt": "none; Flickr30K Entities and judgements of COCO need to know the images",
}


def check_dataset(known: Known, name: str, data_root: Path, quick: bool = False) -> tuple[list[CheckResult], str, bool]:
    """Findings about a dataset, a sentence, and whether it is whole. quick: leave the features unread."""
    root = known.root(data_root)
    if not root.is_dir():
        advice = get_advice(known, name, data_root, "")
        findings = [CheckResult(str(root), MISSING, "no such folder", advice)]
        return findings, *conclusion(f"{known.title} in {root}", findings, "")
    findings, splits, contents = [], {}, {}
    for split in known.images:
        found, opened = check_split(known, name, data_root, split)
        if opened is not None:
            splits[split] = opened
            if not quick:
                scanned = scan_features(opened.features.path, opened.repeat)
                contents[split] = scanned.images
                found += [*check_features(opened, scanned), *check_boxes(opened)]
            found += [] if quick or _broken(found) else [fingerprint(opened)]
        findings += found
    findings += [check_vocabulary(root, splits.get("train")), *check_between(known, splits, contents)]
    told = ""
    if quick:
        told = "; features were not read"
    elif not _broken(findings):
        told = f", fingerprint {fingerprint_of_all(splits)}"
    apart = [split for key, split in splits.items() if key not in known.within]
    images, captions = (sum(getattr(split, n) for split in apart) for n in ("n_images", "n_captions"))
    whole = f"{counted(images, 'image')}, {counted(captions, 'caption')}{told}"
    return findings, *conclusion(f"{known.title} in {root}", findings, whole)


def _broken(findings: list[CheckResult]) -> bool:
    return any(finding.state in (MISSING, DAMAGED) for finding in findings)


def get_advice(known: Known, name: str, data_root: Path, file: str) -> str:
    """Where a file comes from, and how big it is."""
    if not file:
        size = f"about {gigabytes(known.size())} of features"
    elif file.endswith("_ims.npy"):
        size = f"about {gigabytes(known.feature_bytes(file.removesuffix('_ims.npy')))}"
    else:
        size = "text, small"
    remote = known.remote(file).rstrip("/")
    command = f"itm data fetch {name} --data-root {data_root}"
    return f"{size}; {remote} of {KAGGLE_PAGE}. With a Kaggle account: `{command}`."


def check_split(known: Known, name: str, data_root: Path, split: str) -> tuple[list[CheckResult], PrecompSplit | None]:
    """Findings about one split without reading its features, and the split if it opens."""
    root = known.root(data_root)
    findings = []
    for ending in NEEDED:
        file = f"{split}_{ending}"
        try:
            check_file(root / file, "a file of the precomputed format")
            if ending == "ims.npy":
                load_array(root / file, mmap_mode="r")
            else:
                read_captions(root / file)
        except ItmError as error:
            gone = not (root / file).exists() and not (root / file).is_symlink()
            found = CheckResult(file, MISSING, "no such file") if gone else damaged(file, error)
            findings.append(CheckResult(found.what, found.state, found.found, get_advice(known, name, data_root, file)))
    if findings:
        return findings, None
    try:
        opened = open_split(root, split)
    except ItmError as error:
        file = Path(str(error).split(": found ")[0]).name
        return [damaged(file, error)], None
    return [*describe(known, opened), *check_captions(opened), *check_ids(opened), *check_optional(opened)], opened


def fingerprint_of_all(splits: Mapping[str, PrecompSplit]) -> str:
    """Short digest of the fingerprints of some splits."""
    return digest_of([split.identity()["fingerprint"] for split in splits.values()])[:16]


def fingerprint(split: PrecompSplit) -> CheckResult:
    """What receipts say of the split."""
    try:
        return CheckResult(split.name, OK, f"fingerprint {split.identity()['fingerprint'][:16]}")
    except ItmError as error:  # it reads some rows, and they may be damaged
        return damaged(Path(str(error).split(": found ")[0]).name, error)


def describe(known: Known, split: PrecompSplit) -> Iterator[CheckResult]:
    """Shapes, and the number of images against the known one."""
    path = split.features.path
    shape = " x ".join(f"{side:,}" for side in split.features.shape)
    times = f", every image {split.repeat} times" if split.repeat > 1 else ""
    array = load_array(path, mmap_mode="r")
    yield CheckResult(path.name, OK, f"{shape} {array.dtype}, {gigabytes(path.stat().st_size)}{times}")
    if not array.flags.c_contiguous:
        advice = "every row is spread over the whole file; save it again with np.ascontiguousarray, or training crawls."
        yield CheckResult(path.name, NOTE, "stored in Fortran order", advice)
    right = known.images[split.name]
    if split.n_images in right:
        yield CheckResult(split.name, OK, f"{counted(split.n_images, 'image')}, as it should be")
    else:
        wanted = " or ".join(f"{number:,}" for number in right)
        yield CheckResult(split.name, DAMAGED, f"{counted(split.n_images, 'image')}, expected {wanted}")


def check_captions(split: PrecompSplit) -> Iterator[CheckResult]:
    """Counts, and captions that are odd though they can be read."""
    name = f"{split.name}_caps.txt"
    counts = np.bincount(split.owner)
    each = f"{counts[0]}" if (counts == counts[0]).all() else f"{counts.min()} to {counts.max()}"
    yield CheckResult(
        name, OK if each == str(PER_IMAGE) else NOTE, f"{counted(split.n_captions, 'caption')}, {each} an image"
    )
    twice = [f"line {line} as {lines[0]}" for lines in _grouped(split).values() for line in lines[1:]]
    control = [f"line {n}" for n, c in enumerate(split.captions, 1) if BREAKS.search(c)]
    long = [f"line {n}, {len(c.split())} words" for n, c in enumerate(split.captions, 1) if len(c.split()) > MANY_WORDS]
    kinds = {"repeated for one image": twice, "with control characters": control, f"of over {MANY_WORDS} words": long}
    for kind, found in kinds.items():
        if found:
            yield CheckResult(name, NOTE, f"{counted(len(found), 'caption')} {kind}, first: {found[0]}")


def _grouped(split: PrecompSplit) -> dict[tuple[int, str], list[int]]:
    """(image, caption) → lines, from 1."""
    lines: dict[tuple[int, str], list[int]] = {}
    for line, (image, caption) in enumerate(zip(split.owner.tolist(), split.captions, strict=True), start=1):
        lines.setdefault((image, caption), []).append(line)
    return lines


def check_ids(split: PrecompSplit) -> Iterator[CheckResult]:
    """Every image once; numbers that are no file names are said to be so."""
    if split.ids is None:
        return
    name = f"{split.name}_ids.txt"
    repeated = [image_id for image_id, times in Counter(split.ids).items() if times > 1]
    if repeated:
        yield CheckResult(name, DAMAGED, f"{counted(len(repeated), 'image')} several times, first {repeated[0]}")
    elif all(image_id.isdigit() for image_id in split.ids):
        advice = f"file names come from Karpathy's JSON ({KARPATHY_PAGE}): `itm data ids {split.root} {split.name} --karpathy FILE`."
        yield CheckResult(name, NOTE, f"{counted(len(split.ids), 'image')} by number, not by file name", advice)
    else:
        yield CheckResult(name, OK, f"{counted(len(split.ids), 'image')}, first {split.ids[0]}")


def check_optional(split: PrecompSplit) -> Iterator[CheckResult]:
    """Files that not every chapter needs."""
    for ending, without in OPTIONAL.items():
        path = split.root / f"{split.name}_{ending}"
        if path.is_symlink() and not path.exists():
            yield CheckResult(path.name, DAMAGED, "a symbolic link that leads nowhere or in a circle")
        elif not path.exists():
            yield CheckResult(path.name, NOTE, without)
        elif ending != "ids.txt":
            shape = " x ".join(f"{side:,}" for side in load_array(path, mmap_mode="r").shape)
            yield CheckResult(path.name, OK, shape)


def check_features(split: PrecompSplit, found: Scanned) -> Iterator[CheckResult]:
    """Every number of the features. found: what reading them showed."""
    name = split.features.path.name
    wrong = {"with NaN or infinity": found.not_finite, "of zeros only": found.zero,
             "unlike the first row of their image": found.torn}  # fmt: skip
    for kind, rows in wrong.items():
        if rows:
            yield CheckResult(name, DAMAGED, f"{counted(len(rows), 'row')} {kind}, first row {rows[0]:,}")
    if found.twins:
        row, earlier = found.twins[0]
        state = NOTE if len(found.twins) <= FEW * split.n_images else DAMAGED
        yield CheckResult(
            name,
            state,
            f"{counted(len(found.twins), 'image')} with the features of another, first row {row:,} as {earlier:,}",
        )
    if not any(wrong.values()):
        yield CheckResult(name, OK, f"every number is finite; content {found.digest[:16]}")


def check_boxes(split: PrecompSplit) -> Iterator[CheckResult]:
    """Every box lies in its image."""
    if split.boxes is None:
        return
    name = split.boxes.path.name
    if split.boxes.shape[-1] != 4:
        yield CheckResult(name, NOTE, f"{split.boxes.shape[-1]} numbers a box: a model's own code, not looked at")
        return
    shares, path = _are_shares(split), split.root / f"{split.name}_sizes.npy"
    if shares:
        found = scan_boxes(split.boxes.path, np.ones((len(split.boxes), 2)), edge=LARGEST_SHARE - 1)
    else:
        found = scan_boxes(split.boxes.path, load_array(path) if path.exists() else None)
    wrong = {"with NaN or infinity": found.not_finite, "with a box that ends before it begins": found.turned,
             "with a box outside its image": found.outside}  # fmt: skip
    for kind, rows in wrong.items():
        if rows:
            yield CheckResult(name, DAMAGED, f"{counted(len(rows), 'row')} {kind}, first row {rows[0]:,}")
    if shares:
        scaled = f"read as pixels by {path.name}" if path.exists() else f"and no {path.name} to make pixels of them"
        yield CheckResult(name, NOTE, f"shares of the image's sides (0 to 1), {scaled}")
    if not any(wrong.values()):
        yield CheckResult(name, OK, f"every box begins before it ends, in {'shares' if shares else 'pixels'}")


def _are_shares(split: PrecompSplit) -> bool:
    """As the reader takes them; a row that it cannot read is reported by the scan."""
    try:
        return split.box_shares
    except ItmError:
        return False


def check_vocabulary(root: Path, train: PrecompSplit | None) -> CheckResult:
    """Exactly one vocabulary, of these captions; the recipes look for it beside the features."""
    try:
        vocabulary = Vocabulary.of_folder(root) if train is None else open_vocabulary(root, train)
        return CheckResult("*_vocab.json", OK, f"{len(vocabulary):,} words")
    except ItmError as error:
        if any(root.glob("*_vocab.json")):
            return damaged("*_vocab.json", error)
    advice = (
        f"`itm data vocabulary {root}` builds it from the captions; published weights need the file they came with."
    )
    return CheckResult("*_vocab.json", MISSING, "no vocabulary", advice)
