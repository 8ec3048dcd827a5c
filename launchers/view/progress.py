"""The progress of a run, from rank 0's events. Pure: for the live view, the plain lines and `ortflow status`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WARM_UP = 2
"""First steps of an attempt, which estimates leave out: memory, kernels and caches are prepared in them."""
PACE = 1000
"""Newest steps for the estimate of the time left, with the evaluations and saves between them."""
SPEED = 20
"""Newest steps for the averages of samples and tokens per second."""
_JUMP, _STEPS_OF_JUMP = 60.0, 10
"""A time between two steps that no event explains is not training if it is longer than so many seconds, and than so
many durations of the step."""


@dataclass
class Progress:
    """What is known of a run; None if not reported yet."""

    total_steps: int | None = None
    phase: str | None = None
    """The current one of the seven steps."""
    step: int = 0
    loss: float | None = None
    has_loss: bool = True
    """Whether the newest step reported a loss; a program may log none."""
    lr: float | None = None
    grad_norm: float | None = None
    started: float | None = None
    """Start of the first followed attempt."""
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    saving: bool = False
    best: dict[str, Any] | None = None
    """Metric, value and step of the best checkpoint that is kept, and `path` of its export."""
    evaluation: dict[str, float | None] = field(default_factory=dict)
    """The newest evaluation: loss and metrics; None for those that are not finite."""
    evaluation_step: int | None = None
    skipped: int = 0
    exported: str | None = None
    time: float | None = None
    """Time of the newest event."""
    _steps: int = 0
    """Number of steps in this attempt."""
    _pace: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACE))
    """Step and time at its end, from the last step of the warm-up on."""
    _explained: float = 0.0
    """Seconds of evaluations and saves since the newest step."""
    _speed: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=SPEED))
    """Seconds, samples and tokens of steps."""

    def apply(self, record: Mapping[str, Any]) -> None:
        """Update with one event."""
        self.time = record.get("time", self.time)
        handler = _HANDLERS.get(str(record.get("event")))
        if handler is not None:
            handler(self, record)

    @property
    def seconds_per_step(self) -> float | None:
        """Average time from the end of one step to the end of the next; None during the warm-up."""
        if len(self._pace) < 2:
            return None
        (first, start), (last, end) = self._pace[0], self._pace[-1]
        return (end - start) / (last - first) if last > first else None

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the average step; None if unknown."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    @property
    def samples_per_second(self) -> float | None:
        """Average over the newest steps."""
        return self._per_second(1)

    @property
    def tokens_per_second(self) -> float | None:
        """Average over the newest steps, for models with tokens."""
        return self._per_second(2)

    def _per_second(self, column: int) -> float | None:
        seconds, count = (sum(row[place] for row in self._speed) for place in (0, column))
        return count / seconds if seconds and count else None

    def _attempt_start(self, record: Mapping[str, Any]) -> None:
        # The first steps of an attempt are slow, and waits between attempts are not steps.
        self.phase, self.saving, self._steps = None, False, 0
        self._pace.clear()
        self._speed.clear()
        self.started = record.get("time") if self.started is None else self.started

    def _phase_start(self, record: Mapping[str, Any]) -> None:
        self.phase = record.get("phase")

    def _step(self, record: Mapping[str, Any]) -> None:
        self.step = int(record["step"])
        self.has_loss = "loss" in record
        self.loss, self.lr, self.grad_norm = (record.get(key) for key in ("loss", "lr", "grad_norm"))
        self._steps += 1
        if self._is_clock_set(record):
            self._pace.clear()  # times before and after cannot be compared
        self._explained = 0.0
        if self._steps >= WARM_UP and self.time is not None:
            self._pace.append((self.step, self.time))
        if self._steps == WARM_UP + 1:
            self._speed.clear()
        self._speed.append(tuple(float(record.get(key) or 0) for key in ("seconds", "samples", "tokens")))

    def _is_clock_set(self, step: Mapping[str, Any]) -> bool:
        """Whether the clock was set back or forward, or the machine slept, since the step before."""
        if not self._pace or self.time is None:
            return False
        passed, seconds = self.time - self._pace[-1][1], step.get("seconds")
        if passed < 0 or seconds is None or self.saving:  # a save says what it cost at its end
            return passed < 0
        return passed - self._explained - float(seconds) > max(_JUMP, _STEPS_OF_JUMP * float(seconds))

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        self._explained += float(record.get("seconds") or 0)
        self.evaluation_step = record.get("step")
        self.evaluation = metrics(record)

    def _checkpoint_start(self, record: Mapping[str, Any]) -> None:
        self.saving = True

    def _checkpoint(self, record: Mapping[str, Any]) -> None:
        self._explained += float(record.get("stall_seconds") or 0)
        self.saving, self.checkpoint = False, record.get("step")
        self.best = best(record.get("best"))

    def _checkpoint_failed(self, record: Mapping[str, Any]) -> None:
        self.saving = False

    def _resume(self, record: Mapping[str, Any]) -> None:
        self.step = int(record.get("step", 0))
        self.checkpoint = self.step

    def _rewind(self, record: Mapping[str, Any]) -> None:
        self.step = int(record.get("to_step", self.step))
        if self.best is not None and self.best["step"] > self.step:
            self.best = None

    def _skipped_step(self, record: Mapping[str, Any]) -> None:
        self.skipped += 1

    def _export(self, record: Mapping[str, Any]) -> None:
        self.exported = record.get("path")

    def _export_best(self, record: Mapping[str, Any]) -> None:
        self.best = best(record)

    def _finished(self, record: Mapping[str, Any]) -> None:
        self.phase, self.step = None, int(record.get("step", self.step))


def metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Loss and metrics of an evaluation event, the loss first; None for those that are not finite."""
    about = ("event", "time", "attempt", "rank", "step", "seconds", "samples")
    names = sorted((key for key in record if key not in about), key=lambda key: (key != "loss", key))
    values = {key: record[key] for key in names if record[key] is None or isinstance(record[key], (int, float))}
    return {key: None if value is None else float(value) for key, value in values.items()}


def best(record: Any) -> dict[str, Any] | None:
    """What a record says of the best checkpoint; None if it says nothing."""
    if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
        return None
    return {key: record[key] for key in ("metric", "value", "step", "path") if key in record}


_HANDLERS = {
    "attempt_start": Progress._attempt_start,
    "phase_start": Progress._phase_start,
    "step": Progress._step,
    "evaluation": Progress._evaluation,
    "checkpoint_start": Progress._checkpoint_start,
    "checkpoint": Progress._checkpoint,
    "checkpoint_failed": Progress._checkpoint_failed,
    "resume": Progress._resume,
    "rewind": Progress._rewind,
    "skipped_step": Progress._skipped_step,
    "export": Progress._export,
    "export_best": Progress._export_best,
    "finished": Progress._finished,
}
