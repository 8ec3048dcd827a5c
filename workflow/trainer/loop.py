"""One step, at once: passes, sums over the ranks, and the update if the host finds the gradient usable.

`queued_loop` queues a step on a GPU as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.buffers import CONTROL_VALUES, SAMPLES, TAIL, StepBuffers, UpdateInputs
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.parameters import Parameters
from ortflow.workflow.trainer.passes import Passes
from ortflow.workflow.trainer.reduction import Reduction
from ortflow.workflow.trainer.thaw import Thaw
from ortflow.workflow.trainer.update import Update
from ortflow.workflow.trainer.work import HostWork
from ortflow.workflow.trainer_protocol.capabilities import StoringNumbers


@dataclass(frozen=True)
class StepParts:
    """What steps are made of on this rank."""

    context: StepContext
    parameters: Parameters
    buffers: StepBuffers
    inputs: UpdateInputs
    passes: Passes
    reduction: Reduction
    update: Update
    thaw: Thaw

    def state(self) -> Buffer:
        """The running statistics after the last update."""
        return self.parameters.here.slice(*self.buffers.state_span)

    def accumulate(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> None:
        """Compute gradients, running statistics and loss of this rank's micro-batches, and sum the gradients."""
        buffers, shard = self.buffers, self.update.memory.gradients
        buffers.statistics.copy_from(self.state())
        if not self.reduction.after_each:
            self.passes.run(batches, seeds)
            self.reduction.sum_gradients()
            return
        shard.part.fill(0)
        for batch, seed in zip(batches, seeds, strict=True):
            self.passes.run([batch], [seed])
            self.reduction.sum_gradients()
            shard.part.add(buffers.gradients.slice(shard.start, shard.stop))

    def numbers(self, request: StepRequest) -> Iterator[tuple[Buffer, npt.NDArray[Any]]]:
        """What the update reads of a step, and where."""
        inputs = self.inputs
        yield inputs.rate, np.array([request.learning_rate], np.float32)
        yield inputs.number, np.array([request.update], np.int64)
        for group, number in inputs.own_numbers.items():
            yield number, np.array([request.update - self.thaw.missed[group]], np.int64)
        if self.context.spec.train.average is not None:
            yield inputs.average_rate, np.array([request.average_rate], np.float32)

    def apply(self) -> None:
        """New parameters and moments, on all ranks."""
        self.reduction.settle()
        self.update.run()
        self.reduction.gather_parameters()
        self.passes.updated()

    def give_memory_back(self) -> None:
        """See `Releasing.give_memory_back`."""
        self.update.give_memory_back()
        # Scaling a gradient that no step has computed makes it NaN, and no step writes the padding.
        self.buffers.gradients.fill(0)

    def close(self) -> None:
        """Release what only steps need."""
        self.passes.close()
        self.update.close()


@dataclass(frozen=True)
class StepRequest:
    """The arguments of `Trainer.step`, and what the loop must call."""

    batches: Sequence[MicroBatch]
    learning_rate: float
    update: int
    seeds: Sequence[int]
    control_values: Sequence[float]
    before_update: Callable[[], None]
    before_wait: Callable[[], None]
    average_rate: float = 0.0
    """See `Paced.at`."""


class Loop(Protocol):
    """The order of the work of a step."""

    begins: bool
    """Whether `begin` may be called before a step has ended."""
    stored: StoringNumbers
    """What a checkpoint stores of it."""

    def step(self, request: StepRequest) -> StepOutcome:
        """See `Trainer.step`."""

    def begin(self, batches: Sequence[MicroBatch], seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """See `BeginningEarly.begin`."""


class ImmediateLoop:
    """See the module."""

    begins = False

    def __init__(self, parts: StepParts, work: HostWork) -> None:
        self._parts, self._work = parts, work
        self.stored: StoringNumbers = parts.thaw

    def step(self, request: StepRequest) -> StepOutcome:
        """See the protocol."""
        parts, controls = self._parts, CONTROL_VALUES + len(request.control_values)
        self.begin(request.batches, request.seeds, request.control_values)
        tail = parts.buffers.tail.read()
        loss_sum, weight, samples = (float(value) for value in tail[:CONTROL_VALUES])
        summed_control_values = tail[CONTROL_VALUES:controls].copy()
        if weight <= 0:
            return StepOutcome(math.nan, math.nan, int(samples), summed_control_values, "no label of the batch counts")
        parts.thaw.silence()
        parts.update.sum_squares()
        loss, norm = loss_sum / weight, self._work.scale(parts.update.scaling.run, weight)
        outcome = StepOutcome(loss, norm, round(samples), summed_control_values, fault_in(loss, norm))
        request.before_update()
        if outcome.skipped is None:
            self._adopt_statistics()
            for buffer, number in parts.numbers(request):
                buffer.write(number)
            parts.thaw.count()
            parts.apply()
        else:
            parts.update.forget_gradients()
        return outcome

    def begin(self, batches: Sequence[MicroBatch], seeds: Sequence[int], control_values: Sequence[float]) -> None:
        """Passes and sums of a step."""
        self._parts.update.begin()
        self._parts.buffers.tail.write(tail_of(batches, control_values))
        self._parts.accumulate(batches, seeds)
        self._parts.reduction.sum_rest()

    def _adopt_statistics(self) -> None:
        state, statistics, ranks = self._parts.state(), self._parts.buffers.statistics, self._parts.context.replicas
        if ranks.world_size == 1:
            state.copy_from(statistics)
        elif state.count:
            state.write(statistics.read() / np.float32(ranks.world_size))


def tail_of(batches: Sequence[MicroBatch], control_values: Sequence[float]) -> np.ndarray:
    """The tail before the passes of a step, which add the loss."""
    tail = np.zeros(TAIL, np.float32)
    tail[SAMPLES] = sum(batch.count for batch in batches)
    tail[CONTROL_VALUES : CONTROL_VALUES + len(control_values)] = control_values
    return tail


def fault_in(loss: float, norm: float) -> str | None:
    """Why a step is skipped; None if it is not."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    return None
