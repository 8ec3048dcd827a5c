"""Adds nodes and constants to a graph, and takes out what nothing reads.

Called by the modules that attach losses, metrics and modes. The names it makes begin with `ortflow.`, count up from
one, and so are the same each time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import walk


class Editor:
    """A graph that grows at its end: each method appends, and returns the name of the new value."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._taken = {name for node in graph.node for name in node.output}
        self._taken |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}

    def fresh(self, hint: str) -> str:
        """A name that the graph does not have yet."""
        count = 1
        while (name := f"ortflow.{hint}.{count}") in self._taken:
            count += 1
        self._taken.add(name)
        return name

    def constant(self, value: ArrayLike, dtype: str = "float32") -> str:
        """An initializer of the value; the same one for equal values."""
        array = np.asarray(value, dtype=dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.fresh("constant")
            self.graph.initializer.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def integers(self, *values: int) -> str:
        """An int64 initializer of one axis: shapes, axes."""
        return self.constant(values, "int64")

    def node(self, operator: str, *inputs: str, output: str | None = None, domain: str = "", **attributes: Any) -> str:
        """A node with one output, named `output` where given."""
        return self.nodes(operator, inputs, [output or self.fresh(operator)], domain, **attributes)[0]

    def nodes(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node with the outputs named."""
        name = next(output for output in outputs if output)
        self._taken.update(outputs)
        self.graph.node.append(
            helper.make_node(operator, inputs, outputs, name=f"{name}/{operator}", domain=domain, **attributes)
        )
        return list(outputs)

    def cast(self, value: str, data_type: int = TensorProto.FLOAT) -> str:
        """The value in another element type."""
        return self.node("Cast", value, to=data_type)

    def total(self, value: str, output: str) -> str:
        """The sum over all elements, as a scalar."""
        return self.node("ReduceSum", value, output=output, keepdims=0)


def make_outputs(graph: onnx.GraphProto, values: Iterable[onnx.ValueInfoProto]) -> None:
    """Make these the graph's outputs, in this order."""
    values = list(values)
    del graph.output[:]
    graph.output.extend(values)


def scalar(name: str) -> onnx.ValueInfoProto:
    """Description of an fp32 scalar."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [])


def needed_by(nodes: Sequence[onnx.NodeProto], values: Iterable[str]) -> set[int]:
    """Places of the nodes that some of the values are computed from; the nodes must be sorted."""
    wanted, places = set(values), set()
    for place in range(len(nodes) - 1, -1, -1):
        if wanted.intersection(nodes[place].output):
            places.add(place)
            wanted |= walk.inputs(nodes[place])
    return places


def prune(graph: onnx.GraphProto) -> None:
    """Take out the nodes, initializers and descriptions that no output needs; inputs stay. Nodes must be sorted."""
    outputs = {value.name for value in graph.output}
    needed = needed_by(graph.node, outputs)
    kept = [node for place, node in enumerate(graph.node) if place in needed]
    wanted = outputs.union(*map(walk.inputs, kept))
    made = {name for node in kept for name in node.output}
    for field, items in (
        (graph.node, kept),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in wanted]),
        (graph.value_info, [value for value in graph.value_info if value.name in made]),
    ):
        if len(items) < len(field):
            replace(field, items)


def replace(field: Any, items: Sequence[Any]) -> None:
    """Make `items`, which may be of the field itself, all that a repeated field holds."""
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def used(graph: onnx.GraphProto) -> set[str]:
    """Names that some node or output of the graph reads."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names |= walk.inputs(node)
    return names


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Shape of a described value: numbers, names of dynamic axes, None where unknown; None without a rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.dim_value > 0 else (d.dim_param or None) for d in tensor.shape.dim)


def described(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Value name -> what is known of its type, from inputs, outputs and inner values."""
    return {v.name: v for part in (graph.value_info, graph.output, graph.input) for v in part}


def import_domain(model: onnx.ModelProto, domain: str) -> None:
    """Import version 1 of a domain if a node is of it, in place."""
    known = {each.domain for each in model.opset_import}
    if domain not in known and any(node.domain == domain for node in model.graph.node):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def constants_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Name -> value of the initializers of at most 1,000 elements."""
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if math.prod(tensor.dims) <= 1000
    }


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Attribute name -> value."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put each node behind those it reads from, otherwise in the order they stand."""
    maker = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in walk.inputs(node) if name in maker} for node in graph.node]
    followers: dict[int, list[int]] = {}
    for i, before in enumerate(needs):
        for j in before:
            followers.setdefault(j, []).append(i)
    ready = [i for i, before in enumerate(needs) if not before]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in followers.get(i, ()):
            needs[j].discard(i)
            if not needs[j]:
                heapq.heappush(ready, j)
    if order != list(range(len(order))):
        replace(graph.node, [graph.node[i] for i in order])
