"""How a run's ranks sum over their GPUs: through NCCL where that is possible, else through host memory and MPI."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.nccl_library import load
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.cuda import CudaDevice


def over_gpus(
    below: Communicator, device: CudaDevice, host: str, limit: float | None = None
) -> tuple[Communicator, str]:
    """The communicator for sums over the ranks' GPUs, and its name for the log. Collective.

    NCCL if each rank has its own GPU and the library is present on all; otherwise host memory and MPI. A sum that takes
    longer than `limit` seconds ends in an error.
    """
    library = load()
    devices: Sequence[tuple[str, str, bool]] | None = below.gather((host, device.gpu.uuid, library is not None))
    devices = below.broadcast_object(devices)
    assert devices is not None
    # NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
    if len({(host, uuid) for host, uuid, _ in devices}) < len(devices):
        return StagedCommunicator(below), "MPI, because ranks share a GPU"
    if library is None or not all(has_nccl for _, _, has_nccl in devices):
        return StagedCommunicator(below), "MPI, because NCCL is not installed: pip install 'ortflow[cuda]'"
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    number = version.value
    name = f"NCCL {number // 10000}.{number % 10000 // 100}.{number % 100}"
    one_host = len({host_name for host_name, _, _ in devices}) == 1
    return NcclCommunicator(below, device, library, limit, one_host=one_host), name
