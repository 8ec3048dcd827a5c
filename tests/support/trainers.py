"""Graph trainers on one rank, as step `runtime` makes them."""

from __future__ import annotations

from safetensors.numpy import load_file

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.step import GraphTrainer


def trainer_on(graphs: GraphSet, spec: TrainerRunSpec) -> GraphTrainer:
    """The trainer for graphs that `build_graphs` has written, with the model file's parameters."""
    write_update(graphs, spec)
    return opened(graphs, spec, SoloCommunicator())


def write_update(graphs: GraphSet, spec: TrainerRunSpec) -> None:
    """Write the update's graphs beside the others."""
    rule, cuts = spec.train.optimizer, segments_of(spec.train, graphs.index)
    plain, own = optimizer_graph(rule, cuts), with_kernels(optimizer_graph(rule, cuts, kernels=True))
    for path, each in ((graphs.optimizer, plain), (Form.KERNELS.of(graphs.optimizer), own)):
        path.write_bytes(compose(each).SerializeToString())
    scaling = gradient_graph()
    for path, each in ((graphs.gradient, scaling), (Form.KERNELS.of(graphs.gradient), with_kernels(scaling))):
        path.write_bytes(each.SerializeToString())


def opened(
    graphs: GraphSet, spec: TrainerRunSpec, communicator: Communicator, report: Report | None = None
) -> GraphTrainer:
    """The trainer that step `runtime` opens on the CPU."""
    library = library_for(spec.resources.kernels)
    device = CpuDevice()
    sessions = Sessions(device, 1, "error", library.path if library else None)
    trainer = open_trainer(graphs, spec, sessions, communicator, report)
    trainer.load_tensors(load_file(graphs.initial))
    return trainer
