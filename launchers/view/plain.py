"""Shows the run as plain lines: in logs, and if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ortflow.launchers.view.lines import StepLines, format_event
from ortflow.launchers.view.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.steps.run_plan import number_in
from ortflow.workflow.system.streams import print_line


class PlainView:
    """Prints to standard output. If its reader is gone it prints nothing more, and the run continues."""

    def __init__(self, run: RunDir, every_steps: int) -> None:
        self.progress = Progress()
        self._run, self._every_steps = run, every_steps
        self._steps = StepLines()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exception: object) -> None:
        """Print the last step."""
        self._print(self._steps.rest())

    def attempt(self, number: int) -> None:
        """Nothing: the events of an attempt are enough."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Print the event if it is worth a line; steps by time, because a fast run has hundreds in a second."""
        line = take_in(record, self.progress, self._run, self._every_steps)
        self._print(self._steps.pass_on(record, line))

    def message(self, text: str) -> None:
        """Print with the time of day."""
        self._print((*self._steps.rest(), text))

    def _print(self, lines: Iterable[str]) -> None:
        for text in lines:
            print_line(f"{time.strftime('%H:%M:%S')}  {text}")

    def tick(self) -> None:
        """Nothing to redraw."""


def take_in(record: Mapping[str, Any], progress: Progress, run: RunDir, every_steps: int) -> str | None:
    """Update `progress` with an event; returns the line to show, or None."""
    progress.apply(record)
    if record.get("event") == "phase_start" and record.get("phase") == "train":
        progress.total_steps = total_steps(run)
    return format_event(record, progress, every_steps)


def total_steps(run: RunDir) -> int | None:
    """Steps of the whole run, of the plan that configure wrote."""
    return number_in(run.plan, "total_steps")
