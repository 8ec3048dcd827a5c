"""Element types of all values for which they can be determined, also behind operators that ONNX does not know. Pure."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import described
from ortflow.workflow.graph.operators.families import Trait, having

_KEEPS_TYPE = having(Trait.KEEPS_TYPE)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Value -> its type, UNDEFINED if unknown. Nodes must be sorted."""
    inferred = shapes.value_types(model)
    types = {name: int(shapes.element_type(inferred, name)) for name in inferred}
    for name, value in described(model.graph).items():
        types[name] = value.type.tensor_type.elem_type or types.get(name, TensorProto.UNDEFINED)
    for tensor in model.graph.initializer:
        types[tensor.name] = tensor.data_type
    for node in model.graph.node:
        if node.op_type in _KEEPS_TYPE and not types.get(node.output[0]):
            types[node.output[0]] = types.get(node.input[0], TensorProto.UNDEFINED)
    return types
