"""Durations in steps, epochs, samples and tokens: one schedule in four units, a changed batch, and bad input."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from messages import mentions
from run_files import spec_of

from ortflow.workflow.errors import UserError
from ortflow.workflow.optim.schedule import learning_rate
from ortflow.workflow.run.durations import Duration, parse_duration
from ortflow.workflow.run.pace import Pace, pace_of_run
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.schedules import Schedule

EPOCH, BATCH, LENGTH = 25, 8, 16


def pace(step: int, batch: int = BATCH, sample: int | None = None, epoch: int | None = None) -> Pace:
    """Behind `step` steps; by default all of one batch size."""
    if sample is None or epoch is None:
        epoch, sample = step // EPOCH, step % EPOCH * batch
    return pace_of_run(
        step=step, epoch=epoch, sample=sample, samples=EPOCH * BATCH + 3, steps_per_epoch=EPOCH * BATCH // batch,
        global_batch=batch, tokens_per_sample=LENGTH,
    )  # fmt: skip


def in_units(epochs: int) -> list[str]:
    steps = epochs * EPOCH
    return [f"{epochs} epochs", f"{steps} steps", f"{steps * BATCH} samples", f"{steps * BATCH * LENGTH} tokens"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", ["step", "multi_step", "exponential", "cosine_restarts", "warmup_stable_decay"])
def test_a_schedule_is_the_same_in_every_unit(name: Any, place: int) -> None:
    def schedule(place: int) -> Schedule:
        one, two, three = (in_units(epochs)[place] for epochs in (1, 2, 3))
        keys = {"decay": two} if name == "warmup_stable_decay" else {"every": two}
        if name == "multi_step":
            keys = {"milestones": [two, three]}  # type: ignore[dict-item]
        return Schedule(name=name, warmup=one, **keys)

    total = 8 * EPOCH
    for step in range(1, total + 1):
        rates = [learning_rate(schedule(k), 0.1, step, total, pace=pace(step - 1)) for k in (1, place)]
        assert rates[0] == rates[1], step


def test_pieces_last_in_every_unit() -> None:
    found = []
    for duration in in_units(2):
        pieces = [{"name": "linear", "lasts": duration}, {"name": "constant", "scale": 0.25}]
        schedule = Schedule.model_validate({"pieces": pieces})
        found.append([learning_rate(schedule, 1.0, step, 100, pace=pace(step - 1)) for step in range(1, 101)])
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][:2] == pytest.approx([0.98, 0.96])
    assert (found[0][49], found[0][50]) == (0.0, 0.25)


def test_what_has_passed_stays_passed_when_the_batch_changes() -> None:
    """Two epochs of 25 steps each; then the batch doubles, and an epoch has 12 steps."""
    schedule = Schedule(name="step", every="2 epochs", gamma=0.5)
    assert learning_rate(schedule, 1.0, 50, None, pace=pace(49)) == 1.0
    assert learning_rate(schedule, 1.0, 51, None, pace=pace(50)) == 0.5
    doubled = pace(50, 2 * BATCH, 0, 2)
    assert learning_rate(schedule, 1.0, 51, None, pace=doubled) == 0.5
    assert doubled.steps(Duration(Fraction(3), "epochs")) == 62
    at_four = pace(74, 2 * BATCH, 0, 4)
    assert learning_rate(schedule, 1.0, 75, None, pace=at_four) == 0.25


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("500 steps", 500),
        ("1 step", 1),
        ("0.5 epochs", Fraction(1, 2)),
        ("1_000 samples", 1000),
        ("2e9 tokens", 2 * 10**9),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, amount: Fraction) -> None:
    assert parse_duration(text).amount == amount


@pytest.mark.parametrize("text", ["500", "steps", "0 steps", "1.5 steps", "-1 epochs", "5 weeks", "5steps", ""])
def test_anything_else_is_not(text: str) -> None:
    with pytest.raises(UserError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "step"}, "train.schedule.every … is missing, and step needs it"),
        ({"name": "step", "every": "5 weeks"}, "train.schedule.every … '5 weeks' is not a duration"),
        ({"name": "cosine", "every": "5 steps"}, "train.schedule.every … has no effect on cosine"),
        ({"name": "one_cycle", "warmup_steps": 5}, "train.schedule.warmup_steps … has no effect on one_cycle"),
        ({"warmup_steps": 5, "warmup": "5 steps"}, "warmup_steps … cannot be combined with train.schedule.warmup"),
        ({"warmup": "5000 steps"}, "train.schedule.warmup … is 5000, longer than the run of 100 steps"),
        ({"name": "inverse_sqrt"}, "train.schedule.warmup … is missing"),
        ({"name": "multi_step", "milestones": ["9 steps", "5 steps"]}, "milestones … are not in increasing order"),
        ({"name": "multi_step", "milestones": ["9 steps", "10 epochs"]}, "milestones … are not in increasing order"),
        ({"lasts": "9 steps"}, "train.schedule.lasts … is for a piece"),
        ({"pieces": [{}, {}]}, "train.schedule.pieces.0.lasts … is missing, and another piece follows"),
        ({"name": "cosine", "pieces": [{}]}, "train.schedule.name … is given beside train.schedule.pieces"),
        (
            {"pieces": [{"lasts": "9 steps"}, {"lasts": "9 epochs"}]},
            "train.schedule.pieces … last epochs and steps, and the units must be the same",
        ),
        ({"pieces": [{"name": "reduce_on_plateau"}]}, "train.schedule.pieces.0.name … has no pieces beside it"),
        ({"name": "reduce_on_plateau", "gamma": 2.0}, "train.schedule.gamma … reduces nothing"),
        ({"name": "reduce_on_plateau", "metric": "accuracy"}, "train.schedule.metric … does not compute"),
    ],
)
def test_bad_schedules_are_named(schedule: dict[str, Any], expected: str) -> None:
    spec = spec_of(train={"steps": 100, "optimizer": {"name": "sgd", "lr": 0.1}, "schedule": schedule})
    found = [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in check(spec)]
    assert any(mentions(line, expected) for line in found), found
