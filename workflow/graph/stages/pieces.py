"""Cuts a forward graph into the graphs of its stages. Pure.

A value that a later stage reads is an output of the stage that computes it, and an input of every later stage up to the
last one that reads it; the stages in between pass it on. Weights are inputs of each stage that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.sizes import unified
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.stages.cut import STATISTIC, WHERE, assign


@dataclass(frozen=True)
class Piece:
    """The forward graph of one stage."""

    model: onnx.ModelProto
    """Inputs: received values that it reads, its part of the batch, its weights. Outputs: values for later stages, then
    the loss or other outputs of the whole graph, and running statistics.
    """
    receives: tuple[str, ...]
    """Values from the previous stage, including those that it does not read."""
    sends: tuple[str, ...]
    """Values for the next stage."""
    passed: tuple[str, ...]
    """Values that it receives and sends without reading them."""
    batch: tuple[str, ...]
    """Inputs of the whole graph that it reads, except weights."""
    weights: tuple[str, ...]
    """Parameters and running statistics that it reads or updates."""
    dropouts: int
    """Number of Dropout nodes in all earlier stages."""


def cut_graph(model: onnx.ModelProto, cuts: Sequence[Sequence[str]], weights: Collection[str]) -> list[Piece]:
    """The stages of a forward graph, one more than there are cuts; see `assign`.

    Raises
    ------
    UserError
        If the graph cannot be cut there, naming the tensor.
    """
    graph = model.graph
    assignment = assign(graph, cuts, weights)
    # A stage does not see that what it receives has the sizes of its own values: sums over axes that may be broadcast
    # would have to find them at each run.
    types = unified(graph, shapes.value_types(model))
    last = len(cuts)
    makers = assignment.makers
    reach = dict.fromkeys(makers, 0)
    reads: list[set[str]] = []
    for number, places in enumerate(assignment.stages):
        read = set[str]().union(*(walk.inputs(graph.node[place]) for place in places))
        reads.append(read)
        for name in read:
            if name in makers:
                reach[name] = max(reach[name], number)
    for value in graph.output:
        if value.name in makers and not value.name.endswith(STATISTIC):
            reach[value.name] = last
    _check_statistics(graph, reads, makers)
    order = [name for node in graph.node for name in node.output if name in makers]
    pieces: list[Piece] = []
    dropouts = 0
    for number, places in enumerate(assignment.stages):
        receives = tuple(name for name in order if makers[name] < number <= reach[name])
        sends = tuple(name for name in order if makers[name] <= number < reach[name])
        for name in receives:
            _check_type(types, name, number)
        nodes = [graph.node[place] for place in sorted(places)]
        statistics = {v.name.removesuffix(STATISTIC) for v in graph.output if makers.get(v.name) == number}
        inputs = [value for value in graph.input if value.name in reads[number] or value.name in statistics]
        pieces.append(
            Piece(
                _graph(model, number, last, nodes, receives, sends, inputs, makers, types),
                receives,
                sends,
                tuple(name for name in receives if name in sends and name not in reads[number]),
                tuple(value.name for value in inputs if value.name not in weights),
                tuple(value.name for value in inputs if value.name in weights),
                dropouts,
            )
        )
        dropouts += sum(node.op_type == "Dropout" and not node.domain for node in nodes)
    return pieces


def _graph(
    model: onnx.ModelProto,
    number: int,
    last: int,
    nodes: Sequence[onnx.NodeProto],
    receives: Sequence[str],
    sends: Sequence[str],
    inputs: Sequence[onnx.ValueInfoProto],
    makers: dict[str, int],
    types: dict[str, onnx.TypeProto],
) -> onnx.ModelProto:
    full_graph = model.graph
    piece = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = piece.graph
    graph.name = f"{full_graph.name}.stage{number}"
    replace(graph.node, nodes)
    read = set[str]().union(*map(walk.inputs, nodes))
    produced = {name for node in nodes for name in node.output if name}
    graph.input.extend(helper.make_value_info(name, types[name]) for name in receives if name in read)
    graph.input.extend(inputs)
    graph.output.extend(helper.make_value_info(name, types[name]) for name in sends if name in produced)
    output_names = {value.name for value in graph.output}
    graph.output.extend(
        value
        for value in full_graph.output
        if value.name not in output_names and makers.get(value.name, last) == number
    )
    graph.initializer.extend(tensor for tensor in full_graph.initializer if tensor.name in read)
    graph.value_info.extend(
        helper.make_value_info(value.name, types.get(value.name, value.type))
        for value in full_graph.value_info
        if value.name in produced
    )
    return piece


def _check_type(types: dict[str, onnx.TypeProto], name: str, number: int) -> None:
    is_tensor = name in types and types[name].WhichOneof("value") == "tensor_type"
    if not is_tensor or types[name].tensor_type.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        raise UserError(
            f"{name!r} crosses the cut, and is not a tensor of numbers of a known type",
            where=f"{WHERE}[{number - 1}]",
            fix="cut the model elsewhere",
        )


def _check_statistics(graph: onnx.GraphProto, reads: Sequence[Collection[str]], makers: dict[str, int]) -> None:
    """A running statistic is updated in one stage: the next micro-batch starts from its last value there."""
    for value in graph.output:
        if value.name.endswith(STATISTIC) and value.name in makers:
            name, home = value.name.removesuffix(STATISTIC), makers[value.name]
            other_stages = [number for number, read in enumerate(reads) if name in read and number != home]
            if other_stages:
                raise UserError(
                    f"stages {other_stages[0]} and {home} both use the running statistic {name!r}",
                    where=WHERE,
                    fix="cut the model where its layers are not in two stages",
                )
