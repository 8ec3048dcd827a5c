"""The nodes of a job that has some in reserve: each attempt takes healthy ones, within the allocation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from ortflow.launchers.attempts.exclusion import is_among
from ortflow.launchers.batch.current_job import CurrentJob
from ortflow.launchers.supervision.elastic import absent
from ortflow.launchers.supervision.supervised import AttemptNodes, View
from ortflow.launchers.view.lines import counted
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.spec.run import RunSpec


class ReservedNodes:
    """The nodes of one start of a job.

    Parameters
    ----------
    spec
        The run.
    job
        The job of this process.
    excluded
        Returns the nodes that take part in no attempt.
    """

    def __init__(self, spec: RunSpec, job: CurrentJob, excluded: Callable[[], Collection[str]]) -> None:
        self.spec, self._job, self._excluded = spec, job, excluded
        self._given = job.nodes() or []
        self.chosen: list[str] = []
        """The nodes of the present attempt."""
        self.summary = ""

    def choose(self, view: View, stopped: Callable[[], object]) -> AttemptNodes | None:
        """The nodes of the next attempt. Raises OrtflowError if too few are healthy."""
        out = self._excluded()
        if (lack := self.lack(out)) is not None:
            raise OrtflowError(f"{self._job.scheduler} has given too few nodes: {lack}")
        healthy, lost = self._healthy(out), self._lost()
        excluded = [name for name in self._given if is_among(name, out)]
        reason = " and ".join(filter(None, (absent(lost, "lost"), absent(excluded, "excluded"))))
        count = self.spec.resources.nodes
        self.chosen = healthy[:count]
        self.summary = f"all {counted(count, 'node')}" + (f": {reason}" if reason else "")
        self.summary += f", {counted(len(healthy) - count, 'node')} in reserve"
        view.message(self.summary)
        return AttemptNodes(self.spec.world_size, count, self.summary, tuple(self.chosen))

    def growing(self, trained: float) -> str | None:
        """Never: the number of nodes is fixed."""
        return None

    def lack(self, excluded: Collection[str]) -> str | None:
        """Why no attempt is possible with the job's nodes without the excluded ones; None if one is."""
        healthy, required = len(self._healthy(excluded)), self.spec.resources.nodes
        return (
            None if healthy >= required else f"{counted(healthy, 'node')} would be left, and the run needs {required}"
        )

    def _lost(self) -> list[str]:
        with suppress(OrtflowError):
            return self._job.lost_nodes(self._given)
        return []

    def _healthy(self, excluded: Collection[str]) -> list[str]:
        lost = self._lost()
        return [name for name in self._given if name not in lost and not is_among(name, excluded)]
