"""The engine runs the seven steps in order, times each, and records when each starts and ends.

Every rank runs the same steps. A step either runs once in its place, or also recurs while `train` runs (`checkpoint`,
`monitor`); the total time of a recurring step is reported at its end. The engine depends on no graph, scheduler or file
except the event log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ortflow.workflow.run.events import EventLog
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

C = TypeVar("C")


@dataclass(frozen=True)
class Step(Generic[C]):
    """One of the seven steps; `run` does its work in its place in the order."""

    name: str
    run: Callable[[C], None]
    recurs: bool = False
    """Whether it also runs inside another step, which enters it through `Engine.within`."""


@dataclass
class Timing:
    """Seconds spent in a step, and number of entries."""

    seconds: float = 0.0
    entered: int = 0


@dataclass
class Engine(Generic[C]):
    """Runs `steps` with a context; after each it calls `between`, where ranks agree to continue."""

    steps: Sequence[Step[C]]
    events: EventLog
    between: Callable[[str], None] = lambda name: None
    clock: Clock = SYSTEM_CLOCK
    timings: dict[str, Timing] = field(default_factory=dict)
    """By name of the step."""
    observer: Callable[[str, float, float], None] | None = None
    """Called with what ended, its start and its end on the clock, while a profile is recorded."""
    _apart: float = 0.0
    """Seconds within the current step that are timed as phases of their own."""

    def run(self, context: C) -> None:
        """Run all steps in order. An exception ends the run; the step's event then has its duration."""
        for step in self.steps:
            self.events.write("phase_start", phase=step.name)
            try:
                with self.within(step.name):
                    step.run(context)
            finally:
                timing = self.timings[step.name]
                recurring = {"times": timing.entered} if step.recurs else {}
                self.events.write("phase_end", phase=step.name, seconds=round(timing.seconds, 6), **recurring)
            self.between(step.name)

    @contextmanager
    def apart(self, name: str, step: str) -> Iterator[None]:
        """Time a long part of `step`, which runs once, as a phase of its own; the time of the step leaves it out."""
        self.events.write("phase_start", phase=name)
        start = self.clock.monotonic()
        try:
            yield
        finally:
            seconds = self.clock.monotonic() - start
            self._apart += seconds
            self.events.write("phase_end", phase=name, seconds=round(seconds, 6))
        self.events.write("phase_start", phase=step)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Time one entry of a step; recurring steps are entered many times."""
        timing = self.timings.setdefault(name, Timing())
        timing.entered += 1
        start, before = self.clock.monotonic(), self._apart
        try:
            yield
        finally:
            end = self.clock.monotonic()
            timing.seconds += end - start - (self._apart - before)
            if self.observer is not None:
                self.observer(name, start, end)
