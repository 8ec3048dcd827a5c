"""One rank's run under a fake clock, as step `shard` leaves it, with a trainer that only takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
from fake_clock import FakeClock
from run_files import spec_of

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.engine import Engine
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.steps.checkpoint import Saver
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.monitor import Monitor
from ortflow.workflow.steps.run_plan import resolve
from ortflow.workflow.system.disk_space import OutOfDisk
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch, StepOutcome, Trainer

STEP_SECONDS = 60.0
WAIT = 600.0


class FakeTrainer(Trainer):
    """Four parameters, and steps of a minute."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.index = FlatIndex.place([Tensor("w", (4,), "decay")])
        self.before_update: Callable[[], None] = lambda: None
        self._parameters = HostBuffer(np.zeros(64, "float32"))
        self.full = False

    def state(self) -> dict[str, Any]:
        return {"parameters": self._parameters}

    def step(
        self, batches: Sequence[MicroBatch], *, learning_rate: float, update: int, seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:  # fmt: skip
        self.clock.sleep(STEP_SECONDS)
        self.before_update()
        self._parameters.array[:] += 1
        return StepOutcome(0.5, 1.0, 4, np.array(control_values, "float32"), None)

    def evaluate(
        self, batches: Iterable[MicroBatch], control_values: Callable[[], Sequence[float]]
    ) -> EvaluationOutcome:
        return EvaluationOutcome({"loss": 0.5}, len(list(batches)), np.array(control_values(), "float64"))

    def export(
        self, path: Path, samples: Sequence[MicroBatch], tolerance: float | None, *, trial: bool = False
    ) -> float | None:
        if self.full:
            raise OutOfDisk(path.parent, 1 << 60)
        return 0.0


class FakeStream:
    """The same sample without end."""

    batch = MicroBatch({"x": np.zeros((4, 1), "float32")}, 4)
    tokens_per_sample = None
    fields: Mapping[str, Any] = MappingProxyType({})

    def next(self) -> Any:
        return SimpleNamespace(micro_batches=[self.batch], next=Position(0, 4))

    def samples(self) -> list[MicroBatch]:
        return [self.batch]

    def tokens(self, batch: Any, samples: int) -> None:
        return None

    def close(self) -> None:
        """Nothing is read ahead."""


def context_of(root: Path, clock: FakeClock, steps: int = 30, **checkpoints: Any) -> Context:
    """A run of one rank as step `shard` leaves it."""
    spec = spec_of(
        train={"steps": steps, "optimizer": {"name": "sgd", "lr": 0.1}},
        checkpoint={"asynchronous": False, "wait_for_room": WAIT, **checkpoints},
        monitor={"tensorboard": False},
    )
    run = RunDir(root)
    events = EventLog(run.events(0), 0, 0)
    context = Context(run, spec, Place(0, 1, 0, 1, "none", "host"), 0, StopFlag(clock=clock), events, clock=clock)
    context.engine = Engine((), events, clock=clock)
    context.comm = SoloCommunicator()
    context.plan = resolve(spec, samples=1000, data="", parameters=4, fingerprint="", graphs={})
    context.trainer, context.stream = FakeTrainer(clock), cast(Any, FakeStream())
    context.monitor, context.saver = Monitor(context), Saver(context)
    return context


def events_of(context: Context, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(context.events.path, EVENTS)[0] if record["event"] == kind]
