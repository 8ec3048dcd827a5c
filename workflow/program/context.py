"""Shared state of the seven steps of a program's rank. Each attribute is set by the step named beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import OrtflowError, Preempted
from ortflow.workflow.program.channel import Peer
from ortflow.workflow.program.endings import Ending
from ortflow.workflow.program.variables import World
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.fence import Fence, Open
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.spec.run import ProgramRunSpec
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from ortflow.workflow.program.record import Record
    from ortflow.workflow.program.report import Report
    from ortflow.workflow.run.engine import Engine


@dataclass
class ProgramContext:
    """One rank's program."""

    run_dir: RunDir
    spec: ProgramRunSpec
    place: Place
    attempt: int
    stop: StopFlag
    events: EventLog
    fence: Fence = field(default_factory=Open)
    clock: Clock = SYSTEM_CLOCK
    location: Location | None = None
    """The run directory, opened by this rank's process"""
    engine: Engine[ProgramContext] = field(init=False)
    record: Record = field(init=False)
    """configure, on rank 0: the code and the files"""
    trouble: OrtflowError | None = None
    """configure: rank 0's error, raised on all ranks when they are connected"""
    world: World = field(init=False)
    """runtime"""
    peers: dict[int, Peer] = field(default_factory=dict)
    """runtime: the other rank processes on rank 0; rank 0's on the others"""
    store: DirectoryStore = field(init=False)
    """runtime"""
    newest: int | None = None
    """runtime: step of the newest complete checkpoint, then of each one that is committed"""
    run: Mapping[str, str] = field(default_factory=dict)
    """runtime, on rank 0: record of the run's identity"""
    distrusted: Collection[int] = ()
    """runtime, on rank 0: steps of checkpoints that were found damaged"""
    report: Report = field(init=False)
    """runtime"""
    ending: Ending = field(init=False)
    """train"""
    progress: Progress = field(default_factory=Progress)
    """train: the newest step that the program has reported"""
    comm: None = None
    """A rank's process does not use MPI, which is the program's."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides and reports for all."""
        return self.place.rank == 0

    @property
    def newest_path(self) -> Path | None:
        """The newest complete checkpoint."""
        return None if self.newest is None else self.store.place(self.newest)

    def leave_if_asked(self) -> None:
        """Raises Preempted if this rank was asked to exit before its program has started."""
        if (reason := self.stop.reason) is not None:
            self.leave(reason)

    def leave(self, reason: str, sentence: str = "") -> None:
        """Report that the run is preempted; raises Preempted."""
        self.events.write("stop_requested", reason=reason)
        self.events.write("preempted", step=self.newest or 0, saved=self.newest is not None)
        raise Preempted(sentence or f"stopped by {reason} before the program had started")
