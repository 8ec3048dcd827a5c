"""Ranks as threads of one process, that send each other messages as a strict MPI does.

A send is over only when its message has been received, so that a schedule that no MPI can run does not end here either.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds after which a wait is taken for a deadlock."""


class _Message:
    """A send and a receive that meet."""

    def __init__(self) -> None:
        self.source: Buffer | None = None
        self.target: Buffer | None = None
        self.done = threading.Event()

    def meet(self) -> None:
        if self.source is not None and self.target is not None:
            assert (self.source.count, self.source.dtype) == (self.target.count, self.target.dtype)
            self.target.write(self.source.read())
            self.done.set()

    def wait(self) -> None:
        if not self.done.wait(PATIENCE):
            raise TimeoutError("a message was never received" if self.target is None else "a message was never sent")


class Threads:
    """The messages of all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[tuple[int, int, int], list[_Message]] = defaultdict(list)
        self.places: dict[tuple[str, int, int, int], int] = defaultdict(int)

    def message(self, side: str, source: int, to: int, tag: int) -> _Message:
        """The next message of a link, as its sender or its receiver counts."""
        found = self.messages[source, to, tag]
        place = self.places[side, source, to, tag]
        self.places[side, source, to, tag] += 1
        while len(found) <= place:
            found.append(_Message())
        return found[place]


class ThreadCommunicator(SoloCommunicator):
    """One of them."""

    def __init__(self, threads: Threads, rank: int, count: int) -> None:
        self._threads = threads
        self.rank, self.world_size = rank, count

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """See the protocol."""
        with self._threads.lock:
            message = self._threads.message("send", self.rank, to, tag)
            message.source = buffer
            message.meet()
        return message

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """See the protocol."""
        with self._threads.lock:
            message = self._threads.message("receive", source, self.rank, tag)
            message.target = buffer
            message.meet()
        return message


def on_threads(count: int, program: Callable[[Communicator], T]) -> list[T]:
    """What each of `count` ranks returns; raises what one of them raises."""
    threads, results, errors = Threads(), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadCommunicator(threads, rank, count))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]
