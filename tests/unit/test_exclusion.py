"""Which nodes take part in no further attempt, and why."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.attempts.exclusion import blamed, blamed_too_often, excluded
from ortflow.launchers.records import Outcome

PLACES = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
KILLED = Cause(Outcome.FAILURE, -9, "rank 2 was killed by SIGKILL", 2)


def end(cause: str = "rank 2 was killed by SIGKILL", *nodes: str, **more: Any) -> dict[str, Any]:
    return {"event": "end", "attempt": 0, "outcome": "failure", "cause": cause, "blamed": [*nodes], **more}


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (KILLED, ("n2",)),
        (Cause(Outcome.FAILURE, 1, "the program of rank 3 was killed by SIGSEGV", 3, reported=True), ("n2",)),
        (Cause(Outcome.LOST, 1, "node n1 was lost", nodes=("n1",)), ("n1",)),
        (Cause(Outcome.FAILURE, 1, "no progress", hung=True, waited_for=(2,)), ("n2",)),
        (Cause(Outcome.FAILURE, 1, "no progress", hung=True, waited_for=(1, 2)), ()),
        (Cause(Outcome.FAILURE, 1, "ValueError: no such column", 2, reported=True), ()),
        (Cause(Outcome.FAILURE, -9, "rank 2 was killed by SIGKILL (out of memory)", 2), ()),
        (Cause(Outcome.PREEMPTED, 75, "saved and stopped", 2), ()),
        (Cause(Outcome.USER_ERROR, 2, "rank 2 ended with exit code 2", 2), ()),
    ],
)
def test_what_a_node_is_blamed_for(cause: Cause, expected: tuple[str, ...]) -> None:
    assert blamed(cause, PLACES) == expected
    assert blamed(cause, {0: "n1", 1: "n1"}) == (), "one node alone cannot be compared"


def test_a_node_is_excluded_when_two_ends_are_blamed_on_it() -> None:
    assert blamed_too_often(["n2"], KILLED.sentence, []) == {}
    assert blamed_too_often(["n2"], KILLED.sentence, [end("rank 0 was killed by SIGKILL", "n1")]) == {}
    why = blamed_too_often(["n2"], "node n2 was lost", [end("rank 2 was killed by SIGKILL", "n2")])["n2"]
    assert mentions(why, "two attempts … rank 2 was killed by SIGKILL … node n2 was lost")


def test_a_run_that_is_resumed_after_it_gave_up_begins_anew() -> None:
    records = [end("slow", "n2", excludes={"n2": "preflight: it computes at 38%"})]
    assert excluded(records) == {"n2": "preflight: it computes at 38%"}
    records.append({"event": "submit", "new_budget": True})
    assert excluded(records) == {}
    assert blamed_too_often(["n2"], KILLED.sentence, records) == {}
