"""The nodes of a run on this machine that chooses among them: groups of its ranks. A file takes them away.

Used by the local launcher, to try out on a laptop what happens to an elastic run on a cluster. A node whose name stands
in the run directory's `.lost_nodes` is lost: its ranks are killed, and no attempt gets it until the name is removed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.records import Outcome
from ortflow.launchers.supervision import processes
from ortflow.launchers.supervision.attempt import Attempt, RankCommand
from ortflow.launchers.supervision.elastic import absent
from ortflow.manifests.local import MpiKind
from ortflow.workflow.errors import EXIT_FAILURE
from ortflow.workflow.run.rundir import RunDir


class SimulatedNodes:
    """The nodes node1, node2, … of a run on this machine."""

    state = "lost"

    def __init__(self, run: RunDir, nodes: int) -> None:
        self._file = run.lost_nodes
        self.names: Sequence[str] = [f"node{number}" for number in range(1, nodes + 1)]

    def shown(self, name: str) -> str:
        """The name itself."""
        return name

    def node(self, name: str) -> str:
        """The name itself."""
        return name

    def present(self, among: Sequence[str]) -> list[str]:
        """Those that the file does not name."""
        try:
            lost = self._file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            lost = []
        return [name for name in among if name not in lost]


class SimulatedAttempt(Attempt):
    """An attempt whose nodes can be lost; `nodes` are their names, in the order of the ranks."""

    def __init__(
        self,
        command: RankCommand,
        world_size: int,
        mpi: MpiKind | None,
        pool: SimulatedNodes,
        nodes: Sequence[str],
    ) -> None:
        self._pool, self._nodes, self._lost = pool, list(nodes), list[str]()
        super().__init__(command, world_size, mpi)

    def poll(self) -> int | None:
        """As of every attempt; kills the ranks of a node that is lost."""
        returncode = super().poll()
        if returncode is None and not self._lost:
            present = self._pool.present(self._nodes)
            self._lost = [name for name in self._nodes if name not in present]
            if self._lost:
                self._kill_lost()
        return returncode

    def _kill_lost(self) -> None:
        per_node = self.world_size // len(self._nodes)
        places = [self._nodes.index(name) for name in self._lost]
        ranks = {place * per_node + k for place in places for k in range(per_node)}
        if ranks <= self.ranks.keys():
            processes.kill(self.ranks[rank] for rank in ranks)
        else:
            self.kill()

    def verdict(self, returncode: int) -> Cause | None:
        """A lost node, which no rank can report."""
        if not self._lost:
            return None
        return Cause(Outcome.LOST, EXIT_FAILURE, absent(self._lost, "lost"), nodes=tuple(self._lost))
