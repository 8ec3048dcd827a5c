"""The common source of a run's graphs: the prepared model, split into nodes and tensors. Called by `assembly`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import xxhash
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.external import Stored
from ortflow.workflow.graph.file.read import read_stored
from ortflow.workflow.graph.ir.edit import make_outputs
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.passes import Watch, unwatched
from ortflow.workflow.graph.ir.recorded_forms import Forms, separate
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.normalize.randomness import seed_random_operators
from ortflow.workflow.graph.roles.decide import Roles, classify
from ortflow.workflow.graph.roles.export_warnings import find_export_warnings, refusal, renamed_weights
from ortflow.workflow.graph.roles.guesses import judged_constants, refuse_guesses
from ortflow.workflow.graph.roles.made_weights import store_made_weights
from ortflow.workflow.spec.metric_targets import Compared, compared, label_of
from ortflow.workflow.spec.model import ModelSection, single_losses


@dataclass(frozen=True)
class Source:
    """A prepared model, split into its parts."""

    skeleton: onnx.ModelProto
    """The model without `tensors`; the exported model is built from it."""
    tensors: Mapping[str, np.ndarray]
    """Parameters and state, in the file's order."""
    roles: Roles
    labels: frozenset[str]
    """The model's own inputs that are labels."""
    notes: tuple[str, ...]
    """Log lines about the changes that `prepare` made."""
    warnings: tuple[str, ...]
    """Warnings about the file: tensors assumed to be constants, signs of an unsuitable export."""
    forms: Forms = field(default_factory=lambda: Forms(None, {}))
    """What a run evaluates with if that is not the skeleton, and the new values of state that the skeleton computes."""

    def forward(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """The part of the graph that computes some outputs, with every tensor as an input after the model's own inputs.

        The new values of state follow the outputs. Random operators draw from the last input, `ortflow.seed`.
        """
        return self._part(self.skeleton, outputs, self.forms.updates.values())

    def evaluated(self, outputs: Sequence[str]) -> onnx.ModelProto:
        """As `forward`, from the module's evaluation form if the file has one with these outputs."""
        form = self.forms.evaluation
        has_them = form is not None and {*outputs} <= {value.name for value in form.graph.output}
        return self._part(form if form is not None and has_them else self.skeleton, outputs, ())

    @property
    def inference(self) -> onnx.ModelProto:
        """The model that an export is made of, without `tensors`."""
        return self.skeleton if self.forms.evaluation is None else self.forms.evaluation

    def _part(
        self, full_model: onnx.ModelProto, outputs: Sequence[str], new_outputs: Iterable[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        model = onnx.ModelProto()
        model.CopyFrom(full_model)
        del model.metadata_props[:]
        graph = model.graph
        outputs_by_name = {value.name: value for value in graph.output}
        selection = [outputs_by_name[name] for name in dict.fromkeys(outputs)]
        make_outputs(
            graph, [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in (*selection, *new_outputs)]
        )
        prune(graph)
        graph.input.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in self.tensors.items()
        )
        seed_random_operators(model)
        return model


def read_source(section: ModelSection, watch: Watch = unwatched) -> Source:
    """Read, prepare and split the model of a run file. Raises UserError."""
    read, stored = read_stored(Path(section.path))
    watch("read", read)
    prepared, notes = prepare(read, section.path, in_place=True, watch=watch)
    stored_notes, unstored = store_made_weights(prepared, section.parameters)
    names = [value.name for value in prepared.graph.input]
    for place, label in enumerate(section.labels):
        if label not in names:
            raise UserError(
                f"the model has no input {label!r}",
                where=f"model.labels[{place}]",
                fix=f"its inputs are {', '.join(names)}" if names else "it has no inputs",
            )
    labels = set(section.labels)
    for loss in single_losses(section.loss).values():
        if (label_input := label_of(loss)) is not None and label_input in names:
            labels.add(label_input)
    for metric in section.metrics:
        comparison = None if metric.name in ("perplexity", "graph") else compared(metric, section.loss)
        if isinstance(comparison, Compared) and comparison.label in names:
            labels.add(comparison.label)
    forms = separate(prepared)
    roles = classify(prepared, section.parameters, sorted(labels))
    export_warnings = find_export_warnings(prepared, roles)
    if export_warnings and section.graphs.train is None and not section.accept_inference_export:
        raise refusal(export_warnings, section.path)
    refuse_guesses(roles, section.path)
    warnings = [*export_warnings, *renamed_weights(prepared, roles), *unstored, *judged_constants(roles)]
    avoid_wrong_forms(prepared)
    if forms.evaluation is not None:
        avoid_wrong_forms(forms.evaluation)
    watch("wrong-forms-avoided", prepared)
    learned = set(roles.of("trained", "frozen", "state"))
    skeleton = onnx.ModelProto(
        ir_version=prepared.ir_version,
        opset_import=prepared.opset_import,
        metadata_props=prepared.metadata_props,
    )
    full_graph, graph = prepared.graph, skeleton.graph
    graph.name = full_graph.name or "model"
    graph.node.extend(full_graph.node)
    graph.input.extend(full_graph.input)
    graph.output.extend(full_graph.output)
    graph.value_info.extend(full_graph.value_info)
    graph.initializer.extend(tensor for tensor in full_graph.initializer if tensor.name not in learned)
    if forms.evaluation is not None:
        constants = [tensor for tensor in full_graph.initializer if tensor.name not in learned]
        forms.evaluation.graph.initializer.extend(constants)
        prune(forms.evaluation.graph)
    tensors = {t.name: _array(t, stored.get(t.name)) for t in full_graph.initializer if t.name in learned}
    return Source(skeleton, tensors, roles, frozenset(labels), (*notes, *stored_notes), tuple(warnings), forms)


def _array(tensor: onnx.TensorProto, stored: Stored | None) -> np.ndarray:
    """The elements of a tensor: mapped from the file that they were read from, if they are unchanged."""
    array: np.ndarray = numpy_helper.to_array(tensor)
    if stored is None or not array.size or array.nbytes != stored.length or array.dtype != np.dtype("<f4"):
        return array
    mapped = np.memmap(stored.file, "<f4", "r", stored.offset, array.shape)
    unchanged = xxhash.xxh3_128(mapped.reshape(-1).data).digest() == xxhash.xxh3_128(array.reshape(-1).data).digest()
    return mapped if unchanged else array
