"""Counts that come from shapes, such as the samples that a mean divides by, made on the GPU.

ONNX Runtime computes with shapes on the CPU, and copies to the GPU what is then combined with data. A graph with such a
copy cannot be captured as a CUDA graph. Range takes its bounds from the host's memory and writes on the GPU: one that
ends behind its first element is that number, there. Called by `on_cuda`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.edit import attributes_of, described, dims_of
from ortflow.workflow.graph.functions import Fresh, fresh_names, replace_nodes

ROOTS = frozenset({"Shape", "Size"})
"""What they make lies in the host's memory."""
CARRIED = frozenset(
    {
        "Abs", "Add", "Cast", "Ceil", "Concat", "Div", "Floor", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg",
        "Pow", "ReduceProd", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Unsqueeze",
    }
)  # fmt: skip
"""What ONNX Runtime computes there, too, where all inputs lie there."""
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def counts_on_device(model: onnx.ModelProto, types: Mapping[str, int]) -> int:
    """Make numbers of floating point that come from shapes on the GPU, in place; how many. Values stay to the bit.

    Not those that become integers again: they are sizes, which the CPU goes on to compute with.
    """
    graph = model.graph
    known, fresh = {name: dims_of(value) for name, value in described(graph).items()}, fresh_names(graph)
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant" and not node.domain}
    on_host = _on_host(graph, constants)
    sizes = _sizes(graph, on_host)
    nodes: list[onnx.NodeProto] = []
    made = 0
    for node in graph.node:
        if _is_root(node, on_host, types) and node.output[0] not in sizes and known.get(node.output[0]) in ((), (1,)):
            nodes += _moved(graph, node, known[node.output[0]] == (1,), types[node.input[0]], fresh)
            made += 1
        nodes.append(node)
    if made:
        replace_nodes(graph, nodes)
    return made


def _on_host(graph: onnx.GraphProto, constants: set[str]) -> set[str]:
    found: set[str] = set()
    for node in graph.node:
        inputs = {name for name in node.input if name}
        carried = node.op_type in CARRIED and inputs & found and inputs <= found | constants
        if not node.domain and (node.op_type in ROOTS or carried):
            found.update(node.output)
    return found


def _sizes(graph: onnx.GraphProto, on_host: set[str]) -> set[str]:
    """Values on the host from which integers are made again."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.output[0] not in on_host:
            continue
        to = attributes_of(node).get("to") if node.op_type == "Cast" else None
        if to in INTEGERS or (to is None and node.output[0] in found):
            found.update(node.input)
    return found


def _is_root(node: onnx.NodeProto, on_host: set[str], types: Mapping[str, int]) -> bool:
    if node.domain or node.op_type != "Cast" or node.output[0] not in on_host:
        return False
    return types.get(node.input[0]) in INTEGERS and attributes_of(node)["to"] in FLOATS


def _moved(graph: onnx.GraphProto, node: onnx.NodeProto, axis: bool, kind: int, fresh: Fresh) -> list[onnx.NodeProto]:
    """Nodes that make the input of `node` on the GPU; it reads theirs."""
    count = node.input[0]
    one, scalar, end, there, moved = (fresh(f"{count}/{hint}") for hint in ("one", "scalar", "end", "there", "moved"))
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    graph.initializer.append(numpy_helper.from_array(np.array(1, dtype), one))
    graph.initializer.append(numpy_helper.from_array(np.array([], np.int64), scalar))
    number = fresh(f"{count}/number")
    node.input[0] = there if axis else moved
    nodes = [
        helper.make_node("Reshape", [count, scalar], [number], name=number),
        helper.make_node("Add", [number, one], [end], name=end),
        helper.make_node("Range", [number, end, one], [there], name=there),
    ]
    if not axis:
        nodes.append(helper.make_node("Reshape", [there, scalar], [moved], name=moved))
    return nodes
