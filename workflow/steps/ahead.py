"""Begins the passes of the next step while the present one is computed, before its loss is known.

The passes change nothing of the state, so that a step still ends with all that it decides: a save, or the end of the
run. Only for trainers that can (`BeginningEarly`). Used by step `train`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ortflow.workflow.data.batches import StepBatch
from ortflow.workflow.run.progress import dropout_seed
from ortflow.workflow.steps.context import Context
from ortflow.workflow.trainer_protocol.capabilities import BeginningEarly


@dataclass(frozen=True)
class Work:
    """What a step computes."""

    batch: StepBatch
    seeds: list[int]
    """One per micro-batch."""
    control_values: list[float]
    saves: int
    """See `Saver.count`."""
    data_seconds: float | None = None
    """The step waited so long for its samples; None if it began early, while the device computed."""


class Ahead:
    """The work of each step of a run, in order.

    `last(step)` returns whether the step after it must not begin early: the run ends there, or an evaluation follows,
    which uses the memory of the passes and may end the run. Equal on all ranks.
    """

    def __init__(self, context: Context, last: Callable[[int], bool]) -> None:
        self._context, self._last = context, last
        self._begun: Work | None = None
        self._since = 0.0
        trainer = context.trainer
        self._trainer = trainer if isinstance(trainer, BeginningEarly) and trainer.begins else None
        if self._trainer is not None:
            self._trainer.before_wait = self._begin

    def take(self) -> Work:
        """The work of the step that follows `progress`."""
        if self._begun is None:
            self._since = self._context.clock.monotonic()
            work = self._next(self._context.progress.step + 1)
            return replace(work, data_seconds=self._context.clock.monotonic() - self._since)
        work, self._begun = self._begun, None
        return work

    def seconds(self) -> float:
        """The time that the present step took; called when its outcome is known. One that began earlier took the time
        since the outcome of the step before.
        """
        now = self._context.clock.monotonic()
        seconds, self._since = now - self._since, now
        return seconds

    def _begin(self) -> None:
        context, step = self._context, self._context.progress.step + 1
        assert self._trainer is not None
        if self._last(step) or context.saver.due_after(step):
            return
        work = self._next(step + 1)
        self._trainer.begin(work.batch.micro_batches, seeds=work.seeds, control_values=work.control_values)
        self._begun = work

    def _next(self, step: int) -> Work:
        context, spec = self._context, self._context.spec
        batch = context.stream.next()
        replica, replicas = spec.grid.place(context.place.rank).data, spec.replicas
        seeds = [dropout_seed(spec.seed, step, micro * replicas + replica) for micro in range(len(batch.micro_batches))]
        control_values = [float(bool(context.stop)), *context.saver.control_values()]
        return Work(batch, seeds, control_values, context.saver.saves)
