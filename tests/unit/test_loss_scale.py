"""The loss scale: its rule, its place in a checkpoint, and steps that overflow."""

from __future__ import annotations

import math

import pytest

from ortflow.workflow.progress import Progress
from ortflow.workflow.trainer.loss_scale import LARGEST, PERIOD, SMALLEST, START, LossScale, loss_scale_of


def through(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step: x overflows, a dot does not."""
    found = []
    for each in overflows:
        scale = scale.after(each == "x")
        found.append(scale.value)
    return found


def test_overflows_halve_it_down_to_one() -> None:
    assert through(LossScale(), "xx.x") == [32768, 16384, 16384, 8192]
    assert through(LossScale(4.0), "xxxxx") == [2, 1, 1, 1, 1]
    assert LossScale(2.0).can_fall
    assert not LossScale(SMALLEST).can_fall


def test_it_is_doubled_behind_so_many_good_steps_in_a_row() -> None:
    assert through(LossScale(), "." * (PERIOD - 1))[-1] == START
    assert through(LossScale(), "." * PERIOD)[-1] == 2 * START
    assert through(LossScale(), "." * (PERIOD - 1) + "x" + "." * (PERIOD - 1))[-1] == START / 2
    assert through(LossScale(), "." * (PERIOD - 1) + "x" + "." * PERIOD)[-1] == START
    assert through(LossScale(LARGEST), "." * PERIOD)[-1] == LARGEST


def test_a_scale_that_is_given_stays() -> None:
    given = loss_scale_of(1000)
    assert through(given, "x.x") == [1000] * 3
    assert not given.can_fall
    assert given.numbers() == {}
    assert given.restored({"loss_scale": 4.0}) == given


def test_a_checkpoint_brings_it_back_to_the_bit() -> None:
    scale = loss_scale_of("dynamic")
    for step in range(3 * PERIOD):
        if step % 701 == 0:
            progress = Progress(trainer=dict(scale.numbers()))
            kept = Progress.from_json(progress.to_json()).trainer
            assert LossScale().restored(kept) == scale
        scale = scale.after(step in (5, 6, PERIOD))


def test_a_checkpoint_without_one_starts_from_the_default() -> None:
    assert LossScale(4.0).restored(Progress.from_json({"step": 1, "updates": 1, "epoch": 0, "sample": 8}).trainer) == (
        LossScale(4.0)
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"loss_scale": 0.0},
        {"loss_scale": math.nan},
        {"loss_scale": math.inf},
        {"loss_scale": -2.0},
        {"loss_scale": 2.0**25},
        {"loss_scale": 2.0, "loss_scale_good_steps": -1},
        {"loss_scale": 2.0, "loss_scale_good_steps": 0.5},
        {"loss_scale": 2.0, "loss_scale_good_steps": PERIOD},
        {"loss_scale": 2.0, "loss_scale_good_steps": math.nan},
    ],
    ids=str,
)
def test_numbers_that_no_run_keeps_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss_scale"):
        LossScale().restored(numbers)


@pytest.mark.parametrize("kept", [[1.0], {"loss_scale": "2"}, {"loss_scale": True}, None], ids=str)
def test_a_manifest_with_other_than_numbers_is_refused(kept: object) -> None:
    record = {"step": 1, "updates": 1, "epoch": 0, "sample": 8, "trainer": kept}
    with pytest.raises(ValueError, match=r"progress\.trainer"):
        Progress.from_json(record)
