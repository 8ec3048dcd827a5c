"""A single rank: collectives do nothing."""

from __future__ import annotations

from typing import Any

from ortflow.workflow.device import Buffer


class SoloCommunicator:
    """Communicator of a run with one rank; needs no MPI."""

    rank = 0
    world_size = 1

    def all_reduce(self, buffer: Buffer) -> None:
        """The sum over one rank."""

    def reduce_scatter(self, buffer: Buffer) -> None:
        """The sum over one rank, whose share is the whole."""

    def all_gather(self, buffer: Buffer) -> None:
        """Does nothing: the share is the whole buffer."""

    def barrier(self) -> None:
        """Returns immediately."""

    def gather(self, value: Any) -> list[Any]:
        """This rank's value."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """This rank's value."""
        return value

    def abort(self, code: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Nothing to close."""
