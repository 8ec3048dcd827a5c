"""Operators that copy, reverse or regroup elements: tiles, triangles, blocks of pixels."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Tile")
def tile(b: Backward) -> Gradients:
    """Sum over the copies, after a Reshape that gives them an axis of their own."""
    rank = b.rank(0)
    if not rank:
        yield 0, b.gradient()
        return
    pairs = b("Concat", *(b("Unsqueeze", v, b.ints(1)) for v in (b.input(1), b("Shape", b.input(0)))), axis=1)
    copies = b("Reshape", b.gradient(), b("Reshape", pairs, b.ints(-1)))
    yield 0, b("ReduceSum", copies, b.ints(*range(0, 2 * rank, 2)), keepdims=0)


@gradient_rule("ReverseSequence")
def reverse_sequence(b: Backward) -> Gradients:
    """Reverse the sequences again."""
    axes = {name: b.attribute(name, default) for name, default in (("batch_axis", 1), ("time_axis", 0))}
    yield 0, b("ReverseSequence", b.gradient(), b.input(1), **axes)


@gradient_rule("Trilu")
@gradient_rule("Trilu", domain=MICROSOFT)
def triangle(b: Backward) -> Gradients:
    """ONNX Runtime's is the same; ONNX has it since opset 14."""
    offset = [b.input(1)] if b.input(1) else []
    yield 0, b("Trilu", b.gradient(), *offset, upper=b.attribute("upper", 1))


@gradient_rule("DepthToSpace")
def depth_to_space(b: Backward) -> Gradients:
    """SpaceToDepth inverts the mode DCR. In the mode CRD, channels are the outer axis and block positions the inner
    one.
    """
    block, gradient = b.attribute("blocksize", 1), b.gradient()
    blocks = b("SpaceToDepth", gradient, blocksize=block)
    if b.attribute("mode", "DCR") == "CRD":
        shape = b.shape_of(b.input(0))
        ends = [b("Slice", shape, b.ints(start), b.ints(end)) for start, end in ((0, 1), (2, 4))]
        parts = b("Reshape", blocks, b("Concat", ends[0], b.ints(block * block, -1), ends[1], axis=0))
        blocks = b("Reshape", b("Transpose", parts, perm=[0, 2, 1, 3, 4]), shape)
    yield 0, blocks


@gradient_rule("SpaceToDepth")
def space_to_depth(b: Backward) -> Gradients:
    yield 0, b("DepthToSpace", b.gradient(), blocksize=b.attribute("blocksize", 1))


@division_rule("Trilu")
def triangle_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    """The same at each place along the other axes."""
    cut, rank = input_cuts[0], len(s.shape(node.input[0]))
    if cut is None or any(input_cuts[1:]) or cut.axis >= rank - 2:
        raise s.unsupported(node)
    return [cut]


describe(["Trilu"], Trait.FIRST_DIVIDED)
