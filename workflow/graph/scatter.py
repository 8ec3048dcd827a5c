"""Replaces GatherGrad, the gradient of a table look-up, by nodes that add in a fixed order.

Called by `build` on the training graph. On the CPU, GatherGrad takes a lock for each element and adds in the order in
which its threads come: slow, and another sum each time. ScatterElements with `add` (opset 18) does the same in order,
in half the time. ScatterND would be wrong here: on the CPU its additions race.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.edit import MICROSOFT, Editor, constants_of, described, dims_of, sort_nodes


def replace_gather_gradients(graph: onnx.GraphProto) -> None:
    """Rewrite each GatherGrad of the graph, in place; one whose table's rank is unknown stays."""
    edit = Editor(graph)
    constants = constants_of(graph)
    known = described(graph)
    shapes = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Shape"}
    for node in list(graph.node):
        if node.op_type != "GatherGrad" or node.domain != MICROSOFT:
            continue
        shape, indices, gradient = node.input
        if shape in constants:
            rank = int(constants[shape].size)
        else:
            dims = dims_of(known[shapes[shape]]) if shapes.get(shape) in known else None
            if dims is None:
                continue
            rank = len(dims)
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0) % rank
        # Whatever the indices' shape, one axis of the gradient runs over all of them.
        parts = [
            *([edit.node("Slice", shape, edit.integers(0), edit.integers(axis))] if axis else []),
            edit.integers(-1),
            *([edit.node("Slice", shape, edit.integers(axis + 1), edit.integers(rank))] if axis + 1 < rank else []),
        ]
        rows = edit.node("Reshape", gradient, edit.node("Concat", *parts, axis=0) if len(parts) > 1 else parts[0])
        places = edit.node("Reshape", indices, edit.integers(*([1] * axis), -1, *([1] * (rank - axis - 1))))
        places = edit.node("Expand", places, edit.node("Shape", rows))
        zeros = edit.node("ConstantOfShape", shape)
        edit.node("ScatterElements", zeros, places, rows, output=node.output[0], axis=axis, reduction="add")
        graph.node.remove(node)
    sort_nodes(graph)
