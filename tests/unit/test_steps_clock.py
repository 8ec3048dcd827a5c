"""The steps under a fake clock: when a checkpoint is due, how long to wait for a full disk, timing of a step."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from clocked_steps import STEP_SECONDS, WAIT, FakeTrainer, context_of, events_of
from fake_clock import FakeClock
from messages import mentions

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import OrtflowError, Preempted
from ortflow.workflow.run.engine import Engine, Step
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.signals import BEAT_PERIOD, FILE_PERIOD, StopFlag
from ortflow.workflow.spec.checkpoint import CheckpointSection
from ortflow.workflow.steps import checkpoint as checkpoint_step
from ortflow.workflow.steps.checkpoint import checkpoint
from ortflow.workflow.steps.export import export
from ortflow.workflow.steps.save_period import save_period
from ortflow.workflow.steps.train import train
from ortflow.workflow.system import disk_space


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_sign_of_life_every_few_seconds_however_often_it_is_checked(tmp_path: Path, clock: FakeClock) -> None:
    flag, heartbeat, seen = StopFlag(clock=clock), tmp_path / "heartbeat", list[float]()
    flag.beat(heartbeat)
    for _ in range(1000):
        assert not flag
        if heartbeat.exists():
            heartbeat.unlink()
            seen.append(clock.now)
        clock.sleep(0.1)
    assert np.diff(seen) == pytest.approx(BEAT_PERIOD, abs=0.2)
    assert len(seen) == 20


def test_the_stop_file_is_checked_a_few_times_a_second(tmp_path: Path, clock: FakeClock) -> None:
    file = tmp_path / ".stop"
    flag = StopFlag(file, clock)
    assert not flag
    file.touch()
    assert not flag, "a check is a system call, which is slow on a network file system"
    clock.sleep(FILE_PERIOD)
    assert flag.reason == "stop file"


def test_the_engine_times_each_step_and_what_recurs_in_it(tmp_path: Path, clock: FakeClock) -> None:
    events = EventLog(tmp_path / "events.jsonl", 0, 0)

    def first(context: None) -> None:
        clock.sleep(2.0)
        for _ in range(2):
            with engine.within("saves"):
                clock.sleep(1.5)

    steps = (Step("trains", first), Step("saves", lambda context: clock.sleep(1.0), recurs=True))
    engine: Engine[None] = Engine(steps, events, clock=clock)
    engine.run(None)
    ended = [record for record in read_records(events.path, EVENTS)[0] if record["event"] == "phase_end"]
    assert [(one["phase"], one["seconds"], one.get("times")) for one in ended] == [
        ("trains", 5.0, None), ("saves", 4.0, 3),
    ]  # fmt: skip


def test_a_long_part_of_a_step_is_a_phase_of_its_own(tmp_path: Path, clock: FakeClock) -> None:
    events = EventLog(tmp_path / "events.jsonl", 0, 0)

    def opens(context: None) -> None:
        clock.sleep(1.0)
        with engine.apart("check", "opens"):
            clock.sleep(17.0)
        clock.sleep(2.0)

    steps = (Step("opens", opens), Step("trains", lambda context: clock.sleep(3.0)))
    engine: Engine[None] = Engine(steps, events, clock=clock)
    engine.run(None)
    records = read_records(events.path, EVENTS)[0]
    ended = [(one["phase"], one["seconds"]) for one in records if one["event"] == "phase_end"]
    assert ended == [("check", 17.0), ("opens", 3.0), ("trains", 3.0)]
    assert [one["phase"] for one in records if one["event"] == "phase_start"] == ["opens", "check", "opens", "trains"]


def test_a_step_is_timed_without_what_follows_it(tmp_path: Path, clock: FakeClock) -> None:
    context = context_of(tmp_path, clock, steps=2)
    train(context)
    assert [one["seconds"] for one in events_of(context, "step")] == [STEP_SECONDS] * 2


def test_checkpoints_come_every_so_many_seconds_of_training(tmp_path: Path, clock: FakeClock) -> None:
    context = context_of(tmp_path, clock, every_steps=None, every_seconds=10 * STEP_SECONDS)
    train(context)
    checkpoint(context)
    # The time is checked before a step, and the checkpoint is saved after it.
    assert [one["step"] for one in events_of(context, "checkpoint")] == [11, 22, 30]


def test_checkpoints_come_every_five_minutes_by_default(
    tmp_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    context = context_of(tmp_path, clock, every_steps=None)
    context.monitor.begin()
    assert mentions(capsys.readouterr().out, "every 300 s", "default", "5%")
    train(context)
    checkpoint(context)
    assert [one["step"] for one in events_of(context, "checkpoint")] == [6, 12, 18, 24, 30]


def test_saves_on_a_slow_disk_take_a_bounded_share_of_the_time(tmp_path: Path, clock: FakeClock) -> None:
    context = context_of(tmp_path, clock, steps=60, every_steps=None)
    # A save of a minute may be in progress every 20 minutes: a third of the steps instead of all.
    context.trainer.before_save = lambda: clock.sleep(60.0)  # type: ignore[attr-defined]
    context.trainer.after_load = lambda: None  # type: ignore[attr-defined]
    train(context)
    assert [one["step"] for one in events_of(context, "checkpoint")] == [6, 26, 46]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"every_steps": 5}, None),
        ({"every_seconds": 7.0}, 7.0),
        ({"every_steps": 5, "every_seconds": 7.0}, 7.0),
        ({}, 300.0),
    ],
)
def test_a_period_that_is_given_replaces_the_default(given: dict[str, float], expected: float | None) -> None:
    section = CheckpointSection.model_validate(given)
    assert save_period(section, 0.0) == expected
    assert save_period(section, 60.0) == (1200.0 if not given else expected)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that is nonempty while the disk is full."""
    state = [True]
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda store: 0 if state else 1 << 40)
    for module in (disk_space, checkpoint_step):
        monkeypatch.setattr(module, "has_room", lambda path, needed: not state)
    return state


def test_a_disk_that_is_freed_gets_the_last_checkpoint(tmp_path: Path, clock: FakeClock, full: list[bool]) -> None:
    context = context_of(tmp_path, clock, steps=3)
    train(context)
    begun = clock.now
    clock.after(0.5 * WAIT, full.clear)
    checkpoint(context)
    assert clock.now - begun == pytest.approx(0.5 * WAIT, abs=2.0)
    assert [one["step"] for one in events_of(context, "checkpoint")] == [3]


def test_a_disk_that_stays_full_ends_the_run(tmp_path: Path, clock: FakeClock, full: list[bool]) -> None:
    context = context_of(tmp_path, clock, steps=3)
    train(context)
    begun = clock.now
    with pytest.raises(OrtflowError, match=r"step 3, .*out of disk"):
        checkpoint(context)
    assert clock.now - begun == pytest.approx(WAIT, abs=2.0)


def test_a_rank_that_waits_for_disk_space_stops_when_asked(tmp_path: Path, clock: FakeClock, full: list[bool]) -> None:
    context = context_of(tmp_path, clock, steps=3)
    train(context)
    begun = clock.now
    clock.after(100.0, lambda: context.stop.request("SIGTERM"))
    with pytest.raises(Preempted):
        checkpoint(context)
    assert clock.now - begun == pytest.approx(100.0, abs=2.0)


def test_an_export_waits_for_disk_space_as_long_as_a_checkpoint(
    tmp_path: Path, clock: FakeClock, full: list[bool]
) -> None:
    context = context_of(tmp_path, clock)
    trainer = cast(FakeTrainer, context.trainer)
    trainer.full = True

    def freed() -> None:
        full.clear()
        trainer.full = False

    begun = clock.now
    clock.after(0.5 * WAIT, freed)
    export(context)
    assert clock.now - begun == pytest.approx(0.5 * WAIT, abs=2.0)
    assert len(events_of(context, "export")) == 1


def test_an_export_without_disk_space_fails_in_time(tmp_path: Path, clock: FakeClock, full: list[bool]) -> None:
    context = context_of(tmp_path, clock)
    cast(FakeTrainer, context.trainer).full = True
    begun = clock.now
    with pytest.raises(OrtflowError, match=r"training is done and saved.*out of disk"):
        export(context)
    assert clock.now - begun == pytest.approx(WAIT, abs=2.0)
