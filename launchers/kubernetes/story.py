"""What the keeper prints: the log of the launcher pod, which tells the whole run to whoever can read no volume.

Three kinds of lines: words for people; `[3] …`, a line of rank 3's log; and `::ortflow {…}`, a record of the run
directory, by which a client outside keeps its own copy (`ortflow.launchers.kubernetes.mirror`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ortflow.launchers.plain import PlainView, total_steps
from ortflow.launchers.tail import LineTail, last_records
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.room import Notice, OutOfDisk
from ortflow.workflow.rundir import RunDir

MARK = "::ortflow "
PERIOD = 0.5
"""Seconds between two looks at the ranks' logs."""


class Story(PlainView):
    """Prints the run's lines, the ranks' and the records."""

    def __init__(self, run: RunDir, every_steps: int, world_size: int, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(run, every_steps)
        self._world_size, self._clock = world_size, clock
        self._attempts = LineTail(run.attempts)
        self._logs: dict[int, LineTail] = {}
        self._notice = Notice(run.heartbeat)
        self._lack: dict[str, Any] = {}
        self._next_look = 0.0

    def __exit__(self, *exception: object) -> None:
        """Tell the rest."""
        self.drain()
        self._attempts.close()

    def lacks(self, lack: OutOfDisk, seconds: float) -> None:
        """The run cannot begin: its volume is full, which is waited for."""
        self.say(f"{lack}: waiting {seconds:g} s for room")
        self._lack = _words(lack)
        self._record("notice", self._lack)

    def begin(self) -> None:
        """Tell what a client that missed earlier pods has to know."""
        self._tell_attempts()
        self._tell_plan()
        for record in last_records(self._run.events(0)):
            self._record("events", record, again=True)
        # An earlier pod may have ended while something was lacking.
        self._lack = self._lacking()
        self._record("notice", self._lack)

    def attempt(self, number: int) -> None:
        """Turn to the logs of a new attempt."""
        self.drain()
        self._logs = {rank: LineTail(self._run.log(number, rank), from_end=True) for rank in range(self._world_size)}

    def record(self, record: Mapping[str, Any]) -> None:
        """An event of rank 0."""
        self._tell_attempts()
        if record.get("event") == "phase_start" and record.get("phase") == "train":
            self._tell_plan()
        self._record("events", record)
        super().record(record)

    def tick(self) -> None:
        """Pass on what ranks have printed."""
        if (now := self._clock.monotonic()) >= self._next_look:
            self._next_look = now + PERIOD
            self._tell_attempts()
            self._tell_logs()
            if (lack := self._lacking()) != self._lack:
                self._lack = lack
                self._record("notice", lack)

    def drain(self) -> None:
        """Tell everything up to now."""
        self._tell_attempts()
        self._tell_logs()
        for rank, tail in self._logs.items():
            if rest := tail.rest():
                self._line(rank, rest)
            tail.close()
        self._logs = {}

    def _lacking(self) -> dict[str, Any]:
        return _words(self._notice.read())

    def _tell_plan(self) -> None:
        """How many steps there are to come is known when configure has written it."""
        if (steps := total_steps(self._run)) is not None:
            self._record("plan", {"total_steps": steps})

    def _tell_attempts(self) -> None:
        for line in self._attempts.read():
            print(f'{MARK}{{"file":"attempts","record":{line.decode(errors="replace")}}}', flush=True)

    def _tell_logs(self) -> None:
        for rank, tail in self._logs.items():
            for line in tail.read():
                self._line(rank, line)

    def _line(self, rank: int, line: bytes) -> None:
        print(f"[{rank}] {line.decode(errors='replace')}", flush=True)

    def _record(self, file: str, record: Mapping[str, Any], *, again: bool = False) -> None:
        told = {"file": file, "record": record, **({"again": True} if again else {})}
        print(MARK + json.dumps(told, separators=(",", ":")), flush=True)


def _words(lack: OutOfDisk | None) -> dict[str, Any]:
    return {} if lack is None else {"path": str(lack.path), "needed": lack.needed}
