"""The supervisor process's output: the log of the launcher pod, which shows the whole run to clients that cannot read
the volume.

Three kinds of lines: messages; `[3] …`, a line of rank 3's log; and `::ortflow {…}`, a record of the run
directory, from which a client outside keeps its own copy (`ortflow.launchers.kubernetes.log_replicator`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ortflow.launchers.attempts.tail import LineTail, last_records
from ortflow.launchers.view.plain import PlainView, total_steps
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.disk_space import Notice, OutOfDisk

MARK = "::ortflow "
PERIOD = 0.5
"""Seconds between two polls of the ranks' logs."""


class LogStream(PlainView):
    """Prints the run's lines, the ranks' and the records."""

    def __init__(self, run: RunDir, every_steps: int, world_size: int, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(run, every_steps)
        self._world_size, self._clock = world_size, clock
        self._attempts = LineTail(run.attempts)
        self._logs: dict[int, LineTail] = {}
        self._notice = Notice(run.heartbeat)
        self._lack: dict[str, Any] = {}
        self._next_check = 0.0

    def __exit__(self, *exception: object) -> None:
        """Print the rest."""
        self.drain()
        self._attempts.close()

    def lacks(self, lack: OutOfDisk, seconds: float) -> None:
        """Report that the run waits for space on its volume."""
        self.message(f"{lack}: waiting {seconds:g} s for room")
        self._lack = _to_json(lack)
        self._record("notice", self._lack)

    def begin(self) -> None:
        """Print what a client needs that missed earlier pods."""
        self._print_attempts()
        self._print_plan()
        for record in last_records(self._run.events(0)):
            self._record("events", record, again=True)
        # An earlier pod may have ended while space was missing.
        self._lack = self._lacking()
        self._record("notice", self._lack)

    def attempt(self, number: int) -> None:
        """Switch to the logs of a new attempt."""
        self.drain()
        self._logs = {rank: LineTail(self._run.log(number, rank), from_end=True) for rank in range(self._world_size)}

    def record(self, record: Mapping[str, Any]) -> None:
        """An event of rank 0."""
        self._print_attempts()
        if record.get("event") == "phase_start" and record.get("phase") == "train":
            self._print_plan()
        self._record("events", record)
        super().record(record)

    def tick(self) -> None:
        """Print the ranks' new output."""
        if (now := self._clock.monotonic()) >= self._next_check:
            self._next_check = now + PERIOD
            self._print_attempts()
            self._print_logs()
            if (lack := self._lacking()) != self._lack:
                self._lack = lack
                self._record("notice", lack)

    def drain(self) -> None:
        """Print everything up to now."""
        self._print_attempts()
        self._print_logs()
        for rank, tail in self._logs.items():
            if rest := tail.rest():
                self._line(rank, rest)
            tail.close()
        self._logs = {}

    def _lacking(self) -> dict[str, Any]:
        return _to_json(self._notice.read())

    def _print_plan(self) -> None:
        """The number of steps, known when the configure step has written it."""
        if (steps := total_steps(self._run)) is not None:
            self._record("plan", {"total_steps": steps})

    def _print_attempts(self) -> None:
        for line in self._attempts.read():
            print(f'{MARK}{{"file":"attempts","record":{line.decode(errors="replace")}}}', flush=True)

    def _print_logs(self) -> None:
        for rank, tail in self._logs.items():
            for line in tail.read():
                self._line(rank, line)

    def _line(self, rank: int, line: bytes) -> None:
        print(f"[{rank}] {line.decode(errors='replace')}", flush=True)

    def _record(self, file: str, record: Mapping[str, Any], *, again: bool = False) -> None:
        message = {"file": file, "record": record, **({"again": True} if again else {})}
        print(MARK + json.dumps(message, separators=(",", ":")), flush=True)


def _to_json(lack: OutOfDisk | None) -> dict[str, Any]:
    return {} if lack is None else {"path": str(lack.path), "needed": lack.needed_bytes}
