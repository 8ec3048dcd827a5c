"""Several ranks through MPI, on buffers in host memory.

The only module that imports mpi4py. MPI is initialised here, not at import, with the thread level of one thread that
calls MPI: background threads of a rank never do.
"""

from __future__ import annotations

from typing import Any

import mpi4py
import numpy.typing as npt

from ortflow.workflow.comm import segments
from ortflow.workflow.comm.fresh_memory import fresh_memory
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
mpi4py.rc.thread_level = "funneled"

CHUNK = 1 << 30
"""Elements of one call: MPI counts in 32-bit integers where a library is old."""


class MpiCommunicator:
    """MPI_COMM_WORLD."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"no MPI library can be loaded ({str(error).splitlines()[0]})",
                fix="install one beside ortflow: pip install 'ortflow[mpich]'",
            ) from error
        self._mpi = MPI
        if not MPI.Is_initialized():
            with fresh_memory():
                MPI.Init_thread(MPI.THREAD_FUNNELED)
        self._world = MPI.COMM_WORLD
        self._world.Barrier()
        segments.forget()

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self._world.Get_rank())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._world.Get_size())

    def library(self) -> str:
        """The MPI library's own first words, for the log."""
        return str(self._mpi.Get_library_version()).splitlines()[0].strip("\x00 ")

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place; the order of summation depends on the world alone."""
        array = _host(buffer)
        for start in range(0, array.size, CHUNK):
            self._world.Allreduce(self._mpi.IN_PLACE, array[start : start + CHUNK], op=self._mpi.SUM)

    def barrier(self) -> None:
        """Wait for all."""
        self._world.Barrier()

    def gather(self, value: Any) -> list[Any] | None:
        """A small plain value of every rank, on rank 0."""
        gathered: list[Any] | None = self._world.gather(value, root=0)
        return gathered

    def share(self, value: Any) -> Any:
        """Rank 0's small plain value, on every rank."""
        return self._world.bcast(value, root=0)

    def abort(self, code: int) -> None:
        """End every rank now."""
        self._world.Abort(code)

    def close(self) -> None:
        """Finalize; every rank must come here."""
        self._mpi.Finalize()


def _host(buffer: Buffer) -> npt.NDArray[Any]:
    if not isinstance(buffer, HostBuffer):
        raise TypeError("MPI reduces buffers in host memory; a GPU's go through `nccl` or `staged`")
    return buffer.array
