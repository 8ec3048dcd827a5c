"""Separates what `export_for_training` writes into one file: a module's training form and its evaluation form.

Called by `intake` and by `ortflow.export` on graphs with both. A module whose code differs in evaluation (`if
self.training`) has a second set of nodes, which reads the same initializers; its values begin with `evaluation/`. A
buffer that `forward` changes has an output `updated/<buffer>` with its new value. Neither is an output of the model
to a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.ir.edit import make_outputs, rename_values, replace
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.ir.recorded_roles import EVALUATION, STATE, recorded

IN_EVALUATION, UPDATED = "evaluation/", "updated/"
"""How the names of the file begin."""


@dataclass(frozen=True)
class Forms:
    """The parts of a file. A file that records nothing has its training form only."""

    evaluation: onnx.ModelProto | None
    """The module in evaluation mode, with the names of the training form, without initializers."""
    updates: Mapping[str, onnx.ValueInfoProto]
    """Buffer -> its new value in the training form."""


def separate(model: onnx.ModelProto) -> Forms:
    """Take the evaluation form and the outputs for new states out of a model, in place; nodes must be sorted.

    Initializers stay. Raises UserError if the record is damaged.
    """
    graph, said = model.graph, recorded(model)
    outputs = {value.name: value for value in graph.output}
    listed = [name for name in said.get(EVALUATION, []) if name in outputs]
    updates = {name: outputs[UPDATED + name] for name in said.get(STATE, []) if UPDATED + name in outputs}
    if not listed and not updates:
        return Forms(None, {})
    updates = {name: _copy(value) for name, value in updates.items()}
    evaluation = _evaluation(model, [outputs[name] for name in listed]) if listed else None
    apart = {*listed, *(value.name for value in updates.values())}
    make_outputs(graph, [_copy(value) for name, value in outputs.items() if name not in apart])
    needed_places = needed_by(graph.node, [*(set(outputs) - set(listed))])
    replace(graph.node, [node for place, node in enumerate(graph.node) if place in needed_places])
    produced = {name for node in graph.node for name in node.output}
    replace(graph.value_info, [value for value in graph.value_info if value.name in produced])
    return Forms(evaluation, updates)


def _evaluation(model: onnx.ModelProto, outputs: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
    """The nodes of these outputs, under the names that they have without the prefix."""
    form = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, metadata_props=model.metadata_props
    )
    form.functions.extend(model.functions)
    graph = form.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    graph.output.extend(outputs)
    places = needed_by(model.graph.node, [value.name for value in outputs])
    graph.node.extend(node for place, node in enumerate(model.graph.node) if place in places)
    produced = {name for node in graph.node for name in node.output if name}
    graph.value_info.extend(value for value in model.graph.value_info if value.name in produced)
    # A value may have the name of a tensor that only the training form reads.
    fixed = {value.name for value in graph.input} | {tensor.name for tensor in model.graph.initializer}
    fixed |= produced - {name for name in produced if name.startswith(IN_EVALUATION)}
    plain = {name: name.removeprefix(IN_EVALUATION) for name in produced if name.startswith(IN_EVALUATION)}
    names = {name: short for name, short in plain.items() if short not in fixed}
    for node in graph.node:
        rename_values(node, names)
    for value in (*graph.value_info, *graph.output):
        value.name = names.get(value.name, value.name)
    return form


def _copy(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto.FromString(value.SerializeToString())
