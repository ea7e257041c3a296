"""Open an ONNX model with ``onnxruntime``, or say in one line what is wrong with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from itm_utils.errors import input_error
from itm_utils.files import check_file

INSTALL = "Install the extra: pip install -c constraints.txt -e '.[photos]'."


class OnnxFile:
    """A model with one input (1, 3, side, side). digest: SHA-256 of the file."""

    def __init__(self, path: Path, expected: str, digest: str = "") -> None:
        """expected: what the file should be, for errors. digest: of the only file that is right, if there is one."""
        content = check_file(path, expected).read_bytes()
        self.path, self.digest = path, hashlib.sha256(content).hexdigest()
        if digest and self.digest != digest:
            found = f"another file (SHA-256 {self.digest[:16]}…)"
            raise input_error(path, found, f"{expected} ({digest[:16]}…)", "Download it again, or give it by its path.")
        self.session = _open(path, content, expected)
        (self.input, *others), shape = self.session.get_inputs(), None
        if not others:
            shape = self.input.shape
        if not shape or len(shape) != 4 or shape[1] != 3 or not isinstance(shape[3], int) or shape[2] != shape[3]:
            found = f"inputs of shape {[each.shape for each in self.session.get_inputs()]}"
            raise input_error(path, found, f"{expected}, with one input of shape [1, 3, side, side]")
        self.side: int = shape[3]

    def run(self, planes: np.ndarray) -> list[np.ndarray]:
        """All outputs for one image (3, side, side)."""
        return self.session.run(None, {self.input.name: np.ascontiguousarray(planes[None], dtype=np.float32)})


def _open(path: Path, content: bytes, expected: str) -> Any:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise input_error("itm features", "no package onnxruntime", "what runs the detector", INSTALL) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors; they are raised as well
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes share no base but this
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise input_error(path, f"no ONNX model that can be run ({reason[:120]})", expected) from error
