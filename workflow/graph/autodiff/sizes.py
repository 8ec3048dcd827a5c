"""Finds unknown sizes that are always equal: onnx gives each result of a Reshape or a broadcast a new name.

Called by `reverse`. A rule that knows two axes to have the same size need not sum over possibly broadcast axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.named_sizes import named_sizes
from ortflow.workflow.graph.ir.replacement import attribute

Size = int | str | None
_COMPARISONS = frozenset(["And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor"])
_BROADCASTS = _COMPARISONS | frozenset(
    ["Add", "Div", "Expand", "Max", "Mean", "Min", "Mod", "Mul", "PRelu", "Pow", "Sub", "Sum", "Where"]
)
_SAME_NUMBERS = frozenset(["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
"""Operators that keep the elements of a vector and their order."""


def unified(graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TypeProto]:
    """The types with one name per group of sizes that are always equal. Nodes must be sorted."""
    names = _Names(types)
    numbers = _Numbers(graph, names)
    for node in graph.node:
        if node.domain == "":
            numbers.enter(node)
            _compare(node, names, numbers)
        for dims in map(names.dims, filter(None, node.output)):
            for size, name in zip(dims or (), named_sizes(node), strict=False):
                names.join(size, name)
                names.join(name, size)
    return {name: names.renamed(value_type) for name, value_type in types.items()}


class _Names:
    """Names of sizes, and what they stand for: a number times sizes with other names."""

    def __init__(self, types: Mapping[str, onnx.TypeProto]) -> None:
        self._types = types
        self._meaning: dict[str, tuple[int, Counter[str]]] = {}

    def product(self, sizes: Iterable[Size]) -> tuple[int, Counter[str]]:
        """Product of sizes that are all known by number or name: a number, and names with their exponents."""
        number, factors = 1, Counter[str]()
        for size in sizes:
            if isinstance(size, int):
                number *= size
            elif size in self._meaning:
                times, symbols = self._meaning[size]
                multiple, symbol_factors = self.product(symbols.elements())
                number, factors = number * times * multiple, factors + symbol_factors
            else:
                factors[str(size)] += 1
        return number, factors

    def find(self, size: Size) -> Size:
        """The representative name of all sizes equal to this one; a number represents itself."""
        if not isinstance(size, str) or size not in self._meaning:
            return size
        number, factors = self.product([size])
        names = sorted(factors.elements())
        if not names:
            return number
        if number == 1 and len(names) == 1:
            return names[0]
        name = "*".join([*([str(number)] if number > 1 else []), *names])
        self._meaning[name] = number, factors
        return name

    def join(self, new: Size, old: Size) -> None:
        """Record that two sizes are equal; the name of `old` is kept."""
        if old is not None:
            self.define(new, *self.product([old]))

    def define(self, new: Size, number: int, factors: Counter[str]) -> None:
        """Record that a size is the product of a number and other sizes, unless it is already known."""
        name = self.find(new)
        if isinstance(name, str) and name not in self._meaning and name not in factors:
            self._meaning[name] = number, factors

    def dims(self, value: str) -> list[Size] | None:
        """Sizes of a value's axes; None if their number is unknown."""
        dims = shapes.named_shape(self._types, value)
        return None if dims is None else [self.find(size) for size in dims]

    def renamed(self, value_type: onnx.TypeProto) -> onnx.TypeProto:
        """A type with every size replaced by its representative name."""
        if not any(dim.dim_param in self._meaning for dim in value_type.tensor_type.shape.dim):
            return value_type
        copy = onnx.TypeProto()
        copy.CopyFrom(value_type)
        for dim in copy.tensor_type.shape.dim:
            if dim.dim_param in self._meaning:
                size = self.find(dim.dim_param)
                if isinstance(size, int):
                    dim.dim_value = size
                else:
                    dim.dim_param = str(size)
        return copy


class _Numbers:
    """Integers that a graph computes from shapes, as numbers and size names."""

    def __init__(self, graph: onnx.GraphProto, names: _Names) -> None:
        self._names = names
        self._known: dict[str, list[Size]] = {}
        for tensor in graph.initializer:
            if tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32) and math.prod(tensor.dims) <= 8:
                self._known[tensor.name] = [int(n) for n in numpy_helper.to_array(tensor).reshape(-1)]

    def of(self, value: str) -> list[Size] | None:
        """The elements of a vector or scalar; None if nothing is known about them."""
        return self._known.get(value)

    def enter(self, node: onnx.NodeProto) -> None:
        """Record what a node computes from known elements."""
        rule = _RULES.get(node.op_type)
        elements = rule(node, self) if rule is not None else None
        if elements is not None:
            self._known[node.output[0]] = elements

    def shape(self, node: onnx.NodeProto) -> list[Size] | None:
        dims = self._names.dims(node.input[0])
        return None if dims is None else dims[attribute(node, "start", 0) : attribute(node, "end", None)]

    def same(self, node: onnx.NodeProto) -> list[Size] | None:
        return self.of(node.input[0])

    def gather(self, node: onnx.NodeProto) -> list[Size] | None:
        data, places = self.of(node.input[0]), self.of(node.input[1])
        if data is None or places is None:
            return None
        selection = [place for place in places if isinstance(place, int) and -len(data) <= place < len(data)]
        return [data[place] for place in selection] if len(selection) == len(places) else None

    def concat(self, node: onnx.NodeProto) -> list[Size] | None:
        parts = [self.of(name) for name in node.input]
        return [size for part in parts for size in part or []] if None not in parts else None

    def equal(self, node: onnx.NodeProto) -> list[Size] | None:
        """1 where two elements are equal, 0 where they differ; a size is never negative."""
        elements: list[Size] = []
        for a, b in zip(*(self.of(name) or [] for name in node.input), strict=False):
            if isinstance(a, int) and isinstance(b, int):
                elements.append(int(a == b))
            elif any(isinstance(element, int) and element < 0 for element in (a, b)):
                elements.append(0)
            else:
                return None
        return elements if all(len(self.of(name) or []) == len(elements) > 0 for name in node.input) else None

    def where(self, node: onnx.NodeProto) -> list[Size] | None:
        condition, yes, no = (self.of(name) or [] for name in node.input)
        if not len(condition) == len(yes) == len(no) > 0 or not all(isinstance(flag, int) for flag in condition):
            return None
        return [a if flag else b for flag, a, b in zip(condition, yes, no, strict=True)]

    def multiplied(self, node: onnx.NodeProto) -> list[Size] | None:
        a, b = (self.of(name) or [] for name in node.input)
        if not len(a) == len(b) > 0:
            return None
        products = [x * y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)]
        return [*products] if len(products) == len(a) else None

    def slice(self, node: onnx.NodeProto) -> list[Size] | None:
        data, *limits = (self.of(name) for name in node.input[:3])
        if data is None or len(node.input) > 4 or any(limit is None or len(limit) != 1 for limit in limits):
            return None
        start, end = (limit[0] for limit in limits if limit is not None)
        return data[start:end] if isinstance(start, int) and isinstance(end, int) else None


_RULES: dict[str, Callable[[onnx.NodeProto, _Numbers], list[Size] | None]] = {
    "Shape": lambda node, numbers: numbers.shape(node),
    "Gather": lambda node, numbers: numbers.gather(node),
    "Concat": lambda node, numbers: numbers.concat(node),
    "Slice": lambda node, numbers: numbers.slice(node),
    "Equal": lambda node, numbers: numbers.equal(node),
    "Where": lambda node, numbers: numbers.where(node),
    "Mul": lambda node, numbers: numbers.multiplied(node),
    **dict.fromkeys(_SAME_NUMBERS, lambda node, numbers: numbers.same(node)),
}


def _compare(node: onnx.NodeProto, names: _Names, numbers: _Numbers) -> None:
    result = names.dims(node.output[0])
    if result is None:
        return
    inputs = [names.dims(name) for name in node.input if name]
    if node.op_type in _BROADCASTS:
        if node.op_type == "Expand":
            inputs[1:] = [numbers.of(node.input[1])]
        _broadcast(names, inputs, result)
    elif node.op_type == "MatMul":
        if all(dims is not None and len(dims) > 1 for dims in inputs):
            _broadcast(names, [(dims or [])[:-2] for dims in inputs], result[:-2])
    elif node.op_type == "Reshape" and inputs[0] is not None:
        _product(names, inputs[0], result)
    elif node.op_type == "Slice" and inputs[0] is not None:
        _slice(node, names, numbers, inputs[0], result)
    elif node.op_type == "Range":
        start, limit, step = (numbers.of(name) for name in node.input)
        if start == [0] and step == [1] and limit is not None:
            names.join(result[0], limit[0])


def _broadcast(names: _Names, inputs: Iterable[Sequence[Size] | None], result: Sequence[Size]) -> None:
    """Axes that have one size, or 1, in all inputs have that size in the result."""
    shapes = list(inputs)
    if None in shapes:
        return
    for i in range(1, len(result) + 1):
        sizes = {names.find(dims[-i]) for dims in shapes if dims is not None and len(dims) >= i} - {1}
        if len(sizes) == 1:
            size = sizes.pop()
            # Expand's shape may hold 1 or 0 where the result is larger.
            if isinstance(size, str) or (size or 0) > 1:
                names.join(result[-i], size)


def _product(names: _Names, before: Sequence[Size], after: Sequence[Size]) -> None:
    """Determine the one size that remains when all others cancel: the number of elements is unchanged."""
    if None in before or None in after or 0 in before or 0 in after:
        return
    (number, factors), (part, other_factors) = names.product(before), names.product(after)
    unmatched = list((other_factors - factors).elements())
    if len(unmatched) == 1 and number % part == 0:
        names.define(unmatched[0], number // part, factors - other_factors)


def _slice(
    node: onnx.NodeProto, names: _Names, numbers: _Numbers, before: Sequence[Size], after: Sequence[Size]
) -> None:
    """The first elements of an axis of fixed length, with the count given by a size.

    If the axis is shorter, only an axis of length 1 is compatible with that size.
    """
    starts, ends = numbers.of(node.input[1]), numbers.of(node.input[2])
    axes = numbers.of(node.input[3]) if len(node.input) > 3 and node.input[3] else list(range(len(starts or [])))
    steps = numbers.of(node.input[4]) if len(node.input) > 4 and node.input[4] else [1] * len(starts or [])
    if starts is None or ends is None or axes is None or steps is None:
        return
    cut = [axis % len(before) for axis in axes if isinstance(axis, int)]
    if len(cut) < len(axes):
        return
    for axis in set(range(len(before))).difference(cut):
        names.join(after[axis], before[axis])
    for start, end, axis, step in zip(starts, ends, cut, steps, strict=True):
        if start == 0 and step == 1:
            length = before[axis]
            if isinstance(length, int) and length > 1:
                names.join(after[axis], end)
