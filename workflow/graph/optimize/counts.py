"""Moves counts that are computed from shapes, such as the number of samples of a mean, to the GPU.

ONNX Runtime computes with shapes on the CPU, and copies the result to the GPU where it is combined with data. A graph
with such a copy, or with a CPU node that reads a GPU result, cannot be captured as a CUDA graph. So the length of an
axis is computed on the GPU as a sum of ones, and arithmetic on lengths in double precision, which is exact for counts
below 2^53. Called by `on_cuda`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir.edit import attributes_of, constants_of, described, dims_of, replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.writer import Fresh

Dims = tuple[int | str | None, ...]

ROOTS = frozenset({"Shape", "Size"})
"""Operators whose result is in the host's memory."""
CARRIED = frozenset(
    {
        "Abs", "Add", "Cast", "Ceil", "Concat", "Div", "Floor", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg",
        "Pow", "ReduceProd", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that ONNX Runtime also computes on the host if all inputs are there."""
ALIKE = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that leave a single number unchanged."""
EXACT = frozenset({"Add", "Max", "Min", "Mul", "Sub"})
"""Operators that give the same result for counts in double precision."""
INTEGERS = (TensorProto.INT64, TensorProto.INT32)
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def counts_on_device(model: onnx.ModelProto, types: Mapping[str, int]) -> int:
    """Compute floating-point numbers that come from shapes on the GPU, in place; returns how many. Bit-identical.

    Numbers that become integers again are excluded: they are sizes, which the CPU continues to use.
    """
    graph = model.graph
    dims_by_name = {name: dims_of(value) for name, value in described(graph).items()}
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant" and not node.domain}
    on_host = _on_host(graph, constants)
    sizes = _sizes(graph, on_host)
    device = _Device(graph, dims_by_name, fresh_names(graph))
    nodes: list[onnx.NodeProto] = []
    moved = 0
    for node in graph.node:
        if (
            _is_root(node, on_host, types)
            and node.output[0] not in sizes
            and dims_by_name.get(node.output[0]) in ((), (1,))
        ):
            number = device.number(node.input[0])
            if number is not None:
                node.input[0] = number if dims_by_name[node.output[0]] == () else device.with_axis(number)
                moved += 1
            nodes += device.nodes
            device.nodes = []
        nodes.append(node)
    if moved:
        replace(graph.node, nodes)
        prune(graph)
    return moved


def _on_host(graph: onnx.GraphProto, constants: set[str]) -> set[str]:
    host_values: set[str] = set()
    for node in graph.node:
        inputs = {name for name in node.input if name}
        carried = node.op_type in CARRIED and inputs & host_values and inputs <= host_values | constants
        if not node.domain and (node.op_type in ROOTS or carried):
            host_values.update(node.output)
    return host_values


def _sizes(graph: onnx.GraphProto, on_host: set[str]) -> set[str]:
    """Values on the host from which integers are computed again."""
    size_values: set[str] = set()
    for node in reversed(graph.node):
        if node.output[0] not in on_host:
            continue
        to = attributes_of(node).get("to") if node.op_type == "Cast" else None
        if to in INTEGERS or (to is None and node.output[0] in size_values):
            size_values.update(node.input)
    return size_values


def _is_root(node: onnx.NodeProto, on_host: set[str], types: Mapping[str, int]) -> bool:
    if node.domain or node.op_type != "Cast" or node.output[0] not in on_host:
        return False
    return types.get(node.input[0]) in INTEGERS and attributes_of(node)["to"] in FLOATS


class _Device:
    """Writes nodes that compute on the GPU, as double scalars, what host nodes compute from shapes."""

    def __init__(self, graph: onnx.GraphProto, dims_by_name: Mapping[str, Dims | None], fresh: Fresh) -> None:
        self._graph, self._known, self._fresh = graph, dims_by_name, fresh
        self._makers = {name: node for node in graph.node for name in node.output}
        self._constants = constants_of(graph)
        self._made: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def number(self, value: str) -> str | None:
        """The name of the GPU value equal to a host value; None if it is computed by unsupported operators."""
        if value not in self._made:
            device_value = self._number(value)
            if device_value is None:
                return None
            self._made[value] = device_value
        return self._made[value]

    def _number(self, value: str) -> str | None:
        if value in self._constants:
            array = self._constants[value]
            return self._constant(int(array.reshape(-1)[0])) if array.size == 1 else None
        node = self._makers.get(value)
        if node is None or node.domain:
            return None
        if node.op_type == "Size":
            return self._product(node.input[0])
        if node.op_type == "Shape":
            axes = self._axes(node)
            return self._length(node.input[0], axes[0]) if len(axes) == 1 else None
        if node.op_type == "Gather":
            return self._gathered(node)
        if node.op_type in ALIKE or (node.op_type == "Cast" and attributes_of(node)["to"] in INTEGERS):
            return self.number(node.input[0])
        if node.op_type in ("Div", *EXACT):
            parts = [self.number(name) for name in node.input]
            if any(part is None for part in parts):
                return None
            node_output = self._node(node.op_type, *(part for part in parts if part is not None))
            return self._node("Floor", node_output) if node.op_type == "Div" else node_output
        return None

    def _gathered(self, node: onnx.NodeProto) -> str | None:
        shape, index = self._makers.get(node.input[0]), self._constants.get(node.input[1])
        axes = self._axes(shape) if shape is not None and shape.op_type == "Shape" else []
        if shape is None or not axes or index is None or index.size != 1:
            return None
        return self._length(shape.input[0], axes[int(index.reshape(-1)[0])])

    def _axes(self, shape: onnx.NodeProto) -> list[int]:
        """The axes whose lengths a Shape returns; empty if unknown."""
        dims, attributes = self._known.get(shape.input[0]), attributes_of(shape)
        return list(range(len(dims)))[attributes.get("start", 0) : attributes.get("end")] if dims is not None else []

    def _product(self, value: str) -> str | None:
        dims = self._known.get(value)
        if dims is None:
            return None
        product = self._constant(math.prod(size for size in dims if isinstance(size, int)))
        for axis, size in enumerate(dims):
            if not isinstance(size, int):
                product = self._node("Mul", product, self._length(value, axis))
        return product

    def _length(self, value: str, axis: int) -> str:
        dims = self._known[value]
        size = dims[axis] if dims is not None else None
        if isinstance(size, int):
            return self._constant(size)
        length = self._node("Shape", value, start=axis, end=axis + 1)
        one = numpy_helper.from_array(np.ones(1))
        return self._node("ReduceSum", self._node("ConstantOfShape", length, value=one), keepdims=0)

    def _constant(self, number: int) -> str:
        name = self._fresh(f"count/{number}")
        self._graph.initializer.append(numpy_helper.from_array(np.array(number, np.float64), name))
        return name

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = self._fresh(f"count/{operator}")
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        if operator not in ("Shape", "ConstantOfShape"):
            self._graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, []))
        return name

    def with_axis(self, number: str) -> str:
        """The number as a vector of one element."""
        axes, name = self._fresh("count/axes"), self._fresh("count/vector")
        self._graph.initializer.append(numpy_helper.from_array(np.array([0]), axes))
        self.nodes.append(helper.make_node("Unsqueeze", [number, axes], [name], name))
        return name
