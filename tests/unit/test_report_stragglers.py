"""The rank that the others wait for, and why."""

from __future__ import annotations

import pytest

from ortflow.launchers.report.stragglers import StepTimes, step_times, straggler


def ranks(*rows: tuple[float, float]) -> list[StepTimes]:
    """Ranks of a step of one second, from their seconds in calls and of waiting for data."""
    return [StepTimes(rank, 1.0, comm, data) for rank, (comm, data) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0.5, 0.0), (0.5, 0.0), (0.1, 0.0)], (2, "compute")),
        ([(0.5, 0.0), (0.1, 0.4), (0.5, 0.0)], (1, "data")),
        ([(0.5, 0.0), (0.1, 0.1), (0.5, 0.0)], (1, "compute")),
        ([(0.5, 0.0), (0.45, 0.0), (0.5, 0.0)], None),
        ([(0.1, 0.9)], None),
        ([], None),
    ],
)
def test_a_straggler(rows: list[tuple[float, float]], expected: tuple[int, str] | None) -> None:
    found = straggler(ranks(*rows))
    assert (None if found is None else (found.rank, found.cause)) == expected


def test_a_rank_that_is_held_up_between_its_steps() -> None:
    times = [StepTimes(0, 1.0, 0.5, 0.0), StepTimes(1, 0.6, 0.1, 0.0)]
    found = straggler(times)
    assert found is not None
    assert (found.rank, found.cause) == (1, "between steps")
    assert found.seconds == pytest.approx(0.4)
    assert "held up between its steps" in found.sentence()


def test_averages_leave_the_first_step_out_and_need_a_few() -> None:
    seconds = {step: 9.0 if step == 1 else 1.0 for step in range(1, 8)}
    comm = dict.fromkeys(range(1, 8), 0.25)
    found = step_times(3, seconds, comm, {})
    assert found == StepTimes(3, 1.0, 0.25, 0.0)
    assert found.compute == 0.75
    assert step_times(3, {1: 1.0}, {1: 1.0}, {}) is None
    assert step_times(3, seconds, {}, {}) is None
