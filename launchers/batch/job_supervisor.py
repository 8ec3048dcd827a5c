"""The supervisor of a run inside its batch job, for every scheduler. Made by `ortflow.launchers.batch.in_job`.

It runs the command of the script as an attempt, restarts it after a failure within the budget, and asks the scheduler
to requeue the job after a preemption or ahead of the time limit. Then it stays until the scheduler's record shows the
next start: a job whose script ends in its grace period may count as completed, and is not started again. The scheduler
may have lost contact with a node where an earlier supervisor still runs, so the run directory is fenced first
(`ortflow.workflow.run.fence`).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Protocol

from ortflow.launchers.attempts.exclusion import excluded
from ortflow.launchers.attempts.locks import HeldError, hold, wait_free
from ortflow.launchers.batch.current_job import Answer, CurrentJob, Fate, message_of, requeue
from ortflow.launchers.batch.elastic import AllocatedNodes
from ortflow.launchers.batch.job_validity import is_on_record, submission_of
from ortflow.launchers.batch.reserve import ReservedNodes
from ortflow.launchers.batch.scheduler import Refused
from ortflow.launchers.batch.stopping import JobStop
from ortflow.launchers.records import CANCELS, Outcome, last_end, open_attempt, pending_changes
from ortflow.launchers.stop import read_request
from ortflow.launchers.supervision import processes
from ortflow.launchers.supervision.absence_notices import current
from ortflow.launchers.supervision.supervised import Job, Running, grace_of
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.launchers.view.plain import PlainView
from ortflow.manifests.batch import LEAVE, SCRIPT
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED, OrtflowError, UserError
from ortflow.workflow.rank import lacking
from ortflow.workflow.run.fence import DELAY, EXIT_FENCED, VARIABLE, Fence, claim
from ortflow.workflow.run.record import ATTEMPTS, damage_message, set_aside
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.checks.nodes import CHOSEN, variables
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

REMINDER = "not_back.sh"
"""Script of the job that looks whether the run is back."""
OLD_SUPERVISOR = 10.0
"""Seconds that a fenced batch step has to release the lock; a node without network may hold it forever."""
SLOW_RANKS = 5.0
"""Seconds that ranks have to end by themselves after their step has ended."""
OLD_RANKS = 5.0
"""Seconds that ranks on other nodes have to end. Those that hang in MPI's start do not check the fence, nor write."""
CANCELLING = 60.0
"""Seconds in which the scheduler ends a job that is being cancelled."""
EXCLUDING = 15.0
"""Seconds in which a scheduler notes the nodes that a job must not get."""
AWAY = 3600.0
"""Seconds for which an unreachable scheduler is retried; the time limit may end the job earlier."""


class Started(Running, Protocol):
    """An attempt whose output shows why the scheduler ended it."""

    def output(self) -> str:
        """Return the end of the output of the process that starts the ranks."""


class Ranks(Protocol):
    """How ranks are started inside a job."""

    def start(self, spec: RunSpec, number: int, environment: Mapping[str, str]) -> Started:
        """Start an attempt; raises OrtflowError. `environment` is that of the job, with the attempt's variables."""

    def lead(self, spec: RunSpec) -> float:
        """Return the seconds ahead of the time limit at which the ranks save."""


class RunSupervisor:
    """The supervisor of one start of a run's job.

    Parameters
    ----------
    run
        The run directory, with its run file.
    ranks
        How ranks are started.
    job
        The job of this process.
    comment
        The job's comment, with the id of the submission.
    clock
        The clock of every wait.

    Raises
    ------
    UserError
        The run directory is not visible on this node.
    """

    def __init__(self, run: RunDir, ranks: Ranks, job: CurrentJob, comment: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run, self._ranks, self._job, self._comment, self._clock = run, ranks, job, comment, clock
        if not run.run_file.exists():
            raise UserError(f"{job.node} {lacking(run)}")
        self._spec: RunSpec = load_run_file(run.run_file)
        self._view = PlainView(run, self._spec.monitor.every_steps)
        self._attempt: Started | None = None
        self._nodes: AllocatedNodes | ReservedNodes | None = None
        self._held: int | None = None
        self._fence: Fence = claim(run, job=job.id, restarts=job.restarts, node=job.node)

    def keep(self) -> int:
        """Supervise the run until it ends or the scheduler requeues the job.

        Returns
        -------
        int
            The exit code of the job's script.
        """
        self._take_over()
        spec = self._spec
        if spec.elastic and self._job.nodes() is not None:
            script = self._run.root / self._job.folder / SCRIPT
            self._nodes = AllocatedNodes(spec, self._job, script, self._run.read_attempts(), self._clock)
        elif spec.chooses_nodes and self._job.nodes() is not None:
            self._nodes = ReservedNodes(spec, self._job, lambda: excluded(self._run.read_attempts()))
        job = Job(
            self._run,
            spec.world_size,
            spec.restart,
            self._start,
            self._clear,
            f"{self._job.scheduler} ended the job before its cause was recorded: its node was lost, or it was killed "
            "without grace",
            hands_back=True,
            comes_back=True,
            grace=grace_of(spec),
            room_seconds=spec.checkpoint.wait_for_room,
            has_other_nodes=self._has_other_nodes,
            nodes=self._nodes,
            notify=spec.monitor.notify,
        )
        stop = JobStop(self._run.stop_request, self._job, self._ranks.lead(spec), self._output, self._clock)
        code = Supervisor(job, self._view, stop, self._clock).supervise()
        self._job.leave(self._run)
        end = last_end(self._run.read_attempts()) or {}
        if code == EXIT_PREEMPTED and end.get("asked") in CANCELS:
            return self._cancelled()
        if code == EXIT_PREEMPTED and end.get("given_up"):
            return EXIT_FAILURE
        if code == EXIT_PREEMPTED:
            code = self._again(end.get("asked"))
            self._job.leave(self._run)
        return code

    def _take_over(self) -> None:
        """Keep others out of the run directory, and record what an earlier supervisor or the client could not."""
        self._fence.watch(self._fenced)
        self._lock()
        request = read_request(self._run.stop_request)
        if request is not None and request.get("reason") != "cancel":
            # An earlier supervisor passed on a signal with it and could not remove it.
            self._run.stop_request.unlink(missing_ok=True)
        if not is_on_record(self._run.read_attempts(), self._job.id):
            # The client that submitted it ended before the scheduler had answered.
            self._record_submit(self._job.id, submission=submission_of(self._comment))
        if message := damage_message(self._run.attempts, set_aside(self._run.attempts, ATTEMPTS), aside=True):
            self._view.message(f"warning: {message}")
        self._job.begin(self._run)
        if lacking := self._job.lacking():
            self._view.message(f"warning: {lacking}")
        if self._job.restarts:
            self._view.message(
                f"started again by {self._job.scheduler} on {self._job.node}, restart {self._job.restarts}"
            )
        for note in pending_changes(self._run.read_attempts()):
            self._view.message(note)

    def _lock(self) -> None:
        """Take the lock to show who supervises the run. Not required: the fence keeps others out."""
        if wait_free(self._run.lock, OLD_SUPERVISOR, self._clock):
            with suppress(HeldError, OSError):
                self._held = hold(self._run.lock)

    def _record_submit(self, job: str, **fields: Any) -> None:
        self._run.record_attempt(event="submit", launcher=self._job.launcher, job=job, **fields)

    def _start(self, number: int) -> Started:
        environment = {**os.environ, "ORTFLOW_ATTEMPT": str(number), VARIABLE: self._fence.token}
        spec = self._spec
        if self._nodes is not None:
            spec = self._nodes.spec
            environment |= variables(spec, self._nodes.summary)
            if isinstance(self._nodes, ReservedNodes):
                environment[CHOSEN] = ",".join(self._nodes.chosen)
        self._attempt = self._ranks.start(spec, number, environment)
        return self._attempt

    def _output(self) -> str:
        """The output of the newest attempt."""
        return self._attempt.output() if self._attempt is not None else ""

    def _clear(self) -> None:
        """Wait for the ranks of an earlier supervisor: fenced ones end within DELAY.

        Ranks hold a lock until they end. If a node without network still holds it, the fence is enough: ranks check it
        before they make anything visible.
        """
        if open_attempt(self._run.read_attempts()) is not None and self._attempt is None:
            self._clock.sleep(DELAY)
        if wait_free(self._run.ranks_lock, SLOW_RANKS, self._clock):
            return
        # The scheduler gave up this node while its daemon was away: what started the ranks has ended, ranks on the
        # node have not.
        processes.kill(processes.of_run(self._run.root))
        if not wait_free(self._run.ranks_lock, OLD_RANKS, self._clock):
            self._view.message(f"{self._run.ranks_lock} is still locked by unreachable ranks, which are fenced off")

    def _fenced(self) -> None:
        """A newer supervisor owns the run directory: end this one before it writes again; ranks do the same."""
        print("a newer job or restart owns the run directory: this one ends", flush=True)
        os._exit(EXIT_FENCED)

    def _cancelled(self) -> int:
        """Cancel the job, so that it neither succeeds nor is started again."""
        if self._held is not None:
            # Everything is recorded: `ortflow resume` need not wait until the scheduler has ended this job.
            os.close(self._held)
        if self._job.fate() is Fate.RUNNING:
            with suppress(OrtflowError):
                self._job.cancel()
            self._stay(min(CANCELLING, self._job.stay))
        return EXIT_PREEMPTED

    def _again(self, stop_reason: str | None) -> int:
        """Have the scheduler start the run again after the stop, and stay until it ends this process."""
        name, out = self._job.scheduler, excluded(self._run.read_attempts())
        self._job.excluded = [*out]
        answer, message = requeue(self._job, AWAY, self._clock)
        if answer is Answer.QUEUED:
            if out:
                self._exclude([*out])
            self._view.message(f"queued again; waiting for {name} to end this job")
            self._leave_reminders()
            self._stay(self._job.stay, until=self._job.queued_again)
            return EXIT_PREEMPTED
        if answer is Answer.CANCELLED:
            by = self._job.cancelled_by
            self._run.record_attempt(event="stop", outcome=Outcome.PREEMPTED.value, asked=by, why=by)
            return EXIT_PREEMPTED
        if answer is Answer.REFUSED:
            try:
                new = self._job.follow_up(self._run.root / self._job.folder / SCRIPT)
            except (Refused, OrtflowError) as error:
                message = f"{message}; {message_of(error)}"
                if stop_reason == signal.SIGTERM.name and self._job.fate() is Fate.UNKNOWN:
                    # The scheduler is ending this job, and may queue it again by itself.
                    self._stay(self._job.stay)
            else:
                self._view.message(f"{name} refuses to requeue this job ({message}); job {new} follows it")
                self._record_submit(new, follows=self._job.id)
                self._leave_reminders()
                return EXIT_PREEMPTED
        self._view.message(f"{name} does not start the run again ({message}); continue it with `ortflow resume`")
        self._run.record_attempt(
            event="stop", outcome=Outcome.LOST.value, why=f"{name} refused to start it again: {message}"
        )
        return EXIT_FAILURE

    def _leave_reminders(self) -> None:
        """Have the scheduler look whether the run is back in time: nothing of a run that waits in a queue is alive."""
        sinks = [sink for sink in self._spec.monitor.notify if "not_back" in sink.on]
        script = self._run.root / self._job.folder / REMINDER
        command = shlex.join([sys.executable, "-m", "ortflow.launchers.absence", str(self._run.root)])
        path = os.environ.get("PYTHONPATH")
        exports = [f"export PYTHONPATH={shlex.quote(path)}"] if path else []
        for limit in sorted({sink.not_back_seconds for sink in sinks}):
            try:
                gone = current(self._run)
                # An earlier attempt may have begun the absence.
                passed = max(0.0, self._clock.time() - gone.since) if gone is not None else 0.0
                seconds = max(1.0, limit - passed)
                write_atomically(script, "\n".join(["#!/bin/sh", *exports, LEAVE, f"exec {command}", ""]).encode())
                self._job.remind(script, seconds, f"{self._spec.name}-not-back", self._run.root / "logs/not-back.log")
            except (Refused, OrtflowError, OSError) as error:
                self._view.message(
                    f"warning: nothing can send the message not_back before the run is back: {message_of(error)}"
                )
                return

    def _has_other_nodes(self, excluded: Collection[str]) -> bool:
        resources, script = self._spec.resources, self._run.root / self._job.folder / SCRIPT
        try:
            return self._job.has_other_nodes(resources.min_nodes or resources.nodes, script, sorted(excluded))
        except OrtflowError:
            return False

    def _exclude(self, nodes: list[str]) -> None:
        """Keep nodes out of the next start; this process may be killed meanwhile, and the next start tries again."""
        end, message = self._clock.monotonic() + EXCLUDING, ""
        while self._clock.monotonic() < end:
            try:
                self._job.exclude(nodes)
            except (Refused, OrtflowError) as error:
                message = message_of(error)
                self._clock.sleep(1.0)
            else:
                self._view.message(f"{self._job.scheduler} gives the next start other nodes than {', '.join(nodes)}")
                return
        self._view.message(f"warning: {', '.join(nodes)} may be given to the next start again: {message}")

    def _stay(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self._clock.monotonic() + seconds
        while self._clock.monotonic() < end and not until():
            self._clock.sleep(1.0)
