"""The supervisor: starts attempts, waits for their end, records the cause and starts again within the budgets.

Called with the launcher's lock held: by the local launcher, in the foreground or detached, by the batch step of a
Slurm job and by the launcher pod on Kubernetes. How ranks are started and ended is up to the `Job`. Must not touch
checkpoints or events: ranks find the newest checkpoint themselves. Every decision is written to attempts.jsonl before
it is carried out, so that the next supervisor finds it.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.attempts.tail import EventTail
from ortflow.launchers.budget import Decision, decide
from ortflow.launchers.records import Outcome, Used, attempts_without_step, next_attempt, open_attempt, used
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision.absence_notices import AbsenceNotices
from ortflow.launchers.supervision.attempt_end import AttemptEnd, end_of_attempt, end_of_log
from ortflow.launchers.supervision.attempt_records import AttemptRecords
from ortflow.launchers.supervision.disk_wait import DiskWait
from ortflow.launchers.supervision.moved_directory import location_of, recorded_end
from ortflow.launchers.supervision.node_exclusion import NodeExclusion
from ortflow.launchers.supervision.notices import Notices, NoticingView, kinds_after
from ortflow.launchers.supervision.supervised import AttemptNodes, Job, View
from ortflow.launchers.supervision.watch import ASKED, TICK, Watch
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, Preempted
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.system.oom import oom_kills
from ortflow.workflow.system.own_files import sweep_temporaries

EXIT_CODES = {
    Outcome.FINISHED: EXIT_DONE,
    Outcome.USER_ERROR: EXIT_USER,
    Outcome.PREEMPTED: EXIT_PREEMPTED,
    Outcome.FAILURE: EXIT_FAILURE,
    Outcome.LOST: EXIT_FAILURE,
}


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
        self._job, self._run, self._stop, self._clock = job, job.run, stop, clock
        self._notices = Notices(job.notify, job.run, view, clock)
        self._absences = AbsenceNotices(job.notify, self._notices, job.run, clock)
        self._view: View = NoticingView(view, self._notices, self._absences) if job.notify else view
        self._disk = DiskWait(job, self._view, stop, clock)
        self._chosen: AttemptNodes | None = None
        self._location = location_of(job.run)
        self._records = AttemptRecords(job.run, self._location, self._disk)
        self._exclusion = NodeExclusion(job, self._view)

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
        DirectoryMoved
            The run directory was renamed or removed; the attempt has ended.
        OutOfDisk
            The disk stayed full for longer than `job.room_seconds`.
        """
        try:
            with self._stop.listening():
                return self._keep_going()
        except OrtflowError as error:
            if not isinstance(error, Preempted):
                self._notices.send("failed", str(error))
            raise
        finally:
            self._notices.close()
            # The request has been carried out, and no rank is left to read it.
            if not self._moved:
                with suppress(OSError):
                    self._run.stop_request.unlink(missing_ok=True)
            if self._location is not None:
                self._location.close()
                self._location = None

    @property
    def view(self) -> View:
        """The view that also sends messages: code that waits while an attempt starts calls its `tick`."""
        return self._view

    @property
    def _moved(self) -> bool:
        """Whether the run directory is no longer at its path."""
        return self._location is not None and not self._location.intact()

    def _keep_going(self) -> int:
        pause = 0.0
        self._job.clear()
        sweep_temporaries(self._run.root)
        self._disk.notice.clear()  # takes its block while there is room
        if not self._close_lost_attempt():
            return EXIT_FAILURE
        self._absences.read()
        while not self._pause(pause) and self._choose_nodes():
            outcome, decision = self._attempt(next_attempt(self._records.read()))
            if not decision.again:
                return EXIT_CODES[outcome]
            if self._comes_back or self._exclusion.hands_back(outcome):
                return EXIT_PREEMPTED
            pause = decision.pause
        if self._comes_back:
            return EXIT_PREEMPTED
        stop_reason = self._stop.reason or ""
        why = f"requested by {ASKED.get(stop_reason, stop_reason)}"
        self._records.append(event="stop", outcome=Outcome.PREEMPTED.value, why=why, asked=stop_reason)
        return EXIT_PREEMPTED

    def _choose_nodes(self) -> bool:
        """Wait for the nodes of an elastic run; returns whether an attempt may start."""
        if self._job.nodes is None:
            return True
        self._chosen = self._job.nodes.choose(self._view, self._stop.check)
        if self._chosen is None:
            return False
        self._job = replace(self._job, world_size=self._chosen.world_size)
        return True

    @property
    def _comes_back(self) -> bool:
        """Whether the sender of the stop request starts the run again."""
        return self._job.comes_back and self._stop.signalled

    def _close_lost_attempt(self) -> bool:
        """Record the end of an attempt whose launcher died; returns whether the run continues.

        A user may start a run any number of times. If a scheduler restarts it, attempts without a step are limited.
        """
        records = self._records.read()
        number = open_attempt(records)
        if number is None:
            return True
        end: dict[str, Any] = {
            "event": "end", "attempt": number, "outcome": Outcome.LOST.value, "step": self._records.last_step()
        }  # fmt: skip
        tries = attempts_without_step([*records, end]) if self._job.hands_back else 0
        decision = decide(Outcome.LOST, used(records), self._job.restart, tries)
        if not decision.again:
            end["given_up"] = True
        self._records.append(
            **end, cause=self._job.lost, next="restart" if decision.again else "stop", why=decision.reason,
        )  # fmt: skip
        if not decision.again:
            self._view.message(f"{self._job.lost}; giving up: {decision.reason}")
            self._notices.send("failed", f"{self._job.lost}; giving up: {decision.reason}")
        return decision.again

    def _attempt(self, number: int) -> tuple[Outcome, Decision]:
        with closing(EventTail(self._run.events(0))) as tail:
            return self._followed(number, tail)

    def _followed(self, number: int, tail: EventTail) -> tuple[Outcome, Decision]:
        self._records.stay()
        run, job = self._run, self._job
        self._view.attempt(number)
        kills = oom_kills()
        attempt = self._disk.retry(lambda: job.start(number))
        watch = Watch(job, attempt, tail, self._view, self._stop, self._clock, self._location)
        allocation = self._chosen
        elastic = (
            {}
            if allocation is None
            else {"nodes": allocation.nodes, "on": list(allocation.names), "elastic": allocation.summary}
        )
        self._records.append(
            event="start", attempt=number, world_size=job.world_size, pid=attempt.pid, host=socket.gethostname(),
            **elastic,
        )  # fmt: skip
        try:
            returncode, verdict = watch.follow()
        finally:
            attempt.kill()
        if self._location is not None and self._moved:
            raise recorded_end(self._location, number, job.world_size)
        job.clear()
        sweep_temporaries(run.root)
        watch.pass_on()
        watch.withdraw()
        end = end_of_attempt(
            job, attempt, returncode, verdict, self._stop, self._disk.notice, out_of_memory=_grew(kills, oom_kills())
        )
        decision = self._judge(number, end, watch)
        if end.lack is not None and decision.again and not self._disk.wait(end.lack):
            raise end.lack
        return end.cause.outcome, decision

    def _judge(self, number: int, ended: AttemptEnd, watch: Watch) -> Decision:
        """Decide what follows, record it and show it."""
        cause, counts, out = ended.cause, ended.counts, self._exclusion.fields(ended, watch.places)
        stop_reason = self._stop.settle()
        end = {
            "event": "end", "attempt": number, "outcome": cause.outcome.value, "step": self._records.last_step()
        }  # fmt: skip
        if cause.outcome is Outcome.PREEMPTED and watch.growing is not None and stop_reason is None:
            # The ranks were asked to save for more nodes, which is no preemption.
            cause, counts, end["grows"] = replace(cause, sentence=f"{cause.sentence}: {watch.growing}"), False, True
        elif cause.outcome is Outcome.PREEMPTED and (other := self._stop.other_than_preemption()):
            cause = replace(cause, sentence=f"{cause.sentence}: {other}")
            counts = False
        if not counts:
            end["counts"] = False
        records = [*self._records.read(), {**end, "next": "restart"}]
        decision = decide(
            cause.outcome, used(records), self._job.restart, attempts_without_step(records), counts=counts
        )
        if cause.outcome is Outcome.PREEMPTED and not decision.again:
            # The sender of the request expects that the run can be started again.
            end["given_up"] = True
            self._view.message(f"{cause.sentence}; giving up: {decision.reason}")
        if decision.again and (obstacle := self._exclusion.obstacle()) is not None:
            decision = Decision(False, reason=f"no other node can take its place: {obstacle}")
        if stop_reason and decision.again and not self._comes_back:
            decision = Decision(False, reason=f"requested by {ASKED.get(stop_reason, stop_reason)}")
        self._records.append(
            **end,
            exit_code=cause.exit_code,
            cause=cause.sentence,
            rank=cause.rank,
            next="restart" if decision.again else "stop",
            pause=decision.pause,
            why=decision.reason,
            asked=stop_reason,
            **out,
        )
        self._absences.read()
        for node, cause_of_node in out.get("excludes", {}).items():
            self._view.message(f"node {node} takes part in no further attempt: {cause_of_node}")
        if cause.outcome is Outcome.FAILURE or (cause.outcome is Outcome.USER_ERROR and not cause.reported):
            self._view.message(cause.sentence + end_of_log(self._run, number, cause.rank))
        if decision.again:
            pause = f" in {decision.pause:g} s" if decision.pause else ""
            reason = "" if cause.outcome is Outcome.FAILURE else f"{cause.sentence}; "
            self._view.message(f"{reason}restarting{pause} ({decision.reason})")
        self._notify(cause, decision, used(records), asked=bool(stop_reason), step=end["step"])
        return decision

    def _notify(self, cause: Cause, decision: Decision, total: Used, *, asked: bool, step: object) -> None:
        """Send the messages about the end of an attempt."""
        text = cause.sentence if cause.outcome is Outcome.FINISHED else f"{cause.sentence}; {decision.reason}"
        kinds = kinds_after(cause.outcome, decision, total, self._job.restart, hung=cause.hung, asked=asked)
        for kind in kinds:
            self._notices.send(kind, text, step=step, restarts=decision.again)

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; returns whether a stop was requested meanwhile."""
        end = self._clock.monotonic() + seconds
        while not self._stop.check():
            if self._clock.monotonic() >= end:
                return False
            self._view.tick()
            self._clock.sleep(min(TICK, max(0.0, end - self._clock.monotonic())))
        return True


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
