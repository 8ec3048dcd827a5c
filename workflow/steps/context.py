"""Shared state of the seven steps. Each attribute is set by the step named beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortflow.workflow.comm import Communicator, first_of
from ortflow.workflow.errors import OrtflowError, Preempted
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.fence import Fence, Open
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.run_plan import Plan
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.trainer import Trainer, TrainerBuilder

if TYPE_CHECKING:
    from ortflow.workflow.run.engine import Engine
    from ortflow.workflow.run.lead import Lead
    from ortflow.workflow.steps.checkpoint import Saver
    from ortflow.workflow.steps.monitor import Monitor
    from ortflow.workflow.steps.shard import Stream


@dataclass
class Context:
    """One rank's run."""

    run_dir: RunDir
    spec: TrainerRunSpec
    place: Place
    attempt: int
    stop: StopFlag
    events: EventLog
    fence: Fence = field(default_factory=Open)
    clock: Clock = SYSTEM_CLOCK
    location: Location | None = None
    """The run directory, opened by this rank's program"""
    lead: Lead | None = None
    """On rank 0 of several, that the others wait for before MPI starts"""
    engine: Engine[Context] = field(init=False)
    builder: TrainerBuilder = field(init=False)
    """configure"""
    trouble: OrtflowError | None = None
    """configure: the error of this rank, raised on all ranks when they are connected"""
    machine: Any = None
    """configure, on rank 0: what `builder.check_machine` found"""
    plan: Plan = field(init=False)
    """runtime, from what configure wrote."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """runtime: the environments of all ranks, for the record of every checkpoint"""
    comm: Communicator | None = None
    """runtime"""
    trainer: Trainer = field(init=False)
    """runtime"""
    saver: Saver = field(init=False)
    """runtime"""
    monitor: Monitor = field(init=False)
    """runtime"""
    progress: Progress = field(default_factory=Progress)
    """runtime: of the newest complete checkpoint"""
    stream: Stream = field(init=False)
    """shard"""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self.place.rank == 0

    @property
    def world(self) -> Communicator:
        """The ranks. Available once runtime has begun."""
        if self.comm is None:
            raise RuntimeError("the ranks are connected only in step runtime")
        return self.comm

    def first_trouble(self, trouble: OrtflowError | None) -> OrtflowError | None:
        """The error of the first rank that has one, on every rank."""
        return first_of(self.world, trouble)

    def try_on_rank_0(self, work: Callable[[], object]) -> None:
        """Call `work` on rank 0 only. An OrtflowError it raises is raised on every rank."""
        trouble = None
        if self.leads:
            try:
                work()
            except OrtflowError as error:
                trouble = error
        trouble = self.world.broadcast_object(trouble)
        if trouble is not None:
            raise trouble

    def leave_if_asked(self, *, saved: bool = True) -> None:
        """Raises Preempted on all ranks if any was asked to exit. Called between steps, so that nothing is lost."""
        reasons = self.world.gather(self.stop.reason)
        reason = self.world.broadcast_object(next((r for r in reasons if r), None) if reasons is not None else None)
        if reason:
            self.leave(reason, saved=saved)

    def leave(self, reason: str, *, saved: bool = True) -> None:
        """Report that the run is preempted, and whether everything is saved; raises Preempted."""
        self.events.write("stop_requested", reason=reason)
        self.events.write("preempted", step=self.progress.step, saved=saved)
        outcome = "saved at" if saved else "could not save; a restart resumes from the previous checkpoint"
        raise Preempted(f"stopped by {reason}; {outcome} step {self.progress.step}")
