"""The supervisor: starts attempts, waits for their end, records the cause and starts again within the budgets.

Called with the launcher's lock held: by the local launcher, in the foreground or detached, by the batch step of a
Slurm job and by the launcher pod on Kubernetes. How ranks are started and ended is up to the `Job`. Must not touch
checkpoints or events: ranks find the newest checkpoint themselves. Every decision is written to attempts.jsonl before
it is carried out, so that the next supervisor finds it.
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
from ortflow.workflow.disk_space import RECORDS, Notice, OutOfDisk, has_room, is_full, out_of_disk, wait_for_room
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError
from ortflow.workflow.owned import sweep_temporaries
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.run import Restart

T = TypeVar("T")
TICK = 0.1
GRACE = 30.0
"""Seconds that ranks have to save and stop, unless the backend sets another limit."""
PATIENCE = 5.0
"""Seconds in which mpirun has to end the other ranks when one is dead. Hydra does not if that rank had not initialised
MPI."""
PATIENCE_REPORTED = 1.0
"""The same if the dead rank has recorded why it failed."""
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
    """Where the progress of a run is shown."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Show an event of rank 0."""

    def say(self, text: str) -> None:
        """Show a message of the launcher."""

    def attempt(self, number: int) -> None:
        """Show that an attempt starts; the first has number 0."""

    def tick(self) -> None:
        """Called ten times a second."""


class Running(Protocol):
    """A started attempt."""

    number: int

    @property
    def pid(self) -> int:
        """Process id of mpirun, srun or the only rank."""

    def poll(self) -> int | None:
        """Exit code of mpirun, srun or the only rank, negative for a signal; None while it runs."""

    def gone(self) -> set[int]:
        """Ranks that are known to have ended."""

    def statuses(self, returncode: int) -> dict[int, int]:
        """Known exit status of the ranks that did not end with 0, by rank; negative for a signal."""

    def verdict(self, returncode: int) -> Cause | None:
        """The cause of the end if mpirun or the scheduler reports one that no rank can know."""

    def guess(self, returncode: int) -> Cause | None:
        """The probable cause if neither ranks nor exit statuses give one."""

    def ask_to_leave(self) -> None:
        """Ask the ranks to save and stop."""

    def kill(self) -> None:
        """Kill all processes of the attempt."""


@dataclass(frozen=True)
class Job:
    """The run that is supervised, and how its attempts are started."""

    run: RunDir
    world_size: int
    restart: Restart
    start: Callable[[int], Running]
    """Starts the attempt with a given number. Raises OrtflowError if that fails."""
    clear: Callable[[], None]
    """Returns when no rank of an earlier attempt can write any more. Raises OrtflowError if that cannot be ensured."""
    lost: str = "its launcher died"
    """Cause of an attempt whose end was not recorded."""
    hands_back: bool = False
    """A preempted run gives up its allocation, and the scheduler starts it again."""
    grace: float = GRACE
    """Seconds that ranks have to save and stop."""
    comes_back: bool = False
    """The sender of a stop signal starts the run again."""
    room_seconds: float = 600.0
    """Seconds to wait for space on a full disk."""


class Supervisor:
    """Supervises one run, from its first attempt under this launcher to its last.

    Parameters
    ----------
    job
        The run and how its attempts are started.
    view
        Where progress is shown.
    stop
        The requests to stop: signals, the stop file, the time limit.
    clock
        The clock of every pause and limit.
    """

    def __init__(self, job: Job, view: View, stop: Stop, clock: Clock = SYSTEM_CLOCK) -> None:
        self._job, self._run, self._view, self._stop = job, job.run, view, stop
        self._notice, self._clock = Notice(job.run.heartbeat), clock

    def supervise(self) -> int:
        """Supervise the run to its end.

        Returns
        -------
        int
            0 if the run is done, 2 for wrong input, 75 if it was preempted or asked to stop, otherwise 1.

        Raises
        ------
        OrtflowError
            An attempt cannot be started, or ranks of an earlier one cannot be ended.
        OutOfDisk
            The disk stayed full for longer than `job.room_seconds`.
        """
        try:
            with self._stop.listening():
                return self._keep_going()
        finally:
            # The request has been carried out, and no rank is left to read it.
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
        why = f"requested by {ASKED.get(asked, asked)}"
        self._record(event="stop", outcome=Outcome.PREEMPTED.value, why=why, asked=asked)
        return EXIT_PREEMPTED

    @property
    def _comes_back(self) -> bool:
        """Whether the sender of the stop request starts the run again."""
        return self._job.comes_back and self._stop.signalled

    def _close_lost_attempt(self) -> bool:
        """Record the end of an attempt whose launcher died; returns whether the run continues.

        A user may start a run any number of times. If a scheduler restarts it, attempts without a step are limited.
        """
        records = self._run.read_attempts()
        number = open_attempt(records)
        if number is None:
            return True
        end: dict[str, Any] = {
            "event": "end", "attempt": number, "outcome": Outcome.LOST.value, "step": self._step()
        }  # fmt: skip
        tries = fruitless([*records, end]) if self._job.hands_back else 0
        decision = decide(Outcome.LOST, used(records), self._job.restart, tries)
        if not decision.again:
            end["given_up"] = True
        self._record(
            **end, cause=self._job.lost, next="restart" if decision.again else "stop", why=decision.why,
        )  # fmt: skip
        if not decision.again:
            self._view.say(f"{self._job.lost}; giving up: {decision.why}")
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
        known = verdict or attempt.verdict(returncode)
        found = known or cause(
            returncode, attempt.statuses(returncode), self._failures(number), out_of_memory=_grew(kills, oom_kills())
        )
        if known is None and found.outcome is Outcome.FAILURE and not found.reported and found.rank is None:
            found = attempt.guess(returncode) or found
        found = explained(found, run, number, job.world_size)
        if found.outcome is Outcome.FAILURE and not found.reported and self._stop.look() and not self._begun(number):
            # A signal that arrives before a rank has installed its handler kills it, and the others with it.
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
        """Append a record, waiting for space on a full disk; raises OutOfDisk after `room_seconds`."""
        self._with_room(lambda: self._run.record_attempt(**fields))

    def _with_room(self, do: Callable[[], T]) -> T:
        """Call `do`, again if the disk was full and has space now."""
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
        """Wait for space on the disk; False after `room_seconds`."""

        def asked() -> object:
            self._view.tick()
            return self._stop.look()

        self._view.say(f"{lack}: waiting {self._job.room_seconds:g} s for room")
        room = wait_for_room(lack, self._notice, self._job.room_seconds, asked, self._clock)
        return room or bool(self._stop.look())

    def _follow(self, attempt: Running, tail: EventTail) -> tuple[int, Cause | None]:
        """Wait for the end of an attempt; the exit code, and the cause if the supervisor ended it."""
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
                reported = self._failures(attempt.number) if dead else {}
                patience = PATIENCE_REPORTED if reported else PATIENCE
                if dead_since is not None and moment > dead_since + patience:
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
        """Ranks that have ended without a final event."""
        gone = attempt.gone()
        return gone - ends_of(self._run, attempt.number, gone).keys()

    def _lack(self, found: Cause) -> OutOfDisk | None:
        """The missing disk space, as a rank reported it, or as found if a rank could not record why it failed."""
        # If the disk has space again, a signal is the cause, unless a rank had failed: Slurm kills the others then. A
        # rank that failed may have lacked space before.
        lack = self._notice.fatal() or self._notice.read() if found.exit_code < 0 else self._notice.last()
        if lack is None and not found.reported and found.exit_code > 0:
            return None if has_room(self._run.root, RECORDS) else OutOfDisk(self._run.root, RECORDS)
        return lack

    def _begun(self, number: int) -> bool:
        """Whether every rank has written an event in an attempt: before that there is nothing to save."""
        return all(last_records(self._run.events(rank), attempt=number) for rank in range(self._job.world_size))

    def _hung(self, attempt: Running, rank: int) -> Cause:
        """Why a rank died that mpirun did not notice; `rank` is named if the record names none."""
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
        """Decide what follows, record it and show it. `counts` False: the failure counts against no budget."""
        asked = self._stop.settle()
        end = {"event": "end", "attempt": number, "outcome": found.outcome.value, "step": self._step()}
        if found.outcome is Outcome.PREEMPTED and (other := self._stop.other_than_preemption()):
            found = replace(found, sentence=f"{found.sentence}: {other}")
            counts = False
        if not counts:
            end["counts"] = False
        records = [*self._run.read_attempts(), {**end, "next": "restart"}]
        decision = decide(found.outcome, used(records), self._job.restart, fruitless(records), counts=counts)
        if found.outcome is Outcome.PREEMPTED and not decision.again:
            # Not what its sender expects, who starts it again or believes that it can be.
            end["given_up"] = True
            self._view.say(f"{found.sentence}; giving up: {decision.why}")
        if asked and decision.again and not self._comes_back:
            decision = Decision(False, why=f"requested by {ASKED.get(asked, asked)}")
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
        if found.outcome is Outcome.FAILURE or (found.outcome is Outcome.USER_ERROR and not found.reported):
            self._view.say(found.sentence + self._end_of_log(number, found.rank))
        if decision.again:
            pause = f" in {decision.pause:g} s" if decision.pause else ""
            reason = "" if found.outcome is Outcome.FAILURE else f"{found.sentence}; "
            self._view.say(f"{reason}restarting{pause} ({decision.why})")
        return decision

    def _step(self) -> int:
        """The last step that was recorded."""
        steps = (
            record["step"] for record in reversed(last_records(self._run.events(0))) if record.get("event") == "step"
        )
        return int(next(steps, 0))

    def _end_of_log(self, number: int, rank: int | None) -> str:
        """The last lines of the log that is most likely to explain a failure."""
        for path in (self._run.log(number, rank or 0), self._run.launcher_log(number)):
            if lines := last_lines(path, LAST_LINES):
                return f"; the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
        return ""

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; returns whether a stop was requested meanwhile."""
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
