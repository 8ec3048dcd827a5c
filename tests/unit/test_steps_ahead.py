"""Step `train` with a trainer that begins a step's passes while the step before is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from clocked_steps import STEP_SECONDS, FakeStream, FakeTrainer, context_of, events_of
from fake_clock import FakeClock

from ortflow.workflow.checkpoint.writer import Writer
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.errors import OrtflowError, Preempted, UserError
from ortflow.workflow.run.progress import dropout_seed
from ortflow.workflow.steps.checkpoint import Saver
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.train import train
from ortflow.workflow.trainer import MicroBatch, StepOutcome

HOST_SECONDS = 5.0
"""What the host takes between two steps."""


class Queue(FakeTrainer):
    """A device that computes the steps one after the other."""

    def __init__(self, clock: FakeClock, *, begins: bool = True) -> None:
        super().__init__(clock)
        self.begins = begins
        self.before_wait: Callable[[], None] = lambda: None
        self.begun: list[int] = []
        """Steps that began before they were asked for."""
        self._queued: tuple[Sequence[MicroBatch], Sequence[int], Sequence[float]] | None = None
        self._ends = 0.0
        self._steps = 0
        self.seeds: list[Sequence[int]] = []
        self.skipped: str | None = None

    def begin(
        self, batches: Sequence[MicroBatch], *, seeds: Sequence[int], control_values: Sequence[float]
    ) -> None:  # fmt: skip
        assert self._queued is None
        self._queued = batches, seeds, control_values
        self.begun.append(self._steps + 1)
        self._ends = max(self._ends, self.clock.now) + STEP_SECONDS

    def step(
        self, batches: Sequence[MicroBatch], *, learning_rate: float, update: int, seeds: Sequence[int],
        control_values: Sequence[float],
    ) -> StepOutcome:  # fmt: skip
        if self._queued is None:
            self.begin(batches, seeds=seeds, control_values=control_values)
            self.begun.pop()
        given, self._queued = self._queued, None
        assert given is not None
        assert given[0] is batches
        assert [*given[1:]] == [seeds, control_values]
        self.seeds.append(seeds)
        self.before_update()
        self._parameters.array[:] += 1
        self._steps += 1
        end = self._ends
        self.before_wait()
        self.clock.sleep(max(0.0, end - self.clock.now))
        return StepOutcome(0.5, 1.0, 4, np.array(control_values, "float32"), self.skipped)


class Numbered(FakeStream):
    """Each batch ends four samples later; the host takes its time for each step."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.given = clock, 0

    def next(self) -> Any:
        self.given += 1
        return SimpleNamespace(micro_batches=[self.batch], next=Position(0, 4 * self.given))

    def tokens(self, batch: Any, samples: int) -> None:
        self.clock.sleep(HOST_SECONDS)

    def evaluation(self, name: str | None = None) -> list[MicroBatch]:
        return [self.batch]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def queued(root: Path, clock: FakeClock, *, begins: bool = True, **options: Any) -> tuple[Context, Queue]:
    context = context_of(root, clock, **options)
    trainer = Queue(clock, begins=begins)
    context.trainer, context.stream = trainer, cast(Any, Numbered(clock))
    context.saver = Saver(context)
    return context, trainer


@pytest.mark.parametrize("begins", [True, False])
def test_what_the_host_does_between_steps_costs_no_time(tmp_path: Path, clock: FakeClock, *, begins: bool) -> None:
    context, trainer = queued(tmp_path, clock, steps=10, begins=begins, every_steps=None)
    begun = clock.now
    train(context)
    between = 0.0 if begins else 9 * HOST_SECONDS
    assert clock.now - begun == pytest.approx(10 * STEP_SECONDS + between + HOST_SECONDS)
    assert [one["seconds"] for one in events_of(context, "step")] == [STEP_SECONDS] * 10
    assert trainer.begun == (list(range(2, 11)) if begins else [])
    assert trainer.seeds == [[dropout_seed(context.spec.seed, step, 0)] for step in range(1, 11)]


def test_nothing_begins_before_an_evaluation_a_save_or_the_end(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, trainer = queued(tmp_path, clock, steps=12, every_steps=5)
    evaluation = context.spec.train.evaluation.model_copy(update={"every_steps": 4})
    spec = context.spec
    context.spec = spec.model_copy(
        update={
            "train": spec.train.model_copy(update={"evaluation": evaluation}),
            "data": spec.data.model_copy(update={"eval": spec.data.train}),
        }
    )
    train(context)
    assert [one["step"] for one in events_of(context, "evaluation")] == [4, 8, 12]
    assert trainer.begun == [step for step in range(2, 13) if (step - 1) % 4 and (step - 1) % 5]
    assert cast(Numbered, context.stream).given == 12


def test_a_checkpoint_that_is_due_by_time_is_saved_once(tmp_path: Path, clock: FakeClock) -> None:
    context, trainer = queued(tmp_path, clock, steps=40, every_steps=None, every_seconds=10 * STEP_SECONDS)
    train(context)
    # The time is checked when a step begins, and the checkpoint is saved when it has ended.
    assert [one["step"] for one in events_of(context, "checkpoint_start")] == [12, 24, 36]
    assert trainer.begun == list(range(2, 41))


def test_a_save_ends_when_values_from_after_its_start_say_so(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of the step that had begun before the save tell of no writer."""
    context, _ = queued(tmp_path, clock, every_steps=None, every_seconds=10 * STEP_SECONDS, asynchronous=True)
    monkeypatch.setattr(Writer, "poll", Writer.wait)
    settled: list[int] = []
    settle = Saver._settle
    monkeypatch.setattr(
        Saver, "_settle", lambda saver, save: (settled.append(context.progress.step), settle(saver, save))
    )
    train(context)
    assert settled[:2] == [14, 26]
    assert [one["step"] for one in events_of(context, "checkpoint_start")][:2] == [12, 24]


def test_a_run_that_is_asked_to_exit_saves_the_last_step_that_ended(tmp_path: Path, clock: FakeClock) -> None:
    context, trainer = queued(tmp_path, clock, every_steps=None)
    clock.after(6.5 * STEP_SECONDS, lambda: context.stop.request("SIGTERM"))
    with pytest.raises(Preempted, match="saved at step 9"):
        train(context)
    assert trainer.begun[-1] == 10
    assert context.progress.sample == 4 * 9
    assert (trainer._parameters.array == 9).all()
    assert [one["step"] for one in events_of(context, "step")] == list(range(1, 10))


def test_unusable_steps_end_the_run_as_ever(tmp_path: Path, clock: FakeClock) -> None:
    context, trainer = queued(tmp_path, clock, every_steps=None)
    trainer.skipped = "the loss is nan"
    with pytest.raises(UserError, match="steps in a row had no usable gradient"):
        train(context)
    assert context.progress.skipped == context.spec.train.max_skipped_steps
    assert context.progress.updates == 0


def test_data_that_cannot_be_read_ends_the_run(tmp_path: Path, clock: FakeClock) -> None:
    context, trainer = queued(tmp_path, clock, every_steps=None)
    stream = cast(Numbered, context.stream)
    read = stream.next

    def failing() -> Any:
        if stream.given == 5:
            raise OrtflowError("the disk is gone")
        return read()

    stream.next = failing  # type: ignore[method-assign]
    with pytest.raises(OrtflowError, match="the disk is gone"):
        train(context)
    assert trainer.begun[-1] == 5
