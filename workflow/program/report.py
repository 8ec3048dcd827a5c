"""What a program logs: events, and on rank 0 TensorBoard's scalars and the declared length. It only reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.workflow.run.events import EventLog, warn
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import read_whole

if TYPE_CHECKING:
    from ortflow.workflow.run.tensorboard_scalars import ScalarLog

FLOATS = ("loss", "lr", "grad_norm")
COUNTS = ("samples", "tokens", "epoch")
"""Fields of a step's event with a meaning of their own; all others are in `values`."""


class Report:
    """The record of one rank."""

    def __init__(
        self, events: EventLog, run_dir: RunDir, tensorboard: Path | None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._events, self._run_dir, self._clock = events, run_dir, clock
        self._scalars: ScalarLog | None = None
        self._folder, self._purge = tensorboard, 1
        self._step: int | None = None
        self._time = clock.monotonic()

    def begin(self, step: int) -> None:
        """Continue after `step`: records of later steps are removed, because they will be run again."""
        self._events.rewind(step, to_save=True)
        self._purge = step + 1

    def _open(self) -> None:
        """Open the scalars' file with the first values: its format takes a third of a second to import."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            from ortflow.workflow.run.tensorboard_scalars import ScalarLog

            self._scalars = ScalarLog(folder, purge=self._purge)
        except ImportError:
            warn(self._events, "no TensorBoard scalars: tensorboardX is not installed (pip install tensorboardX)")

    def log(self, step: int, values: Mapping[str, Any], total: int | None) -> None:
        """A step's values, as the program logged them."""
        now = self._clock.monotonic()
        steps = 1 if self._step is None else max(1, step - self._step)
        seconds = (now - self._time) / steps
        self._step, self._time = step, now
        self._events.write("step", step=step, **{"seconds": round(seconds, 6), **fields_of(values)})
        self._open()
        if self._scalars is not None:
            numbers = {name: float(value) for name, value in values.items() if is_number(value)}
            if numbers:
                self._scalars.add(step, numbers)

    def total(self, steps: int) -> None:
        """The declared length, for the estimate of the time left."""
        plan = read_plan(self._run_dir)
        if plan.get("total_steps") != steps:
            write_plan(self._run_dir, {**plan, "total_steps": steps})

    def close(self) -> None:
        """Close the scalars' file."""
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a step's event: those with a meaning of their own, and the others in `values`. Pure."""
    fields: dict[str, Any] = {}
    extra_values: dict[str, Any] = {}
    for name, value in values.items():
        if name in FLOATS and is_number(value):
            fields[name] = float(value) if math.isfinite(value) else None
        # Python's True is an int, too.
        elif name in COUNTS and type(value) is int and 0 <= value < 2**63:
            fields[name] = value
        elif name == "seconds" and is_number(value) and math.isfinite(value):
            fields[name] = float(value)
        elif is_number(value):
            extra_values[name] = value if math.isfinite(value) else None
        else:
            extra_values[name] = str(value)
    return {**fields, **({"values": extra_values} if extra_values else {})}


def is_number(value: object) -> bool:
    """Whether a value is a number; a flag is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_plan(run_dir: RunDir) -> dict[str, Any]:
    """plan.json of a program's run; empty if there is none, or if it cannot be read."""
    try:
        plan = json.loads(read_whole(run_dir.plan))
    except (OSError, ValueError, RecursionError):
        return {}
    return plan if isinstance(plan, dict) else {}


def write_plan(run_dir: RunDir, plan: Mapping[str, Any]) -> None:
    """Replace plan.json."""
    write_atomically(run_dir.plan, (json.dumps(dict(plan), indent=2) + "\n").encode())
