"""Replaces ScatterND with a reduction by ScatterElements.

Called by `prepare` for every graph, not only for training: ONNX Runtime's CPU kernel of ScatterND splits the updates
over threads without a lock, and loses updates that meet at one element.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.replacement import Context, Replacement, attribute, context_of


def replace_combining_scatters(model: onnx.ModelProto, location: str) -> list[str]:
    """Rewrite each ScatterND of the main graph that has a reduction, in place; returns log lines."""
    if not any(_combines(node) for node in model.graph.node):
        return []
    context = context_of(model)
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        if _combines(node):
            nodes += _by_elements(node, context, location)
            count += 1
        else:
            nodes.append(node)
    replace(model.graph.node, nodes)
    return [
        f"{count} ScatterND written as ScatterElements, because ONNX Runtime's own loses updates on several threads"
    ]


def _combines(node: onnx.NodeProto) -> bool:
    return node.op_type == "ScatterND" and node.domain == "" and bool(attribute(node, "reduction", "none") != "none")


def _by_elements(node: onnx.NodeProto, context: Context, location: str) -> list[onnx.NodeProto]:
    """Treat the data as a matrix [indexable positions, elements of each], and scatter by row number."""
    w = Replacement(node, context)
    index_shape = shapes.shape(context.types, w.input(1))
    depth = index_shape[-1] if index_shape else None
    if depth is None or depth < 1:
        raise UserError(f"{walk.called(node)} has indices of a length that is not known", where=location)
    sizes = [w("Shape", w.input(0), start=i, end=i + 1) for i in range(depth)]
    # Indices may count from the end; the remainder modulo the size is the position from the start.
    places = w("Mod", w.input(1), w("Concat", *sizes, axis=0))
    strides = [w.ints(1)]
    for size in reversed(sizes[1:]):
        strides.insert(0, w("Mul", strides[0], size))
    rows = w("ReduceSum", w("Mul", places, w("Concat", *strides, axis=0)), w.ints(-1), keepdims=0)
    behind = w("Shape", w.input(0), start=depth)
    width = w("ReduceProd", behind, w.ints(0), keepdims=1)
    matrix = w("Concat", w.ints(-1), width, axis=0)
    updates = w("Reshape", w.input(2), matrix)
    numbers = w("Expand", w("Reshape", rows, w.ints(-1, 1)), w("Shape", updates))
    reduction = attribute(node, "reduction", "none")
    data = w("Reshape", w.input(0), matrix)
    result = w("ScatterElements", data, numbers, updates, axis=0, reduction=reduction)
    return w.done(w("Reshape", result, w("Shape", w.input(0))))
