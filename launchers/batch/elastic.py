"""The nodes of an elastic run in a batch job: the scheduler chooses them from a range at each start of the job.

Used by the run supervisor. A job keeps its nodes until it ends. So a run that has lost one is queued again, with the
same range, and starts with what the scheduler has; to grow it saves and is queued again, when the scheduler says that
the missing nodes would be free now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.launchers.batch.current_job import CurrentJob
from ortflow.launchers.records import elastic_nodes
from ortflow.launchers.supervision.elastic import absent, described, grown, most, report_nodes, there_again
from ortflow.launchers.supervision.supervised import AttemptNodes, View
from ortflow.launchers.view.lines import counted
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.spec.checks.nodes import on_nodes, permitted, skipped_messages
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

GROWTH_PERIOD = 60.0
"""Most seconds between two questions to the scheduler for more nodes."""


class AllocatedNodes:
    """The nodes of one start of a job.

    Parameters
    ----------
    spec
        The run, with all its nodes.
    job
        The job of this process.
    script
        Its script, by which the scheduler is asked for more nodes.
    records
        Those of the run's earlier attempts.
    clock
        The clock of the questions.

    Raises
    ------
    UserError
        The scheduler has given fewer nodes than the run can use.
    """

    def __init__(
        self,
        spec: RunSpec,
        job: CurrentJob,
        script: Path,
        records: Sequence[dict[str, Any]] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._whole, self._job, self._script, self._clock = spec, job, script, clock
        self._fitting = permitted(spec)
        self.names = job.nodes() or []
        """All that the scheduler has given."""
        nodes = most(len(self.names), self._fitting)
        if nodes is None:
            raise UserError(
                f"{job.scheduler} has given {counted(len(self.names), 'node')}, and the run needs {self._fitting[0]}",
                where="resources.min_nodes",
                fix="submit the run again with the number of nodes that it needs",
            )
        self.spec = on_nodes(spec, nodes)
        """The run on the nodes of this start."""
        self._before = [name for name in elastic_nodes(records) or () if name not in self.names]
        self._vain = failed_growths(records, nodes)
        self.summary = ""
        self._next_check = clock.monotonic()

    def choose(self, view: View, stopped: Callable[[], object]) -> AttemptNodes | None:
        """The nodes of this start; the scheduler waits for them."""
        if not self.summary:
            for message in skipped_messages(self._whole):
                view.message(message)
            self.summary = self._summary()
        report_nodes(view, self.summary, self.spec)
        return AttemptNodes(self.spec.world_size, self.spec.resources.nodes, self.summary, tuple(self.names))

    def _summary(self) -> str:
        allocated, running = len(self.names), self.spec.resources.nodes
        lost: list[str] = []
        if allocated < self._whole.resources.nodes:
            with suppress(OrtflowError):
                lost = self._job.lost_nodes(self._before)
        reason = absent(lost, "lost") or f"{self._job.scheduler} has given {counted(allocated, 'node')}"
        if allocated > running:
            reason += f", and {allocated} nodes do not divide a step's samples"
        return described(running, self._whole.resources.nodes, reason)

    def growing(self, trained: float) -> str | None:
        """Why the attempt is to make way for one with more nodes, `trained` seconds after its first step, or None."""
        now, period = self._clock.monotonic(), self._whole.restart.grow_seconds
        if trained < period * 2.0 ** min(self._vain, 30) or now < self._next_check:
            return None
        self._next_check = now + min(GROWTH_PERIOD, period)
        running, allocated = self.spec.resources.nodes, len(self.names)
        for nodes in reversed(self._fitting):
            if nodes <= allocated:
                return None
            with suppress(OrtflowError):
                are_free = self._job.more_nodes(nodes - allocated, self._script, self.names)
                if are_free and grown(running, nodes, self._fitting) is not None:
                    return there_again(nodes, self._whole)
        return None

    def lack(self, excluded: Collection[str]) -> str | None:
        """Always a reason: the scheduler chooses other nodes when it starts the job again."""
        return f"{self._job.scheduler} chooses the nodes at the start of a job"


def failed_growths(records: Sequence[dict[str, Any]], nodes: int) -> int:
    """How many attempts in a row, before one of so many nodes, made room for more and were followed by no more. Pure.

    The period is doubled for each: another job may take the nodes that the scheduler has promised.
    """
    count = 0
    for record in reversed(records):
        if record.get("event") == "end" and not record.get("grows"):
            break
        if record.get("event") == "start":
            if record.get("nodes", 0) < nodes:
                break
            count += 1
    return count
