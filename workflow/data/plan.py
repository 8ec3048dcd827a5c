"""Which places of which epoch a step, a micro-step and a rank take: pure arithmetic.

Called by the batches and by whoever needs to know how many steps an epoch has. A global batch is a run of consecutive
places of the epoch's order, so a position says all there is to say, and the number of ranks may change at any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LastBatch = Literal["drop", "keep", "pad"]


@dataclass(frozen=True, order=True)
class Position:
    """Where training stands: the first `sample` places of the order of `epoch` (from 0) are done."""

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Step:
    """One global batch: places [start, stop) of the epoch's order, and the position after it."""

    epoch: int
    start: int
    stop: int
    next: Position

    @property
    def epoch_end(self) -> bool:
        """True where the next step begins another epoch."""
        return self.next.epoch > self.epoch


@dataclass(frozen=True)
class Plan:
    """How `count` samples an epoch become global batches of micro_batch x accumulation x world_size."""

    count: int
    micro_batch: int
    accumulation: int
    world_size: int
    last_batch: LastBatch

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks and micro-steps."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch; 0 where `drop` leaves none."""
        whole, rest = divmod(self.count, self.global_batch)
        return whole + (rest > 0 and self.last_batch != "drop")

    def step(self, position: Position) -> Step:
        """The step that begins at a position, which may be one where `drop` leaves out what is left of the epoch."""
        epoch, start = position.epoch, position.sample
        if not self._begins(start):
            epoch, start = epoch + 1, 0
        stop = min(start + self.global_batch, self.count)
        following = Position(epoch, stop) if self._begins(stop) else Position(epoch + 1, 0)
        return Step(epoch, start, stop, following)

    def _begins(self, start: int) -> bool:
        needed = self.global_batch if self.last_batch == "drop" else 1
        return start + needed <= self.count

    def places(self, step: Step, micro_step: int, rank: int) -> tuple[int, int]:
        """Places [first, last) that a rank takes in a micro-step; none where an epoch's rest gives it none."""
        first = step.start + (micro_step * self.world_size + rank) * self.micro_batch
        return min(first, step.stop), min(first + self.micro_batch, step.stop)
