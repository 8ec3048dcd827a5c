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
