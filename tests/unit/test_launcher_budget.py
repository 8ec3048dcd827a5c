"""Budgets, back-off and states: pure functions over attempts.jsonl."""

from __future__ import annotations

import pytest
from messages import mentions

from ortflow.launchers.budget import MOST_WITHOUT_STEP, decide, pause
from ortflow.launchers.records import (
    Outcome,
    State,
    Used,
    attempts_without_step,
    next_attempt,
    open_attempt,
    state,
    used,
)
from ortflow.workflow.spec.restart import Backoff, Restart

SUBMIT = {"event": "submit", "launcher": "local", "new_budget": False}
RENEW = {**SUBMIT, "new_budget": True}


def start(attempt: int) -> dict:
    return {"event": "start", "attempt": attempt}


def end(attempt: int, outcome: str, following: str = "restart", asked: str | None = None) -> dict:
    return {"event": "end", "attempt": attempt, "outcome": outcome, "next": following, "asked": asked}


def test_pause_doubles_up_to_the_limit() -> None:
    backoff = Backoff(first=1.0, limit=10.0)
    assert [pause(backoff, failures) for failures in (1, 2, 3, 4, 5, 5000)] == [1, 2, 4, 8, 10, 10]


def test_a_pause_has_a_limit_that_no_number_of_failures_overflows() -> None:
    assert pause(Backoff(first=1.0, limit=1e30), 61) == 2.0**60
    assert pause(Backoff(first=1.0, limit=1e30), 62) == 2.0**60


@pytest.mark.parametrize(
    ("outcome", "counted", "again", "seconds"),
    [
        (Outcome.FINISHED, Used(), False, 0),
        (Outcome.USER_ERROR, Used(), False, 0),
        (Outcome.FAILURE, Used(failures=1), True, 1),
        (Outcome.FAILURE, Used(failures=2), True, 2),
        (Outcome.FAILURE, Used(failures=3), False, 0),
        (Outcome.PREEMPTED, Used(failures=3, preemptions=1), True, 1),
        (Outcome.PREEMPTED, Used(preemptions=2), False, 0),
    ],
)
def test_decisions(outcome, counted, again, seconds) -> None:
    restart = Restart(failures=2, preemptions=1, backoff=Backoff(first=1.0, limit=60.0))
    found = decide(outcome, counted, restart)
    assert (found.again, found.pause) == (again, seconds)
    assert found.reason


def test_preemptions_have_no_limit_unless_given() -> None:
    assert decide(Outcome.PREEMPTED, Used(preemptions=1000), Restart()).again


def test_budgets_span_launchers_and_end_with_a_renewal() -> None:
    records = [SUBMIT, start(0), end(0, "failure"), start(1), end(1, "preempted"), SUBMIT, start(2), end(2, "lost")]
    assert used(records) == Used(failures=1, preemptions=1)
    assert used([*records, start(3), end(3, "failure")]) == Used(failures=2, preemptions=1)
    assert used([*records, RENEW]) == Used()
    assert used([SUBMIT, start(0), end(0, "preempted", "stop", asked="interrupt")]) == Used()


def test_attempt_numbers_never_repeat() -> None:
    assert next_attempt([]) == 0
    assert next_attempt([SUBMIT, start(0), end(0, "failure"), RENEW]) == 1
    assert open_attempt([SUBMIT, start(0)]) == 0
    assert open_attempt([SUBMIT, start(0), SUBMIT]) == 0
    assert open_attempt([SUBMIT, start(0), end(0, "failure"), SUBMIT]) is None


@pytest.mark.parametrize(
    ("records", "alive", "expected"),
    [
        ([], True, State.PENDING),
        ([], False, State.LOST),
        ([SUBMIT], True, State.PENDING),
        ([SUBMIT, start(0)], True, State.RUNNING),
        ([SUBMIT, start(0)], False, State.LOST),
        ([SUBMIT, start(0), end(0, "failure")], True, State.RESTARTING),
        ([SUBMIT, start(0), end(0, "failure")], False, State.LOST),
        ([SUBMIT, start(0), end(0, "failure", "stop")], False, State.FAILED),
        ([SUBMIT, start(0), end(0, "failure", "stop"), SUBMIT], True, State.PENDING),
        ([SUBMIT, start(0), end(0, "user_error", "stop")], True, State.FAILED),
        ([SUBMIT, start(0), end(0, "finished", "stop")], False, State.FINISHED),
        ([SUBMIT, start(0), end(0, "finished", "stop", "cancel")], False, State.FINISHED),
        ([SUBMIT, start(0), end(0, "preempted", "stop", "interrupt")], False, State.STOPPED),
        ([SUBMIT, start(0), end(0, "preempted", "stop", "cancel")], False, State.CANCELLED),
        (
            [SUBMIT, start(0), end(0, "failure"), {"event": "stop", "outcome": "preempted", "asked": "SIGTERM"}],
            False,
            State.PREEMPTED,
        ),
    ],
)
def test_states(records, alive, expected) -> None:
    assert state(records, alive) is expected


def test_attempts_without_a_step_end_a_run_that_is_always_preempted() -> None:
    ends = [{"event": "end", "outcome": "preempted", "next": "restart", "step": step} for step in (4, 9, 9, 9, 9, 9, 9)]
    assert attempts_without_step(ends[:2]) == 0
    assert attempts_without_step(ends[:3]) == 1
    assert decide(Outcome.PREEMPTED, Used(), Restart(), attempts_without_step(ends[:6])).again
    spent = decide(Outcome.PREEMPTED, Used(), Restart(), attempts_without_step(ends))
    assert not spent.again
    assert "5 attempts in a row" in spent.reason
    renewed = [*ends, {"event": "submit", "new_budget": True}, ends[-1]]
    assert attempts_without_step(renewed) == 0


def test_a_time_limit_is_not_a_preemption() -> None:
    ends = [{**end(number, "preempted"), "counts": False} for number in range(3)]
    assert used([SUBMIT, *ends]) == Used()
    found = decide(Outcome.PREEMPTED, Used(preemptions=5), Restart(preemptions=1), counts=False)
    assert (found.again, found.reason) == (True, "that counts against no budget")
    assert not decide(Outcome.PREEMPTED, Used(), Restart(), MOST_WITHOUT_STEP, counts=False).again


def test_a_full_disk_costs_no_failure_and_has_a_limit() -> None:
    ends = [{**end(number, "failure"), "counts": False, "step": 7} for number in range(MOST_WITHOUT_STEP + 1)]
    assert used([SUBMIT, *ends, end(9, "failure")]) == Used(failures=1)
    found = decide(Outcome.FAILURE, Used(), Restart(failures=0), attempts_without_step(ends[:-1]), counts=False)
    assert (found.again, found.reason) == (True, "that counts against no budget")
    last = decide(Outcome.FAILURE, Used(), Restart(), attempts_without_step(ends), counts=False)
    assert not last.again
    assert mentions(last.reason, "5 attempts")
    assert decide(Outcome.FAILURE, Used(failures=1), Restart(), MOST_WITHOUT_STEP).again, "a failure has its own budget"
