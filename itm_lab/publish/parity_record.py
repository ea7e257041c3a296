"""The record of a comparison with all reference cases: what the companion pages and the status page show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from itm_lab.parity.comparison import TOLERANCES, Difference
from itm_utils.errors import input_error
from itm_utils.files import read_text, write_json

FILE = "book/data/parity.json"
CASES = "tests/golden"


def write_record(root: Path, folder: Path, differences: Iterable[Difference]) -> Path:
    """Write what a comparison of all cases gave; one of a part of them is refused."""
    import torch

    if folder.resolve() != (root / CASES).resolve():
        raise input_error("--record", str(folder), f"{CASES}: the record is of all cases")
    rows = [
        {
            "case": one.case,
            "kind": one.kind,
            "difference": float(f"{one.difference:.1e}"),
            "allowed": TOLERANCES[one.kind],
            "arrays": one.compared,
        }
        for one in differences
    ]
    about = {"finished": datetime.now(UTC).date().isoformat(), "torch": torch.__version__.partition("+")[0]}
    write_json(root / FILE, about | {"cases": digest_of_cases(root), "rows": rows})
    return root / FILE


def read_record(root: Path) -> dict[str, Any]:
    """The record; one of other reference cases than those of this checkout is refused."""
    hint = "Run `itm parity tests/golden --record`."
    record = json.loads(read_text(root / FILE, f"the record of reference cases. {hint}"))
    if record["cases"] != digest_of_cases(root):
        raise input_error(root / FILE, "a record of other reference cases", f"one of {CASES} as it is", hint)
    return record


def digest_of_cases(root: Path) -> str:
    """One digest over all files of the reference cases."""
    found = hashlib.sha256()
    for path in sorted((root / CASES).rglob("*")):
        if path.is_file():
            found.update(path.relative_to(root).as_posix().encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
