"""Shows a program's run as plain lines: what rank 0 prints, as soon as it does, and the launcher's messages."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ortflow.launchers.attempts.tail import LineTail
from ortflow.launchers.view.plain import PlainView
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.streams import print_line

PIECE = 1 << 20
"""Bytes that are shown at a time: a program may print faster than a terminal shows."""


class OutputView(PlainView):
    """Prints rank 0's log as it grows."""

    def __init__(self, run: RunDir, every_steps: int) -> None:
        super().__init__(run, every_steps)
        self._log: LineTail | None = None

    def __exit__(self, *exception: object) -> None:
        """Print the rest."""
        self._show()
        if self._log is not None:
            self._log.close()
            self._log = None
        super().__exit__(*exception)

    def attempt(self, number: int) -> None:
        """Follow the log of this attempt."""
        self._show()
        if self._log is not None:
            self._log.close()
        self._log = LineTail(self._run.log(number, 0))

    def tick(self) -> None:
        """Print what is new in the log."""
        self._show()

    def _show(self) -> None:
        while self._log is not None and (lines := self._log.read(PIECE)):
            for line in lines:
                print_line(line.decode(errors="replace"))

    def _print(self, lines: Iterable[str]) -> None:
        for text in lines:
            self._show()
            print_line(f"{time.strftime('%H:%M:%S')}  {text}")
