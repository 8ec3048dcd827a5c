"""Sums over the ranks' GPUs by NCCL, on the stream of each rank's device; everything else goes through MPI.

A rank that dies takes the others along through its process manager, as it does without NCCL.
"""

from __future__ import annotations

import ctypes
import glob
import site
from collections.abc import Sequence
from typing import Any

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cuda import CudaBuffer, CudaDevice
from ortflow.workflow.errors import OrtflowError

TYPES = {"float32": 7, "float64": 8, "int64": 4}
"""numpy's names -> ncclDataType_t."""
SUM = 0
"""ncclRedOp_t."""


class NcclError(OrtflowError):
    """A call of NCCL's that did not work."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class NcclCommunicator(StagedCommunicator):
    """The ranks of `below`, each with a GPU of its own. Collective: all ranks make it together."""

    def __init__(self, below: Communicator, device: CudaDevice, library: Any) -> None:
        super().__init__(below)
        self._nccl, self._device = library, device
        unique = UniqueId()
        trouble = None
        if below.rank == 0:
            try:
                self._call("ncclGetUniqueId", ctypes.byref(unique))
            except NcclError as error:
                trouble = str(error)
        shared, trouble = below.share((bytes(unique), trouble))
        if trouble is not None:
            raise NcclError(trouble)
        self._world = ctypes.c_void_p()
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
        unique = UniqueId.from_buffer_copy(shared)
        self._call("ncclCommInitRank", ctypes.byref(self._world), below.world_size, unique, below.rank)

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place, behind what is queued; nobody waits here."""
        if not isinstance(buffer, CudaBuffer):
            super().all_reduce(buffer)
            return
        memory, stream = ctypes.c_void_p(buffer.pointer), ctypes.c_void_p(self._device.stream)
        count, kind = ctypes.c_size_t(buffer.count), TYPES[buffer.dtype.name]
        self._call("ncclAllReduce", memory, memory, count, kind, SUM, self._world, stream)

    def abort(self, code: int) -> None:
        """End every rank now."""
        self._nccl.ncclCommAbort(self._world)
        super().abort(code)

    def close(self) -> None:
        """Leave both worlds in order."""
        self._device.synchronize()
        self._nccl.ncclCommDestroy(self._world)
        super().close()

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._nccl, name)(*arguments))
        if code:
            raise NcclError(f"NCCL fails in {name}: {self._nccl.ncclGetErrorString(code).decode()}")


def load() -> Any | None:
    """NCCL as pip installs it, else as the system has it; None where there is none."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    found = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/nccl/lib/libnccl.so.2")]
    for path in (*found, "libnccl.so.2"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.ncclGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def over_gpus(below: Communicator, device: CudaDevice, host: str) -> tuple[Communicator, str]:
    """What sums over the ranks' GPUs, and its name for the log. Collective.

    NCCL where each rank has a GPU of its own and the library is there on all; host memory and MPI otherwise.
    """
    library = load()
    devices: Sequence[tuple[str, str, bool]] | None = below.gather((host, device.gpu.uuid, library is not None))
    devices = below.share(devices)
    assert devices is not None
    if len({(host, uuid) for host, uuid, _ in devices}) < len(devices):
        return StagedCommunicator(below), "MPI, because ranks share a GPU"
    if library is None or not all(there for _, _, there in devices):
        return StagedCommunicator(below), "MPI, because NCCL is not installed: pip install 'ortflow[cuda]'"
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    number = version.value
    name = f"NCCL {number // 10000}.{number % 10000 // 100}.{number % 100}"
    return NcclCommunicator(below, device, library), name
