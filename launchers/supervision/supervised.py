"""What a supervisor works on: the run's job, a started attempt, and the view that shows its progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ortflow.launchers.attempts.cause import Cause
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.restart import Restart
from ortflow.workflow.spec.run import RunSpec

GRACE = 30.0
"""Seconds that ranks have to save and stop, unless the backend sets another limit."""
MARGIN = 10.0
"""Seconds in which a rank ends its program and itself, after the program's own limit."""


def grace_of(spec: RunSpec, seconds: float = GRACE) -> float:
    """Seconds that the ranks of a run have, if a trainer's have `seconds`: a program has its own limit before."""
    return seconds if spec.program is None else max(seconds, spec.program.stop_seconds + MARGIN)


class View(Protocol):
    """Where the progress of a run is shown."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Show an event of rank 0."""

    def message(self, text: str) -> None:
        """Show a message of the launcher."""

    def attempt(self, number: int) -> None:
        """Show that an attempt starts; the first has number 0."""

    def tick(self) -> None:
        """Called ten times a second."""


class Nodes(Protocol):
    """The nodes of a run of which each attempt takes some: of an elastic run, or of one with nodes in reserve."""

    def choose(self, view: View, stopped: Callable[[], object]) -> AttemptNodes | None:
        """Choose the nodes of the next attempt, and wait for them; None if `stopped` returned a reason meanwhile."""

    def growing(self, trained: float) -> str | None:
        """Why the attempt is to make way for one with more nodes, `trained` seconds after its first step, or None."""

    def lack(self, excluded: Collection[str]) -> str | None:
        """Why no attempt is possible with the nodes here without the excluded ones; None if one is."""


@dataclass(frozen=True)
class AttemptNodes:
    """The nodes of an attempt."""

    world_size: int
    nodes: int
    summary: str
    """The number and its reason, such as `2 of 4 nodes: n3 and n4 are missing`."""
    names: tuple[str, ...] = ()
    """The nodes' names."""


class Running(Protocol):
    """A started attempt."""

    number: int

    @property
    def pid(self) -> int:
        """Process id of mpirun, srun or the only rank."""

    def poll(self) -> int | None:
        """Exit code of mpirun, srun or the only rank, negative for a signal; None while it runs."""

    def gone(self) -> Sequence[int]:
        """Ranks that are known to have ended, as far as is known in the order in which they did."""

    def statuses(self, returncode: int) -> dict[int, int]:
        """Known exit status of the ranks that did not end with 0, by rank; negative for a signal."""

    def verdict(self, returncode: int) -> Cause | None:
        """The cause of the end if mpirun or the scheduler reports one that no rank can know."""

    def guess(self, returncode: int) -> Cause | None:
        """The probable cause if neither ranks nor exit statuses give one."""

    def ask_to_leave(self) -> None:
        """Ask the ranks to save and stop."""

    def kill(self) -> None:
        """Kill all processes of the attempt."""


@dataclass(frozen=True)
class Job:
    """The run that is supervised, and how its attempts are started."""

    run: RunDir
    world_size: int
    restart: Restart
    start: Callable[[int], Running]
    """Starts the attempt with a given number. Raises OrtflowError if that fails."""
    clear: Callable[[], None]
    """Returns when no rank of an earlier attempt can write any more. Raises OrtflowError if that cannot be ensured."""
    lost: str = "its launcher died"
    """Cause of an attempt whose end was not recorded."""
    hands_back: bool = False
    """A preempted run gives up its allocation, and the scheduler starts it again."""
    grace: float = GRACE
    """Seconds that ranks have to save and stop."""
    comes_back: bool = False
    """The sender of a stop signal starts the run again."""
    room_seconds: float = 600.0
    """Seconds to wait for space on a full disk."""
    has_other_nodes: Callable[[Collection[str]], bool] = lambda excluded: False
    """Whether the scheduler can start a run that is handed back without the excluded nodes."""
    replaces_nodes: Callable[[Collection[str]], bool] = lambda excluded: False
    """Whether the run gets other nodes in place of excluded ones while it waits, in `start` or by `nodes`."""
    nodes: Nodes | None = None
    """Chooses the number of ranks of each attempt, which `start` then starts; None: always `world_size`."""
    notify: Sequence[Notify] = ()
    """Who is sent messages about the run."""
