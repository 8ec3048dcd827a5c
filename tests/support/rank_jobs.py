"""A job for the tests of `ortflow.workflow.inference.ranks`: it must be importable in the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from ortflow.workflow.errors import UserError


@dataclass(frozen=True)
class Counting:
    """Items that are their own numbers and sizes; at item `wrong` the rank reports, and at item `dies` it is killed."""

    count: int
    wrong: int = -1
    dies: int = -1
    size: int = 0

    def items(self, rank: int, world_size: int, threads: int) -> Iterator[tuple[int, int, bytes]]:
        assert threads >= 1
        for number in range(rank, self.count, world_size):
            print("what a job prints is not among its items")
            if number == self.wrong:
                raise UserError("is wrong", where=f"item {number}", fix="correct it")
            if number == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, rank, bytes(self.size)
