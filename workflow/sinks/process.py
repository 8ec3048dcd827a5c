"""Rank 0's end of the process that serves the sinks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from ortflow.workflow.errors import EXIT_DONE, Preempted
from ortflow.workflow.program.child import own_processes
from ortflow.workflow.run.events import EventLog, warn
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.sinks.kinds import check_packages
from ortflow.workflow.sinks.protocol import State
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.module_process import start_module

STATES: Mapping[int, State] = {EXIT_DONE: "finished", Preempted.exit_code: "preempted"}
START = 2.0
"""Seconds that the process may take beside what its sinks may: it reads the record every half second."""


class SinkProcess:
    """The process of one attempt; a failure of it is a warning in the record, and nothing else."""

    def __init__(self, run_dir: RunDir, attempt: int, events: EventLog, seconds: float) -> None:
        self._events, self._seconds = events, seconds
        self._process = start_module(
            "ortflow.workflow.sinks",
            str(run_dir.root.absolute()),
            str(attempt),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals for the ranks would end it before it has sent the last values; it ends with its input.
            start_new_session=True,
        )
        own_processes.add(self._process.pid)

    def end(self, code: int) -> None:
        """Let the sinks send the last values of an attempt that ends with an exit code, and record what they lacked."""
        state = STATES.get(code, "failed")
        try:
            output, _ = self._process.communicate(state.encode(), timeout=self._seconds + START)
            unusual = f"the process of monitor.sinks ended with exit code {self._process.returncode}"
            messages = output.decode(errors="replace").splitlines()
            messages += [unusual] if self._process.returncode else []
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            messages = [f"monitor.sinks were not done after {self._seconds:g} s, and were ended"]
        for message in messages:
            warn(self._events, message)


def start_sinks(spec: RunSpec, run_dir: RunDir, attempt: int, events: EventLog) -> SinkProcess:
    """The process of a run's sinks. Raises UserError if a package is missing."""
    check_packages(spec.monitor.sinks)
    return SinkProcess(run_dir, attempt, events, spec.monitor.sinks_seconds)
