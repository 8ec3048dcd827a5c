"""Exchanges the weights and their average, in place and to the bit; called by the trainers around an evaluation."""

from __future__ import annotations

from ortflow.workflow.device import Buffer, Device

PIECE = 1 << 20
"""Elements that are in memory once more meanwhile."""


def exchange(device: Device, buffer: Buffer, other: Buffer) -> None:
    """Exchange the contents of two buffers of one type and length."""
    scratch = device.allocate(min(PIECE, buffer.count), buffer.dtype)
    for start in range(0, buffer.count, PIECE):
        stop = min(start + PIECE, buffer.count)
        first, second, kept = buffer.slice(start, stop), other.slice(start, stop), scratch.slice(0, stop - start)
        kept.copy_from(first)
        first.copy_from(second)
        second.copy_from(kept)
    # What is queued may still read it.
    device.synchronize()
