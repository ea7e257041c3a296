"""Flickr8k from its public folders: photographs, captions, lists of the splits, Flickr30K Entities, human judgements.

Its files go by several names, so each is looked for in the folders that are given and one level below them.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from itm_lab.data.disk import counted, file_digest, read_lines
from itm_lab.data.entities import PHRASES, entities_grounding, entities_name, phrases_bytes
from itm_lab.data.registry import ENTITIES_PAGE, PER_IMAGE
from itm_lab.photos import captions as caption_files
from itm_lab.photos.album import SPLITS, Photo
from itm_lab.photos.extract import Beside, Made, extract_splits
from itm_lab.photos.folder import is_image_name
from itm_lab.photos.regions import Source
from itm_lab.photos.report import IMAGE, NOTE, Remark
from itm_utils.data.precomp import open_split, read_captions
from itm_utils.errors import input_error

TOKENS = ("Flickr8k.token.txt", "Flickr8k.token", "captions.txt")
LISTS = {split: (f"Flickr_8k.{split}Images.txt", f"{split}_ids.txt") for split in SPLITS}
LISTED = {
    split: f"{split}_caps.txt" for split in SPLITS
}  # captions in the order of the list, where there is no token file
ARCHIVE, KINDS = "annotations.zip", {"Sentences": ".txt", "Annotations": ".xml"}
JUDGEMENTS = ("ExpertAnnotations.txt", "CrowdFlowerAnnotations.txt")
LEAST_PHOTOS = 20  # in a folder that is taken for the photographs
LARGEST = 2**20  # bytes of one file of the annotations: real ones have a few thousand
INSIDE = re.compile(r"(?:[^/]+/)*(Sentences|Annotations)/([^/]+)\.(txt|xml)")


@dataclass(frozen=True)
class Public:
    """What the folders hold. splits: images in the order of their list. entities: a folder or an archive, if any."""

    splits: dict[str, list[Photo]]
    entities: Path | None
    judgements: list[Path]
    remarks: list[Remark] = field(default_factory=list)


def convert_flickr8k(folders: Sequence[Path], out: Path, source: Source, least: int, components: str = "") -> Made:
    """One dataset with boxes, sizes and phrases with boxes. Called again after an interruption, it goes on."""
    public = read_public(folders)
    inputs = [*([public.entities] if public.entities else []), *public.judgements]
    facts = {"beside": {path.name: _digest(path) for path in inputs}}
    beside = Beside(facts, lambda data, read: write_beside(public, data, read))
    return extract_splits(public.splits, out, source, least, components, public.remarks, beside)


def read_public(folders: Sequence[Path]) -> Public:
    """Find the files, and bring photographs, captions and lists together."""
    for folder in folders:
        if not folder.is_dir():
            raise input_error(folder, "no such folder" if not folder.exists() else "a file", "a folder of Flickr8k")
    places = [place for folder in folders for place in (folder, *sorted(filter(Path.is_dir, folder.iterdir())))]
    photos, remarks = _photos(places, folders), []
    lists = {split: _find(places, names) for split, names in LISTS.items()}
    if absent := [LISTS[split][0] for split, path in lists.items() if path is None]:
        raise input_error(_said(folders), f"no {' and no '.join(absent)}", "a list of the images of each split")
    names = {split: read_lines(path, "an image name in each line") for split, path in lists.items() if path}
    said = _captions(places, folders, names, remarks)
    splits = {}
    for split, listed in names.items():
        splits[split] = [_photo(name, photos, said, remarks) for name in dict.fromkeys(listed)]
        splits[split] = [photo for photo in splits[split] if photo is not None]
        if not splits[split]:
            found = f"not one image of {split} with a photograph and captions (first: {listed[0]})"
            raise input_error(_said(folders), found, "the photographs, captions and lists of one dataset")
    _check_apart(splits)
    entities = _find(places, (ARCHIVE,)) or next(
        (place for place in places if all((place / kind).is_dir() for kind in KINDS)), None
    )
    if entities is None:
        remarks.append(Remark(NOTE, ARCHIVE, f"none, so the dataset has no phrases with boxes ({ENTITIES_PAGE})"))
    judgements = [path for name in JUDGEMENTS if (path := _find(places, (name,)))]
    return Public(splits, entities, judgements, remarks)


def _said(folders: Iterable[Path]) -> str:
    return ", ".join(map(str, folders))


def _find(places: Sequence[Path], names: Iterable[str]) -> Path | None:
    """The first of the names that is there."""
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _photos(places: Sequence[Path], folders: Sequence[Path]) -> dict[str, Path]:
    """Stem → file, of the place with the most images: copies of the dataset come with several endings."""
    best: dict[str, Path] = {}
    for place in places:
        found = {path.stem: path for path in sorted(place.iterdir()) if is_image_name(path.name)}
        best = found if len(found) > len(best) else best
    if len(best) < LEAST_PHOTOS:
        raise input_error(_said(folders), counted(len(best), "image"), "the folder of Flickr8k's photographs")
    return best


def _captions(
    places: Sequence[Path], folders: Sequence[Path], names: Mapping[str, list[str]], remarks: list[Remark]
) -> dict[str, list[str]]:
    """Stem of an image → its captions in order, from the token file, or from lists as long as those of the images.

    A caption that an image has twice stays: judgements call captions by their number.
    """
    said: dict[str, list[str]] = {}
    if (tokens := _find(places, TOKENS)) is not None:
        lines, found = caption_files.read_lines(tokens)
        remarks += found
        for line in lines:
            said.setdefault(Path(line.name).stem, []).append(line.caption)
        return said
    for split, listed in names.items():
        if (path := _find(places, (LISTED[split],))) is None:
            raise input_error(_said(folders), f"no {TOKENS[0]} and no {LISTED[split]}", "the captions")
        lines = read_captions(path)
        if len(lines) != PER_IMAGE * len(listed):
            expected = f"{PER_IMAGE * len(listed):,}, {PER_IMAGE} for each image of the list"
            raise input_error(path, f"{len(lines):,} captions", expected)
        for number, name in enumerate(listed):
            said[Path(name).stem] = lines[PER_IMAGE * number : PER_IMAGE * (number + 1)]
    return said


def _photo(name: str, photos: dict[str, Path], said: dict[str, list[str]], remarks: list[Remark]) -> Photo | None:
    """An image of a list with its file and captions; None, and a remark, where one of the two is missing."""
    stem = Path(name).stem
    path, captions = photos.get(stem), said.get(stem, [])
    if path is None or not captions:
        remarks.append(Remark(IMAGE, name, "no photograph" if path is None else "no caption"))
        return None
    if len(captions) != PER_IMAGE:
        remarks.append(Remark(NOTE, name, f"{counted(len(captions), 'caption')} instead of {PER_IMAGE}"))
    return Photo(name, path, path.stat().st_size, tuple(captions))


def _check_apart(splits: dict[str, list[Photo]]) -> None:
    home: dict[str, str] = {}
    for split, photos in splits.items():
        for photo in photos:
            if (other := home.setdefault(photo.name, split)) != split:
                raise input_error(
                    LISTS[split][0], f"{photo.name}, which is in {other} too", "an image in one split only"
                )


def _digest(path: Path) -> str:
    """Of a file; of a folder of annotations, the number of files of each kind."""
    if path.is_file():
        return file_digest(path)
    return " ".join(f"{sum(1 for _ in (path / kind).glob(f'*{ending}'))} {kind}" for kind, ending in KINDS.items())


def write_beside(public: Public, data: Path, read: Mapping[str, list[Photo]]) -> list[Remark]:
    """Judgements as they are, and the phrases of every split; returns what did not match."""
    for path in public.judgements:
        (data / path.name).write_bytes(path.read_bytes())
    if public.entities is None:
        return []
    remarks = []
    wanted = {entities_name(photo.name) for photos in read.values() for photo in photos}
    with unpacked(public.entities, wanted) as folder:
        for split in read:
            grounding = entities_grounding(folder, opened := open_split(data, split))
            (data / f"{split}_{PHRASES}").write_bytes(phrases_bytes(grounding))
            total = sum(map(len, grounding.phrases))
            boxed = sum(len(phrase.boxes) > 0 for own in grounding.phrases for phrase in own)
            said = [f"{counted(total, 'phrase')}, {boxed:,} with boxes, of {counted(opened.n_captions, 'caption')}"]
            said += [f"left out: {number:,} {reason}" for reason, number in grounding.skipped.items()]
            remarks += [Remark(NOTE, f"phrases of {split}", line) for line in said]
    return remarks


@contextmanager
def unpacked(entities: Path, wanted: set[str]) -> Iterator[Path]:
    """The annotations as a folder: as they are, or those of the wanted images in a folder that goes again."""
    if entities.is_dir():
        yield entities
        return
    with tempfile.TemporaryDirectory(prefix="itm-entities-") as temporary:
        try:
            unpack(entities, wanted, Path(temporary))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
            found = f"a damaged archive ({error})"
            raise input_error(entities, found, "the annotations of Flickr30K Entities", "Download it again.") from error
        yield Path(temporary)


def unpack(entities: Path, wanted: set[str], folder: Path) -> None:
    """The files of the wanted images, under names of our own: what else an archive says is not followed."""
    for kind in KINDS:
        (folder / kind).mkdir()
    with zipfile.ZipFile(entities) as archive:
        for member in archive.infolist():
            inside = INSIDE.fullmatch(member.filename)
            if inside is None or inside[2] not in wanted:
                continue
            if member.file_size > LARGEST:
                found = f"{member.filename} of {member.file_size:,} bytes"
                raise input_error(entities, found, "small text files", "Download it again.")
            (folder / inside[1] / f"{inside[2]}{KINDS[inside[1]]}").write_bytes(archive.read(member))
