"""Communication between ranks: collectives over flat buffers, and small control messages.

`solo` is for one rank, `mpi` for several on CPUs, `nccl` and `staged` for GPUs. Control messages always use MPI.
"""

from __future__ import annotations

from typing import Any, Protocol

from ortflow.workflow.device import Buffer


class Communicator(Protocol):
    """The ranks of one run.

    Every method except `abort` is collective: all ranks must call it in the same order.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, buffer: Buffer) -> None:
        """Replace the buffer by its sum over the ranks.

        Parameters
        ----------
        buffer
            Equal length and type on all ranks; changed in place.
        """

    def reduce_scatter(self, buffer: Buffer) -> None:
        """Replace this rank's share of the buffer by its sum over the ranks.

        Parameters
        ----------
        buffer
            Equal length and type on all ranks. Only this rank's `layout.share` is changed.
        """

    def all_gather(self, buffer: Buffer) -> None:
        """Replace the buffer by the shares of all ranks.

        Parameters
        ----------
        buffer
            Contains this rank's `layout.share`; changed in place. Its length must be a multiple of `layout.ALIGNMENT`,
            as that of all trained parameters is.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called it."""

    def gather(self, value: Any) -> list[Any] | None:
        """Send a small plain value to rank 0 (control message).

        Returns
        -------
        list or None
            The values in the order of the ranks on rank 0; None on the others.
        """

    def broadcast_object(self, value: Any) -> Any:
        """Send rank 0's small plain value to all ranks (control message).

        Returns
        -------
        Any
            Rank 0's value; the argument is ignored on the other ranks.
        """

    def abort(self, code: int) -> None:
        """End every rank immediately with this exit code."""

    def close(self) -> None:
        """Disconnect; all ranks must call it."""
