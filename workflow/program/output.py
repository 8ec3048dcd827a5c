"""What a program prints: the log of its rank, as a sign that it moves and for the cause of its end."""

from __future__ import annotations

import os
from pathlib import Path

from ortflow.workflow.program.endings import TAIL


class Output:
    """A rank's log from now on; earlier lines are ortflow's."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = self._known = self._size()

    def tail(self) -> str:
        """Its end, at most TAIL bytes."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, size - TAIL))
                return file.read(TAIL).decode(errors="replace")
        except OSError:
            return ""

    def grew(self) -> bool:
        """Whether its size has changed since the last call."""
        before, self._known = self._known, self._size()
        return self._known != before

    def _size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0
