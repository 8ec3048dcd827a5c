"""Makes an update conditional: if the gradient is NaN or infinite, nothing changes. The decision is made on the device.

Called by step `configure` for GPU runs, on any optimizer's graph, including a user's own.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import drop_unread_inputs
from ortflow.workflow.optim.copies import without_copies
from ortflow.workflow.optim.gradient import FACTOR

GRADIENTS, CHANGES = "gradients.", "change."
"""Beginnings of the names of the inputs from which new values are made, by an optimizer and by LAMB's second graph."""


def guarded(model: onnx.ModelProto, *, multiplied: bool = False, change: str = GRADIENTS) -> onnx.ModelProto:
    """Return a copy whose outputs `NAME.I.out` equal `NAME.I` wherever `gradients.I` is NaN.

    Inputs that are not read are removed. Outputs may share the memory of their inputs, as before.

    Parameters
    ----------
    model
        The optimizer graph.
    multiplied
        First multiply the gradients by the further input FACTOR, fp32 [1], which `queued_gradient_graph` computes.
    change
        Beginning of the names of the inputs to look at: those of the gradients, or CHANGES.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    without_copies(graph)
    inputs = {value.name for value in graph.input}
    new = {}
    for value in graph.output:
        old = value.name.removesuffix(".out")
        gradients = change + old.rpartition(".")[2]
        if value.name != old and old in inputs and gradients in inputs:
            new[value.name] = (f"{value.name}/new", old, gradients)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        results = [name for name in node.output if name in new]
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = new[name][0] if name in new else name
        for out in results:
            value, old, gradients = new[out]
            # One per output: if nodes are fused, the condition stays inside its group.
            is_number = f"{out}/is_number"
            # NaN does not equal itself.
            nodes.append(helper.make_node("Equal", [gradients, gradients], [is_number], name=is_number))
            nodes.append(helper.make_node("Where", [is_number, value, old], [out], name=f"{out}/kept"))
    replace(graph.node, nodes)
    if multiplied:
        _multiply(graph)
    drop_unread_inputs(graph)
    shapes.infer(copy, list(graph.value_info))
    return copy


def _multiply(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info(FACTOR, onnx.TensorProto.FLOAT, [1]))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name.startswith(GRADIENTS):
                # One per reader, like the conditions: fused groups share no value.
                node.input[place] = f"{name}/multiplied.{len(nodes)}"
                nodes.append(helper.make_node("Mul", [name, FACTOR], [node.input[place]], name=node.input[place]))
        nodes.append(node)
    replace(graph.node, nodes)
