"""Attempts without processes, under a fake clock: ranks that end, hang or die, as a supervisor sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fake_clock import FakeClock

from ortflow.launchers.attempts.cause import Cause
from ortflow.workflow.errors import EXIT_DONE, EXIT_PREEMPTED
from ortflow.workflow.run.rundir import RunDir, append_json_line


@dataclass
class FakeAttempt:
    """An `ortflow.launchers.supervision.supervised.Running`: ranks that end with `code` after `seconds`."""

    clock: FakeClock
    number: int
    code: int = EXIT_DONE
    seconds: float = float("inf")
    leaves_after: float | None = None
    """Seconds in which ranks save and leave when they are asked to; None: they do not hear it."""
    dead: dict[int, float] = field(default_factory=dict)
    """Ranks that die so many seconds after the start, without what starts the ranks taking notice."""
    reported: Cause | None = None
    """What a scheduler or a worker reports of the end."""
    guessed: Cause | None = None
    """What the output of mpirun or srun suggests."""
    pid: int = 4711
    asked_at: float | None = None
    killed_at: float | None = None

    def __post_init__(self) -> None:
        self.started_at = self.clock.now

    def poll(self) -> int | None:
        asked, takes = self.asked_at, self.leaves_after
        if asked is not None and takes is not None and self.clock.now >= asked + takes:
            return EXIT_PREEMPTED
        return self.code if self.clock.now >= self.started_at + self.seconds else None

    def gone(self) -> list[int]:
        return [rank for rank, seconds in self.dead.items() if self.clock.now >= self.started_at + seconds]

    def statuses(self, returncode: int) -> dict[int, int]:
        return {}

    def verdict(self, returncode: int) -> Cause | None:
        return self.reported

    def guess(self, returncode: int) -> Cause | None:
        return self.guessed

    def output(self) -> str:
        return ""

    def ask_to_leave(self) -> None:
        self.asked_at = self.clock.now

    def kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = self.clock.now


Plan = Callable[[FakeClock, int], FakeAttempt]
"""Makes the attempt of a number."""


def write_step(run: RunDir, attempt: int, step: int, rank: int = 0) -> None:
    """Record a step of a rank."""
    record = {"event": "step", "time": 1.0, "attempt": attempt, "rank": rank, "step": step, "loss": 0.5, "lr": 0.1}
    append_json_line(run.events(rank), {**record, "grad_norm": 1.0, "seconds": 0.1, "samples": 4, "epoch": 0})
