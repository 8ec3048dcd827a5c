"""Wall time by cause: the parts add up, whatever the records say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortflow.launchers.report.accounting import Account, account
from ortflow.launchers.report.causes import LABELS, MEANINGS, Cause
from ortflow.launchers.report.restarts import restarts
from ortflow.launchers.report.timeline import MICRO


def event(kind: str, time: float, attempt: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "attempt": attempt, "rank": 0, **fields}


SUBMIT = {"event": "submit", "time": 100.0, "launcher": "local"}
TWO_ATTEMPTS = [
    SUBMIT,
    {"event": "start", "time": 110.0, "attempt": 0, "world_size": 2},
    {"event": "end", "time": 150.0, "attempt": 0, "outcome": "failure", "cause": "rank 1 was killed", "rank": 1,
     "next": "restart"},
    {"event": "start", "time": 155.0, "attempt": 1, "world_size": 2},
    {"event": "end", "time": 200.0, "attempt": 1, "outcome": "finished", "next": "stop"},
]  # fmt: skip
EVENTS = [
    event("attempt_start", 112.0),
    event("phase_start", 112.0, phase="configure"),
    event("phase_end", 117.0, phase="configure", seconds=5.0),
    event("phase_start", 117.0, phase="train"),
    event("step", 121.0, step=1, seconds=4.0, data_seconds=1.0),
    event("step", 125.0, step=2, seconds=4.0, data_seconds=0.5),
    event("checkpoint_start", 126.0, step=2),
    event("checkpoint", 128.0, step=2, seconds=2.0, stall_seconds=0.25),
    event("attempt_start", 156.0, 1),
    event("phase_start", 156.0, 1, phase="runtime"),
    event("rewind", 159.0, 1, from_step=4, to_step=2, seconds=8.0, spans=[[0, 128.0, 140.0]]),
    event("resume", 160.0, 1, step=2, seconds=3.0),
    event("phase_end", 161.0, 1, phase="runtime", seconds=5.0),
    event("phase_start", 161.0, 1, phase="train"),
    event("step", 165.0, 1, step=3, seconds=4.0),
    event("evaluation", 170.0, 1, step=3, seconds=5.0),
    event("phase_end", 170.0, 1, phase="train", seconds=9.0),
    event("phase_start", 170.0, 1, phase="export"),
    event("phase_end", 180.0, 1, phase="export", seconds=10.0),
    event("finished", 180.0, 1, step=3),
]


def seconds(found: Account) -> dict[str, float]:
    return {cause.value: found.totals[cause] / MICRO for cause in Cause if found.totals[cause]}


def adds_up(found: Account) -> None:
    assert sum(found.totals.values()) == found.wall
    assert all(value >= 0 for value in found.totals.values())
    assert all(segment.start < segment.end for segment in found.segments)
    gaps = sum(b.start - a.end for a, b in zip(found.segments, found.segments[1:], strict=False))
    assert gaps <= found.stopped


def test_each_second_of_a_killed_run_has_its_cause() -> None:
    found = account(TWO_ATTEMPTS, EVENTS, now=1000.0, alive=False)
    adds_up(found)
    assert seconds(found) == {
        "step": 12.0 - 1.5,
        "data_wait": 1.5,
        "save": 3.0,
        "compile": 5.0,
        "start": 2.0 + 1.0 + 1.0 + 1.0,  # two starts of processes, and the rest of `runtime`
        "restore": 3.0,
        "evaluation": 5.0,
        "lost": 12.0,
        "recovery": 10.0 + 5.0,
        "queue": 10.0,
        "export": 10.0,
        "other": 20.0,
    }
    (restart,) = restarts(found, TWO_ATTEMPTS, EVENTS, lambda rank, attempt: f"n{rank}", (3, None))
    assert (restart.node, restart.failures, restart.failures_left, restart.preemptions_left) == ("n1", 1, 2, None)
    assert (restart.steps_lost, restart.seconds_lost, restart.seconds_to_first_step) == (2, 12.0, 15.0)


def test_the_end_of_a_run_is_no_restart() -> None:
    def attempts_of(records: list[dict[str, Any]]) -> list[int]:
        run_account = account(records, EVENTS, now=1000.0, alive=False)
        return [
            restart.attempt for restart in restarts(run_account, records, EVENTS, lambda rank, number: None, (3, 3))
        ]

    end = {"event": "end", "time": 300.0, "attempt": 1, "outcome": "failure", "cause": "killed", "next": "stop"}
    failed = [*TWO_ATTEMPTS[:4], end]
    assert attempts_of(failed) == [0]
    resumed = [*failed, {"event": "submit", "time": 310.0}, {"event": "start", "time": 320.0, "attempt": 2}]
    assert attempts_of(resumed) == [0, 1]
    assert attempts_of([*TWO_ATTEMPTS[:4], {**end, "next": "restart"}]) == [0, 1], "it waits for its next attempt"


def test_the_wait_for_data_is_that_of_the_slowest_rank() -> None:
    found = account(TWO_ATTEMPTS, EVENTS, now=1000.0, alive=False, waits={0: 2 * MICRO, 1: 0})
    adds_up(found)
    assert seconds(found)["data_wait"] == 3.5


def test_a_run_that_runs_counts_until_now() -> None:
    found = account(TWO_ATTEMPTS[:2], EVENTS[:6], now=130.0, alive=True)
    adds_up(found)
    assert found.wall == 30 * MICRO
    assert seconds(found)["step"] == 13.0 - 1.5  # the third step is under way


def test_steps_that_a_dead_attempt_did_not_save_are_lost() -> None:
    events = [*EVENTS[:8], event("step", 134.0, step=3, seconds=6.0)]
    found = account(TWO_ATTEMPTS[:3], events, now=153.0, alive=True)
    adds_up(found)
    assert seconds(found)["lost"] == 6.0
    assert seconds(found)["recovery"] == 153.0 - 134.0
    assert (
        account(TWO_ATTEMPTS[:2], events, now=150.0, alive=True).totals[Cause.LOST] == 0
    )  # it runs, and may save them


def test_a_run_that_was_stopped_until_somebody_resumed_it_does_not_count() -> None:
    records = [
        *TWO_ATTEMPTS[:2],
        {"event": "end", "time": 150.0, "attempt": 0, "outcome": "failure", "next": "stop"},
        {"event": "submit", "time": 500.0},
        {"event": "start", "time": 510.0, "attempt": 1},
        {"event": "end", "time": 600.0, "attempt": 1, "outcome": "finished", "next": "stop"},
    ]
    found = account(records, [], now=9000.0, alive=False)
    adds_up(found)
    assert (found.stopped, found.wall) == (350 * MICRO, 150 * MICRO)
    assert seconds(found)["queue"] == 20.0


def program(*events: dict[str, Any]) -> Account:
    found = account(
        TWO_ATTEMPTS[:2],
        [
            event("attempt_start", 112.0),
            event("phase_start", 113.0, phase="train"),
            event("program_start", 113.0),
            *events,
        ],
        now=140.0,
        alive=True,
    )
    adds_up(found)
    return found


def test_the_time_between_the_lines_of_a_program_is_its_steps() -> None:
    found = program(
        event("step", 120.0, step=1, seconds=8.0),
        event("step", 124.0, step=2, seconds=1.0),
        event("checkpoint_start", 125.0, step=2),
        event("checkpoint", 128.0, step=2, seconds=3.0, stall_seconds=3.0),
        event("step", 130.0, step=3, seconds=5.0),
    )
    # The save's own wait is counted once.
    assert seconds(found) == {"queue": 10.0, "start": 10.0, "step": 4.0 + 2.0 + 10.0, "save": 4.0}


def test_a_wait_for_a_save_within_a_step_is_moved_from_the_step() -> None:
    events = [
        *EVENTS[:6],
        event("checkpoint_start", 125.5, step=2),
        event("step", 129.5, step=3, seconds=4.0),
        event("checkpoint", 130.0, step=2, seconds=4.5, stall_seconds=1.5),
    ]
    found = account(TWO_ATTEMPTS[:2], events, now=130.0, alive=True)
    adds_up(found)
    # Between the steps 0.5 s, then 0.5 s up to the commit; of the stall, what these do not explain was within step 3.
    assert seconds(found)["save"] == pytest.approx(0.5 + 0.5 + 1.5 - 0.5)


def test_of_a_program_that_logs_nothing_the_goodput_is_unknown() -> None:
    found = program()
    assert seconds(found) == {"queue": 10.0, "start": 3.0, "other": 27.0}
    assert found.goodput is None
    assert "logs no steps" in found.notes[0]


def test_clocks_of_nodes_may_differ() -> None:
    for ahead in (-3600.0, 3600.0):
        events = [{**one, "time": one["time"] + ahead} for one in EVENTS]
        found = account(TWO_ATTEMPTS, events, now=1000.0, alive=False)
        adds_up(found)
        assert seconds(found)["compile"] == 5.0
        assert found.totals[Cause.STEP] == 10.5 * MICRO
        assert any("clock" in note for note in found.notes)


def test_without_events_or_records_there_is_no_error() -> None:
    adds_up(account(TWO_ATTEMPTS, [], now=1000.0, alive=False))
    nothing = account([], [], now=1000.0, alive=False)
    assert (nothing.wall, nothing.goodput) == (0, None)
    waiting = account([SUBMIT], [], now=130.0, alive=True)
    assert (waiting.wall, seconds(waiting)) == (30 * MICRO, {"queue": 30.0})


def test_every_cause_has_a_name_and_a_meaning() -> None:
    assert set(LABELS) == set(MEANINGS) == set(Cause)


TIMES = st.floats(0, 2000, allow_nan=False)
KINDS = st.sampled_from(
    ["attempt_start", "step", "evaluation", "checkpoint_start", "checkpoint", "checkpoint_failed", "rewind", "resume",
     "phase_start", "phase_end", "finished", "preempted", "failure", "program_start", "warning"]
)  # fmt: skip
PHASES = st.sampled_from(["configure", "runtime", "shard", "check", "train", "checkpoint", "monitor", "export", "?"])


@st.composite
def streams(draw: st.DrawFn, sorted_times: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records and events, in an order that supervisors and ranks may write."""
    attempts = draw(st.integers(0, 4))
    marks = draw(st.lists(TIMES, min_size=2 * attempts + 1, max_size=2 * attempts + 1))
    marks = sorted(marks) if sorted_times else marks
    records: list[dict[str, Any]] = [{"event": "submit", "time": marks[0]}]
    events: list[dict[str, Any]] = []
    for number in range(attempts):
        begun, ended = marks[2 * number + 1 : 2 * number + 3]
        records.append({"event": "start", "time": begun, "attempt": number})
        times = draw(st.lists(TIMES, max_size=12))
        for time in sorted(times) if sorted_times else times:
            spans = draw(st.lists(st.tuples(st.integers(0, 3), TIMES, TIMES).map(list), max_size=2))
            events.append(
                event(
                    draw(KINDS), time, number, step=draw(st.integers(0, 9)), phase=draw(PHASES), spans=spans,
                    from_step=5, to_step=2, seconds=draw(st.one_of(st.none(), TIMES)), data_seconds=draw(TIMES),
                    stall_seconds=draw(TIMES), saved=draw(st.booleans()),
                )
            )  # fmt: skip
        if draw(st.booleans()):
            outcome = draw(st.sampled_from(["failure", "preempted", "lost", "finished"]))
            after = draw(st.sampled_from(["restart", "stop"]))
            records.append({"event": "end", "time": ended, "attempt": number, "outcome": outcome, "next": after})
            if after == "stop" and draw(st.booleans()):
                records.append({"event": "submit", "time": ended + draw(st.floats(0, 50))})
    return records, events


@pytest.mark.parametrize("sorted_times", [True, False])
@settings(max_examples=50, deadline=None)
@given(data=st.data(), alive=st.booleans(), now=TIMES)
def test_the_parts_add_up_for_any_records(sorted_times: bool, data: st.DataObject, alive: bool, now: float) -> None:
    records, events = data.draw(streams(sorted_times))
    found = account(records, events, now=now, alive=alive)
    adds_up(found)
    restarts(found, records, events, lambda rank, attempt: None, (None, None))
