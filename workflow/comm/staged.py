"""Collectives over buffers on a GPU by way of host memory: copied down, reduced by MPI, copied up.

Serves where NCCL cannot: ranks that share a GPU, machines without the library. Control messages go straight to MPI.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer


class StagedCommunicator:
    """The ranks of `below`, for buffers of any device."""

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
        host = _copy(buffer)
        self.below.all_reduce(host)
        buffer.write(host.array)

    def reduce_scatter(self, buffer: Buffer, out: Buffer) -> None:
        """Sum over the ranks; each keeps its equal share."""
        share = _empty(out)
        self.below.reduce_scatter(_copy(buffer), share)
        out.write(share.array)

    def all_gather(self, buffer: Buffer, out: Buffer) -> None:
        """Equal shares, one after the other."""
        whole = _empty(out)
        self.below.all_gather(_copy(buffer), whole)
        out.write(whole.array)

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """The root's values, everywhere."""
        host = _copy(buffer)
        self.below.broadcast(host, root)
        buffer.write(host.array)

    def send(self, buffer: Buffer, to: int) -> None:
        """To one rank, which calls `receive`."""
        self.below.send(_copy(buffer), to)

    def receive(self, buffer: Buffer, source: int) -> None:
        """From one rank, which calls `send`."""
        host = _empty(buffer)
        self.below.receive(host, source)
        buffer.write(host.array)

    def barrier(self) -> None:
        """Wait for all."""
        self.below.barrier()

    def gather(self, value: Any) -> list[Any] | None:
        """A small plain value of every rank, on rank 0."""
        return self.below.gather(value)

    def share(self, value: Any) -> Any:
        """Rank 0's small plain value, on every rank."""
        return self.below.share(value)

    def abort(self, code: int) -> None:
        """End every rank now."""
        self.below.abort(code)

    def close(self) -> None:
        """Leave the world in order."""
        self.below.close()


def _copy(buffer: Buffer) -> HostBuffer:
    return HostBuffer(buffer.read())


def _empty(buffer: Buffer) -> HostBuffer:
    return HostBuffer(np.empty(buffer.count, buffer.dtype))
