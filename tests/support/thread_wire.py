"""Ranks as threads of one process, that send each other messages as a strict MPI does, and meet in collectives.

A send is over only when its message has been received, so that a schedule that no MPI can run does not end here either.
Sums are added in the order of the ranks. Collectives accept buffers of any device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.layout import share

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


class Meeting:
    """Where some of the ranks meet: each brings a value, and takes those of all."""

    def __init__(self, count: int) -> None:
        self._values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The values of all, in the order of the ranks."""
        self._values[rank] = value
        self._barrier.wait(PATIENCE)
        found = list(self._values)
        self._barrier.wait(PATIENCE)
        return found

    def abort(self) -> None:
        """End the waits of the others."""
        self._barrier.abort()


class Threads:
    """The messages of all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[Any, list[_Message]] = defaultdict(list)
        self.places: dict[Any, int] = defaultdict(int)
        self.meetings: dict[Any, Meeting] = {}

    def meeting(self, key: Any, count: int) -> Meeting:
        """The one of this name."""
        with self.lock:
            return self.meetings.setdefault(key, Meeting(count))

    def abort(self) -> None:
        """End all waits for a rank that has failed."""
        with self.lock:
            for meeting in self.meetings.values():
                meeting.abort()

    def message(self, side: str, *link: Any) -> _Message:
        """The next message of a link (communicator, ranks, tag), as its sender or its receiver counts."""
        found = self.messages[link]
        place = self.places[side, link]
        self.places[side, link] += 1
        while len(found) <= place:
            found.append(_Message())
        return found[place]


class ThreadCommunicator(SoloCommunicator):
    """One of them."""

    def __init__(self, threads: Threads, rank: int, count: int, name: Any = "world") -> None:
        self._threads, self._name = threads, name
        self._subsets: dict[tuple[int, ...], int] = defaultdict(int)
        self.rank, self.world_size = rank, count
        self._meeting = threads.meeting(name, count)

    def all_reduce(self, buffer: Buffer) -> None:
        """See the protocol."""
        buffer.write(sum_of(self._meeting.exchange(self.rank, buffer.read())))

    def reduce_scatter(self, buffer: Buffer) -> None:
        """See the protocol."""
        start, stop = share(buffer.count, self.rank, self.world_size)
        arrays = self._meeting.exchange(self.rank, buffer.read())
        buffer.slice(start, stop).write(sum_of([array[start:stop] for array in arrays]))

    def all_gather(self, buffer: Buffer) -> None:
        """See the protocol."""
        start, stop = share(buffer.count, self.rank, self.world_size)
        buffer.write(np.concatenate(self._meeting.exchange(self.rank, buffer.slice(start, stop).read())))

    def barrier(self) -> None:
        """See the protocol."""
        self._meeting.exchange(self.rank, None)

    def gather(self, value: Any) -> Any:
        """See the protocol."""
        found = self._meeting.exchange(self.rank, value)
        return None if self.rank else found

    def broadcast_object(self, value: Any) -> Any:
        """See the protocol."""
        return self._meeting.exchange(self.rank, value)[0]

    def subset(self, ranks: Sequence[int]) -> Any:
        """See the protocol."""
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among {list(ranks)}")
        if len(ranks) == 1:
            return SoloCommunicator()
        # Others may have made other subsets before.
        self._subsets[tuple(ranks)] += 1
        name = (self._name, tuple(ranks), self._subsets[tuple(ranks)])
        return ThreadCommunicator(self._threads, list(ranks).index(self.rank), len(ranks), name)

    def start_send(self, buffer: Buffer, to: int, tag: int = 0) -> Request:
        """See the protocol."""
        with self._threads.lock:
            message = self._threads.message("send", self._name, self.rank, to, tag)
            message.source = buffer
            message.meet()
        return message

    def start_receive(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        """See the protocol."""
        with self._threads.lock:
            message = self._threads.message("receive", self._name, source, self.rank, tag)
            message.target = buffer
            message.meet()
        return message


def sum_of(arrays: Sequence[Any]) -> Any:
    """Added one after the other."""
    total = np.array(arrays[0])
    with np.errstate(invalid="ignore", over="ignore"):
        for array in arrays[1:]:
            total += array
    return total


def on_threads(count: int, program: Callable[[Communicator], T]) -> list[T]:
    """What each of `count` ranks returns; raises what one of them raises."""
    threads, results, errors = Threads(), dict[int, T](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = program(ThreadCommunicator(threads, rank, count))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            threads.abort()

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]
