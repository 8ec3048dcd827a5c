"""A volume that is full when a launcher pod begins: told and waited for, before anything is written there.

Used by the keeper. What fills up later is its supervisor's business.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ortflow.launchers.stop import taken_over
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import Preempted
from ortflow.workflow.room import RECORDS, Notice, OutOfDisk, has_room, wait_for_room
from ortflow.workflow.rundir import RunDir


def await_room(run: RunDir, seconds: float, tell: Callable[[OutOfDisk], None], clock: Clock = SYSTEM_CLOCK) -> None:
    """Return when the run's volume takes its records; `tell` of what it lacks until then.

    Raises OutOfDisk where that lasts longer than `seconds`, Preempted when told to end.
    """
    if has_room(run.root, RECORDS):
        return
    lack = OutOfDisk(run.root, RECORDS)
    tell(lack)
    asked: list[int] = []
    with taken_over(lambda number, frame: asked.append(number), (signal.SIGTERM, signal.SIGINT), ignored=True):
        room = wait_for_room(lack, Notice(run.heartbeat), seconds, lambda: asked, clock)
    if asked:
        raise Preempted("told to end while waiting for room on the volume")
    if not room:
        raise lack
