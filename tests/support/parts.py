"""The parts of a model as threads of this process, whose collectives meet in shared memory: no MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.layout import share

T = TypeVar("T")
WAIT = 60
"""Seconds after which a part that waits for the others gives up."""


class Parts(Communicator):
    """One communicator for all threads of `run`: each is the rank that it was started as."""

    def __init__(self, count: int) -> None:
        self._count, self._here = count, threading.local()
        self._meeting, self._arrays = threading.Barrier(count), [np.empty(0)] * count
        self.calls: list[list[tuple[str, int]]] = [[] for _ in range(count)]
        """Of each part, the collectives that it ran."""
        self.threads: list[set[int]] = [set() for _ in range(count)]
        """Of each part, the threads that its collectives ran on."""

    @property
    def rank(self) -> int:
        """This thread's part."""
        return int(self._here.rank)

    @property
    def world_size(self) -> int:
        """Number of parts."""
        return self._count

    def run(self, function: Callable[[int], T]) -> list[T]:
        """What the function gives for each part, each in a thread of its own."""

        def one(rank: int) -> T:
            self._here.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._meeting.abort()
                raise

        with ThreadPoolExecutor(self._count) as pool:
            futures = [pool.submit(one, rank) for rank in range(self._count)]
            errors = [future.exception() for future in futures]
        # The others only report that the meeting was broken.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def exchange(self, name: str, array: Any) -> list[Any]:
        """Give an array to the other ranks; returns the arrays of all, by rank. `name` is what is recorded."""
        self.calls[self.rank].append((name, array.size))
        self.threads[self.rank].add(threading.get_ident())
        self._arrays[self.rank] = array.copy()
        self._meeting.wait(WAIT)
        found: Sequence[Any] = list(self._arrays)
        self._meeting.wait(WAIT)
        return list(found)

    def all_reduce(self, buffer: Any) -> None:
        """See Communicator."""
        buffer.array[:] = sum(self.exchange("all_reduce", buffer.array))

    def reduce_scatter(self, buffer: Any) -> None:
        """See Communicator."""
        total = sum(self.exchange("reduce_scatter", buffer.array))
        place = slice(*share(buffer.array.size, self.rank, self._count))
        buffer.array[place] = total[place]

    def all_gather(self, buffer: Any) -> None:
        """See Communicator."""
        for rank, array in enumerate(self.exchange("all_gather", buffer.array)):
            place = slice(*share(buffer.array.size, rank, self._count))
            buffer.array[place] = array[place]
