"""Waiting for space on a volume that is full when the launcher pod starts, before anything is written.

Used by `run_supervisor`. A volume that fills up later is handled by the supervisor.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ortflow.launchers.stop import taken_over
from ortflow.workflow.errors import Preempted
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.disk_space import RECORDS, Notice, OutOfDisk, has_room, wait_for_room


def await_room(run: RunDir, seconds: float, report: Callable[[OutOfDisk], None], clock: Clock = SYSTEM_CLOCK) -> None:
    """Wait until the run's volume has space for its records.

    Parameters
    ----------
    run
        The run directory, which may not exist yet.
    seconds
        The longest wait.
    report
        Called once with the missing space if there is any.
    clock
        The clock of the wait.

    Raises
    ------
    OutOfDisk
        The volume stayed full.
    Preempted
        SIGTERM or SIGINT arrived.
    """
    if has_room(run.root, RECORDS):
        return
    lack = OutOfDisk(run.root, RECORDS)
    report(lack)
    answers: list[int] = []
    with taken_over(lambda number, frame: answers.append(number), (signal.SIGTERM, signal.SIGINT), ignored=True):
        room = wait_for_room(lack, Notice(run.heartbeat), seconds, lambda: answers, clock)
    if answers:
        raise Preempted("asked to end while waiting for space on the volume")
    if not room:
        raise lack
