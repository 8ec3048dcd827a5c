"""A single rank: collectives do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.device import Buffer


@dataclass(frozen=True)
class _Done:
    """A request that needs no message."""

    def wait(self) -> None:
        """Returns immediately."""


class SoloCommunicator(Communicator):
    """Communicator of a run with one rank; needs no MPI."""

    rank = 0
    world_size = 1

    def all_reduce(self, buffer: Buffer) -> None:
        """The sum over one rank."""

    def reduce_scatter(self, buffer: Buffer) -> None:
        """The sum over one rank, whose share is the whole."""

    def all_gather(self, buffer: Buffer) -> None:
        """Does nothing: this rank's share is the whole buffer."""

    def start_gather(self, buffer: Buffer, counts: Sequence[int]) -> Request:
        """Does nothing: this rank's part is the whole buffer."""
        return _Done()

    def reduce(self, buffer: Buffer, root: int) -> None:
        """The sum over one rank."""

    def subset(self, ranks: Sequence[int]) -> SoloCommunicator:
        """Another communicator of this one rank."""
        if list(ranks) != [0]:
            raise ValueError(f"ranks {list(ranks)} are not a subset of rank 0")
        return SoloCommunicator()

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Raises ValueError: there is no other rank."""
        raise ValueError(f"rank {to} does not exist: this is the only rank")

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Raises ValueError: there is no other rank."""
        raise ValueError(f"rank {source} does not exist: this is the only rank")

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
