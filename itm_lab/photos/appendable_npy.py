"""An ``.npy`` file to which rows are added, and which can be cut back to what was noted as safe."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from itm_utils.errors import input_error

BLOCK = 2**24  # bytes that are read at once


class GrowingArray:
    """Rows of one shape in a file that is a whole ``.npy`` array as soon as :meth:`close` has written their number.

    NumPy leaves room in its header for any number of rows, so the header keeps its length.
    """

    def __init__(self, path: Path, row: tuple[int, ...], dtype: str, rows: int = 0) -> None:
        self.path, self.row, self.dtype, self.rows = path, row, np.dtype(dtype), rows
        self.bytes = int(np.prod(row)) * self.dtype.itemsize
        if rows and not path.is_file():
            raise self._damaged("no such file")
        self.file = path.open("r+b" if path.exists() else "w+b")
        self.header = self._write_header(0)
        end = self.header + rows * self.bytes
        if (there := self.file.seek(0, os.SEEK_END)) < end:
            raise self._damaged(f"{there:,} bytes")
        self.file.truncate(end)  # what came after the last note is made again
        self.digest = hashlib.sha256()  # of all rows
        self.file.seek(self.header)
        while block := self.file.read(BLOCK):
            self.digest.update(block)

    def _damaged(self, found: str) -> Exception:
        hint = f"Remove {self.path.parent.parent} to start over."
        return input_error(self.path, found, f"{self.rows:,} rows, as noted before the interruption", hint)

    def _write_header(self, rows: int) -> int:
        """The header for so many rows; returns where the first one begins."""
        self.file.seek(0)
        about = {"descr": self.dtype.str, "fortran_order": False, "shape": (rows, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, about)
        return self.file.tell()

    def append(self, values: np.ndarray) -> None:
        """Add rows (n, …); they are on the disk when this returns."""
        self.file.seek(self.header + self.rows * self.bytes)
        content = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        self.digest.update(content)
        self.file.write(content)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.rows += len(values)

    def close(self) -> None:
        """Write how many rows there are, and close."""
        if self._write_header(self.rows) != self.header:
            raise input_error(self.path, "a header of another length", "room for the number of rows", "Update NumPy.")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
