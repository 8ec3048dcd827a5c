"""Computes the integers that do not depend on a batch: shapes, axes and limits that an exporter left as nodes.

Called by `lower.prepare`. ONNX Runtime builds gradients by the shapes that are known then, and takes an axis of unknown
length for one that is not broadcast, so what can be known must be. Never touches floating-point tensors: they may be
weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ortflow.workflow.graph import shapes
from ortflow.workflow.graph.functions import replace_nodes

_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})
_LIMIT = 1024
"""Elements above which a tensor says nothing about shapes."""
_ROUNDS = 16
"""What is folded lets shapes be inferred that let more be folded; exporters nest no deeper."""
_PLAIN = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Cast",
        "Concat",
        "Div",
        "Equal",
        "Gather",
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
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
        "Where",
    ]
)
_GROWING = frozenset(["ConstantOfShape", "Expand", "Range", "Tile"])
"""Operators whose result may be much larger than what they read: computed only where its size is known before."""


def fold_integers(model: onnx.ModelProto) -> None:
    """Turns nodes of the main graph into initializers, in place."""
    for _ in range(_ROUNDS):
        folding = _Folding(shapes.value_types(model), model.graph)
        kept = [node for node in model.graph.node if not folding.fold(node)]
        if not folding.made:
            return
        replace_nodes(model.graph, kept)
        model.graph.initializer.extend(folding.made)


@dataclass
class _Folding:
    """One pass over the nodes, in their order."""

    types: Mapping[str, onnx.TypeProto]
    graph: onnx.GraphProto
    made: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in self.graph.initializer
            if tensor.data_type in _WHOLE and math.prod(tensor.dims) <= _LIMIT
        }
        self._dims: dict[str, list[int | None]] = {}
        self._outputs = {value.name for value in self.graph.output}

    def fold(self, node: onnx.NodeProto) -> bool:
        """Whether the node's only output is now known, and no output of the model."""
        if node.domain != "" or len(node.output) != 1 or node.output[0] in self._outputs:
            return False
        name = node.output[0]
        value = self._of_shape(node)
        if value is None and self._can_compute(node):
            value = self._computed(node)
        if value is None or value.size > _LIMIT or helper.np_dtype_to_tensor_dtype(value.dtype) not in _WHOLE:
            return False
        self._known[name] = value
        self.made.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return True

    def _of_shape(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The value of Shape, or of Gather or Slice of one, where the dims it takes are known."""
        if node.op_type == "Shape":
            dims = shapes.shape(self.types, node.input[0])
            if dims is None:
                return None
            span = {a.name: a.i for a in node.attribute}
            self._dims[node.output[0]] = dims = dims[slice(span.get("start"), span.get("end"))]
            taken: object = dims
        elif node.op_type in ("Gather", "Slice") and node.input[0] in self._dims:
            arguments = [self._known.get(name) for name in node.input[1:]]
            if any(argument is None for argument in arguments):
                return None
            places = np.arange(len(self._dims[node.input[0]]))
            chosen = _evaluate(node, {node.input[0]: places, **dict(zip(node.input[1:], arguments, strict=True))})
            if chosen is None:
                return None
            taken = np.array(self._dims[node.input[0]], object)[chosen]
        else:
            return None
        values = np.array(taken, object)
        return None if None in values.ravel().tolist() else values.astype(np.int64)

    def _can_compute(self, node: onnx.NodeProto) -> bool:
        if node.op_type in _GROWING:
            dims = shapes.shape(self.types, node.output[0])
            if dims is None or None in dims or math.prod(dims) > _LIMIT:  # type: ignore[arg-type]
                return False
        elif node.op_type not in _PLAIN:
            return False
        return all(name in self._known for name in node.input if name)

    def _computed(self, node: onnx.NodeProto) -> np.ndarray | None:
        return _evaluate(node, {name: self._known[name] for name in node.input if name})


def _evaluate(node: onnx.NodeProto, inputs: Mapping[str, np.ndarray | None]) -> np.ndarray | None:
    """What ONNX's reference makes of the node; None where its inputs do not fit it."""
    try:
        with np.errstate(all="ignore"):
            return np.asarray(ReferenceEvaluator(node).run(None, dict(inputs))[0])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
