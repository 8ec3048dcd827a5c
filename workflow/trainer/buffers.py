"""The flat buffers of a step.

One buffer holds all parameters followed by the running statistics, one all gradients. In the same memory, the gradients
are followed by the running statistics and a short tail of sums, so that one all-reduce per step carries everything that
the ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import FlatIndex

TAIL = 64
"""Elements of the tail: loss, weight, samples, then the control values."""
SAMPLES, CONTROL_VALUES = 2, 3
"""Places in the tail."""


class StepBuffers:
    """What passes write.

    `index`: positions of the tensors. `gradients`: elements of the gradients that a training graph writes to a flat
    buffer.
    """

    def __init__(self, device: Device, index: FlatIndex, gradients: int) -> None:
        start, end = self.state_span = index.span("state")
        states = end - start
        # Gradients, running statistics and tail in one piece: one collective call per step.
        self.sync = device.allocate(gradients + states + TAIL, np.float32)
        self.gradients = self.sync.slice(0, gradients)
        self.rest = self.sync.slice(gradients, self.sync.count)
        """Statistics and tail."""
        self.statistics = self.sync.slice(gradients, gradients + states)
        self.tail = self.sync.slice(gradients + states, gradients + states + TAIL)
        self.loss = self.tail.slice(0, 2)
        """Loss and weight of the step."""
        # The running statistics that a micro-batch starts from: the state itself changes only with an update.
        self.running = device.allocate(states, np.float32)
        self.sums = device.allocate(2, np.float32)
        """Loss and weight of a micro-batch."""

    def begin_micro_batch(self) -> None:
        """Running statistics are updated by each micro-batch, as in PyTorch."""
        self.running.copy_from(self.statistics)

    def add_loss(self) -> None:
        """Add the loss of a micro-batch to that of the step."""
        self.loss.add(self.sums)


@dataclass(frozen=True)
class UpdateMemory:
    """What the update reads and writes besides the parameters."""

    moments: Mapping[str, Buffer | Shard]
    gradients: Shard
    """Gradients of the elements that this rank updates."""
    scaled: Buffer
    """What is scaled: those, or zeros if this rank updates nothing."""
    scratch: Buffer | None
    """Gradients of further micro-batches; None if they are added otherwise, or if there are none."""


class UpdateInputs:
    """Numbers that each update reads. `frozen`: the groups that are frozen at first."""

    def __init__(self, device: Device, frozen: Iterable[int] = ()) -> None:
        self.rate = device.allocate(1, np.float32)
        self.number = device.allocate(1, np.int64)
        self.average_rate = device.allocate(1, np.float32)
        self.own_numbers = {group: device.allocate(1, np.int64) for group in frozen}
        """The number of a group's update: it counts from 1 behind the thaw."""

    def number_of(self, group: int | None) -> Buffer:
        """The number of the update of a group's segments; None for those that are never frozen."""
        return self.number if group is None else self.own_numbers[group]
