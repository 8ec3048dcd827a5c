"""Evaluates the integers that do not depend on the batch: shapes, axes and limits that an exporter left as nodes.

Called by `prepare`. ONNX Runtime builds gradients from the shapes known at that time and assumes that an axis of
unknown length is not broadcast, so everything that can be evaluated must be. Floating-point tensors may be weights;
only the scales of a Resize are computed from them.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.decompose.resize import by_axes
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.known import Known, is_whole
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.branches import chosen_branch

_ROUNDS = 16
"""Folding allows more shapes to be inferred, which allows more folding; exporters nest no deeper than this."""


def fold_integers(model: onnx.ModelProto) -> None:
    """Replace nodes of the main graph by initializers, in place."""
    graph = model.graph
    fresh = fresh_names(graph)
    for _ in range(_ROUNDS):
        types = shapes.value_types(model)
        constants = Known(graph, types)
        scales = {name for node in graph.node if node.op_type == "Resize" for name in node.input[1:] if name}
        outputs = {value.name for value in graph.output}
        tensors: list[onnx.TensorProto] = []
        nodes: list[onnx.NodeProto] = []
        changed = False
        for node in graph.node:
            value = constants.add(node)
            if value is not None and value.dtype != object and node.output[0] not in outputs:
                name = node.output[0]
                if name in scales or (is_whole(value) and name not in constants.inexact):
                    # ascontiguousarray makes a vector of a scalar.
                    tensors.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
                    continue
            if node.op_type not in ("If", "Resize"):
                nodes.append(node)
                continue
            replacement = by_axes(node, constants, types, fresh) or chosen_branch(node, constants, fresh)
            changed = changed or replacement is not None
            nodes += replacement or [node]
        if not tensors and not changed:
            return
        replace(graph.node, nodes)
        graph.initializer.extend(tensors)
        tidy.constants_to_initializers(model)
