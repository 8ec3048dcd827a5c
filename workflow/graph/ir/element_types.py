"""Element types of all values for which they can be determined, also behind operators that ONNX does not know. Pure."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import described

HALVES = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
"""Element types of 16 bits."""
KEEPS_TYPE = frozenset(
    {
        *(
            "Abs",
            "Add",
            "Conv",
            "ConvTranspose",
            "Div",
            "Erf",
            "Exp",
            "FusedMatMul",
            "Gather",
            "Gemm",
            "Identity",
            "Log",
        ),
        *("MatMul", "Mul", "Neg", "Reciprocal", "ReduceMean", "ReduceSum", "Reshape", "Sigmoid", "Slice", "Softmax"),
        *("Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    }
)
"""Operators whose result has the type of their first input."""


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Value -> its type, UNDEFINED if unknown. Nodes must be sorted."""
    inferred = shapes.value_types(model)
    types = {name: int(shapes.element_type(inferred, name)) for name in inferred}
    for name, value in described(model.graph).items():
        types[name] = value.type.tensor_type.elem_type or types.get(name, TensorProto.UNDEFINED)
    for tensor in model.graph.initializer:
        types[tensor.name] = tensor.data_type
    for node in model.graph.node:
        if node.op_type in KEEPS_TYPE and not types.get(node.output[0]):
            types[node.output[0]] = types.get(node.input[0], TensorProto.UNDEFINED)
    return types
