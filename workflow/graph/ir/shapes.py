"""Types and shapes of a graph's values, inferred by onnx.

Large weights are withheld from onnx's native code, which would copy them several times.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper, shape_inference

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.domains import CLASSICAL, CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.collective import Kind, channel_of, is_collective, kind_of

_AGAIN = "export the model again"
LARGE = 4096
"""Tensors with more elements are not treated as shapes."""
_ALIKE = frozenset(["BiasGelu", "FastGelu", "Gelu", "GroupNormalization", "QuickGelu"])
"""Operators of com.microsoft, unknown to onnx, whose first output has the shape of their first input."""
PROPAGATED = 1 << 20
"""Vectors of at most this many elements are followed by inference through nodes that compute shapes."""
_newest: tuple[bytes, onnx.ModelProto] | None = None
"""Of the newest inference: a hash of the graph, and the descriptions of its values."""


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large initializers are inputs of the same type and shape."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = model.graph.name or "model"
    light.graph.node.extend(model.graph.node)
    light.graph.output.extend(model.graph.output)
    light.graph.value_info.extend(model.graph.value_info)
    light.graph.input.extend(model.graph.input)
    inputs = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > LARGE and tensor.data_location != TensorProto.EXTERNAL:
            if tensor.name not in inputs:
                light.graph.input.append(
                    helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                )
        else:
            light.graph.initializer.append(tensor)
    return light


def infer(model: onnx.ModelProto, descriptions: Sequence[onnx.ValueInfoProto] = ()) -> None:
    """Add to the main graph's values the types and shapes that follow from its inputs, in place.

    What onnx cannot infer, such as outputs of ONNX Runtime's own operators, stays unknown unless `descriptions` has it.
    Outputs of `ortflow.cuda` nodes keep their descriptions.
    """
    inferred = _inferred(model, descriptions)
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    declared = {value.name: value for value in inferred.graph.output}
    for value in model.graph.output:
        if value.name in declared and declared[value.name].type.WhichOneof("value"):
            value.type.CopyFrom(declared[value.name].type)


def _inferred(model: onnx.ModelProto, descriptions: Sequence[onnx.ValueInfoProto] = ()) -> onnx.ModelProto:
    """A model without nodes whose graph describes the values; callers must not change it."""
    light = without_weights(model)
    described_names = {value.name for value in descriptions}
    outputs_of_kernels = {
        name for node in light.graph.node if node.domain == CUDA_DOMAIN for name in node.output
    } - described_names
    kernel_values = [value for value in model.graph.value_info if value.name in outputs_of_kernels]
    del light.graph.value_info[:]
    light.graph.value_info.extend([*descriptions, *kernel_values])
    for node in light.graph.node:
        _stand_in(node)
    # Several passes ask about the same graph, one after another, and inference takes ten times as long as the hash.
    global _newest
    digest = hashlib.sha256(light.SerializeToString(deterministic=True)).digest()
    known = _newest
    if known is None or known[0] != digest:
        try:
            inferred = _inferred_anew(model, light)
        except (shape_inference.InferenceError, RuntimeError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the shapes within the model contradict each other: {reason[:300]}", fix=_AGAIN) from None
        del inferred.graph.node[:]
        known = _newest = digest, inferred
    return known[1]


def _inferred_anew(model: onnx.ModelProto, light: onnx.ModelProto) -> onnx.ModelProto:
    if _is_described(model):
        # Shapes are known, and an inference without `data_prop` would only count vectors once more.
        return shape_inference.infer_shapes(light, data_prop=_vectors(model) <= PROPAGATED)
    inferred = shape_inference.infer_shapes(light)
    return inferred if _vectors(inferred) > PROPAGATED else shape_inference.infer_shapes(light, data_prop=True)


def _stand_in(node: onnx.NodeProto) -> None:
    """Replace a node of ONNX Runtime by one for which onnx infers the same shapes, in place."""
    if node.domain == "" and node.op_type != "SimplifiedLayerNormalization":
        return
    if node.domain == "com.microsoft" and node.op_type in _ALIKE:
        node.op_type, node.domain = "Identity", ""
        del node.input[1:], node.output[1:], node.attribute[:]
    elif node.domain == CLASSICAL and node.op_type == "Scaler":
        node.op_type, node.domain = "Cast", ""
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    elif node.domain == "com.microsoft" and node.op_type == "FusedMatMul":
        if not any(a.name.startswith("trans") and a.i for a in node.attribute):
            node.op_type, node.domain = "MatMul", ""
            del node.attribute[:]
    elif is_collective(node):
        _stand_in_of_collective(node)
    elif node.domain == "" and node.op_type == "SimplifiedLayerNormalization":
        node.op_type = "LayerNormalization"
        if len(node.output) > 1:
            # Its second output is the inverse deviation, as is the third of LayerNormalization.
            node.output.insert(1, "")


def _stand_in_of_collective(node: onnx.NodeProto) -> None:
    kind, parts, value = kind_of(node), channel_of(node)[1], node.input[0]
    del node.input[1:], node.output[1:], node.attribute[:]
    node.domain = ""
    if kind == Kind.ALL_GATHER:
        node.op_type = "Concat"
        node.input[:] = [value] * parts
        node.attribute.append(helper.make_attribute("axis", 0))
    elif kind == Kind.REDUCE_SCATTER:
        node.op_type = "Split"
        node.output.extend([""] * (parts - 1))
        node.attribute.extend([helper.make_attribute("axis", 0), helper.make_attribute("num_outputs", parts)])
    else:
        node.op_type = "Identity"


def _is_described(model: onnx.ModelProto) -> bool:
    """Whether every value that a node of the main graph makes has a description with a shape."""
    fields = (model.graph.value_info, model.graph.output)
    described_names = {value.name for part in fields for value in part if value.type.tensor_type.HasField("shape")}
    closed = not any(walk.subgraphs(node) for node in model.graph.node)
    return closed and all(described_names.issuperset(filter(None, node.output)) for node in model.graph.node)


def _vectors(model: onnx.ModelProto) -> int:
    """Total elements of all vectors: onnx treats each as a shape and makes a list of it."""
    count = 0
    for graph in walk.all_graphs(model):
        for value in graph.value_info:
            dims = value.type.tensor_type.shape.dim
            if len(dims) == 1:
                count += dims[0].dim_value
    return count


def value_types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Value name -> type with shape, for inputs, initializers, outputs and every value that inference reaches.

    Callers may change the dictionary, but not the types, which calls for the same graph share.
    """
    graph = _inferred(model).graph
    types = {v.name: v.type for part in (graph.input, graph.value_info, graph.output) for v in part}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def element_type(types: Mapping[str, onnx.TypeProto], name: str) -> int:
    """The TensorProto type of a value, UNDEFINED (0) if unknown."""
    return int(types[name].tensor_type.elem_type) if name in types else int(TensorProto.UNDEFINED)


def rank(types: Mapping[str, onnx.TypeProto], name: str) -> int | None:
    """Number of axes of a value, None if unknown."""
    if name not in types or not types[name].tensor_type.HasField("shape"):
        return None
    return len(types[name].tensor_type.shape.dim)


def shape(types: Mapping[str, onnx.TypeProto], name: str) -> list[int | None] | None:
    """A value's dims, with None for each that is not a number; None if the rank is unknown."""
    if rank(types, name) is None:
        return None
    return [d.dim_value if d.HasField("dim_value") else None for d in types[name].tensor_type.shape.dim]


def named_shape(types: Mapping[str, onnx.TypeProto], name: str) -> list[int | str | None] | None:
    """As `shape`, with the names of dynamic axes."""
    if rank(types, name) is None:
        return None
    dims = types[name].tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in dims]
