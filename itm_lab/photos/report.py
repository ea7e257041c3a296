"""What was left out or changed on the way, and why: nothing vanishes without a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from itm_utils.errors import printable

IMAGE, CAPTION, NOTE = "image left out", "caption left out", "kept"
SHOWN = 5  # examples of each kind on the screen; the file has them all


@dataclass(frozen=True, order=True)
class Remark:
    """kind: one of the three above. where: an image's name, or a line of the captions file. why: in words."""

    kind: str
    where: str
    why: str

    def line(self) -> str:
        """One line of ``skipped.txt``: three columns with tabs between them, whatever characters a name has."""
        return "\t".join(printable(part) for part in (self.kind, self.where, self.why))


def as_text(remarks: Iterable[Remark]) -> str:
    """The whole file, the same for the same remarks in any order."""
    return "".join(f"{remark.line()}\n" for remark in sorted(set(remarks)))


def summary(remarks: Iterable[Remark], where: str) -> Iterator[str]:
    """A few examples of each kind for the screen. where: the file that has all of them."""
    kinds: dict[str, list[Remark]] = defaultdict(list)
    for remark in sorted(set(remarks)):
        kinds[remark.kind].append(remark)
    for kind, some in kinds.items():
        yield f"{kind}: {len(some):,}"
        for remark in some[:SHOWN]:
            _, name, why = remark.line().split("\t")
            yield f"  {name}: {why}"
        if len(some) > SHOWN:
            yield f"  … and {len(some) - SHOWN:,} more in {where}"
