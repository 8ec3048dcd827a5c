"""The plan of `ortflow prove`: when a run is struck by a signal, and when its ranks wait to be ended.

Written by `launchers.proving`; read by the step `train` of ONNX runs and, in a program, by the library's trace.
Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "ORTFLOW_PROVE"
"""The folder of the plan and the traces, in the environment of ranks."""
_PLAN = "plan.json"
_STRUCK, _DONE = "struck", "done-"


@dataclass(frozen=True)
class Plan:
    """What happens to a run."""

    steps: int
    """After which every rank waits to be ended."""
    signal: str | None = None
    """Sent by the rank to itself in the first attempt; None: nothing happens."""
    step: int = 0
    """The first step after which it may be sent."""
    rank: int = 0

    def write(self, folder: Path) -> None:
        """Leave the plan for the ranks. Raises OSError."""
        (folder / _PLAN).write_text(json.dumps(vars(self)))


class Strike:
    """A rank's part in the plan of a folder. Raises OSError if it cannot be read."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._folder, self._rank = folder, rank
        self.plan = Plan(**json.loads((folder / _PLAN).read_text()))
        self._waits = attempt == 0 and self.plan.signal is not None and self.plan.rank == rank

    def after(self, step: int, *, saved: bool) -> None:
        """Called after every step: sends the signal, once a checkpoint has been committed (`saved`)."""
        if self._waits and saved and step >= self.plan.step:
            self._waits = False
            (self._folder / _STRUCK).write_text(str(step))
            os.kill(os.getpid(), getattr(signal, self.plan.signal or ""))

    def wait_at_the_end(self, step: int) -> None:
        """After the plan's last step, report it and wait: the ranks are ended together."""
        if step >= self.plan.steps:
            (self._folder / f"{_DONE}{self._rank:04d}").touch()
            while True:
                time.sleep(60)


def strike_of(rank: int, attempt: int) -> Strike | None:
    """This rank's part in the plan that the environment names; None if nothing is proven. Raises OSError."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Strike(Path(folder), rank, attempt) if folder else None


def struck_at(folder: Path) -> int | None:
    """The step after which the signal was sent; None if it was not."""
    try:
        return int((folder / _STRUCK).read_text())
    except (OSError, ValueError):
        return None


def waiting(folder: Path) -> int:
    """The number of ranks that have done the plan's last step and wait."""
    return sum(1 for _ in folder.glob(f"{_DONE}*"))
