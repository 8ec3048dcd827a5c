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
    graph, descriptions = model.graph, described(model.graph)
    makers = walk.producers(graph)
    values = [value for value in graph.output if value.name.startswith("ortflow.")]
    if any(name not in makers or name not in descriptions for name in outputs):
        return None
    edit, input_names = Editor(graph), {}
    logarithms: dict[str, str] = {}
    for name in outputs:
        input_names[name] = edit.fresh("output")
        node = makers[name]
        if node.op_type in ("Softmax", "Sigmoid") and not node.domain:
            least = edit.constant(SMALLEST)
            logs = edit("Log", edit("Max", input_names[name], least))
            if node.op_type == "Sigmoid":
                complement = edit("Sub", edit.constant(1.0), input_names[name])
                logs = edit("Sub", logs, edit("Log", edit("Max", complement, least)))
            logarithms[node.input[0]] = logs
    nodes = [*graph.node]
    for node in nodes:
        if not set(node.output) & input_names.keys():
            rename_values(
                node, {**{key: logs for key, logs in logarithms.items() if key not in node.output}, **input_names}
            )
    nodes_left = [node for node in nodes if not set(node.output) & (input_names.keys() | logarithms.keys())]
    replace(graph.node, nodes_left)
    for name in outputs:
        value = onnx.ValueInfoProto.FromString(descriptions[name].SerializeToString())
        value.name = input_names[name]
        graph.input.append(value)
    make_outputs(graph, [type(value).FromString(value.SerializeToString()) for value in values])
    sort_nodes(graph)
    prune(graph)
    read = used(graph)
    unknown_inputs = {value.name for value in graph.input if value.name in read} - {
        *input_names.values(),
        *arrays,
        VALID,
    }
    inside = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    if unknown_inputs or (read - inside - {value.name for value in graph.input} - {""}):
        return None
    inputs = [value for value in graph.input if value.name in read]
    replace(graph.input, inputs)
    back = {inner: name for name, inner in input_names.items()}
    for value in graph.input:
        value.name = back.get(value.name, value.name)
    for node in graph.node:
        rename_values(node, back)
    return model
