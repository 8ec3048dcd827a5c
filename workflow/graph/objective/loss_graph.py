"""Parts of a training graph: the loss without its gradients, and inner values.

Called by the gradient check with graphs that `assembly` has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.graph.ir import stops, walk
from ortflow.workflow.graph.ir.edit import Editor, described, make_outputs
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT


def stopped_values(train: bytes) -> list[str]:
    """The values through which the training graph passes no gradient."""
    return stops.stopped_values(onnx.ModelProto.FromString(train).graph)


def with_fixed(train: bytes, fixed: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The training graph with these marked values as constants.

    What the marks read is still computed, and before the nodes that read the marks: its random numbers come first in
    the sequence.
    """
    model = onnx.ModelProto.FromString(train)
    graph, edit = model.graph, Editor(model.graph)
    produced = {name for node in graph.node for name in node.output}
    marks = [node for node in graph.node if fixed.keys() & set(node.output)]
    graph.initializer.extend(numpy_helper.from_array(array, f"{name}.fixed") for name, array in fixed.items())
    for mark in marks:
        name, read = mark.output[0], mark.input[0]
        value = f"{name}.fixed"
        graph.node.remove(mark)
        if read in produced and fixed[name].dtype.kind == "f":
            flat = edit("Reshape", read, edit.ints(-1))
            first = edit("Slice", flat, edit.ints(0), edit.ints(1))
            value = edit("Where", edit("IsNaN", first), value, value)
        edit("Reshape", value, edit.ints(*fixed[name].shape), output=name)
    sort_nodes(graph)
    return bytes(model.SerializeToString())


def loss_graph(train: bytes) -> bytes:
    """The training graph with the loss and its weight as the only outputs."""
    model = onnx.ModelProto.FromString(train)
    outputs = [value for value in model.graph.output if value.name in (LOSS_SUM, LOSS_WEIGHT)]
    make_outputs(model.graph, [type(value).FromString(value.SerializeToString()) for value in outputs])
    prune(model.graph)
    return bytes(model.SerializeToString())


def common_values(first: bytes, second: bytes) -> list[str]:
    """Inner values that both graphs have under the same name, in the order of the first."""
    graphs = [onnx.ModelProto.FromString(data).graph for data in (first, second)]
    inside = [
        [name for node in graph.node for name in node.output if name and name not in {v.name for v in graph.output}]
        for graph in graphs
    ]
    shared = set(inside[1])
    return [name for name in inside[0] if name in shared]


def with_outputs(train: bytes, names: Sequence[str]) -> bytes:
    """The training graph with these values as its only outputs."""
    model = onnx.ModelProto.FromString(train)
    # The types of our own operators' outputs are only in the graph's descriptions.
    descriptions = described(model.graph)
    values = [descriptions.get(name) or helper.make_empty_tensor_value_info(name) for name in names]
    make_outputs(model.graph, [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values])
    prune(model.graph)
    return bytes(model.SerializeToString())


def maker(train: bytes, value: str) -> str:
    """How messages name the node that produces a value."""
    nodes = onnx.ModelProto.FromString(train).graph.node
    return next((walk.called(node) for node in nodes if value in node.output), repr(value))


def reader(train: bytes, value: str) -> str:
    """How messages name the first node that reads a value."""
    nodes = onnx.ModelProto.FromString(train).graph.node
    return next((walk.called(node) for node in nodes if value in walk.inputs(node)), repr(value))
