"""Collectives and messages over buffers on a GPU, staged in host memory: copied down, reduced by MPI, copied up.

For cases that NCCL does not support: ranks that share a GPU, and machines without the library. Control messages use MPI
directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import share


@dataclass(frozen=True)
class _Arrival:
    """A message being received into host memory, and the device buffer that it is for."""

    below: Request
    host: HostBuffer
    buffer: Buffer

    def wait(self) -> None:
        """See the protocol."""
        self.below.wait()
        self.buffer.write(self.host.array)


class StagedCommunicator(Communicator):
    """The ranks of `below`, for buffers on any device."""

    def __init__(self, below: Communicator) -> None:
        self.below = below

    @property
    def rank(self) -> int:
        """This rank."""
        return self.below.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.below.world_size

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place."""
        host = HostBuffer(buffer.read())
        self.below.all_reduce(host)
        buffer.write(host.array)

    def reduce_scatter(self, buffer: Buffer) -> None:
        """Sum over the ranks of this rank's share, in place."""
        host = HostBuffer(buffer.read())
        self.below.reduce_scatter(host)
        start, stop = share(buffer.count, self.rank, self.world_size)
        buffer.slice(start, stop).write(host.array[start:stop])

    def all_gather(self, buffer: Buffer) -> None:
        """Every rank's share, on every rank, in place."""
        host = HostBuffer(buffer.read())
        self.below.all_gather(host)
        buffer.write(host.array)

    def start_gather(self, buffer: Buffer, counts: Sequence[int]) -> Request:
        """Copy to the host, and begin to gather in the copy."""
        host = HostBuffer(buffer.read())
        return _Arrival(self.below.start_gather(host, counts), host, buffer)

    def reduce(self, buffer: Buffer, root: int) -> None:
        """Sum over the ranks, on one of them."""
        host = HostBuffer(buffer.read())
        self.below.reduce(host, root)
        if self.rank == root:
            buffer.write(host.array)

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of some of the ranks, staged in host memory as well."""
        return StagedCommunicator(self.below.subset(ranks))

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Copy to the host, and begin to send the copy."""
        return self.below.start_send(HostBuffer(buffer.read()), to, tag)

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Begin to receive; `wait` copies to the device."""
        host = HostBuffer(np.empty(buffer.count, buffer.dtype))
        return _Arrival(self.below.start_receive(host, source, tag), host, buffer)

    def barrier(self) -> None:
        """Wait for all."""
        self.below.barrier()

    def gather(self, value: Any) -> list[Any] | None:
        """A small plain value of every rank, on rank 0."""
        return self.below.gather(value)

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's small plain value, on every rank."""
        return self.below.broadcast_object(value)

    def abort(self, code: int) -> None:
        """End every rank now."""
        self.below.abort(code)

    def close(self) -> None:
        """Disconnect."""
        self.below.close()
