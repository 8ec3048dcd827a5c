"""Exchanges the weights and their average, in place and to the bit; called by the trainers around an evaluation."""

from __future__ import annotations

from ortflow.workflow.device import Buffer

PIECE = 1 << 20
"""Elements that are in memory once more meanwhile."""


def exchange(buffer: Buffer, other: Buffer) -> None:
    """Exchange the contents of two buffers of one type and length."""
    for start in range(0, buffer.count, PIECE):
        stop = min(start + PIECE, buffer.count)
        first, second = buffer.slice(start, stop), other.slice(start, stop)
        values = first.read().copy()
        first.copy_from(second)
        second.write(values)
