"""Drops choices between a value and itself without its gradient, which only the differentiation needs.

`where(mask, x.detach(), x)` stops the gradient of `x` where the mask is true, such as that of an embedding's padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import bypass
from ortflow.workflow.graph.ir.stops import stops_gradient


def drop_choices(graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto]) -> None:
    """Let the readers of such a Where read `x`, in place. One whose mask could broadcast `x` is kept.

    For a differentiated graph that is pruned afterwards; `types` are those of its forward values.
    """
    stopped = {node.output[0]: node.input[0] for node in graph.node if stops_gradient(node)}
    if not stopped:
        return

    def source(node: onnx.NodeProto) -> str:
        if node.op_type != "Where" or node.domain != "":
            return ""
        first, second = node.input[1:]
        value = second if stopped.get(first) == second else first if stopped.get(second) == first else ""
        dims = shapes.named_shape(types, value)
        fits = dims is not None and None not in dims and dims == shapes.named_shape(types, node.output[0])
        return value if fits else ""

    bypass(graph, source)
