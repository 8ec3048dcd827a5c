"""Parses Hydra's message about the process that ended an attempt, on any host. Pure.

On one host it lists the exit codes of all ranks; over several it lists those of one host, or none, but it always names
the process that ended first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.kubernetes.hosts import short
from ortflow.launchers.records import Outcome
from ortflow.workflow.errors import EXIT_PREEMPTED, signal_name

_FIRST = re.compile(r"PID (\d+) RUNNING AT (\S+)\s+=\s+EXIT CODE: (\d+)")
_SIGNALS = {
    number.value
    for number in (
        signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTERM,
    )
}  # fmt: skip
"""Hydra reports a signal's number as the exit code: these codes are nearly always signals."""

Process = tuple[str, int]
"""A host's short name and a process there."""


def first_end(output: str, ranks: Mapping[Process, int]) -> dict[int, int]:
    """Exit status, by rank, of the one that ended first (minus the signal if killed); empty if none is reported."""
    match = _FIRST.search(output)
    if match is None:
        return {}
    rank = ranks.get((short(match[2]), int(match[1])))
    if rank is None:
        return {}
    return {rank: _status(match)}


def early_kill(output: str) -> Cause | None:
    """The cause if the process that ended first was killed before it had recorded which rank it is.

    mpirun's own exit code is then 255 if all processes of a host were killed together: its proxy there fails too.
    """
    match = _FIRST.search(output)
    if match is None or (status := _status(match)) >= 0:
        return None
    place = f"a rank on {short(match[2])} was"
    if status == -signal.SIGTERM:
        return Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, f"{place} ended by SIGTERM")
    return Cause(Outcome.FAILURE, status, f"{place} killed by {signal_name(-status)}")


def _status(match: re.Match[str]) -> int:
    code = int(match[3])
    code = code >> 8 if code > 255 else code
    return -code if code in _SIGNALS else code
