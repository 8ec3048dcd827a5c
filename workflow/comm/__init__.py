"""Communication between ranks: collectives and messages over flat buffers, and small control messages.

`solo` is for one rank, `mpi` for several on CPUs, `nccl` and `staged` for GPUs. Control messages always use MPI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from ortflow.workflow.device import Buffer

TAGS = (1 << 15) - 1
"""Tags of messages are below this number: every MPI allows it as a tag, and sums use it themselves."""

T = TypeVar("T")
Link = tuple[int, int, int]
"""Sending rank, receiving rank and tag of messages."""


class Request(Protocol):
    """A message in progress."""

    def wait(self) -> None:
        """Block until the buffer may be used again: what it held has been sent, or what was expected has arrived.

        For a buffer on a device it is enough if work that is queued on the device from now on waits for that.
        """


class Communicator(Protocol):
    """The ranks of one run, or a subset of them.

    Every method except `abort` and those of messages is collective: all its ranks must call it in the same order.
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
            Contains this rank's `layout.share`; changed in place. Its length must be a multiple of `layout.ALIGNMENT`.
            Flat buffers of trained parameters satisfy this.
        """

    def start_gather(self, buffer: Buffer, counts: Sequence[int]) -> Request:
        """Begin to fill the buffer with consecutive parts of all ranks.

        Parameters
        ----------
        buffer
            Contains this rank's part in its place; must not be used until the request has been waited for.
        counts
            Elements of each rank's part, in the order of the ranks; together those of the buffer.
        """

    def reduce(self, buffer: Buffer, root: int) -> None:
        """Replace the buffer of rank `root` by its sum over the ranks.

        Parameters
        ----------
        buffer
            Equal length and type on all ranks; unchanged on the other ranks.
        root
            A rank.
        """

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of some of the ranks; called by these ranks alone, in the same order on each.

        Parameters
        ----------
        ranks
            This communicator's ranks, each once and this rank among them. In the new one they count from 0, in this
            order.

        Raises
        ------
        ValueError
            If this rank is not among them, or one is named twice.
        """

    def connect_links(self, links: Iterable[Link], *, during_passes: bool = False) -> None:
        """Prepare for messages between devices, which otherwise may pass through host memory.

        Parameters
        ----------
        links
            Those of this rank, each of which the other rank names too; others are ignored. Both ranks must call it
            before the first such message.
        during_passes
            Whether the devices compute while messages wait and pass: these then use few of their processors.
        """
        return

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """Begin to send a buffer to another rank.

        Parameters
        ----------
        buffer
            Must not change until the request has been waited for.
        to
            Receiving rank of this communicator.
        tag
            From 0 to `TAGS` - 1. A receive matches only messages with its tag. Messages between the same two ranks with
            the same tag arrive in the order in which they were sent.
        """

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """Begin to receive a message from rank `source`.

        Parameters
        ----------
        buffer
            Has the sender's type and length; filled once the request has been waited for.
        source
            Sending rank of this communicator.
        tag
            The tag of the send.
        """

    def send(self, buffer: Buffer, to: int, tag: int = 0) -> None:
        """Send a buffer to another rank. May block until that rank receives it."""
        self.start_send(buffer, to, tag).wait()

    def receive(self, buffer: Buffer, source: int, tag: int = 0) -> None:
        """Receive a message with this tag from rank `source`."""
        self.start_receive(buffer, source, tag).wait()

    def barrier(self) -> None:
        """Block until all ranks have called it."""

    def gather(self, value: Any) -> list[Any] | None:
        """Gather a small plain value from every rank on rank 0 (control message).

        Returns
        -------
        list or None
            The values in the order of the ranks on rank 0; None on the others.
        """

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast rank 0's small plain value to all ranks (control message).

        Returns
        -------
        Any
            Rank 0's value; the argument is ignored on the other ranks.
        """

    def abort(self, code: int) -> None:
        """End every rank immediately with this exit code."""

    def close(self) -> None:
        """Disconnect; all ranks must call it."""


def first_of(ranks: Communicator, value: T | None) -> T | None:
    """What the first rank gives that gives anything, such as an error, on every rank; None if none does. Collective."""
    values = ranks.gather(value)
    first: T | None = ranks.broadcast_object(next(filter(None, values), None) if values else None)
    return first
