"""A rank's log as lines, also while it is written. Read only."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from ortflow.launchers.tail import LineTail
from ortflow.workflow.errors import UserError
from ortflow.workflow.rundir import RunDir

PERIOD = 0.2


def log_lines(run: RunDir, *, attempt: int | None, rank: int, active: Callable[[], bool]) -> Iterator[str]:
    """Lines of the log of `attempt` (the newest if None), and on into later attempts while `active()` holds.

    Raises UserError where there is no such log and none is to come.
    """
    number = newest_attempt(run) if attempt is None else attempt
    alive = active()
    if not alive and not run.log(number, rank).exists():
        raise UserError(f"{run.root} has no log of rank {rank} in attempt {number}", fix=_those_there(run, number))
    while True:
        tail = LineTail(run.log(number, rank))
        while True:
            alive = active()
            later = attempt is None and newest_attempt(run) > number
            lines = tail.read()
            yield from (line.decode(errors="replace") for line in lines)
            if later or not alive:
                break
            if not lines:
                time.sleep(PERIOD)
        if rest := tail.rest():
            yield rest.decode(errors="replace")
        tail.close()
        if not later:
            return
        number += 1


def newest_attempt(run: RunDir) -> int:
    """The newest attempt that has logs; 0 if none has."""
    numbers = [int(match[1]) for path in _folders(run) if (match := re.fullmatch(r"attempt-(\d+)", path))]
    return max(numbers, default=0)


def _folders(run: RunDir) -> list[str]:
    try:
        return [path.name for path in (run.root / "logs").iterdir()]
    except OSError:
        return []


def _those_there(run: RunDir, number: int) -> str:
    ranks = sorted(path.stem for path in run.log(number, 0).parent.glob("rank-*.log"))
    return f"there are: {', '.join(ranks)}" if ranks else "no rank has started in it"
