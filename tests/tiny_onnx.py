"""Small ONNX models in the form of the real ones: a detector that finds bright cells, and networks of pooled pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, STRIDES = 32, (8, 16, 32)


def constant(name: str, values: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(values, name)


def save(path: Path, nodes: list, outputs: dict[str, list[int]], constants: list, shape: list) -> Path:
    """A model with one input ``images`` and float outputs of the given shapes."""
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sides) for name, sides in outputs.items()]
    graph = helper.make_graph(nodes, "tiny", [images], given, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def write_detector(path: Path, rows: int = 21) -> Path:
    """YOLOX for 32 pixels: 16, 4 and 1 cells, a box of its stride in the middle of each, sure where the cell is bright."""
    nodes, lights = [], []
    for stride in STRIDES:
        nodes += [
            helper.make_node(
                "AveragePool", ["images"], [f"p{stride}"], kernel_shape=[stride] * 2, strides=[stride] * 2
            ),
            helper.make_node("ReduceMean", [f"p{stride}"], [f"m{stride}"], axes=[1], keepdims=0),
            helper.make_node("Reshape", [f"m{stride}", "row"], [f"l{stride}"]),
        ]
        lights.append(f"l{stride}")
    nodes += [
        helper.make_node("Concat", lights, ["light"], axis=1),
        helper.make_node("Div", ["light", "white"], ["sure"]),
        helper.make_node("Concat", ["geometry", "sure", "class"], ["output"], axis=2),
    ]
    geometry = np.tile(np.float32([0.5, 0.5, 0, 0]), (1, rows, 1))
    constants = [
        constant("row", np.array([1, -1, 1])),
        constant("white", np.float32([255])),
        constant("geometry", geometry),
        constant("class", np.ones((1, rows, 1), dtype=np.float32)),
    ]
    return save(path, nodes, {"output": [1, rows, 6]}, constants, [1, 3, SIDE, SIDE])


def write_network(path: Path, shape: tuple = (1, 3, 24, 24)) -> Path:
    """Two maps of mean colours: 6 x 6 places, the last layer, and 12 x 12."""
    nodes = [
        helper.make_node("AveragePool", ["images"], ["last"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("AveragePool", ["images"], ["earlier"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    return save(path, nodes, {"last": [1, 3, 6, 6], "earlier": [1, 3, 12, 12]}, [], list(shape))
