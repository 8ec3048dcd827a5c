"""Parses Hydra's message about the process that ended an attempt, on any host. Pure.

On one host it lists the exit codes of all ranks; over several it lists those of one host, or none, but it always names
the process that ended first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from ortflow.launchers.kubernetes.hosts import short

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


def first_end(words: str, ranks: Mapping[Process, int]) -> dict[int, int]:
    """Exit status, by rank, of the one that ended first (minus the signal if killed); empty if none is reported."""
    match = _FIRST.search(words)
    if match is None:
        return {}
    rank = ranks.get((short(match[2]), int(match[1])))
    if rank is None:
        return {}
    code = int(match[3])
    code = code >> 8 if code > 255 else code
    return {rank: -code if code in _SIGNALS else code}
