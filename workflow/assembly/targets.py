"""The graphs of a run, and the passes that make each of them: by target.

`training`, `stage_forms` and `evaluating` run them for step `configure`, `ortflow inspect --passes` shows them. What
is needed for GPUs alone is imported where it is run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.division.regather import gather_again
from ortflow.workflow.graph.export.inference import infer_graph
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.ir.collective import drop_copies
from ortflow.workflow.graph.ir.edit import Editor, make_outputs, scalar
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.passes import Pass, Passes, in_place
from ortflow.workflow.graph.normalize.prepare import PASSES as MODEL
from ortflow.workflow.graph.objective import evaluation
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.objective.synced import Replicas
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.layer_marks import mark_layers
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.spec.run import TrainerRunSpec


@dataclass
class Build:
    """What the passes read besides the graph, and what they report."""

    spec: TrainerRunSpec
    source: Source
    batch: str = ""
    """A data input whose first axis is the batch."""
    length: int = 0
    """Of the samples, if the model's second axis is dynamic and it is known."""
    replicas: Replicas | None = None
    """The ranks over which statistics of the batch run."""
    trained: list[str] = field(default_factory=list)
    """Parameters that have a gradient."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log."""
    classes: dict[str, int] = field(default_factory=dict)
    """Number of classes by label, where the evaluation graph shows it."""


class Sized(Protocol):
    """What the operators for CPUs are chosen by."""

    @property
    def length(self) -> int:
        """See `Build`."""


def _loss(model: onnx.ModelProto, build: Build) -> None:
    graph, spec, source = model.graph, build.spec, build.source
    notes, updates = train_mode(graph, source.roles.frozen, build.replicas)
    build.notes += notes
    attach(graph, spec.onnx_model.loss, build.batch, spec.data.last_batch == "pad")
    edit = Editor(graph)
    outputs = [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)]
    for name in source.roles.state:
        computed = source.forms.updates[name].name if name in source.forms.updates else name
        new = edit("Identity", updates.get(name, computed), output=f"{name}_new")
        described = onnx.helper.make_tensor_value_info(new, onnx.TensorProto.FLOAT, source.tensors[name].shape)
        outputs.append(described)
    make_outputs(graph, outputs)
    prune(graph)


def _layers(model: onnx.ModelProto, build: Build) -> None:
    build.notes += mark_layers(model, build.spec.onnx_model.recomputed_layers, build.source.roles.trained, LOSS_SUM)


def _differentiable(model: onnx.ModelProto, build: Build) -> onnx.ModelProto:
    copy, notes = make_differentiable(model, build.source.roles.trained, LOSS_SUM)
    build.notes += notes
    return copy


def _gradient(model: onnx.ModelProto, build: Build) -> onnx.ModelProto:
    copy, build.trained = differentiate(model, build.source.roles.trained, LOSS_SUM)
    return copy


def _recomputed(model: onnx.ModelProto, build: Build) -> None:
    build.notes += recompute(model.graph, build.spec.onnx_model.recomputed_scopes)


def _on_gpus(model: onnx.ModelProto, _: object) -> onnx.ModelProto:
    from ortflow.workflow.cuda.place import completed

    return completed(model)


def _joins(model: onnx.ModelProto, _: object) -> onnx.ModelProto:
    from ortflow.workflow.fusion.joins import put_joins

    return put_joins(model)


def _one_loss(model: onnx.ModelProto, _: object) -> onnx.ModelProto:
    from ortflow.workflow.fusion.losses import join_losses

    return join_losses(model)


def _fused_nodes(model: onnx.ModelProto, _: object) -> onnx.ModelProto:
    from ortflow.workflow.fusion.groups import fused

    return fused(model)


def _evaluation(model: onnx.ModelProto, build: Build) -> None:
    section = build.spec.onnx_model
    padded = build.spec.data.last_batch == "pad"
    build.classes = evaluation.complete(model.graph, section.loss, section.metrics, build.batch, padded)


_STANDARD: tuple[Pass[object], ...] = (
    Pass("faster-nodes", in_place(rewrites.after), "nodes that use all threads", ("gradient",)),
    Pass("composed", lambda model, _: compose(model), "gradients that ONNX Runtime has no operator for"),
    Pass("order", in_place(results_first), "the order of the nodes"),
)
_GATHERED: Pass[object] = Pass("gathered-again", in_place(gather_again), "gathered tokens are gathered again, not kept")
_COPIES: Pass[object] = Pass("copies-dropped", in_place(drop_copies), "copies of gradients, which CPUs need")
_KERNELS: Pass[Sized] = Pass(
    "operators", lambda model, build: with_kernels(model, build.length), "ortflow's operators for CPUs", ("gradient",)
)
_GPU: Pass[object] = Pass("operators", _on_gpus, "ortflow's operators for GPUs, all compositions", ("gradient",))
_ADAPTED: Pass[object] = Pass("adapted", lambda model, _: on_cuda(model), "nodes without a kernel for GPUs")
_JOINS: Pass[object] = Pass("joins", _joins, "Concat of different sizes", ("adapted",))
_SORTED: Pass[object] = Pass("sorted", in_place(sort_nodes), "the order of the nodes")
_ONE_LOSS: Pass[object] = Pass("one-loss", _one_loss, "a loss with its gradient", ("adapted",))
_FUSED: Pass[object] = Pass("fused", _fused_nodes, "elementwise nodes are fused", ("adapted",))

LOSS: Passes[Build] = Passes(
    "training",
    (
        Pass("loss", _loss, "training mode; the outputs are the loss and new states"),
        Pass("layers", _layers, "marks the layers that are recomputed", ("loss",)),
    ),
    behind="wrong-forms-avoided",
)
GRADIENT: Passes[Build] = Passes(
    "training",
    (
        Pass("differentiable", _differentiable, "operators without a gradient are decomposed", ("loss",)),
        Pass("cheaper-gradients", in_place(rewrites.before), "forms with a cheaper gradient"),
        Pass("gradient", _gradient, "adds the backward pass", ("differentiable",)),
        Pass("copies-dropped", _COPIES.change, _COPIES.effect, wanted=lambda build: build.spec.on_gpus),
        Pass("recomputed", _recomputed, "repeats what is recomputed in the backward pass", ("layers", "gradient")),
    ),
    behind="training/layers",
)
CPU: Passes[object] = Passes("training", _STANDARD, behind="training/recomputed")
"""`Form.PLAIN`."""
CPU_KERNELS: Passes[Sized] = Passes("kernels", (_KERNELS, *_STANDARD), behind="training/recomputed")
"""`Form.KERNELS`."""
CUDA: Passes[object] = Passes("cuda", (_ADAPTED,), behind="training/order")
"""`Form.CUDA`."""
PLACED: Passes[object] = Passes("gpu", (_GPU,), behind="training/recomputed")
"""`Form.PLACED`."""
FUSED: Passes[object] = Passes("gpu", (_ADAPTED, _JOINS, _ONE_LOSS, _FUSED), behind="gpu/operators")
"""`Form.FUSED`."""
OWN_FUSED: Passes[object] = Passes("cuda", (_ONE_LOSS, _FUSED), behind="cuda/adapted")
"""`Form.FUSED` of the user's own training graph, in which no operators are replaced."""
PART_FUSED: Passes[object] = Passes("part", (_ADAPTED, _FUSED, _STANDARD[-1]), behind="gpu/operators")
"""`Form.FUSED` of a part of a divided model."""

STAGE: Passes[object] = Passes("stage", (*_STANDARD, _GATHERED), behind="training/recomputed")
"""Both passes of a stage, which are then divided into a forward and a backward graph, as those below."""
STAGE_KERNELS: Passes[Sized] = Passes("stage-kernels", (_KERNELS, *_STANDARD, _GATHERED), behind="training/recomputed")
STAGE_CUDA: Passes[object] = Passes("stage-cuda", (_ADAPTED, _SORTED), behind="stage/gathered-again")
STAGE_PLACED: Passes[object] = Passes(
    "stage-gpu", (_COPIES, _GPU, _ADAPTED, _JOINS, _SORTED), behind="training/recomputed"
)

EVALUATION: Passes[Build] = Passes(
    "evaluation", (Pass("whole", _evaluation, "evaluation mode, loss and metrics"),), behind="wrong-forms-avoided"
)
EXPORT: Passes[Collection[str]] = Passes(
    "inference", (Pass("whole", infer_graph, "evaluation mode; nothing depends on a label"),),
    behind="wrong-forms-avoided", has_weights=False,
)  # fmt: skip
"""By the names of the labels."""


def all_passes() -> list[Passes[Any]]:
    """Every list; a list begins behind a pass of one before it."""
    from ortflow.workflow.fusion.halved import HALF_FUSED, HALF_GRADIENT, IN_HALF, SCALED_LOSS

    source: Passes[Any] = Passes("", (Pass("wrong-forms-avoided", lambda model, _: None, ""),), behind="shapes-checked")
    return [
        MODEL, source, LOSS, GRADIENT, CPU, CPU_KERNELS, CUDA, PLACED, FUSED, OWN_FUSED, PART_FUSED,
        STAGE, STAGE_KERNELS, STAGE_CUDA, STAGE_PLACED,
        SCALED_LOSS, HALF_GRADIENT, IN_HALF, HALF_FUSED, EVALUATION, EXPORT,
    ]  # fmt: skip
