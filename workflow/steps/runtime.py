"""Step 2: MPI, device, sessions, newest checkpoint: in this order, which is a rule.

MPI first, because ranks decide on the device; settings before sessions, because they change the graph; the
checkpoint last, because it fills what the sessions are bound to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.cores import cores_of, grant_of_this_process
from ortflow.workflow.device import Device
from ortflow.workflow.device.choice import open_device
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.plan import Plan
from ortflow.workflow.ranks import Place
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.runtime_check import agree


def runtime(context: Context) -> None:
    """Connect the ranks, open the sessions, load the newest whole checkpoint."""
    comm = context.comm = connect(context.place, context.spec)
    trouble = comm.share(context.trouble)
    if trouble is not None:
        if not isinstance(trouble, UserError):
            # The signal that asks a rank to leave may have ended a process that it needs.
            context.leave_if_asked()
        raise trouble
    context.leave_if_asked()
    context.settings = agree(context)
    device = device_of(context, comm)
    threads = threads_of(comm, context.place, context.spec)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    context.plan = Plan.load(context.run_dir.plan)
    make_trainer(context, device, threads)

    from ortflow.workflow.steps.checkpoint import Saver
    from ortflow.workflow.steps.environment import environment_of_all
    from ortflow.workflow.steps.monitor import Monitor

    context.environment = environment_of_all(context, threads)
    context.events.write("environment", **context.environment)
    context.monitor = Monitor(context)
    context.saver = Saver(context)
    context.saver.resume()
    context.leave_if_asked()


def connect(place: Place, spec: RunSpec) -> Communicator:
    """The ranks of this run.

    Raises UserError where their number is not the run file's: a process manager that the MPI library does not
    speak with starts every rank as a world of its own.
    """
    if place.world_size == 1 and spec.world_size == 1:
        return SoloCommunicator()
    from ortflow.workflow.comm.mpi import MpiCommunicator

    comm = MpiCommunicator()
    if not comm.world_size == place.world_size == spec.world_size:
        raise UserError(
            f"{spec.world_size} ranks were asked for, {place.manager} placed {place.world_size}, and MPI "
            f"({comm.library()}) connected {comm.world_size}",
            where="resources",
            fix="start the ranks with what that MPI speaks with: set "
            f"backends.{os.environ.get('ORTFLOW_LAUNCHER', 'local')}.mpi",
        )
    return comm


def device_of(context: Context, comm: Communicator) -> Device:
    """The device of this rank, and in the context what reduces over such devices; every rank hears of a fault."""
    device, trouble = None, None
    try:
        device = open_device(context.spec, context.place)
    except OrtflowError as error:
        trouble = error
    troubles = comm.gather(trouble)
    trouble = comm.share(next((t for t in troubles if t is not None), None) if troubles is not None else None)
    if trouble is not None or device is None:
        raise trouble or OrtflowError("a rank has no device")
    if device.kind == "cuda":
        from ortflow.workflow.comm.nccl import over_gpus
        from ortflow.workflow.device.cuda import CudaDevice

        assert isinstance(device, CudaDevice)
        if context.leads:
            print(f"{context.place.host}: {device.name}, device {device.index}", flush=True)
        if comm.world_size > 1:
            context.comm, means = over_gpus(comm, device, context.place.host)
            if context.leads:
                print(f"sums over the ranks' GPUs: {means}", flush=True)
    return device


def threads_of(comm: Communicator, place: Place, spec: RunSpec) -> int:
    """Threads of a session: the run file's cores, or a fair share of what the kernel grants."""
    if spec.resources.cpus_per_rank is not None:
        return spec.resources.cpus_per_rank
    mine = grant_of_this_process(place.host)
    return cores_of(mine, comm.share(comm.gather(mine)))


def make_trainer(context: Context, device: Device, threads: int) -> None:
    """The graph trainer with the parameters of the model file."""
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.kernels.library import library_for
    from ortflow.workflow.trainer.graph import GraphTrainer
    from ortflow.workflow.trainer.sessions import Sessions

    context.graphs = GraphSet.load(context.run_dir.graphs)
    library = library_for(context.spec.kernels)
    sessions = Sessions(
        device,
        threads,
        context.spec.monitor.runtime_log,
        library.path if library else None,
        context.settings,
        fuse=context.spec.resources.kernels == "auto",
    )
    trainer = GraphTrainer(context.graphs, context.spec, sessions, context.world)
    trainer.load_tensors(initial_tensors(context))
    context.trainer = trainer
    if context.leads:
        print(f"{context.world.world_size} rank(s), {threads} thread(s) each, on {context.place.host}", flush=True)
        if library is not None:
            print(f"CPU kernels: {library.note}", flush=True)


def initial_tensors(context: Context) -> Mapping[str, npt.NDArray[np.float32]]:
    """Every parameter and running statistic as the model file has it."""
    from safetensors.numpy import load_file

    tensors: dict[str, npt.NDArray[np.float32]] = load_file(context.graphs.initial)
    return tensors
