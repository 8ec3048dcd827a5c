"""An update that leaves everything as it is where the gradient is no number: the device decides, and no host waits.

Called by step `configure` for runs on GPUs, on any optimizer's graph, a user's own too.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ortflow.workflow.graph import shapes
from ortflow.workflow.graph.functions import replace_nodes


def guarded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose every output `NAME.I.out` is `NAME.I` in each place where `gradients.I` is NaN.

    Outputs may lie in the memory of their inputs, as before.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    inputs = {value.name for value in graph.input}
    new = {}
    for value in graph.output:
        old = value.name.removesuffix(".out")
        gradients = f"gradients.{old.rpartition('.')[2]}"
        if value.name != old and old in inputs and gradients in inputs:
            new[value.name] = (f"{value.name}/new", old, gradients)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        made = [name for name in node.output if name in new]
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = new[name][0] if name in new else name
        for out in made:
            value, old, gradients = new[out]
            # One for each output: where nodes are fused, a condition stays inside its group.
            is_number = f"{out}/is_number"
            nodes.append(helper.make_node("Equal", [gradients, gradients], [is_number], name=is_number))
            nodes.append(helper.make_node("Where", [is_number, value, old], [out], name=f"{out}/kept"))
    replace_nodes(graph, nodes)
    shapes.infer(copy, list(graph.value_info))
    return copy
