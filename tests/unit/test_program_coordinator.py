"""What rank 0 decides for all ranks of a program: the check at which all stop, checkpoints, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortflow.workflow.program.agreement import Agreement, Prepare, Verdict
from ortflow.workflow.program.commit import divide
from ortflow.workflow.program.coordinator import ASK_SECONDS, SETTLE, Coordinator
from ortflow.workflow.program.wire import SAVE, STOP

GOOD = {"kind": "ended", "code": 0, "sentence": "", "communication": False}
BAD = {"kind": "ended", "code": 1, "sentence": "a bug", "communication": False}
LOST = {"kind": "ended", "code": 1, "sentence": "connection lost", "communication": True}


def connected(ranks: int) -> Coordinator:
    one = Coordinator(ranks)
    for rank in range(ranks):
        assert one.receive(rank, {"kind": "member", "member": rank, "size": ranks}, 0.0) == []
    return one


def kinds(found: list[tuple[int | None, dict[str, Any]]]) -> list[tuple[int | None, str]]:
    return [(target, message["kind"]) for target, message in found]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.randoms())
def test_all_act_at_the_largest_bound(checks: list[int], order: random.Random) -> None:
    members = range(len(checks))
    agreement = Agreement()
    assert agreement.ask(STOP, "SIGTERM", members) == [Prepare(1, STOP, "SIGTERM")]
    answers = [*members]
    order.shuffle(answers)
    for member in answers[:-1]:
        assert agreement.bound(member, 1, checks[member], members) == []
    assert agreement.bound(answers[-1], 1, checks[answers[-1]], members) == [Verdict(1, STOP, max(checks))]
    # No program has passed the check, and a second request changes nothing.
    assert agreement.ask(STOP, "SIGUSR1", members) == []


def test_a_program_that_has_ended_is_not_waited_for() -> None:
    agreement = Agreement()
    agreement.ask(STOP, "x", [0, 1])
    assert agreement.bound(0, 1, 4, [0, 1]) == []
    assert agreement.left(1, [0]) == [Verdict(1, STOP, 4)]


def test_a_stop_waits_for_the_round_of_a_save() -> None:
    agreement = Agreement()
    assert agreement.ask(SAVE, "period", [0]) == [Prepare(1, SAVE, "period")]
    assert agreement.ask(STOP, "x", [0]) == []
    assert agreement.bound(0, 1, 3, [0]) == [Verdict(1, SAVE, 3), Prepare(2, STOP, "x")]
    assert agreement.bound(0, 1, 9, [0]) == []  # an answer to the old round
    assert agreement.bound(0, 2, 4, [0]) == [Verdict(2, STOP, 4)]


def test_a_stop_before_a_program_connects_is_agreed_when_it_does() -> None:
    one = Coordinator(1)
    assert kinds(one.receive(0, {"kind": "asked", "reason": "x"}, 0.0)) == [(None, "stop")]
    assert kinds(one.receive(0, {"kind": "member", "member": 0, "size": 1}, 0.0)) == [(None, "prepare")]


def test_a_checkpoint_needs_every_rank() -> None:
    one = connected(2)
    assert one.receive(0, {"kind": "begin", "member": 0, "step": 5}, 0.0) == []
    assert kinds(one.receive(1, {"kind": "begin", "member": 1, "step": 5}, 0.0)) == [(0, "make")]
    assert kinds(one.made(5, "/tmp/x", None)) == [(None, "begun")]
    assert one.receive(0, {"kind": "end", "member": 0, "step": 5, "error": None}, 0.0) == []
    assert kinds(one.receive(1, {"kind": "end", "member": 1, "step": 5, "error": None}, 0.0)) == [(0, "list")]
    assert kinds(one.listed({0: ["a"], 1: ["b"]}, "/tmp/x")) == [(0, "hash"), (1, "hash")]
    record = {"name": "a", "size": 1, "hash": "h"}
    assert one.receive(0, {"kind": "hashed", "step": 5, "records": [record]}, 0.0) == []
    ((_, finish),) = one.receive(1, {"kind": "hashed", "step": 5, "records": [record]}, 0.0)
    assert (finish["kind"], len(finish["records"])) == ("finish", 2)
    ((target, done),) = one.closed("/c/step-5", None)
    assert (target, done["path"], done["error"]) == (None, "/c/step-5", None)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"kind": "begin", "member": 1, "step": 6}, "different steps, 5 and 6"),
        ({"kind": "left", "member": 1}, "rank 1 has ended before it was saved"),
    ],
)
def test_nothing_is_committed_if_ranks_differ(event: dict[str, Any], reason: str) -> None:
    one = connected(2)
    one.receive(0, {"kind": "begin", "member": 0, "step": 5}, 0.0)
    found = one.receive(1, event, 0.0)
    assert (0, "abandon") in kinds(found)
    errors = [message["error"] for _, message in found if message["kind"] == "begun"]
    assert errors
    assert all(reason in error for error in errors)
    assert one.commit is None


def test_a_rank_that_does_not_ask_is_named() -> None:
    one = connected(3)
    one.receive(0, {"kind": "begin", "member": 0, "step": 5}, 10.0)
    assert one.tick(10.0 + ASK_SECONDS - 1) == []
    messages = [message for _, message in one.tick(10.0 + ASK_SECONDS)]
    assert any("ranks 1, 2 have not asked for it" in str(message.get("error")) for message in messages)


def test_an_error_of_one_rank_abandons_the_checkpoint() -> None:
    one = connected(1)
    one.receive(0, {"kind": "begin", "member": 0, "step": 5}, 0.0)
    one.made(5, "/tmp/x", None)
    found = one.receive(0, {"kind": "end", "member": 0, "step": 5, "error": "rank 0: no paper"}, 0.0)
    assert kinds(found)[0] == (0, "abandon")
    assert found[-1][1]["error"] == "rank 0: no paper"


def test_all_ranks_end_together() -> None:
    one = Coordinator(2)
    assert one.receive(1, GOOD, 0.0) == []
    ((target, over),) = one.receive(0, {**GOOD, "code": 75}, 1.0)
    assert (target, over["kind"], over["code"]) == (None, "over", 75)


def test_the_failure_that_came_first_is_the_cause() -> None:
    one = Coordinator(2)
    ((_, failed),) = one.receive(1, BAD, 0.0)
    assert (failed["kind"], failed["rank"]) == ("failed", 1)
    assert one.receive(0, LOST, 0.1) == []


def test_a_lost_connection_waits_for_its_cause() -> None:
    one = Coordinator(3)
    assert one.receive(0, LOST, 0.0) == []
    assert one.tick(SETTLE / 2) == []
    ((_, failed),) = one.receive(2, BAD, SETTLE / 2)
    assert (failed["rank"], failed["sentence"]) == (2, "a bug")
    one = Coordinator(3)
    assert one.receive(0, LOST, 0.0) == []
    ((_, failed),) = one.tick(SETTLE)
    assert failed["rank"] == 0


def test_a_rank_whose_process_is_gone_ends_all() -> None:
    one = connected(2)
    assert [(message["kind"], message["rank"]) for _, message in one.lost(1, 0.0)] == [("failed", 1)]
    one = connected(2)
    one.receive(1, GOOD, 0.0)
    assert one.lost(1, 0.0) == []


def test_files_are_divided_by_size() -> None:
    shares = divide({f"{n}": n for n in range(100)}, range(4))
    loads = [sum(int(name) for name in names) for names in shares.values()]
    assert sorted(name for names in shares.values() for name in names) == sorted(map(str, range(100)))
    assert max(loads) - min(loads) <= 100
    assert divide({"a": 1}, [0, 1]) == {0: ["a"]}
