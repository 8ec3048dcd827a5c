"""The interface of a rule, and the writer it uses.

A rule is a generator. For one node of the forward graph, it yields for each input that needs a gradient the input's
position and the gradient's name; for a value that a subgraph captures, its name in place of a position. The decorator
`gradient_rule` registers it in `RULES`, where `reverse` looks it up. If a rule yields nothing for an input, the
gradient stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.registry import registered_in
from ortflow.workflow.graph.ir.replacement import Context, Replacement

Gradients = Iterator[tuple[int, str]]
"""Pairs of an input's position and the name of the loss's gradient with respect to it, which has the input's shape."""
GradientsByName = Iterator[tuple[str, str]]
"""The same with the names of values, which a node's subgraphs capture, in place of positions."""

Constants = MutableMapping[tuple[str, tuple[int, ...], bytes], onnx.TensorProto]
"""(Element type, shape, bytes) -> the initializer that holds them."""
Dims = Sequence[int | str | None]
"""Sizes of axes: numbers, names of dynamic axes, None if unknown."""


class Backward(Replacement):
    """Collects the nodes that compute the gradients of one node's inputs.

    `node` is the forward node, to which a rule may add outputs (`saved_output`); `path` are the values between a
    trained parameter and the loss. A rule may read any value of the forward graph: the value is either kept or
    recomputed, as ONNX Runtime and `recompute` decide.
    """

    def __init__(
        self,
        node: onnx.NodeProto,
        context: Context,
        gradients: Sequence[str],
        path: Collection[str],
        constants: Constants,
    ) -> None:
        super().__init__(node, context)
        self._gradients, self._shared = gradients, constants
        self.path = path
        self._prefix += "_Grad"

    def gradient(self, place: int = 0) -> str:
        """Name of the gradient of an output; empty if the loss does not depend on it."""
        return self._gradients[place] if place < len(self._gradients) else ""

    def wants(self, place: int) -> bool:
        """Whether the gradient of an input is needed."""
        return self.input(place) in self.path

    def saved_output(self, place: int) -> str:
        """Name of an output of the forward node, which is added if it was omitted."""
        while len(self.node.output) <= place:
            self.node.output.append("")
        if not self.node.output[place]:
            self.node.output[place] = self.context.fresh(f"{self._prefix}/saved_output")
        return str(self.node.output[place])

    def constant(self, value: Any, dtype: Any = "float32") -> str:
        """Name of an initializer with this value; equal values share one."""
        # An initializer, not a Constant node: `optimize` and the kernels look for axes among initializers only.
        array = np.array(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._shared[key] = numpy_helper.from_array(array, self.context.fresh("ortflow.constant"))
        return str(self._shared[key].name)

    def number(self, value: float) -> str:
        """A scalar constant of the element type that the node computes in."""
        return self.constant(value, helper.tensor_dtype_to_np_dtype(self.element_type()))

    def element_type(self) -> int:
        """The floating-point element type that the node computes in."""
        types = (shapes.element_type(self.context.types, name) for name in (*self.node.output, *self.node.input))
        return next((element_type for element_type in types if element_type in _REAL), TensorProto.FLOAT)

    def dims(self, value: str) -> list[int] | None:
        """Sizes of a value of the forward graph; None if one of them is unknown."""
        dims = shapes.shape(self.context.types, value)
        return None if dims is None or None in dims else [int(size or 0) for size in dims]

    def shape_of(self, value: str) -> str:
        """Shape of a value of the forward graph as an int64 vector; a constant if it is known."""
        dims = self.dims(value)
        return self("Shape", value) if dims is None else self.ints(*dims)

    def reshaped(self, value: str, reference: str) -> str:
        """`value` reshaped to the shape of `reference`, a value of the forward graph with as many elements."""
        dims = shapes.shape(self.context.types, reference)
        if dims is None or 0 in dims or dims.count(None) > 1:
            return self("Reshape", value, self("Shape", reference))
        return self("Reshape", value, self.ints(*(-1 if size is None else size for size in dims)))

    def zeros(self, reference: str) -> str:
        """Zeros with the shape of `reference`, a value of the forward graph."""
        zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(self.element_type())))
        return self("ConstantOfShape", self.shape_of(reference), value=zero)

    def chosen(self, condition: str, value: str) -> str:
        """`value` where `condition` is true, and 0 elsewhere."""
        return self("Where", condition, value, self.number(0))

    def passed(self, condition: str, value: str) -> str:
        """`value` times 1 where `condition` is true, and times 0 elsewhere; faster than `chosen`."""
        # For Where ONNX Runtime 1.19 takes 20 times as long on CPUs.
        return self("Mul", value, self("Cast", condition, to=self.element_type()))

    def summed(self, gradient: str, operand: str, result: str) -> str:
        """Reduce `gradient`, of the shape of `result`, over the axes along which `operand` was broadcast to it."""
        small = shapes.named_shape(self.context.types, operand)
        large = shapes.named_shape(self.context.types, result)
        return self.summed_to(gradient, operand, small, large)

    def summed_to(self, gradient: str, operand: str, small: Dims | None, large: Dims | None) -> str:
        """Same as `summed`, with `small` the sizes of `operand` and `large` those of `gradient`, as far as known."""
        if small is None or large is None:
            return self._summed_by_shapes(gradient, operand)
        extra = len(large) - len(small)
        axes = list(range(extra))
        for axis, dim in enumerate(small, extra):
            if dim == 1:
                if large[axis] != 1:
                    axes.append(axis)
            elif not isinstance(dim, int) and (dim is None or dim != large[axis]):
                # The axis may have size 1 in some batches only.
                return self._summed_by_shapes(gradient, operand)
        if not axes:
            return gradient
        if axes == list(range(extra)):
            return self("ReduceSum", gradient, self.ints(*axes), keepdims=0)
        reduced = self("ReduceSum", gradient, self.ints(*axes), keepdims=1)
        return reduced if extra == 0 else self("Squeeze", reduced, self.ints(*range(extra)))

    def _summed_by_shapes(self, gradient: str, operand: str) -> str:
        small, large = self("Shape", operand), self("Shape", gradient)
        missing = self("Sub", self("Shape", large), self("Shape", small))
        padded = self("Concat", self("Expand", self.ints(1), missing), small, axis=0)
        spread = self("And", self("Equal", padded, self.ints(1)), self("Not", self("Equal", large, self.ints(1))))
        axes = self("Squeeze", self("NonZero", spread), self.ints(0))
        # If no axis was broadcast, the list of axes is empty: by default, ReduceSum would take that for all axes.
        return self("Reshape", self("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1), small)


Rule = Callable[[Backward], Gradients | GradientsByName]
_REAL = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)
RULES: dict[tuple[str, str], Rule] = {}
"""(Domain, operator) -> its rule."""


def gradient_rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for operators of a domain."""
    return registered_in(RULES, *operators, domain=domain)
