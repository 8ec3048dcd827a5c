"""Reductions.

Rules by which they act on divided inputs, and on shares of the tokens (`_of_tokens`).
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.division import sequence, spread
from ortflow.workflow.graph.division.sequence import Shares
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of


@spread.rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
      "ReduceProd")  # fmt: skip
def _reduce(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    cut, rank, flags = input_cuts[0], len(s.shape(node.input[0])), attributes_of(node)
    if cut is None:
        raise s.unsupported(node)
    axes = s.axes(node, 1, rank)
    if axes is None and not flags.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    if cut.axis in (axes or []):
        if not s.scores or node.op_type != "ReduceSum":
            raise s.unsupported(node)
        s.plan.sums.add(place)
        return [None]
    gone = [] if flags.get("keepdims", 1) else [axis for axis in axes or [] if axis < cut.axis]
    return [cut.at(cut.axis - len(gone))]


@sequence.rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp")
def _reduce_of_tokens(s: sequence.Search, place: int, node: onnx.NodeProto, input_axes: sequence.Given) -> Shares:
    listed = s.listed(node, 1, s.rank(node.input[0]))
    if not input_axes[0] or any(input_axes[1:]) or not listed or min(listed) < input_axes[0]:
        raise sequence.Whole
    return [input_axes[0]]
