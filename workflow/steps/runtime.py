"""Step 2: MPI, device, trainer, newest checkpoint. The order matters.

MPI is first, because ranks agree on the device. The machines are checked before the trainer is opened, which needs the
result. The checkpoint is last, because it is loaded into the trainer's buffers.
"""

from __future__ import annotations

import os
from typing import Any

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Device
from ortflow.workflow.device.choice import open_device
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.preflight.gate import gate
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.lead import wait_for_lead
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.run_plan import Plan
from ortflow.workflow.system.cores import cores_of, grant_of_this_process
from ortflow.workflow.trainer_protocol.capabilities import Measuring, check_capabilities


def runtime(context: Context) -> None:
    """Connect the ranks, open the trainer, load the newest complete checkpoint."""
    if context.lead is not None:
        context.lead.ready()
    elif not context.leads:
        # In MPI_Init, this rank would poll until rank 0 comes, and use a core (MPICH 5.0).
        wait_for_lead(context.run_dir.root, context.attempt)
    comm = context.comm = connect(context.place, context.spec)
    trouble = context.first_trouble(context.trouble)
    if trouble is not None:
        if not isinstance(trouble, UserError):
            # The signal that asks a rank to exit may have ended a process that it needs.
            context.leave_if_asked()
        raise trouble
    context.leave_if_asked()
    machines = check_machines(context)
    device = device_of(context, comm)
    threads = threads_of(comm, context.place, context.spec)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    context.plan = Plan.load(context.run_dir.plan)
    if context.leads:
        print(f"{comm.world_size} rank(s), {threads} thread(s) each, on {context.place.host}", flush=True)
    if context.spec.preflight:
        gate(comm, device, context.place, threads, context.events)
        context.leave_if_asked()
    context.trainer = context.builder.open(context.world, device, threads, machines)
    check_capabilities(context.trainer, context.spec)
    if device.kind == "cuda" and isinstance(context.trainer, Measuring):
        device.account = context.trainer.memory  # type: ignore[attr-defined]

    from ortflow.workflow.steps.checkpoint import Saver
    from ortflow.workflow.steps.environment import environment_of_all
    from ortflow.workflow.steps.monitor import Monitor

    context.environment = environment_of_all(context)
    context.events.write("environment", **context.environment)
    context.monitor = Monitor(context)
    context.saver = Saver(context)
    context.saver.resume()
    context.leave_if_asked()


def connect(place: Place, spec: TrainerRunSpec) -> Communicator:
    """Connect the ranks of this run.

    Raises UserError if their number differs from the run file's.
    """
    if place.world_size == 1 and spec.world_size == 1:
        return SoloCommunicator()
    from ortflow.workflow.comm.mpi import MpiCommunicator

    comm = MpiCommunicator()
    # With a process manager that the MPI library does not support, every rank forms a world of size 1.
    if not comm.world_size == place.world_size == spec.world_size:
        raise UserError(
            f"{spec.world_size} ranks were asked for, {place.manager} placed {place.world_size}, and MPI "
            f"({comm.library()}) connected {comm.world_size}",
            where="resources",
            fix="start the ranks with that MPI's process manager: set "
            f"backends.{os.environ.get('ORTFLOW_LAUNCHER', 'local')}.mpi",
        )
    return comm


def check_machines(context: Context) -> list[Any]:
    """The trainer's results for each machine, on every rank; rank 0 checked its own in step `configure`.

    Raises UserError, on all ranks, if a machine is unusable.
    """
    first_there, trouble = context.place.local_rank == 0, None
    if first_there and not context.leads:
        try:
            context.machine = context.builder.check_machine()
        except OrtflowError as error:
            trouble = error
    trouble = context.first_trouble(trouble)
    if trouble is not None:
        raise trouble
    rank_machines = context.world.gather((first_there, context.machine))
    machines: list[Any] = context.world.broadcast_object(
        [machine for first, machine in rank_machines if first] if rank_machines else None
    )
    return machines


def device_of(context: Context, comm: Communicator) -> Device:
    """This rank's device; sets the communicator for such devices in the context. Errors are raised on every rank."""
    device, trouble = None, None
    try:
        device = open_device(context.spec, context.place)
    except OrtflowError as error:
        trouble = error
    trouble = context.first_trouble(trouble)
    if trouble is not None or device is None:
        raise trouble or OrtflowError("this rank has no device")
    if device.kind == "cuda":
        from ortflow.workflow.comm.over_gpus import over_gpus
        from ortflow.workflow.device.cuda import CudaDevice

        assert isinstance(device, CudaDevice)
        if context.leads:
            print(f"{context.place.host}: {device.name}, device {device.index}", flush=True)
        if comm.world_size > 1:
            context.comm, means = over_gpus(comm, device, context.place.host, context.spec.restart.hung_seconds)
            if context.leads:
                print(f"sums over the ranks' GPUs: {means}", flush=True)
    return device


def threads_of(comm: Communicator, place: Place, spec: TrainerRunSpec) -> int:
    """Threads per rank: the run file's cores, or an equal share of the available ones."""
    if spec.resources.cpus_per_rank is not None:
        return spec.resources.cpus_per_rank
    grant = grant_of_this_process(place.host)
    return cores_of(grant, comm.broadcast_object(comm.gather(grant)))
