"""The process that loads graphs, hit by signals."""

from __future__ import annotations

import signal
import subprocess

from ortflow.workflow.assembly.child import Child


class Struck(Child):
    """Each of its processes gets a signal when it starts."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = list(numbers)
        super().__init__()

    def _start(self) -> subprocess.Popen[bytes]:
        process = super()._start()
        if self._numbers:
            process.send_signal(self._numbers.pop(0))
        return process
