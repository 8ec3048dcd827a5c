"""The training graph of a run: the loss attached, differentiated, and in every form that ranks may load.

Called by `build`, and by `variants` for parts of a model. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.assembly.files import serialized
from ortflow.workflow.assembly.targets import CPU, CPU_KERNELS, GRADIENT, LOSS, PART_FUSED, PLACED, Build
from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.intake.user_graphs import user_train_graph
from ortflow.workflow.graph.ir.collective import finish, has_collectives
from ortflow.workflow.graph.ir.passes import Watch, copied, unwatched
from ortflow.workflow.graph.normalize.dropouts import dropout_notes
from ortflow.workflow.graph.objective.synced import Replicas
from ortflow.workflow.graph.types import SYNCED
from ortflow.workflow.parallel.division import STATISTICS
from ortflow.workflow.spec.run import TrainerRunSpec

TRAIN = Path("train.onnx")
Forms = dict[Form, onnx.ModelProto]


@dataclass(frozen=True)
class Training:
    """The training graph of a run."""

    forms: Mapping[Form, onnx.ModelProto]
    """The forms that the run needs; those for GPUs before elementwise nodes are fused."""
    trained: Sequence[str]
    """The parameters that have a gradient."""
    notes: Sequence[str] = ()
    """Lines for the log."""
    prepared: onnx.ModelProto | None = None
    """The forward graph with its loss, from which the forms were made; None for the user's own training graph."""

    @property
    def plain(self) -> onnx.ModelProto:
        """With standard operators."""
        return self.forms[Form.PLAIN]

    def form(self, *, kernels: bool) -> Form:
        """The form that ranks load; `kernels`: they have ortflow's operators."""
        preferred = (Form.HALF, *((Form.PLACED, Form.KERNELS) if kernels else ()))
        return next((form for form in preferred if form in self.forms), Form.PLAIN)


def training_of(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, batch: str, length: int, watch: Watch = unwatched
) -> Training:
    """The training graph that the run file names, or the gradient of the forward graph.

    `length` is the samples' if the model's second axis is dynamic and it is known. Raises UserError.
    """
    section = spec.onnx_model
    if section.graphs.train:
        plain, *rest = user_train_graph(section.graphs.train, source)
        return Training({Form.PLAIN: plain}, *rest)
    build = Build(spec, source, batch, length)
    prepared = LOSS.run(copied(forward), build, watch)
    build.notes += dropout_notes(prepared.graph) if spec.resources.kernels == "auto" else []
    forms = _forms(prepared, build, watch)
    halves, lines = _in_half(prepared, spec, build.trained, watch)
    return Training({**forms, **halves}, build.trained, [*build.notes, *lines], prepared)


def with_loss(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, batch: str, replicas: Replicas | None = None
) -> tuple[onnx.ModelProto, list[str]]:
    """The forward graph in training mode, its outputs the loss and the new states, and log lines.

    With `replicas`, statistics of the batch run over the ranks.
    """
    build = Build(spec, source, batch, replicas=replicas)
    return LOSS.run(copied(forward), build), build.notes


def _forms(prepared: onnx.ModelProto, build: Build, watch: Watch = unwatched) -> Forms:
    """The training graph in the forms that are made of the same gradient."""
    gradient = GRADIENT.run(prepared, build, watch)
    gpu = {Form.PLACED: PLACED.run(copied(gradient), build, watch)} if build.spec.on_gpus else {}
    plain = CPU.run(copied(gradient), build, watch)
    return {Form.PLAIN: plain, Form.KERNELS: CPU_KERNELS.run(gradient, build, watch), **gpu}


def training_forms(
    forward: onnx.ModelProto, spec: TrainerRunSpec, source: Source, length: int, trained: Sequence[str]
) -> dict[str, onnx.ModelProto]:
    """The forms of the training graph of a part of the model, by the names of their files."""
    forms = _forms(forward, Build(spec, source, length=length))
    if Form.PLACED in forms:
        forms[Form.FUSED] = PART_FUSED.run(forms.pop(Form.PLACED), None)
    halves, _ = _in_half(forward, spec, trained)
    return {form.of(TRAIN).name: model for form, model in {**forms, **halves}.items()}


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
    build = Build(spec, source, batch, length, Replicas(STATISTICS, spec.synced_ranks))
    prepared = LOSS.run(copied(forward), build)
    if not has_collectives(prepared):
        raise UserError(
            "is true, and the model has no BatchNormalization that computes statistics of the batch",
            where="train.sync_batch_norm",
            fix="remove the key",
        )
    files = {}
    for form, model in _forms(prepared, build).items():
        if form in (Form.PLAIN, Form.KERNELS):
            finish(model)
            files[form.of(SYNCED).name] = serialized(model, inputs)
    return files


def _in_half(
    prepared: onnx.ModelProto, spec: TrainerRunSpec, trained: Sequence[str], watch: Watch = unwatched
) -> tuple[Forms, list[str]]:
    """The training graph in the requested half precision, and log lines; none if none is requested."""
    if spec.train.precision not in HALF_PRECISIONS:
        return {}, []
    from ortflow.workflow.fusion.halved import Halves, halved

    state = Halves(spec.train.precision, trained, spec.onnx_model.recomputed_scopes)
    return {Form.HALF: halved(prepared, state, watch)}, state.notes
