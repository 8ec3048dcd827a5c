"""Keeps a run going: starts attempts, waits, tells why they ended, starts again within the budgets.

Called with the launcher's lock held: by the local launcher, in the foreground or detached, and by the batch step of
a Slurm job. How ranks are started and ended is the `Job`'s. It never touches checkpoints or events: ranks find the
newest checkpoint themselves. Everything it decides stands in attempts.jsonl before it acts on it, so that whoever
comes next finds it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ortflow.launchers.budget import Decision, decide
from ortflow.launchers.cause import Cause, agreed, cause
from ortflow.launchers.memory import oom_kills
from ortflow.launchers.moving import Liveness
from ortflow.launchers.nccl_log import explained
from ortflow.launchers.records import Outcome, fruitless, next_attempt, open_attempt, used
from ortflow.launchers.stop import Stop, write_request
from ortflow.launchers.tail import EventTail, ends_of, last_lines, last_records, newest
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError
from ortflow.workflow.owned import sweep_temporaries
from ortflow.workflow.room import RECORDS, Notice, OutOfDisk, has_room, is_full, out_of_disk, wait_for_room
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.run import Restart

T = TypeVar("T")
TICK = 0.1
GRACE = 30.0
"""Seconds that ranks have to save and leave, where nobody else sets a limit."""
PATIENCE = 5.0
"""Seconds within which mpirun has to take down the others when a rank is dead: Hydra does not, where it never came to
MPI's initialisation."""
PATIENCE_TOLD = 1.0
"""The same where the dead rank has written why it failed."""
LAST_LINES = 12

EXIT_CODES = {
    Outcome.FINISHED: EXIT_DONE,
    Outcome.USER_ERROR: EXIT_USER,
    Outcome.PREEMPTED: EXIT_PREEMPTED,
    Outcome.FAILURE: EXIT_FAILURE,
    Outcome.LOST: EXIT_FAILURE,
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


class Running(Protocol):
    """A started attempt."""

    number: int

    @property
    def pid(self) -> int:
        """Of mpirun, srun, or the only rank."""

    def poll(self) -> int | None:
        """The exit code of what starts the ranks (minus the signal if one ended it); None while it runs."""

    def gone(self) -> set[int]:
        """Ranks that are seen to run no longer."""

    def statuses(self, returncode: int) -> dict[int, int]:
        """Exit status of the ranks that did not end with 0, as far as it is told; minus the signal for killed ones."""

    def verdict(self, returncode: int) -> Cause | None:
        """The cause of the end where what starts the ranks knows one that no rank can tell."""

    def guess(self, returncode: int) -> Cause | None:
        """The cause where neither ranks nor statuses tell of one."""

    def ask_to_leave(self) -> None:
        """Have the ranks save and leave."""

    def kill(self) -> None:
        """End everything now."""


@dataclass(frozen=True)
class Job:
    """What a supervisor keeps going, and by which means."""

    run: RunDir
    world_size: int
    restart: Restart
    start: Callable[[int], Running]
    """Start the attempt of a number; raises OrtflowError where that fails."""
    clear: Callable[[], None]
    """Return when no rank of an earlier attempt can write any more; raises OrtflowError if that cannot be had."""
    lost: str = "its launcher died"
    """Why an attempt has no end on record."""
    hands_back: bool = False
    """A preempted run leaves its place, and a scheduler starts it again."""
    grace: float = GRACE
    """Seconds that ranks have to save and leave."""
    comes_back: bool = False
    """Whoever signals us to leave also starts us again."""
    room_seconds: float = 600.0
    """Seconds that room on a full disk is waited for."""


class Supervisor:
    """One run, from its first attempt under this launcher to its last."""

    def __init__(self, job: Job, view: View, stop: Stop, clock: Clock = SYSTEM_CLOCK) -> None:
        self._job, self._run, self._view, self._stop = job, job.run, view, stop
        self._notice, self._clock = Notice(job.run.heartbeat), clock

    def supervise(self) -> int:
        """Run to the end; the exit code of the design's table."""
        try:
            with self._stop.listening():
                return self._keep_going()
        finally:
            # Answered, one way or another: nobody is left to read it.
            with suppress(OSError):
                self._run.stop_request.unlink(missing_ok=True)

    def _keep_going(self) -> int:
        pause = 0.0
        self._job.clear()
        sweep_temporaries(self._run.root)
        self._notice.clear()  # takes its block while there is room
        if not self._close_lost_attempt():
            return EXIT_FAILURE
        while not self._pause(pause):
            outcome, decision = self._attempt(next_attempt(self._run.read_attempts()))
            if not decision.again:
                return EXIT_CODES[outcome]
            if self._comes_back or (self._job.hands_back and outcome in (Outcome.PREEMPTED, Outcome.LOST)):
                return EXIT_PREEMPTED
            pause = decision.pause
        if self._comes_back:
            return EXIT_PREEMPTED
        asked = self._stop.reason or ""
        why = f"asked to by {ASKED.get(asked, asked)}"
        self._record(event="stop", outcome=Outcome.PREEMPTED.value, why=why, asked=asked)
        return EXIT_PREEMPTED

    @property
    def _comes_back(self) -> bool:
        """Whether who asks the run to leave also starts it again."""
        return self._job.comes_back and self._stop.signalled

    def _close_lost_attempt(self) -> bool:
        """Put on record what a launcher that died could not; whether the run goes on.

        A person may start a run as often as they like; where a scheduler does so by itself, lives without a step count.
        """
        records = self._run.read_attempts()
        number = open_attempt(records)
        if number is None:
            return True
        end = {"event": "end", "attempt": number, "outcome": Outcome.LOST.value, "step": self._step()}
        tries = fruitless([*records, end]) if self._job.hands_back else 0
        decision = decide(Outcome.LOST, used(records), self._job.restart, tries)
        self._record(
            **end, cause=self._job.lost, next="restart" if decision.again else "stop", why=decision.why,
        )  # fmt: skip
        if not decision.again:
            self._view.say(f"{self._job.lost}; given up: {decision.why}")
        return decision.again

    def _attempt(self, number: int) -> tuple[Outcome, Decision]:
        with closing(EventTail(self._run.events(0))) as tail:
            return self._followed(number, tail)

    def _followed(self, number: int, tail: EventTail) -> tuple[Outcome, Decision]:
        run, job = self._run, self._job
        self._view.attempt(number)
        kills = oom_kills()
        attempt = self._with_room(lambda: job.start(number))
        self._record(
            event="start", attempt=number, world_size=job.world_size, pid=attempt.pid, host=socket.gethostname()
        )
        try:
            returncode, verdict = self._follow(attempt, tail)
        finally:
            attempt.kill()
        job.clear()
        sweep_temporaries(run.root)
        self._pass_on(tail)
        found = (
            verdict
            or attempt.verdict(returncode)
            or cause(
                returncode,
                attempt.statuses(returncode),
                self._failures(number),
                out_of_memory=_grew(kills, oom_kills()),
            )
        )
        if found.outcome is Outcome.FAILURE and not found.told and found.rank is None and verdict is None:
            found = attempt.guess(returncode) or found
        found = explained(found, run, number, job.world_size)
        if found.outcome is Outcome.FAILURE and not found.told and self._stop.look() and not self._begun(number):
            # A signal that comes before a rank can hear it kills, and the others are killed with it.
            found = Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, "asked to leave before all ranks had begun")
        if found.outcome is Outcome.FAILURE:
            found = agreed(ends_of(run, number, range(job.world_size)), job.world_size) or found
        lack = self._lack(found) if found.outcome is Outcome.FAILURE else None
        if lack is not None:
            found = replace(found, sentence=str(lack))
        decision = self._judge(number, found, counts=lack is None)
        if lack is not None and decision.again and not self._wait(lack):
            raise lack
        return found.outcome, decision

    def _record(self, **fields: Any) -> None:
        """Put on record, as soon as the disk takes it; raises OutOfDisk where it does not for too long."""
        self._with_room(lambda: self._run.record_attempt(**fields))

    def _with_room(self, do: Callable[[], T]) -> T:
        """Do what may need room, as soon as there is some."""
        while True:
            try:
                return do()
            except (OSError, OrtflowError) as error:
                if not is_full(error):
                    raise
                lack = out_of_disk(error, default=self._run.root)
                if not self._wait(lack) or self._stop.look():
                    raise lack from error

    def _wait(self, lack: OutOfDisk) -> bool:
        """Wait for room, and say so; False where a stop was asked for, or it was in vain for too long."""

        def asked() -> object:
            self._view.tick()
            return self._stop.look()

        self._view.say(f"{lack}: waiting {self._job.room_seconds:g} s for room")
        room = wait_for_room(lack, self._notice, self._job.room_seconds, asked, self._clock)
        return room or bool(self._stop.look())

    def _follow(self, attempt: Running, tail: EventTail) -> tuple[int, Cause | None]:
        """Wait for the end; a cause where the end is our own doing."""
        asked_at: float | None = None
        dead_since: float | None = None
        next_check = 0.0
        limit = self._job.restart.hung_seconds
        liveness = None
        if limit is not None:
            liveness = Liveness(self._run, attempt.number, self._job.world_size, limit, self._clock.monotonic())
        while (returncode := attempt.poll()) is None:
            moment = self._clock.monotonic()
            if self._stop.look() and asked_at is None:
                asked_at = moment
                self._ask(attempt)
            if self._stop.now or (asked_at is not None and moment > asked_at + self._job.grace):
                attempt.kill()
                late = "" if self._stop.now else f": they did not leave within {self._job.grace:g} s"
                sentence = f"the ranks were killed without saving{late}"
                return EXIT_PREEMPTED, Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, sentence)
            if moment >= next_check:
                next_check = moment + 1.0
                if liveness is not None and liveness.hung(moment) and asked_at is None:
                    attempt.kill()
                    sentence = f"the ranks hung: no sign of life for {limit:g} s"
                    return EXIT_FAILURE, Cause(Outcome.FAILURE, EXIT_FAILURE, sentence)
                dead = self._dead(attempt)
                dead_since = (dead_since or moment) if dead else None
                told = self._failures(attempt.number) if dead else {}
                if dead_since is not None and moment > dead_since + (PATIENCE_TOLD if told else PATIENCE):
                    attempt.kill()
                    return EXIT_FAILURE, self._hung(attempt, min(dead))
            self._pass_on(tail)
            self._view.tick()
            self._clock.sleep(TICK)
        return returncode, None

    def _ask(self, attempt: Running) -> None:
        reason = self._stop.reason or ""
        if reason != "cancel":
            with suppress(OSError):  # the signal alone then
                write_request(self._run.stop_request, reason)
        attempt.ask_to_leave()
        again = "; Ctrl-C again leaves now" if reason == "interrupt" else ""
        self._view.say(f"{ASKED.get(reason, reason)}: saving and leaving{again}")

    def _dead(self, attempt: Running) -> set[int]:
        """Ranks that are gone and have not said that they were done."""
        gone = attempt.gone()
        return gone - ends_of(self._run, attempt.number, gone).keys()

    def _lack(self, found: Cause) -> OutOfDisk | None:
        """What a full disk lacks, as a rank has said, or as is seen where a rank had no room to say why it failed."""
        # Once the disk has room again, a signal is a cause of its own; a rank that failed may have lacked room before.
        lack = self._notice.read() if found.exit_code < 0 else self._notice.last()
        if lack is None and not found.told and found.exit_code > 0:
            return None if has_room(self._run.root, RECORDS) else OutOfDisk(self._run.root, RECORDS)
        return lack

    def _begun(self, number: int) -> bool:
        """Whether every rank has written a word in an attempt: before that there is nothing to save."""
        return all(last_records(self._run.events(rank), attempt=number) for rank in range(self._job.world_size))

    def _hung(self, attempt: Running, rank: int) -> Cause:
        """Why a rank died, where mpirun did not end with it; `rank` if nobody says which it was."""
        if known := attempt.verdict(EXIT_FAILURE):
            return known
        ended, failures = attempt.statuses(EXIT_FAILURE), self._failures(attempt.number)
        if ended or failures:
            return cause(EXIT_FAILURE, ended, failures)
        return Cause(Outcome.FAILURE, EXIT_FAILURE, f"rank {rank} died and mpirun did not notice", rank)

    def _failures(self, number: int) -> dict[int, dict[str, Any]]:
        """The newest failure event of each rank in an attempt."""
        return newest(self._run, number, range(self._job.world_size), "failure")

    def _judge(self, number: int, found: Cause, *, counts: bool) -> Decision:
        """Decide what follows, put it on record, tell it. `counts` False: a failure that no budget pays for."""
        asked = self._stop.settle()
        end = {"event": "end", "attempt": number, "outcome": found.outcome.value, "step": self._step()}
        if found.outcome is Outcome.PREEMPTED and (other := self._stop.other_than_preemption()):
            found = replace(found, sentence=f"{found.sentence}: {other}")
            counts = False
        if not counts:
            end["counts"] = False
        records = [*self._run.read_attempts(), {**end, "next": "restart"}]
        decision = decide(found.outcome, used(records), self._job.restart, fruitless(records), counts=counts)
        if asked and decision.again and not self._comes_back:
            decision = Decision(False, why=f"asked to by {ASKED.get(asked, asked)}")
        self._record(
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

    def _step(self) -> int:
        """The newest step on record."""
        steps = (
            record["step"] for record in reversed(last_records(self._run.events(0))) if record.get("event") == "step"
        )
        return int(next(steps, 0))

    def _last_words(self, number: int, rank: int | None) -> str:
        """The end of the log that tells most about a failure."""
        for path in (self._run.log(number, rank or 0), self._run.launcher_log(number)):
            if lines := last_lines(path, LAST_LINES):
                return f"; the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
        return ""

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; whether a stop came first."""
        end = self._clock.monotonic() + seconds
        while not self._stop.look():
            if self._clock.monotonic() >= end:
                return False
            self._view.tick()
            self._clock.sleep(min(TICK, max(0.0, end - self._clock.monotonic())))
        return True

    def _pass_on(self, tail: EventTail) -> None:
        for record in tail.read():
            self._view.record(record)


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
