"""Models of a few nodes, prepared as ortflow prepares a file, for the tests of roles and signs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.normalize.prepare import prepare

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) * np.float32(0.02)


def node(op: str, *inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], f"{op.lower()}-{output}", **attributes)


def graph(
    nodes: list[onnx.NodeProto],
    tensors: dict[str, np.ndarray],
    inputs: dict[str, tuple[int, list[int | str]]] | None = None,
    properties: dict[str, list[str]] | None = None,
) -> onnx.ModelProto:
    inputs = inputs or {"x": (TensorProto.FLOAT, ["batch", 4])}
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            initializer=[numpy_helper.from_array(array, name) for name, array in tensors.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    for key, names in (properties or {}).items():
        model.metadata_props.add(key=key, value=json.dumps(names))
    return prepare(model)[0]
