"""Several ranks through MPI, on buffers in host memory.

The only module that imports mpi4py. MPI is initialised here, not at import, with the thread level MPI_THREAD_FUNNELED:
background threads of a rank never call MPI.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import TAGS, Communicator, Request
from ortflow.workflow.comm.fresh_memory import fresh_memory
from ortflow.workflow.comm.mpi_errors import CallTime, mpi_errors
from ortflow.workflow.comm.segments import Start
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import ALIGNMENT, share

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
mpi4py.rc.thread_level = "funneled"

CHUNK = 1 << 30
"""Elements of one call, or bytes of one message: older MPI libraries count in 32-bit integers."""
SAME_ORDER = {"MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD": "0"}
"""Variables that MPICH reads when it starts. By default the first four sums of a communicator use another algorithm
than the later ones, which adds in another order: after a resume, three or more ranks would not have the bits of an
undisturbed run."""
PIECE = 1 << 18
"""Elements of a message in a reduce-scatter, which are stored beside the buffer until they are added to it."""


class MpiRanks(Communicator):
    """Ranks that an MPI communicator connects."""

    def __init__(self, mpi: Any, ranks: Any) -> None:
        self._mpi, self._ranks = mpi, ranks

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self._ranks.Get_rank())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._ranks.Get_size())

    @property
    def call_seconds(self) -> float:
        """Seconds that this process has spent in calls of MPI so far."""
        return CallTime.seconds

    @mpi_errors
    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place; the order of summation depends only on the world size."""
        array = _host(buffer)
        for start in range(0, array.size, CHUNK):
            self._ranks.Allreduce(self._mpi.IN_PLACE, array[start : start + CHUNK], op=self._mpi.SUM)

    @mpi_errors
    def reduce_scatter(self, buffer: Buffer) -> None:
        """Sum over the ranks of this rank's share, in place; the order of summation depends only on the world size.

        Each rank sends every other rank its part of that rank's share.
        """
        # MPI's own Reduce_scatter_block requires equal blocks apart from the buffer. MPICH's was measured, and took
        # three times as long.
        array, rank, world = _host(buffer), self.rank, self.world_size
        shares = [share(array.size, peer, world) for peer in range(world)]
        own_share, received = array[slice(*shares[rank])], np.empty(min(PIECE, shares[0][1]), array.dtype)
        for distance in range(1, world):
            to, source = (rank + distance) % world, (rank - distance) % world
            peer_share = array[slice(*shares[to])]
            # The first share is the longest: every rank sends the same number of pieces, the last ones possibly empty.
            for first in range(0, shares[0][1], PIECE):
                into, last = own_share[first : first + PIECE], first + PIECE
                piece = received[: into.size]
                self._ranks.Sendrecv(peer_share[first:last], to, TAGS, piece, source, TAGS)
                with np.errstate(invalid="ignore", over="ignore"):
                    np.add(into, piece, out=into)

    @mpi_errors
    def all_gather(self, buffer: Buffer) -> None:
        """Every rank's share, on every rank, in place."""
        array, world = _host(buffer), self.world_size
        places = [[edge // ALIGNMENT for edge in share(array.size, rank, world)] for rank in range(world)]
        # Counted in rows of the layout, so that counts and offsets fit 32 bits.
        row = self._mpi.BYTE.Create_contiguous(ALIGNMENT * array.itemsize).Commit()
        counts, starts = [stop - start for start, stop in places], [start for start, _ in places]
        self._ranks.Allgatherv(self._mpi.IN_PLACE, [array, (counts, starts), row])
        row.Free()

    @mpi_errors
    def start_gather(self, buffer: Buffer, counts: Sequence[int]) -> Request:
        """Begin to gather; a broadcast if one rank has all of it."""
        # MPI may transfer data only while a call waits.
        array, owners = _host(buffer), [rank for rank, count in enumerate(counts) if count]
        if len(owners) == 1:
            requests = [self._ranks.Ibcast(array[at : at + CHUNK], owners[0]) for at in range(0, array.size, CHUNK)]
            return MpiRequest(requests, buffer)
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        return MpiRequest([self._ranks.Iallgatherv(self._mpi.IN_PLACE, [array, (counts, starts)])], buffer)

    @mpi_errors
    def reduce(self, buffer: Buffer, root: int) -> None:
        """Sum on one rank; the order of summation depends only on the world size and the rank."""
        array = _host(buffer)
        for start in range(0, array.size, CHUNK):
            part = array[start : start + CHUNK]
            if self.rank == root:
                self._ranks.Reduce(self._mpi.IN_PLACE, part, op=self._mpi.SUM, root=root)
            else:
                self._ranks.Reduce(part, None, op=self._mpi.SUM, root=root)

    @mpi_errors
    def barrier(self) -> None:
        """Wait for all."""
        self._ranks.Barrier()

    @mpi_errors
    def gather(self, value: Any) -> list[Any] | None:
        """A small plain value of every rank, on rank 0."""
        gathered: list[Any] | None = self._ranks.gather(value, root=0)
        return gathered

    @mpi_errors
    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's small plain value, on every rank."""
        return self._ranks.bcast(value, root=0)

    @mpi_errors
    def subset(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of some of the ranks. Only these ranks call it."""
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks {list(ranks)} are not a subset with rank {self.rank} in it")
        if len(ranks) == 1:
            return SoloCommunicator()
        everyone = self._ranks.Get_group()
        subgroup = everyone.Incl(list(ranks))
        # MPI_Comm_create would be collective over all ranks.
        communicator = self._ranks.Create_group(subgroup)
        everyone.Free()
        subgroup.Free()
        return MpiRanks(self._mpi, communicator)

    @mpi_errors
    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Begin to send; see the protocol."""
        byte = self._mpi.BYTE
        return MpiRequest([self._ranks.Isend([piece, byte], to, tag) for piece in _pieces(buffer)], buffer)

    @mpi_errors
    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Begin to receive; see the protocol."""
        return MpiRequest(
            [self._ranks.Irecv([piece, self._mpi.BYTE], source, tag) for piece in _pieces(buffer)], buffer
        )

    def abort(self, code: int) -> None:
        """End every rank now."""
        self._ranks.Abort(code)

    def close(self) -> None:
        """Free the communicator; all its ranks must call it."""
        self._ranks.Free()


class MpiCommunicator(MpiRanks):
    """MPI_COMM_WORLD."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"no MPI library can be loaded ({str(error).splitlines()[0]})",
                fix="install one beside ortflow: pip install 'ortflow[mpich]'",
            ) from error
        self._start = Start()
        if not MPI.Is_initialized():
            for name, value in SAME_ORDER.items():
                os.environ.setdefault(name, value)
            with fresh_memory():
                MPI.Init_thread(MPI.THREAD_FUNNELED)
        super().__init__(MPI, MPI.COMM_WORLD)
        self.barrier()
        self._start.done()

    def library(self) -> str:
        """Name and version of the MPI library, for the log."""
        return str(self._mpi.Get_library_version()).splitlines()[0].strip("\x00 ")

    def close(self) -> None:
        """Finalize MPI; all ranks must call it."""
        self._mpi.Finalize()
        self._start.close()


@dataclass(frozen=True)
class MpiRequest:
    """The pieces of a message. Holds a reference to the buffer, which MPI uses until they are complete."""

    pieces: Sequence[Any]
    buffer: Buffer

    @mpi_errors
    def wait(self) -> None:
        """See the protocol."""
        for piece in self.pieces:
            piece.Wait()


def _pieces(buffer: Buffer) -> list[npt.NDArray[np.uint8]]:
    """The bytes of a buffer, in pieces that MPI can count; one empty piece if the buffer is empty."""
    data = _host(buffer).view(np.uint8)
    return [data[start : start + CHUNK] for start in range(0, max(1, data.size), CHUNK)]


def _host(buffer: Buffer) -> npt.NDArray[Any]:
    if not isinstance(buffer, HostBuffer):
        raise TypeError("MPI reduces buffers in host memory; use `nccl` or `staged` for a GPU's")
    return buffer.array
