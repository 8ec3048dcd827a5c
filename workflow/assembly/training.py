"""The training graph of a run: the loss attached, differentiated, and in every form that ranks may load.

Called by `build`, and by `variants` for parts of a model. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.assembly.files import serialized
from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.intake.user_graphs import user_train_graph
from ortflow.workflow.graph.ir.collective import drop_copies, finish, has_collectives
from ortflow.workflow.graph.ir.edit import Editor, make_outputs, scalar
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.watched_passes import Watch, unwatched, within
from ortflow.workflow.graph.normalize.dropouts import dropout_notes
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.objective.synced import Replicas
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.layers import mark_layers
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.types import (
    LOSS_SUM,
    LOSS_WEIGHT,
    fused_of,
    half_of,
    placed_of,
    synced_of,
    with_kernels_of,
)
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.parallel.division import STATISTICS
from ortflow.workflow.spec.run import TrainerRunSpec

TRAIN = Path("train.onnx")


@dataclass(frozen=True)
class Training:
    """The training graph in its forms; a form that the run does not need is None."""

    plain: onnx.ModelProto
    """With standard operators."""
    trained: Sequence[str]
    """The parameters that have a gradient."""
    notes: Sequence[str] = ()
    """Lines for the log."""
    prepared: onnx.ModelProto | None = None
    """The forward graph with its loss, from which the others were made; None for the user's own training graph."""
    faster: onnx.ModelProto | None = None
    """With ortflow's operators for CPUs."""
    placed: onnx.ModelProto | None = None
    """With ortflow's operators for GPUs."""
    halves: onnx.ModelProto | None = None
    """In half precision."""

    def form(self, *, kernels: bool) -> onnx.ModelProto:
        """The form that ranks load, before its nodes are fused; `kernels`: they have ortflow's."""
        own = (self.placed or self.faster) if kernels else None
        return self.halves or own or self.plain

    def further_files(self, inputs: Sequence[onnx.ValueInfoProto]) -> dict[str, bytes]:
        """The forms for GPUs, by file name, with these inputs."""
        files = {}
        if self.placed is not None:
            files[placed_of(TRAIN).name] = serialized(self.placed, inputs)
        if self.halves is not None:
            files[half_of(TRAIN).name] = serialized(self.halves, inputs)
        return files


def training_of(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, batch: str, length: int, watch: Watch = unwatched
) -> Training:
    """The training graph that the run file names, or the gradient of the forward graph.

    `length` is the samples' if the model's second axis is dynamic and it is known. Raises UserError.
    """
    section = spec.onnx_model
    if section.graphs.train:
        return Training(*user_train_graph(section.graphs.train, source))
    prepared, notes = with_loss(forward, spec, source, batch)
    watch("training/loss", prepared)
    notes += mark_layers(prepared, section.recomputed_layers, source.roles.trained, LOSS_SUM)
    plain, faster, placed, trained, more = gradient_graphs(prepared, spec, source, length, watch)
    halves, lines = _in_half(prepared, spec, trained)
    if halves is not None:
        watch("half/whole", halves)
    notes += dropout_notes(prepared.graph) if spec.resources.kernels == "auto" else []
    return Training(plain, trained, [*notes, *more, *lines], prepared, faster, placed, halves)


def with_loss(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, batch: str, replicas: Replicas | None = None
) -> tuple[onnx.ModelProto, list[str]]:
    """The forward graph in training mode, its outputs the loss and the new states, and log lines.

    With `replicas`, statistics of the batch run over the ranks.
    """
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    graph = model.graph
    notes, updates = train_mode(graph, source.roles.frozen, replicas)
    attach(graph, spec.onnx_model.loss, batch, spec.data.last_batch == "pad")
    edit = Editor(graph)
    outputs = [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)]
    for name in source.roles.state:
        computed = source.forms.updates[name].name if name in source.forms.updates else name
        new = edit("Identity", updates.get(name, computed), output=f"{name}_new")
        described = onnx.helper.make_tensor_value_info(new, onnx.TensorProto.FLOAT, source.tensors[name].shape)
        outputs.append(described)
    make_outputs(graph, outputs)
    prune(graph)
    return model, notes


def gradient_graphs(
    prepared: onnx.ModelProto, spec: TrainerRunSpec, source: Source, length: int, watch: Watch = unwatched
) -> tuple[onnx.ModelProto, onnx.ModelProto, onnx.ModelProto | None, list[str], list[str]]:
    """The training graph, its variants with ortflow's operators for CPUs and, if wanted, GPUs, the parameters with
    gradients, and log lines.
    """
    model, notes = make_differentiable(prepared, source.roles.trained, LOSS_SUM)
    watch("training/differentiable", model)
    rewrites.before(model.graph)
    watch("training/cheaper-gradients", model)
    model, trained = differentiate(model, source.roles.trained, LOSS_SUM)
    watch("training/gradient", model)
    if spec.on_gpus:
        drop_copies(model.graph)
    notes += recompute(model.graph, spec.onnx_model.recomputed_scopes)
    watch("training/recomputed", model)
    faster, placed = with_kernels(model, length), None
    if spec.on_gpus:
        from ortflow.workflow.cuda.place import completed

        placed = completed(model)
        watch("gpu/operators", placed)
    plain = _finished(model, within("training", watch))
    watch("kernels/operators", faster)
    return plain, _finished(faster, within("kernels", watch)), placed, trained, notes


def _finished(model: onnx.ModelProto, watch: Watch) -> onnx.ModelProto:
    """The training graph with faster nodes, without those that only the other forms are made from."""
    rewrites.after(model.graph)
    watch("faster-nodes", model)
    composed = compose(model)
    watch("composed", composed)
    results_first(composed.graph)
    watch("order", composed)
    return composed


def training_forms(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, length: int, trained: Sequence[str]
) -> dict[str, onnx.ModelProto]:
    """The forms of the training graph of a part of the model, by the names of their files."""
    from ortflow.workflow.assembly.stage_forms import fused
    from ortflow.workflow.graph.optimize.on_cuda import on_cuda

    plain, own, placed, *_ = gradient_graphs(forward, spec, source, length)
    forms = {TRAIN.name: plain, with_kernels_of(TRAIN).name: own}
    if placed is not None:
        forms[fused_of(TRAIN).name] = fused(on_cuda(placed))
        results_first(forms[fused_of(TRAIN).name].graph)
    halves, _ = _in_half(forward, spec, trained)
    return forms if halves is None else {**forms, half_of(TRAIN).name: halves}


def synced_files(
    forward: onnx.ModelProto,
    spec: TrainerRunSpec,
    source: Source,
    batch: str,
    length: int,
    inputs: Sequence[onnx.ValueInfoProto],
) -> dict[str, bytes]:
    """The training graphs whose statistics run over all ranks, by file name.

    Raises UserError if the model has no BatchNormalization that computes statistics.
    """
    replicas = Replicas(STATISTICS, spec.synced_ranks)
    prepared, _ = with_loss(forward, spec, source, batch, replicas)
    if not has_collectives(prepared):
        raise UserError(
            "is true, and the model has no BatchNormalization that computes statistics of the batch",
            where="train.sync_batch_norm",
            fix="remove the key",
        )
    mark_layers(prepared, spec.onnx_model.recomputed_layers, source.roles.trained, LOSS_SUM)
    plain, faster, *_ = gradient_graphs(prepared, spec, source, length)
    path = synced_of(TRAIN)
    files = {}
    for name, model in ((path.name, plain), (with_kernels_of(path).name, faster)):
        finish(model)
        files[name] = serialized(model, inputs)
    return files


def _in_half(
    prepared: onnx.ModelProto, spec: TrainerRunSpec, trained: Sequence[str]
) -> tuple[onnx.ModelProto | None, list[str]]:
    """The training graph in the requested half precision, and log lines; None if none is requested."""
    if spec.train.precision not in HALF_PRECISIONS:
        return None, []
    from ortflow.workflow.fusion.halved import halved

    return halved(prepared, trained, spec.train.precision, spec.onnx_model.recomputed_scopes)
