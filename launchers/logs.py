"""The lines of a rank's log, also while it is written. Read only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from ortflow.launchers.attempts.tail import PIECE, LineTail
from ortflow.launchers.records import next_attempt
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.files import LONGEST_LINE, open_regular

PERIOD = 0.2


def log_lines(
    run: RunDir, *, attempt: int | None, rank: int, active: Callable[[], bool], clock: Clock = SYSTEM_CLOCK
) -> Iterator[str]:
    """Lines of the log of `attempt` (the newest if None), and of later attempts while `active()` holds.

    Raises UserError if there is no such log and none will follow.
    """
    number = newest_attempt(run) if attempt is None else attempt
    alive = active()
    if not alive and os.path.lexists(run.log(number, rank)):
        os.close(open_regular(run.log(number, rank)))
    elif not alive:
        ranks = _those_there(run, number)
        if number < next_attempt(run.read_attempts()):
            raise UserError(f"{run.log(number, rank)} is missing", fix=ranks)
        raise UserError(
            f"{run.root} has no log of rank {rank} in attempt {number}", fix=ranks or "no rank has started in it"
        )
    while True:
        with closing(LineTail(run.log(number, rank))) as tail:
            while True:
                alive = active()
                later = attempt is None and newest_attempt(run) > number
                while lines := tail.read(PIECE):
                    yield from (_text(tail.path, line) for line in lines)
                if later or not alive:
                    break
                clock.sleep(PERIOD)
            if rest := tail.rest():
                yield _text(tail.path, rest)
        if not later:
            return
        number += 1


def _text(path: Path, line: bytes) -> str:
    if len(line) > LONGEST_LINE and b"\0" in line:
        raise UserError(f"{path} contains zero bytes in place of text", fix="remove it")
    return line.decode(errors="replace")


def newest_attempt(run: RunDir) -> int:
    """The newest attempt that has logs; 0 if none has."""
    numbers = [int(match[1]) for path in _folders(run) if (match := re.fullmatch(r"attempt-(\d+)", path))]
    return max(numbers, default=0)


def _folders(run: RunDir) -> list[str]:
    try:
        return [path.name for path in (run.root / "logs").iterdir()]
    except OSError:
        return []


def _those_there(run: RunDir, number: int) -> str | None:
    ranks = sorted(path.stem for path in run.log(number, 0).parent.glob("rank-*.log"))
    return f"there are: {', '.join(ranks)}" if ranks else None
