"""Appends nodes and constants to a graph, and queries its contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.writer import Writer


class Editor(Writer):
    """Appends to a graph. New names are `ortflow.` and a counter from one, and so are the same in every process."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__(graph)
        self._taken = {name for node in graph.node for name in node.output}
        self._taken |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}

    def fresh(self, hint: str) -> str:
        """A name that the graph does not have yet."""
        count = 1
        while (name := f"ortflow.{hint}.{count}") in self._taken:
            count += 1
        self._taken.add(name)
        return name

    def _enter(self, node: onnx.NodeProto) -> None:
        super()._enter(node)
        self._taken.update(node.output)

    def total(self, value: str, output: str) -> str:
        """Sum over all elements, as a scalar."""
        return self("ReduceSum", value, output=output, keepdims=0)


def make_outputs(graph: onnx.GraphProto, values: Iterable[onnx.ValueInfoProto]) -> None:
    """Make these values the graph's outputs, in this order."""
    values = list(values)
    del graph.output[:]
    graph.output.extend(values)


def scalar(name: str) -> onnx.ValueInfoProto:
    """Description of an fp32 scalar."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [])


def replace(field: Any, items: Sequence[Any]) -> None:
    """Replace the contents of a repeated field by `items`, which may be elements of the field itself."""
    if len(items) == len(field) and all(item is present for item, present in zip(items, field, strict=True)):
        return  # most passes change nothing, and copying 50,000 nodes takes 0.2 s
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def bypass(graph: onnx.GraphProto, replaced_by: Callable[[onnx.NodeProto], str]) -> bool:
    """Let the readers of nodes read other values, in place; returns whether there was one to bypass.

    `replaced_by` names the value for a node, empty if the node stays. One whose first output the graph gives, or a
    subgraph reads, stays. The nodes must be sorted, and the caller prunes the graph.
    """
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        for inner in walk.subgraphs(node):
            outputs |= walk.captured(inner)
    names: dict[str, str] = {}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        if (value := replaced_by(node)) and node.output[0] not in outputs:
            names[node.output[0]] = value
    return bool(names)


def rename_values(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values of a node and of its subgraphs, in place."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in walk.subgraphs(node):
        for inner in graph.node:
            rename_values(inner, names)
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = names.get(value.name, value.name)
        for tensor in graph.initializer:
            tensor.name = names.get(tensor.name, tensor.name)


def used(graph: onnx.GraphProto) -> set[str]:
    """Names that a node or output of the graph reads."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names |= walk.inputs(node)
    return names


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    """Shape of a described value: numbers, names of dynamic axes, None if unknown; None without a rank."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.dim_value > 0 else (d.dim_param or None) for d in tensor.shape.dim)


def described(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Value name -> its description, from inputs, outputs and inner values."""
    return {v.name: v for part in (graph.value_info, graph.output, graph.input) for v in part}


def import_domain(model: onnx.ModelProto, domain: str) -> None:
    """Import version 1 of a domain if a node uses it, in place."""
    domains = {opset.domain for opset in model.opset_import}
    if domain not in domains and any(node.domain == domain for node in model.graph.node):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def constants_of(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Name -> value of the initializers with at most 1,000 elements."""
    return {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if math.prod(tensor.dims) <= 1000
    }


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Attribute name -> value."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
