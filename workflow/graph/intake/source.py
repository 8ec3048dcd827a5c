"""What all graphs of a run are made of: the prepared model, taken apart into nodes and tensors.

Called by `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.ir.edit import make_outputs
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.normalize.randomness import seed_random_operators
from ortflow.workflow.graph.roles.decide import Roles, classify
from ortflow.workflow.graph.roles.export_warnings import find_export_warnings, refusal, renamed_weights
from ortflow.workflow.graph.roles.guesses import judged_constants, refuse_guesses
from ortflow.workflow.spec.model import ModelSection, OwnLoss


@dataclass(frozen=True)
class Source:
    """A prepared model in parts."""

    skeleton: onnx.ModelProto
    """The model without `tensors`: what it is exported as."""
    tensors: Mapping[str, np.ndarray]
    """Parameters and state, in the file's order."""
    roles: Roles
    labels: frozenset[str]
    """The model's own inputs that are labels."""
    notes: tuple[str, ...]
    """What preparing changed."""
    warnings: tuple[str, ...]
    """What a person should know of what the file holds: constants by judgement, signs of a wrong export."""

    def forward(self, output: str) -> onnx.ModelProto:
        """The part that makes one output, with every tensor as an input; the model's own inputs come first.

        Random operators draw from the input `ortflow.seed`, which comes last.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self.skeleton)
        del model.metadata_props[:]
        graph = model.graph
        kept = next(value for value in graph.output if value.name == output)
        make_outputs(graph, [onnx.ValueInfoProto.FromString(kept.SerializeToString())])
        prune(graph)
        graph.input.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in self.tensors.items()
        )
        seed_random_operators(model)
        return model


def read_source(section: ModelSection) -> Source:
    """Read, prepare and take apart the model of a run file. Raises UserError."""
    prepared, notes = prepare(read_model(Path(section.path)), section.path)
    names = [value.name for value in prepared.graph.input]
    for place, label in enumerate(section.labels):
        if label not in names:
            raise UserError(
                f"the model has no input {label!r}",
                where=f"model.labels[{place}]",
                fix=f"its inputs are {', '.join(names)}" if names else "it has no inputs",
            )
    labels = set(section.labels)
    if not isinstance(section.loss, OwnLoss) and section.loss.label in names:
        labels.add(section.loss.label)
    roles = classify(prepared, section.parameters, sorted(labels))
    export_warnings = find_export_warnings(prepared, roles)
    if export_warnings and section.graphs.train is None and not section.accept_inference_export:
        raise refusal(export_warnings, section.path)
    refuse_guesses(roles, section.path)
    warnings = [*export_warnings, *renamed_weights(prepared, roles), *judged_constants(roles)]
    avoid_wrong_forms(prepared)
    learned = set(roles.of("trained", "frozen", "state"))
    skeleton = onnx.ModelProto(
        ir_version=prepared.ir_version,
        opset_import=prepared.opset_import,
        metadata_props=prepared.metadata_props,
    )
    whole, graph = prepared.graph, skeleton.graph
    graph.name = whole.name or "model"
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    graph.value_info.extend(whole.value_info)
    graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name not in learned)
    tensors = {t.name: numpy_helper.to_array(t) for t in whole.initializer if t.name in learned}
    return Source(skeleton, tensors, roles, frozenset(labels), tuple(notes), tuple(warnings))
