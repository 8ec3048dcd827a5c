"""Which nodes take part in no further attempt of a supervised run, and whether it can go on without them.

Used by the supervisor; the rules that need only records and causes are in `exclusion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortflow.launchers.attempts.exclusion import blamed, blamed_too_often, excluded, retained
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervision.attempt_end import AttemptEnd
from ortflow.launchers.supervision.supervised import Job, View


class NodeExclusion:
    """The exclusions of a run.

    Parameters
    ----------
    job
        The run, with its nodes.
    view
        Where it is shown that a node stays although ends are blamed on it.
    """

    def __init__(self, job: Job, view: View) -> None:
        self._job, self._view = job, view
        self._last: Mapping[str, str] = {}
        """The nodes that the last attempt's end has excluded."""

    @property
    def _excluded(self) -> dict[str, str]:
        return excluded(self._job.run.read_attempts())

    def fields(self, end: AttemptEnd, places: Mapping[int, str]) -> dict[str, Any]:
        """The fields of an end's record: the nodes that it is blamed on, and those that it excludes.

        `places` is the node of each rank. A node that is blamed for other ends stays if none can take its place.
        """
        self._last = {}
        nodes = [*end.slow_nodes] or blamed(end.cause, places)
        if not nodes:
            return {}
        out = end.slow_nodes or blamed_too_often(nodes, end.cause.sentence, self._job.run.read_attempts())
        if out and not end.slow_nodes and (lack := self._no_replacement(out) or self._no_other_nodes(out)) is not None:
            self._view.message(f"{', '.join(out)}: blamed for the ends of two attempts, and stays: {lack}")
            out = {}
        self._last = dict(out)
        return {"blamed": [*nodes], **({"excludes": dict(out)} if out else {})}

    def obstacle(self) -> str | None:
        """Why no attempt can follow without the nodes that the last end excludes; None if one can."""
        return self._no_replacement(self._last) if self._last else None

    def hands_back(self, outcome: Outcome) -> bool:
        """Whether the scheduler starts the run again, on other nodes where it is a matter of nodes."""
        if not self._job.hands_back:
            return False
        out = self._excluded
        if outcome is Outcome.LOST or (out and self._last):
            return self._job.nodes is None or self._job.nodes.lack(out) is not None
        return outcome is Outcome.PREEMPTED

    def _no_replacement(self, out: Mapping[str, str]) -> str | None:
        """Why no other node can take the place of these; None if one can, here or by the scheduler."""
        if self._job.hands_back or self._job.replaces_nodes({*self._excluded, *out}):
            return None
        if self._job.nodes is None:
            stays = retained(self._job.run.read_attempts())
            reasons = [f"{node} cannot be replaced: {stays[node]}" for node in out if node in stays]
            return "; ".join(reasons) or "the run has its nodes for good; ask for more in resources.spares"
        lack = self._job.nodes.lack({*self._excluded, *out})
        return None if lack is None else f"{lack}; ask for more in resources.spares"

    def _no_other_nodes(self, out: Mapping[str, str]) -> str | None:
        """Why a run that would be handed back would wait for nodes for ever; None if it has them, or there are some."""
        gone = {*self._excluded, *out}
        is_enough = self._job.nodes is not None and self._job.nodes.lack(gone) is None
        if not self._job.hands_back or is_enough or self._job.has_other_nodes(gone):
            return None
        return "the scheduler has no others for this job"
