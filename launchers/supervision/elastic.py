"""Which nodes the next attempt of a run takes, and when a running one makes room for more.

For elastic runs, whose number of nodes changes, and for those with nodes in reserve.

The decisions are pure functions of what is there and how long it has been so. `ElasticNodes` applies them where the
launcher itself chooses the nodes: on this machine, where nodes are simulated, and on Kubernetes. A batch scheduler
chooses them with the job (`ortflow.launchers.batch.elastic`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ortflow.launchers.supervision.supervised import AttemptNodes, View
from ortflow.launchers.view.lines import counted
from ortflow.workflow.spec.checks.nodes import on_nodes, permitted, skipped_messages
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

PERIOD = 0.5
"""Seconds between two looks for missing nodes before an attempt."""
GROWTH_PERIOD = 5.0
"""Seconds between two looks for nodes that are back, during an attempt."""
REPORT_PERIOD = 30.0
"""Seconds between two messages about missing nodes."""
LISTED = 3


def most(present: int, fitting: Sequence[int]) -> int | None:
    """The largest permitted number of nodes that are there; None if even the smallest is not."""
    return max((nodes for nodes in fitting if nodes <= present), default=None)


def next_nodes(present: int, fitting: Sequence[int], waited: float, patience: float) -> int | None:
    """The number of nodes of an attempt that starts now; None to wait.

    Parameters
    ----------
    present
        Nodes that are there.
    fitting
        Permitted numbers, ascending.
    waited, patience
        Seconds for which nodes were awaited, and for which a larger number is worth waiting.
    """
    nodes = most(present, fitting)
    return None if nodes is None or (nodes < fitting[-1] and waited < patience) else nodes


def grown(running: int, present: int, fitting: Sequence[int]) -> int | None:
    """The larger number of nodes for which an attempt of `running` nodes is to make room; None to let it run."""
    nodes = most(present, fitting)
    return nodes if nodes is not None and nodes > running else None


def described(nodes: int, total: int, lost: str = "") -> str:
    """`all 4 nodes`, or `2 of 4 nodes: n3 is lost`."""
    if nodes == total:
        return f"all {total} nodes"
    return f"{nodes} of {total} nodes" + (f": {lost}" if lost else "")


def absent(names: Sequence[str], state: str) -> str:
    """`n3 is lost`, `n3 and n4 are lost`, with at most a few names."""
    if not names:
        return ""
    shown = list(names[:LISTED])
    if len(names) > LISTED:
        shown.append(f"{len(names) - LISTED} more")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{text} {'is' if len(names) == 1 else 'are'} {state}"


class Pool(Protocol):
    """The nodes that may take part in an attempt."""

    names: Sequence[str]
    """All of them, in the order of the ranks."""
    state: str
    """What is the matter with a node that is not there, such as `lost`."""

    def shown(self, name: str) -> str:
        """Return the name for messages."""

    def node(self, name: str) -> str:
        """Return the name by which a node is excluded."""

    def present(self, among: Sequence[str]) -> list[str]:
        """Return those that are there, in the order of `among`."""


class ElasticNodes:
    """The nodes of an elastic run whose launcher chooses them.

    Parameters
    ----------
    spec
        The run, with all its nodes.
    pool
        The nodes.
    excluded
        Returns the nodes that take part in no attempt.
    clock
        The clock of every wait.
    """

    def __init__(
        self,
        spec: RunSpec,
        pool: Pool,
        clock: Clock = SYSTEM_CLOCK,
        excluded: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._whole, self._pool, self._clock, self._excluded = spec, pool, clock, excluded
        self._fitting = permitted(spec)
        self._next_check = clock.monotonic()
        self._skipped_reported = False
        self.spec = spec
        """The run on the nodes of the present attempt."""
        self.names: list[str] = []
        """The names of these nodes."""
        self.summary = ""
        """Their number, and why it is not larger."""

    def choose(self, view: View, stopped: Callable[[], object]) -> AttemptNodes | None:
        """Choose the nodes of the next attempt, and wait for them; None if `stopped` returned a reason meanwhile."""
        if not self._skipped_reported:
            self._skipped_reported = True
            for message in skipped_messages(self._whole):
                view.message(message)
        begun = last_report = self._clock.monotonic()
        while not stopped():
            now = self._clock.monotonic()
            usable = self._usable(self._excluded())
            present = self._pool.present(usable)
            # Nobody waits for an excluded node.
            fitting = [nodes for nodes in self._fitting if nodes <= len(usable)] or self._fitting
            count = next_nodes(len(present), fitting, now - begun, self._whole.restart.shrink_seconds)
            if count is not None:
                return self._take(present, count, view)
            if now >= last_report + REPORT_PERIOD or now == begun:
                last_report = now
                view.message(f"waiting for nodes: {self._lost(present)}")
            view.tick()
            self._clock.sleep(PERIOD)
        return None

    def _take(self, present: Sequence[str], nodes: int, view: View) -> AttemptNodes:
        self.names, self.spec = list(present[:nodes]), on_nodes(self._whole, nodes)
        total = self._whole.resources.nodes
        reason = self._lost(present)
        if len(present) > nodes and nodes < total:
            reason += f", and {len(present)} nodes do not divide a step's samples"
        self.summary = described(nodes, total, reason)
        if self._whole.resources.spares:
            reserve = f"{counted(len(present) - nodes, 'node')} in reserve"
            self.summary += (f": {reason}" if reason else "") + f", {reserve}"
        report_nodes(view, self.summary, self.spec)
        return AttemptNodes(self.spec.world_size, nodes, self.summary, tuple(map(self._pool.shown, self.names)))

    def _usable(self, excluded: Collection[str]) -> list[str]:
        return [name for name in self._pool.names if self._pool.node(name) not in excluded]

    def _lost(self, present: Sequence[str]) -> str:
        usable = self._usable(self._excluded())
        missing = [self._pool.shown(name) for name in usable if name not in present]
        out = [self._pool.shown(name) for name in self._pool.names if name not in usable]
        return " and ".join(filter(None, (absent(missing, self._pool.state), absent(out, "excluded"))))

    def lack(self, excluded: Collection[str]) -> str | None:
        """Why no attempt is possible with the nodes here without the excluded ones; None if one is."""
        usable, least = self._usable(excluded), self._fitting[0]
        if most(len(usable), self._fitting) is not None:
            return None
        return f"{counted(len(usable), 'node')} would be left, and the run needs {least}"

    def growing(self, trained: float) -> str | None:
        """Why the attempt is to make way for one with more nodes, `trained` seconds after its first step, or None."""
        now, period, running = self._clock.monotonic(), self._whole.restart.grow_seconds, len(self.names)
        if trained < period or now < self._next_check or running == self._fitting[-1]:
            return None
        self._next_check = now + GROWTH_PERIOD
        # Those of the attempt are watched by the attempt.
        usable = self._usable(self._excluded())
        back = self._pool.present([name for name in usable if name not in self.names])
        larger = grown(running, running + len(back), self._fitting)
        return None if larger is None else there_again(larger, self._whole)


def there_again(nodes: int, spec: RunSpec) -> str:
    """Why an attempt is to save."""
    return f"{nodes} of {spec.resources.nodes} nodes are there again"


def report_nodes(view: View, summary: str, spec: RunSpec) -> None:
    """Show the nodes and ranks of an attempt, and how they divide a step's samples."""
    shares = ""
    if isinstance(spec, TrainerRunSpec):
        shares = f", gradient accumulation {spec.accumulation} for {spec.global_batch} samples a step"
    view.message(f"{summary}; {spec.world_size} ranks{shares}")
