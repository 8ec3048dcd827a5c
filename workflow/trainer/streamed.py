"""Moments in pinned host memory, which pass through the GPU piece by piece while the update runs.

A piece is copied to the GPU, updated there by the same kernels as state that stays there, and copied back. Copies in
both directions and the updates overlap: each slot of GPU memory holds one piece, and the first pieces arrive during
the backward pass. Used by `streamed_moments`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import TO_DEVICE, TO_HOST
from ortflow.workflow.device.pinned import PinnedBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.optim.segments import Piece

SLOTS = 3
"""One piece arrives, one is updated, one leaves."""
LARGEST = 1 << 23
"""Elements of a piece: 32 MB of each moment, which a copy needs to run at the full rate of the bus."""


def groups_of(pieces: Sequence[Piece], *, uncut: bool, largest: int = LARGEST) -> list[list[Piece]]:
    """Consecutive pieces of at most `largest` elements together; with `uncut`, none is cut, however long. Pure."""
    if not uncut:
        starts = ((piece, start) for piece in pieces for start in range(piece.start, piece.stop, largest))
        return [[replace(piece, start=start, stop=min(start + largest, piece.stop))] for piece, start in starts]
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and piece.stop - groups[-1][0].start <= largest:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def staging_of(groups: Sequence[Sequence[Piece]], moments: int) -> int:
    """Elements of GPU memory through which moments pass."""
    longest = max((group[-1].stop - group[0].start for group in groups), default=0)
    return min(SLOTS, len(groups)) * longest * moments


class Streamed:
    """The moments of a rank, by name.

    `span`: first and last element of the rank's share, and the elements of all shares. `groups`: the pieces that pass
    together.
    """

    def __init__(
        self,
        device: CudaDevice,
        names: Sequence[str],
        span: tuple[int, int, int],
        groups: Sequence[Sequence[Piece]],
    ) -> None:
        start, stop, self._count = span
        self._device = device
        self._host = {name: PinnedBuffer.zeros(device, stop - start, np.float32) for name in names}
        self.moments = {name: Shard(moment, start, self._count) for name, moment in self._host.items()}
        self.spans = [(group[0].start, group[-1].stop) for group in groups]
        longest = max((last - first for first, last in self.spans), default=0)
        self._slots = [
            {name: device.allocate(longest, np.float32) for name in names} for _ in range(min(SLOTS, len(groups)))
        ]
        runtime = device.here()
        self._arriving, self._leaving = runtime.stream(), runtime.stream()
        self._ready, self._done, self._free = ([runtime.event() for _ in self._slots] for _ in range(3))
        self._fetched = 0

    @property
    def staging(self) -> int:
        """Bytes of GPU memory."""
        return sum(buffer.size for slot in self._slots for buffer in slot.values())

    @property
    def size(self) -> int:
        """Bytes of host memory."""
        return sum(moment.count * moment.dtype.itemsize for moment in self._host.values())

    def here(self, number: int) -> Mapping[str, Shard]:
        """Where on the GPU the moments of a group are while it is updated."""
        first, last = self.spans[number]
        slot = self._slots[number % len(self._slots)]
        return {name: Shard(slot[name].slice(0, last - first), first, self._count) for name in slot}

    def begin(self) -> None:
        """Fetch the first groups, concurrently with the work queued from now on; called once per step."""
        self._fetched = 0
        for _ in self._slots:
            self._fetch()

    def run(self, updates: Sequence[Callable[[], None]]) -> None:
        """Queue the update of every group, in order, behind the work queued so far."""
        runtime, stream = self._device.here(), self._device.stream
        for number, update in enumerate(updates):
            slot = number % len(self._slots)
            runtime.after(stream, self._ready[slot])
            update()
            runtime.record(self._done[slot], stream)
            runtime.after(self._leaving, self._done[slot])
            self._copy(number, TO_HOST, self._leaving)
            runtime.record(self._free[slot], self._leaving)
            self._fetch()
        for moment in self._host.values():
            moment.copied(self._leaving)

    def _fetch(self) -> None:
        if self._fetched < len(self.spans):
            runtime, slot = self._device.here(), self._fetched % len(self._slots)
            # The slot is free when its last piece has left, and so have all before that one.
            runtime.after(self._arriving, self._free[slot])
            self._copy(self._fetched, TO_DEVICE, self._arriving)
            runtime.record(self._ready[slot], self._arriving)
            self._fetched += 1

    def _copy(self, number: int, direction: int, stream: int) -> None:
        first, last = self.spans[number]
        for name, moment in self._slots[number % len(self._slots)].items():
            host = self.moments[name].slice(first, last)
            target, source = (
                (moment.pointer, host.pointer) if direction == TO_DEVICE else (host.pointer, moment.pointer)
            )
            self._device.here().copy(target, source, 4 * (last - first), direction, stream)

    def seconds(self) -> float:
        """Measured time of copying all moments to the GPU and back, without updates; values stay as they are."""
        seconds = 0.0
        for _ in range(2):
            self._device.synchronize()
            begun = time.perf_counter()
            self.begin()
            self.run([_nothing] * len(self.spans))
            self._device.wait(lambda: self._device.here().wait(self._leaving))
            seconds = time.perf_counter() - begun
        return seconds


def _nothing() -> None:
    """In place of an update."""
