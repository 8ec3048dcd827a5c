"""Finds the integer inputs that index a table, and the table's number of rows, as bounds for the data's values.

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
    """Input name -> exclusive upper bound of its values, for inputs that reach the indices of a Gather unchanged."""
    shapes = {name: dims_of(value) for name, value in described(graph).items()}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    readers = walk.consumers(graph)
    bounds: dict[str, int] = {}
    for name in inputs:
        seen, open_values = {name}, [name]
        while open_values:
            for node, place in readers.get(open_values.pop(), ()):
                if node.op_type in _KEEPS_VALUES and (place == 0 or node.op_type == "Concat"):
                    fresh = set(node.output) - seen
                    seen |= fresh
                    open_values.extend(fresh)
                elif node.op_type == "Gather" and place == 1:
                    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                    dims = shapes.get(node.input[0])
                    rows = dims[axis] if dims and -len(dims) <= axis < len(dims) else None
                    if isinstance(rows, int):
                        bounds[name] = min(rows, bounds.get(name, rows))
    return bounds
