"""Finds the logits behind an output that gives probabilities. Pure.

Exported models often end with a Softmax or a Sigmoid: Keras, JAX and PaddlePaddle write such files. Cross-entropy and
`bce_with_logits` take logits, so that a loss of the probabilities would compute softmax(softmax(x)): it trains, slowly,
towards something else. Called by `loss`, which lets the loss read the logits, and by `build`, which says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, constants_of, described, dims_of
from ortflow.workflow.graph.ir.stops import stops_gradient
from ortflow.workflow.spec.losses import ClassLoss, Ctc, Divergence, TargetLoss
from ortflow.workflow.spec.model import SingleLoss

_MOVING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the elements in their order."""
_SPREADING = frozenset({"Expand", "Identity"})
_SQUASHING = frozenset({"Erf", "Exp", "HardSigmoid", "Sigmoid", "Softmax", "Softsign", "Tanh"})
"""Operators of which other forms of a sigmoid are made."""
_LAYERS = frozenset({"Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})
"""Operators whose results may be logits, whatever is before them."""
Dims = tuple[int | str | None, ...]
OVER_CLASSES = ClassLoss | Divergence | Ctc
"""Losses of logits that make probabilities by a Softmax."""


@dataclass(frozen=True)
class Probabilities:
    """How an output's probabilities are made."""

    node: onnx.NodeProto
    """The node that gives them."""
    logits: str
    """What they are probabilities of."""
    after: Sequence[onnx.NodeProto]
    """Layout operators between `node` and the output, the last one first."""
    of_two: bool = False
    """Whether `logits` has one logit a sample, of the second class, and that of the first is 0."""


class _Graph:
    """What is looked up in a graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers = walk.producers(graph)
        self._known, self.constants = described(graph), constants_of(graph)

    def maker(self, value: str) -> onnx.NodeProto | None:
        node = self._makers.get(value)
        return None if node is None or node.domain or stops_gradient(node) else node

    def dims(self, value: str) -> Dims | None:
        return dims_of(self._known[value]) if value in self._known else None


def probabilities(graph: onnx.GraphProto, loss: SingleLoss, output: str) -> Probabilities | None:
    """How an output gives probabilities, if the loss takes logits; None if it does not, as far as nodes show.

    For losses over classes they are those of a Softmax over the classes, whole or written out, for losses against
    targets in [0, 1] of a Sigmoid.
    """
    if not isinstance(loss, OVER_CLASSES | TargetLoss):
        return None
    lookup, value, after = _Graph(graph), output, list[onnx.NodeProto]()
    dims, axis = lookup.dims(value), None
    if isinstance(loss, OVER_CLASSES):
        if not dims or not -len(dims) <= loss.class_axis < len(dims):
            return None
        axis = loss.class_axis % len(dims)
    while (node := lookup.maker(value)) is not None:
        logits = _logits(lookup, node, axis, dims)
        if logits is not None:
            return Probabilities(node, logits, after) if logits else None
        if logit := _of_two(lookup, node, axis, dims):
            return Probabilities(node, logit, after, of_two=True)
        if node.op_type not in _MOVING | {"Identity", "Transpose"}:
            return None
        value = node.input[0]
        before = lookup.dims(value)
        if axis is not None and (axis := _moved(node, axis, before, dims)) is None:
            return None
        dims = before
        after.append(node)
    return None


def _logits(lookup: _Graph, node: onnx.NodeProto, axis: int | None, dims: Dims | None) -> str | None:
    """The logits of a node that gives probabilities; empty if they are others, None if it gives none."""
    if node.op_type == ("Sigmoid" if axis is None else "Softmax"):
        along = axis is None or (dims is not None and axis == attributes_of(node).get("axis", -1) % len(dims))
        return str(node.input[0]) if along else ""
    if node.op_type == "Div" and axis is not None:
        return _exponentials(lookup, node, axis)
    return None


def _of_two(lookup: _Graph, node: onnx.NodeProto, axis: int | None, dims: Dims | None) -> str:
    """z of the probabilities 1 - s(z) and s(z) of two classes, as scikit-learn's exporter writes them, else empty."""
    if node.op_type != "Concat" or axis is None or not dims or dims[axis] != 2 or len(node.input) != 2:
        return ""
    first, second = (lookup.maker(name) for name in node.input)
    if first is None or second is None or first.op_type != "Sub" or second.op_type != "Sigmoid":
        return ""
    minuend = lookup.constants.get(first.input[0])
    complement = (
        minuend is not None
        and minuend.size == 1
        and float(minuend.reshape(-1)[0]) == 1
        and first.input[1] == node.input[1]
    )
    return str(second.input[0]) if complement and attributes_of(node)["axis"] % len(dims) == axis else ""


def _moved(node: onnx.NodeProto, axis: int, before: Dims | None, after: Dims | None) -> int | None:
    """The axis of a layout operator's input that is this axis of its output; None if that is not certain."""
    if node.op_type == "Identity":
        return axis
    if before is None or after is None:
        return None
    if node.op_type == "Transpose":
        order: list[int] = attributes_of(node).get("perm", [*range(len(before))][::-1])
        return order[axis]
    size, inner = after[axis], _elements(after[axis + 1 :])
    if not isinstance(size, int) or inner is None:
        return None
    candidates = [
        place
        for place, other_size in enumerate(before)
        if other_size == size and _elements(before[place + 1 :]) == inner
    ]
    return candidates[0] if len(candidates) == 1 else None


def _elements(dims: Dims) -> tuple[int, list[str]] | None:
    """How many elements lie along these axes: a number and symbols, whose product it is; None if that is unknown."""
    symbols = [size for size in dims if isinstance(size, str)]
    number = math.prod(size for size in dims if isinstance(size, int))
    return None if None in dims else (number, sorted(symbols))


def _exponentials(lookup: _Graph, node: onnx.NodeProto, axis: int) -> str:
    """Of exp(x) / (sum of exp(x) along an axis): x, else an empty name."""
    upper = lookup.maker(node.input[0])
    if upper is None or upper.op_type != "Exp":
        return ""
    value = node.input[1]
    while (lower := lookup.maker(value)) is not None and lower.op_type in _SPREADING:
        value = lower.input[0]
    dims, value_dims = lookup.dims(value), lookup.dims(node.input[0])
    if dims is None or value_dims is None or len(dims) != len(value_dims) or dims[axis] != 1:
        return ""
    while (lower := lookup.maker(value)) is not None and lower.op_type in _MOVING:
        value = lower.input[0]
    if lower is None or lower.op_type != "ReduceSum" or lower.input[0] != node.input[0]:
        return ""
    axes = lookup.constants.get(lower.input[1]) if len(lower.input) > 1 else None
    return (
        upper.input[0]
        if axes is not None and [int(reduced_axis) % len(value_dims) for reduced_axis in axes] == [axis]
        else ""
    )


def unproved_logits(graph: onnx.GraphProto, loss: SingleLoss, output: str) -> str:
    """The output if the loss reads it as logits and it may be probabilities all the same; empty if not.

    For binary cross-entropy, values from 0 to 1 prove little: a fresh layer of one logit gives nearly one number. So
    something behind the last layer must squash them.
    """
    if not isinstance(loss, OVER_CLASSES | TargetLoss) or probabilities(graph, loss, output) is not None:
        return ""
    return output if isinstance(loss, OVER_CLASSES) or _is_squashed(graph, output) else ""


def _is_squashed(graph: onnx.GraphProto, value: str) -> bool:
    """Whether a squashing operator is between a value and the layers before it."""
    makers, visited, open_names = walk.producers(graph), {value}, [value]
    while open_names:
        node = makers.get(open_names.pop())
        if node is None or node.op_type in _LAYERS or node.op_type.endswith("Normalization"):
            continue
        if node.op_type in _SQUASHING:
            return True
        fresh = walk.inputs(node) - visited
        visited |= fresh
        open_names += fresh
    return False


def read_logits(edit: Editor, loss: SingleLoss, output: str) -> str:
    """The value that a loss reads: the output, or the logits that it gives probabilities of."""
    if (probability := probabilities(edit.graph, loss, output)) is None:
        return output
    value = probability.logits
    if probability.of_two:
        # softmax([0, z]) is [1 - s(z), s(z)].
        value = edit("Concat", edit("Mul", value, edit.constant(0.0)), value, **attributes_of(probability.node))
    for node in reversed(probability.after):
        value = edit(node.op_type, value, *node.input[1:], **attributes_of(node))
    return value


def logits_note(graph: onnx.GraphProto, loss: SingleLoss, output: str) -> list[str]:
    """The line of the log about what `read_logits` does, if that is not the output."""
    if (probability := probabilities(graph, loss, output)) is None:
        return []
    return [
        f"output {walk.quoted(output)} gives probabilities, and {loss.kind} takes logits: the loss reads"
        f" {walk.quoted(probability.logits)}, before {walk.called(probability.node)}; the exported model keeps it"
    ]
