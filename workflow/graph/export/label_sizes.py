"""Sizes that a graph reads from a label, read from another input or written as numbers.

Called by `inference`: the exported model has no labels. PyTorch reads the batch's size from the first input with it.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, dims_of, replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.replacement import Context, Replacement

_SAME_SHAPE = ("Cast", "Identity")


def sizes_without_labels(graph: onnx.GraphProto, labels: Collection[str]) -> None:
    """Rewrite each Shape of a label, in place, if every size in it is a number or the size of another input's axis."""
    inputs = {value.name: dims_of(value) or () for value in graph.input}
    makers = walk.producers(graph)
    context = Context(fresh_names(graph), {})
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        source = node.input[0] if node.op_type == "Shape" and not node.domain else ""
        while source in makers and makers[source].op_type in _SAME_SHAPE:
            source = makers[source].input[0]
        replacement = _written(node, source, inputs, labels, context) if source in labels and source in inputs else None
        nodes += [node] if replacement is None else replacement
    replace(graph.node, nodes)


def _written(
    node: onnx.NodeProto,
    label: str,
    inputs: dict[str, tuple[int | str | None, ...]],
    labels: Collection[str],
    context: Context,
) -> list[onnx.NodeProto] | None:
    """The nodes that compute the same sizes without the label; None if one of them is known from it alone."""
    flags, w = attributes_of(node), Replacement(node, context)
    sizes = inputs[label][flags.get("start", 0) : flags.get("end")]
    parts = []
    for size in sizes:
        if isinstance(size, int):
            parts.append(w.ints(size))
            continue
        source = next(
            (
                (name, dims.index(size))
                for name, dims in inputs.items()
                if size is not None and name not in labels and size in dims
            ),
            None,
        )
        if source is None:
            return None
        name, axis = source
        parts.append(w("Shape", name, start=axis, end=axis + 1))
    if not parts:
        return None
    return w.done(w("Concat", *parts, axis=0) if len(parts) > 1 else parts[0])
