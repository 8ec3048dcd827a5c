"""Formats notable events as one line each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ortflow.launchers.view.progress import Progress, metrics

SHOWN_PHASES = ("configure", "runtime", "shard", "check")
"""Phases whose duration is shown; the others have events of their own."""
SHORTEST_CHECK = 0.1
"""A check of fewer seconds was not run, because it had passed before."""
STEP_SECONDS = 1.0
"""Least time between two lines of steps in text that is not redrawn."""


def format_event(record: Mapping[str, Any], progress: Progress, every_steps: int) -> str | None:
    """The line of an event that `progress` was updated with; None if it is not shown."""
    event = str(record.get("event"))
    if event == "step":
        return step_line(progress) if progress.step % every_steps == 0 else None
    format_line = _LINES.get(event)
    return format_line(record) if format_line is not None else None


class StepLines:
    """The lines of steps by time: at most one a second, and the last one before other lines."""

    def __init__(self) -> None:
        self._shown = -math.inf
        self._waiting: str | None = None

    def pass_on(self, record: Mapping[str, Any], line: str | None) -> Iterator[str]:
        """The lines to show now, given the line of an event."""
        if record.get("event") != "step":
            if line is not None:
                yield from self.rest()
                yield line
            return
        moment = float(record.get("time") or 0.0)
        # A clock that was set back must not silence the run.
        if line is not None and not self._shown <= moment < self._shown + STEP_SECONDS:
            self._shown, self._waiting = moment, None
            yield line
        elif line is not None:
            self._waiting = line

    def rest(self) -> Iterator[str]:
        """The newest line that was not shown."""
        if self._waiting is not None:
            yield self._waiting
        self._waiting = None


def step_line(progress: Progress) -> str:
    """The run's progress, in one line."""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    parts = [f"step {progress.step}{total}", *([f"loss {number(progress.loss)}"] if progress.has_loss else [])]
    if progress.lr is not None:
        parts.append(f"lr {progress.lr:.3g}")
    if progress.grad_norm is not None:
        parts.append(f"|g| {progress.grad_norm:.3f}")
    parts += format_speeds(progress)
    if progress.seconds_left:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


def format_speeds(progress: Progress) -> list[str]:
    """Tokens, if the model has them, and samples per second."""
    speeds = ((progress.tokens_per_second, "tokens/s"), (progress.samples_per_second, "samples/s"))
    return [f"{speed:.3g} {unit}" if speed < 10 else f"{speed:,.0f} {unit}" for speed, unit in speeds if speed]


def number(value: float | None) -> str:
    """A loss or metric; events have null if it is not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """A duration for people: 230 us, 41 ms, 4.2 s, 1:05 min, 3:20 h."""
    if 0 < seconds < 0.05:
        return f"{1e3 * seconds:.0f} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.0f} us"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(count: float) -> str:
    """A size for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_evaluation(values: Mapping[str, float | None]) -> str:
    """Loss and metrics of an evaluation."""
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def _phase_end(record: Mapping[str, Any]) -> str | None:
    phase, seconds = record.get("phase"), float(record.get("seconds") or 0.0)
    if phase not in SHOWN_PHASES or (phase == "check" and seconds < SHORTEST_CHECK):
        return None
    return f"{phase}: {duration(seconds)}"


def _evaluation(record: Mapping[str, Any]) -> str:
    weights = record.get("weights")
    of = f" of the {weights.upper()} weights" if isinstance(weights, str) else ""
    return f"evaluation{of} at step {record.get('step')}: {format_evaluation(metrics(record))}"


def _early_stop(record: Mapping[str, Any]) -> str:
    step, metric, best, best_step = (record.get(key) for key in ("step", "metric", "best", "best_step"))
    line = f"stopping early at step {step}: {metric} no longer improves"
    if isinstance(best, (int, float)) and isinstance(best_step, int):
        line += f"; the best was {best:.4f} at step {best_step}, and the export has the parameters of step {step}"
    return line


def _checkpoint(record: Mapping[str, Any]) -> str:
    line = f"checkpoint at step {record.get('step')}"
    if "bytes" in record and "seconds" in record:
        line += f": {size(record['bytes'])} in {duration(record['seconds'])}"
    if "stall_seconds" in record:
        line += f", training paused for {1000 * record['stall_seconds']:.0f} ms"
    return line


def _export(record: Mapping[str, Any]) -> str:
    difference = record.get("max_difference")
    off = "not compared" if difference is None else f"at most {difference:.2g} off the trained model"
    return f"exported {record.get('path')}, {off}"


def _preempted(record: Mapping[str, Any]) -> str:
    step = record.get("step")
    if record.get("saved", True):
        return f"saved at step {step}"
    return f"stopped at step {step}, which could not be saved" if step else "stopped; ortflow has saved nothing"


_LINES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "phase_end": _phase_end,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "export": _export,
    "resume": lambda r: f"resumed at step {r.get('step')}",
    "rewind": lambda r: f"steps {r.get('to_step', 0) + 1} to {r.get('from_step')} are undone and run again",
    "checkpoint_failed": lambda r: f"warning: no checkpoint at step {r.get('step')}: {r.get('reason')}",
    "checkpoint_rejected": lambda r: f"warning: checkpoint {r.get('path')} is skipped: {r.get('reason')}",
    "skipped_step": lambda r: f"warning: step {r.get('step')} was skipped: {r.get('reason')}",
    "early_stop": _early_stop,
    "preempted": _preempted,
    # A program that reports no steps has none.
    "finished": lambda r: f"finished at step {r['step']}" if r.get("step") else "finished",
    "warning": lambda r: f"warning: {r.get('message')}",
}
