"""The positions of an epoch that a step, a micro-step and a rank use: pure arithmetic.

Called by the batches, and to count the steps of an epoch. A global batch is a range of consecutive positions of the
epoch's order, so a position determines everything that follows, and the number of ranks may change at any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LastBatch = Literal["drop", "keep", "pad"]
_DROPS: dict[LastBatch, bool] = {"drop": True, "keep": False, "pad": False}


@dataclass(frozen=True, order=True)
class Position:
    """Progress through the data: the first `sample` positions of the order of `epoch` (from 0) are done."""

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Step:
    """One global batch: positions [start, stop) of the epoch's order, and the position after it."""

    epoch: int
    start: int
    stop: int
    next: Position

    @property
    def epoch_end(self) -> bool:
        """Whether the next step begins another epoch."""
        return self.next.epoch > self.epoch


@dataclass(frozen=True)
class Plan:
    """How `count` samples per epoch become global batches of micro_batch x accumulation x world_size."""

    count: int
    micro_batch: int
    accumulation: int
    world_size: int
    last_batch: LastBatch

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all ranks and micro-steps."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def _drops(self) -> bool:
        """Whether the samples behind the last whole step of an epoch are not used."""
        return _DROPS[self.last_batch]

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch; 0 if `drop` leaves none."""
        full_steps, rest = divmod(self.count, self.global_batch)
        return full_steps + (rest > 0 and not self._drops)

    def step(self, position: Position) -> Step:
        """The step that begins at a position, which may be in the rest of an epoch that `drop` skips."""
        epoch, start = position.epoch, position.sample
        if not self._begins(start):
            epoch, start = epoch + 1, 0
        stop = min(start + self.global_batch, self.count)
        following = Position(epoch, stop) if self._begins(stop) else Position(epoch + 1, 0)
        return Step(epoch, start, stop, following)

    def _begins(self, start: int) -> bool:
        minimum = self.global_batch if self._drops else 1
        return start + minimum <= self.count

    def places(self, step: Step, micro_step: int, rank: int) -> tuple[int, int]:
        """Positions [first, last) for a rank in a micro-step; empty if too few samples are left in the epoch."""
        first = step.start + (micro_step * self.world_size + rank) * self.micro_batch
        return min(first, step.stop), min(first + self.micro_batch, step.stop)
