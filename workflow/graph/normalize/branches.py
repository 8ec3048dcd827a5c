"""Replaces an If with a known condition by its branch; exporters write such nodes for shapes they did not know.

Called by `fold`.
"""

from __future__ import annotations

import onnx
from onnx import helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.functions import instantiate
from ortflow.workflow.graph.ir.known import Known
from ortflow.workflow.graph.ir.writer import Fresh


def chosen_branch(node: onnx.NodeProto, known_values: Known, fresh: Fresh) -> list[onnx.NodeProto] | None:
    """The nodes of the branch that an If takes; None if that depends on the batch."""
    if not walk.is_if(node):
        return None
    condition = known_values.numbers(node.input[0])
    if condition is None or node.input[0] in known_values.inexact:
        return None
    name = "then_branch" if condition.reshape(-1)[0] else "else_branch"
    branch = next(attribute.g for attribute in node.attribute if attribute.name == name)
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in branch.initializer]
    body = onnx.FunctionProto(
        name=name, output=[value.name for value in branch.output], node=[*constants, *branch.node]
    )
    return instantiate(body, helper.make_node("If", [], node.output, node.name), fresh)
