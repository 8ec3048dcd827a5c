"""The seam to other ranks: collectives over flat buffers, and small control messages.

`solo` serves one rank, `mpi` several on the CPU. Control messages always go through MPI.
"""

from __future__ import annotations

from typing import Any, Protocol

from ortflow.workflow.device import Buffer


class Communicator(Protocol):
    """The ranks of one run. Every method is collective: all ranks call it in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, buffer: Buffer) -> None:
        """Sum over the ranks, in place."""

    def barrier(self) -> None:
        """Wait for all."""

    def gather(self, value: Any) -> list[Any] | None:
        """Control message: a small plain value of every rank, on rank 0; None elsewhere."""

    def share(self, value: Any) -> Any:
        """Control message: rank 0's small plain value, on every rank."""

    def abort(self, code: int) -> None:
        """End every rank now, with this exit code."""

    def close(self) -> None:
        """Leave the world in order; every rank must come here."""
