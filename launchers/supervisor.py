"""Keeps a run on this machine going: starts attempts, waits, tells why they ended, starts again within the budgets.

Called by the local launcher, in the foreground or detached, with the launcher's lock held. It never touches
checkpoints or events: ranks find the newest checkpoint themselves. Everything it decides stands in attempts.jsonl
before it acts on it, so that whoever comes next finds it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ortflow.launchers import processes
from ortflow.launchers.attempt import Attempt
from ortflow.launchers.budget import Decision, decide
from ortflow.launchers.cause import Cause, cause, statuses
from ortflow.launchers.locks import wait_free
from ortflow.launchers.memory import oom_kills
from ortflow.launchers.records import Outcome, next_attempt, open_attempt, used
from ortflow.launchers.stop import Stop, write_request
from ortflow.launchers.tail import EventTail, last_lines, last_records
from ortflow.manifests.local import MpiKind
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.run import Restart

TICK = 0.1
GRACE = 30.0
"""Seconds that ranks have to save and leave."""
PATIENCE = 5.0
"""Seconds within which mpirun has to take down the others when a rank is dead: Hydra does not, where it never came to
MPI's initialisation."""
PATIENCE_TOLD = 1.0
"""The same where the dead rank has written why it failed."""
LEFTOVERS = 10.0
"""Seconds that ranks of a dead launcher have to be gone."""
LAST_LINES = 12

EXIT_CODES = {
    Outcome.FINISHED: EXIT_DONE,
    Outcome.USER_ERROR: EXIT_USER,
    Outcome.PREEMPTED: EXIT_PREEMPTED,
    Outcome.FAILURE: EXIT_FAILURE,
}
ASKED = {"interrupt": "Ctrl-C", "cancel": "ortflow cancel"}


class View(Protocol):
    """Where people see the run."""

    def record(self, record: Mapping[str, Any]) -> None:
        """An event of rank 0."""

    def say(self, text: str) -> None:
        """Something the launcher did or found."""

    def attempt(self, number: int) -> None:
        """An attempt starts; the first has number 0."""

    def tick(self) -> None:
        """Called ten times a second."""


@dataclass(frozen=True)
class Job:
    """What a supervisor keeps going."""

    run: RunDir
    world_size: int
    mpi: MpiKind | None
    """None where one rank runs without mpirun."""
    restart: Restart
    start: Callable[[int], tuple[Sequence[str], Mapping[str, str]]]
    """Command and environment of an attempt."""


class Supervisor:
    """One run, from its first attempt under this launcher to its last."""

    def __init__(self, job: Job, view: View, stop: Stop) -> None:
        self._job, self._run, self._view, self._stop = job, job.run, view, stop

    def supervise(self) -> int:
        """Run to the end; the exit code of the design's table."""
        try:
            with self._stop.listening():
                return self._keep_going()
        finally:
            # Answered, one way or another: nobody is left to read it.
            self._run.stop_request.unlink(missing_ok=True)

    def _keep_going(self) -> int:
        pause = 0.0
        self._clear_leftovers()
        self._close_lost_attempt()
        while not self._pause(pause):
            outcome, decision = self._attempt(next_attempt(self._run.read_attempts()))
            if not decision.again:
                return EXIT_CODES[outcome]
            pause = decision.pause
        asked = self._stop.reason or ""
        why = f"asked to by {ASKED.get(asked, asked)}"
        self._run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, why=why, asked=asked)
        return EXIT_PREEMPTED

    def _close_lost_attempt(self) -> None:
        """Put on record what a launcher that died could not."""
        number = open_attempt(self._run.read_attempts())
        if number is not None:
            end = {"event": "end", "attempt": number, "outcome": Outcome.LOST.value, "next": "restart"}
            self._run.record_attempt(**end, cause="its launcher died")

    def _attempt(self, number: int) -> tuple[Outcome, Decision]:
        run, job = self._run, self._job
        command, environment = job.start(number)
        self._view.attempt(number)
        tail = EventTail(run.events(0))
        kills = oom_kills()
        try:
            attempt = Attempt(run, number, command, environment, job.world_size)
        except OSError as error:
            raise OrtflowError(f"{command[0]} does not start: {error.strerror}") from error
        run.record_attempt(
            event="start", attempt=number, world_size=job.world_size, pid=attempt.pid, host=socket.gethostname()
        )
        try:
            returncode, verdict = self._follow(attempt, tail)
        finally:
            attempt.kill()
        self._clear_leftovers()
        self._pass_on(tail)
        tail.close()
        found = verdict or cause(
            returncode,
            self._ended(attempt, returncode),
            self._failures(number),
            out_of_memory=_grew(kills, oom_kills()),
        )
        return found.outcome, self._judge(number, found)

    def _follow(self, attempt: Attempt, tail: EventTail) -> tuple[int, Cause | None]:
        """Wait for the end; a cause where the end is our own doing."""
        asked_at: float | None = None
        dead_since: float | None = None
        next_check = 0.0
        while (returncode := attempt.poll()) is None:
            moment = time.monotonic()
            if self._stop.look() and asked_at is None:
                asked_at = moment
                self._ask(attempt)
            if self._stop.now or (asked_at is not None and moment > asked_at + GRACE):
                attempt.kill()
                late = "" if self._stop.now else f": they did not leave within {GRACE:.0f} s"
                sentence = f"the ranks were killed without saving{late}"
                return EXIT_PREEMPTED, Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, sentence)
            if moment >= next_check:
                next_check = moment + 1.0
                dead = self._dead(attempt)
                dead_since = (dead_since or moment) if dead else None
                told = self._failures(attempt.number) if dead else {}
                if dead_since is not None and moment > dead_since + (PATIENCE_TOLD if told else PATIENCE):
                    attempt.kill()
                    return EXIT_FAILURE, self._hung(attempt, min(dead))
            self._pass_on(tail)
            self._view.tick()
            time.sleep(TICK)
        return returncode, None

    def _ask(self, attempt: Attempt) -> None:
        reason = self._stop.reason or ""
        if reason != "cancel":
            write_request(self._run.stop_request, reason)
        attempt.ask_to_leave()
        again = "; Ctrl-C again leaves now" if reason == "interrupt" else ""
        self._view.say(f"{ASKED.get(reason, reason)}: saving and leaving{again}")

    def _dead(self, attempt: Attempt) -> set[int]:
        """Ranks that are gone and have not said that they were done."""
        return {rank for rank in attempt.gone() if not self._said_goodbye(attempt.number, rank)}

    def _said_goodbye(self, number: int, rank: int) -> bool:
        return any(
            record.get("attempt") == number and record.get("event") in ("finished", "preempted")
            for record in last_records(self._run.events(rank), 4096)
        )

    def _hung(self, attempt: Attempt, rank: int) -> Cause:
        """Why a rank died, where mpirun did not end with it; `rank` if nobody says which it was."""
        ended, failures = self._ended(attempt, EXIT_FAILURE), self._failures(attempt.number)
        if ended or failures:
            return cause(EXIT_FAILURE, ended, failures)
        return Cause(Outcome.FAILURE, EXIT_FAILURE, f"rank {rank} died and mpirun did not notice", rank)

    def _ended(self, attempt: Attempt, returncode: int) -> dict[int, int]:
        return statuses(self._job.mpi, returncode, attempt.words(), attempt.pids())

    def _failures(self, number: int) -> dict[int, dict[str, Any]]:
        """The newest failure event of each rank in an attempt."""
        found = {}
        for rank in range(self._job.world_size):
            for record in last_records(self._run.events(rank)):
                if record.get("event") == "failure" and record.get("attempt") == number:
                    found[rank] = record
        return found

    def _judge(self, number: int, found: Cause) -> Decision:
        """Decide what follows, put it on record, tell it."""
        asked = self._stop.look(at_once=True)
        end = {"event": "end", "attempt": number, "outcome": found.outcome.value}
        counted = used([*self._run.read_attempts(), {**end, "next": "restart"}])
        decision = decide(found.outcome, counted, self._job.restart)
        if asked and decision.again:
            decision = Decision(False, why=f"asked to by {ASKED.get(asked, asked)}")
        self._run.record_attempt(
            **end,
            exit_code=found.exit_code,
            cause=found.sentence,
            rank=found.rank,
            next="restart" if decision.again else "stop",
            pause=decision.pause,
            why=decision.why,
            asked=asked,
        )
        if found.outcome is Outcome.FAILURE or (found.outcome is Outcome.USER_ERROR and not found.told):
            self._view.say(found.sentence + self._last_words(number, found.rank))
        if decision.again:
            pause = f" in {decision.pause:g} s" if decision.pause else ""
            told = "" if found.outcome is Outcome.FAILURE else f"{found.sentence}; "
            self._view.say(f"{told}starting again{pause} ({decision.why})")
        return decision

    def _last_words(self, number: int, rank: int | None) -> str:
        """The end of the log that tells most about a failure."""
        for path in (self._run.log(number, rank or 0), self._run.launcher_log(number)):
            if lines := last_lines(path, LAST_LINES):
                return f"; the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
        return ""

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; whether a stop came first."""
        end = time.monotonic() + seconds
        while not self._stop.look():
            if time.monotonic() >= end:
                return False
            self._view.tick()
            time.sleep(min(TICK, max(0.0, end - time.monotonic())))
        return True

    def _clear_leftovers(self) -> None:
        """Two generations of ranks must never write to one run directory."""
        if wait_free(self._run.ranks_lock, 0.0):
            return
        processes.kill(processes.of_run(self._run.root))
        if not wait_free(self._run.ranks_lock, LEFTOVERS):
            raise OrtflowError(f"ranks of an earlier attempt still run: they hold {self._run.ranks_lock}")

    def _pass_on(self, tail: EventTail) -> None:
        for record in tail.read():
            self._view.record(record)


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
