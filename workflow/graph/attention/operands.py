"""Operands of attention's matrix products, found behind scales, transposes and the repetition of grouped heads.

Called by `attention`. Axes are named b(atch), h(eads), t(okens) and d(imension of a head).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx

from ortflow.workflow.graph.attention.proof import Proof
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.ir.stops import stops_gradient

Size = int | str | None


class Unfused(Exception):
    """Raised if an attention cannot be fused; the message says why."""


@dataclass
class View:
    """A graph, indexed by the producers and readers of its values. In `types`, equal sizes have one name."""

    model: onnx.ModelProto
    types: dict[str, onnx.TypeProto]
    proof: Proof = field(init=False)

    def __post_init__(self) -> None:
        self.proof = Proof(self.model, self.types)
        self.makers = walk.producers(self.model.graph)
        self.readers = walk.consumers(self.model.graph)
        self.outputs = {value.name for value in self.model.graph.output}

    def maker(self, value: str, *operators: str) -> onnx.NodeProto | None:
        """The node that produces a value if it is one of the given ONNX operators, or any if none is given."""
        node = self.makers.get(value)
        if node is None or node.domain or stops_gradient(node):
            return None
        return node if not operators or node.op_type in operators else None

    def dims(self, value: str) -> list[Size]:
        """Sizes of a value's axes. Raises Unfused if the rank is unknown."""
        dims = shapes.named_shape(self.types, value)
        if dims is None:
            raise Unfused(f"the shape of {walk.quoted(value)} is not known")
        return dims

    def alias(self, node: onnx.NodeProto | None) -> bool:
        """Whether a node passes on its first input unchanged."""
        if node is None or node.domain or stops_gradient(node):
            return False
        if node.op_type == "Cast":
            before, after = (shapes.element_type(self.types, name) for name in (node.input[0], node.output[0]))
            return before == after != 0
        if node.op_type == "Reshape":
            sizes = [shapes.named_shape(self.types, name) for name in (node.input[0], node.output[0])]
            return sizes[0] is not None and None not in sizes[0] and sizes[0] == sizes[1]
        if node.op_type == "Dropout":
            return self.is_idle(node)
        return bool(node.op_type == "Identity")

    def is_idle(self, dropout: onnx.NodeProto) -> bool:
        """Whether a Dropout has no effect: in evaluation mode, or with ratio 0."""
        ratio, training = (dropout.input[place] if len(dropout.input) > place else "" for place in (1, 2))
        return not training or self.proof.number(training) == 0 or (bool(ratio) and self.proof.number(ratio) == 0)

    def scaled(self, node: onnx.NodeProto | None) -> tuple[str, float] | None:
        """For a product or quotient with one number: the other factor, and the number it is multiplied by."""
        if node is None or node.domain or node.op_type not in ("Mul", "Div"):
            return None
        factor, right = node.input
        number = self.proof.number(right)
        if number is not None and not (node.op_type == "Div" and number == 0):
            return factor, number if node.op_type == "Mul" else 1 / number
        number = self.proof.number(factor) if node.op_type == "Mul" else None
        return None if number is None else (right, number)


@dataclass(frozen=True)
class Operand:
    """A factor of attention: `value` times `scale`. Each of its heads serves `repeat` query heads."""

    value: str
    axes: tuple[str, ...]
    """Names of the value's axes; `bh` is batch and heads merged into one axis."""
    scale: float = 1.0
    repeat: int = 1


def operand(view: View, value: str, axes: str, *, grouped: bool) -> Operand:
    """Trace a factor of a matrix product back through nodes that compute nothing.

    Parameters
    ----------
    view
        The graph.
    value
        Name of the factor.
    axes
        Names of its axes in order, for example `bhdt`.
    grouped
        Whether heads may be repeated for a group of query heads.

    Raises
    ------
    Unfused
        If the factor has other axes.
    """
    if len(view.dims(value)) != len(axes):
        raise Unfused(f"{walk.quoted(value)} does not have {len(axes)} axes")
    best = operand = Operand(value, tuple(axes))
    while (before := _before(view, operand)) is not None and (grouped or before.repeat == 1):
        operand = before
        if len(operand.axes) == len(axes):
            best = operand
    return best


def _before(view: View, operand: Operand) -> Operand | None:
    node = view.maker(operand.value)
    if node is None:
        return None
    if view.alias(node):
        return replace(operand, value=node.input[0])
    scaled = view.scaled(node)
    if scaled is not None and len(view.dims(scaled[0])) == len(operand.axes):
        return replace(operand, value=scaled[0], scale=operand.scale * scaled[1])
    if node.op_type == "Transpose":
        order = attribute(node, "perm", list(reversed(range(len(operand.axes)))))
        axes = [""] * len(order)
        for after, before in enumerate(order):
            axes[before] = operand.axes[after]
        return replace(operand, value=node.input[0], axes=tuple(axes))
    if node.op_type == "Reshape":
        return _joined(view, node, operand) or _split(view, node, operand) or _shared(view, node, operand)
    return None


def _joined(view: View, node: onnx.NodeProto, operand: Operand) -> Operand | None:
    """Trace back through a Reshape of [b h, ...] to [b, h, ...]."""
    before, after = view.dims(node.input[0]), view.dims(node.output[0])
    if operand.axes[:2] != ("b", "h") or len(before) != 3 or None in before[1:] or before[1:] != after[2:]:
        return None
    return replace(operand, value=node.input[0], axes=("bh", *operand.axes[2:]))


def _split(view: View, node: onnx.NodeProto, operand: Operand) -> Operand | None:
    """Trace back through a Reshape of [b, h, ...] to [b h, ...]."""
    before, after = view.dims(node.input[0]), view.dims(node.output[0])
    if operand.axes[0] != "bh" or len(before) != 4 or None in before[2:] or before[2:] != after[1:]:
        return None
    return replace(operand, value=node.input[0], axes=("b", "h", *operand.axes[1:]))


def _shared(view: View, node: onnx.NodeProto, operand: Operand) -> Operand | None:
    """Trace back through the nodes that repeat each head for a group of query heads.

    These are Unsqueeze to [b, h, 1, ...], Expand to [b, h, repeat, ...] and Reshape to [b, h repeat, ...].
    """
    expand = view.maker(node.input[0], "Expand")
    if expand is None or operand.axes[:2] != ("b", "h"):
        return None
    unsqueeze = view.maker(expand.input[0], "Unsqueeze", "Reshape")
    if unsqueeze is None:
        return None
    before, single = view.dims(unsqueeze.input[0]), view.dims(expand.input[0])
    many, after = view.dims(node.input[0]), view.dims(node.output[0])
    if len(before) != 4 or len(single) != 5 or len(many) != 5 or len(after) != 4 or single[2] != 1:
        return None
    repeat, heads = many[2], before[1]
    fits = single[:2] + single[3:] == before and many[3:] == single[3:] == after[2:]
    if not fits or many[1] != heads or not isinstance(repeat, int) or not isinstance(heads, int):
        return None
    if after[1] != heads * repeat or many[0] not in (before[0], after[0]):
        return None
    return replace(operand, value=unsqueeze.input[0], repeat=operand.repeat * repeat)
