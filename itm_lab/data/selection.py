"""Which images a conversion shall write, and in which order: Karpathy's split, a list, or all there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from itm_lab.data.disk import lines_bytes, read_lines
from itm_lab.data.karpathy import Karpathy, image_key, split_files
from itm_lab.data.tsv import read_tsv
from itm_utils.errors import input_error
from itm_utils.progress import bar


@dataclass(frozen=True)
class Wanted:
    """Rows to write. ids: one a row. texts: more files of the split, ending of the name → content."""

    ids: list[str]
    texts: Mapping[str, bytes] = field(default_factory=dict)

    def places(self, where: str) -> dict[str, int]:
        """Key of an image → its row."""
        places: dict[str, int] = {}
        for row, name in enumerate(self.ids):
            if places.setdefault(image_key(name), row) != row:
                raise input_error(
                    where, f"{name} twice, in rows {places[image_key(name)]} and {row}", "every image once"
                )
        return places


def wanted_from_karpathy(splits: Karpathy, split: str, most: int = 0) -> Wanted:
    """Images and captions of a split, in the order of Karpathy's file."""
    ids = [splits.id_of(image) for image in splits.images_of(split)]
    return Wanted(ids, split_files(splits, split, most))


def wanted_from_list(path: str | Path) -> Wanted:
    """Images of a text file, one name or number a line."""
    ids = read_lines(path, "one image a line")
    return Wanted(ids, {"ids.txt": lines_bytes(ids)})


def wanted_from_sources(sources: Sequence[Path]) -> Wanted:
    """All images of the TSV files in the order of their first line there; costs one reading of the files."""
    names: dict[str, str] = {}
    for source in sources:
        for line in bar(read_tsv(source), f"list {source.name}", "image"):
            names.setdefault(image_key(line.name), line.name)
    ids = list(names.values())
    return Wanted(ids, {"ids.txt": lines_bytes(ids)})
