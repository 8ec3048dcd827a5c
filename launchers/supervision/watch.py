"""Watching one attempt until it ends: requests to stop, ranks that hang or die unnoticed. Used by the supervisor."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ortflow.launchers.attempts.cause import Cause, cause
from ortflow.launchers.attempts.exclusion import places_of
from ortflow.launchers.attempts.liveness import Liveness
from ortflow.launchers.attempts.stacks import stacks_of, waited_for, where
from ortflow.launchers.attempts.tail import EventTail, ends_of, newest
from ortflow.launchers.records import Outcome
from ortflow.launchers.stop import GROWTH, Stop, read_request, write_request
from ortflow.launchers.supervision.supervised import Job, Running, View
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock

TICK = 0.1
PATIENCE = 5.0
"""Seconds in which mpirun has to end the other ranks when one is dead. Hydra does not if that rank had not initialised
MPI."""
PATIENCE_REPORTED = 1.0
"""The same if the dead rank has recorded why it failed."""
ASKED = {"interrupt": "Ctrl-C", "cancel": "ortflow cancel", "scheduler": "the scheduler's command"}


def failures(run: RunDir, attempt: int, world_size: int) -> dict[int, dict[str, Any]]:
    """The newest failure event of each rank in an attempt."""
    return newest(run, attempt, range(world_size), "failure")


class Watch:
    """Watches a started attempt.

    Parameters
    ----------
    job
        The run.
    attempt
        The attempt, which is ended if it hangs, or does not stop in time.
    tail
        The events of rank 0, which are passed on to `view`.
    view
        Where progress is shown.
    stop
        The requests to stop.
    clock
        The clock of every limit.
    location
        The run directory; ranks are asked to save if it is renamed or removed.
    """

    def __init__(
        self,
        job: Job,
        attempt: Running,
        tail: EventTail,
        view: View,
        stop: Stop,
        clock: Clock,
        location: Location | None = None,
    ) -> None:
        self._job, self._attempt, self._tail = job, attempt, tail
        self._view, self._stop, self._clock, self._location = view, stop, clock, location
        self.growing: str | None = None
        """Why the ranks were asked to save for an attempt with more nodes."""
        self._trains_since: float | None = None
        self._places: dict[int, str] = {}

    @property
    def places(self) -> dict[int, str]:
        """The node of each rank, as far as they have started."""
        return self._places or places_of(self._job.run, self._attempt.number, self._job.world_size)

    def follow(self) -> tuple[int, Cause | None]:
        """Wait for the end of the attempt; the exit code, and the cause if it was ended here."""
        attempt = self._attempt
        asked_at: float | None = None
        dead_since: float | None = None
        next_check = 0.0
        limit = self._job.restart.hung_seconds
        liveness = None
        if limit is not None:
            liveness = Liveness(self._job.run, attempt.number, self._job.world_size, limit, self._clock.monotonic())
        while (returncode := attempt.poll()) is None:
            moment = self._clock.monotonic()
            if self._stop.check() and asked_at is None:
                asked_at = moment
                self._ask()
            if asked_at is None and self.growing is None:
                self._grow()
            if self._stop.now or (asked_at is not None and moment > asked_at + self._job.grace):
                attempt.kill()
                late = "" if self._stop.now else f": they did not leave within {self._job.grace:g} s"
                sentence = f"the ranks were killed without saving{late}"
                return EXIT_PREEMPTED, Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, sentence)
            if moment >= next_check:
                next_check = moment + 1.0
                if asked_at is None and self._location is not None and not self._location.intact():
                    asked_at = moment
                    attempt.ask_to_leave()
                    self._view.message(f"{self._location.root} was renamed or removed: saving and stopping")
                hung = liveness.hung(moment) if liveness is not None else None
                if hung is not None and asked_at is None:
                    attempt.kill()
                    stacks = stacks_of(self._job.run, attempt.number, self._job.world_size)
                    sentence = "; ".join(filter(None, (hung, where(stacks))))
                    return EXIT_FAILURE, Cause(
                        Outcome.FAILURE, EXIT_FAILURE, sentence, hung=True, waited_for=waited_for(stacks)
                    )
                dead = self._dead()
                dead_since = (dead_since or moment) if dead else None
                # Another rank's report may mean that its call to the dead one failed: mpirun must name that one.
                patience = PATIENCE_REPORTED if newest(self._job.run, attempt.number, dead, "failure") else PATIENCE
                if dead_since is not None and moment > dead_since + patience:
                    attempt.kill()
                    return EXIT_FAILURE, self._unnoticed(dead[0])
            self.pass_on()
            self._view.tick()
            self._clock.sleep(TICK)
        return returncode, None

    def pass_on(self) -> None:
        """Show the new events of rank 0."""
        for record in self._tail.read():
            if self._trains_since is None and record.get("event") == "step":
                self._trains_since, self._places = self._clock.monotonic(), self.places
            self._view.record(record)

    def _ask(self) -> None:
        reason = self._stop.reason or ""
        if reason != "cancel" and (self._location is None or self._location.intact()):
            with suppress(OSError):  # the signal alone then
                write_request(self._job.run.stop_request, reason)
        self._attempt.ask_to_leave()
        again = "; Ctrl-C again stops immediately" if reason == "interrupt" else ""
        self._view.message(f"{ASKED.get(reason, reason)}: saving and stopping{again}")

    def _grow(self) -> None:
        """Ask the ranks to save and exit if more nodes can take part; nothing forces them to hurry."""
        nodes = self._job.nodes
        if nodes is None or self._trains_since is None:
            return
        self.growing = nodes.growing(self._clock.monotonic() - self._trains_since)
        if self.growing is None:
            return
        if read_request(self._job.run.stop_request) is None:  # never replace a request of the user
            with suppress(OSError):
                write_request(self._job.run.stop_request, GROWTH)
        self._attempt.ask_to_leave()
        self._view.message(f"{self.growing}: saving and restarting")

    def withdraw(self) -> None:
        """Remove the request to save for more nodes, which the ranks of the next attempt would follow, too."""
        request = read_request(self._job.run.stop_request) if self.growing is not None else None
        if request is not None and request.get("reason") == GROWTH:
            with suppress(OSError):
                self._job.run.stop_request.unlink(missing_ok=True)

    def _dead(self) -> list[int]:
        """Ranks that have ended without a final event, as far as is known in the order in which they did."""
        gone = self._attempt.gone()
        ended = ends_of(self._job.run, self._attempt.number, gone)
        return [rank for rank in gone if rank not in ended]

    def _unnoticed(self, rank: int) -> Cause:
        """Why a rank died that mpirun did not notice; `rank` is named if the record names none."""
        attempt, job = self._attempt, self._job
        if verdict := attempt.verdict(EXIT_FAILURE):
            return verdict
        ended, reports = attempt.statuses(EXIT_FAILURE), failures(job.run, attempt.number, job.world_size)
        if ended or not all(failure.get("communication") for failure in reports.values()):
            return cause(EXIT_FAILURE, ended, reports)
        return Cause(Outcome.FAILURE, EXIT_FAILURE, f"rank {rank} died and mpirun did not notice", rank)
