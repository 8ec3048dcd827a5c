"""The run as plain lines: where there is no terminal, in logs, and beneath the live view."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from ortflow.launchers.lines import line
from ortflow.launchers.progress import Progress
from ortflow.workflow.rundir import RunDir


class PlainView:
    """Prints to standard output; goes silent, and lets the run go on, when nobody reads it any more."""

    def __init__(self, run: RunDir, every_steps: int) -> None:
        self.progress = Progress()
        self._run, self._every_steps = run, every_steps

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing stands on the screen."""

    def attempt(self, number: int) -> None:
        """Nothing: what an attempt does tells itself."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Print the event if it is worth a line."""
        told = take_in(record, self.progress, self._run, self._every_steps)
        if told is not None:
            self.say(told)

    def say(self, text: str) -> None:
        """Print with the time of day."""
        try:
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
        except BrokenPipeError:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, sys.stdout.fileno())
            os.close(silence)

    def tick(self) -> None:
        """Nothing moves."""


def take_in(record: Mapping[str, Any], progress: Progress, run: RunDir, every_steps: int) -> str | None:
    """Fold an event into `progress`; its line, if it is worth one."""
    progress.apply(record)
    if record.get("event") == "phase_start" and record.get("phase") == "train":
        progress.total_steps = total_steps(run)
    return line(record, progress, every_steps)


def total_steps(run: RunDir) -> int | None:
    """Steps of the whole run, of the plan that configure wrote."""
    try:
        plan = json.loads(run.plan.read_text())
    except (OSError, ValueError):
        return None
    steps = plan.get("total_steps")
    return int(steps) if isinstance(steps, int) else None
