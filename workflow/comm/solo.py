"""One rank alone: every collective is already done."""

from __future__ import annotations

from typing import Any

from ortflow.workflow.device import Buffer


class SoloCommunicator:
    """The world of a run with one rank; needs no MPI."""

    rank = 0
    world_size = 1

    def all_reduce(self, buffer: Buffer) -> None:
        """The sum over one rank."""

    def reduce_scatter(self, buffer: Buffer, out: Buffer) -> None:
        """The whole is this rank's share."""
        out.write(buffer.read())

    def all_gather(self, buffer: Buffer, out: Buffer) -> None:
        """This rank's share is the whole."""
        out.write(buffer.read())

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """The root has it."""

    def send(self, buffer: Buffer, to: int) -> None:
        """There is nobody."""
        raise ValueError(f"rank {to} does not exist in a world of 1")

    def receive(self, buffer: Buffer, source: int) -> None:
        """There is nobody."""
        raise ValueError(f"rank {source} does not exist in a world of 1")

    def barrier(self) -> None:
        """Nobody to wait for."""

    def gather(self, value: Any) -> list[Any]:
        """This rank's value."""
        return [value]

    def share(self, value: Any) -> Any:
        """This rank's value."""
        return value

    def abort(self, code: int) -> None:
        """Nobody else to end."""

    def close(self) -> None:
        """Nothing to close."""
