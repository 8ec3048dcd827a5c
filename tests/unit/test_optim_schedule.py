"""Each schedule against its formula, and at the ends of its phases."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest

from ortflow.workflow.optim.schedule import learning_rate
from ortflow.workflow.spec.schedules import Schedule

Name = Literal["constant", "linear", "polynomial", "cosine"]
NAMES: tuple[Name, ...] = ("constant", "linear", "polynomial", "cosine")
names = pytest.mark.parametrize("name", NAMES)


def expected(name: str, peak: float, final: float, power: float, warmup: int, total: int) -> list[float]:
    """Rates of steps 1 to total, from curves instead of the formulae."""
    steps = np.arange(1, total + 1)
    decay = np.linspace(0, 1, total - warmup + 1)
    curve = {
        "constant": np.full_like(decay, peak),
        "linear": peak + decay * (final * peak - peak),
        "polynomial": (peak - final * peak) * np.power(1 - decay, power) + final * peak,
        "cosine": final * peak + (peak - final * peak) * np.square(np.cos(decay * math.pi / 2)),
    }[name]
    return list(np.where(steps <= warmup, peak * steps / max(warmup, 1), curve[np.maximum(steps - warmup, 0)]))


@names
@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_every_step_has_the_rate_of_its_curve(name: Name, warmup: int, final: float) -> None:
    schedule = Schedule(name=name, warmup_steps=warmup, final_fraction=final, power=1.7)
    got = [learning_rate(schedule, 3e-4, step, 40) for step in range(1, 41)]
    assert got == pytest.approx(expected(name, 3e-4, final, 1.7, warmup, 40), rel=1e-12, abs=1e-18)


@names
def test_the_warm_up_ends_at_the_peak_and_the_run_at_the_final_fraction(name: Name) -> None:
    schedule = Schedule(name=name, warmup_steps=10, final_fraction=0.25)
    assert learning_rate(schedule, 2.0, 10, 100) == 2.0
    assert learning_rate(schedule, 2.0, 100, 100) == (2.0 if name == "constant" else 0.5)
    assert learning_rate(schedule, 2.0, 1000, 100) == learning_rate(schedule, 2.0, 100, 100)


@names
def test_a_warm_up_longer_than_the_run_never_leaves_it(name: Name) -> None:
    schedule = Schedule(name=name, warmup_steps=100)
    assert [learning_rate(schedule, 1.0, step, 20) for step in (1, 20)] == [0.01, 0.2]


@names
def test_a_warm_up_as_long_as_the_run_ends_at_the_peak(name: Name) -> None:
    schedule = Schedule(name=name, warmup_steps=20)
    assert learning_rate(schedule, 1.0, 20, 20) == 1.0
    assert learning_rate(schedule, 1.0, 21, 20) == (1.0 if name == "constant" else 0.0)


def test_a_constant_rate_needs_no_number_of_steps_and_no_other_schedule_goes_without() -> None:
    assert learning_rate(Schedule(), 0.5, 10**6, None) == 0.5
    with pytest.raises(ValueError, match="cosine"):
        learning_rate(Schedule(name="cosine"), 0.5, 1, None)
