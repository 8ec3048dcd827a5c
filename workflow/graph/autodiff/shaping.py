"""Rules for operators that move elements: each output element is an input element or a constant."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes


@rule("Reshape", "Flatten")
def reshape(b: Backward) -> Gradients:
    yield 0, b.reshaped(b.gradient(), b.input(0))


@rule("Squeeze")
def squeeze(b: Backward) -> Gradients:
    if b.input(1):
        yield 0, b("Unsqueeze", b.gradient(), b.input(1))
    else:
        yield 0, b.reshaped(b.gradient(), b.input(0))


@rule("Unsqueeze")
def unsqueeze(b: Backward) -> Gradients:
    yield 0, b("Squeeze", b.gradient(), b.input(1))


@rule("Transpose")
def transpose(b: Backward) -> Gradients:
    order = list(b.attribute("perm", []))
    if order:
        yield 0, b("Transpose", b.gradient(), perm=[order.index(axis) for axis in range(len(order))])
    else:
        yield 0, b("Transpose", b.gradient())


@rule("Expand")
def expand(b: Backward) -> Gradients:
    yield 0, b.summed(b.gradient(), b.input(0), b.output(0))


@rule("Tile")
def tile(b: Backward) -> Gradients:
    """Sum over the copies, after a Reshape that gives them an axis of their own."""
    rank = b.rank(0)
    if not rank:
        yield 0, b.gradient()
        return
    pairs = b("Concat", *(b("Unsqueeze", v, b.ints(1)) for v in (b.input(1), b("Shape", b.input(0)))), axis=1)
    copies = b("Reshape", b.gradient(), b("Reshape", pairs, b.ints(-1)))
    yield 0, b("ReduceSum", copies, b.ints(*range(0, 2 * rank, 2)), keepdims=0)


@rule("Concat")
def concat(b: Backward) -> Gradients:
    axis, inputs = b.attribute("axis", 0) % b.rank(0), list(b.node.input)
    wanted_places = [place for place in range(len(inputs)) if b.wants(place)]
    sizes = [(shapes.shape(b.context.types, name) or [None] * (axis + 1))[axis] for name in inputs]
    fixed_sizes = [size for size in sizes if size is not None]
    if len(fixed_sizes) < len(sizes) or len(wanted_places) == len(inputs):
        if len(fixed_sizes) == len(sizes):
            lengths = b.ints(*fixed_sizes)
        else:
            lengths = b("Concat", *(b("Shape", name, start=axis, end=axis + 1) for name in inputs), axis=0)
        parts = b.several("Split", len(inputs), b.gradient(), lengths, axis=axis)
        yield from ((place, parts[place]) for place in wanted_places)
        return
    for place in wanted_places:
        start = sum(fixed_sizes[:place])
        ends = b.ints(start), b.ints(start + fixed_sizes[place])
        yield place, b("Slice", b.gradient(), *ends, b.ints(axis))


@rule("Split")
def split(b: Backward) -> Gradients:
    """A part that the loss does not depend on gets a zero gradient."""
    parts = [b.gradient(place) or b.zeros(b.saved_output(place)) for place in range(len(b.node.output))]
    yield 0, b("Concat", *parts, axis=b.attribute("axis", 0)) if len(parts) > 1 else parts[0]


@rule("ReverseSequence")
def reverse_sequence(b: Backward) -> Gradients:
    """Reverse the sequences again."""
    axes = {name: b.attribute(name, default) for name, default in (("batch_axis", 1), ("time_axis", 0))}
    yield 0, b("ReverseSequence", b.gradient(), b.input(1), **axes)


@rule("Trilu")
@rule("Trilu", domain=MICROSOFT)
def triangle(b: Backward) -> Gradients:
    """ONNX Runtime's is the same; ONNX has it since opset 14."""
    offset = [b.input(1)] if b.input(1) else []
    yield 0, b("Trilu", b.gradient(), *offset, upper=b.attribute("upper", 1))


@rule("DepthToSpace")
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


@rule("SpaceToDepth")
def space_to_depth(b: Backward) -> Gradients:
    yield 0, b("DepthToSpace", b.gradient(), blocksize=b.attribute("blocksize", 1))
