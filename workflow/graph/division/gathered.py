"""Gathers and cumulative operators, which are the same at each place along the other axes.

Rules by which they act on divided inputs; on shares of the tokens they do not.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.division import spread
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of


@spread.rule("Gather")
def _gather(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    axis = attributes_of(node).get("axis", 0) % rank
    if cut is None or any(input_cuts[1:]) or cut.axis == axis:
        raise s.unsupported(node)
    added = len(s.shape(node.input[1])) - 1
    return [cut if cut.axis < axis else cut.at(cut.axis + added)]


@spread.rule("Trilu", "CumSum")
def _along_others(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None or any(input_cuts[1:]):
        raise s.unsupported(node)
    if node.op_type == "Trilu":
        busy = {rank - 2, rank - 1}
    else:
        axis = s.facts.constant(node.input[1])
        if axis is None:
            raise s.unsupported(node)
        busy = {int(axis.reshape(-1)[0]) % rank}
    if cut.axis in busy:
        raise s.unsupported(node)
    return [cut]
