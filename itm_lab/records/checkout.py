"""The code that a run comes from: the commit of the book's checkout, and whether the checkout is that commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from itm_lab.paths import Paths

# Where a file that git does not know decides a run as well. Elsewhere there are runs, data and new receipts.
CODE = ("itm_utils", "itm_lab", "notebooks", "experiments", "book/data")

OLD_SCHEMA = '^ "schema": [23],?$'  # a line of a receipt of the old protocol


@dataclass(frozen=True)
class Code:
    """commit: of the checkout. clean: whether its code and settings are those of the commit. None outside git."""

    commit: str | None = None
    clean: bool | None = None

    @property
    def label(self) -> str | None:
        """The commit, with ``+`` where files were changed since."""
        return None if self.commit is None else self.commit + "+" * (not self.clean)


def code_of(paths: Paths | None) -> Code:
    """The code of a checkout as it is now."""
    commit = git(paths.root, "rev-parse", "HEAD") if paths else None
    if paths is None or commit is None:
        return Code()
    return Code(commit, not changed_files(paths.root))


def changed_files(root: Path) -> list[str]:
    """Tracked files that are not as committed, and new ones among the code; none where there is no git.

    Receipts that were added since count as nothing, and so do those that took the place of one of the old protocol: the
    runs of a queue write them.
    """
    status = git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no") or ""
    entries = [(entry[:2], entry[3:]) for entry in status.split("\0") if entry]
    changed = [path for how, path in entries if not (how[0] == "A" and path.startswith("receipts/"))]
    if any(path.startswith("receipts/") for path in changed):
        replaced = old_receipts(root)
        changed = [path for path in changed if PurePosixPath(path).with_suffix(".json").as_posix() not in replaced]
    new = git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE) or ""
    return [*changed, *(path for path in new.split("\0") if path)]


def old_receipts(root: Path) -> set[str]:
    """Receipts that are of the old protocol in the commit: no verdict rests on them."""
    found = git(root, "grep", "-l", "-z", "-E", OLD_SCHEMA, "HEAD", "--", "receipts") or ""
    return {path.removeprefix("HEAD:") for path in found.split("\0") if path}


def git(root: Path, *call: str) -> str | None:
    """What git prints; None where it fails or there is none."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *call], cwd=root, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
