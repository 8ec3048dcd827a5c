"""Evaluates nodes that read constants only, such as the masks of shifted windows. Called by `on_cuda`.

`normalize.fold` evaluates integers alone. Parameters are inputs of a training graph, so that what is left are numbers
that the exporter computes from sizes, with operators that move or compare them. A chain of ScatterND that fills a mask
cannot be captured as a CUDA graph, because each copies a table from the host.
"""

from __future__ import annotations

import warnings

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, constants_of, replace
from ortflow.workflow.graph.ir.order import prune

EXACT = frozenset(
    {
        *("Add", "And", "Cast", "Concat", "ConstantOfShape", "Equal", "Expand", "Greater", "Identity", "Less", "Mul"),
        *("Not", "Or", "Reshape", "ScatterND", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
    }
)
"""Operators whose result is the same on every machine."""
TYPES = frozenset({TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
LARGEST = 1 << 22
"""Elements of a result that is stored in the graph."""


def fold_constants(model: onnx.ModelProto) -> int:
    """Replace nodes by constants, in place; returns how many. The nodes must be sorted."""
    graph = model.graph
    if not any(node.op_type == "ScatterND" and not node.domain for node in graph.node):
        # Otherwise nothing is gained but memory lost.
        return 0
    values, outputs = constants_of(graph), {value.name for value in graph.output}
    opsets = {opset.domain: opset.version for opset in model.opset_import if not opset.domain}
    nodes_left, constants = [], dict[str, np.ndarray]()
    for node in graph.node:
        value = _value(node, values, opsets) if node.output[0] not in outputs else None
        if value is None:
            nodes_left.append(node)
        else:
            values[node.output[0]] = constants[node.output[0]] = value
    read = set().union(*(walk.inputs(node) for node in nodes_left))
    replace(graph.node, nodes_left)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items() if name in read)
    prune(graph)
    return len(constants)


def _value(node: onnx.NodeProto, values: dict[str, np.ndarray], opsets: dict[str, int]) -> np.ndarray | None:
    if node.domain or node.op_type not in EXACT or len(node.output) != 1:
        return None
    names = [name for name in node.input if name]
    if any(name not in values for name in names) or (node.op_type == "Cast" and attributes_of(node)["to"] not in TYPES):
        return None
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = ReferenceEvaluator(node, opsets=opsets).run(None, {name: values[name] for name in names})
    # ascontiguousarray makes a vector of a scalar.
    array = np.ascontiguousarray(result).reshape(np.shape(result))
    return array if array.size <= LARGEST else None
