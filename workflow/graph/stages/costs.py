"""Estimates the cost of a forward pass per node from shapes: operations and bytes. Pure.

Matrix products are counted by their multiplications and additions. Other operators are counted by the elements that
they read and write, each weighted as several operations, because they are bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.operators.families import COSTS

TRAFFIC = 8
"""Operations that moving one element counts as: an estimate for current processors."""
_NO_WORK = frozenset({"Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"})
"""Operators that use shapes only."""


class Costs:
    """Costs of the nodes of one graph. Axes of unknown size have the sizes given by name, else `other`."""

    def __init__(
        self,
        model: onnx.ModelProto,
        sizes: Mapping[str, int],
        other: int,
        types: Mapping[str, onnx.TypeProto] | None = None,
    ) -> None:
        """`types` are those of the values if they are known; by default they are inferred."""
        self._types = shapes.value_types(model) if types is None else types
        self._sizes, self._other = sizes, other

    def dims(self, value: str) -> list[int]:
        """Sizes of a value's axes; empty if its rank is unknown."""
        dims = shapes.named_shape(self._types, value) or []
        return [size if isinstance(size, int) else self._sizes.get(size or "", self._other) for size in dims]

    def elements(self, value: str) -> int:
        """Number of elements of a value."""
        return math.prod(self.dims(value))

    def bytes(self, value: str) -> int:
        """Number of bytes of a value."""
        kind = shapes.element_type(self._types, value)
        size = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize if kind else 4
        return self.elements(value) * int(size)

    def operations(self, node: onnx.NodeProto) -> int:
        """Operations of a node in the forward pass."""
        if node.op_type in _NO_WORK:
            return 0
        moved = sum(self.elements(name) for name in (*node.input, *node.output) if name)
        return self.flops(node) + TRAFFIC * moved

    def likeness(self, node: onnx.NodeProto) -> tuple[object, ...] | None:
        """What nodes that take equally long have in common: operator, attributes, shapes.

        None if a shape is unknown.
        """
        names = [name for name in (*node.input, *node.output) if name]
        if any(shapes.named_shape(self._types, name) is None for name in names):
            return None
        attributes = sorted(entry.SerializeToString(deterministic=True) for entry in node.attribute)
        places = [bool(name) for name in (*node.input, *node.output)]
        return node.domain, node.op_type, *attributes, *places, *(tuple(self.dims(name)) for name in names)

    def flops(self, node: onnx.NodeProto) -> int:
        """Multiplications and additions of a product, a convolution or a recurrent layer."""
        rule = COSTS.get(node.op_type)
        return 0 if rule is None else rule(node, self)


def costs_for(model: onnx.ModelProto, batch: Mapping[str, Sequence[int]]) -> Costs:
    """Costs of the nodes of a graph that contains ONNX's operators alone, for inputs of these shapes.

    Axes whose size does not follow from them count as 1.
    """
    types = {name: onnx.helper.make_tensor_type_proto(*kind) for name, kind in concrete(model, batch).items()}
    return Costs(model, {}, 1, {**shapes.value_types(model), **types})


class KnownCosts(Costs):
    """Costs of the nodes of a graph whose shapes are all known, by name: element type and shape."""

    def __init__(self, types: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        self._known = types

    def dims(self, value: str) -> list[int]:
        """Sizes of a value's axes; empty if it is unknown."""
        return list(self._known[value][1]) if value in self._known else []

    def bytes(self, value: str) -> int:
        """Number of bytes of a value; 0 if it is unknown."""
        if value not in self._known:
            return 0
        return self.elements(value) * int(onnx.helper.tensor_dtype_to_np_dtype(self._known[value][0]).itemsize)
