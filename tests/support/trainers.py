"""Graph trainers on one rank, as step `runtime` makes them."""

from __future__ import annotations

from safetensors.numpy import load_file

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.types import GraphSet, with_kernels_of
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.trainer.graph import GraphTrainer


def trainer_on(graphs: GraphSet, spec: RunSpec) -> GraphTrainer:
    """The trainer of graphs that `build_graphs` has written, with the model file's parameters."""
    update = optimizer_graph(spec.train.optimizer, segments(spec.train.optimizer, graphs.index))
    for path, each in ((graphs.optimizer, update), (with_kernels_of(graphs.optimizer), with_kernels(update))):
        path.write_bytes(compose(each).SerializeToString())
    scaling = gradient_graph()
    for path, each in ((graphs.gradient, scaling), (with_kernels_of(graphs.gradient), with_kernels(scaling))):
        path.write_bytes(each.SerializeToString())
    library = library_for(spec.resources.kernels)
    sessions = Sessions(CpuDevice(), 1, "error", library.path if library else None)
    trainer = GraphTrainer(graphs, spec, sessions, SoloCommunicator())
    trainer.load_tensors(load_file(graphs.initial))
    return trainer
