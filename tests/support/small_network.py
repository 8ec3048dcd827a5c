"""A network of a few dozen parameters, for whole runs that are over in a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper


def tensors() -> dict[str, npt.NDArray[np.float32]]:
    """The parameters and running statistics."""
    random = np.random.default_rng(0)
    values = {
        "w": random.normal(size=(5, 7)),
        "b": random.normal(size=7),
        "scale": np.ones(7),
        "shift": np.zeros(7),
        "mean": np.zeros(7),
        "var": np.ones(7),
        "u": random.normal(size=(7, 3)),
    }
    return {name: array.astype(np.float32) for name, array in values.items()}


def save_model(path: Path, activation: str = "Relu") -> None:
    """Five numbers to three classes through BatchNormalization; no tensor has a multiple of 64 elements."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="/in"),
        helper.make_node("BatchNormalization", ["h", "scale", "shift", "mean", "var"], ["n"], name="/norm"),
        helper.make_node(activation, ["n"], ["r"], name="/relu"),
        helper.make_node("MatMul", ["r", "u"], ["y"], name="/out"),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in tensors().items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
