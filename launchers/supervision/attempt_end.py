"""Why a supervised attempt ended: from what the launcher saw, what the ranks recorded, and the state of the disk.

Used by the supervisor when no process of the attempt is left. Decides nothing, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ortflow.launchers.attempts.cause import SAVED, Cause, agreed, cause
from ortflow.launchers.attempts.exclusion import slow_in_preflight
from ortflow.launchers.attempts.nccl_log import explained
from ortflow.launchers.attempts.tail import ends_of, last_lines, last_records, newest
from ortflow.launchers.records import Outcome
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision.supervised import Job, Running
from ortflow.launchers.supervision.watch import failures
from ortflow.workflow.errors import EXIT_PREEMPTED
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.disk_space import RECORDS, Notice, OutOfDisk, has_room

LAST_LINES = 12


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended."""

    cause: Cause
    lack: OutOfDisk | None = None
    """The missing disk space, if that is the cause."""
    slow_nodes: Mapping[str, str] = field(default_factory=dict)
    """The nodes that the preflight found too slow, each with its reason, if that is the cause."""

    @property
    def counts(self) -> bool:
        """Whether it counts against a budget: neither a full disk nor a slow node is the program's failure."""
        return self.lack is None and not self.slow_nodes


def end_of_attempt(
    job: Job,
    attempt: Running,
    returncode: int,
    verdict: Cause | None,
    stop: Stop,
    notice: Notice,
    *,
    out_of_memory: bool,
) -> AttemptEnd:
    """How an attempt ended whose processes are gone.

    Parameters
    ----------
    returncode, verdict
        As `Watch.follow` returned them.
    stop
        The requests to stop.
    notice
        What ranks report of a full disk.
    out_of_memory
        Whether the kernel has killed a process for memory meanwhile.
    """
    run, number = job.run, attempt.number
    reported_cause = verdict or attempt.verdict(returncode)
    reason = reported_cause or cause(
        returncode, attempt.statuses(returncode), failures(run, number, job.world_size), out_of_memory=out_of_memory
    )
    if reported_cause is None and reason.outcome is Outcome.FAILURE and not reason.reported and reason.rank is None:
        reason = attempt.guess(returncode) or reason
    reason = explained(reason, run, number, job.world_size)
    if reason.outcome is Outcome.FAILURE and not reason.reported and stop.check() and not _all_began(job, number):
        # A signal that arrives before a rank has installed its handler kills it, and the others with it.
        reason = Cause(Outcome.PREEMPTED, EXIT_PREEMPTED, "asked to stop before all ranks had started")
    if reason.outcome is Outcome.FAILURE:
        reason = agreed(ends_of(run, number, range(job.world_size)), job.world_size) or reason
    if reason.sentence == SAVED and not _has_saved(run, number):
        reason = replace(reason, sentence="stopped")
    if reason.outcome is not Outcome.FAILURE:
        return AttemptEnd(reason)
    lack = _missing_space(run, reason, notice)
    slow_nodes = slow_in_preflight(run, number) if reason.reported else {}
    return AttemptEnd(reason if lack is None else replace(reason, sentence=str(lack)), lack, slow_nodes)


def end_of_log(run: RunDir, number: int, rank: int | None) -> str:
    """The last lines of the log that is most likely to explain a failure."""
    for path in (run.log(number, rank or 0), run.launcher_log(number)):
        if lines := last_lines(path, LAST_LINES):
            return f"; the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
    return ""


def _missing_space(run: RunDir, reason: Cause, notice: Notice) -> OutOfDisk | None:
    """The missing disk space, as a rank reported it, or as found if a rank could not record why it failed."""
    # If the disk has space again, a signal is the cause, unless a rank had failed: Slurm kills the others then. A
    # rank that failed may have lacked space before.
    lack = notice.fatal() or notice.read() if reason.exit_code < 0 else notice.last()
    if lack is None and not reason.reported and reason.exit_code > 0:
        return None if has_room(run.root, RECORDS) else OutOfDisk(run.root, RECORDS)
    return lack


def _all_began(job: Job, number: int) -> bool:
    """Whether every rank has written an event in an attempt: before that there is nothing to save."""
    return all(last_records(job.run.events(rank), attempt=number) for rank in range(job.world_size))


def _has_saved(run: RunDir, number: int) -> bool:
    """Whether rank 0 says that a checkpoint has what was done: a program that saves by itself has none."""
    return all(record.get("saved", True) for record in newest(run, number, [0], "preempted").values())
