"""Evaluates small tensors before a run, element by element: shapes, axes, limits, scales.

Called by `fold` and by the decompositions. An element of a dynamic shape is represented by the axis whose size it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.node_value import value_of

_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
_LIMIT = 1024
"""Tensors with more elements are not treated as shapes."""
_FEW = 16
"""Floating-point tensors with more elements are not treated as scales."""
_REARRANGING = frozenset(
    ["Cast", "Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"]
)
"""Operators whose outputs contain only elements of their first input (Concat: of all inputs), whatever these are."""
_PLAIN = _REARRANGING | frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Ceil",
        "Div",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Round",
        "Shape",
        "Size",
        "Sub",
        "Where",
    ]
)
_BROADCAST = frozenset(
    (
        "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
        "Or", "Sub", "Where",
    )
)  # fmt: skip
"""Operators whose result may be as large as the product of their inputs."""
_GROWING = frozenset(["ConstantOfShape", "Expand", "Range", "Tile"])
"""Operators whose result may be much larger than their inputs; evaluated only if its size is known before."""
_EVALUATED = _PLAIN | _GROWING


class Known:
    """Values by name: arrays of numbers, or of objects if some elements are sizes of axes (text).

    Elements with equal text are equal in every run. Values that depend on a floating-point tensor are in `inexact`: the
    tensor may be a weight, which training changes.
    """

    def __init__(self, graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto]) -> None:
        self._types = types
        self._values: dict[str, np.ndarray] = {}
        self.inexact: set[str] = set()
        for tensor in graph.initializer:
            count = math.prod(tensor.dims)
            if tensor.data_type in _WHOLE and count <= _LIMIT:
                self._values[tensor.name] = numpy_helper.to_array(tensor)
            elif tensor.data_type == TensorProto.FLOAT and count <= _FEW:
                self._values[tensor.name] = numpy_helper.to_array(tensor)
                self.inexact.add(tensor.name)

    def value(self, name: str) -> np.ndarray | None:
        """What is known of a value; None if nothing is."""
        return self._values.get(name)

    def numbers(self, name: str) -> np.ndarray | None:
        """A value whose elements are all numbers; None otherwise."""
        value = self._values.get(name)
        return None if value is None or value.dtype == object else value

    def axis(self, name: str, place: int) -> int | str:
        """Size of an axis of a value with known rank, as an element."""
        dims = shapes.named_shape(self._types, name)
        assert dims is not None
        size = dims[place]
        return f"{name}[{place}]" if size is None else size

    def add(self, node: onnx.NodeProto) -> np.ndarray | None:
        """Evaluate the node if it has one output; returns what is known of that."""
        if node.domain != "" or len(node.output) != 1:
            return None
        name = node.output[0]
        value = self._made(node) if node.op_type in _EVALUATED else None
        if value is None or value.size > _LIMIT or not (value.dtype in (object, np.float32) or is_whole(value)):
            value = self._unknown(name)
        if value is None:
            return None
        self._values[name] = value
        if node.op_type not in ("Shape", "Size") and not self.inexact.isdisjoint(node.input):
            self.inexact.add(name)
        return value

    def _unknown(self, name: str) -> np.ndarray | None:
        """A short vector of which only the length is known."""
        rank = shapes.rank(self._types, name)
        dims = None if rank is None or rank > 1 else shapes.shape(self._types, name)
        if dims is None or None in dims or math.prod(dims) > _FEW:  # type: ignore[arg-type]
            return None
        return np.array([f"{name}#{i}" for i in range(dims[0] or 0)] if dims else f"{name}#", object)

    def _of_shape(self, node: onnx.NodeProto) -> np.ndarray | None:
        rank = shapes.rank(self._types, node.input[0])
        if rank is None:
            return None
        span = {a.name: a.i for a in node.attribute}
        places = range(rank)[slice(span.get("start"), span.get("end"))]
        return _plain([self.axis(node.input[0], place) for place in places])

    def _made(self, node: onnx.NodeProto) -> np.ndarray | None:
        if node.op_type == "Shape":
            return self._of_shape(node)
        if node.op_type in _GROWING or node.op_type == "Size":
            dims = shapes.shape(self._types, node.input[0] if node.op_type == "Size" else node.output[0])
            if dims is None or None in dims:
                return None
            count = math.prod(dims)  # type: ignore[arg-type]
            if node.op_type == "Size":
                return np.array(count, np.int64)
            if count > _LIMIT:
                return None
        names = [name for name in node.input if name]
        if not all(name in self._values for name in names):
            return None
        inputs = {name: self._values[name] for name in names}
        if _size(node, [inputs[name].shape for name in names]) > _LIMIT:
            return None
        if not any(value.dtype == object for value in inputs.values()):
            return _evaluate(node, inputs)
        return _rearranged(node, inputs) if node.op_type in _REARRANGING else None


def is_whole(value: np.ndarray) -> bool:
    """Whether a value's elements are integers or Booleans."""
    return value.dtype != object and helper.np_dtype_to_tensor_dtype(value.dtype) in _WHOLE


def _plain(elements: Sequence[object]) -> np.ndarray:
    """Elements as an array of numbers if all are numbers, else of objects."""
    if any(isinstance(element, str) for element in elements):
        return np.array(elements, object)
    return np.array(elements, np.float32 if any(isinstance(element, float) for element in elements) else np.int64)


def _rearranged(node: onnx.NodeProto, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Apply the node to elements that are not all numbers, by rearranging their positions."""
    carriers = node.input if node.op_type == "Concat" else node.input[:1]
    if any(inputs[name].dtype == object for name in node.input if name and name not in carriers):
        return None
    elements: list[object] = []
    places = dict(inputs)
    for name in dict.fromkeys(carriers):
        array = inputs[name]
        places[name] = np.arange(len(elements), len(elements) + array.size).reshape(array.shape)
        elements += array.ravel().tolist()
    # A Cast of positions must keep them integers, whatever type the elements are cast to.
    moved = places[node.input[0]] if node.op_type == "Cast" else _evaluate(node, places)
    if moved is None:
        return None
    result = _plain([elements[place] for place in moved.ravel().tolist()])
    return result.reshape(moved.shape)


def _size(node: onnx.NodeProto, shapes_read: Sequence[tuple[int, ...]]) -> int:
    """Number of elements of a node's result if it has several inputs; 0 if it is not larger than its input."""
    if node.op_type == "Concat":
        return sum(map(math.prod, shapes_read))
    if node.op_type in _BROADCAST:
        with suppress(ValueError):  # the inputs do not fit each other, so there is no result
            return math.prod(np.broadcast_shapes(*shapes_read))
    return 0


def _evaluate(node: onnx.NodeProto, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Evaluate a node of the newest opset; None if its inputs do not fit it."""
    try:
        with np.errstate(all="ignore"):
            return value_of(node, node.output[0], inputs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
