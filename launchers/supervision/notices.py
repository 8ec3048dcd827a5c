"""Messages about a run to commands, web addresses and mail servers (`monitor.notify`), sent by the run's supervisor.

Each message is sent by a child process with a time limit, so that a sink that fails or hangs costs the run nothing; the
supervisor only warns of it. What a command prints and what the environment adds to an address is never recorded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortflow.launchers.budget import Decision
from ortflow.launchers.records import Outcome, Used
from ortflow.launchers.supervision.supervised import View
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.restart import Restart
from ortflow.workflow.system.clock import Clock
from ortflow.workflow.system.module_process import start_module

if TYPE_CHECKING:
    from ortflow.launchers.supervision.absence_notices import AbsenceNotices

LIMIT = 10.0
"""Seconds that a message may take."""
START = 2.0
"""Seconds in which the sender's interpreter starts, on top."""
PERIOD = 600.0
"""Least seconds between two messages of one kind to one sink."""
LONGEST = 2000
"""Characters of a message's text: a pipe holds the whole message."""


def kinds_after(
    outcome: Outcome, decision: Decision, used: Used, restart: Restart, *, hung: bool, asked: bool
) -> list[str]:
    """What an attempt's end means to those who wait for messages. Pure."""
    kinds = ["hung"] if hung else []
    if outcome is Outcome.FINISHED:
        return ["finished"]
    if not decision.again:
        return kinds if asked else [*kinds, "failed"]
    failures = outcome is Outcome.FAILURE and used.failures >= restart.failures
    preemptions = (
        outcome is Outcome.PREEMPTED and restart.preemptions is not None and used.preemptions >= restart.preemptions
    )
    return [*kinds, "budget_low"] if failures or preemptions else kinds


@dataclass
class _Sending:
    """A message that is on its way."""

    process: subprocess.Popen[bytes]
    sink: str
    until: float


class Notices:
    """Sends messages about one run; warns on `view` of those that fail."""

    def __init__(self, sinks: Sequence[Notify], run: RunDir, view: View, clock: Clock) -> None:
        self._sinks, self._run, self._view, self._clock = sinks, run, view, clock
        self._sending: list[_Sending] = []
        self._sent: dict[tuple[int, str], float] = {}

    def send(self, kind: str, text: str, places: Collection[int] | None = None, **fields: Any) -> None:
        """Start to send a message to each sink that waits for its kind, unless it had one lately.

        `places`: the sinks that it is for, by their place in the run file.
        """
        subscription = "not_back" if kind == "back" else kind
        moment = self._clock.monotonic()
        for place, sink in enumerate(self._sinks):
            last = self._sent.get((place, kind))
            if subscription not in sink.on or (places is not None and place not in places):
                continue
            if last is not None and moment < last + PERIOD:
                continue
            self._sent[place, kind] = moment
            name = f"monitor.notify[{place}]"
            text = text[:LONGEST]
            message = {
                "run": self._run.root.name,
                "directory": str(self._run.root),
                "event": kind,
                "text": text,
                **fields,
            }
            order = {
                "command": sink.command,
                "webhook": sink.webhook,
                "mail": None if sink.mail is None else sink.mail.model_dump(),
                "seconds": LIMIT,
                "message": message,
            }
            try:
                self._start(name, order, moment)
            except OSError as error:
                self._view.message(f"warning: {name}: {error.strerror}")

    def _start(self, name: str, order: Mapping[str, Any], moment: float) -> None:
        process = start_module(
            "ortflow.launchers.supervision.notice_sender",
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._sending.append(_Sending(process, name, moment + LIMIT + START))
        if process.stdin is not None:
            # Less than a pipe holds, so that nobody waits for the child.
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(order).encode())

    def look(self) -> None:
        """Warn of messages that could not be sent, and end those that take too long."""
        for sending in [*self._sending]:
            if sending.process.poll() is None and self._clock.monotonic() > sending.until:
                _kill(sending.process)
            if sending.process.poll() is not None:
                self._settle(sending)

    def close(self) -> None:
        """Wait for messages on their way, within their limits."""
        for sending in [*self._sending]:
            try:
                sending.process.wait(LIMIT + START)
            except subprocess.TimeoutExpired:
                _kill(sending.process)
            self._settle(sending)

    def _settle(self, sending: _Sending) -> None:
        self._sending.remove(sending)
        error = b""
        if sending.process.stderr is not None:
            with sending.process.stderr as file:
                error = file.read(2000)
        if sending.process.returncode:
            lines = error.decode(errors="replace").splitlines() or [f"not sent within {LIMIT:g} s"]
            self._view.message(f"warning: {sending.sink}: {lines[-1][:300]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        # The first process of a session leads its group, which has all that a command has started.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class NoticingView:
    """A view that also sends a message when a loss is not finite or the run is not back, and looks after messages on
    their way."""

    def __init__(self, view: View, notices: Notices, absences: AbsenceNotices | None = None) -> None:
        self._view, self._notices, self._absences = view, notices, absences

    def record(self, record: Mapping[str, Any]) -> None:
        """Show an event of rank 0."""
        self._view.record(record)
        if self._absences is not None:
            self._absences.record(record)
        if record.get("event") == "step" and "loss" in record and record["loss"] is None:
            step = record.get("step")
            self._notices.send("loss_nan", f"the loss of step {step} is NaN or infinite", step=step)

    def message(self, text: str) -> None:
        """Show a message of the launcher."""
        self._view.message(text)

    def attempt(self, number: int) -> None:
        """Show that an attempt starts."""
        self._view.attempt(number)

    def tick(self) -> None:
        """Called ten times a second."""
        if self._absences is not None:
            self._absences.look()
        self._notices.look()
        self._view.tick()
