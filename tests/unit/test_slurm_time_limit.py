"""When a run in a Slurm job saves ahead of the time limit, also if the limit is changed."""

from __future__ import annotations

from ortflow.launchers.batch.stopping import Limit


def moment(limit: Limit, since: float) -> float:
    """The second after `since` in which the run must exit."""
    return next(since + second for second in range(10_000) if limit.near(since + second))


def test_ahead_of_a_long_limit() -> None:
    limit = Limit(90)
    limit.take(3600, now=1000)
    assert moment(limit, 1000) == 1000 + 3600 - 90
    limit.take(1800, now=2801)  # unchanged, up to Slurm's rounding
    assert moment(limit, 2801) == 1000 + 3600 - 90


def test_half_of_a_short_time_limit_is_for_training() -> None:
    limit = Limit(90)
    limit.take(60, now=0)
    assert moment(limit, 0) == 30
    for second in (10, 20, 29):
        limit.take(60 - second, now=second)
    assert moment(limit, 0) == 30, "reading the clock changes nothing"


def test_a_limit_that_is_cut_or_raised() -> None:
    limit = Limit(90)
    limit.take(3600, now=0)
    limit.take(60, now=600)
    assert moment(limit, 600) == 630
    limit.take(7200, now=620)
    assert moment(limit, 620) == 620 + 7200 - 90


def test_no_limit_and_no_answer() -> None:
    limit = Limit(90)
    assert not limit.near(1e9)
    assert not limit.warns(1e9)
    limit.take(600, now=0)
    limit.take(None, now=100)
    assert moment(limit, 100) == 510, "a controller that is away changes nothing"


def test_slurms_signal_comes_up_to_a_minute_early() -> None:
    limit = Limit(90)
    limit.take(3600, now=0)
    assert limit.warns(3600 - 90 - 60)
    assert not limit.warns(3600 - 90 - 120), "that one was sent by hand"
