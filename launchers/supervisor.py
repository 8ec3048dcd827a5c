"""The supervisor: starts attempts, waits for their end, records the cause and starts again within the budgets.

Called with the launcher's lock held: by the local launcher, in the foreground or detached, by the batch step of a
Slurm job and by the launcher pod on Kubernetes. How ranks are started and ended is up to the `Job`. Must not touch
checkpoints or events: ranks find the newest checkpoint themselves. Every decision is written to attempts.jsonl before
it is carried out, so that the next supervisor finds it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ortflow.launchers.absence import AbsenceNotices
from ortflow.launchers.budget import Decision, decide
from ortflow.launchers.cause import SAVED, Cause, agreed, cause
from ortflow.launchers.disk_wait import DiskWait
from ortflow.launchers.exclusion import blamed, blamed_too_often, excluded, slow_in_preflight
from ortflow.launchers.moved_directory import between_attempts, location_of, recorded_end
from ortflow.launchers.nccl_log import explained
from ortflow.launchers.notices import Notices, NoticingView, kinds_after
from ortflow.launchers.records import Outcome, Used, attempts_without_step, next_attempt, open_attempt, used
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervised import AttemptNodes, Job, View
from ortflow.launchers.tail import EventTail, ends_of, last_lines, last_records, newest
from ortflow.launchers.watch import ASKED, TICK, Watch, failures
from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.disk_space import RECORDS, OutOfDisk, has_room
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, Preempted
from ortflow.workflow.oom import oom_kills
from ortflow.workflow.own_files import sweep_temporaries

LAST_LINES = 12
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
        self._excluding = False
        """Whether the last attempt's end has excluded a node."""

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

    def _stay(self) -> None:
        """Raise DirectoryMoved if the run directory is no longer at its path."""
        if self._location is not None and self._moved:
            raise between_attempts(self._location)

    def _keep_going(self) -> int:
        pause = 0.0
        self._job.clear()
        sweep_temporaries(self._run.root)
        self._disk.notice.clear()  # takes its block while there is room
        if not self._close_lost_attempt():
            return EXIT_FAILURE
        self._absences.read()
        while not self._pause(pause) and self._choose_nodes():
            outcome, decision = self._attempt(next_attempt(self._run.read_attempts()))
            if not decision.again:
                return EXIT_CODES[outcome]
            if self._comes_back or self._hands_back(outcome):
                return EXIT_PREEMPTED
            pause = decision.pause
        if self._comes_back:
            return EXIT_PREEMPTED
        asked = self._stop.reason or ""
        why = f"requested by {ASKED.get(asked, asked)}"
        self._record(event="stop", outcome=Outcome.PREEMPTED.value, why=why, asked=asked)
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

    def _hands_back(self, outcome: Outcome) -> bool:
        """Whether the scheduler starts the run again, on other nodes where it is a matter of nodes."""
        if not self._job.hands_back:
            return False
        out = excluded(self._run.read_attempts())
        if outcome is Outcome.LOST or (out and self._excluding):
            return self._job.nodes is None or self._job.nodes.lack(out) is not None
        return outcome is Outcome.PREEMPTED

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
        tries = attempts_without_step([*records, end]) if self._job.hands_back else 0
        decision = decide(Outcome.LOST, used(records), self._job.restart, tries)
        if not decision.again:
            end["given_up"] = True
        self._record(
            **end, cause=self._job.lost, next="restart" if decision.again else "stop", why=decision.why,
        )  # fmt: skip
        if not decision.again:
            self._view.message(f"{self._job.lost}; giving up: {decision.why}")
            self._notices.send("failed", f"{self._job.lost}; giving up: {decision.why}")
        return decision.again

    def _attempt(self, number: int) -> tuple[Outcome, Decision]:
        with closing(EventTail(self._run.events(0))) as tail:
            return self._followed(number, tail)

    def _followed(self, number: int, tail: EventTail) -> tuple[Outcome, Decision]:
        self._stay()
        run, job = self._run, self._job
        self._view.attempt(number)
        kills = oom_kills()
        attempt = self._disk.retry(lambda: job.start(number))
        watch = Watch(job, attempt, tail, self._view, self._stop, self._clock, self._location)
        chosen = self._chosen
        elastic = {} if chosen is None else {"nodes": chosen.nodes, "on": list(chosen.names), "elastic": chosen.summary}
        self._record(
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
        known = verdict or attempt.verdict(returncode)
        found = known or cause(
            returncode,
            attempt.statuses(returncode),
            failures(run, number, job.world_size),
            out_of_memory=_grew(kills, oom_kills()),
        )
        if known is None and found.outcome is Outcome.FAILURE and not found.reported and found.rank is None:
            found = attempt.guess(returncode) or found
        found = explained(found, run, number, job.world_size)
        if found.outcome is Outcome.FAILURE and not found.reported and self._stop.check() and not self._begun(number):
            # A signal that arrives before a rank has installed its handler kills it, and the others with it.
            found = Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, "asked to stop before all ranks had started")
        if found.outcome is Outcome.FAILURE:
            found = agreed(ends_of(run, number, range(job.world_size)), job.world_size) or found
        if found.sentence == SAVED and not self._saved(number):
            found = replace(found, sentence="stopped")
        lack = self._lack(found) if found.outcome is Outcome.FAILURE else None
        if lack is not None:
            found = replace(found, sentence=str(lack))
        slow = slow_in_preflight(run, number) if found.outcome is Outcome.FAILURE and found.reported else {}
        decision = self._judge(
            number,
            found,
            counts=lack is None and not slow,
            growing=watch.growing,
            out=self._nodes_out(found, slow, watch),
        )
        if lack is not None and decision.again and not self._disk.wait(lack):
            raise lack
        return found.outcome, decision

    def _record(self, **fields: Any) -> None:
        """Append a record, waiting for space on a full disk; raises OutOfDisk after `room_seconds`.

        Raises DirectoryMoved instead of creating the directory again.
        """
        self._stay()
        self._disk.retry(lambda: self._run.record_attempt(**fields))

    def _lack(self, found: Cause) -> OutOfDisk | None:
        """The missing disk space, as a rank reported it, or as found if a rank could not record why it failed."""
        # If the disk has space again, a signal is the cause, unless a rank had failed: Slurm kills the others then. A
        # rank that failed may have lacked space before.
        notice = self._disk.notice
        lack = notice.fatal() or notice.read() if found.exit_code < 0 else notice.last()
        if lack is None and not found.reported and found.exit_code > 0:
            return None if has_room(self._run.root, RECORDS) else OutOfDisk(self._run.root, RECORDS)
        return lack

    def _begun(self, number: int) -> bool:
        """Whether every rank has written an event in an attempt: before that there is nothing to save."""
        return all(last_records(self._run.events(rank), attempt=number) for rank in range(self._job.world_size))

    def _saved(self, number: int) -> bool:
        """Whether rank 0 says that a checkpoint has what was done: a program that saves by itself has none."""
        return all(record.get("saved", True) for record in newest(self._run, number, [0], "preempted").values())

    def _judge(
        self,
        number: int,
        found: Cause,
        *,
        counts: bool,
        growing: str | None = None,
        out: Mapping[str, Any] = MappingProxyType({}),
    ) -> Decision:
        """Decide what follows, record it and show it.

        `counts` False: the failure counts against no budget. `growing`: why the ranks were asked to save for more
        nodes, which is not a preemption either. `out`: the nodes that the end is blamed on, and those it excludes.
        """
        asked = self._stop.settle()
        end = {"event": "end", "attempt": number, "outcome": found.outcome.value, "step": self._step()}
        if found.outcome is Outcome.PREEMPTED and growing is not None and asked is None:
            found, counts, end["grows"] = replace(found, sentence=f"{found.sentence}: {growing}"), False, True
        elif found.outcome is Outcome.PREEMPTED and (other := self._stop.other_than_preemption()):
            found = replace(found, sentence=f"{found.sentence}: {other}")
            counts = False
        if not counts:
            end["counts"] = False
        records = [*self._run.read_attempts(), {**end, "next": "restart"}]
        decision = decide(
            found.outcome, used(records), self._job.restart, attempts_without_step(records), counts=counts
        )
        if found.outcome is Outcome.PREEMPTED and not decision.again:
            # The sender of the request expects that the run can be started again.
            end["given_up"] = True
            self._view.message(f"{found.sentence}; giving up: {decision.why}")
        self._excluding = bool(out.get("excludes"))
        if self._excluding and decision.again and (lack := self._no_replacement(out["excludes"])) is not None:
            decision = Decision(False, why=f"no other node can take its place: {lack}")
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
            **out,
        )
        self._absences.read()
        for node, why in out.get("excludes", {}).items():
            self._view.message(f"node {node} takes part in no further attempt: {why}")
        if found.outcome is Outcome.FAILURE or (found.outcome is Outcome.USER_ERROR and not found.reported):
            self._view.message(found.sentence + self._end_of_log(number, found.rank))
        if decision.again:
            pause = f" in {decision.pause:g} s" if decision.pause else ""
            reason = "" if found.outcome is Outcome.FAILURE else f"{found.sentence}; "
            self._view.message(f"{reason}restarting{pause} ({decision.why})")
        self._notify(found, decision, used(records), asked=bool(asked), step=end["step"])
        return decision

    def _nodes_out(self, found: Cause, slow: Mapping[str, str], watch: Watch) -> dict[str, Any]:
        """The nodes that an end is blamed on, and those that it excludes; `slow` are those that the preflight names.

        A node that is blamed for other ends stays if none can take its place.
        """
        nodes = [*slow] or blamed(found, watch.places)
        if not nodes:
            return {}
        out = slow or blamed_too_often(nodes, found.sentence, self._run.read_attempts())
        if out and not slow and (lack := self._no_replacement(out) or self._no_other_nodes(out)) is not None:
            self._view.message(f"{', '.join(out)}: blamed for the ends of two attempts, and stays: {lack}")
            out = {}
        return {"blamed": [*nodes], **({"excludes": dict(out)} if out else {})}

    def _no_replacement(self, out: Mapping[str, str]) -> str | None:
        """Why no other node can take the place of these; None if one can, here or by the scheduler."""
        if self._job.hands_back or self._job.replaces_nodes({*excluded(self._run.read_attempts()), *out}):
            return None
        if self._job.nodes is None:
            return "the run has its nodes for good; ask for more in resources.spares"
        lack = self._job.nodes.lack({*excluded(self._run.read_attempts()), *out})
        return None if lack is None else f"{lack}; ask for more in resources.spares"

    def _no_other_nodes(self, out: Mapping[str, str]) -> str | None:
        """Why a run that would be handed back would wait for nodes for ever; None if it has them, or there are some."""
        gone = {*excluded(self._run.read_attempts()), *out}
        here = self._job.nodes is not None and self._job.nodes.lack(gone) is None
        if not self._job.hands_back or here or self._job.has_other_nodes(gone):
            return None
        return "the scheduler has no others for this job"

    def _notify(self, found: Cause, decision: Decision, total: Used, *, asked: bool, step: object) -> None:
        """Send the messages about the end of an attempt."""
        text = found.sentence if found.outcome is Outcome.FINISHED else f"{found.sentence}; {decision.why}"
        kinds = kinds_after(found.outcome, decision, total, self._job.restart, hung=found.hung, asked=asked)
        for kind in kinds:
            self._notices.send(kind, text, step=step, restarts=decision.again)

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
        while not self._stop.check():
            if self._clock.monotonic() >= end:
                return False
            self._view.tick()
            self._clock.sleep(min(TICK, max(0.0, end - self._clock.monotonic())))
        return True


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
