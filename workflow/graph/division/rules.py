"""How operators act on divided inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import onnx

from ortflow.workflow.graph.division.cut import Cut, Reblock, reshaped
from ortflow.workflow.graph.division.spread import Given, Spread, rule
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of

Made = Sequence[Cut | None]
_LAST = 2**31


@rule(
    "Abs", "Acos", "Asin", "Atan", "Cast", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal",
    "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh",
    "ThresholdedRelu",
)  # fmt: skip
def _unary(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    return given


@rule(
    "Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max",
    "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum", "Where", "Xor",
)  # fmt: skip
def _broadcast(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    ranks = [len(s.shape(name)) for name in node.input]
    rank = max(ranks)
    found = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(given) if cut is not None}
    if len(found) > 1:
        raise s.unsupported(node)
    return [_met(s, place, node, given, found.pop(), rank)]


def _met(s: Spread, place: int, node: onnx.NodeProto, given: Given, cut: Cut, rank: int) -> Cut:
    """The cut of the result. Undivided inputs are broadcast, or read in part."""
    for slot, name in enumerate(node.input):
        if given[slot] is not None or not name:
            continue
        _beside(s, place, slot, cut, rank)
    return cut


def _beside(s: Spread, place: int, slot: int, cut: Cut, rank: int) -> None:
    """The undivided input of an operator that broadcasts to `rank` axes, of which `cut` is divided."""
    shape = s.shape(s.facts.nodes[place].input[slot])
    axis = cut.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        s.copy(place, slot)
    elif shape[axis] == cut.length:
        s.demand(place, slot, cut.at(axis))
    else:
        raise s.unsupported(s.facts.nodes[place])


@rule("Gelu", "FastGelu", "QuickGelu", "BiasGelu", domain=MICROSOFT)
def _gelu(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    return _broadcast(s, place, node, given)


@rule("Clip")
def _clip(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    if any(given[1:]):
        raise s.unsupported(node)
    return [given[0]]


@rule("Dropout")
def _dropout(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    # `rewrite` draws the whole mask and takes this part's share.
    if any(given[1:]) or given[0] is None or given[0].varies:
        raise s.unsupported(node)
    return [given[0]] * len(node.output)


@rule("Softmax", "LogSoftmax")
def _softmax(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    (cut,) = given
    assert cut is not None
    if attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])) == cut.axis:
        if not s.scores or node.op_type != "LogSoftmax":
            raise s.unsupported(node)
        s.plan.normal[place] = cut
    return [cut]


@rule("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
def _layer_norm(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut = given[0]
    if cut is None or any(given[1:]) or len(node.output) > 1:
        raise s.unsupported(node)
    if cut.axis >= attributes_of(node).get("axis", -1) % len(s.shape(node.input[0])):
        raise s.unsupported(node)
    for slot in range(1, len(node.input)):
        s.copy(place, slot)
    return [cut]


@rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp",
      "ReduceProd")  # fmt: skip
def _reduce(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank, flags = given[0], len(s.shape(node.input[0])), attributes_of(node)
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


@rule("Transpose")
def _transpose(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    (cut,), rank = given, len(s.shape(node.input[0]))
    assert cut is not None
    order = list(attributes_of(node).get("perm", range(rank - 1, -1, -1)))
    return [cut.at(order.index(cut.axis))]


@rule("Unsqueeze")
def _unsqueeze(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank = given[0], len(s.shape(node.output[0]))
    added = s.axes(node, 1, rank)
    if cut is None or added is None:
        raise s.unsupported(node)
    return [cut.at([axis for axis in range(rank) if axis not in added][cut.axis])]


@rule("Squeeze")
def _squeeze(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, shape = given[0], s.shape(node.input[0])
    if cut is None:
        raise s.unsupported(node)
    gone = s.axes(node, 1, len(shape))
    if gone is None:
        gone = [axis for axis, size in enumerate(shape) if size == 1]
    if cut.axis in gone:
        raise s.unsupported(node)
    return [cut.at(cut.axis - sum(axis < cut.axis for axis in gone))]


@rule("Reshape", "Flatten")
def _reshape(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut = given[0]
    if cut is None or any(given[1:]):
        raise s.unsupported(node)
    shapes = s.shape(node.input[0]), s.shape(node.output[0])
    made = reshaped(cut, *shapes, s.parts, propose=cut.seed not in s.refused)
    made = replace(made, varies=s.facts.size(node.output[0], made.axis) is None)
    if node.op_type == "Reshape":
        s.plan.sizes[place, 1] = made.axis, made
    if len(shapes[0]) < len(shapes[1]) and made.seed is None and not made.varies:
        s.plan.heads.append(made.length)
    return [made]


@rule("Expand")
def _expand(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, (old, new) = given[0], (s.shape(node.input[0]), s.shape(node.output[0]))
    if cut is None or any(given[1:]):
        raise s.unsupported(node)
    made = cut.at(cut.axis + len(new) - len(old))
    axis = made.axis - (len(new) - s.shape(node.input[1])[0])
    listed = s.facts.value(node.input[1])
    if new[made.axis] != cut.length or (axis >= 0 and listed is None):
        raise s.unsupported(node)
    if axis >= 0 and listed is not None and listed[axis] != 1:
        s.plan.sizes[place, 1] = axis, made
    return [made]


@rule("MatMul")
def _matmul(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    shapes = [s.shape(name) for name in node.input]
    ranks = [len(shape) for shape in shapes]
    rank = max(ranks)
    if min(ranks) < 2:
        raise s.unsupported(node)
    batch = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(given) if cut is not None}
    if len(batch) == 1 and next(iter(batch)).axis < rank - 2:
        return [_met(s, place, node, given, batch.pop(), rank)]
    a, b = given
    if a is not None and b is None and a.axis == ranks[0] - 2:
        s.copy(place, 1)
        return [a.at(rank - 2)]
    if b is not None and a is None and b.axis == ranks[1] - 1:
        s.copy(place, 0)
        return [b.at(rank - 1)]
    raise s.unsupported(node)


@rule("Gemm")
def _gemm(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    a, flags = given[0], attributes_of(node)
    if a is None or any(given[1:]) or a.axis != 0 or flags.get("transA", 0):
        raise s.unsupported(node)
    s.copy(place, 1)
    if len(node.input) > 2 and node.input[2]:
        _beside(s, place, 2, a, 2)
    return [a]


@rule("Concat")
def _concat(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    axis = attributes_of(node)["axis"] % len(s.shape(node.output[0]))
    found = {cut.axis for cut in given if cut is not None}
    if len(found) > 1:
        raise s.unsupported(node)
    (place_of_cut,) = found
    if place_of_cut == axis:
        if not all(given) or any(cut.varies for cut in given if cut is not None):
            raise s.unsupported(node)
        return [Cut(axis, tuple(block for cut in given if cut is not None for block in cut.blocks))]
    cuts = {cut for cut in given if cut is not None}
    if len(cuts) > 1:
        raise s.unsupported(node)
    cut = cuts.pop()
    for slot, each in enumerate(given):
        if each is None:
            s.demand(place, slot, cut)
    return [cut]


@rule("Split")
def _split(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank = given[0], len(s.shape(node.input[0]))
    if cut is None:
        raise s.unsupported(node)
    if attributes_of(node).get("axis", 0) % rank != cut.axis:
        return [cut] * len(node.output)
    if any(s.facts.size(name, cut.axis) is None for name in node.output):
        raise s.unsupported(node)
    sizes = tuple(s.shape(name)[cut.axis] for name in node.output)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    made = [_blocks(s, node, cut, start, start + size, sizes) for start, size in zip(starts, sizes, strict=True)]
    if len(node.input) > 1 and node.input[1]:
        s.plan.lists[place, 1] = sizes
    return made


def _blocks(s: Spread, node: onnx.NodeProto, cut: Cut, start: int, stop: int, sizes: tuple[int, ...]) -> Cut:
    """The whole blocks within a range along a divided axis. Proposes to cut at its ends if there is none."""
    edges = [sum(cut.blocks[:i]) for i in range(len(cut.blocks) + 1)]
    if start in edges and stop in edges and not cut.varies:
        blocks = cut.blocks[edges.index(start) : edges.index(stop)]
        if blocks:
            return Cut(cut.axis, blocks)
    if cut.seed is not None and len(cut.blocks) == 1 and cut.seed not in s.refused and not cut.varies:
        raise Reblock(cut.seed, sizes)
    raise s.unsupported(node)


@rule("Slice")
def _slice(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank = given[0], len(s.shape(node.input[0]))
    if cut is None or any(given[1:]):
        raise s.unsupported(node)
    axes = s.axes(node, 3, rank) if len(node.input) > 3 else list(range(s.shape(node.input[1])[0]))
    if axes is None:
        axes = list(range(s.shape(node.input[1])[0]))
    if cut.axis not in axes:
        return [cut]
    starts, ends = (s.facts.constant(node.input[slot]) for slot in (1, 2))
    steps = s.facts.constant(node.input[4]) if len(node.input) > 4 and node.input[4] else None
    if starts is None or ends is None or len(axes) > 1 or (steps is not None and int(steps[0]) != 1):
        raise s.unsupported(node)
    start, stop, _ = slice(int(starts[0]), int(min(ends[0], _LAST))).indices(cut.length)
    if (start, stop) == (0, cut.length):
        return [cut]
    edges = sorted({0, start, stop, cut.length, *_other_edges(s, node, cut)})
    sizes = tuple(end - begin for begin, end in pairwise(edges))
    made = _blocks(s, node, cut, start, stop, sizes)
    s.plan.lists[place, 1], s.plan.lists[place, 2] = (start,), (stop,)
    return [made]


def _other_edges(s: Spread, node: onnx.NodeProto, cut: Cut) -> set[int]:
    """Where other slices of the same value begin and end along the divided axis."""
    found: set[int] = set()
    for place, slot in s.facts.readers.get(node.input[0], []):
        other = s.facts.nodes[place]
        if other.op_type != "Slice" or slot != 0 or len(other.input) < 4:
            continue
        values = [s.facts.constant(other.input[i]) for i in (1, 2, 3)]
        if any(value is None or value.size != 1 for value in values):
            continue
        start, stop, axis = (int(value.reshape(-1)[0]) for value in values if value is not None)
        if axis % len(s.shape(node.input[0])) == cut.axis:
            found |= set(slice(start, min(stop, _LAST)).indices(cut.length)[:2])
    return found


@rule("Gather")
def _gather(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank = given[0], len(s.shape(node.input[0]))
    axis = attributes_of(node).get("axis", 0) % rank
    if cut is None or any(given[1:]) or cut.axis == axis:
        raise s.unsupported(node)
    added = len(s.shape(node.input[1])) - 1
    return [cut if cut.axis < axis else cut.at(cut.axis + added)]


@rule("Trilu", "CumSum")
def _along_others(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut, rank = given[0], len(s.shape(node.input[0]))
    if cut is None or any(given[1:]):
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


@rule("SoftmaxCrossEntropyLoss")
def _entropy(s: Spread, place: int, node: onnx.NodeProto, given: Given) -> Made:
    cut = given[0]
    logs = node.output[1] if len(node.output) > 1 else ""
    if not s.scores or cut is None or cut.axis != 1 or any(given[1:]) or len(node.input) > 2:
        raise s.unsupported(node)
    if logs in s.facts.readers or logs in s.facts.outputs:
        raise s.unsupported(node)
    s.plan.entropies[place] = cut
    return [None]
