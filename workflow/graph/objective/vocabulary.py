"""Finds the integer inputs that index a table or an axis, and its length, as bounds for the data's values.

Called by `assembly` on a forward graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import described, dims_of

_KEEPS_VALUES = frozenset(
    [
        "Cast",
        "Identity",
        "Reshape",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Slice",
        "Split",
        "Expand",
        "Tile",
        "Concat",
    ]
)
"""Operators whose outputs contain only values of their inputs."""


def table_bounds(graph: onnx.GraphProto, inputs: Iterable[str]) -> dict[str, int]:
    """Input name -> exclusive upper bound of its values, for inputs that reach indices unchanged.

    These are the indices of a Gather and of a GatherElements, and the labels of a loss that the model computes itself.
    """
    shapes = {name: dims_of(value) for name, value in described(graph).items()}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    readers = walk.consumers(graph)
    bounds: dict[str, int] = {}
    for name in inputs:
        visited, open_values = {name}, [name]
        while open_values:
            for node, place in readers.get(open_values.pop(), ()):
                if node.op_type in _KEEPS_VALUES and (place == 0 or node.op_type == "Concat"):
                    fresh = set(node.output) - visited
                    visited |= fresh
                    open_values.extend(fresh)
                elif (axis := _indexed_axis(node, place)) is not None:
                    dims = shapes.get(node.input[0])
                    rows = dims[axis] if dims and -len(dims) <= axis < len(dims) else None
                    if isinstance(rows, int):
                        bounds[name] = min(rows, bounds.get(name, rows))
    return bounds


def _indexed_axis(node: onnx.NodeProto, place: int) -> int | None:
    """The axis of a node's first input that its input `place` indexes; None if it indexes none, or may be ignored."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if place == 1 and node.op_type in ("Gather", "GatherElements"):
        return int(attributes.get("axis", 0))
    if place == 1 and node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        return None if "ignore_index" in attributes else 1
    return None
