"""Products of matrices that have no weight of a divided layer.

Rules by which they act on divided inputs; on shares of the tokens they do not.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.division import spread
from ortflow.workflow.graph.division.elementwise import beside, met
from ortflow.workflow.graph.division.spread import Divided
from ortflow.workflow.graph.ir.edit import attributes_of


@spread.rule("MatMul")
def _matmul(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    shapes = [s.shape(name) for name in node.input]
    ranks = [len(shape) for shape in shapes]
    rank = max(ranks)
    if min(ranks) < 2:
        raise s.unsupported(node)
    batch = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(input_cuts) if cut is not None}
    if len(batch) == 1 and next(iter(batch)).axis < rank - 2:
        return [met(s, place, node, input_cuts, batch.pop(), rank)]
    a, b = input_cuts
    if a is not None and b is None and a.axis == ranks[0] - 2:
        s.copy(place, 1)
        return [a.at(rank - 2)]
    if b is not None and a is None and b.axis == ranks[1] - 1:
        s.copy(place, 0)
        return [b.at(rank - 1)]
    raise s.unsupported(node)


@spread.rule("Gemm")
def _gemm(s: spread.Spread, place: int, node: onnx.NodeProto, input_cuts: spread.Given) -> Divided:
    a, flags = input_cuts[0], attributes_of(node)
    if a is None or any(input_cuts[1:]) or a.axis != 0 or flags.get("transA", 0):
        raise s.unsupported(node)
    s.copy(place, 1)
    if len(node.input) > 2 and node.input[2]:
        beside(s, place, 2, a, 2)
    return [a]
