"""A branch of an If or the body of a loop as a separate model. Called by `branch_models` and `loop_models`."""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Context
from ortflow.workflow.graph.normalize.opset import OPSET


def model_of(
    graph: onnx.GraphProto, captured: Collection[str], variables: Collection[str], context: Context
) -> onnx.ModelProto:
    """The model of a subgraph, which is changed: captured values become inputs, small constants initializers.

    `variables`: captured values that carry a gradient. They are inputs.
    """
    for name in sorted(captured):
        tensor = context.tensors.get(name)
        if tensor is not None and name not in variables and _is_small(tensor):
            graph.initializer.append(tensor)
            # The tensor of a Constant node has no name, or another.
            graph.initializer[-1].name = name
        elif name in context.types:
            graph.input.append(helper.make_value_info(name, context.types[name]))
        elif name in variables:
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def _is_small(tensor: onnx.TensorProto) -> bool:
    return math.prod(tensor.dims) <= shapes.LARGE and not tensor.external_data
