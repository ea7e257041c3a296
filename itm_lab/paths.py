"""Where things lie in a checkout of the book. One object, found once and passed on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from itm_utils.errors import ItmError


@dataclass(frozen=True)
class Paths:
    """The folders and files of one checkout. root: the folder that holds ``notebooks`` and ``pyproject.toml``."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Paths:
        """The checkout around ``start`` (the current folder by default)."""
        start = start or Path.cwd()
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
                return cls(folder)
        raise ItmError("No notebooks/ beside a pyproject.toml here or above: run itm inside the book's repository.")

    @classmethod
    def find_or_none(cls, start: Path | None = None) -> Paths | None:
        """The same, or None where there is no checkout: the packages alone can still train and score."""
        try:
            return cls.find(start)
        except ItmError:
            return None

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def receipts(self) -> Path:
        return self.root / "receipts"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def models(self) -> Path:
        return self.root / "itm_utils" / "models"

    @property
    def book_data(self) -> Path:
        return self.root / "book" / "data"

    @property
    def published_tables(self) -> Path:
        return self.book_data / "published_tables.yaml"

    @property
    def executions(self) -> Path:
        return self.book_data / "executions"

    @property
    def build(self) -> Path:
        return self.root / "_build"
