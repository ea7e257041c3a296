"""A run's receipt: what was measured, on what, with which settings. Tables and verdicts are made from receipts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jsonschema
import torch

from itm_utils.errors import problem
from itm_utils.files import write_json

PACKAGES = ("itm-utils", "torch", "numpy", "transformers", "accelerate")
NUMBER = {"type": "number"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "schema",
        "chapter",
        "arm",
        "seed",
        "dataset",
        "parameters",
        "models",
        "protocol",
        "metrics",
        "run",
    ],
    "properties": {
        "schema": {"const": 1},
        "chapter": {"type": "string", "pattern": "^[0-9]{2}_[a-z0-9_]+$"},
        "arm": {
            "type": "string",
            "minLength": 1,
            "description": "which of the chapter's comparisons this run is",
        },
        "seed": {"type": "integer", "minimum": 0},
        "dataset": {
            "type": "object",
            "required": ["name", "split", "fingerprint"],
            "additionalProperties": False,
            "properties": {name: {"type": "string", "minLength": 1} for name in ("name", "split", "fingerprint")},
        },
        "parameters": {"type": "object"},
        "models": {"type": "integer", "minimum": 1, "description": "1: a single model; more: an ensemble"},
        "protocol": {"type": "string", "minLength": 1},
        "metrics": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {
                "type": "object",
                "required": ["value"],
                "additionalProperties": False,
                "properties": {"value": NUMBER, "low": NUMBER, "high": NUMBER},
            },
        },
        "run": {
            "type": "object",
            "required": ["finished", "seconds", "device", "machine", "python", "versions", "commit"],
            "additionalProperties": False,
            "properties": {
                "finished": {"type": "string", "format": "date-time"},
                "seconds": {"type": "number", "minimum": 0},
                "device": {"type": "string"},
                "machine": {"type": "string"},
                "python": {"type": "string"},
                "versions": {"type": "object", "additionalProperties": {"type": "string"}},
                "commit": {"type": ["string", "null"]},
            },
        },
    },
}


def make_receipt(
    *,
    chapter: str,
    arm: str,
    seed: int,
    dataset: Mapping[str, str],
    parameters: Mapping[str, Any],
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    models: int = 1,
    protocol: str = "all",
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """Put a receipt together and validate it.

    metrics: name → value; intervals: name → (low, high) for some or all of them.
    """
    intervals = intervals or {}
    listed = {
        name: {"value": float(value)}
        | (dict(zip(("low", "high"), map(float, intervals[name]), strict=True)) if name in intervals else {})
        for name, value in metrics.items()
    }
    receipt = {
        "schema": 1,
        "chapter": chapter,
        "arm": arm,
        "seed": seed,
        "dataset": dict(dataset),
        "parameters": dict(parameters),
        "models": models,
        "protocol": protocol,
        "metrics": listed,
        "run": _circumstances(seconds, device),
    }
    try:
        receipt = json.loads(json.dumps(receipt, allow_nan=False))  # as it will be read back: tuples become lists
    except (TypeError, ValueError) as error:
        raise problem(f"receipt of {chapter}", f"a value that JSON cannot hold ({error})", "plain values") from error
    return check_receipt(receipt, f"receipt of {chapter}")


def check_receipt(receipt: Any, where: str | Path) -> dict[str, Any]:
    """The receipt itself, once it is known to follow the schema and to hold intervals around their values."""
    errors = sorted(jsonschema.Draft202012Validator(SCHEMA).iter_errors(receipt), key=lambda error: error.json_path)
    if errors:
        raise problem(where, f"{errors[0].json_path}: {errors[0].message}", "a receipt that follows the schema")
    for name, metric in receipt["metrics"].items():
        if not metric.get("low", metric["value"]) <= metric["value"] <= metric.get("high", metric["value"]):
            raise problem(where, f"{name} = {metric}", "an interval around its value")
    return receipt


def write_receipt(receipt: dict[str, Any], folder: str | Path) -> Path:
    """Write ``<chapter>/<arm>_<dataset>_s<seed>.json`` below ``folder``, atomically; never over other results.

    The same results again (a notebook run twice) refresh the file; other results under the same name are refused.
    """
    check_receipt(receipt, "receipt")
    name = f"{receipt['arm']}_{receipt['dataset']['name']}_s{receipt['seed']}.json"
    path = Path(folder) / receipt["chapter"] / name.replace("/", "-").replace(" ", "-")
    if path.exists():
        differing = next((k for k in receipt if k != "run" and read_receipt(path)[k] != receipt[k]), None)
        if differing:
            raise problem(
                path,
                f"a receipt with other {differing}",
                "no receipt, or the same one",
                "Move it away, or name the arm differently.",
            )
    write_json(path, receipt)
    return path


def read_receipt(path: str | Path) -> dict[str, Any]:
    """Read and validate one receipt."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise problem(path, "no such file", "a receipt") from error
    except ValueError as error:
        raise problem(path, f"no JSON ({error})", "a receipt") from error
    return check_receipt(content, path)


def _circumstances(seconds: float, device: str) -> dict[str, Any]:
    return {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit of the book the code comes from, with ``+`` where files were changed since; None outside git."""
    here = Path(__file__).parent
    try:
        run = [
            subprocess.run(["git", *call], cwd=here, capture_output=True, text=True, timeout=10)
            for call in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run[0].returncode:
        return None
    return run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")
