"""Writes the graphs of an update, and the forms of a step's graphs for GPUs."""

from __future__ import annotations

import onnx

from ortflow.workflow.assembly.gpu_forms import gpu_forms
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.fusion.update import fused_update
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.optim.gradient import gradient_graph, queued_gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import guarded
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.run import TrainerRunSpec


def write_updates(graphs: GraphSet, spec: TrainerRunSpec) -> None:
    """The graphs of a run's update and of the scaling of its gradients, in every form that its ranks may open."""
    if not graphs.user_optimizer_graph:
        rule, cuts = spec.train.optimizer, segments_of(spec.train, graphs.index)
        plain, with_own = optimizer_graph(rule, cuts), with_kernels(optimizer_graph(rule, cuts, kernels=True))
        for path, graph in ((graphs.optimizer, plain), (Form.KERNELS.of(graphs.optimizer), with_own)):
            write_atomically(path, compose(graph).SerializeToString())
    if spec.on_gpus:
        write_forms(graphs, spec.train.precision)
    scaling = gradient_graph()
    for path, graph in ((graphs.gradient, scaling), (Form.KERNELS.of(graphs.gradient), with_kernels(scaling))):
        write_atomically(path, graph.SerializeToString())


def write_forms(graphs: GraphSet, precision: str = "fp32") -> None:
    """The graphs of a step for GPUs, with ONNX Runtime's kernels only and with ortflow's, for a `train.precision`."""
    placed = onnx.load(Form.PLACED.of(graphs.train)) if Form.PLACED.of(graphs.train).exists() else None
    for form, train in gpu_forms(onnx.load(graphs.train), placed).items():
        write_atomically(form.of(graphs.train), train.SerializeToString())
    write_atomically(Form.CUDA.of(graphs.gradient), queued_gradient_graph().SerializeToString())
    write_atomically(Form.CUDA.of(graphs.optimizer), guarded(onnx.load(graphs.optimizer)).SerializeToString())
    update, kernel_count = fused_update(onnx.load(graphs.optimizer), precision)
    if kernel_count:
        scaling = scalars_in_one(queued_gradient_graph(fused=True))
        write_atomically(Form.FUSED.of(graphs.optimizer), update.SerializeToString())
        write_atomically(Form.FUSED.of(graphs.gradient), scaling[0].SerializeToString())
