"""Writes ONNX Runtime's gradient operators out by operators of ONNX, for runtimes that have no kernels of them."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ortflow.workflow.graph import shapes
from ortflow.workflow.graph.autodiff.compose_adam import OPTIMIZERS
from ortflow.workflow.graph.autodiff.compose_images import IMAGES
from ortflow.workflow.graph.edit import MICROSOFT, described
from ortflow.workflow.graph.functions import fresh_names, replace_nodes
from ortflow.workflow.graph.origin import inherit
from ortflow.workflow.graph.writer import Context, Writer

COMPOSITIONS: dict[str, Callable[[Writer], None]] = {**IMAGES, **OPTIMIZERS}
"""Operator of com.microsoft -> what writes nodes in its place, which make its outputs."""


def compose(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a training graph in which no operator of `COMPOSITIONS` is left."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    if not any(_written_out(node) for node in graph.node):
        return copy
    # What `differentiate` knows of its own nodes' values cannot be inferred again.
    known = described(graph)
    types = {name: value.type for name, value in known.items()}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    context = Context(fresh_names(graph), types, tensors)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _written_out(node):
            w = Writer(node, context)
            COMPOSITIONS[node.op_type](w)
            inherit(w.nodes, node)
            nodes += w.nodes
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)
    shapes.infer(copy, list(graph.value_info))
    return copy


def _written_out(node: onnx.NodeProto) -> bool:
    return node.domain == MICROSOFT and node.op_type in COMPOSITIONS
