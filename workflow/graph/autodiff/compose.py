"""Replaces ONNX Runtime's gradient operators by ONNX operators, for runtimes that have no kernels for them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import described, replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.replacement import Context, Replacement
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.operators.composed import COMPOSITIONS
from ortflow.workflow.graph.rules.composition import Composition


def compose(
    model: onnx.ModelProto,
    compositions: Mapping[str, Composition] = COMPOSITIONS,
    domain: str = MICROSOFT,
) -> onnx.ModelProto:
    """Return a copy of a training graph without operators of `domain` that are in `compositions`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph

    def is_written_out(node: onnx.NodeProto) -> bool:
        return bool(node.domain == domain and node.op_type in compositions)

    if not any(map(is_written_out, graph.node)):
        return copy
    # Shape inference cannot recover what `differentiate` knows about the values of its nodes.
    descriptions = described(graph)
    types = {name: value.type for name, value in descriptions.items()}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    context = Context(fresh_names(graph), types, tensors)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if is_written_out(node):
            w = Replacement(node, context)
            compositions[node.op_type](w)
            inherit(w.nodes, node)
            nodes += _without_names(w.nodes)
        else:
            nodes.append(node)
    replace(graph.node, nodes)
    tidy.constants_to_initializers(copy)
    shapes.infer(copy, list(graph.value_info))
    return copy


def _without_names(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes without each Identity that only renames another node's output."""
    produced = {name for node in nodes for name in node.output}
    names: dict[str, str] = {}
    nodes_left = []
    for node in nodes:
        if node.op_type == "Identity" and node.input[0] in produced and node.input[0] not in names:
            names[node.input[0]] = node.output[0]
        else:
            nodes_left.append(node)
    for node in nodes_left:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return nodes_left
