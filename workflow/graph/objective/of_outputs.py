"""The objective without the model: losses and metrics of given outputs. Called by `trainer.output_metrics`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import Editor, described, make_outputs, rename_values, replace, used
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.types import VALID

SMALLEST = 1e-37
"""Least probability that has a logarithm in fp32."""


def objective_of_outputs(
    evaluation: onnx.ModelProto, outputs: Sequence[str], arrays: Collection[str]
) -> onnx.ModelProto | None:
    """An evaluation graph with the model's `outputs` as inputs, and losses and metrics as outputs.

    What reads logits behind an output of probabilities reads their logarithms. None if losses and metrics read anything
    else than outputs and `arrays`, the inputs of a batch.
    """
    model = onnx.ModelProto()
    model.CopyFrom(evaluation)
    graph, known = model.graph, described(model.graph)
    makers = walk.producers(graph)
    values = [value for value in graph.output if value.name.startswith("ortflow.")]
    if any(name not in makers or name not in known for name in outputs):
        return None
    edit, given = Editor(graph), {}
    made: dict[str, str] = {}
    for name in outputs:
        given[name] = edit.fresh("output")
        node = makers[name]
        if node.op_type in ("Softmax", "Sigmoid") and not node.domain:
            least = edit.constant(SMALLEST)
            logs = edit("Log", edit("Max", given[name], least))
            if node.op_type == "Sigmoid":
                others = edit("Sub", edit.constant(1.0), given[name])
                logs = edit("Sub", logs, edit("Log", edit("Max", others, least)))
            made[node.input[0]] = logs
    nodes = [*graph.node]
    for node in nodes:
        if not set(node.output) & given.keys():
            rename_values(node, {**{key: logs for key, logs in made.items() if key not in node.output}, **given})
    kept = [node for node in nodes if not set(node.output) & (given.keys() | made.keys())]
    replace(graph.node, kept)
    for name in outputs:
        value = onnx.ValueInfoProto.FromString(known[name].SerializeToString())
        value.name = given[name]
        graph.input.append(value)
    make_outputs(graph, [type(value).FromString(value.SerializeToString()) for value in values])
    sort_nodes(graph)
    prune(graph)
    read = used(graph)
    left = {value.name for value in graph.input if value.name in read} - {*given.values(), *arrays, VALID}
    inside = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    if left or (read - inside - {value.name for value in graph.input} - {""}):
        return None
    inputs = [value for value in graph.input if value.name in read]
    replace(graph.input, inputs)
    back = {inner: name for name, inner in given.items()}
    for value in graph.input:
        value.name = back.get(value.name, value.name)
    for node in graph.node:
        rename_values(node, back)
    return model
