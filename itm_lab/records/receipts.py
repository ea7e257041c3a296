"""A run's receipt: what was measured, on what, with which settings. Tables and verdicts are made from receipts.

A receipt is a JSON file; the ranks its recalls come from lie beside it as ``.npz``. Reading one checks all of it: the
schema, the seal (a hash of the content, so that an edited number shows), and the recalls, which are computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch

from itm_lab.paths import Paths
from itm_lab.records.checkout import Code, code_of
from itm_lab.records.old_names import modernised
from itm_utils.errors import input_error
from itm_utils.files import atomic, write_json
from itm_utils.metrics.retrieval import Ranks, summarise_folds

Curves = Mapping[str, Mapping[str, list[float]]]  # name of a figure → name of an axis or line → its values
LARGEST_RANKS = 64 * 2**20  # bytes: ten times those of all of COCO
PACKAGES = ("itm-utils", "torch", "numpy", "transformers", "accelerate")
SCHEMA, SCHEMA_3 = (
    json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("receipt_schema.json", "receipt_schema_3.json")
)
SCHEMA_2: dict[str, Any] = SCHEMA_3 | {  # of receipts whose variant was called otherwise
    "required": ["arm" if name == "variant" else name for name in SCHEMA_3["required"]],
    "properties": {("arm" if k == "variant" else k): v for k, v in SCHEMA_3["properties"].items()}
    | {"schema": {"const": 2}},
}
SCHEMAS = {2: SCHEMA_2, 3: SCHEMA_3}  # older ones: readable, and of the old protocol


@dataclass(frozen=True)
class Evidence:
    """What recalls are made of. i2t: (i,) ranks. t2i: (c,) ranks. owner: (c,) image of each caption.

    With several folds the ranks are those within each fold, one fold after the other.
    """

    i2t: np.ndarray
    t2i: np.ndarray
    owner: np.ndarray

    @classmethod
    def of(cls, parts: list[Ranks], owner: np.ndarray) -> Evidence:
        """From the ranks of one fold or several, in the smallest integers that hold them."""
        i2t, t2i = (np.concatenate([getattr(part, way) for part in parts]) for way in ("i2t", "t2i"))
        return cls(*(array.astype(np.min_scalar_type(int(array.max()))) for array in (i2t, t2i, np.asarray(owner))))

    @property
    def digest(self) -> str:
        hashed = hashlib.sha256()
        for array in (self.i2t, self.t2i, self.owner):
            hashed.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return hashed.hexdigest()

    def recalls(self, protocol: str) -> dict[str, float]:
        folds = 5 if protocol == "1K" or protocol.startswith("5 folds") else 1
        return summarise_folds(Ranks(self.i2t, self.t2i), self.owner, folds).as_dict()


def make_receipt(
    *,
    chapter: str,
    variant: str,
    seed: int,
    dataset: Mapping[str, str],
    parameters: Mapping[str, Any],
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    models: int = 1,
    protocol: str = "all",
    seconds: float,
    device: str,
    evidence: Evidence | None = None,
    rules: Mapping[str, str] | None = None,
    curves: Curves | None = None,
    inputs: Mapping[str, str] | None = None,
    training: Mapping[str, Any] | None = None,
    search: Sequence[Mapping[str, Any]] = (),
    code: Code | None = None,
) -> dict[str, Any]:
    """Put a receipt together, seal and validate it.

    metrics: name → value; intervals: name → (low, high) for some or all of them. curves: lists of the same length.
    rules: claim → hash of its rule (:func:`itm_lab.records.rules.rules_for`), taken when the run began, and so is
    ``code``; by default it is the checkout as it is now. inputs, training, search: as the schema describes them.
    """
    intervals = intervals or {}
    listed = {
        name: {"value": float(value)}
        | (dict(zip(("low", "high"), map(float, intervals[name]), strict=True)) if name in intervals else {})
        for name, value in metrics.items()
    }
    receipt = {
        "schema": 4,
        "chapter": chapter,
        "variant": variant,
        "seed": seed,
        "dataset": dict(dataset),
        "parameters": dict(parameters),
        "models": models,
        "protocol": protocol,
        "metrics": listed,
        "ranks": evidence.digest if evidence else None,
        "rules": dict(rules or {}),
        "inputs": dict(inputs or {}),
        "training": training,
        "search": list(search),
        "run": _circumstances(seconds, device, code or code_of(Paths.find_or_none())),
    } | ({"curves": curves} if curves else {})
    try:
        receipt = json.loads(json.dumps(receipt, allow_nan=False))  # as it will be read back: tuples become lists
    except (TypeError, ValueError) as error:
        raise input_error(
            f"receipt of {chapter}", f"a value that JSON cannot hold ({error})", "plain values"
        ) from error
    receipt["seal"] = seal_of(receipt)
    if evidence:
        check_recalls(receipt, evidence, f"receipt of {chapter}")
    return check_receipt(receipt, f"receipt of {chapter}")


def seal_of(receipt: Mapping[str, Any]) -> str:
    """Hash of a receipt's content. It does not stop a forger; it does show an edited number."""
    content = {name: value for name, value in receipt.items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def check_recalls(receipt: Mapping[str, Any], evidence: Evidence, where: str | Path) -> None:
    """The recalls of a receipt are those of its ranks."""
    if evidence.digest != receipt["ranks"]:
        raise input_error(where, "other ranks beside it", "the ranks it was written with")
    for name, value in evidence.recalls(receipt["protocol"]).items():
        claimed = receipt["metrics"].get(name, {}).get("value", value)
        if abs(claimed - value) > 1e-6:
            raise input_error(where, f"{name} = {claimed:g}", f"{value:g}, which its ranks give")


def is_old_protocol(receipt: Mapping[str, Any]) -> bool:
    """Whether a receipt was written before its training, its inputs and the state of its checkout were recorded."""
    return receipt["schema"] in SCHEMAS


def counts_as_evidence(receipt: Mapping[str, Any]) -> str:
    """Why a receipt may not decide a claim; empty if it may. Those of the old protocol never said what is asked here."""
    if is_old_protocol(receipt) or (clean := receipt["run"]["clean"]):
        return ""
    return "its checkout had uncommitted changes" if clean is False else "nobody knows the commit of its code"


def check_receipt(receipt: Any, where: str | Path) -> dict[str, Any]:
    """The receipt itself, once it is known to follow the schema, to hold intervals around their values and its seal."""
    errors = sorted(_validator(receipt).iter_errors(receipt), key=lambda error: error.json_path)
    if errors:
        raise input_error(where, f"{errors[0].json_path}: {errors[0].message}", "a receipt that follows the schema")
    for name, number in _numbers(receipt, ""):
        if not math.isfinite(number):
            raise input_error(where, f"{name} = {number}", "finite numbers")
    for name, metric in receipt["metrics"].items():
        if not metric.get("low", metric["value"]) <= metric["value"] <= metric.get("high", metric["value"]):
            raise input_error(where, f"{name} = {metric}", "an interval around its value")
    if receipt["seal"] != seal_of(receipt):
        raise input_error(
            where, "a seal that does not fit its content", "a receipt as its run wrote it", "Run it again."
        )
    return receipt


def _validator(receipt: Any) -> jsonschema.Draft202012Validator:
    """For the schema that a receipt says it follows; today's if it says nothing sensible."""
    schema = receipt.get("schema") if isinstance(receipt, dict) else None
    return jsonschema.Draft202012Validator(SCHEMAS.get(schema, SCHEMA) if isinstance(schema, int) else SCHEMA)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number of a receipt with its place. JSON as Python reads it knows infinities."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, int | float):
        yield name, value


def receipt_path(receipt: Mapping[str, Any], folder: str | Path) -> Path:
    """``<chapter>/<variant>_<dataset>_s<seed>.json``; what was measured on dev chose settings, and goes to ``search/``."""
    protocol = "" if receipt["protocol"].startswith("all") else f"_{receipt['protocol']}"
    name = f"{receipt['variant']}_{receipt['dataset']['name']}{protocol}_s{receipt['seed']}.json"
    place = Path(folder) / receipt["chapter"] / ("search" if receipt["dataset"]["split"] == "dev" else "")
    return place / name.replace("/", "-").replace(" ", "-")


def write_receipt(receipt: dict[str, Any], folder: str | Path, evidence: Evidence | None = None) -> Path:
    """Write a receipt, and its ranks beside it, below ``folder``; whole or not at all, never over other results.

    The same results again (a notebook run twice) refresh the file, and so does any over a receipt of the old protocol;
    other results under the same name are refused.
    """
    check_receipt(receipt, "receipt")
    if (evidence.digest if evidence else None) != receipt["ranks"]:
        raise input_error("receipt", "other ranks than it was made with", "its own")
    path = receipt_path(receipt, folder)
    if path.exists() and not is_old_protocol(known := read_receipt(path)):
        ours, theirs = (results_of(one) for one in (receipt, known))
        if differing := next((k for k in ours if theirs.get(k) != ours[k]), None):
            raise input_error(
                path,
                f"a receipt with other {differing}",
                "no receipt, or the same one",
                "Move it away, or name the variant differently.",
            )
    if evidence:
        with atomic(path.with_suffix(".npz")) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, i2t=evidence.i2t, t2i=evidence.t2i, owner=evidence.owner)
    write_json(path, receipt)
    return path


def results_of(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """What two receipts of one run agree in: all but when, where and how long it ran, and the seal over that."""
    found = {name: value for name, value in receipt.items() if name not in ("run", "seal")}
    if training := found["training"]:
        stages = [{name: stage[name] for name in stage if name != "seconds"} for stage in training["stages"]]
        found["training"] = training | {"stages": stages}
    return found


def read_receipt(path: str | Path) -> dict[str, Any]:
    """Read and validate one receipt."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise input_error(path, "no such file", "a receipt") from error
    except (ValueError, RecursionError) as error:
        raise input_error(path, f"no JSON ({error})", "a receipt") from error
    check_receipt(content, path)
    if content["ranks"] is not None:
        check_recalls(content, read_evidence(path), path)
    return modernised(content) if content["schema"] == 2 else content


def read_named_receipt(path: str | Path, folder: str | Path) -> dict[str, Any]:
    """Read a receipt that lies below ``folder``, and refuse it under any name but the one that its content gives.

    So chapter, variant, dataset, protocol and seed are one identity, and a copy under another name replaces nothing.
    """
    receipt = read_receipt(path)
    if Path(path) != (named := receipt_path(receipt, folder)):
        expected = f"{named.relative_to(folder).as_posix()}, the name that its content gives"
        raise input_error(path, "a receipt under another name", expected, "Remove it: it is a copy, or was relabelled.")
    return receipt


class Identities:
    """Receipts seen so far: each identity once, and no ranks twice among the seeds of one variant on one dataset."""

    def __init__(self) -> None:
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._ranks: dict[tuple[Any, ...], Path] = {}

    def add(self, receipt: Mapping[str, Any], path: Path) -> None:
        """Refuse a second receipt of one identity, and ranks that another seed has as well."""
        data = receipt["dataset"]
        group = (
            receipt["chapter"], receipt["variant"], data["name"].removesuffix("_precomp"), data["split"], receipt["protocol"],
        )  # fmt: skip
        if (known := self._paths.setdefault((*group, receipt["seed"]), path)) != path:
            expected = f"one receipt for each variant, dataset, protocol and seed ({known.name} is this one's)"
            raise input_error(path, "a second receipt of one run", expected, "Remove one of them.")
        if receipt["ranks"] is None:
            return
        if (known := self._ranks.setdefault((*group, receipt["ranks"]), path)) != path:
            expected = "other ranks for every seed"
            raise input_error(
                path, f"the ranks of {known.name}", expected, "One of the two was relabelled: run it again."
            )


def variant_receipts(
    chapter: str, variant: str, dataset: str = "scenes", folder: Path | None = None
) -> list[dict[str, Any]]:
    """The receipts of a variant on the test split, in the order of their seeds; none where there are none.

    folder: where receipts lie; those of the checkout by default.
    """
    folder = folder or Paths.find().receipts
    named = f"{variant}_{dataset}_s".replace("/", "-").replace(" ", "-")
    found = [path for path in (Path(folder) / chapter).glob("*.json") if path.name.startswith(named)]
    receipts, identities = [], Identities()
    for path in sorted(found):
        receipts.append(read_named_receipt(path, folder))
        identities.add(receipts[-1], path)
    return sorted(receipts, key=lambda receipt: receipt["seed"])


def variant_values(chapter: str, variant: str, metric: str = "rsum", dataset: str = "scenes") -> np.ndarray:
    """(seeds,) one metric of a variant, as its receipts have it."""
    return np.array([receipt["metrics"][metric]["value"] for receipt in variant_receipts(chapter, variant, dataset)])


def read_evidence(path: str | Path) -> Evidence:
    """The ranks beside a receipt."""
    beside = Path(path).with_suffix(".npz")
    try:
        with zipfile.ZipFile(beside) as packed:
            if (size := sum(part.file_size for part in packed.infolist())) > LARGEST_RANKS:
                raise ValueError(f"{size:,} bytes when unpacked, more than {LARGEST_RANKS:,}")
        with np.load(beside, allow_pickle=False) as file:
            return Evidence(file["i2t"], file["t2i"], file["owner"])
    # RuntimeError: a part that says it is encrypted; EOFError: one that is shorter than it says.
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        MemoryError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise input_error(beside, f"no ranks ({error})", f"those that {Path(path).name} was made from") from error


def _circumstances(seconds: float, device: str, code: Code) -> dict[str, Any]:
    if device == "auto":
        device = str(torch.accelerator.current_accelerator() or "cpu")  # the accelerator library's choice
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": code.commit,
        "clean": code.clean,
    }


@cache
def processor() -> str:
    """What decides the last digits of sums on a CPU: its model, and the widest instructions that PyTorch uses."""
    name, listed = platform.processor() or platform.machine(), Path("/proc/cpuinfo")  # Linux alone has that file
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
